# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What the attention kernels share: how a tile of keys is found in pages, and one step of the online softmax.

A program holds a tile of query rows and walks over keys and values, `tile` tokens at a time. A query row is one head of
one new token. The heads of a group read the same keys, so they lie side by side in the tile, token after token:
row r is head r % group of new token r // group.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) is exp2(x * LOG2_E), and exp2 is what a GPU has an instruction for
LEAST = tl.constexpr(-1e38)  # where a running maximum starts: finite, for -inf - -inf would be NaN
PRECISION = tl.constexpr("ieee")  # products of float32 are of float32; half precision is not concerned


@triton.jit
def look_up(table, first, length, page_size: tl.constexpr, tile: tl.constexpr):
    """The page of each token of the tile from `first` on; one for all of them if they are sure to lie in one page.

    Behind a sequence's last page its table may hold anything, so nothing is read there, and page 0 stands in.
    """
    token = first if page_size % tile == 0 else first + tl.arange(0, tile)
    return tl.load(table + token // page_size, mask=token < length, other=0).to(tl.int64)


@triton.jit
def accumulate(scores, value, most, total, result):
    """One step of the online softmax: add the values of a tile, weighted by its scores, to what the rows have so far.

    most     [rows]             the highest score so far, which every weight is relative to
    total    [rows]             the sum of the weights so far
    result   [rows, block_dim]  the sum of the weighted values so far
    """
    # region exercise 2.2
    higher = tl.maximum(most, tl.max(scores, 1))
    shrink = tl.exp2(most - higher)  # what was added so far was relative to a lower maximum
    weight = tl.exp2(scores - higher[:, None])  # 0 where the score is -inf
    total = total * shrink + tl.sum(weight, 1)
    result = tl.dot(weight.to(value.dtype), value, result * shrink[:, None], input_precision=PRECISION)
    return higher, total, result
    # endregion


class Tiling(NamedTuple):
    """How much a program takes at once, and by how many warps: as much as registers hold on every architecture."""

    rows: int  # heads of new tokens
    tile: int  # tokens whose keys and values are read
    num_warps: int
    num_stages: int  # one tile less than that is in shared memory, read or on its way
    maxnreg: int | None = None  # registers a thread; without a number the compiler may spill some to keep to fewer

    @property
    def options(self) -> dict[str, int]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}


def block(size: int) -> int:
    """The power of two that holds so many rows or numbers, and is no less than a tensor-core instruction takes."""
    power: int = triton.next_power_of_2(size)
    return max(power, 16)
