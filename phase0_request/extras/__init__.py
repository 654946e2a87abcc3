"""A capability that the core of this phase does not need: the tokenizers in GGUF files."""
