"""What a server asks of an engine and what it gets back: plain values, without torch."""
