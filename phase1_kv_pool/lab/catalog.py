"""The kernels of this phase with their launch parameters.

CATALOG has every dtype and common head dimension at least once, and one shape on every architecture; everything()
crosses them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from phase1_kv_pool.kernels.triton.store import constants, store_kernel
from phase1_kv_pool.lab.ahead import Expect, KernelSpec

TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
HEAD_DIMS = (64, 80, 96, 128, 256)


def store_spec(dtype: str, head_dim: int, kv_heads: int = 8, page_size: int = 16) -> KernelSpec:
    pages = dict.fromkeys(("keys", "values", "k", "v"), f"*{dtype}")
    strides = dict.fromkeys(("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"), "i32")
    return KernelSpec(
        name=f"store {dtype} x {head_dim}",
        function=store_kernel,
        signature={**pages, "slots": "*i64", "tokens": "i32", **strides},
        constants=constants(kv_heads, page_size, head_dim, TYPES[dtype]),
        sixteens=tuple(strides),
        expect=Expect(registers=40, wide_loads=True, wide_stores=True),
    )


def on(architecture: int, spec: KernelSpec) -> KernelSpec:
    return replace(spec, architectures=(architecture,))


CATALOG = [
    store_spec("bf16", 128),
    *(on(architecture, store_spec("bf16", dim)) for architecture, dim in ((80, 64), (90, 80), (100, 96), (90, 256))),
    on(80, store_spec("fp16", 96)),
    on(90, store_spec("fp32", 128)),
    on(100, store_spec("fp32", 256)),
]


def everything() -> Iterator[KernelSpec]:
    return (store_spec(dtype, head_dim) for dtype, head_dim in product(TYPES, HEAD_DIMS))
