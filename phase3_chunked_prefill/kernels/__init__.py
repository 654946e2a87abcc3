"""Attention for steps that mix decodes, chunks and whole prompts.

attention      the operation, with this phase's Triton implementation
plan           assigns each sequence to a kernel and cuts chunks and prompts into blocks
triton         the kernel for chunks and prompts, and the launch of a step
"""
