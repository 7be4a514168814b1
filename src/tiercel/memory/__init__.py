"""Where the bytes are: layouts, host memory, device and host buffers. Places have no owners here."""
