"""What the core of this phase does without: the store kernel of a CPU."""
