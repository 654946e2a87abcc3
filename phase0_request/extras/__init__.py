"""What the core of this phase does without: the tokenizers in GGUF files."""
