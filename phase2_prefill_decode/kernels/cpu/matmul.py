# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""A product of small matrices, with the sums in registers: where a prefill on a CPU spends its time.

In a loop, `sums[r, c] += left[r, i] * right[i, c]` loads and stores each sum in every step, and waits for memory rather
than arithmetic. Here a tile of the sums is loaded once. Each step loads one line of `right` and multiplies it by one
number for each row of the tile; the sums are stored at the end. LLVM does not generate this from loops, so it is
written in LLVM vectors. They are longer than most processors' registers: LLVM splits them to fit.
"""

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from phase2_prefill_decode.kernels.cpu.intrinsics import compiled

COLUMNS = 16  # of a tile
PROCESSOR = cpu_target.target_context.codegen().magic_tuple()  # that numba compiles for: its name and features
FEATURES = PROCESSOR[2]
ROWS = 8 if "+avx512f" in FEATURES else 4  # sums in eight registers of 512 or 256 bits
STEP = 4  # bytes

BYTES, NUMBER, LINE = ir.IntType(64), ir.FloatType(), ir.VectorType(ir.FloatType(), COLUMNS)


@compiled()
def add_product(sums, left, right):
    """sums += left @ right. `sums` has a multiple of ROWS rows; the rows of `sums` and `right` are contiguous and
    a multiple of COLUMNS long. `left` may be a transpose."""
    step, (down, along) = right.strides[0], left.strides
    for column in range(0, sums.shape[1], COLUMNS):
        start = right.ctypes.data + column * STEP
        for row in range(0, sums.shape[0], ROWS):
            tile = sums.ctypes.data + row * sums.strides[0] + column * STEP
            add_tile(tile, sums.strides[0], left.ctypes.data + row * down, down, along, start, step, right.shape[0])


# region product
@intrinsic
def add_tile(context, sums, sums_down, left, left_down, left_along, right, right_down, steps):
    """A tile of sums += ROWS rows of left @ COLUMNS columns of right. All are addresses and distances, in bytes."""

    def generate(context, builder, signature, args):
        sums, sums_down, left, left_down, left_along, right, right_down, steps = args

        def at(base, distance, count, kind):
            place = builder.add(base, builder.mul(distance, count))
            return builder.inttoptr(place, kind.as_pointer())

        def line(place):
            return builder.load(place, align=STEP)

        places = [at(sums, sums_down, BYTES(row), LINE) for row in range(ROWS)]
        before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
        first = [line(place) for place in places]
        builder.branch(loop)

        builder.position_at_end(loop)
        step, held = builder.phi(BYTES), [builder.phi(LINE) for _ in places]
        numbers = line(at(right, right_down, step, LINE))
        totals = []
        for row, total in enumerate(held):
            own = at(builder.add(left, builder.mul(left_along, step)), left_down, BYTES(row), NUMBER)
            product = builder.fmul(broadcast(builder, builder.load(own)), numbers, flags=["contract"])
            totals.append(builder.fadd(total, product, flags=["contract"]))
        following = builder.add(step, BYTES(1))
        for phi, start, value in zip([step, *held], [BYTES(0), *first], [following, *totals], strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, behind)

        builder.position_at_end(behind)
        for place, total in zip(places, totals, strict=True):
            builder.store(total, place, align=STEP)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


# endregion


def broadcast(builder, number):
    """A vector of one number repeated."""
    nothing, places = ir.Constant(LINE, ir.Undefined), ir.VectorType(ir.IntType(32), COLUMNS)
    first = builder.insert_element(nothing, number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(places, [0] * COLUMNS))
