"""The HTTP front: an OpenAI-style server over an AsyncEngine."""
