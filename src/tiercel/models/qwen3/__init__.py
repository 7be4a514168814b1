"""Qwen3, dense: `Qwen3ForCausalLM`."""
