"""The extras of this phase, which the core does without: each module or folder is one capability."""
