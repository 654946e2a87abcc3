"""Attention over pages on a GPU: picks the decode or the prefill kernel."""

import torch
from torch import Tensor

from phase2_prefill_decode.kernels.attention import AttentionMetadata, check_shapes
from phase2_prefill_decode.kernels.triton.decode import decode
from phase2_prefill_decode.kernels.triton.prefill import prefill


def attend(
    query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata, scale: float, window: int | None = None
) -> Tensor:
    """Use the decode kernel if every sequence has one new token, else the prefill kernel."""
    check_shapes(query, keys, values)
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    kernel = decode if metadata.max_seqlen_q <= 1 else prefill
    kernel(query.contiguous(), keys, values, result, metadata, scale, window)
    return result
