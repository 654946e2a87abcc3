"""Triton with a driver and no device: every kernel is bound and specialised as on a GPU, and neither compiled nor run.

`requested` holds what would have been compiled: each kernel with its types, constants and options. Import this first,
in a process of its own. All new tensors are zeros, for no kernel fills them.
"""

from typing import Any

import torch

from phase1_kv_pool.lab.no_device import use_no_device

requested: set[str] = set()


def note(*, key: str, fn: Any, **_: Any) -> bool:
    """Called for a kernel that is not in memory; True means that it need not be compiled."""
    requested.add(f"{fn.name} {key}")
    return True


use_no_device()
from triton import knobs  # noqa: E402  (not before: it reads what is interpreted)

knobs.runtime.jit_cache_hook = note
torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros  # type: ignore[assignment, method-assign]
