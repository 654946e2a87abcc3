# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A first kernel and eight puzzles in Triton, from a copy to paged attention in splits. No engine uses them.

Each is a kernel and the function that launches it. Where there is no GPU, set TRITON_INTERPRET=1.
"""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-1e38)  # the maximum of no scores: finite, because -inf - -inf is NaN
PRECISION = tl.constexpr("ieee")  # products of float32 in full float32
MARGIN = 64


def blank(like: Tensor, *shape: int) -> Tensor:
    """A tensor of NaN, with a margin of NaN before and after it: a number that no program stores stays NaN, and one
    that is stored outside is seen."""
    return like.new_full((prod(shape) + 2 * MARGIN,), torch.nan)[MARGIN:-MARGIN].view(shape)


# region first
@triton.jit
def scale_kernel(x, y, factor, length, block: tl.constexpr):
    """y[i] = x[i] * factor."""
    p = tl.program_id(0)
    at = p * block + tl.arange(0, block)
    mask = at < length
    numbers = tl.load(x + at, mask=mask, other=0.0)
    tl.store(y + at, numbers * factor, mask=mask)


def scale(x: Tensor, factor: float, block: int = 4) -> Tensor:
    y = blank(x, len(x))
    programs = triton.cdiv(len(x), block)
    scale_kernel[(programs,)](x, y, factor, len(x), block)
    return y


# endregion


@triton.jit
def copy_kernel(x, y, block: tl.constexpr):
    """y[i] = x[i]: program p copies the numbers p * block to (p + 1) * block - 1."""
    # region exercise 2.7
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, tl.load(x + at))
    # endregion


def copy(x: Tensor, block: int = 4) -> Tensor:
    """len(x) is a multiple of block."""
    y = blank(x, len(x))
    copy_kernel[(len(x) // block,)](x, y, block)
    return y


@triton.jit
def masked_copy_kernel(
    x,  # rows of `width` numbers, `stride` apart
    y,  # [rows, width]
    stride,
    rows,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,  # width, rounded up to a power of two
):
    """y[r, c] = x[r, c]: program p copies the rows p * block_rows to (p + 1) * block_rows - 1, as far as they exist."""
    # region exercise 2.8
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_width)
    mask = (row < rows)[:, None] & (column < width)
    numbers = tl.load(x + row[:, None] * stride + column, mask=mask)
    tl.store(y + row[:, None] * width + column, numbers, mask=mask)
    # endregion


def masked_copy(x: Tensor, block_rows: int = 4) -> Tensor:
    y = blank(x, *x.shape)
    grid = (triton.cdiv(len(x), block_rows),)
    masked_copy_kernel[grid](x, y, x.stride(0), *x.shape, block_rows, triton.next_power_of_2(x.shape[1]))
    return y


@triton.jit
def gather_kernel(
    pages,  # [pages, page_size, width]
    table,  # the page of the tokens 0 to page_size - 1, of the next page_size tokens, ...
    y,  # [length, width]
    length,
    page_size: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """y[t] = pages[table[t // page_size], t % page_size]: program p has tokens p * block to (p + 1) * block - 1."""
    # region exercise 2.9
    token, column = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, width)
    page = tl.load(table + token // page_size, mask=token < length, other=0)
    row = page * page_size + token % page_size
    mask = (token < length)[:, None]
    numbers = tl.load(pages + row[:, None] * width + column, mask=mask)
    tl.store(y + token[:, None] * width + column, numbers, mask=mask)
    # endregion


def gather(pages: Tensor, table: Tensor, length: int, block: int = 8) -> Tensor:
    y = blank(pages, length, pages.shape[2])
    gather_kernel[(triton.cdiv(length, block),)](pages, table, y, length, *pages.shape[1:], block)
    return y


@triton.jit
def softmax_kernel(x, y, width: tl.constexpr, block: tl.constexpr):
    """The softmax of each row of x [rows, width]: program r computes row r. `block` is width, rounded up."""
    # region exercise 2.10
    column = tl.arange(0, block)
    at = tl.program_id(0) * width + column
    scores = tl.load(x + at, mask=column < width, other=-float("inf"))
    weights = tl.exp(scores - tl.max(scores, 0))
    tl.store(y + at, weights / tl.sum(weights, 0), mask=column < width)
    # endregion


def softmax(x: Tensor) -> Tensor:
    y = blank(x, *x.shape)
    softmax_kernel[(len(x),)](x, y, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return y


@triton.jit
def online_kernel(
    scores,  # [rows, keys]
    values,  # [keys]
    y,  # [rows]
    keys,
    block: tl.constexpr,
):
    """The mean of the values, weighted by the softmax of a row of scores: program r computes row r."""
    row = tl.program_id(0)
    m_i, l_i, acc = -1e38, 0.0, 0.0
    for first in range(0, keys, block):
        # region exercise 2.11
        key = first + tl.arange(0, block)
        score = tl.load(scores + row * keys + key, mask=key < keys, other=-float("inf"))
        value = tl.load(values + key, mask=key < keys, other=0.0)
        m_new = tl.maximum(m_i, tl.max(score, 0))
        alpha, p = tl.exp(m_i - m_new), tl.exp(score - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p * value, 0)
        m_i = m_new
        # endregion
    tl.store(y + row, acc / l_i)


def online(scores: Tensor, values: Tensor, block: int = 4) -> Tensor:
    y = blank(scores, len(scores))
    online_kernel[(len(scores),)](scores, values, y, len(values), block)
    return y


@triton.jit
def attention_kernel(
    query,  # [rows, head_dim]
    keys,  # [length, head_dim]
    values,
    y,  # [rows, head_dim]
    length,
    scale,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
):
    """Attention of all rows to all keys, `tile` keys at a time: one program."""
    row, dim = tl.arange(0, rows), tl.arange(0, head_dim)
    q = tl.load(query + row[:, None] * head_dim + dim)
    m_i, l_i = tl.full([rows], LOWEST, tl.float32), tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, head_dim], tl.float32)
    for first in range(0, length, tile):
        # region exercise 2.12
        key = first + tl.arange(0, tile)
        at = key[:, None] * head_dim + dim
        k = tl.load(keys + at, mask=(key < length)[:, None], other=0.0)
        v = tl.load(values + at, mask=(key < length)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(key < length, scores, -float("inf"))
        m_i, l_i, acc = update(scores, v, m_i, l_i, acc)
        # endregion
    tl.store(y + row[:, None] * head_dim + dim, acc / l_i[:, None])


@triton.jit
def update(scores, v, m_i, l_i, acc):
    """The step of `online_kernel` for a block of rows: scores [rows, tile], v [tile, head_dim], m_i and l_i [rows], acc
    [rows, head_dim]. Returns the new m_i, l_i and acc."""
    m_new = tl.maximum(m_i, tl.max(scores, 1))
    alpha, p = tl.exp(m_i - m_new), tl.exp(scores - m_new[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l_i * alpha + tl.sum(p, 1), acc


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, tile: int = 16) -> Tensor:
    y = blank(query, *query.shape)
    attention_kernel[(1,)](query, keys, values, y, len(keys), scale, *query.shape, tile)
    return y


@triton.jit
def paged_kernel(
    query,  # [rows, head_dim]
    keys,  # [pages, page_size, head_dim]
    values,
    table,  # the pages of the sequence
    y,  # [rows, head_dim]
    length,
    scale,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    tile: tl.constexpr,
):
    """`attention_kernel` over pages."""
    row, dim = tl.arange(0, rows), tl.arange(0, head_dim)
    q = tl.load(query + row[:, None] * head_dim + dim)
    m_i, l_i = tl.full([rows], LOWEST, tl.float32), tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, head_dim], tl.float32)
    m_i, l_i, acc = walk(0, length, q, keys, values, table, length, scale, m_i, l_i, acc, head_dim, page_size, tile)
    tl.store(y + row[:, None] * head_dim + dim, acc / l_i[:, None])


@triton.jit
def walk(
    begin, end, q, keys, values, table, length, scale, m_i, l_i, acc,
    head_dim: tl.constexpr, page_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `begin` to `end`. Returns m_i, l_i and acc."""
    # region exercise 2.13
    dim = tl.arange(0, head_dim)
    for first in range(begin, end, tile):
        key = first + tl.arange(0, tile)
        page = tl.load(table + key // page_size, mask=key < length, other=0)
        at = (page * page_size + key % page_size)[:, None] * head_dim + dim
        k = tl.load(keys + at, mask=(key < length)[:, None], other=0.0)
        v = tl.load(values + at, mask=(key < length)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(key < length, scores, -float("inf"))
        m_i, l_i, acc = update(scores, v, m_i, l_i, acc)
    return m_i, l_i, acc
    # endregion


def paged(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int, scale: float, tile: int = 16
) -> Tensor:
    y, (rows, head_dim) = blank(query, *query.shape), query.shape
    paged_kernel[(1,)](query, keys, values, table, y, length, scale, rows, head_dim, keys.shape[1], tile)
    return y


@triton.jit
def split_kernel(
    query,  # [rows, head_dim]
    keys,  # [pages, page_size, head_dim]
    values,
    table,
    parts,  # [splits, rows, head_dim]
    lse,  # [splits, rows]
    length,
    scale,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    tile: tl.constexpr,
    chunk: tl.constexpr,  # keys of a split, a multiple of tile; the last may be shorter
):
    """Program s attends to the keys s * chunk to (s + 1) * chunk - 1, as far as they exist."""
    row, dim, split = tl.arange(0, rows), tl.arange(0, head_dim), tl.program_id(0)
    q = tl.load(query + row[:, None] * head_dim + dim)
    m_i, l_i = tl.full([rows], LOWEST, tl.float32), tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, head_dim], tl.float32)
    # region exercise 2.14
    begin, end = split * chunk, tl.minimum((split + 1) * chunk, length)
    m_i, l_i, acc = walk(begin, end, q, keys, values, table, length, scale, m_i, l_i, acc, head_dim, page_size, tile)
    part = split * rows + row
    tl.store(parts + part[:, None] * head_dim + dim, acc / l_i[:, None])
    tl.store(lse + part, m_i + tl.log(l_i))
    # endregion


@triton.jit
def join_kernel(
    parts,  # [splits, rows, head_dim]
    lse,  # [splits, rows]
    y,  # [rows, head_dim]
    splits,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    block_splits: tl.constexpr,  # splits, rounded up to a power of two
):
    """Program r joins the splits of row r: their mean, in which split s has the weight exp(lse[s, r])."""
    row, dim, split = tl.program_id(0), tl.arange(0, head_dim), tl.arange(0, block_splits)
    # region exercise 2.14
    part = split * rows + row
    sums = tl.load(lse + part, mask=split < splits, other=-float("inf"))
    p = tl.exp(sums - tl.max(sums, 0))
    numbers = tl.load(parts + part[:, None] * head_dim + dim, mask=(split < splits)[:, None], other=0.0)
    tl.store(y + row * head_dim + dim, tl.sum(p[:, None] * numbers, 0) / tl.sum(p, 0))
    # endregion


def in_splits(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int, scale: float, chunk: int, tile: int = 16
) -> Tensor:
    splits, (rows, head_dim) = triton.cdiv(length, chunk), query.shape
    y, parts, lse = (blank(query, *shape) for shape in (query.shape, (splits, rows, head_dim), (splits, rows)))
    split_kernel[(splits,)](
        query, keys, values, table, parts, lse, length, scale, rows, head_dim, keys.shape[1], tile, chunk
    )
    join_kernel[(rows,)](parts, lse, y, splits, rows, head_dim, triton.next_power_of_2(splits))
    return y
