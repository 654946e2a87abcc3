"""Structured output: the grammar that a request asks for, whether it can be followed, and the process that follows
it."""
