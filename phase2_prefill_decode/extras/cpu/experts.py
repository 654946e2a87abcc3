# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The grouped product of a CPU: each row with the matrix of its group, in one call.

The matrices of all groups are one packed weight. An item is a block of a group with up to ITEM_ROWS of its rows; a
group without rows has no items, and its weights are not read. Where the outputs of a group are no multiple of a block,
neighbours share one, and each takes its own columns of the result.

As in `product`, a row's result does not depend on the other rows.
"""

from functools import cache

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from phase2_prefill_decode.extras.cpu.intrinsics import TAGS, array, compiled, narrow
from phase2_prefill_decode.extras.cpu.microkernel import BLOCK
from phase2_prefill_decode.extras.cpu.openmp import OPENMP, address_of, call, launch, take, threads_for
from phase2_prefill_decode.extras.cpu.product import ITEM_ROWS, PackedWeight, bodies, described

INT32, INT64, UINT8 = map(np.dtype, (np.int32, np.int64, np.uint8))


class PackedGroups:
    """A packed weight whose rows are those of several matrices of one size, one after the other."""

    def __init__(self, weight: PackedWeight, groups: int) -> None:
        self.weight, self.groups, self.outputs = weight, groups, weight.outputs // groups

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        weight, result = self.weight, rows.new_empty(len(rows), self.outputs)
        rows = rows.contiguous() if weight.order is None else rows[:, weight.order]
        left = torch.empty(len(rows), weight.stride(rows.dtype), dtype=torch.uint8)
        numbers = left.data_ptr(), left.shape[1], len(rows), *weight.numbers(rows.dtype)
        launch(bodies(rows.dtype)[0], (rows.data_ptr(), *numbers), threads_for(rows.numel() / 1e3), OPENMP)
        groups = result.data_ptr(), ends.data_ptr(), self.groups, self.outputs
        threads = threads_for(self.outputs * weight.inputs * len(rows) / 60e3)
        launch(grouped_body(rows.dtype), (*groups, *numbers), threads, OPENMP)
        return result


# region grouped
@cache
def grouped_body(dtype: torch.dtype) -> int:
    """The body of a thread, for rows of a dtype. Items are in the order of their groups, so a thread that has taken one
    finds its group from the last group it had."""
    like = TAGS[dtype]

    def multiply(work):
        _, result, ends, groups, width, left, stride, rows = to_fixed_tuple(array(work, (8,), INT64), 8)
        weight, sums = work + 64, np.empty((ITEM_ROWS, BLOCK), np.float32)
        result, left = array(result, (rows, width), like), array(left, (rows, stride), UINT8)
        ends = array(ends, (groups,), INT32)
        group, start, stop, first, last, block, blocks = -1, np.int64(0), np.int64(0), 0, 0, 0, 1
        item = take(work)
        while True:
            while item >= last and group + 1 < groups:
                group += 1
                start, stop, first, block = stop, np.int64(ends[group]), last, group * width // BLOCK
                blocks = -(-(group + 1) * width // BLOCK) - block
                last = first + blocks * -(-(stop - start) // ITEM_ROWS)
            if item >= last:
                break
            row, own = start + (item - first) // blocks * ITEM_ROWS, block + (item - first) % blocks
            write_part(weight, own, group * width, left[row:], sums, result[row : min(row + ITEM_ROWS, stop)])
            item = take(work)

    return address_of(multiply)


@compiled()
def write_part(weight, block, start, left, sums, result):
    """The products of rows with a block, as those columns of `result` that are of the group whose outputs are from
    `start` on."""
    _, multiply, _, _ = described(weight)
    call(multiply, (weight, block, left.ctypes.data, left.shape[1], len(result), sums.ctypes.data))
    first = block * BLOCK
    begin, end = max(first, start), min(first + BLOCK, start + result.shape[1])
    for row in range(len(result)):
        own, line = sums[row, begin - first : end - first], result[row, begin - start : end - start]
        for i in range(len(line)):
            line[i] = narrow(own[i], result[0, 0])


# endregion
