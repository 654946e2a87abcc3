"""The OpenAI-style API over an AsyncEngine: what every server needs to answer a chat and a completion."""
