"""Excludes tokens from sampling by bit masks: the interface and the reference.

A mask has one bit per token, 32 to a word, the lowest first. A vocabulary of 151,936 is 19 kB: small enough to make on
the host and copy to the device in every step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from phase1_kv_pool.kernels import interpret

# logits [rows, vocab], bits [masks, words] int32, numbers [rows] int64: of each row's mask, -1 for none -> the logits
# again, but -inf where the bit is 0. NaN stays NaN: a row that has any fails
ApplyMask = Callable[[Tensor, Tensor, Tensor], Tensor]


# region exercise 8.1
def reference(logits: Tensor, bits: Tensor, numbers: Tensor) -> Tensor:
    """Apply to each row its mask, as `ApplyMask` says: as upper bounds of the logits, without a branch for each."""
    octets = bits.view(torch.uint8)
    allowed = torch.stack([octets >> place & 1 for place in range(8)], -1).flatten(1)[:, : logits.shape[1]]
    allowed = allowed[numbers] | (numbers < 0)[:, None]
    return logits.minimum((allowed.to(logits.dtype) - 0.5) * torch.inf)  # inf and -inf; the minimum with NaN is NaN


# endregion


def apply_mask_on(device: torch.device) -> ApplyMask:
    """The implementation for logits on this device."""
    if device.type != "cuda":
        return reference
    interpret.prepare_triton()
    from phase2_prefill_decode.extras.grammar.triton_mask import apply_mask

    return apply_mask
