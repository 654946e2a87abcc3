# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The inner loop of a matrix product on a CPU: a tile of sums in registers, written in LLVM vectors.

A weight lies in blocks of BLOCK outputs, and in a block the outputs of one input lie side by side (see `product`). So a
vector of the weight times one number of a row adds to a vector of that row's sums, and no sum is reduced across a
register. A tile has a few rows and a few vectors, as many as the processor's registers hold. Each step takes a pair of
inputs: it loads the tile's vectors of the weight once and multiplies them with the numbers of every row.

Every sum is one chain: the second input of the first pair, the first, and so on, whatever the tile. So a row's product
is the same bit for bit in any tile. The order within a pair is that of AVX-512's instruction for bfloat16, which adds
two products in one step, each rounded as a fused multiply and add.

LLVM does not generate this from loops. The vectors are longer than most registers; LLVM splits them to fit.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

PROCESSOR = cpu_target.target_context.codegen().magic_tuple()  # that numba compiles for: its name and features
FEATURES = PROCESSOR[2]
WIDE = "+avx512f" in FEATURES  # 32 registers of 512 bits
DOTS = "+avx512bf16" in FEATURES  # multiplies pairs of bfloat16

BLOCK = 64  # outputs
LANES = 16  # float32 of a vector
VECTORS = BLOCK // LANES
PAIR = {types.uint16: 4 * BLOCK, types.int16: 4 * BLOCK, types.float32: 8 * BLOCK}  # bytes of a pair of inputs
PACKED = {types.int8: 2 * BLOCK, types.uint8: BLOCK, types.uint64: 2 * BLOCK}  # of int8, of 4 bits, of float8
LINE = 64  # bytes of a cache line


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"


BYTES, INT, NUMBER, NOTHING = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.VoidType()
INTS, NUMBERS, SMALL = (ir.VectorType(kind, LANES) for kind in (INT, NUMBER, ir.IntType(8)))
HALVES, BFLOATS = ir.VectorType(ir.HalfType(), LANES), ir.VectorType(_BFloat(), 2 * LANES)


# region tile
@intrinsic(prefer_literal=True)
def add_tile(context, rows, vectors, kind, left_kind, sums, left, down, weight, steps, ahead):
    """Add the products of `rows` rows, `down` bytes apart, with `vectors` vectors of a weight to their sums. `kind` is
    the tag of the weight, `left_kind` that of the rows: float32, or the weight's bfloat16 where DOTS. `ahead` is how far
    from here the memory is that is wanted next, in bytes."""
    tile = [(r, v) for r in range(rows.literal_value) for v in range(vectors.literal_value)]
    dots, stride = left_kind == types.uint16, PAIR[kind]

    def generate(context, builder, signature, args):
        sums, left, down, weight, steps, ahead = args[4:]

        def at(base, distance, kind):
            return builder.inttoptr(builder.add(base, distance), kind.as_pointer())

        def load(base, distance, kind):
            return builder.load(at(base, distance, kind), align=4)

        def call(name, result, *arguments):
            function = ir.FunctionType(result, [argument.type for argument in arguments])
            return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)

        def vector(v, i):
            """Input i of the pair, for the outputs of a vector."""
            if kind == types.float32:
                return load(line, BYTES((i * BLOCK + v * LANES) * 4), NUMBERS)
            if kind == types.int16:
                return builder.fpext(load(line, BYTES((i * BLOCK + v * LANES) * 2), HALVES), NUMBERS)
            pairs = load(line, BYTES(v * LINE), INTS)
            if dots:
                return builder.bitcast(pairs, BFLOATS)
            wide = builder.and_(pairs, INTS([0xFFFF0000] * LANES)) if i else builder.shl(pairs, INTS([16] * LANES))
            return builder.bitcast(wide, NUMBERS)

        def number(r, i):
            """Input i of the pair of a row, repeated."""
            first = builder.insert_element(INTS(ir.Undefined), load(own, builder.add(downs[r], BYTES(4 * i)), INT), INT(0))
            repeated = builder.shuffle_vector(first, INTS(ir.Undefined), INTS([0] * LANES))
            return builder.bitcast(repeated, BFLOATS if dots else NUMBERS)

        downs = [builder.mul(down, BYTES(r)) for r in range(rows.literal_value)]
        places = {(r, v): at(sums, BYTES((r * BLOCK + v * LANES) * 4), NUMBERS) for r, v in tile}
        begun = {place: builder.load(places[place], align=4) for place in tile}
        before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)

        builder.position_at_end(loop)
        step, held = builder.phi(BYTES), {place: builder.phi(NUMBERS) for place in tile}
        line = builder.add(weight, builder.mul(step, BYTES(stride)))
        own = builder.add(left, builder.mul(step, BYTES(4 if dots else 8)))
        for v in range(vectors.literal_value):
            fetched = at(line, builder.add(ahead, BYTES(v * LINE)), ir.IntType(8))
            call("llvm.prefetch.p0", NOTHING, fetched, INT(0), INT(2), INT(1))
        totals = dict(held)
        for i in (0,) if dots else (1, 0):
            weights = [vector(v, i) for v in range(vectors.literal_value)]
            for r in range(rows.literal_value):
                repeated = number(r, i)
                for v, numbers in enumerate(weights):
                    if dots:
                        name, operands = "llvm.x86.avx512bf16.dpbf16ps.512", (totals[r, v], numbers, repeated)
                    else:
                        name, operands = f"llvm.fma.v{LANES}f32", (numbers, repeated, totals[r, v])
                    totals[r, v] = call(name, NUMBERS, *operands)
            if i:  # the pairs are loaded again: to keep them would take registers that the sums need
                builder.call(ir.InlineAsm(ir.FunctionType(NOTHING, []), "", "~{memory}", side_effect=True), [])
        following = builder.add(step, BYTES(1))
        step.add_incoming(BYTES(0), before)
        step.add_incoming(following, loop)
        for place in tile:
            held[place].add_incoming(begun[place], before)
            held[place].add_incoming(totals[place], loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, behind)

        builder.position_at_end(behind)
        for place in tile:
            builder.store(totals[place], places[place], align=4)
        return context.get_dummy_value()

    return types.void(rows, vectors, kind, left_kind, *[types.int64] * 6), generate


# endregion


# region unpack
@intrinsic
def unpack(context, kind, packed, pairs, steps):
    """Write a chunk of a block as pairs of bfloat16: integers of 8 and 4 bits, and float8, are exact in it."""
    size = PACKED[kind]

    def generate(context, builder, signature, args):
        _, packed, pairs, steps = args

        def at(base, distance, kind):
            return builder.inttoptr(builder.add(base, BYTES(distance)), kind.as_pointer())

        def many(number):
            return INTS([number] * LANES)

        def line(v, i):
            place = v * LANES if kind == types.uint8 else i * BLOCK + v * LANES
            return builder.load(at(source, place, SMALL), align=1)

        def vector(v, i):
            """Input i of the pair, for the outputs of a vector, as float32."""
            if kind == types.int8:
                return builder.sitofp(builder.sext(line(v, i), INTS), NUMBERS)
            numbers = builder.zext(line(v, i), INTS)
            if kind == types.uint8:
                return builder.sitofp(builder.lshr(numbers, many(4)) if i else builder.and_(numbers, many(15)), NUMBERS)
            # The exponent and the mantissa of a float8 are those of a float32 that is 2 ** -120 as large.
            sign, rest = builder.and_(numbers, many(0x80)), builder.and_(numbers, many(0x7F))
            small = builder.or_(builder.shl(sign, many(24)), builder.shl(rest, many(20)))
            number = builder.fmul(builder.bitcast(small, NUMBERS), NUMBERS([2.0**120] * LANES))
            nan = builder.icmp_unsigned("==", rest, many(0x7F))
            return builder.select(nan, NUMBERS([float("nan")] * LANES), number)

        with cgutils.for_range(builder, steps) as loop:
            source = builder.add(packed, builder.mul(loop.index, BYTES(size)))
            target = builder.add(pairs, builder.mul(loop.index, BYTES(PAIR[types.uint16])))
            for v in range(VECTORS):
                first, second = (builder.bitcast(vector(v, i), INTS) for i in range(2))
                both = builder.or_(builder.lshr(first, many(16)), second)
                builder.store(both, at(target, v * LINE, INTS), align=4)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), generate


# endregion
