# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A matrix in blocks of 64 outputs, as a product reads it: in a block come the numbers of the first input for all its
outputs, then those of the second, and so on.
"""

import math
from functools import cache
from threading import Lock

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor
from torch.nn.functional import pad

from phase1_kv_pool.extras.touched import HUGE_PAGE, touch
from phase1_kv_pool.memory import LINE, allocate
from phase2_prefill_decode.extras.cpu.intrinsics import array, compiled
from phase2_prefill_decode.extras.cpu.microkernel import BLOCK, LANES
from phase2_prefill_decode.extras.cpu.openmp import OPENMP, address_of, launch, take, threads_for
from phase2_prefill_decode.extras.cpu.scores import transpose

INT64 = np.dtype(np.int64)
TOGETHER = {torch.bfloat16: 2}  # neighbouring numbers of an output that lie side by side; else one
UNITS = {2: torch.int16, 4: torch.int32}


class Blocks:
    """A matrix [outputs, columns] as [blocks, units, BLOCK]. A unit is what an output has side by side: the number of a
    column, in bfloat16 those of two. Outputs and columns that are missing are zeros. Rows are added in their order."""

    def __init__(self, outputs: int, columns: int, dtype: torch.dtype) -> None:
        together = TOGETHER.get(dtype, 1)
        units, self._size = -(-columns // together), together * dtype.itemsize
        self.tensor = Arena.empty(torch.Size((-(-outputs // BLOCK), units, BLOCK)), UNITS[self._size])
        self.tensor[outputs // BLOCK :] = 0
        self._count = 0

    def add(self, rows: Tensor) -> None:
        units = self.tensor.shape[1]
        missing = units * self._size // rows.itemsize - rows.shape[1]
        rows = pad(rows, (0, missing)) if missing else rows.contiguous()
        arguments = rows.data_ptr(), len(rows), units, self.tensor.data_ptr(), self._count
        launch(blocks_body(self._size), arguments, threads_for(rows.nbytes / 2e3), OPENMP)
        self._count += len(rows)

    def rows(self, outputs: Tensor) -> Tensor:
        """The units of these outputs."""
        return self.tensor[outputs // BLOCK, :, outputs % BLOCK]


@cache
def blocks_body(size: int) -> int:
    """The body of a thread that adds rows to blocks, for units of some bytes. An item has LANES rows."""
    like = {2: np.uint16(0), 4: np.uint32(0)}[size]

    def body(work):
        _, source, count, units, target, first = to_fixed_tuple(array(work, (6,), INT64), 6)
        rows, places = array(source, (count, units), like), np.empty(LANES, np.int64)
        blocks = array(target, (-(-(first + count) // BLOCK), units, BLOCK), like)
        item = take(work)
        while item * LANES < count:
            start, done = item * LANES, 0
            block, lane = (first + start) // BLOCK, (first + start) % BLOCK
            if size == 4 and start + LANES <= count and lane % LANES == 0:
                for row in range(LANES):
                    places[row] = rows[start + row].ctypes.data
                done = units - units % LANES
                for unit in range(0, done, LANES):
                    result = blocks[block, unit].ctypes.data + lane * size
                    transpose(places.ctypes.data, unit * size, result, BLOCK * size)
            put_rows(rows[start : start + LANES], blocks, first + start, done)
            item = take(work)

    return address_of(body)


# region exercise 9.4
@compiled()
def put_rows(rows, blocks, first, done):
    """Put rows [rows, units], of the outputs from `first` on, into blocks; but for the units that are `done`."""
    for row in range(len(rows)):
        block, lane = blocks[(first + row) // BLOCK], (first + row) % BLOCK
        for unit in range(done, rows.shape[1]):
            block[unit, lane] = rows[row, unit]


# endregion


class Arena:
    """Memory for packed weights, one behind the other: the weights of a small model share huge pages."""

    SIZE = 64 << 20
    _lock, _free = Lock(), torch.empty(0, dtype=torch.uint8)

    @classmethod
    def empty(cls, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        with cls._lock:
            size = shape.numel() * dtype.itemsize
            if size > len(cls._free):
                cls._free = allocate(max(size, cls.SIZE))
            place, cls._free = cls._free[:size], cls._free[-(-size // LINE) * LINE :]
        if size > HUGE_PAGE:
            touch([(place.data_ptr(), size)], torch.get_num_threads(), math.inf)
        return place.view(dtype).view(shape)
