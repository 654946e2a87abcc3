"""Extras: parts of the server that can be taken off. An extra imports the core, and no other extra."""
