"""What the core of this phase does without: each module or folder is one capability."""
