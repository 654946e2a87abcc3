"""Plan the attention of a step: assign each sequence to a kernel and cut it into pieces.

short   The new tokens, times the heads of a group, fit into one tile of queries that tensor cores would pad anyway. The
        sequence is memory-bound: the decode kernel takes it, in splits of its keys.
long    All others. They are compute-bound: the ragged kernel takes them, in blocks of new tokens. Blocks that see the
        most keys go first, so that no large piece is left for the end while most of the GPU is idle.

So a decode, the last token of a prompt and a chunk of a few tokens use one kernel; chunks and whole prompts the other.
If no sequence of a step has more than a few new tokens, as in the verification of drafts, all are short: a larger tile
costs such a step less than a second launch.

Both kernels find their pieces in tables. With a grid of all sequences by all pieces of the largest, one chunk of 2,000
tokens among 255 decodes would launch mostly programs without work.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEW = 8  # new tokens, at most, of a step whose sequences are all short
ROWS = 16  # of the smallest tile that tensor cores compute

Pieces = NDArray[np.int32]  # [pieces, 2]


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces of a step."""

    splits: Pieces  # of short sequences: (sequence, split of its keys)
    blocks: Pieces  # of long sequences: (sequence, first new token of the block), most work first
    queries: int  # the most new tokens of a short sequence, rounded up to a power of two: a kernel is compiled for each
    longest: int  # the most tokens of a short sequence


# region plan
def plan(sizes: tuple[tuple[int, int], ...], group: int, block: int, chunk: int, window: int | None) -> Plan:
    """Cut a step into pieces. `sizes`: (new, all) tokens of each sequence."""
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
    """Return each piece's sequence and its index in it: counts of 2, 0, 3 give 0 0 2 2 2 and 0 1 0 1 2."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    before = np.cumsum(counts) - counts
    return owner, (np.arange(len(owner)) - before[owner]).astype(np.int32)


# endregion
