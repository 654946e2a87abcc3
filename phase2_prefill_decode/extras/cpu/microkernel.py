# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The microkernel of a matrix product on a CPU: the loop that keeps a tile of sums in registers, in LLVM vectors.

A packed weight is a sequence of lines: a word of 32 bits for each of 64 outputs, which holds one number, a pair of
bfloat16, four of 8 bits, or eight of 4 (see `product`). In registers the words of a line become operands. Each operand
is multiplied with a word of a row, the same in every lane, so no sum is reduced across a register. A tile has a few
rows and a few vectors of outputs, as many as the processor's registers hold.

A sum of 16 or 32-bit numbers is one chain of fused multiply and add, whatever the tile. The order in a pair, the second
input first, is that of AVX-512's instruction for bfloat16, which does both. Its sums are those of the others, but for
numbers below 2 ** -126. Formats with scales have a sum of its own for each part of the inputs, and then total +=
(scale of the weight * scale of the row) * sum. For int8 and int4 it is one of integers, which is exact: all
instructions give the same bits. So a row has the same product, bit for bit, in any tile.

LLVM does not generate this from loops. The vectors are longer than most registers, and LLVM splits them.
"""

from itertools import product

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from phase2_prefill_decode.extras.cpu.intrinsics import FEATURES, PROCESSOR

WIDE = "+avx512f" in FEATURES  # 32 registers of 512 bits
# Adds the products of a pair of bfloat16 in one instruction. Intel's takes as long as four fused multiply-adds.
DOTS = "+avx512bf16" in FEATURES and PROCESSOR[1].startswith("znver")
REGISTER_BITS = 512 if "+avx512bw" in FEATURES else 256  # for integers
# Adds the products of four integers of 8 bits in one instruction; others take two of 16.
QUADS = ("+avx512vnni" in FEATURES and REGISTER_BITS == 512) or "+avxvnni" in FEATURES
PAIRS = "+avx2" in FEATURES and not QUADS  # adds the products of two integers of 8 bits, or of two of 16
SET = "AVX-512 with bfloat16" if DOTS else "AVX-512" if WIDE else "AVX2" if "+avx2" in FEATURES else "128-bit vectors"

BLOCK = 64  # outputs
LANES = 16  # words of a vector
VECTORS = BLOCK // LANES
LINE = 64  # bytes, of a cache line and of a vector
AHEAD = 1024  # bytes from what one row reads to what is fetched for it
HEAD = 8  # bytes before a row's numbers of a part: their scale, and where sums of integers begin

# Formats by the type of their tag: those that are added to sums as they are, and those with scales.
BF16, F16, F32 = types.uint16, types.int16, types.float32
INT8, INT6, INT4, FLOAT8 = types.int8, types.int64, types.uint8, types.uint64
ADDED = {INT8: 128, INT6: 32, INT4: 8}  # to integers, so that they have no sign
SCALED = (*ADDED, FLOAT8)
LINE_INPUTS = {BF16: 2, F16: 1, F32: 1, INT8: 4, INT6: 4, INT4: 8, FLOAT8: 4}
# Where in each 16 bits of a line the integers are that go with one word of a row: four of 8 bits, or two of 16.
FIELDS = {
    INT8: [(0, 0xFFFF)] if QUADS else [(0, 0xFF), (8, 0xFF)],
    INT4: [(0, 0x0F0F), (4, 0x0F0F)] if QUADS or PAIRS else [(0, 0xF), (8, 0xF), (4, 0xF), (12, 0xF)],
}
# Lines of a step of formats whose pairs of products 16 bits hold, even of two words: 4 * 15 * 127, and 4 * 63 * 127.
TAKEN = {INT4: 1, INT6: 2} if PAIRS else {}


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite is not typed
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"


BYTES, INT, NUMBER, NOTHING = ir.IntType(64), ir.IntType(32), ir.FloatType(), ir.VoidType()
INTS, NUMBERS, HALVES = (ir.VectorType(kind, LANES) for kind in (INT, NUMBER, ir.HalfType()))
SHORTS, BFLOATS = (ir.VectorType(kind, 2 * LANES) for kind in (ir.IntType(16), _BFloat()))
TABLE, OCTETS = (ir.VectorType(ir.IntType(8), count) for count in (64, LANES))
FLOATS8 = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).bfloat16().view(torch.uint8).view(2, 64, 2)
TABLES = [[TABLE(half[:, byte].tolist()) for half in FLOATS8] for byte in (0, 1)]  # for low bytes and for high ones


def line_bytes(kind):
    return BLOCK * (2 if kind == F16 else 4)


def at(builder, base, distance, kind):
    """The place some bytes behind an address."""
    return builder.inttoptr(builder.add(base, BYTES(distance)), kind.as_pointer())


def call(builder, name, result, *arguments):
    function = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def fetch(builder, place):
    """Start to load a line into the L2 cache."""
    place = builder.bitcast(place, ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", NOTHING, place, INT(0), INT(2), INT(1))


def repeated(builder, number):
    """A vector with a number in every lane."""
    lanes = ir.VectorType(number.type, LANES)
    first = builder.insert_element(lanes(ir.Undefined), number, INT(0))
    return builder.shuffle_vector(first, lanes(ir.Undefined), INTS([0] * LANES))


def many(kind, number):
    """A constant in every lane."""
    return kind([number] * kind.count)


def looped(builder, count, begun, body):
    """What vectors become in a loop of at least one step: of `body(step, vectors)`, which returns them changed."""
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    step, held = builder.phi(BYTES), [builder.phi(vector.type) for vector in begun]
    changed = body(step, [*held])
    following = builder.add(step, BYTES(1))
    for phi, start, value in zip([step, *held], [BYTES(0), *begun], [following, *changed], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, behind)
    builder.position_at_end(behind)
    return changed


# region operands
def operands(builder, kind, left_kind, line):
    """What the words of a line become: operands, each with the number of the row's word that it is multiplied with.
    Integers stay unsigned."""
    if kind == INT6:  # stored as INT8 is
        yield 0, builder.sub(builder.bitcast(line, TABLE), many(TABLE, ADDED[INT8] - ADDED[INT6]))
    elif kind in ADDED:
        shorts = builder.bitcast(line, SHORTS)
        for word, (up, mask) in enumerate(FIELDS[kind]):
            yield word, builder.and_(builder.lshr(shorts, many(SHORTS, up)), many(SHORTS, mask))
    elif kind == FLOAT8:
        yield from (pairs_of_float8 if left_kind == BF16 else floats_of_float8)(builder, line)
    elif kind == BF16 and left_kind != BF16:
        yield 1, builder.bitcast(builder.and_(line, many(INTS, 0xFFFF0000)), NUMBERS)
        yield 0, builder.bitcast(builder.shl(line, many(INTS, 16)), NUMBERS)
    else:
        yield (
            0,
            builder.fpext(line, NUMBERS)
            if kind == F16
            else builder.bitcast(line, BFLOATS if kind == BF16 else NUMBERS),
        )


# endregion


def floats_of_float8(builder, line):
    """Each number of a word. Exponent and mantissa of a float8 are those of a float32 that is 2 ** -120 as large."""
    if DOTS:  # on Intel's, products of several rows take 1.15 times as long with a look-up
        for word, pair in pairs_of_float8(builder, line):
            for half, number in operands(builder, BF16, F32, builder.bitcast(pair, INTS)):
                yield word + 2 * half, number
        return
    for word in (3, 1, 2, 0):
        bits = builder.ashr(builder.shl(line, many(INTS, 24 - 8 * word)), many(INTS, 4))
        small = builder.bitcast(builder.and_(bits, many(INTS, 0x87F00000)), NUMBERS)
        yield word, builder.fmul(small, NUMBERS([2.0**120] * LANES))


def pairs_of_float8(builder, line):
    """The second and fourth number of a word as bfloat16, and the first and third: their bytes are looked up."""
    name, index, shorts = (
        "llvm.x86.avx512.vpermi2var.qi.512",
        builder.bitcast(line, TABLE),
        builder.bitcast(line, SHORTS),
    )
    low, high = (builder.bitcast(call(builder, name, TABLE, a, index, b), SHORTS) for a, b in TABLES)
    high = builder.or_(high, builder.and_(shorts, many(SHORTS, 0x8080)))
    odd = builder.or_(builder.lshr(low, many(SHORTS, 8)), builder.and_(high, many(SHORTS, 0xFF00)))
    even = builder.or_(builder.and_(low, many(SHORTS, 0xFF)), builder.shl(high, many(SHORTS, 8)))
    yield from ((1, builder.bitcast(odd, BFLOATS)), (0, builder.bitcast(even, BFLOATS)))


def dot(builder, total, weights, number):
    """total + the products of a word's numbers, lane by lane. `number` is a word of a row, repeated."""
    if weights.type == NUMBERS:
        return call(builder, f"llvm.fma.v{LANES}f32", NUMBERS, weights, builder.bitcast(number, NUMBERS), total)
    if weights.type == BFLOATS:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call(builder, name, NUMBERS, total, weights, builder.bitcast(number, BFLOATS))
    if QUADS:
        name = f"llvm.x86.avx512.vpdpbusd.{REGISTER_BITS}"
        return in_registers(builder, name, total, builder.bitcast(weights, INTS), number)
    if PAIRS and total.type == SHORTS:
        name = "llvm.x86.avx512.pmaddubs.w.512" if REGISTER_BITS == 512 else "llvm.x86.avx2.pmadd.ub.sw"
        pairs = in_registers(builder, name, *(builder.bitcast(words, TABLE) for words in (weights, number)))
        return builder.add(total, pairs)
    if PAIRS:
        name = "llvm.x86.avx512.pmaddw.d.512" if REGISTER_BITS == 512 else "llvm.x86.avx2.pmadd.wd"
        return builder.add(total, in_registers(builder, name, weights, builder.bitcast(number, SHORTS)))
    weights = builder.bitcast(weights, INTS)
    for up in (16, 0):  # the first 16 bits of each word, with their sign, and the second
        pair = [builder.ashr(builder.shl(words, many(INTS, up)), many(INTS, 16)) for words in (weights, number)]
        total = builder.add(total, builder.mul(*pair))
    return total


def dots(builder, total, products):
    """total + the products of operands, each with a word of a row. Of several, pairs are added up in 16 bits first."""
    several, pairs = len(products) > 1, many(SHORTS, 0)
    for weights, number in products:
        pairs = dot(builder, pairs if several else total, weights, repeated(builder, number))
    return dot(builder, total, pairs, many(INTS, 0x10001)) if several else pairs


def in_registers(builder, name, *vectors):
    """Call an instruction that returns integers, for each part of the vectors that a register holds."""
    count, result = 512 // REGISTER_BITS, SHORTS if vectors[0].type == TABLE else INTS
    if count == 1:
        return call(builder, name, result, *vectors)
    halves = []
    for half in range(count):
        parts = []
        for vector in vectors:
            lanes = [INT(half * vector.type.count // count + lane) for lane in range(vector.type.count // count)]
            places = ir.Constant(ir.VectorType(INT, len(lanes)), lanes)
            parts.append(builder.shuffle_vector(vector, vector.type(ir.Undefined), places))
        halves.append(call(builder, name, ir.VectorType(result.element, result.count // count), *parts))
    lanes = [INT(lane) for lane in range(result.count)]
    return builder.shuffle_vector(*halves, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))


@intrinsic
def repeat_line(context, line, sums, rows):
    """Write a line into the sums of each row: LLVM copies it number after number."""

    def generate(context, builder, signature, args):
        line, sums, rows = args
        held = [builder.load(at(builder, line, v * LINE, NUMBERS), align=4) for v in range(VECTORS)]

        def write(row, _):
            own = builder.add(sums, builder.mul(row, BYTES(4 * BLOCK)))
            for v, numbers in enumerate(held):
                builder.store(numbers, at(builder, own, v * LINE, NUMBERS), align=4)
            return []

        looped(builder, rows, [], write)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def widen_scales(context, line, half, is_bfloat):
    """The address of the scales of a part in float32. In a line, a word holds the scales of two parts in 16 bits: those
    of the first in its low half. The caller can use them until it calls again."""

    def generate(context, builder, signature, args):
        line, half, is_bfloat = args
        room = cgutils.alloca_once(builder, ir.ArrayType(NUMBERS, VECTORS))
        scales = builder.ptrtoint(room, BYTES)
        up = repeated(builder, builder.trunc(builder.mul(half, BYTES(16)), INT))
        for v in range(VECTORS):
            words = builder.lshr(builder.load(at(builder, line, v * LINE, INTS), align=4), up)
            shorts = builder.trunc(words, ir.VectorType(ir.IntType(16), LANES))
            bfloats = builder.bitcast(builder.shl(words, many(INTS, 16)), NUMBERS)
            halves = builder.fpext(builder.bitcast(shorts, HALVES), NUMBERS)
            chosen = builder.select(builder.icmp_signed("!=", is_bfloat, BYTES(0)), bfloats, halves)
            builder.store(chosen, at(builder, scales, v * LINE, NUMBERS), align=4)
        return scales

    return types.int64(*[types.int64] * 3), generate


# region tile
@intrinsic(prefer_literal=True)
def add_tile(context, rows, vectors, kind, left_kind, first, sums, left, down, weight, scales, steps, ahead):
    """Add the products of some rows, `down` bytes apart, with some vectors of each line of a weight, from the vector
    `first` on, to their sums. The memory `ahead` bytes from here is wanted next."""
    count, width, scaled = rows.literal_value, vectors.literal_value, kind in SCALED
    size, words = line_bytes(kind), LINE_INPUTS[kind] * left_kind.bitwidth // 8

    def generate(context, builder, signature, args):
        first, sums, left, down, weight, scales, steps, ahead = args[4:]
        tile = [(r, v) for r in range(count) for v in range(width)]
        sums = builder.add(sums, builder.mul(first, BYTES(LINE)))
        places = {(r, v): at(builder, sums, (r * BLOCK + v * LANES) * 4, NUMBERS) for r, v in tile}
        own = [builder.add(left, builder.mul(down, BYTES(r))) for r in range(count)]
        scales = builder.add(scales, builder.mul(first, BYTES(LINE)))
        lines = builder.add(weight, builder.mul(first, BYTES(size // VECTORS)))

        def begin(r, v):
            if kind not in ADDED:
                return NUMBERS([0.0] * LANES) if scaled else builder.load(places[r, v], align=4)
            return repeated(builder, builder.load(at(builder, own[r], 4, INT)))

        # Tiles of one and two rows read in the order of memory, which the processor fetches by itself; but for one row
        # too late, if a line takes little time.
        in_order = width == VECTORS and count <= 2
        distance = ahead if not in_order else BYTES(AHEAD) if (DOTS or scaled) and count == 1 else None

        taken = TAKEN.get(kind, 1)  # lines of a step
        # The vectors that a row's number is loaded once for. Where registers hold the operands of a whole line beside
        # the sums, loads take less time than arithmetic.
        abreast = width if WIDE and count > 2 and kind != FLOAT8 else 1
        groups = [range(v, v + abreast) for v in range(0, width, abreast)]

        def operands_at(source, v, number):
            """One operand of a vector of the lines of a step, or all that are added at once, each with the number of
            its word."""
            found = []
            for line in range(taken):
                place = at(builder, source, line * size + v * size // VECTORS, HALVES if kind == F16 else INTS)
                for i, weights in operands(builder, kind, left_kind, builder.load(place, align=4)):
                    found.append((line + i, weights))
            return found if kind in TAKEN else found[number : number + 1]

        def add_step(step, totals):
            step = builder.mul(step, BYTES(taken))
            source = builder.add(lines, builder.mul(step, BYTES(size)))
            word = builder.add(BYTES(HEAD if scaled else 0), builder.mul(step, BYTES(words)))
            for line, v in product(range(0 if distance is None else taken), range(width)):
                fetch(builder, at(builder, builder.add(source, distance), line * size + v * LINE, ir.IntType(8)))
            for vectors, number in product(groups, range(1 if kind in TAKEN else words // 4)):
                if (number and abreast > 1) or (vectors[0] and not number):  # load again: the sums need registers
                    clobber = ir.InlineAsm(ir.FunctionType(NOTHING, []), "", "~{memory}", side_effect=True)
                    builder.call(clobber, [])
                found = [operands_at(source, v, number) for v in vectors]
                for r in range(count):
                    place = builder.add(own[r], word)
                    for v, some in zip(vectors, found, strict=True):
                        products = [(weights, builder.load(at(builder, place, 4 * j, INT))) for j, weights in some]
                        totals[r * width + v] = dots(builder, totals[r * width + v], products)
            return totals

        totals = looped(builder, builder.udiv(steps, BYTES(taken)), [begin(*place) for place in tile], add_step)
        for (r, v), total in zip(tile, totals, strict=True):
            if scaled:
                scale = builder.load(at(builder, scales, v * LINE, NUMBERS), align=4)
                scale = builder.fmul(scale, repeated(builder, builder.load(at(builder, own[r], 0, NUMBER))))
                total = builder.sitofp(total, NUMBERS) if kind in ADDED else total
                before = builder.load(places[r, v], align=4)
                total = call(builder, f"llvm.fma.v{LANES}f32", NUMBERS, scale, total, before)
            builder.store(total, places[r, v], align=4)
        return context.get_dummy_value()

    return types.void(rows, vectors, kind, left_kind, *[types.int64] * 8), generate


# endregion
