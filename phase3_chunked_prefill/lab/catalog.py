"""The kernel variants of this phase: the ragged kernel, and the decode kernel for a few new tokens of a sequence."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from phase1_kv_pool.lab.ahead import KernelSpec
from phase1_kv_pool.lab.catalog import HEAD_DIMS, TYPES, on
from phase2_prefill_decode.lab.catalog import GROUPS, OTHER_HEADS, PAGE_SIZES, WINDOW, decode_spec, prefill_spec
from phase3_chunked_prefill.kernels.plan import FEW, ROWS
from phase3_chunked_prefill.kernels.triton.ragged import ragged_kernel


def ragged_spec(
    dtype: str, head_dim: int, page_size: int = 16, group: int = 4, window: int | None = None
) -> KernelSpec:
    """The shapes and options of phase 2's prefill kernel, and a table of blocks."""
    spec = prefill_spec(dtype, head_dim, page_size, group, window)
    return replace(
        spec,
        name=spec.name.replace("prefill", "ragged"),
        function=ragged_kernel,
        signature={**spec.signature, "blocks": "*i32"},
    )


CATALOG = [
    ragged_spec("bf16", 128),
    *(on(architecture, ragged_spec("bf16", head_dim)) for architecture, head_dim in OTHER_HEADS[1:]),
    *(on(90, ragged_spec("bf16", 128, 64, group)) for group in (1, 8)),
    on(80, ragged_spec("bf16", 128, window=WINDOW)),
    on(90, ragged_spec("fp32", 128)),
    *(on(80, decode_spec("bf16", 128, 64, group, queries=ROWS // group)) for group in (1, 8)),
    on(90, decode_spec("bf16", 128, 64, 8, queries=FEW)),
    on(80, decode_spec("bf16", 128, 16, 16, queries=FEW)),
    on(100, decode_spec("bf16", 256, 16, 8, queries=FEW)),
    on(90, decode_spec("fp32", 256, 16, 8, queries=FEW)),
    on(90, decode_spec("fp32", 80, 16, 8, queries=FEW)),
    on(90, decode_spec("bf16", 256, window=WINDOW, queries=FEW)),
]


def everything() -> Iterator[KernelSpec]:
    """Every variant. Compiling them all takes many minutes."""
    for dtype, head_dim in product(TYPES, HEAD_DIMS):
        for page_size, group in product(PAGE_SIZES, GROUPS):
            yield ragged_spec(dtype, head_dim, page_size, group)
            yield decode_spec(dtype, head_dim, page_size, group, queries=ROWS // group)
            yield decode_spec(dtype, head_dim, page_size, group, queries=FEW)
        yield ragged_spec(dtype, head_dim, window=WINDOW)
        yield decode_spec(dtype, head_dim, window=WINDOW, queries=FEW)
