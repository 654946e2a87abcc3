# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Shared by the CPU kernels: a tile, how its keys and values are loaded, and the layout of its results.

A tile is some tokens of a sequence and the keys they attend to. For a KV head, each token has one row for each query
head that shares it. The result of a row is a line of float32: head_dim sums, then m_i, then l_i.
"""

import numpy as np

from phase2_prefill_decode.kernels.cpu.intrinsics import compiled, widen

LOWEST = np.float32(-1e30)  # initial m_i: finite, because -inf - -inf is NaN
TILE = np.dtype(
    [
        ("sequence", np.int64),
        ("first", np.int64),  # row of its first token in the batch
        ("tokens", np.int64),
        ("position", np.int64),  # of its first token in the sequence
        ("begin", np.int64),  # the keys that it reads
        ("end", np.int64),
        ("split", np.int64),  # its index among all splits; -1: not split
        ("is_long", np.int64),  # whether the sequence has many rows
    ]
)


@compiled()
def width(head_dim):
    """The length of a line of results, in float32, rounded up to cache lines."""
    return head_dim // 16 * 16 + 16 + (head_dim % 16 > 14) * 16


@compiled()
def load(numbers, factor, line):
    """Load a row of the batch or of a page as float32, times a factor."""
    for i in range(len(numbers)):
        line[i] = widen(numbers[i]) * factor


@compiled()
def load_pages(tile, head, start, size, cached, k, v):
    """Load `size` keys and values from position `start` on, each from its page, as float32. Pad with zeros to a
    multiple of eight: the scratch memory could hold NaN, and 0 times NaN is NaN."""
    keys, values, pages = cached
    page_size, head_dim = keys.shape[2], keys.shape[3]
    entry, offset = start // page_size, start % page_size  # in the page table, and in that page
    for key in range(size):
        page = pages[tile.sequence, entry]
        load(keys[page, head, offset], np.float32(1), k[key])
        load(values[page, head, offset], np.float32(1), v[key])
        offset += 1
        if offset == page_size:
            entry, offset = entry + 1, 0
    padded = -(-size // 8) * 8
    for key in range(size, padded):
        for i in range(head_dim):
            k[key, i], v[key, i] = 0, 0
    return padded
