# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention on a CPU for a tile of many rows: two products of matrices, and an online softmax between them.

The queries lie across: scores are [keys, rows]. So a key is read as it lies in its page, and the softmax runs over rows
that stand side by side, with a top score and a total for each; nothing is ever summed up within a vector.
"""

import numpy as np

from phase2_prefill_decode.kernels.cpu.intrinsics import FAST, compiled, exp2, widen
from phase2_prefill_decode.kernels.cpu.matmul import COLUMNS, add_product
from phase2_prefill_decode.kernels.cpu.tiles import LOWEST, load_pages, width

ROWS = 64  # of a tile; more only if a single token has more heads in its group
KEYS = 64  # at a time: scores, and the keys and values that they are of, fit a fast cache


@compiled()
def room_for_many(group, head_dim):
    """How many float32 `attend_many` works in."""
    rows, line = whole(max(ROWS, group)), width(head_dim)
    return rows * (head_dim + line + KEYS + 3) + 2 * KEYS * line


@compiled()
def whole(count):
    """As many, in whole lines of a product."""
    return -(-count // COLUMNS) * COLUMNS


# region many
@compiled()
def attend_many(tile, head, query, cached, window, scale, room):
    """The queries of a tile against its keys, KEYS at a time. Returns what it finds for each row, a line each."""
    head_dim, group = query.shape[2], query.shape[1] // cached[0].shape[1]
    rows, line, sums = whole(tile.tokens * group), width(head_dim), whole(head_dim)
    found, room = carve(room, rows, line)
    q, room = carve(room, head_dim, rows)
    scores, room = carve(room, KEYS, rows)
    k, room = carve(room, KEYS, line)
    v, room = carve(room, KEYS, line)
    states, _ = carve(room, 3, rows)
    top, total, shrink = states[0], states[1], states[2]
    load_across(query[tile.first : tile.first + tile.tokens, head * group : (head + 1) * group], scale, q)
    found[:], v[:, head_dim:], top[:], total[:] = 0, 0, LOWEST, 0
    for start in range(tile.begin, tile.end, KEYS):
        size = min(tile.end - start, KEYS)
        padded = load_pages(tile, head, start, size, cached, k, v)
        scores[:padded] = 0
        add_product(scores[:padded], k[:padded, :head_dim], q)
        for key in range(padded):
            at = start + key - tile.position  # from the first token of the tile
            scores[key, : min(max(at * group, 0), rows)] = -np.inf  # rows of tokens before the key
            scores[key, min(max((at + window) * group, 0), rows) :] = -np.inf  # and of those past its window
        soften(scores[:padded], top, total, shrink)
        scale_rows(found, shrink)
        add_product(found[:, :sums], scores[:padded].T, v[:padded, :sums])
    for row in range(rows):
        found[row, head_dim], found[row, head_dim + 1] = top[row], total[row]
    return found


# endregion


@compiled()
def carve(room, lines, line):
    """A matrix, and the room behind it."""
    return room[: lines * line].reshape((lines, line)), room[lines * line :]


@compiled()
def load_across(queries, scale, q):
    """The queries of a tile, [tokens, group, head_dim], as columns. Columns that are left over are of nobody."""
    tokens, group, head_dim = queries.shape
    for token in range(tokens):
        for one in range(group):
            for i in range(head_dim):
                q[i, token * group + one] = widen(queries[token, one, i]) * scale
    q[:, tokens * group :] = 0


# region soften
@compiled()
def soften(scores, top, total, shrink):
    """The online softmax, of all rows: scores become weights relative to the top score so far. What was found relative
    to the one before is to be multiplied by `shrink`."""
    shrink[:] = top
    raise_tops(scores, top)
    for row in range(len(top)):
        shrink[row] = exp2(shrink[row] - top[row])
        total[row] *= shrink[row]
    for key in range(scores.shape[0]):
        for row in range(scores.shape[1]):
            scores[key, row] = exp2(scores[key, row] - top[row])
    for key in range(scores.shape[0]):
        for row in range(scores.shape[1]):
            total[row] += scores[key, row]


# endregion


@compiled(fastmath=FAST | {"nnan"})
def raise_tops(scores, top):
    """The compiler may look at many at once, since it may overlook a NaN. The total will not."""
    for key in range(scores.shape[0]):
        for row in range(scores.shape[1]):
            top[row] = max(top[row], scores[key, row])


@compiled()
def scale_rows(found, factors):
    for row in range(found.shape[0]):
        for i in range(found.shape[1]):
            found[row, i] *= factors[row]
