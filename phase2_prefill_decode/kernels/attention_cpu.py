# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention over pages on a CPU: one kernel for prefills, decodes and any mixture of them.

It is written as for a GPU. The new tokens of a sequence are cut into tiles; a program does one tile for one KV head,
with all query heads that share it: a key or a value is read from its page once for all rows of the tile. A decode is a
tile of one token. There are few of those, so a long context is split between programs, and what they found is combined
at the end. Where it is cut depends on the sequence alone: nobody's numbers change with the company they are in.
"""

import math
from functools import cache

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from phase2_prefill_decode.kernels.attention import Ragged
from phase2_prefill_decode.kernels.numbers_cpu import FAST, TAGS, array, compiled, exp2, narrow, widen
from phase2_prefill_decode.kernels.threads_cpu import OPENMP, on_each_thread, spread, take, threads_for

KEYS = 16  # in a tile, a multiple of four
ROWS = 2048  # numbers in the rows of a tile: with what is found, and keys and values beside them, they fit a fast cache
SPLIT = 512  # keys for one program, where they are split
LOWEST = np.float32(-1e30)  # below every score, and not infinite: infinity minus infinity is NaN

FLOAT32, INT32, INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
TILE = np.dtype(
    [
        ("sequence", np.int64),
        ("first", np.int64),  # row of its first token in the batch
        ("tokens", np.int64),
        ("position", np.int64),  # of its first token in the sequence
        ("begin", np.int64),  # the keys to read
        ("end", np.int64),
        ("split", np.int64),  # its place among all splits; -1: it is not split
    ]
)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, ragged: Ragged, scale: float, window: int | None = None
) -> Tensor:
    """Any ragged batch. The pool and the geometry are contiguous, as KVPool and the runner make them."""
    query = query.contiguous()
    result = torch.empty_like(query)
    tokens, heads, head_dim = query.shape
    attend_kernel(
        (query.data_ptr(), keys.data_ptr(), values.data_ptr(), result.data_ptr(), ragged.pages.data_ptr()),
        ragged.starts.data_ptr(),
        ragged.lengths.data_ptr(),
        (tokens, heads, head_dim),
        tuple(keys.shape),
        tuple(ragged.pages.shape),
        ragged.longest,
        window or ragged.longest + 1,
        scale * math.log2(math.e),  # 2 ** (x log2 e) is e ** x
        TAGS[query.dtype],
        attend_body(query.dtype),
        threads_for(tokens * heads * head_dim * ragged.longest / 15e3),
        OPENMP,
    )
    return result


@compiled()
def attend_kernel(
    addresses, starts, lengths, query_shape, pool_shape, table_shape, longest, window, scale, like, body, threads,
    openmp,
):  # fmt: skip
    """Plan the programs, have them run, and combine what was split."""
    sequences, kv_heads, (_, heads, head_dim) = table_shape[0], pool_shape[1], query_shape
    starts, lengths = array(starts, (sequences + 1,), INT32), array(lengths, (sequences,), INT32)
    tiles, splits, split_rows = plan(starts, lengths, longest, window, heads // kv_heads, head_dim)
    partial = np.empty((splits, kv_heads, split_rows, width(head_dim)), np.float32)
    scratch = np.empty((threads, lines(heads // kv_heads, head_dim) + 1, width(head_dim)), np.float32)
    own = np.int64(tiles.ctypes.data), len(tiles), np.int64(partial.ctypes.data), splits, split_rows
    work = np.array(
        (0, 0, *addresses, *query_shape, *pool_shape, *table_shape, *own, np.int64(scratch.ctypes.data), window,
         np.float64(scale).view(np.int64))
    )  # fmt: skip
    spread(body, work, threads, openmp)
    if splits > 0:
        combine(tiles, partial, array(addresses[3], query_shape, like))
    return len(scratch)  # it lives until here


# region plan
@compiled()
def plan(starts, lengths, longest, window, group, head_dim):
    """The tiles of a batch, how many of them are splits, and the rows of the largest of those."""
    most = max(ROWS // (group * head_dim), 1)  # tokens in a tile
    tiles = np.empty(starts[len(lengths)] + len(lengths) * (longest // SPLIT + 1), TILE)
    count, splits, split_rows = 0, 0, 0
    for sequence in range(len(lengths)):
        new = starts[sequence + 1] - starts[sequence]
        for done in range(0, new, most):
            tokens, position = min(new - done, most), lengths[sequence] - new + done
            begin, end = max(position + 1 - window, 0), max(position + tokens, 0)
            is_split = new <= most and end - begin > SPLIT
            step = SPLIT if is_split else max(end - begin, 1)
            for start in range(begin, max(end, begin + 1), step):
                tile = tiles[count]
                tile.sequence, tile.first, tile.tokens = sequence, starts[sequence] + done, tokens
                tile.position, tile.begin, tile.end, tile.split = position, start, min(start + step, end), -1
                count += 1
                if is_split:
                    tile.split = splits
                    splits, split_rows = splits + 1, max(split_rows, tokens * group)
    return tiles[:count], splits, split_rows


# endregion


@compiled()
def width(head_dim):
    """Of a line of float32: what is found for a row is head_dim sums, its top score and its total. In cache lines."""
    return head_dim // 16 * 16 + 16 + (head_dim % 16 > 14) * 16


@compiled()
def lines(group, head_dim):
    """What a thread works in: a query, scores and findings for each row, and a tile of keys and of values."""
    return 3 * max(ROWS // head_dim, group) + 2 * KEYS


@cache
def attend_body(dtype: torch.dtype) -> int:
    """What each thread does: programs, one after the other, until there are none left."""
    like = TAGS[dtype]

    def body(work):
        (
            _, _, query, keys, values, result, pages,
            tokens, heads, head_dim, num_pages, kv_heads, page_size, _, sequences, most_pages,
            tiles, count, partial, splits, split_rows, scratch, window, scale,
        ) = to_fixed_tuple(array(work, (24,), INT64), 24)  # fmt: skip
        batch, pool, group = (tokens, heads, head_dim), (num_pages, kv_heads, page_size, head_dim), heads // kv_heads
        query, result = array(query, batch, like), array(result, batch, like)
        cached = array(keys, pool, like), array(values, pool, like), array(pages, (sequences, most_pages), INT32)
        tiles = array(tiles, (count,), TILE)
        partial = array(partial, (splits, kv_heads, split_rows, width(head_dim)), FLOAT32)
        thread, room = take(work + 8), (lines(group, head_dim) + 1, width(head_dim))
        room = array((scratch + thread * room[0] * room[1] * 4 + 63) // 64 * 64, room, FLOAT32)
        scale = np.float32(np.int64(scale).view(np.float64))
        program = take(work)
        while program < count * kv_heads:
            tile, head = tiles[program // kv_heads], program % kv_heads
            attend_tile(tile, head, query, cached, window, scale, room)
            if tile.split < 0:
                write(tile, head, group, room, result)
            else:
                keep(room[: tile.tokens * group], partial[tile.split, head])
            program = take(work)

    return on_each_thread(body)


# region tile
@compiled()
def attend_tile(tile, head, query, cached, window, scale, room):
    """The queries of a tile against its keys, KEYS at a time. What it finds for each row is in the first lines."""
    keys, values, pages = cached
    page_size, head_dim, group = keys.shape[2], keys.shape[3], query.shape[1] // keys.shape[1]
    rows = tile.tokens * group
    found, q, scores, rest = room[:rows], room[rows : 2 * rows], room[2 * rows : 3 * rows], room[3 * rows :]
    k, v = rest[:KEYS], rest[KEYS : 2 * KEYS]
    for row in range(rows):
        load(query[tile.first + row // group, head * group + row % group], scale, q[row])
        found[row, :] = 0
        found[row, head_dim] = LOWEST
    entry, offset = tile.begin // page_size, tile.begin % page_size  # in the page table, and in that page
    for start in range(tile.begin, tile.end, KEYS):
        size = min(tile.end - start, KEYS)
        for key in range(size):
            page = pages[tile.sequence, entry]
            load(keys[page, head, offset], np.float32(1), k[key])
            load(values[page, head, offset], np.float32(1), v[key])
            offset += 1
            if offset == page_size:
                entry, offset = entry + 1, 0
        padded = -(-size // 4) * 4
        k[size:padded, :] = 0  # what lies there could be NaN, and 0 times NaN is NaN
        v[size:padded, :] = 0
        for row in range(rows):
            score(q[row], k, scores[row], padded, head_dim)
            own = tile.position + row // group - start  # the key at the row's own position
            hide(scores[row], max(own + 1 - window, 0), max(own + 1, 0), padded)
            absorb(scores[row], v, found[row], padded, head_dim)


# endregion


@compiled()
def load(numbers, factor, line):
    """A row of the batch or of a page, as float32."""
    for i in range(len(numbers)):
        line[i] = widen(numbers[i]) * factor


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


@compiled()
def keep(found, partial):
    for row in range(found.shape[0]):
        for i in range(found.shape[1]):
            partial[row, i] = found[row, i]


@compiled()
def write(tile, head, group, found, result):
    """The sums by their total are the weighted mean of the values. A row that saw no key is zero."""
    head_dim = result.shape[2]
    for row in range(tile.tokens * group):
        mean = result[tile.first + row // group, head * group + row % group]
        total = found[row, head_dim + 1]
        factor = np.float32(1) / total if total != 0 else np.float32(0)
        for i in range(head_dim):
            mean[i] = narrow(found[row, i] * factor, mean[i])


# region combine
@compiled()
def combine(tiles, partial, result):
    """The splits of a tile become one: each is scaled from its own top score to the highest, then they add up."""
    kv_heads, head_dim = partial.shape[1], result.shape[2]
    group = result.shape[1] // kv_heads
    for number in range(len(tiles)):
        tile = tiles[number]
        if tile.split < 0 or (number > 0 and tiles[number - 1].first == tile.first):
            continue  # not split, or not the first split
        behind = number + 1
        while behind < len(tiles) and tiles[behind].first == tile.first:
            behind += 1
        parts = partial[tile.split : tile.split + behind - number]
        for head in range(kv_heads):
            for row in range(tile.tokens * group):
                merge(parts[:, head, row], head_dim)
            write(tile, head, group, parts[0, head], result)


@compiled()
def merge(parts, head_dim):
    """Into the first."""
    top = LOWEST
    for part in parts:
        top = max(top, part[head_dim])
    first = parts[0]
    shrink = exp2(first[head_dim] - top)
    for i in range(head_dim + 2):
        first[i] *= shrink
    for part in parts[1:]:
        shrink = exp2(part[head_dim] - top)
        for i in range(head_dim):
            first[i] += part[i] * shrink
        first[head_dim + 1] += part[head_dim + 1] * shrink


# endregion
