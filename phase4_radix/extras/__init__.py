"""Extras of this phase, which its core does without: names of cached blocks that other processes understand."""
