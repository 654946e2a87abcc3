"""Attention over pages on a GPU: the choice between the two kernels, and what both refuse."""

import torch
from torch import Tensor

from phase2_prefill_decode.kernels.attention import Ragged
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


def refuse_misfits(query: Tensor, keys: Tensor, values: Tensor) -> None:
    """What can be told without reading anything off the device."""
    heads, head_dim = query.shape[1:]
    if heads % keys.shape[1] or head_dim != keys.shape[3] or keys.shape != values.shape:
        shapes = f"queries {list(query.shape)}, keys {list(keys.shape)}, values {list(values.shape)}"
        raise ValueError(f"query heads must be a multiple of KV heads and all heads of one size, got {shapes}")
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"queries, keys and values must be of one dtype, got {query.dtype}, {keys.dtype}, {values.dtype}"
        )
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values must be whole layers of a pool, contiguous, since pages are found by number")
