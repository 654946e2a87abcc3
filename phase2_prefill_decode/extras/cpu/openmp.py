# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Compiled functions on torch's own threads.

torch runs matrix products on the threads of an OpenMP library, and after each product these spin for milliseconds,
waiting for the next. Other threads, as numba's, would compete with them for the cores several times a layer. So the
kernels here run on the same threads, with one call: GOMP_parallel(body, work, threads, 0) calls body(work) on each.

Spinning has a price: where other programs need the cores too, a step can take fifty times as long. So threads spin for
some microseconds only, and then sleep (`phase0_request` sets this before torch is loaded).

`address_of` compiles such a body. `work` is the address of its arguments, of which the first is a counter: each thread
takes a number, does that part, and takes the next, until none are left. What differs between weights is compiled apart,
and bodies `call` it.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from phase2_prefill_decode.extras.cpu.cache import keeping
from phase2_prefill_decode.extras.cpu.intrinsics import FAST, kernel

LITTLE = 20.0  # microseconds of work that one thread finishes before others have started

INT, ADDRESS = ir.IntType(32), ir.IntType(64)


def _openmp() -> int:
    """The address of GOMP_parallel in torch's OpenMP library. 0: there is none, and kernels run on one thread.

    GNU's library has it, and LLVM's has it for compatibility.
    """
    ending = "dylib" if sys.platform == "darwin" else "so"
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{ending}"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


OPENMP = _openmp()
USLEEP = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value or 0  # the address of C's usleep(microseconds)


def threads_for(microseconds: float) -> int:
    """The number of threads for an amount of work: torch's, or one."""
    return torch.get_num_threads() if microseconds > LITTLE and OPENMP else 1


def address_of(function: Callable[..., None], arguments: int = 1) -> int:
    """Compile a function of so many integers and return its address."""
    signature = types.void(*[types.int64] * arguments)
    made = keeping(lambda cache: numba.cfunc(signature, cache=cache, fastmath=FAST, error_model="numpy")(function))
    _KEPT.append(made)
    return int(made.address)


_KEPT: list[Any] = []  # keeps alive the machine code at addresses in use


@intrinsic
def spread(context, body, work, threads, openmp):
    """Run a body on several threads and wait for all of them. `work` is an array here."""

    def generate(context, builder, signature, args):
        body, array, threads, openmp = args
        work = builder.ptrtoint(context.make_array(signature.args[1])(context, builder, array).data, ADDRESS)
        alone = ir.FunctionType(ir.VoidType(), [ADDRESS]).as_pointer()
        parallel = ir.FunctionType(ir.VoidType(), [ADDRESS, ADDRESS, INT, INT]).as_pointer()
        with builder.if_else(builder.icmp_signed("==", threads, ADDRESS(1))) as (single, several):
            with single:
                builder.call(builder.inttoptr(body, alone), [work])
            with several:
                builder.call(builder.inttoptr(openmp, parallel), [body, work, builder.trunc(threads, INT), INT(0)])
        return context.get_dummy_value()

    return types.void(types.int64, work, types.int64, types.int64), generate


@kernel
def launch(body, arguments, threads, openmp):
    """Run a body with integers as arguments."""
    spread(body, np.array((0, *arguments)), threads, openmp)


@intrinsic
def take(context, counter):
    """Take the next number of a counter, atomically. A thread that peeks after sees what was written before."""

    def generate(context, builder, signature, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], ADDRESS.as_pointer()), ADDRESS(1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def peek(context, counter):
    """Read a counter, and with it what was written before its last increment."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], ADDRESS.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def call(context, address, numbers):
    """Call the function at an address with integers."""

    def generate(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [ADDRESS] * len(numbers)).as_pointer()
        builder.call(builder.inttoptr(args[0], function), cgutils.unpack_tuple(builder, args[1]))
        return context.get_dummy_value()

    return types.void(types.int64, numbers), generate
