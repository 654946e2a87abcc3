"""The store operation: writes the keys and values of new tokens to their pages.

store      in plain torch
triton     the part of a GPU's kernel that stores
backends   `Backends` picks by device; `prepare_triton` makes Triton interpret kernels without a GPU

Importing this package does not import Triton. `lab.ahead` compiles the Triton kernels for GPUs that are not present.
"""

from phase1_kv_pool.kernels.backends import BACKENDS, Backends, prepare_triton

__all__ = ["BACKENDS", "Backends", "prepare_triton"]
