"""Capabilities that the core of this phase does not need, one per module."""
