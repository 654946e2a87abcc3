"""The Triton kernels and their launchers."""
