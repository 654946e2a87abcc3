"""Attention over pages, three ways.

query          [tokens, heads, head_dim]                the new tokens of all sequences, one sequence after the other
keys, values   [pages, kv_heads, page_size, head_dim]   one layer of the pool; the new tokens are stored already
ragged         which rows are whose, and where its keys and values lie
result         [tokens, heads, head_dim]

Query head h reads key head h // (heads // kv_heads). A query sees the keys at its own position and before; with a
window, only the last `window` of those, its own among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phase1_kv_pool.kernels.ways import Ways


@dataclass(frozen=True, slots=True)
class Ragged:
    """The geometry of a batch: sequences of any length, each with any number of new tokens at its end."""

    starts: Tensor  # [sequences + 1] int32; the new tokens of sequence i are rows starts[i] to starts[i + 1]
    lengths: Tensor  # [sequences] int32; all tokens of sequence i, of which the new ones are the last
    pages: Tensor  # [sequences, most] int32; the pages of sequence i in order; behind its last there may be anything
    longest_query: int  # the most new tokens that a sequence has
    longest: int  # the most tokens
    sizes: tuple[tuple[int, int], ...] = ()  # (new tokens, all tokens) of each sequence; (): only the device knows
    plans: dict[Any, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # of kernels, for all layers

    def host_sizes(self) -> tuple[tuple[int, int], ...]:
        """The sizes in any case. Without `sizes` the device is asked, which is to wait for all it still has to do."""
        if self.sizes:
            return self.sizes
        return tuple(zip(self.starts.diff().tolist(), self.lengths.tolist(), strict=True))


Attend = Callable[[Tensor, Tensor, Tensor, Ragged, float, int | None], Tensor]


# region reference
def reference(
    query: Tensor, keys: Tensor, values: Tensor, ragged: Ragged, scale: float, window: int | None = None
) -> Tensor:
    """Sequence by sequence: gather its pages, score, mask, softmax, sum. In float32."""
    result = torch.empty_like(query)
    page_size = keys.shape[2]
    group = query.shape[1] // keys.shape[1]
    starts, lengths = ragged.starts.tolist(), ragged.lengths.tolist()
    for sequence, length in enumerate(lengths):
        start, stop = starts[sequence], starts[sequence + 1]
        if start == stop:
            continue
        pages = ragged.pages[sequence, : -(-length // page_size)]
        # [heads, length, head_dim]
        k, v = (side[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for side in (keys, values))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        q = query[start:stop].transpose(0, 1).float()  # [heads, new, head_dim]
        at = torch.arange(length - (stop - start), length, device=query.device)[:, None]  # positions of the new tokens
        seen = torch.arange(length, device=query.device)[None, :]
        hidden = seen > at
        if window is not None:
            hidden |= seen <= at - window
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        result[start:stop] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
    return result


# endregion


def refuse_misfits(query: Tensor, keys: Tensor, values: Tensor) -> None:
    """What a kernel would read from the wrong place. All of it can be told without reading anything off the device."""
    shape, (_, heads, head_dim) = keys.shape, query.shape
    if heads % shape[1] or head_dim != shape[3] or shape != values.shape:
        shapes = f"queries {list(query.shape)}, keys {list(shape)}, values {list(values.shape)}"
        raise ValueError(f"query heads must be a multiple of KV heads and all heads of one size, got {shapes}")
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"queries, keys and values must be of one dtype, got {query.dtype}, {keys.dtype}, {values.dtype}"
        )
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values must be whole layers of a pool, contiguous, since pages are found by number")


ATTEND: Ways[Attend] = Ways(
    reference,
    "phase2_prefill_decode.kernels.attention_cpu:attend",
    "phase2_prefill_decode.kernels.attention_triton:attend",
)
