"""GGUF files: their configuration, and their tensors by name."""
