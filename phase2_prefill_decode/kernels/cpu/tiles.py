# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention on a CPU for one tile: two matrix products with an online softmax between them.

A tile is some tokens of a sequence and the keys they attend to. For a KV head, each token has one row for each query
head that shares it. The result of a row is a line of float32: head_dim sums, then m_i, then l_i.

What a row gives depends only on its keys and on their positions: a tile of one row and a tile of many do the same
operations in the same order. Keys are taken in blocks of KEYS, from a position that is a multiple of KEYS. At each
multiple of SPLIT the sums begin anew, and are merged with those before. So a sequence can be split there: a thread
computes one part, and the parts are merged in order. Functions that add or multiply here are compiled as written,
without fast math.
"""

import numpy as np

from phase2_prefill_decode.kernels.cpu.intrinsics import NO_TENSOR, array, compiled, exp2, prefetch, widen
from phase2_prefill_decode.kernels.cpu.matmul import COLUMNS, KEYS, LANES, add_product, highest, total, transpose, unit

SPLIT = 512  # keys: a multiple of KEYS
LOWEST = np.float32(-1e30)  # initial m_i: finite, because -inf - -inf is NaN
TILE = np.dtype(
    [
        ("sequence", np.int64),
        ("first", np.int64),  # row of its first token in the batch
        ("tokens", np.int64),
        ("position", np.int64),  # of its first token in the sequence
        ("head", np.int64),  # its first KV head
        ("heads", np.int64),  # and how many
        ("begin", np.int64),  # the keys that it reads
        ("end", np.int64),
        ("split", np.int64),  # its index among all splits; -1: not split
    ]
)
INT64 = np.dtype(np.int64)
SCALE = 4  # bytes


@compiled()
def width(head_dim):
    """The length of a line of results, in float32."""
    return whole(head_dim + 2)


@compiled()
def whole(count):
    """Round up to whole lines of a product."""
    return -(-count // COLUMNS) * COLUMNS


@compiled()
def room_for(rows, head_dim):
    """The float32 of scratch memory that a tile needs. `rows`: of all its heads."""
    dims = whole(head_dim) + COLUMNS  # numbers of 8 bits are transposed twice as many at a time
    return rows * (3 * width(head_dim) + KEYS) + dims * COLUMNS + 2 * (8 * KEYS + dims) + KEYS + 2 * KEYS * dims


# region attend_tile
@compiled()
def attend_tile(tile, query, cached, window, scale, room):
    """Attend a tile's queries to its keys. Returns a line of results for each KV head and row."""
    keys, scales, head_dim = cached[0], cached[2], query.shape[2]
    group, dims = query.shape[1] // keys.shape[1], whole(head_dim)
    rows, line, like = tile.tokens * group, width(head_dim), keys[0, 0, 0, 0]
    step = 4 * LANES // keys.itemsize  # numbers of a key that are transposed at once
    lines = -(-dims // step) * step
    result, room = carve(room, tile.heads * rows, line)
    state, room = carve(room, tile.heads * rows, line)  # since the last multiple of SPLIT
    q, room = carve(room, tile.heads * rows, line)
    scores, room = carve(room, rows, np.int64(KEYS))
    k, room = carve(room, lines, np.int64(COLUMNS))
    factors, room = carve(room, np.int64(1), np.int64(KEYS))
    places, room = carve_addresses(room, np.int64(3), np.int64(KEYS))  # of keys and of values, and their numbers
    following, room = carve_addresses(room, np.int64(3), np.int64(KEYS))  # of the next head
    padded, room = carve_addresses(room, np.int64(2), np.int64(KEYS))
    k_places, spare = carve_addresses(room, np.int64(1), dims)
    for i in range(dims):
        k_places[0, i] = k.ctypes.data + i * k.strides[0]
    at = padded if head_dim < lines else places
    load_queries(tile, query, group, scale, q)
    clear(result, head_dim)
    clear(state, head_dim)
    find(tile, tile.begin // KEYS * KEYS, cached, places)
    for start in range(tile.begin // KEYS * KEYS, tile.end, KEYS):
        if start % SPLIT == 0 and start > tile.begin:
            merge(result, state, head_dim)
            clear(state, head_dim)
        size = min(tile.end - start, KEYS)
        for head in range(tile.heads):
            own = slice(head * rows, (head + 1) * rows)
            if head + 1 < tile.heads:
                following[:] = places
                following[:2] += keys.strides[1]
                following[2] += keys.shape[2]
            else:
                find(tile, start + KEYS, cached, following)
            if head_dim < lines:
                pad(places, head_dim, lines, spare, like, padded)
            scores[:] = 0
            for first in range(0, size, COLUMNS):
                load_keys(at[0, first:], following[:, first:], k, like, step)
                add_product(scores[:, first : first + COLUMNS], q[own], k_places[0], np.float32(0))
            if scales[0] != NO_TENSOR:
                multiply(scores, scales[0], places[2], factors[0], like)
            hide(scores, tile.position - start, group, window)
            soften(scores, state[own], head_dim)
            if scales[0] != NO_TENSOR:
                multiply(scores, scales[1], places[2], factors[0], like)
            add_product(state[own, :dims], scores, at[1, :size], like)
            places[:] = following
    merge(result, state, head_dim)
    return result


# endregion


@compiled()
def carve(room, lines, line):
    """Split a matrix off the scratch memory; return both."""
    return room[: lines * line].reshape((lines, line)), room[lines * line :]


@compiled()
def carve_addresses(room, lines, line):
    return array(room.ctypes.data, (lines, line), INT64), room[2 * lines * line :]


@compiled()
def clear(state, head_dim):
    """No keys yet."""
    state[:] = 0
    state[:, head_dim] = LOWEST


@compiled()
def load_queries(tile, query, group, scale, q):
    q[:] = 0
    rows = tile.tokens * group
    for row in range(len(q)):
        head, token = tile.head + row // rows, tile.first + row % rows // group
        numbers = query[token, head * group + row % group]
        for i in range(len(numbers)):
            q[row, i] = widen(numbers[i]) * scale


@compiled()
def find(tile, start, cached, places):
    """Write the addresses of the keys and values of a block, and their numbers in the pool, for the first head. Before
    and after the tile's keys, it is that of the nearest of them: the memory there could hold NaN, and 0 times NaN is
    NaN."""
    keys, values, _, pages = cached
    position, page_size = max(min(start, tile.end - 1), tile.begin), keys.shape[2]
    entry, offset = position // page_size, position % page_size
    for key in range(KEYS):
        page = pages[tile.sequence, entry]
        number = (page * keys.shape[1] + tile.head) * page_size + offset
        distance = number * keys.strides[2]
        places[0, key], places[1, key], places[2, key] = (
            keys.ctypes.data + distance,
            values.ctypes.data + distance,
            number,
        )
        if tile.begin <= start + key < tile.end - 1:
            offset += 1
            if offset == page_size:
                entry, offset = entry + 1, 0


@compiled()
def pad(places, head_dim, lines, spare, like, padded):
    """Copy keys and values that are not whole lines, and pad them with zeros. `padded`: the addresses of the copies."""
    copies = array(spare.ctypes.data, (2, KEYS, lines), like)
    copies[:] = 0
    for side in range(2):
        for key in range(KEYS):
            copies[side, key, :head_dim] = array(places[side, key], (head_dim,), like)
            padded[side, key] = copies[side, key].ctypes.data


@compiled()
def load_keys(places, following, k, like, step):
    """Load COLUMNS keys as columns of float32, and prefetch as many keys and values of the next head: a processor does
    so by itself in pieces that are longer than a head of a page."""
    itemsize = 4 * LANES // step
    for first in range(0, COLUMNS, LANES):
        for i in range(0, len(k), step):
            transpose(places[first:].ctypes.data, i * itemsize, k[i, first:].ctypes.data, k.strides[0], like)
            for key in range(first, first + LANES):
                prefetch(following[0, key] + i * itemsize)
                prefetch(following[1, key] + i * itemsize)


@compiled(fastmath=False)
def multiply(scores, scales, numbers, factors, like):
    """Multiply the column of each key by the scale of its number. `factors`: where to collect them."""
    for key in range(KEYS):
        factors[key] = array(scales + numbers[key] * SCALE, (1,), factors[0])[0] * unit(like)
    for row in range(len(scores)):
        for key in range(KEYS):
            scores[row, key] *= factors[key]


@compiled()
def hide(scores, first, group, window):
    """Mask keys before the window of each row, and keys after the row's own position. `first`: the position of the
    tile, relative to the block."""
    for row in range(len(scores)):
        own = first + row // group
        for key in range(min(own + 1 - window, KEYS)):
            scores[row, key] = -np.inf
        for key in range(max(own + 1, 0), KEYS):
            scores[row, key] = -np.inf


# region soften
@compiled(fastmath=False)
def soften(scores, state, head_dim):
    """One step of the online softmax: turn scores into weights relative to the new m_i, rescale the sums to it, and
    update m_i and l_i."""
    for row in range(len(scores)):
        line = scores.ctypes.data + row * scores.strides[0]
        m_i = max(state[row, head_dim], highest(line))
        alpha = exp2(state[row, head_dim] - m_i)
        for key in range(KEYS):
            scores[row, key] = exp2(scores[row, key] - m_i)
        if alpha != 1:
            for i in range(head_dim):
                state[row, i] *= alpha
        state[row, head_dim], state[row, head_dim + 1] = m_i, state[row, head_dim + 1] * alpha + total(line)


# endregion


# region merge
@compiled(fastmath=False)
def merge(result, state, head_dim):
    """Add the results of further keys: rescale both to the larger m_i and add them up."""
    for row in range(len(result)):
        m_i = max(result[row, head_dim], state[row, head_dim])
        alpha, beta = exp2(result[row, head_dim] - m_i), exp2(state[row, head_dim] - m_i)
        for i in range(head_dim + 2):
            result[row, i] = result[row, i] * alpha + state[row, i] * beta
        result[row, head_dim] = m_i


# endregion
