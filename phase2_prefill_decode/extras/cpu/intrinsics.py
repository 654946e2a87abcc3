# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What Triton has built in and numba lacks: pointers, 16-bit floats, and an exp2 that vectorizes.

Kernels get addresses, as in Triton, because wrapping a tensor as a NumPy array costs a microsecond, twenty times as
much as asking for its address. NumPy has no bfloat16 and a slow float16: both are read as 16-bit integers. `TAGS` maps
each dtype to a number of another type, so that numba compiles a kernel for each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.registry import CPUDispatcher, cpu_target
from numba.extending import intrinsic, overload

from phase2_prefill_decode.extras.cpu.cache import keeping
from phase2_prefill_decode.kernels.draw import EXP2

PROCESSOR = cpu_target.target_context.codegen().magic_tuple()  # that numba compiles for: its name and features
FEATURES = PROCESSOR[2]
POLYNOMIAL = tuple(map(np.float32, EXP2))  # for 2 ** x
TAGS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0), torch.float16: np.int16(0)}
KV_TAGS = {**TAGS, torch.int8: np.int8(0), torch.float8_e4m3fn: np.uint8(0)}

# Allowed float32 optimizations: reorder sums, fuse multiply and add. NaN must be respected.
FAST = {"reassoc", "contract", "arcp", "nsz"}
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": FAST}


class Inner(CPUDispatcher):  # type: ignore[misc]  # numba is not typed
    """A function that only compiled functions call. It has no wrapper for Python, which takes as long to compile."""

    def __call__(self, *_: Any) -> Any:
        raise TypeError(f"{self.__name__} can be called in compiled functions only")


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit with these optimizations, for the functions that kernels are made of. They are not cached: the code of
    a kernel holds theirs."""

    def make(function: Callable[..., Any]) -> Any:
        made = numba.njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS | options)
        made.__class__ = Inner
        return made

    return make


def kernel(function: Callable[..., Any]) -> Any:
    """numba.njit with the same optimizations, for a function that Python calls, with the on-disk cache."""
    return keeping(partial(numba.njit, function, **OPTIONS))


NO_TENSOR = 0


def address(tensor: torch.Tensor | None) -> int:
    return NO_TENSOR if tensor is None else tensor.data_ptr()


@intrinsic
def pointer(context, address, like):
    """An address as a pointer to the type of `like`, a number or a NumPy dtype."""
    kind = types.CPointer(like.dtype if isinstance(like, types.DType) else like)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(types.int64, like), generate


def _reinterpreting(source, target):
    """An intrinsic that reinterprets the bits as another type."""

    @intrinsic
    def reinterpret(context, x):
        def generate(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return reinterpret


as_float = _reinterpreting(types.uint32, types.float32)
as_bits = _reinterpreting(types.float32, types.uint32)


@intrinsic
def float_from_half(context, x):
    def generate(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def half_from_float(context, x):
    def generate(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@compiled(fastmath=False)
def float8_from_float(x):
    """A number of at most 448 as float8 e4m3, rounded to nearest, ties to even."""
    bits = as_bits(x)
    sign, size = (bits >> np.uint32(24)) & np.uint32(0x80), bits & np.uint32(0x7FFFFFFF)
    if size < np.uint32(0x3C800000):  # below 2 ** -6 steps are 2 ** -9: those of the float32 from 2 ** 14 to 2 ** 15
        return np.uint8(sign | (as_bits(as_float(size) + np.float32(16384)) - as_bits(np.float32(16384))))
    rounded = (size + np.uint32(0x7FFFF) + ((size >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    return np.uint8(sign | (rounded - np.uint32(0x3C0)))  # the exponent is biased by 7, not 127


@compiled()
def array(address, shape, like):
    """The memory at an address as an array of the type of `like`, a number or a NumPy dtype."""
    return numba.carray(pointer(address, like), shape)


@compiled()
def bfloat_from_float(x):
    """The upper 16 bits, rounded to nearest, ties to even; a NaN stays a NaN."""
    bits = as_bits(x)
    rounded = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return rounded if x == x else np.uint16(0x7FC0)


def widen(x):
    """A number of the model's dtype as float32."""
    raise NotImplementedError("only inside compiled functions")


def narrow(x, like):
    """A float32 in the model's dtype, of which `like` is the tag."""
    raise NotImplementedError("only inside compiled functions")


@overload(widen, jit_options={"fastmath": FAST})
def _widen(x):
    if x == types.uint16:
        return lambda x: as_float(np.uint32(x) << np.uint32(16))
    if x == types.int16:
        return lambda x: float_from_half(x)
    return lambda x: x


@overload(narrow, jit_options={"fastmath": FAST})
def _narrow(x, like):
    if like == types.uint16:
        return lambda x, like: bfloat_from_float(x)
    if like == types.int16:
        return lambda x, like: half_from_float(x)
    if like == types.int8:
        return lambda x, like: np.int8(np.floor(x + np.float32(0.5)))
    if like == types.uint8:
        return lambda x, like: float8_from_float(x)
    return lambda x, like: x


@compiled(fastmath=False)
def exp2(x):
    """2 ** x in float32, to one ulp: a polynomial for the fraction, exponent bits for the integer. 0 below 2 ** -126.5.

    It is rounded as written, without fused operations: the draw of a token depends on every bit.
    """
    near = min(max(x, np.float32(-127)), np.float32(127)) if x == x else x
    whole = np.floor(near + np.float32(0.5))
    rest = near - whole
    power = POLYNOMIAL[6]
    for i in range(5, -1, -1):
        power = power * rest + POLYNOMIAL[i]
    power *= as_float(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))
    return np.float32(np.inf) if x > np.float32(127) else power
