"""Tuning of the decode kernel: the keys of a split, and the tile if the queries fit into 16 rows."""

from dataclasses import dataclass

LONGEST = 512  # keys of a split, at most, by default


@dataclass(frozen=True, slots=True)
class Tuning:
    """The keys of a split, and how the kernel computes it. 0: as `tiling` has it.

    `python -m phase2_prefill_decode.lab tune` times candidates on a GPU.
    """

    chunk: int
    tile: int = 0
    num_warps: int = 0
    num_stages: int = 0


def default(group: int) -> Tuning:
    """A split of 64 keys for each query head of a group, from 128 to LONGEST.

    For each number of a head, a split reads 2 * 2 * chunk bytes of keys and values (16 bits), and its float32 results
    are 4 * group bytes, written and read again by the join: 2 * group / chunk as much. 64 * group keeps that at 1/32. A
    larger chunk would leave a GPU idle when few sequences are short: one of 1,000 tokens is four splits in groups of 4.
    """
    return Tuning(min(max(64 * group, 128), LONGEST))
