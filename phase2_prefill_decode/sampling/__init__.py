"""Sampling: the next token of each request, from the logits of its last token.

processors  what a request may ask for besides a draw: edits of the logits before it, results collected after it
sampler     Sampler: the parameters of the draws, the work of processors, and the draw
"""
