# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention on a CPU for a tile of many rows: two matrix products with an online softmax between them.

Queries are columns: scores are [keys, rows]. So keys are used as they are stored in pages, and the softmax is
vectorized over rows, with m_i and l_i for each; no sum is reduced within a vector register.
"""

import numpy as np

from phase2_prefill_decode.kernels.cpu.intrinsics import FAST, compiled, exp2, widen
from phase2_prefill_decode.kernels.cpu.matmul import COLUMNS, add_product
from phase2_prefill_decode.kernels.cpu.tiles import LOWEST, load_pages, width

ROWS = 64  # of a tile; more only if the group has more heads
KEYS = 64  # loaded at once: scores, keys and values fit the L2 cache


@compiled()
def room_for_many(group, head_dim):
    """The float32 of scratch memory that `attend_many` needs."""
    rows, line = whole(max(ROWS, group)), width(head_dim)
    return rows * (head_dim + line + KEYS + 3) + 2 * KEYS * line


@compiled()
def whole(count):
    """Round up to whole lines of a product."""
    return -(-count // COLUMNS) * COLUMNS


# region many
@compiled()
def attend_many(tile, head, query, cached, window, scale, room):
    """Attend a tile's queries to its keys, KEYS at a time. Returns a line of results for each row, see `tiles`."""
    head_dim, group = query.shape[2], query.shape[1] // cached[0].shape[1]
    rows, line, sums = whole(tile.tokens * group), width(head_dim), whole(head_dim)
    state, room = carve(room, rows, line)
    q, room = carve(room, head_dim, rows)
    scores, room = carve(room, np.int64(KEYS), rows)
    k, room = carve(room, np.int64(KEYS), line)
    v, room = carve(room, np.int64(KEYS), line)
    scalars, _ = carve(room, np.int64(3), rows)
    m_i, l_i, alpha = scalars[0], scalars[1], scalars[2]
    load_across(query[tile.first : tile.first + tile.tokens, head * group : (head + 1) * group], scale, q)
    state[:], v[:, head_dim:], m_i[:], l_i[:] = 0, 0, LOWEST, 0
    for start in range(tile.begin, tile.end, KEYS):
        size = min(tile.end - start, KEYS)
        padded = load_pages(tile, head, start, size, cached, k, v)
        scores[:padded] = 0
        add_product(scores[:padded], k[:padded, :head_dim], q)
        for key in range(padded):
            at = start + key - tile.position  # relative to the first token of the tile
            scores[key, : min(max(at * group, 0), rows)] = -np.inf  # tokens before the key
            scores[key, min(max((at + window) * group, 0), rows) :] = -np.inf  # tokens past its window
        soften(scores[:padded], m_i, l_i, alpha)
        scale_rows(state, alpha)
        add_product(state[:, :sums], scores[:padded].T, v[:padded, :sums])
    for row in range(rows):
        state[row, head_dim], state[row, head_dim + 1] = m_i[row], l_i[row]
    return state


# endregion


@compiled()
def carve(room, lines, line):
    """Split a matrix off the scratch memory; return both."""
    return room[: lines * line].reshape((lines, line)), room[lines * line :]


@compiled()
def load_across(queries, scale, q):
    """Load the queries of a tile, [tokens, group, head_dim], as columns, and zero the columns of padding."""
    tokens, group, head_dim = queries.shape
    for token in range(tokens):
        for row in range(group):
            for i in range(head_dim):
                q[i, token * group + row] = widen(queries[token, row, i]) * scale
    q[:, tokens * group :] = 0


# region soften
@compiled()
def soften(scores, m_i, l_i, alpha):
    """The online softmax of all rows: turn scores into weights relative to the new m_i, and update m_i and l_i. `alpha`
    is the factor that rescales the running results."""
    for row in range(len(m_i)):
        alpha[row] = m_i[row]
    update_maxima(scores, m_i)
    for row in range(len(m_i)):
        alpha[row] = exp2(alpha[row] - m_i[row])
        l_i[row] *= alpha[row]
    for key in range(scores.shape[0]):
        for row in range(scores.shape[1]):
            scores[key, row] = exp2(scores[key, row] - m_i[row])
    for key in range(scores.shape[0]):
        for row in range(scores.shape[1]):
            l_i[row] += scores[key, row]


# endregion


@compiled(fastmath=FAST | {"nnan"})
def update_maxima(scores, m_i):
    """Update m_i. It may ignore a NaN, which lets the compiler vectorize; l_i propagates it."""
    for key in range(scores.shape[0]):
        for row in range(scores.shape[1]):
            m_i[row] = max(m_i[row], scores[key, row])


@compiled()
def scale_rows(state, factors):
    for row in range(state.shape[0]):
        for i in range(state.shape[1]):
            state[row, i] *= factors[row]
