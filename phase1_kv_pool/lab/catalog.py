"""The kernel variants of this phase, as launches ask for them.

catalog() has every dtype and common head dimension at least once, and one shape on every architecture; everything()
crosses them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch

from phase1_kv_pool.lab.ahead import ARCHITECTURES, Expect, Variant, launched
from phase1_kv_pool.lab.store_kernel import store_on_gpu
from phase1_kv_pool.layer import KVLayer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # of keys and values in 8 bits
KV_HEADS = 8
HEAD_DIMS = (64, 80, 96, 128, 256)


def layer(dtype: str, head_dim: int, page_size: int, kv: str) -> KVLayer:
    """A page of keys and values, in the model's dtype if `kv` is empty."""
    shape = 1, KV_HEADS, page_size, head_dim
    sides = [torch.zeros(shape, dtype=KV_DTYPES.get(kv, DTYPES[dtype])) for _ in "kv"]
    return KVLayer(*sides, *(torch.zeros(shape[:3]) for _ in sides if kv))


def on(architectures: Iterable[int], variants: Iterable[Variant]) -> Iterator[Variant]:
    """The same for these architectures, of which sm_80 has no float8."""
    for variant in variants:
        known = tuple(a for a in architectures if a > 80 or "fp8e4nv" not in variant.dtypes)
        yield replace(variant, architectures=known)


def stored(dtype: str, head_dim: int, architectures: Iterable[int] = ARCHITECTURES, kv: str = "") -> Iterator[Variant]:
    kv_layer, heads = layer(dtype, head_dim, 16, kv), torch.zeros(3, KV_HEADS, head_dim, dtype=DTYPES[dtype])
    about = f"{dtype} x {head_dim}{kv and f', {kv}'}"
    expect = Expect(registers=64 if kv else 40, wide_loads=True, wide_stores=not kv)
    for variant in launched(about, lambda: store_on_gpu(kv_layer, torch.zeros(3, dtype=torch.int64), heads, heads)):
        yield from on(architectures, [replace(variant, expect=expect)])


def catalog() -> Iterator[Variant]:
    yield from stored("bf16", 128)
    for architecture, head_dim in ((80, 64), (90, 80), (100, 96), (90, 256)):
        yield from stored("bf16", head_dim, (architecture,))
    yield from stored("fp16", 96, (80,))
    yield from stored("fp32", 128, (90,))
    yield from stored("fp32", 256, (100,))
    yield from stored("bf16", 128, kv="int8")
    yield from stored("bf16", 128, (90,), kv="fp8")


def everything() -> Iterator[Variant]:
    for dtype, head_dim in product(DTYPES, HEAD_DIMS):
        yield from stored(dtype, head_dim)
