# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A stage of `gpu_day`: ways to be faster that the engine does not take, each beside what it does.

What wins on a GPU moves to the engine; what does not is deleted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from phase1_kv_pool.kernels import prepare_triton
from phase2_prefill_decode.kernels.attention import Attend
from phase2_prefill_decode.kernels.triton.tuning import Tuning
from phase6_integration.lab.gpu.kernels import PRODUCTS, attention, check_close, multiply
from phase6_integration.lab.gpu.rows import Day, Row

prepare_triton()  # a dry run interprets them
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from phase2_prefill_decode.extras.quantized import triton_product  # noqa: E402
from phase2_prefill_decode.extras.quantized.triton_product import quantize_rows_constants, quantize_rows_kernel  # noqa: E402
from phase2_prefill_decode.kernels.triton import attention as launches  # noqa: E402
from phase2_prefill_decode.kernels.triton.decode import decode  # noqa: E402
from phase2_prefill_decode.kernels.triton.pointwise import add_norm, add_norm_constants, add_norm_options  # noqa: E402

GROUP, PAGE_SIZE = 4, 16
DECODES = ((256, 1120, False), (256, 1120, True), (64, 1120, False), (1, 1120, False))  # sequences, tokens, 8-bit keys
TUNINGS = (
    *(Tuning(chunk) for chunk in (256, 64, 512, 1024, 2048)),  # the first one ships
    *(Tuning(chunk, 64, 8, 3) for chunk in (256, 2048)),
)
SIZES = "PROGRAMS", "SHORTEST", "LONGEST_TILE"  # that the splits of an int4 product follow from
SPLITS = [
    dict(zip(SIZES, sizes, strict=True))  # the first ones ship
    for sizes in ((512, 512, 128), (1024, 256, 128), (256, 1024, 128), (512, 512, 256), (1024, 256, 256))
]
MIXED = ((64, 1056), (192, 1056))  # decodes and their tokens, beside chunks that fill a step of 2,048
LARGEST = tl.constexpr(448.0)  # of a float8


def levers(day: Day) -> None:
    """One layer's decodes, mixed attention, products and norms."""
    for batch, length, fp8 in day.some(DECODES, ((2, 70, False), (2, 70, True))):
        for tuning in day.some(TUNINGS, TUNINGS[:1]):
            measure = partial(attend, day, [(1, length)] * batch, fp8, tuned(tuning))
            day.add(measure, what="split", batch=batch, length=length, fp8=fp8, **asdict(tuning))
    for decodes, length in day.some(MIXED, ((2, 70),)):
        sizes = [*[(1, length)] * decodes, *day.some([((2048 - decodes) // 2,) * 2] * 2, [(20, 20)])]
        for how, call in {"one stream": launches.attend, "two streams": on_two_streams(day)}.items():
            day.add(partial(attend, day, sizes, False, call), what="mixed", decodes=decodes, how=how)
    for outputs, inputs in day.some(PRODUCTS, ((96, 64),)):
        for library in day.some(("default", "cublaslt"), ("default",)):
            measure = partial(by_library, day, library, outputs, inputs)
            day.add(measure, what="product", outputs=outputs, inputs=inputs, rows=256, library=library)
        for rows in day.some((256, 2048), ()):
            measure = partial(block_scaled, day, outputs, inputs, rows)
            day.add(measure, what="block_scaled", outputs=outputs, inputs=inputs, rows=rows)
    for outputs, inputs in day.some((*PRODUCTS, (6144, 4096), (4096, 4096)), ((96, 1024),)):
        for tried in SPLITS:
            measure = partial(by_split, day, outputs, inputs, **tried)
            day.add(measure, what="int4", outputs=outputs, inputs=inputs, **tried)
    for rows in day.some((64, 256, 2048), (3,)):
        for fused in (False, True):
            day.add(partial(norm, day, rows, fused), what="norm_quantized", rows=rows, fused=fused)


def attend(day: Day, sizes: Sequence[tuple[int, int]], fp8: bool, how: Attend) -> Row:
    call, read, _ = attention(day, sizes, PAGE_SIZE, day.some((GROUP,), (2,))[0], fp8, how)
    seconds = day.seconds(call, 36)
    return {"us": seconds * 1e6, "gb_per_second": read / seconds / 1e9}


def tuned(tuning: Tuning) -> Attend:
    """Lever 3: splits of other lengths, which a graph can choose by its size. A sequence is then cut by the batch that
    it is in, so its last bits depend on it."""

    def call(query, kv, metadata, scale, window, sinks):
        result = torch.empty_like(query)
        decode(query, kv, result, metadata, scale, window, tuning, sinks)
        return result

    return call


def on_two_streams(day: Day) -> Attend:
    """Lever 7: the decodes of a mixed step, which wait for memory, beside its chunks, which wait for arithmetic."""
    cuda: Any = MagicMock() if day.dry else torch.cuda
    side = cuda.Stream()

    def call(*given):
        ready = cuda.current_stream().record_event()

        def aside(*given, **more):
            with cuda.stream(side):
                side.wait_event(ready)
                decode(*given, **more)

        with patch.object(launches, "decode", aside):
            result = launches.attend(*given)
        cuda.current_stream().wait_stream(side)
        return result

    return call


@contextmanager
def library_of(name: str) -> Iterator[None]:
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library("default")


def by_library(day: Day, library: str, outputs: int, inputs: int) -> Row:
    """Lever 8: the other library of products."""
    with library_of(library):
        return multiply(day, outputs, inputs, None, day.some((256,), (3,))[0])


def by_split(day: Day, outputs: int, inputs: int, **sizes: Any) -> Row:
    """Lever 6: more or fewer splits of an int4 weight, and longer tiles, for one row."""
    with patch.multiple(triton_product, constants=triton_product.constants.__wrapped__, **sizes):
        return multiply(day, outputs, inputs, "int4", 1, triton_product.TritonProduct)


def block_scaled(day: Day, outputs: int, inputs: int, rows: int) -> Row:
    """Lever 4: both sides in float8, with a scale for 128 inputs of a row and for a block of the weight, as published
    checkpoints have them; the engine multiplies these in 16 bits. Some GPUs and versions of torch refuse it."""
    kinds, blocks = torch.nn.functional.ScalingType, inputs // 128
    x, weight = (torch.randn(size, inputs, device=day.device).to(torch.float8_e4m3fn) for size in (rows, outputs))
    of_rows = torch.rand(blocks, rows, device=day.device).t()
    of_blocks = torch.rand(outputs // 128, -(-blocks // 4) * 4, device=day.device).t()  # cuBLAS wants fours
    call = partial(
        torch.nn.functional.scaled_mm,
        x, weight.t(), of_rows, kinds.BlockWise1x128, of_blocks, kinds.BlockWise128x128,
    )  # fmt: skip
    wide = weight.float() * of_blocks[:blocks].t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    check_close(call(), (x.float() * of_rows.repeat_interleave(128, 1)) @ wide.t(), 0.02)
    seconds = day.seconds(call, 20)
    return {"us": seconds * 1e6, "tflops": 2 * rows * outputs * inputs / seconds / 1e12}


@triton.jit
def norm_quantized_kernel(
    x, residual, weight, numbers, scales, total, eps, width: tl.constexpr, block_width: tl.constexpr
):  # fmt: skip
    """Each program adds and norms one token, as add_norm, and quantizes the result, as quantize_rows."""
    dim = tl.arange(0, block_width)
    at, mask = tl.program_id(0).to(tl.int64) * width + dim, dim < width
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + tl.load(residual + at, mask=mask, other=0.0)
    rounded = wide.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=mask)
    wide = rounded.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)).to(total.dtype.element_ty).to(tl.float32)
    normed = (normed * tl.load(weight + dim, mask=mask, other=0.0)).to(total.dtype.element_ty).to(tl.float32)
    largest = tl.max(tl.abs(normed), 0)
    scale = tl.where(largest == 0, 1.0, largest / LARGEST)
    number = tl.minimum(tl.maximum(normed / scale, -LARGEST), LARGEST)
    tl.store(numbers + at, number.to(numbers.dtype.element_ty), mask=mask)
    tl.store(scales + tl.program_id(0), scale)


def norm(day: Day, rows: int, fused: bool) -> Row:
    """Lever 5: the rows of a float8 product, quantized where they are normed."""
    width, dtype = day.some(((4096, torch.bfloat16),), ((64, torch.float32),))[0]
    x, residual = torch.randn(2, rows, width, device=day.device, dtype=dtype)
    weight, total = torch.ones(width, device=day.device, dtype=dtype), torch.empty_like(x)
    numbers = torch.empty(rows, width, device=day.device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, 1, device=day.device)

    def separately() -> None:
        normed, _ = add_norm(x, residual, weight, 1e-6)
        quantize_rows_kernel[rows,](normed, numbers, scales, **quantize_rows_constants(width))

    def at_once() -> None:
        shape = add_norm_constants(width) | add_norm_options(width)
        norm_quantized_kernel[rows,](x, residual, weight, numbers, scales, total, 1e-6, **shape)

    separately()
    wanted = numbers.float()
    at_once()
    torch.testing.assert_close(numbers.float(), wanted, rtol=0.07, atol=1e-6)  # a float8 beside, at most
    return {"us": day.seconds(at_once if fused else separately, 36) * 1e6}
