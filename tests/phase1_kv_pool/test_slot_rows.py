# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The rows that the kernels store in, from slots of 32 bits: no pool of that size is needed to see them overflow."""

import torch
import triton
import triton.language as tl

from phase1_kv_pool.kernels.triton.store import slot_rows
from tests.phase1_kv_pool.support import device_of


@triton.jit
def rows_kernel(slots, rows, length: tl.constexpr):
    at = tl.arange(0, length)
    tl.store(rows + at, slot_rows(tl.load(slots + at), 1, 8, 16))


def test_rows_beyond_two_to_the_31_follow_from_slots_of_32_bits() -> None:
    slots = [6, -1, 2**31 - 1, 2**28 + 3]
    rows = torch.zeros(4, dtype=torch.int64, device=device_of("triton"))
    rows_kernel[(1,)](torch.tensor(slots, dtype=torch.int32, device=rows.device), rows, 4)
    wanted = [-1 if slot < 0 else (slot // 16 * 8 + 1) * 16 + slot % 16 for slot in slots]
    assert rows.tolist() == wanted, f"rows of the slots {slots}, int32, of head 1 of 8, in pages of 16"
