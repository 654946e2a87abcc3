"""Plan the attention of a mixed step: assign each sequence to a kernel, and cut chunks and prompts into blocks.

short   The new tokens, times the heads of a group, fit into one tile of queries that tensor cores would pad anyway. The
        sequence is memory-bound: the decode kernel takes it, which makes a table of its splits on the device.
long    All others. They are compute-bound: the prefill kernel takes them, in blocks of new tokens. Blocks that see the
        most keys go first, so that no large block is left for the end while most of the GPU is idle.

A step with only a few new tokens in every sequence needs no plan: all are short, since a larger tile costs such a step
less than a second launch. The prefill kernel finds its blocks in a table: on a grid of all sequences by all blocks of
the longest, one chunk of 2,000 tokens among 255 decodes would launch mostly programs without work.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEW = 8  # new tokens, at most, of each sequence of a step that needs no plan
ROWS = 16  # the smallest that tensor cores compute


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks of a step's long sequences, and the maxima of its short ones."""

    blocks: NDArray[np.int32]  # [blocks, 2]: a long sequence, the first new token of the block; most work first
    queries: int  # the most new tokens of a short sequence, rounded up to a power of two; 0: none
    longest: int  # the most tokens of a short sequence


# region exercise 2.20
def plan(sizes: tuple[tuple[int, int], ...], group: int, block: int, window: int | None) -> Plan:
    """Plan a step. `sizes`: (new, all) tokens of each sequence."""
    new, length = np.array(sizes, np.int32).reshape(-1, 2).T
    few = 1 << max(ROWS // group, 1).bit_length() - 1  # a power of two: a kernel is compiled for each
    short = (new > 0) & (new <= few)
    counts = np.where(new > few, -(-new // block), 0)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    number = np.arange(len(sequence), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    first = number * block
    sees = length[sequence] - new[sequence] + np.minimum(first + block, new[sequence])
    if window is not None:
        sees = np.minimum(sees, window + block)
    order = np.argsort(-sees, kind="stable")
    return Plan(
        blocks=np.stack((sequence, first), 1)[order].astype(np.int32),
        queries=1 << int(new[short].max() - 1).bit_length() if short.any() else 0,
        longest=int(length[short].max(initial=0)),
    )


# endregion
