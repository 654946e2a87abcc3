"""Helpers of commands beside the server: checks of the machine, and the progress of compiling kernels."""
