# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Store keys or values in pages on a GPU: the part of a kernel that computes them. Phase 2's norms and rotates them."""

import triton
import triton.language as tl


# region exercise 1.6
@triton.jit
def slot_rows(slot, head, kv_heads: tl.constexpr, page_size: tl.constexpr):
    """The row of a head in the pool for each slot [tokens], in int64 also for int32 slots; -1 for a slot of -1."""
    return tl.where(slot < 0, -1, (slot.to(tl.int64) // page_size * kv_heads + head) * page_size + slot % page_size)


@triton.jit
def store_heads(side, row, first, second, half: tl.constexpr):
    """Store a head of some tokens, which comes in two halves, as the rotation has it. Padding is not stored.

    side           [pages, kv_heads, page_size, 2 * half]: keys, or values
    row            [tokens] int64, as slot_rows has them
    first, second  [tokens, block_half]: each half, rounded up to a power of two
    """
    dim = tl.arange(0, first.shape[1])
    mask = (row >= 0)[:, None] & (dim < half)
    at = row[:, None] * 2 * half + dim
    tl.store(side + at, first, mask=mask)
    tl.store(side + at + half, second, mask=mask)


# endregion
