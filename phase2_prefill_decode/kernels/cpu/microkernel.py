# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The microkernel of a matrix product on a CPU: the loop that keeps a tile of sums in registers, in LLVM vectors.

In a packed weight the outputs of one input lie side by side (see `product`). So a vector of the weight times one number
of a row adds to a vector of that row's sums, and no sum is reduced across a register. A tile has a few rows and a few
vectors, as many as the processor's registers hold. A step takes a pair of inputs: it loads the tile's vectors of the
weight and multiplies them with the numbers of every row.

Each sum is one chain of fused multiply and add, of the second input of the first pair, then the first, and so on,
whatever the tile. So a row has the same product, bit for bit, in any tile. The order within a pair is that of AVX-512's
instruction for bfloat16, which does both. Its sums are those of the others, but for numbers below 2 ** -126.

LLVM does not generate this from loops. The vectors are longer than most registers, and LLVM splits them.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]  # of the processor that numba compiles for
WIDE = "+avx512f" in FEATURES  # 32 registers of 512 bits
DOTS = "+avx512bf16" in FEATURES  # adds the products of a pair of bfloat16 in one instruction
SET = "AVX-512 with bfloat16" if DOTS else "AVX-512" if WIDE else "AVX2" if "+avx2" in FEATURES else "128-bit vectors"

BLOCK = 64  # outputs
LANES = 16  # float32 of a vector
VECTORS = BLOCK // LANES
LINE = 64  # bytes, of a cache line and of a vector
AHEAD = 3072  # bytes from what one row reads to what is fetched for it

# Formats by the type of their tag, and the bytes of a pair of inputs in a block. A tile takes the first three. The
# others, of 8 bits, of 4 bits (unsigned) and float8, are unpacked.
BF16, F16, F32 = types.uint16, types.int16, types.float32
INT8, INT4, FLOAT8 = types.int8, types.uint8, types.uint64
PAIR = {BF16: 4 * BLOCK, F16: 4 * BLOCK, F32: 8 * BLOCK, INT8: 2 * BLOCK, INT4: BLOCK, FLOAT8: 2 * BLOCK}


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite is not typed
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"


BYTES, INT, NUMBER, NOTHING = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.VoidType()
INTS, NUMBERS, HALVES, SMALL = (ir.VectorType(kind, LANES) for kind in (INT, NUMBER, ir.HalfType(), ir.IntType(8)))
BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def at(builder, base, distance, kind):
    """The place some bytes behind an address."""
    return builder.inttoptr(builder.add(base, BYTES(distance)), kind.as_pointer())


def call(builder, name, result, *arguments):
    function = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


# region tile
@intrinsic(prefer_literal=True)
def add_tile(context, rows, vectors, kind, left_kind, sums, left, down, weight, steps, ahead):
    """Add the products of some rows, `down` bytes apart, with some vectors of a weight to their sums. The rows are
    float32, or bfloat16 where the processor multiplies it. The memory `ahead` bytes from here is wanted next."""
    count, width, dots = rows.literal_value, vectors.literal_value, left_kind == BF16

    def generate(context, builder, signature, args):
        sums, left, down, weight, steps, ahead = args[4:]

        def numbers(v, i):
            """Input i of the pair for the outputs of a vector; both, if the processor multiplies pairs."""
            if kind != BF16:
                stored = NUMBERS if kind == F32 else HALVES
                line = builder.load(at(builder, source, PAIR[kind] // 2 * i + PAIR[kind] // 8 * v, stored), align=4)
                return line if kind == F32 else builder.fpext(line, NUMBERS)
            pairs = builder.load(at(builder, source, v * LINE, INTS), align=4)
            if dots:
                return builder.bitcast(pairs, BFLOATS)
            wide = builder.and_(pairs, INTS([0xFFFF0000] * LANES)) if i else builder.shl(pairs, INTS([16] * LANES))
            return builder.bitcast(wide, NUMBERS)

        def repeated(r, i):
            """Input i of the pair of a row, in every lane."""
            number = builder.load(at(builder, builder.add(own, downs[r]), 4 * i, INT))
            first = builder.insert_element(INTS(ir.Undefined), number, INT(0))
            lanes = builder.shuffle_vector(first, INTS(ir.Undefined), INTS([0] * LANES))
            return builder.bitcast(lanes, BFLOATS if dots else NUMBERS)

        tile = [(r, v) for r in range(count) for v in range(width)]
        places = [at(builder, sums, (r * BLOCK + v * LANES) * 4, NUMBERS) for r, v in tile]
        downs = [builder.mul(down, BYTES(r)) for r in range(count)]
        begun = [builder.load(place, align=4) for place in places]
        before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)

        builder.position_at_end(loop)
        step, held = builder.phi(BYTES), [builder.phi(NUMBERS) for _ in tile]
        source = builder.add(weight, builder.mul(step, BYTES(PAIR[kind])))
        own = builder.add(left, builder.mul(step, BYTES(4 if dots else 8)))
        # Tiles of one and two rows read in the order of memory, which the processor fetches by itself; but for one row
        # of pairs too late.
        in_order = width == VECTORS and count <= 2
        distance = ahead if not in_order else BYTES(AHEAD) if dots and count == 1 else None
        for v in range(0 if distance is None else width):
            wanted = at(builder, builder.add(source, distance), v * LINE, ir.IntType(8))
            call(builder, "llvm.prefetch.p0", NOTHING, wanted, INT(0), INT(2), INT(1))  # into the L2 cache
        totals = dict(zip(tile, held, strict=True))
        for i in (0,) if dots else (1, 0):
            weights = [numbers(v, i) for v in range(width)]
            for r in range(count):
                number = repeated(r, i)
                for v in range(width):
                    if dots:
                        name, operands = "llvm.x86.avx512bf16.dpbf16ps.512", (totals[r, v], weights[v], number)
                    else:
                        name, operands = f"llvm.fma.v{LANES}f32", (weights[v], number, totals[r, v])
                    totals[r, v] = call(builder, name, NUMBERS, *operands)
            if i:  # load pairs again for the other half: to keep them takes registers that the sums need
                builder.call(ir.InlineAsm(ir.FunctionType(NOTHING, []), "", "~{memory}", side_effect=True), [])
        following = builder.add(step, BYTES(1))
        for phi, start, value in zip([step, *held], [BYTES(0), *begun], [following, *totals.values()], strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, behind)

        builder.position_at_end(behind)
        for place, total in zip(places, totals.values(), strict=True):
            builder.store(total, place, align=4)
        return context.get_dummy_value()

    return types.void(rows, vectors, kind, left_kind, *[types.int64] * 6), generate


# endregion


# region unpack
@intrinsic
def unpack(context, kind, packed, pairs, steps):
    """Write a chunk of a block as pairs of bfloat16. Integers of 8 and 4 bits and float8 are exact in it."""

    def generate(context, builder, signature, args):
        _, packed, pairs, steps = args

        def numbers(v, i):
            """Input i of the pair for the outputs of a vector, as float32."""
            place = v * LANES if kind == INT4 else i * BLOCK + v * LANES
            line = builder.load(at(builder, source, place, SMALL), align=1)
            if kind == INT8:
                return builder.sitofp(builder.sext(line, INTS), NUMBERS)
            bits = builder.zext(line, INTS)
            if kind == INT4:
                return builder.sitofp(builder.lshr(bits, many(4)) if i else builder.and_(bits, many(15)), NUMBERS)
            # Exponent and mantissa of a float8 are those of a float32 that is 2 ** -120 as large.
            sign, rest = builder.shl(builder.and_(bits, many(0x80)), many(24)), builder.and_(bits, many(0x7F))
            small = builder.bitcast(builder.or_(sign, builder.shl(rest, many(20))), NUMBERS)
            is_nan = builder.icmp_unsigned("==", rest, many(0x7F))
            nan, factor = NUMBERS([float("nan")] * LANES), NUMBERS([2.0**120] * LANES)
            return builder.select(is_nan, nan, builder.fmul(small, factor))

        def many(number):
            return INTS([number] * LANES)

        with cgutils.for_range(builder, steps) as loop:
            source = builder.add(packed, builder.mul(loop.index, BYTES(PAIR[kind])))
            target = builder.add(pairs, builder.mul(loop.index, BYTES(PAIR[BF16])))
            for v in range(VECTORS):
                first, second = (builder.bitcast(numbers(v, i), INTS) for i in range(2))
                both = builder.or_(builder.lshr(first, many(16)), second)
                builder.store(both, at(builder, target, v * LINE, INTS), align=4)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), generate


# endregion
