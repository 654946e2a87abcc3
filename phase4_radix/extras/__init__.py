"""What the core of this phase does without: hashes of cached blocks, for others to read."""
