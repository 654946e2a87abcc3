"""What the core of this phase does without: each module is one capability."""
