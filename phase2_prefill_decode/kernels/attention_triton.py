"""Attention over pages on a GPU: the choice between the two kernels."""

import torch
from torch import Tensor

from phase2_prefill_decode.kernels.attention import Ragged, refuse_misfits
from phase2_prefill_decode.kernels.decode_triton import decode
from phase2_prefill_decode.kernels.prefill_triton import prefill


def attend(
    query: Tensor, keys: Tensor, values: Tensor, ragged: Ragged, scale: float, window: int | None = None
) -> Tensor:
    """One new token a sequence: the decode kernel. Anything else, of any mixture: the prefill kernel."""
    refuse_misfits(query, keys, values)
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    kernel = decode if ragged.longest_query <= 1 else prefill
    kernel(query.contiguous(), keys, values, result, ragged, scale, window)
    return result
