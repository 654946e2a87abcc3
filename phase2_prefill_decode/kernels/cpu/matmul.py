# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What attention on a CPU does in registers: scores of keys, sums of values, and weights; and blocks of rows written as
columns, for a packed weight.

A head of a key is read as lines of 64 bytes, and a line becomes operands, as in `microkernel`: with words of two
bfloat16, one operand has the second number of each word, and one the first. A query is laid out in the same order. So a
score is 16 sums, each one chain over the lines, which are added up at the end: lane with lane, pair with pair. Sums of
values stay in that order until the last of them is written.

LLVM does not generate this from loops, so it is written in LLVM vectors. They are longer than most processors'
registers: LLVM splits them to fit. What is added to what, and in which order, does not depend on the tile.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from phase2_prefill_decode.kernels.cpu.intrinsics import POLYNOMIAL
from phase2_prefill_decode.kernels.cpu.microkernel import (
    BYTES,
    F16,
    F32,
    FLOAT8,
    HALVES,
    INPUTS,
    INT,
    INTS,
    LANES,
    LINE,
    NUMBER,
    NUMBERS,
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

KEYS = 64  # of a block: a row has its scores in one vector
FEW = 2  # rows of a tile
TOGETHER = 8 if WIDE else 2  # keys of a tile of scores whose sums are in registers at once
WIDTH = 4  # vectors of a tile of sums
MANY = (8, 2) if WIDE else (6, 1)  # rows and vectors of a tile of sums for many rows
STEP = 4  # bytes of a number
ORDERS = {1: (0,), 2: (1, 0), 4: (3, 1, 2, 0)}  # of the numbers of a word: that of its operands


def format_of(like):
    """The format of keys and values, of their tag."""
    return FLOAT8 if like == types.uint8 else like


def line_bytes(kind):
    return LANES * (2 if kind == F16 else 4)


def place_of(builder, side, key):
    """The address of a key or a value."""
    base, numbers, distance = cgutils.unpack_tuple(builder, side)
    number = builder.load(at(builder, builder.add(numbers, builder.mul(key, BYTES(8))), 0, BYTES))
    return builder.add(base, builder.mul(number, distance))


def line_at(builder, kind, place, number):
    """The place of a line of a key or a value."""
    distance = builder.mul(number, BYTES(line_bytes(kind)))
    return at(builder, builder.add(place, distance), 0, HALVES if kind == F16 else INTS)


def load_line(builder, kind, place, number):
    return builder.load(line_at(builder, kind, place, number), align=1)


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

    def generate(context, builder, signature, args):
        q, down, side, ahead, first, lines, scores = args[3:]
        own = [builder.add(q, builder.mul(down, BYTES(row))) for row in range(height)]
        parts: list[list[ir.Value]] = [[] for _ in own]
        for key in range(0, LANES, together):
            some = [builder.add(first, BYTES(key + i)) for i in range(together)]
            places = [place_of(builder, side, number) for number in some]
            wanted = [] if signature.args[6] == types.none else [place_of(builder, ahead, number) for number in some]

            def add_line(step, sums, places=places, wanted=wanted):
                for place in wanted:
                    fetch(builder, line_at(builder, kind, place, step))
                found = [operands(builder, kind, left_like, load_line(builder, kind, place, step)) for place in places]
                words = list(zip(*found, strict=True))
                for word, line in enumerate(words):
                    for row in range(height):
                        place = builder.add(own[row], builder.mul(step, BYTES(len(words) * LINE)))
                        number = builder.load(at(builder, place, word * LINE, INTS), align=STEP)
                        for i, (_, weights) in enumerate(line, row * together):
                            sums[i] = dot(builder, sums[i], weights, number)
                return sums

            sums = looped(builder, lines, [many(NUMBERS, 0.0)] * (height * together), add_line)
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

    def generate(context, builder, signature, args):
        weights, side, ahead, count, first, sums, down = args[3:]
        sums = builder.add(sums, builder.mul(first, BYTES(LINE)))
        tile = [(builder.add(sums, builder.mul(down, BYTES(row))), v) for row in range(height) for v in range(width)]
        places = [at(builder, row, v * LINE, NUMBERS) for row, v in tile]
        first_line = builder.udiv(first, BYTES(INPUTS[kind]))

        def add_value(key, totals):
            place, found = place_of(builder, side, key), []
            wanted = None if signature.args[5] == types.none else place_of(builder, ahead, key)
            for i in range(width // INPUTS[kind]):
                number = builder.add(first_line, BYTES(i))
                if wanted is not None:
                    fetch(builder, line_at(builder, kind, wanted, number))
                line = load_line(builder, kind, place, number)
                found += [vector for _, vector in operands(builder, kind, F32, line)]
            own = builder.add(weights, builder.mul(key, BYTES(STEP)))
            for row in range(height):
                weight = repeated(builder, builder.load(at(builder, own, row * KEYS * STEP, INT)))
                for i, vector in enumerate(found, row * width):
                    totals[i] = dot(builder, totals[i], vector, weight)
            return totals

        totals = looped(builder, count, [builder.load(place, align=STEP) for place in places], add_value)
        for place, total in zip(places, totals, strict=True):
            builder.store(total, place, align=STEP)
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
            found = [
                operand for _, operand in operands(builder, kind, left_like, load_line(builder, kind, source, step))
            ]
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
        count, together = INPUTS[format_of(like)], 32 // left_like.bitwidth
        lanes = []
        for place in range(count * LANES):
            word, half = divmod(place, together)
            operand = word // LANES * together + together - 1 - half
            lanes.append(word % LANES * count + ORDERS[count][operand])
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
