"""Attention for steps that mix decodes, chunks and whole prompts.

attention      the operation, three ways
plan           which kernel serves which sequence, and in which pieces
ragged_triton  the kernel for chunks and prompts, and the launch of a whole step
"""
