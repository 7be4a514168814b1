"""DeepSeek V4: the model, on pages and private rings."""
