"""Text to tokens and back, for the tokenizer and the chat format of one model folder."""
