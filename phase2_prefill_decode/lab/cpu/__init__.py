"""Kernels of a CPU, measured."""
