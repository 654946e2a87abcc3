"""Extras: parts of the server that can be removed. An extra imports the core, and no other extra."""
