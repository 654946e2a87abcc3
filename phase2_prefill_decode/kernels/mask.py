"""Excludes tokens from sampling, as bit masks say: the interface and the reference.

A mask has a bit for each token, 32 to a word, the lowest first. A vocabulary of 151,936 is 19 kB: small enough to be
made on the host and copied to the device in every step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from phase1_kv_pool.kernels.backends import Backends

# logits [rows, vocab], bits [masks, words] int32, numbers [rows] int64: of each row's mask, -1 for none -> the logits
# again, but -inf where the bit is 0. NaN stays NaN: a row that has any fails
ApplyMask = Callable[[Tensor, Tensor, Tensor], Tensor]


# region exercise 2.18
def reference(logits: Tensor, bits: Tensor, numbers: Tensor) -> Tensor:
    """Apply to each row its mask, as `ApplyMask` says."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits[:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[1]].bool()
    return torch.where(allowed[numbers] | (numbers < 0)[:, None] | logits.isnan(), logits, -torch.inf)


# endregion


APPLY_MASK: Backends[ApplyMask] = Backends(
    reference,
    "phase2_prefill_decode.kernels.cpu.mask:apply_mask",
    "phase2_prefill_decode.kernels.triton.mask:apply_mask",
)
