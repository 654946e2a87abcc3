# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Shared by the attention kernels: looking up the pages of a tile of keys, and one step of the online softmax.

A program holds a tile of query rows and walks over keys and values, `tile` tokens at a time. A query row is one head of
one new token. The heads of a group read the same keys, so they are adjacent rows of the tile, token after token:
row r is head r % group of new token r // group.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) is exp2(x * LOG2_E), and a GPU has an instruction for exp2
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
def accumulate(scores, value, m_i, l_i, acc):
    """One step of the online softmax: add a tile's values, weighted by its scores, to the running result.

    m_i   [rows]             running maximum of the scores, which all weights are relative to
    l_i   [rows]             running sum of the weights
    acc   [rows, block_dim]  running sum of the weighted values
    """
    # region exercise 2.7
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    alpha = tl.exp2(m_i - m_new)  # rescales what was summed relative to the lower maximum
    p = tl.exp2(scores - m_new[:, None])  # 0 where the score is -inf
    l_i = l_i * alpha + tl.sum(p, 1)
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


def block(size: int) -> int:
    """The next power of two, and at least the 16 of a tensor-core instruction."""
    power: int = 1 << (size - 1).bit_length()
    return max(power, 16)
