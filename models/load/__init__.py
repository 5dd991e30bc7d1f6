"""Checkpoints: safetensors and GGUF files, their configurations, and the default model."""
