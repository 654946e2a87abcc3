"""Large tensors of zeros, in huge pages on a CPU."""

from math import prod

import numpy as np
import torch

LINE = 64  # bytes of a cache line


def allocate(size: int) -> torch.Tensor:
    """Zeroed, cache-line-aligned bytes on a CPU. NumPy requests huge pages, which cut the TLB misses of kernels that
    read keys or weights once."""
    memory = torch.from_numpy(np.zeros(size + LINE, np.uint8))
    return memory[-memory.data_ptr() % LINE :][:size]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A large tensor of zeros."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return allocate(prod(shape) * dtype.itemsize).view(dtype).view(shape)
