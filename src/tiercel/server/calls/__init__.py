"""The calls for answers: OpenAI's, Anthropic's, SGLang's, and what they share."""
