"""The HTTP server: OpenAI's API and the native calls of this field."""
