"""Bit masks of tokens on a CPU: numpy unpacks them to upper bounds of the logits, without a branch for each token."""

import numpy as np
import torch
from torch import Tensor


def apply_mask(logits: Tensor, bits: Tensor, numbers: Tensor) -> Tensor:
    octets, vocab = bits.numpy().astype("<i4", copy=False).view(np.uint8), logits.shape[1]
    allowed = torch.from_numpy(np.unpackbits(octets, axis=1, count=vocab, bitorder="little"))
    bounds = (allowed.to(logits.dtype) - 0.5) * torch.inf  # inf and -inf
    masked = logits.clone()
    for row, number in enumerate(numbers.tolist()):
        if number >= 0:
            torch.minimum(logits[row], bounds[number], out=masked[row])
    return masked
