"""Triton with a driver and no device: every kernel is bound and specialised as on a GPU, and neither compiled nor run.

`requested` holds what would have been compiled: each kernel with its types, constants and options. Import this first,
in a process of its own. All new tensors are zeros, for no kernel fills them.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)

from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from phase1_kv_pool.kernels import backends

requested: set[str] = set()


class Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def note(*, key: str, fn: Any, **_: Any) -> bool:
    """Called for a kernel that is not in memory; True means that it need not be compiled."""
    requested.add(f"{fn.name} {key}")
    return True


triton.runtime.driver.set_active(Driver())
knobs.runtime.jit_cache_hook = note
backends.prepare_triton = lambda: False
backends.Backends.on = lambda self, device: self.load("triton")  # type: ignore[method-assign]
torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros  # type: ignore[assignment, method-assign]
