# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention on a CPU for a tile of few rows, as of a decode: row by row, by dot products with the keys.

A key or a value is read from its page once for all rows of the tile.
"""

import numpy as np

from phase2_prefill_decode.kernels.cpu.intrinsics import FAST, compiled, exp2
from phase2_prefill_decode.kernels.cpu.tiles import LOWEST, load, load_pages, width

FEW = 8  # rows, at most
KEYS = 16  # loaded at once, a multiple of four; they and the rows fit the L1 cache


@compiled()
def room_for_few(head_dim):
    """The float32 of scratch memory that `attend_few` needs."""
    return (3 * FEW + 2 * KEYS) * width(head_dim)


# region few
@compiled()
def attend_few(tile, head, query, cached, window, scale, room):
    """Attend a tile's queries to its keys, KEYS at a time. Returns a line of results for each row, see `tiles`."""
    head_dim, group = query.shape[2], query.shape[1] // cached[0].shape[1]
    rows = tile.tokens * group
    lines = room.reshape((-1, width(head_dim)))
    state, q, scores, rest = lines[:rows], lines[rows : 2 * rows], lines[2 * rows : 3 * rows], lines[3 * rows :]
    k, v = rest[:KEYS], rest[KEYS : 2 * KEYS]
    for row in range(rows):
        load(query[tile.first + row // group, head * group + row % group], scale, q[row])
        state[row, :] = 0
        state[row, head_dim] = LOWEST
    for start in range(tile.begin, tile.end, KEYS):
        padded = load_pages(tile, head, start, min(tile.end - start, KEYS), cached, k, v)
        for row in range(rows):
            score(q[row], k, scores[row], padded, head_dim)
            own = tile.position + row // group - start  # the key at the row's own position
            hide(scores[row], max(own + 1 - window, 0), max(own + 1, 0), padded)
            absorb(scores[row], v, state[row], padded, head_dim)
    return state


# endregion


@compiled()
def score(q, k, scores, keys, head_dim):
    """Dot products of a query with KEYS keys, four at a time: the query is read once for four keys."""
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
    """Mask keys before the window and keys after the row's own position."""
    for key in range(min(first, keys)):
        scores[key] = -np.inf
    for key in range(behind, keys):
        scores[key] = -np.inf


# region online_softmax
@compiled()
def absorb(scores, v, state, keys, head_dim):
    """One step of the online softmax: add KEYS keys to the running sums, m_i and l_i of a row."""
    m_i = max(state[head_dim], highest(scores, keys))
    alpha = exp2(state[head_dim] - m_i)
    l_i = state[head_dim + 1] * alpha
    for key in range(keys):
        scores[key] = exp2(scores[key] - m_i)
        l_i += scores[key]
    state[head_dim], state[head_dim + 1] = m_i, l_i
    add_weighted(state, alpha, scores, v, keys, head_dim)


# endregion


@compiled(fastmath=FAST | {"nnan"})
def highest(scores, keys):
    """The maximum of the scores. It may ignore a NaN, which lets the compiler vectorize; l_i propagates it."""
    m_i = LOWEST
    for key in range(keys):
        m_i = max(m_i, scores[key])
    return m_i


@compiled()
def add_weighted(sums, alpha, weights, v, keys, head_dim):
    """sums * alpha + weights @ v, four values at a time: the sums are read and written once for four."""
    for i in range(head_dim):
        sums[i] *= alpha
    for key in range(0, keys, 4):
        a, b, c, d = weights[key], weights[key + 1], weights[key + 2], weights[key + 3]
        for i in range(head_dim):
            sums[i] += a * v[key, i] + b * v[key + 1, i] + c * v[key + 2, i] + d * v[key + 3, i]
