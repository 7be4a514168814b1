"""What a server asks of an engine and is answered: plain values, and who answers. Without torch."""
