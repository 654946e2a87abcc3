"""The HTTP server: an OpenAI-style API over an AsyncEngine."""
