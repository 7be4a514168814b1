"""Where the bytes are: layouts, host memory, device and host buffers. Who owns a place is not known here."""
