# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What a processor computes at most: instructions that multiply and add, on numbers that stay in registers.

Nothing is loaded, and no instruction waits for the one before, so that only the units for arithmetic decide. All
threads take part.
"""

import time

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.unsafe.ndarray import to_fixed_tuple

from phase2_prefill_decode.extras.cpu.intrinsics import array
from phase2_prefill_decode.extras.cpu.microkernel import BFLOATS, DOTS, INT, LANES, NUMBERS, WIDE, call
from phase2_prefill_decode.extras.cpu.openmp import OPENMP, address_of, launch

CHAINS = 24 if WIDE else 6  # vectors of sums: enough to hide the latency. With AVX2 each takes two of 16 registers
STEPS = 1 << 20
RUNS = 10
ANY = 1  # bits of a number


def _chains(dots):
    """An intrinsic: in each step, every vector of sums gets the product of two vectors added, or of two of pairs."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512" if dots else f"llvm.fma.v{LANES}f32"

    @intrinsic
    def chains(context, steps, place):
        def generate(context, builder, signature, args):
            at = builder.inttoptr(args[1], INT.as_pointer())
            first = builder.insert_element(ir.VectorType(INT, LANES)(ir.Undefined), builder.load(at), INT(0))
            same = ir.VectorType(INT, LANES)([0] * LANES)
            factor = builder.bitcast(builder.shuffle_vector(first, first, same), BFLOATS if dots else NUMBERS)
            sums = [cgutils.alloca_once_value(builder, NUMBERS([0.0] * LANES)) for _ in range(CHAINS)]
            with cgutils.for_range(builder, args[0]):
                for total in sums:
                    held = builder.load(total)
                    operands = (held, factor, factor) if dots else (factor, factor, held)
                    builder.store(call(builder, name, NUMBERS, *operands), total)
            result = NUMBERS([0.0] * LANES)
            for total in sums:
                result = builder.fadd(result, builder.load(total))
            builder.store(builder.bitcast(builder.extract_element(result, INT(0)), INT), at)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return chains


def _body(dots):
    chains = _chains(dots)

    def body(work):
        _, steps, _ = to_fixed_tuple(array(work, (3,), np.dtype(np.int64)), 3)
        chains(steps, work + 16)

    return address_of(body)


def peaks() -> dict[str, float]:
    """GFLOP/s in float32, and in bfloat16 where the processor multiplies pairs of it."""
    threads = torch.get_num_threads() if OPENMP else 1
    found = {}
    for dtype, dots in [("float32", False), *([("bfloat16", True)] if DOTS else [])]:
        body, best = _body(dots), np.inf
        for _ in range(RUNS):
            start = time.perf_counter()
            launch(body, (STEPS, ANY), threads, OPENMP)
            best = min(best, time.perf_counter() - start)
        found[dtype] = threads * STEPS * CHAINS * LANES * (4 if dots else 2) / best / 1e9
    return found
