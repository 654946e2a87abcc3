# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What attention on a CPU does in registers: a product of small matrices, and blocks of keys written as columns.

In a loop, `sums[r, c] += left[r, i] * right[i, c]` loads and stores each sum in every step, and waits for memory rather
than arithmetic. Here a tile of the sums is loaded once. Each step loads a line of `right` and multiplies it by one
number for each row of the tile; the sums are stored at the end. LLVM does not generate this from loops, so it is
written in LLVM vectors. They are longer than most processors' registers: LLVM splits them to fit.

A sum is one chain of fused multiply-adds, in the order of i. So it does not depend on the tile that it is part of.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

from phase2_prefill_decode.kernels.cpu.intrinsics import compiled

PROCESSOR = cpu_target.target_context.codegen().magic_tuple()  # that numba compiles for: its name and features
FEATURES = PROCESSOR[2]
HEIGHTS = (
    (16, 8, 4, 3, 2, 1) if "+avx512f" in FEATURES else (6, 2, 1)
)  # rows of tiles; the sums of each fit in registers
COLUMNS = 32  # of a tile of one to three rows; tiles of more rows have half as many
KEYS = 64  # of a block, of which a row has its scores in one vector
LANES = 16  # of a block that is transposed: rows, and 32-bit parts of each
STEP = 4  # bytes

BYTES, WORD, HALF = ir.IntType(64), ir.IntType(32), ir.IntType(16)
NUMBER = ir.FloatType()


@compiled()
def add_product(sums, left, right, like):
    """sums += left @ right. `right` has the addresses of its rows, which are of the type of `like`. Rows of `sums` are
    a multiple of COLUMNS long; those of `right` as long or longer."""
    add_rows(
        len(sums), sums.shape[1], sums.ctypes.data, sums.strides[0], left.ctypes.data, left.strides[0],
        right.ctypes.data, len(right), like,
    )  # fmt: skip


# region product
def _add_rows(heights):
    """A function that adds the product to rows, in tiles of `height` and, at the end, of fewer. `sums` and `left` are
    addresses, `down` the distances between rows, in bytes; `right` is where the addresses of its rows are."""
    height, *lower = heights
    width = COLUMNS if height <= 3 else COLUMNS // 2
    add_tile, add_rest = _add_tile(height, width), _add_rows(lower) if lower else None

    @compiled()
    def add_rows(rows, columns, sums, sums_down, left, left_down, right, steps, like):
        while rows >= height:
            for column in range(0, columns, width):
                add_tile(sums + column * STEP, sums_down, left, left_down, right, steps, column, like)
            rows, sums, left = rows - height, sums + height * sums_down, left + height * left_down
        if add_rest is not None:
            add_rest(rows, columns, sums, sums_down, left, left_down, right, steps, like)

    return add_rows


def _add_tile(height, width):
    """An intrinsic: a tile of sums += `height` rows of left @ `width` columns of right, from `column` on."""
    line_type = ir.VectorType(NUMBER, width)

    @intrinsic
    def add_tile(context, sums, sums_down, left, left_down, right, steps, column, like):
        def generate(context, builder, signature, args):
            sums, sums_down, left, left_down, right, steps, column, _ = args

            def at(base, distance, count, kind):
                place = builder.add(base, builder.mul(distance, count))
                return builder.inttoptr(place, kind.as_pointer())

            fma = ir.FunctionType(line_type, [line_type] * 3)
            fma = cgutils.get_or_insert_function(builder.module, fma, f"llvm.fma.v{width}f32")
            places = [at(sums, sums_down, BYTES(row), line_type) for row in range(height)]
            before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
            first = [builder.load(place, align=STEP) for place in places]
            builder.branch(loop)

            builder.position_at_end(loop)
            step, held = builder.phi(BYTES), [builder.phi(line_type) for _ in places]
            numbers = load(builder, builder.load(at(right, BYTES(8), step, BYTES)), column, like, width)
            totals = []
            for row, total in enumerate(held):
                own = at(builder.add(left, builder.mul(step, BYTES(STEP))), left_down, BYTES(row), NUMBER)
                totals.append(builder.call(fma, [broadcast(builder, builder.load(own), line_type), numbers, total]))
            following = builder.add(step, BYTES(1))
            for phi, start, value in zip([step, *held], [BYTES(0), *first], [following, *totals], strict=True):
                phi.add_incoming(start, before)
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, behind)

            builder.position_at_end(behind)
            for place, total in zip(places, totals, strict=True):
                builder.store(total, place, align=STEP)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, like), generate

    return add_tile


# endregion


def load(builder, row, first, like, count):
    """Load `count` numbers of a row, from the number `first` on, as float32."""
    numbers = ir.VectorType(ir.IntType(like.bitwidth), count)
    place = builder.add(row, builder.mul(first, BYTES(like.bitwidth // 8)))
    return widened(builder, builder.load(builder.inttoptr(place, numbers.as_pointer()), align=1), like)


def widened(builder, numbers, like):
    """Numbers of the type of `like` as float32, those of float8 by 256: see `unit`."""
    kinds = NUMBER, WORD, HALF, ir.HalfType()
    floats, words, halves, half = (ir.VectorType(kind, numbers.type.count) for kind in kinds)
    if like == types.float32:
        return builder.bitcast(numbers, floats)
    if like == types.int16:
        return builder.fpext(builder.bitcast(numbers, half), floats)
    if like == types.int8:
        return builder.sitofp(builder.sext(numbers, words), floats)
    if like == types.uint8:  # float8: exponent and mantissa are those of a float16 that is 2 ** -8 as large
        bits = builder.shl(builder.sext(numbers, halves), halves([7] * halves.count))
        bits = builder.and_(bits, halves([0xBFFF] * halves.count))  # the sign was two bits long
        return builder.fpext(builder.bitcast(bits, half), floats)
    shifted = builder.shl(builder.zext(numbers, words), ir.Constant(words, [16] * words.count))
    return builder.bitcast(shifted, floats)


def unit(like):
    """What the 1 of a format is after it was widened, as a factor to multiply with."""
    raise NotImplementedError("only inside compiled functions")


@overload(unit)
def _unit(like):
    number = np.float32(256 if like == types.uint8 else 1)
    return lambda like: number


def broadcast(builder, number, line_type):
    """A vector of one number repeated."""
    nothing, places = ir.Constant(line_type, ir.Undefined), ir.VectorType(WORD, line_type.count)
    first = builder.insert_element(nothing, number, WORD(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(places, [0] * line_type.count))


add_rows = _add_rows(HEIGHTS)


# region transpose
@intrinsic
def transpose(context, rows, offset, result, down, like):
    """Write a block of LANES rows as columns of float32. `rows`: where the addresses of the rows are; `offset`: where
    the block begins in each, in bytes; `result`: where to write, `down` bytes from one line to the next.

    A lane holds one float32, two numbers of 16 bits or four of 8 bits of a row. Each step exchanges the two blocks off
    the diagonal in blocks of two by two: of one lane, of 2, of 4, and of 8."""

    def generate(context, builder, signature, args):
        rows, offset, result, down, _ = args
        words, numbers = (ir.VectorType(kind, LANES) for kind in (WORD, NUMBER))
        parts = ir.VectorType(ir.IntType(like.bitwidth), LANES)
        lines = []
        for row in range(LANES):
            place = builder.load(builder.inttoptr(builder.add(rows, BYTES(8 * row)), BYTES.as_pointer()))
            lines.append(builder.load(builder.inttoptr(builder.add(place, offset), words.as_pointer()), align=2))
        for size in (1, 2, 4, 8):
            upper = ir.Constant(words, [LANES + lane - size if lane & size else lane for lane in range(LANES)])
            lower = ir.Constant(words, [LANES + lane if lane & size else lane + size for lane in range(LANES)])
            for row in range(LANES):
                if not row & size:
                    pair = lines[row], lines[row + size]
                    lines[row], lines[row + size] = (builder.shuffle_vector(*pair, lanes) for lanes in (upper, lower))
        if like != types.float32:
            shifts = [ir.Constant(words, [shift] * LANES) for shift in range(0, 32, like.bitwidth)]
            lines = [builder.trunc(builder.lshr(line, shift), parts) for line in lines for shift in shifts]
        for number, line in enumerate(lines):
            place = builder.add(result, builder.mul(down, BYTES(number)))
            builder.store(widened(builder, line, like), builder.inttoptr(place, numbers.as_pointer()), align=STEP)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, like), generate


# endregion


def _reduced(name, *start, flag):
    """An intrinsic that reduces the KEYS float32 at an address to one, in an order that depends on nothing."""

    @intrinsic
    def reduce(context, address):
        def generate(context, builder, signature, args):
            line = ir.VectorType(NUMBER, KEYS)
            function = ir.FunctionType(NUMBER, [*(one.type for one in start), line])
            function = cgutils.get_or_insert_function(builder.module, function, f"llvm.vector.reduce.{name}.v{KEYS}f32")
            numbers = builder.load(builder.inttoptr(args[0], line.as_pointer()), align=STEP)
            return builder.call(function, [*start, numbers], fastmath=[flag])

        return types.float32(types.int64), generate

    return reduce


total = _reduced("fadd", NUMBER(0), flag="reassoc")
highest = _reduced("fmax", flag="nnan")  # it may lose a NaN
