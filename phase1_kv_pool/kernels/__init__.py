"""The store operation: writes the keys and values of new tokens to their pages.

store       in plain torch
triton      the part of a GPU's kernel that stores
interpret   `prepare_triton` makes Triton interpret kernels without a GPU

Importing this package does not import Triton. `lab.ahead` compiles the Triton kernels for GPUs that are not present.
"""

from phase1_kv_pool.kernels.interpret import prepare_triton

__all__ = ["prepare_triton"]
