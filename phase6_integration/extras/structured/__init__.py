"""Structured output: which grammar a request asks for, whether it can be followed, and the processes that follow it."""
