# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Shared by the attention kernels: the walk over keys and values, with one step of the online softmax for each tile.

A program holds a tile of query rows and walks over keys and values, `tile` tokens at a time. A query row is one head of
one new token. The heads of a group read the same keys, so they are adjacent rows of the tile, token after token:
row r is head r % group of new token r // group.
"""

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(x * LOG2_E), and a GPU has an instruction for exp2
LOWEST = tl.constexpr(-1e38)  # initial m_i: finite, because -inf - -inf is NaN
PRECISION = tl.constexpr("ieee")  # float32 products in full float32, not TF32


@triton.jit
def lookup_pages(table, first, length, page_size: tl.constexpr, tile: tl.constexpr):
    """Return the page of each token of the tile that starts at `first`, or one page if the tile lies in a single page.

    Entries of a page table beyond the sequence's last page are undefined: they are not read, and page 0 is returned.
    """
    token = first if page_size % tile == 0 else first + tl.arange(0, tile)
    return tl.load(table + token // page_size, mask=token < length, other=0).to(tl.int64)


@triton.jit
def walk(
    begin, end, q, position, state, kv, table, length, scale, kv_head, shape,
    tile: tl.constexpr, window: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `begin`, a multiple of `tile`, to `end`. Return the new state, see `accumulate`.

    Scales [pages, kv_heads, page_size] are None unless keys and values have 8 bits. A key's scale multiplies its score.
    """
    keys, values, key_scales, value_scales = kv
    kv_heads: tl.constexpr = shape[0]
    page_size: tl.constexpr = shape[1]
    head_dim: tl.constexpr = shape[2]
    # region exercise 2.15
    m_i, l_i, acc = state
    dim = tl.arange(0, q.shape[1])
    page = lookup_pages(table, begin, length, page_size, tile)
    for first in range(begin, end, tile):
        token = first + tl.arange(0, tile)
        kv_row = (page * kv_heads + kv_head) * page_size + token % page_size
        kv_offsets = kv_row[:, None] * head_dim + dim
        kv_mask = (dim < head_dim)[None, :]
        if masked:
            kv_mask = (token < length)[:, None] & kv_mask
        key = tl.load(keys + kv_offsets, mask=kv_mask, other=0.0).to(q.dtype)
        value = tl.load(values + kv_offsets, mask=kv_mask, other=0.0).to(q.dtype)  # 0: 0 times NaN would be NaN
        value_scale = None
        if value_scales is not None:
            value_scale = tl.load(value_scales + kv_row, mask=token < length, other=0.0)
        page = lookup_pages(table, first + tile, length, page_size, tile)  # the next tile, while this one loads
        if masked:
            seen = token <= position[:, None]
            if window is not None:
                seen &= token > position[:, None] - window
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        if key_scales is not None:
            scores *= tl.load(key_scales + kv_row, mask=token < length, other=0.0)[None, :]
        if masked:
            scores = tl.where(seen, scores, -float("inf"))
        m_i, l_i, acc = accumulate(scores, value, value_scale, m_i, l_i, acc)
    return m_i, l_i, acc
    # endregion


@triton.jit
def accumulate(scores, value, value_scale, m_i, l_i, acc):
    """One step of the online softmax: add a tile's values, times value_scale [tile] if it is not None, to the result.

    m_i   [rows]             running maximum of the scores, which all weights are relative to
    l_i   [rows]             running sum of the weights
    acc   [rows, block_dim]  running sum of the weighted values
    """
    # region exercise 2.15
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    alpha = tl.exp2(m_i - m_new)  # rescales what was summed relative to the lower maximum
    p = tl.exp2(scores - m_new[:, None])  # 0 where the score is -inf
    l_i = l_i * alpha + tl.sum(p, 1)
    if value_scale is not None:
        p *= value_scale[None, :]
    acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l_i, acc
    # endregion


class Tiling(NamedTuple):
    """The tile sizes and warps of a program: as much as registers hold on every architecture."""

    rows: int  # heads of new tokens
    tile: int  # tokens whose keys and values are loaded at once
    num_warps: int
    num_stages: int  # num_stages - 1 tiles are in shared memory, loaded or loading
    maxnreg: int | None = None  # registers per thread; without it the compiler may spill to use fewer

    @property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def buffers(self, head_dim: int, itemsize: int) -> int:
        """Bytes of shared memory for keys and values."""
        return 2 * (self.num_stages - 1) * self.tile * block(head_dim) * itemsize


@cache
def constants(
    heads: int, kv_heads: int, page_size: int, head_dim: int, tiles: Tiling, window: int | None
) -> dict[str, int | None]:
    """The compile-time constants of both kernels."""
    return {
        "kv_heads": kv_heads,
        "group": heads // kv_heads,  # query heads per KV head
        "head_dim": head_dim,
        "block_dim": block(head_dim),
        "page_size": page_size,
        "rows": tiles.rows,
        "tile": tiles.tile,
        "window": window,
    }


def block(size: int) -> int:
    """The next power of two, and at least the 16 of a tensor-core instruction."""
    power: int = 1 << (size - 1).bit_length()
    return max(power, 16)
