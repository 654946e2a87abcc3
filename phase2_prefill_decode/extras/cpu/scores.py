# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What attention on a CPU does in registers: scores of keys, sums of values, and weights; and blocks of rows written as
columns, for a packed weight.

A head of a key is read as lines of 16 words. A word is a number, or a pair of bfloat16, and then a line becomes two
operands as in `microkernel`: one with the second number of each pair, and one with the first. A query is laid out in
the same order. So a score is 16 sums, each one chain over the lines, which are added up at the end: lane with lane,
pair with pair. Sums of values stay in that order until the last of them is written.

LLVM does not generate this from loops, so it is written in LLVM vectors. They are longer than most processors'
registers: LLVM splits them to fit. What is added to what, and in which order, does not depend on the tile.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from phase2_prefill_decode.extras.cpu.intrinsics import POLYNOMIAL
from phase2_prefill_decode.extras.cpu.microkernel import (
    BF16,
    BYTES,
    F16,
    F32,
    FLOAT8,
    HALVES,
    INT,
    INT8,
    INTS,
    LANES,
    LINE,
    NUMBER,
    NUMBERS,
    OCTETS,
    WIDE,
    at,
    call,
    dot,
    fetch,
    looped,
    many,
    operands,
    repeated,
)

KEYS = 64  # in a block: a row has its scores in one vector
FEW = 2  # rows of a tile
TOGETHER = 8 if WIDE else 2  # keys of a tile of scores whose sums are in registers at once
WIDTH = 4  # vectors of a tile of sums
MANY = (8, 2) if WIDE else (6, 1)  # rows and vectors of a tile of sums for many rows
STEP = 4  # bytes of a number
WORD = {BF16: 4, F32: 4, F16: 2, INT8: 1, FLOAT8: 1}  # bytes


def format_of(like):
    """The format of keys and values, of their tag."""
    return FLOAT8 if like == types.uint8 else like


def numbers_of(kind):
    """The numbers of a word."""
    return 2 if kind == BF16 else 1


def place_of(builder, side, key):
    """The address of a key or a value."""
    base, numbers, distance = cgutils.unpack_tuple(builder, side)
    number = builder.load(at(builder, builder.add(numbers, builder.mul(key, BYTES(8))), 0, BYTES))
    return builder.add(base, builder.mul(number, distance))


def line_at(builder, kind, place, number):
    """The place of a line of a key or a value."""
    line = {2: HALVES, 1: OCTETS}.get(WORD[kind], INTS)
    return at(builder, builder.add(place, builder.mul(number, BYTES(LANES * WORD[kind]))), 0, line)


def operands_of(builder, kind, left_kind, place, number):
    """What a line becomes. Of a float8, exponent and mantissa are those of a float16 that is 2 ** -8 as large."""
    line = builder.load(line_at(builder, kind, place, number), align=1)
    if kind == INT8:
        return [builder.sitofp(builder.sext(line, INTS), NUMBERS)]
    if kind == FLOAT8:
        shorts = ir.VectorType(ir.IntType(16), LANES)
        bits = builder.and_(builder.shl(builder.sext(line, shorts), many(shorts, 7)), many(shorts, 0xBFFF))
        return [builder.fpext(builder.bitcast(bits, HALVES), NUMBERS)]
    return [operand for _, operand in operands(builder, kind, left_kind, line)]


def constant(numbers):
    return ir.Constant(ir.VectorType(INT, len(numbers)), [INT(number) for number in numbers])


def exchanged(size):
    """The lanes of two vectors that go into the first and into the second, if blocks of lanes are exchanged."""
    upper = [LANES + lane - size if lane & size else lane for lane in range(LANES)]
    lower = [LANES + lane if lane & size else lane + size for lane in range(LANES)]
    return constant(upper), constant(lower)


# region scores
@intrinsic(prefer_literal=True)
def add_scores(context, rows, like, left_like, q, down, side, ahead, first, lines, scores):
    """Write the scores of some rows of queries, `down` bytes apart, for LANES keys, from the key `first` on. `side` has
    an address, that of the keys' numbers, and the bytes of a key: it is so many times its number behind the address.
    `ahead` has those of keys to fetch, or is None."""
    height, kind = rows.literal_value, format_of(like)
    together = min(TOGETHER * FEW // height, LANES)
    near = LINE // (LANES * WORD[kind])  # lines in one of the cache

    def generate(context, builder, signature, args):
        q, down, side, ahead, first, lines, scores = args[3:]
        own = [builder.add(q, builder.mul(down, BYTES(row))) for row in range(height)]
        parts: list[list[ir.Value]] = [[] for _ in own]
        for key in range(0, LANES, together):
            some = [builder.add(first, BYTES(key + i)) for i in range(together)]
            places = [place_of(builder, side, number) for number in some]
            wanted = [] if signature.args[6] == types.none else [place_of(builder, ahead, number) for number in some]

            def add_lines(step, sums, places=places, wanted=wanted):
                step = builder.mul(step, BYTES(near))
                for place in wanted:
                    fetch(builder, line_at(builder, kind, place, step))
                for i in range(near):
                    line = builder.add(step, BYTES(i))
                    found = [operands_of(builder, kind, left_like, place, line) for place in places]
                    for word, operand in enumerate(zip(*found, strict=True)):
                        for row in range(height):
                            words = builder.add(own[row], builder.mul(line, BYTES(len(found[0]) * LINE)))
                            number = builder.load(at(builder, words, word * LINE, INTS), align=STEP)
                            for key, weights in enumerate(operand, row * together):
                                sums[key] = dot(builder, sums[key], weights, number)
                return sums

            count = builder.udiv(lines, BYTES(near))
            sums = looped(builder, count, [many(NUMBERS, 0.0)] * (height * together), add_lines)
            for row in range(height):
                parts[row].append(folded(builder, sums[row * together : (row + 1) * together], 1))
        for row in range(height):
            total = folded(builder, parts[row], together)
            builder.store(total, at(builder, scores, row * KEYS * STEP, NUMBERS), align=STEP)
        return context.get_dummy_value()

    integers = [types.int64] * 3
    return types.void(rows, like, left_like, *integers[:2], side, ahead, *integers), generate


def folded(builder, vectors, size):
    """The sums of vectors, each in a lane. Lanes `size` apart are added, of two vectors at a time, and so on."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.fadd(*(builder.shuffle_vector(*pair, lanes) for lanes in exchanged(size))) for pair in pairs]
        size *= 2
    return vectors[0]


# endregion


# region values
@intrinsic(prefer_literal=True)
def add_values(context, rows, vectors, like, weights, side, ahead, count, first, sums, down):
    """Add values, each times a weight, to some vectors of the sums of some rows, from the vector `first` on. Rows of
    weights are KEYS numbers apart, those of sums `down` bytes; the rest is as for keys."""
    height, width, kind = rows.literal_value, vectors.literal_value, format_of(like)
    some = width if WIDE or kind == BF16 else min(width, 2)  # vectors whose sums are in registers at once

    def add_some(builder, weights, side, ahead, count, first, sums, down):
        tile = [(builder.add(sums, builder.mul(down, BYTES(row))), v) for row in range(height) for v in range(some)]
        places = [at(builder, builder.add(row, builder.mul(first, BYTES(LINE))), v * LINE, NUMBERS) for row, v in tile]
        first_line = builder.udiv(first, BYTES(numbers_of(kind)))

        def add_value(key, totals):
            place, found = place_of(builder, side, key), []
            wanted = None if ahead is None else place_of(builder, ahead, key)
            for i in range(some // numbers_of(kind)):
                line = builder.add(first_line, BYTES(i))
                if wanted is not None and i * LANES * WORD[kind] % LINE == 0:
                    fetch(builder, line_at(builder, kind, wanted, line))
                found += operands_of(builder, kind, F32, place, line)
            own = builder.add(weights, builder.mul(key, BYTES(STEP)))
            for row in range(height):
                weight = repeated(builder, builder.load(at(builder, own, row * KEYS * STEP, INT)))
                for i, vector in enumerate(found, row * some):
                    totals[i] = dot(builder, totals[i], vector, weight)
            return totals

        totals = looped(builder, count, [builder.load(place, align=STEP) for place in places], add_value)
        for place, total in zip(places, totals, strict=True):
            builder.store(total, place, align=STEP)

    def generate(context, builder, signature, args):
        weights, side, ahead, count, first, sums, down = args[3:]
        ahead = None if signature.args[5] == types.none else ahead
        for v in range(0, width, some):
            add_some(builder, weights, side, ahead, count, builder.add(first, BYTES(v)), sums, down)
        return context.get_dummy_value()

    return types.void(rows, vectors, like, types.int64, side, ahead, *[types.int64] * 4), generate


# endregion


@intrinsic
def unpack(context, like, left_like, source, target, lines):
    """Write lines as their operands, beside numbers in the format of `left_like`."""
    kind = format_of(like)

    def generate(context, builder, signature, args):
        source, target, lines = args[2:]

        def write(step, _):
            found = operands_of(builder, kind, left_like, source, step)
            place = builder.add(target, builder.mul(step, BYTES(len(found) * LINE)))
            for i, operand in enumerate(found):
                operand = builder.bitcast(operand, INTS)
                builder.store(operand, at(builder, place, i * LINE, INTS), align=STEP)
            return []

        looped(builder, lines, [], write)
        return context.get_dummy_value()

    return types.void(like, left_like, *[types.int64] * 3), generate


def _permuting(back):
    """An intrinsic that brings the numbers of a line into the order of its operands, or back."""

    @intrinsic
    def permute(context, like, left_like, line):
        count, together = numbers_of(format_of(like)), 32 // left_like.bitwidth
        lanes = []
        for place in range(count * LANES):
            word, half = divmod(place, together)
            operand = word // LANES * together + together - 1 - half
            lanes.append(word % LANES * count + count - 1 - operand)
        if back:
            lanes = [lanes.index(place) for place in range(len(lanes))]

        def generate(context, builder, signature, args):
            line = ir.VectorType(context.get_value_type(left_like), len(lanes))
            place = at(builder, args[2], 0, line)
            held = builder.load(place, align=2)
            builder.store(builder.shuffle_vector(held, held, constant(lanes)), place, align=2)
            return context.get_dummy_value()

        return types.void(like, left_like, types.int64), generate

    return permute


arrange, restore = _permuting(False), _permuting(True)


# region weigh
@intrinsic
def weigh(context, line, highest):
    """Turn KEYS scores into weights relative to the highest score; return the sum of them, added in an order that
    depends on nothing."""

    def generate(context, builder, signature, args):
        scores = ir.VectorType(NUMBER, KEYS)
        place = at(builder, args[0], 0, scores)
        most = builder.insert_element(scores(ir.Undefined), args[1], INT(0))
        most = builder.shuffle_vector(most, most, constant([0] * KEYS))
        weights = exp2_of(builder, builder.fsub(builder.load(place, align=STEP), most))
        builder.store(weights, place, align=STEP)
        return reduced(builder, "fadd", "reassoc", NUMBER(0.0), weights)

    return types.float32(types.int64, types.float32), generate


def exp2_of(builder, x):
    """`exp2` of a vector of numbers of at most 127."""
    kind, words = x.type, ir.VectorType(INT, x.type.count)
    low = many(kind, -127.0)
    near = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    whole = call(builder, f"llvm.floor.v{kind.count}f32", kind, builder.fadd(near, many(kind, 0.5)))
    rest, power = builder.fsub(near, whole), many(kind, float(POLYNOMIAL[6]))
    for i in range(5, -1, -1):
        power = builder.fadd(builder.fmul(power, rest), many(kind, float(POLYNOMIAL[i])))
    exponent = builder.shl(builder.add(builder.fptosi(whole, words), many(words, 127)), many(words, 23))
    return builder.fmul(power, builder.bitcast(exponent, kind))


# endregion


@intrinsic
def highest(context, line):
    """The highest of KEYS scores. It may lose a NaN."""

    def generate(context, builder, signature, args):
        scores = builder.load(at(builder, args[0], 0, ir.VectorType(NUMBER, KEYS)), align=STEP)
        return reduced(builder, "fmax", "nnan", scores)

    return types.float32(types.int64), generate


def reduced(builder, name, flag, *arguments):
    function = ir.FunctionType(NUMBER, [argument.type for argument in arguments])
    name = f"llvm.vector.reduce.{name}.v{KEYS}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments, fastmath=[flag])


# region transpose
@intrinsic
def transpose(context, rows, offset, result, down):
    """Write a block of LANES rows of words as columns. `rows`: where the addresses of the rows are; `offset`: where the
    block begins in each, in bytes; `result`: where to write, `down` bytes from one line to the next.

    Each step exchanges the two blocks off the diagonal in blocks of two by two: of one lane, of 2, of 4, and of 8."""

    def generate(context, builder, signature, args):
        rows, offset, result, down = args
        lines = []
        for row in range(LANES):
            place = builder.load(at(builder, rows, 8 * row, BYTES))
            lines.append(builder.load(at(builder, builder.add(place, offset), 0, INTS), align=2))
        for size in (1, 2, 4, 8):
            for row in range(LANES):
                if not row & size:
                    pair = lines[row], lines[row + size]
                    lines[row], lines[row + size] = (builder.shuffle_vector(*pair, lanes) for lanes in exchanged(size))
        for number, line in enumerate(lines):
            builder.store(line, at(builder, builder.add(result, builder.mul(down, BYTES(number))), 0, INTS), align=STEP)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


# endregion
