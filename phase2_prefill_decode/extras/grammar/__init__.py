"""Masks of the tokens a request may draw: compiled grammars, lists of tokens, and the kernels that apply masks."""
