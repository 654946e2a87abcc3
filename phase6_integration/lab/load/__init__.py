"""A load generator for any OpenAI-style server: what to ask, how to ask it cheaply, and what came of it.

The cost of asking counts, for on a small machine it is taken from the server: a connection is a protocol over
httptools, msgspec decodes of an event the few fields that matter, and nothing is kept of its text.
"""
