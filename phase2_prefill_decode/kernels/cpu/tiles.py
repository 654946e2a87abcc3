# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the CPU kernels for many rows and for few have in common: a tile, its keys and values, and what is found.

A tile is some tokens of a sequence and the keys they attend to. For a KV head, each token makes a row for each query
head that shares it. What is found for a row is a line: head_dim sums, their top score and their total.
"""

import numpy as np

from phase2_prefill_decode.kernels.cpu.intrinsics import compiled, widen

LOWEST = np.float32(-1e30)  # below every score, and not infinite: infinity minus infinity is NaN
TILE = np.dtype(
    [
        ("sequence", np.int64),
        ("first", np.int64),  # row of its first token in the batch
        ("tokens", np.int64),
        ("position", np.int64),  # of its first token in the sequence
        ("begin", np.int64),  # the keys to read
        ("end", np.int64),
        ("split", np.int64),  # its place among all splits; -1: it is not split
        ("is_long", np.int64),  # of a slice with many rows
    ]
)


@compiled()
def width(head_dim):
    """Of the line of a row, in float32. In cache lines."""
    return head_dim // 16 * 16 + 16 + (head_dim % 16 > 14) * 16


@compiled()
def load(numbers, factor, line):
    """A row of the batch or of a page, as float32."""
    for i in range(len(numbers)):
        line[i] = widen(numbers[i]) * factor


@compiled()
def load_pages(tile, head, start, size, cached, k, v):
    """So many keys and values from position `start` on, each from its page, as float32. Behind them, up to a multiple
    of four, zeros: what lies there could be NaN, and 0 times NaN is NaN."""
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
    padded = -(-size // 4) * 4
    for key in range(size, padded):
        for i in range(head_dim):
            k[key, i], v[key, i] = 0, 0
    return padded
