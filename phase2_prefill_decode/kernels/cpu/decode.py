# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention on a CPU for a tile of few rows, as of a decode: row by row, each by dot products with the keys.

A key or a value is read from its page once for all rows of the tile.
"""

import numpy as np

from phase2_prefill_decode.kernels.cpu.intrinsics import FAST, compiled, exp2
from phase2_prefill_decode.kernels.cpu.tiles import LOWEST, load, load_pages, width

FEW = 8  # rows, at most
KEYS = 16  # at a time, a multiple of four: they and the rows fit the fastest cache


@compiled()
def room_for_few(head_dim):
    """How many float32 `attend_few` works in."""
    return (3 * FEW + 2 * KEYS) * width(head_dim)


# region few
@compiled()
def attend_few(tile, head, query, cached, window, scale, room):
    """The queries of a tile against its keys, KEYS at a time. Returns what it finds for each row, a line each."""
    head_dim, group = query.shape[2], query.shape[1] // cached[0].shape[1]
    rows = tile.tokens * group
    lines = room.reshape((-1, width(head_dim)))
    found, q, scores, rest = lines[:rows], lines[rows : 2 * rows], lines[2 * rows : 3 * rows], lines[3 * rows :]
    k, v = rest[:KEYS], rest[KEYS : 2 * KEYS]
    for row in range(rows):
        load(query[tile.first + row // group, head * group + row % group], scale, q[row])
        found[row, :] = 0
        found[row, head_dim] = LOWEST
    for start in range(tile.begin, tile.end, KEYS):
        padded = load_pages(tile, head, start, min(tile.end - start, KEYS), cached, k, v)
        for row in range(rows):
            score(q[row], k, scores[row], padded, head_dim)
            own = tile.position + row // group - start  # the key at the row's own position
            hide(scores[row], max(own + 1 - window, 0), max(own + 1, 0), padded)
            absorb(scores[row], v, found[row], padded, head_dim)
    return found


# endregion


@compiled()
def score(q, k, scores, keys, head_dim):
    """The products of a query with the keys of a tile, four at a time: the query is read once for four."""
    for key in range(0, keys, 4):
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(head_dim):
            a += q[i] * k[key, i]
            b += q[i] * k[key + 1, i]
            c += q[i] * k[key + 2, i]
            d += q[i] * k[key + 3, i]
        scores[key], scores[key + 1], scores[key + 2], scores[key + 3] = a, b, c, d


@compiled()
def hide(scores, first, behind, keys):
    """Keys before the window, and keys after the row's own position."""
    for key in range(min(first, keys)):
        scores[key] = -np.inf
    for key in range(behind, keys):
        scores[key] = -np.inf


# region online_softmax
@compiled()
def absorb(scores, v, found, keys, head_dim):
    """The online softmax: what was found so far, the sums and their top score and total, takes in one more tile."""
    top = max(found[head_dim], highest(scores, keys))
    shrink = exp2(found[head_dim] - top)
    total = found[head_dim + 1] * shrink
    for key in range(keys):
        scores[key] = exp2(scores[key] - top)
        total += scores[key]
    found[head_dim], found[head_dim + 1] = top, total
    add_weighted(found, shrink, scores, v, keys, head_dim)


# endregion


@compiled(fastmath=FAST | {"nnan"})
def highest(scores, keys):
    """The compiler may look at many at once, since it may overlook a NaN. The total will not."""
    top = LOWEST
    for key in range(keys):
        top = max(top, scores[key])
    return top


@compiled()
def add_weighted(sums, shrink, weights, v, keys, head_dim):
    """sums * shrink + weights @ v, four values at a time: the sums are read and written once for four."""
    for i in range(head_dim):
        sums[i] *= shrink
    for key in range(0, keys, 4):
        a, b, c, d = weights[key], weights[key + 1], weights[key + 2], weights[key + 3]
        for i in range(head_dim):
            sums[i] += a * v[key, i] + b * v[key + 1, i] + c * v[key + 2, i] + d * v[key + 3, i]
