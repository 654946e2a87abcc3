"""Attention for steps that mix decodes, chunks and whole prompts, as Triton kernels."""
