"""Masks of what a request may draw: compiled grammars, lists of tokens, and the kernels that apply masks."""
