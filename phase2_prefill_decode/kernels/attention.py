"""Attention over pages: the interface and the reference.

query      [tokens, heads, head_dim]   the new tokens of all sequences, one sequence after the other
kv         KVLayer                     one layer of the pool, with the new tokens already stored
metadata   AttentionMetadata           where each sequence's queries, keys and values are
result     [tokens, heads, head_dim]

Keys and values of 8 bits are not widened in memory. A score is a product with the numbers of a key, times its
scale, and a weight is multiplied by the scale of its value before the values are added up.

Query head h reads KV head h // (heads // kv_heads). A query sees the keys at its own position and before; with a
window, only the last `window` of them, its own included. Sinks [heads], in the dtype of the queries, are one more score
of each softmax; its weight goes to no value.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phase1_kv_pool.layer import HIGHEST, KVLayer


@dataclass(slots=True)
class AttentionMetadata:
    """The layout of a ragged batch: sequences of any length, each with any number of new tokens at its end.

    Valid for one step: kernels store their plans for all layers in it. The next step, or a recorded one, needs its own,
    even over the same tensors.
    """

    cu_seqlens_q: Tensor  # [sequences + 1] int32; new tokens of sequence i: rows cu_seqlens_q[i] to cu_seqlens_q[i + 1]
    seq_lens: Tensor  # [sequences] int32; all tokens of sequence i, the new ones last
    page_table: Tensor  # [sequences, max_pages] int32; the pages of sequence i in order; entries past its end: anything
    max_seqlen_q: int  # the most new tokens of a sequence
    max_seqlen_k: int  # the most tokens of a sequence
    sizes: tuple[tuple[int, int], ...] = ()  # (new tokens, all tokens) of each sequence; (): known to the device only
    out: Tensor | None = None  # where kernels of a GPU write the result; None: to a new tensor
    plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # what kernels keep


Attend = Callable[[Tensor, KVLayer, AttentionMetadata, float, int | None, Tensor | None], Tensor]


def reference(
    query: Tensor, kv: KVLayer, metadata: AttentionMetadata, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """For each sequence: gather its pages, score, mask, softmax, sum. In float32.

    Sequence i has `length` tokens; its new ones are the last, and their queries are the rows `start` to `stop`.
    """
    result = torch.empty_like(query)
    _, kv_heads, page_size, _ = kv.keys.shape
    group = query.shape[1] // kv_heads
    cu_seqlens_q, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
    for sequence, length in enumerate(seq_lens):
        start, stop = cu_seqlens_q[sequence], cu_seqlens_q[sequence + 1]
        if start == stop:
            continue
        # region exercise 2.5
        pages = metadata.page_table[sequence, : -(-length // page_size)]
        k, v = (side.transpose(0, 1).float() for side in kv.gather(pages, length))  # [heads, length, head_dim]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        q = query[start:stop].transpose(0, 1).float()  # [heads, new, head_dim]
        at = torch.arange(length - (stop - start), length, device=query.device)[:, None]  # positions of the new tokens
        seen = torch.arange(length, device=query.device)[None, :]
        hidden = seen > at
        if window is not None:
            hidden |= seen <= at - window
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(at), 1)), -1)
        result[start:stop] = (scores.softmax(-1)[..., :length] @ v).transpose(0, 1).to(query.dtype)
        # endregion
    return result


def check_shapes(query: Tensor, kv: KVLayer) -> None:
    """Check shapes, dtypes and strides: a kernel would misread anything that does not fit. No device data is read."""
    keys, values, *scales = kv
    shape, (_, heads, head_dim) = keys.shape, query.shape
    if heads % shape[1] or head_dim != shape[3] or shape != values.shape:
        shapes = f"queries {list(query.shape)}, keys {list(shape)}, values {list(values.shape)}"
        raise ValueError(f"query heads must be a multiple of KV heads and all heads of one size, got {shapes}")
    if keys.dtype in HIGHEST and not all(side is not None and side.shape == shape[:3] for side in scales):
        raise ValueError(f"keys and values in {keys.dtype} need scales {list(shape[:3])}")
    if keys.dtype != values.dtype or keys.dtype not in (query.dtype, *HIGHEST):
        raise ValueError(
            f"queries, keys and values must be of one dtype, got {query.dtype}, {keys.dtype}, {values.dtype}"
        )
    if not all(side is None or side.is_contiguous() for side in kv):
        raise ValueError("keys and values must be whole layers of a pool, contiguous: pages are addressed by number")
