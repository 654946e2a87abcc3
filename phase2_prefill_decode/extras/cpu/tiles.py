# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention on a CPU for one tile: two matrix products with an online softmax between them.

A tile is some tokens of a sequence and the keys they attend to. For a KV head, each token has one row for each query
head that shares it. The result of a row is a line of float32: the sums of its values, then m_i, then l_i.

What a row gives depends only on its keys and on their positions: a tile of one row and a tile of many do the same
operations in the same order. Keys are taken in blocks of KEYS, from a position that is a multiple of KEYS. At each
multiple of SPLIT the sums begin anew, and are merged with those before. So a sequence can be split there: a thread
computes one part, and the parts are merged in order. Functions that add or multiply here are compiled as written,
without fast math.
"""

from typing import Any

import numpy as np
import torch
from numba.extending import overload

from phase2_prefill_decode.extras.cpu.intrinsics import NO_TENSOR, TAGS, array, compiled, exp2, narrow, widen
from phase2_prefill_decode.extras.cpu.microkernel import FLOAT8, LANES
from phase2_prefill_decode.extras.cpu.rows import left_tag
from phase2_prefill_decode.extras.cpu.scores import (
    FEW,
    KEYS,
    MANY,
    WIDTH,
    add_scores,
    add_values,
    arrange,
    format_of,
    highest,
    numbers_of,
    restore,
    unpack,
    weigh,
)

SPLIT = 512  # keys: a multiple of KEYS
LOWEST = np.float32(-1e30)  # initial m_i: finite, because -inf - -inf is NaN
TILE = np.dtype(
    [
        ("sequence", np.int64),
        ("first", np.int64),  # row of its first token in the batch
        ("tokens", np.int64),
        ("position", np.int64),  # where its first token is in the sequence
        ("head", np.int64),  # its first KV head
        ("heads", np.int64),  # and how many
        ("begin", np.int64),  # the keys that it reads
        ("end", np.int64),
        ("split", np.int64),  # its index among all splits; -1: not split
    ]
)
INT64 = np.dtype(np.int64)
STEP = 4  # bytes
SHARED = 8  # rows of a head from which on its keys and values are unpacked once for all of them


def query_tag(dtype: torch.dtype, cached: torch.dtype) -> Any:
    """The tag of what queries of a dtype are multiplied in, with keys in another."""
    return left_tag(dtype, cached) if cached in TAGS else np.float32(0)


@compiled()
def whole(head_dim):
    """The numbers of a head with padding: whole lines in any format, and whole tiles of sums."""
    return -(-head_dim // KEYS) * KEYS


@compiled()
def width(head_dim):
    """The length of a line of results, in float32."""
    return whole(head_dim) + LANES


@compiled()
def room_for(rows, head_dim):
    """The float32 of scratch memory that a tile needs. `rows`: of all its heads."""
    return rows * (3 * width(head_dim) + KEYS) + 2 * KEYS * whole(head_dim) + 7 * KEYS + LANES


def per_line(like):
    """The numbers of a line."""
    raise NotImplementedError("only inside compiled functions")


def unit(like):
    """What the 1 of a format is as an operand, as a factor to multiply with."""
    raise NotImplementedError("only inside compiled functions")


@overload(per_line)
def _per_line(like):
    count = LANES * numbers_of(format_of(like))
    return lambda like: count


@overload(unit)
def _unit(like):
    number = np.float32(2.0**8 if format_of(like) == FLOAT8 else 1)
    return lambda like: number


# region attend_tile
@compiled()
def attend_tile(tile, query, cached, left_like, window, scale, room):
    """Attend a tile's queries to its keys. Returns a line of results for each KV head and row."""
    keys, values, scales, pages = cached
    head_dim, like, group = query.shape[2], keys[0, 0, 0, 0], query.shape[1] // keys.shape[1]
    rows, line, dims, number = tile.tokens * group, width(head_dim), whole(head_dim), np.float32(0)
    result, room = carve(room[-(room.ctypes.data // STEP) % LANES :], tile.heads * rows, line)
    state, room = carve(room, tile.heads * rows, line)  # since the last multiple of SPLIT
    scores, room = carve(room, tile.heads * rows, np.int64(KEYS))
    factors, room = carve(room, np.int64(1), np.int64(KEYS))
    copies, room = carve(room, np.int64(2 * KEYS), dims)
    numbers, room = carve_integers(room)  # where a block has its keys in the pool, for the first head
    following, room = carve_integers(room)  # and of the next block
    counted, room = carve_integers(room)  # the same in copies
    q = array(room.ctypes.data, (tile.heads * rows, dims), left_like)
    counted[:] = np.arange(KEYS)
    load_queries(tile, query, group, like, q)
    clear(result, dims)
    clear(state, dims)
    find(tile, tile.begin // KEYS * KEYS, keys, pages, following)
    for start in range(tile.begin // KEYS * KEYS, tile.end, KEYS):
        if start % SPLIT == 0 and start > tile.begin:
            merge(result, state, dims)
            clear(state, dims)
        numbers[:] = following
        find(tile, start + KEYS, keys, pages, following)
        size = min(tile.end - start, KEYS)
        for head in range(tile.heads):
            own = slice(head * rows, (head + 1) * rows)
            side, ahead = sides(keys, head, tile.heads, numbers, following)
            if head_dim < dims:
                side = padded(side, head_dim, copies, like, counted)
            if rows < SHARED:
                score(scores[own], q[own], side, ahead, size, like, left_like)
            else:
                side = unpacked(side, dims, copies[KEYS:], like, left_like, counted)
                score(scores[own], q[own], side, None, size, left_like, left_like)
            multiply(scores[own], scales[0], numbers, head * keys.shape[2], scale * unit(like), factors[0])
        hide(scores, tile.position - start, rows, group, window)
        soften(scores, state, dims)
        for head in range(tile.heads):
            own = slice(head * rows, (head + 1) * rows)
            side, ahead = sides(values, head, tile.heads, numbers, following)
            if head_dim < dims:
                side = padded(side, head_dim, copies, like, counted)
            multiply(scores[own], scales[1], numbers, head * keys.shape[2], unit(like), factors[0])
            if rows < SHARED:
                add_few(state[own], scores[own], side, ahead, size, like)
            else:
                side = unpacked(side, dims, copies[KEYS:], like, number, counted)
                add_many(state[own], scores[own], side, size)
    merge(result, state, dims)
    for row in range(len(result)):
        for i in range(0, dims, per_line(like)):
            restore(like, number, result[row, i:].ctypes.data)
    return result


# endregion


@compiled()
def carve(room, lines, line):
    """Split a matrix off the scratch memory; return both."""
    return room[: lines * line].reshape((lines, line)), room[lines * line :]


@compiled()
def carve_integers(room):
    return array(room.ctypes.data, (KEYS,), INT64), room[2 * KEYS :]


@compiled()
def clear(state, dims):
    """No keys yet."""
    state[:] = 0
    state[:, dims] = LOWEST


@compiled()
def load_queries(tile, query, group, like, q):
    q[:] = narrow(np.float32(0), q[0, 0])
    rows = tile.tokens * group
    for row in range(len(q)):
        head, token = tile.head + row // rows, tile.first + row % rows // group
        numbers = query[token, head * group + row % group]
        for i in range(len(numbers)):
            q[row, i] = narrow(widen(numbers[i]), q[0, 0])
        for i in range(0, q.shape[1], per_line(like)):
            arrange(like, q[0, 0], q[row, i:].ctypes.data)


@compiled()
def find(tile, start, keys, pages, numbers):
    """Write the numbers of the keys of a block in the pool, for the first head. Before and after the tile's keys, it is
    that of the nearest of them: the memory there could hold NaN, and 0 times NaN is NaN."""
    position, page_size = max(min(start, tile.end - 1), tile.begin), keys.shape[2]
    entry, offset = position // page_size, position % page_size
    for key in range(KEYS):
        numbers[key] = (pages[tile.sequence, entry] * keys.shape[1] + tile.head) * page_size + offset
        if tile.begin <= start + key < tile.end - 1:
            offset += 1
            if offset == page_size:
                entry, offset = entry + 1, 0


@compiled()
def sides(side, head, heads, numbers, following):
    """The keys or values of a head, as products take them, and those that are read next."""
    first, step, down, own = np.int64(side.ctypes.data), side.strides[1], side.strides[2], np.int64(numbers.ctypes.data)
    ahead = (first + (head + 1) * step, own) if head + 1 < heads else (first, np.int64(following.ctypes.data))
    return (first + head * step, own, down), (*ahead, down)


@compiled()
def padded(side, head_dim, copies, like, counted):
    """Copy a block of heads that are not whole lines, and pad them with zeros."""
    base, numbers, down = side
    numbers, padded = array(numbers, (KEYS,), INT64), array(copies.ctypes.data, (KEYS, copies.shape[1]), like)
    for key in range(KEYS):
        padded[key, :head_dim] = array(base + numbers[key] * down, (head_dim,), like)
        padded[key, head_dim:] = 0
    return np.int64(padded.ctypes.data), np.int64(counted.ctypes.data), padded.strides[0]


@compiled()
def unpacked(side, dims, copies, like, left_like, counted):
    """Write a block of heads as operands."""
    base, numbers, down = side
    numbers = array(numbers, (KEYS,), INT64)
    for key in range(KEYS):
        unpack(like, left_like, base + numbers[key] * down, copies[key].ctypes.data, dims // per_line(like))
    return np.int64(copies.ctypes.data), np.int64(counted.ctypes.data), copies.strides[0]


@compiled()
def score(scores, q, side, ahead, size, like, left_like):
    """The scores of `size` keys, or of some more."""
    lines, last = q.shape[1] // per_line(like), len(q) // FEW * FEW
    for key in range(0, size, LANES):
        for row in range(0, last, FEW):
            own, at = q[row].ctypes.data, scores[row, key:].ctypes.data
            add_scores(FEW, like, left_like, own, q.strides[0], side, ahead, key, lines, at)
        if last < len(q):
            own, at = q[last].ctypes.data, scores[last, key:].ctypes.data
            add_scores(1, like, left_like, own, q.strides[0], side, ahead, key, lines, at)


@compiled()
def add_few(state, weights, side, ahead, size, like):
    """Add `size` values, in tiles of few rows."""
    last, down = len(state) // FEW * FEW, state.strides[0]
    for first in range(0, state.shape[1] // LANES - 1, WIDTH):
        for row in range(0, last, FEW):
            own, at = weights[row].ctypes.data, state[row].ctypes.data
            add_values(FEW, WIDTH, like, own, side, ahead, size, first, at, down)
        if last < len(state):
            own, at = weights[last].ctypes.data, state[last].ctypes.data
            add_values(1, WIDTH, like, own, side, ahead, size, first, at, down)


@compiled()
def add_many(state, weights, side, size):
    """Add `size` values that were unpacked."""
    last, like = len(state) // MANY[0] * MANY[0], np.float32(0)
    for first in range(0, state.shape[1] // LANES - 1, MANY[1]):
        for row in range(0, last, MANY[0]):
            own, at = weights[row].ctypes.data, state[row].ctypes.data
            add_values(MANY[0], MANY[1], like, own, side, None, size, first, at, state.strides[0])
    add_few(state[last:], weights[last:], side, None, size, like)


@compiled(fastmath=False)
def multiply(scores, scales, numbers, shift, factor, factors):
    """Multiply the column of each key by a factor, and by its scale."""
    for key in range(KEYS):
        factors[key] = factor
    if scales != NO_TENSOR:
        for key in range(KEYS):
            factors[key] *= array(scales + (numbers[key] + shift) * STEP, (1,), factors[0])[0]
    for row in range(len(scores)):
        for key in range(KEYS):
            scores[row, key] *= factors[key]


@compiled()
def hide(scores, first, rows, group, window):
    """Mask keys before the window of each row, and keys after the row's own position. `first`: the position of the
    tile, relative to the block; `rows`: of a KV head."""
    for row in range(len(scores)):
        own = first + row % rows // group
        for key in range(min(own + 1 - window, KEYS)):
            scores[row, key] = -np.inf
        for key in range(max(own + 1, 0), KEYS):
            scores[row, key] = -np.inf


# region soften
@compiled(fastmath=False)
def soften(scores, state, dims):
    """One step of the online softmax: turn scores into weights relative to the new m_i, rescale the sums to it, and
    update m_i and l_i."""
    for row in range(len(scores)):
        line = scores[row].ctypes.data
        m_i = max(state[row, dims], highest(line))
        alpha = exp2(state[row, dims] - m_i)
        if alpha != 1:
            for i in range(dims):
                state[row, i] *= alpha
        state[row, dims], state[row, dims + 1] = m_i, state[row, dims + 1] * alpha + weigh(line, m_i)


# endregion


# region merge
@compiled(fastmath=False)
def merge(result, state, dims):
    """Add the results of further keys: rescale both to the larger m_i and add them up."""
    for row in range(len(result)):
        m_i = max(result[row, dims], state[row, dims])
        alpha, beta = exp2(result[row, dims] - m_i), exp2(state[row, dims] - m_i)
        for i in range(dims + 2):
            result[row, i] = result[row, i] * alpha + state[row, i] * beta
        result[row, dims] = m_i


# endregion
