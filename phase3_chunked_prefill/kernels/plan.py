"""Which kernel serves which sequence of a step, and in which pieces.

short   Its new tokens, times the heads of a group, fit into one tile of queries that the tensor cores would fill up
        with nothing anyway. It is bound by memory: the decode kernel, in splits of its keys.
long    All others. They are bound by arithmetic: the ragged kernel, in blocks of new tokens. What sees the most keys
        goes first, so that no large piece is left over for the end while most of a GPU waits for it.

So a decode, the last token of a prompt and a chunk of a few tokens take one kernel, chunks and whole prompts the other.
Where a step has no sequence of more than a few new tokens, as when drafts are verified, all are short: a larger tile
costs such a step less than a second kernel.

Both kernels find their pieces in tables. A grid of all sequences by all pieces that the largest has would consist, with
one chunk of 2,000 tokens among 255 decodes, mostly of programs that only find out that they have nothing to do.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEW = 8  # new tokens
ROWS = 16  # of a tile, with which tensor cores compute however few there are

Pieces = NDArray[np.int32]  # [pieces, 2]


@dataclass(frozen=True, slots=True)
class Plan:
    """A step in pieces."""

    splits: Pieces  # of short sequences: the sequence, and which split of its keys
    blocks: Pieces  # of long sequences: the sequence, and the first new token of the block; most work first
    queries: int  # the most new tokens of a short sequence, up to a power of two: a kernel is compiled for each
    longest: int  # the most tokens of a short sequence


# region plan
def plan(sizes: tuple[tuple[int, int], ...], group: int, block: int, chunk: int, window: int | None) -> Plan:
    """Cut a step up. `sizes` are (new tokens, all tokens); `block` are new tokens, `chunk` is the length of a split."""
    new, length = np.array(sizes, np.int32).reshape(-1, 2).T
    few = FEW if new.max(initial=0) <= FEW else 1 << max(ROWS // group, 1).bit_length() - 1  # a power of two
    short = (new > 0) & (new <= few)
    cut_off = 0 if window is None else np.maximum(length - new - window + 1, 0) // chunk
    sequence, split = _numbered(np.where(short, np.maximum(-(-length // chunk) - cut_off, 1), 0))
    owner, number = _numbered(np.where(new > few, -(-new // block), 0))
    first = number * block
    sees = length[owner] - new[owner] + np.minimum(first + block, new[owner])
    if window is not None:
        sees = np.minimum(sees, window + block)
    order = np.argsort(-sees, kind="stable")
    return Plan(
        splits=np.stack((sequence, split), 1),
        blocks=np.stack((owner, first), 1)[order],
        queries=1 << int(new[short].max(initial=1) - 1).bit_length(),
        longest=int(length[short].max(initial=0)),
    )


def _numbered(counts: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Whose each piece is, and the number it has there: counts of 2, 0, 3 are pieces 0 0 2 2 2 with 0 1 0 1 2."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    before = np.cumsum(counts) - counts
    return owner, (np.arange(len(owner)) - before[owner]).astype(np.int32)


# endregion
