# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A product of few rows with a bfloat16 weight: it reads the weight once, at the speed of memory.

A processor prefetches one stream of addresses well and eight badly. So a weight is packed in tiles: TILE of its rows,
LINE numbers of each in turn, one tile after the other. A step of the loop loads a line of each row of a tile. A line is
sixteen pairs of bfloat16 in 32-bit integers: the lower half of each, shifted up, is a float32, and the upper half with
the lower masked off is another. The input is split alike, into the even and the odd numbers of each line.

As in `matmul`, LLVM does not generate this from loops, so the loop is written in LLVM vectors.
"""

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from phase2_prefill_decode.kernels.cpu.intrinsics import compiled, widen

TILE, LINE = 8, 32
HALF = LINE // 2

BYTES, NUMBER = ir.IntType(64), ir.FloatType()
PAIRS, NUMBERS = ir.VectorType(ir.IntType(32), HALF), ir.VectorType(NUMBER, HALF)


def fits(weight: Tensor) -> bool:
    """Whether a weight is made of whole tiles."""
    return weight.dtype == torch.bfloat16 and weight.shape[0] % TILE == 0 and weight.shape[1] % LINE == 0


def pack_tiles(weight: Tensor, packed: Tensor) -> None:
    """Write a weight [out, in] into `packed` [out * in], tile by tile."""
    rows, width = weight.shape
    tiles = weight.view(rows // TILE, TILE, width // LINE, LINE).transpose(1, 2)
    packed.view(tiles.shape).copy_(tiles)


@compiled()
def split(x, halves):
    """Write a row of the model's dtype as float32, the even and the odd numbers of each line apart."""
    for line in range(0, len(x), LINE):
        for i in range(HALF):
            halves[line + i] = widen(x[line + 2 * i])
            halves[line + HALF + i] = widen(x[line + 2 * i + 1])


@compiled()
def multiply_tile(weight, tile, halves, sums):
    """The products of one tile with all rows: sums[row, i] is that of its row i. Rows after two read the tile again,
    from the L1 cache."""
    rows, width = halves.shape
    address, steps, row = weight + tile * TILE * width * 2, width // LINE, 0
    while row + 1 < rows:
        add_two(address, halves[row:].ctypes.data, width * 4, steps, sums[row:].ctypes.data)
        row += 2
    if row < rows:
        add_one(address, halves[row:].ctypes.data, width * 4, steps, sums[row:].ctypes.data)


# region dots
def _dots(rows):
    """An intrinsic for `rows` rows of `halves`, which are `down` bytes apart: their dot products with a tile."""

    @intrinsic
    def dots(context, tile, halves, down, steps, sums):
        def generate(context, builder, signature, args):
            tile, halves, down, steps, sums = args

            def at(base, distance, kind):
                return builder.inttoptr(builder.add(base, distance), kind.as_pointer())

            def function(name, result, *arguments):
                return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)

            fma = function(f"llvm.fma.v{HALF}f32", NUMBERS, NUMBERS, NUMBERS, NUMBERS)
            reduce = function(f"llvm.vector.reduce.fadd.v{HALF}f32", NUMBER, NUMBER, NUMBERS)
            before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
            builder.branch(loop)

            builder.position_at_end(loop)
            step, held = builder.phi(BYTES), [builder.phi(NUMBERS) for _ in range(rows * TILE)]
            start = builder.mul(step, BYTES(LINE * 4))
            inputs = [builder.add(halves, builder.add(start, builder.mul(down, BYTES(row)))) for row in range(rows)]
            even = [builder.load(at(place, BYTES(0), NUMBERS), align=4) for place in inputs]
            odd = [builder.load(at(place, BYTES(HALF * 4), NUMBERS), align=4) for place in inputs]
            line, totals = builder.mul(step, BYTES(TILE * LINE * 2)), []
            for i in range(TILE):
                pairs = builder.load(at(tile, builder.add(line, BYTES(i * LINE * 2)), PAIRS), align=4)
                low = builder.bitcast(builder.shl(pairs, ir.Constant(PAIRS, [16] * HALF)), NUMBERS)
                high = builder.bitcast(builder.and_(pairs, ir.Constant(PAIRS, [0xFFFF0000] * HALF)), NUMBERS)
                for row in range(rows):
                    total = builder.call(fma, [low, even[row], held[i * rows + row]])
                    totals.append(builder.call(fma, [high, odd[row], total]))
            following = builder.add(step, BYTES(1))
            step.add_incoming(BYTES(0), before)
            step.add_incoming(following, loop)
            for phi, total in zip(held, totals, strict=True):
                phi.add_incoming(ir.Constant(NUMBERS, [0.0] * HALF), before)
                phi.add_incoming(total, loop)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, behind)

            builder.position_at_end(behind)
            for i in range(TILE):
                for row in range(rows):
                    total = builder.call(reduce, [NUMBER(0), totals[i * rows + row]], fastmath=["reassoc"])
                    builder.store(total, at(sums, BYTES((row * TILE + i) * 4), NUMBER), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return dots


add_one, add_two = _dots(1), _dots(2)
# endregion
