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
KV_TYPES = {"int8": "i8", "fp8": "fp8e4nv"}  # of keys and values in 8 bits
HEAD_DIMS = (64, 80, 96, 128, 256)


def kv_types(dtype: str, kv: str) -> tuple[dict[str, str], dict[str, None]]:
    """The types of keys and values, with scales in 8 bits, and the arguments that are None without. `kv`: the format;
    "": that of the model."""
    numbers = dict.fromkeys(("keys", "values"), f"*{KV_TYPES.get(kv, dtype)}")
    scales = "key_scales", "value_scales"
    return (numbers | dict.fromkeys(scales, "*fp32"), {}) if kv else (numbers, dict.fromkeys(scales))


def store_spec(dtype: str, head_dim: int, kv_heads: int = 8, page_size: int = 16, kv: str = "") -> KernelSpec:
    pages, nothing = kv_types(dtype, kv)
    strides = dict.fromkeys(("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"), "i32")
    return KernelSpec(
        name=f"store {dtype} x {head_dim}{kv and f', {kv}'}",
        function=store_kernel,
        signature={**pages, **dict.fromkeys("kv", f"*{dtype}"), "slots": "*i64", "tokens": "i32", **strides},
        constants=constants(kv_heads, page_size, head_dim, TYPES[dtype]) | nothing,
        sixteens=tuple(strides),
        expect=Expect(registers=64 if kv else 40, wide_loads=True, wide_stores=True),
    )


def on(architecture: int, spec: KernelSpec) -> KernelSpec:
    return replace(spec, architectures=(architecture,))


CATALOG = [
    store_spec("bf16", 128),
    *(on(architecture, store_spec("bf16", dim)) for architecture, dim in ((80, 64), (90, 80), (100, 96), (90, 256))),
    on(80, store_spec("fp16", 96)),
    on(90, store_spec("fp32", 128)),
    on(100, store_spec("fp32", 256)),
    store_spec("bf16", 128, kv="int8"),
    on(90, store_spec("bf16", 128, kv="fp8")),
]


def everything() -> Iterator[KernelSpec]:
    return (store_spec(dtype, head_dim) for dtype, head_dim in product(TYPES, HEAD_DIMS))
