"""The kernel variants of this phase, for compilation ahead of time.

CATALOG takes half a minute: every kernel, head size, page size and group at least once, the attention kernels for each
architecture. everything() crosses them: that takes many minutes.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from phase1_kv_pool.lab.ahead import ARCHITECTURES, Expect, KernelSpec
from phase1_kv_pool.lab.catalog import HEAD_DIMS, KV_TYPES, TYPES, kv_types, on
from phase2_prefill_decode.kernels.triton import decode, draw, mask, pointwise, prefill, splits
from phase2_prefill_decode.kernels.triton import product as products
from phase2_prefill_decode.kernels.triton.plan import FEW, ROWS
from phase2_prefill_decode.kernels.triton.tiles import Tiling, constants
from phase2_prefill_decode.kernels.triton.tuning import Tuning, default
from phase2_prefill_decode.lab import tune

KV_HEADS = 8
GROUPS = (1, 2, 4, 8)
PAGE_SIZES = (16, 64)
WINDOW = 4096
OTHER_HEADS = ((80, 64), (90, 80), (100, 96), (80, 256), (100, 256))  # architecture and head dimension


def attention_spec(
    kernel: str,
    function: Any,
    dtype: str,
    tiles: Tiling,
    constants: dict[str, int | None],
    more: dict[str, str],
    kv: str,
) -> KernelSpec:
    """The specification of an attention kernel: K and V are loaded by asynchronous copies, with buffers for both."""
    window = f", window {constants['window']}" if constants["window"] else ""
    shape = f"x {constants['head_dim']}, pages of {constants['page_size']}, group {constants['group']}{window}"
    buffers = tiles.buffers(constants["head_dim"] or 0, 1 if kv else TYPES[dtype])
    pages, nothing = kv_types(dtype, kv)
    return KernelSpec(
        name=f"{kernel} {dtype} {shape}{kv and f', {kv}'}",
        function=function,
        signature={
            **pages,
            **dict.fromkeys(("query", "result"), f"*{dtype}"),
            **dict.fromkeys(("cu_seqlens_q", "seq_lens", "page_table"), "*i32"),
            "table_width": "i32",
            "scale": "fp32",
            **more,
        },
        constants=constants | nothing,
        options=tiles.options,
        expect=Expect(shared=buffers, wide_loads=True, async_copies=tiles.num_stages > 1, tensor_cores=dtype != "fp32"),
    )


def decode_spec(
    dtype: str,
    head_dim: int,
    page_size: int = 16,
    group: int = 4,
    window: int | None = None,
    queries: int = 1,
    tuning: Tuning | None = None,
    kv: str = "",
) -> KernelSpec:
    tiles = decode.tiling(head_dim, TYPES[dtype], queries * group, tuning or default(group), bool(kv))
    shape = constants(KV_HEADS * group, KV_HEADS, page_size, head_dim, tiles, window) | {"queries": queries}
    pointers = {"parts": "*fp32", "lse": "*fp32", "work": "*i32", "cu_splits": "*i32"}
    spec = attention_spec("decode", decode.decode_kernel, dtype, tiles, shape, pointers | {"sequences": "i32"}, kv)
    name = spec.name if queries == 1 else f"{spec.name}, {queries} new"
    return replace(spec, name=name if tuning is None else f"{name}, {tiles.tile}/{tiles.num_warps}/{tiles.num_stages}")


def splits_spec(group: int = 4, window: int | None = None, queries: int = 1) -> KernelSpec:
    constants = splits.constants(KV_HEADS, queries, default(group).chunk, 64, window)
    return KernelSpec(
        name=f"splits for groups of {group}, {queries} new{f', window {window}' if window else ''}",
        function=splits.splits_kernel,
        signature=dict.fromkeys(("work", "cu_splits", "cu_seqlens_q", "seq_lens"), "*i32"),
        constants=constants,
        expect=Expect(registers=64),
    )


def prefill_spec(
    dtype: str, head_dim: int, page_size: int = 16, group: int = 4, window: int | None = None, kv: str = ""
) -> KernelSpec:
    tiles = prefill.tiling(head_dim, TYPES[dtype], group, bool(kv))
    shape = constants(KV_HEADS * group, KV_HEADS, page_size, head_dim, tiles, window)
    return attention_spec("prefill", prefill.prefill_kernel, dtype, tiles, shape, {"blocks": "*i32"}, kv)


def join_spec(dtype: str, head_dim: int, queries: int = 1) -> KernelSpec:
    return KernelSpec(
        name=f"join {dtype} x {head_dim}, {queries} new",
        function=decode.join_kernel,
        signature={
            "result": f"*{dtype}",
            **dict.fromkeys(("parts", "lse"), "*fp32"),
            **dict.fromkeys(("cu_splits", "cu_seqlens_q"), "*i32"),
        },
        constants=decode.join_constants(4 * KV_HEADS, head_dim, queries),
        expect=Expect(registers=128, wide_loads=True),
    )


def add_norm_spec(dtype: str, width: int = 4096) -> KernelSpec:
    return KernelSpec(
        name=f"add_norm {dtype} x {width}",
        function=pointwise.add_norm_kernel,
        signature={**dict.fromkeys(("x", "residual", "weight", "normed", "total"), f"*{dtype}"), "eps": "fp32"},
        constants=pointwise.add_norm_constants(width),
        options=pointwise.add_norm_options(width),
        expect=Expect(registers=64, wide_loads=True, wide_stores=True),
    )


def rotate_store_spec(dtype: str, head_dim: int, page_size: int = 16, norms: bool = True, kv: str = "") -> KernelSpec:
    weights, (pages, nothing) = ("q_norm", "k_norm"), kv_types(dtype, kv)
    constants = pointwise.rotate_store_constants(32, KV_HEADS, page_size, head_dim, TYPES[dtype])
    more = ("" if norms else ", no norms") + (kv and f", {kv}")
    return KernelSpec(
        name=f"rotate_store {dtype} x {head_dim}, pages of {page_size}{more}",
        function=pointwise.rotate_store_kernel,
        signature={
            **pages,
            **dict.fromkeys(("qkv", "query"), f"*{dtype}"),
            **(dict.fromkeys(weights, f"*{dtype}") if norms else {}),
            **dict.fromkeys(("cos", "sin"), "*fp32"),
            **dict.fromkeys(("positions", "slots"), "*i64"),
            **dict.fromkeys(("stride", "tokens"), "i32"),
            "eps": "fp32",
        },
        constants=constants | nothing | ({} if norms else dict.fromkeys(weights)),
        sixteens=("stride",),
        expect=Expect(registers=96, wide_loads=True, wide_stores=True),
    )


def swiglu_spec(dtype: str, inner: int = 12288) -> KernelSpec:
    return KernelSpec(
        name=f"swiglu {dtype} x {inner}",
        function=pointwise.swiglu_kernel,
        signature={"gate_up": f"*{dtype}", "result": f"*{dtype}"},
        constants={"inner": inner, "block_inner": pointwise.INNER},
        expect=Expect(registers=64, wide_loads=True, wide_stores=True),
    )


def mask_spec(dtype: str) -> KernelSpec:
    return KernelSpec(
        name=f"mask {dtype}",
        function=mask.apply_mask_kernel,
        signature={
            **dict.fromkeys(("logits", "masked"), f"*{dtype}"),
            "bits": "*i32",
            "numbers": "*i64",
            **dict.fromkeys(("stride", "vocab", "words"), "i32"),
        },
        constants={"tile": mask.TILE},
        sixteens=("stride", "vocab"),
        expect=Expect(registers=64, wide_loads=True, wide_stores=True),
    )


def product_spec(
    kind: str, dtype: str, rows: int, group: int = 4096, besides: tuple[str, ...] = (), inputs: int = 4096
) -> KernelSpec:
    """A product with a quantized weight of 4096 outputs: the splits of few rows, or all of many."""
    constants, options = products.constants(4096, inputs, group, kind, rows, TYPES[dtype])
    types = {"x": f"*{dtype}", "values": "*u8", "scales": "*bf16", "rows": "i32", "outputs": "i32"}
    types["result"] = "*fp32" if constants["apart"] and constants["split"] < inputs else f"*{dtype}"
    types |= dict.fromkeys(besides, "*bf16")
    names = products.product_kernel.arg_names
    few = constants["tile_rows"] <= 64
    return KernelSpec(
        name=", ".join([f"product {kind} {dtype}, {rows} rows, groups of {group}", *besides]),
        function=products.product_kernel,
        signature={name: types[name] for name in names if name in types},
        constants={name: constants.get(name) for name in names if name not in types},
        options=options,
        sixteens=("outputs",),
        expect=Expect(
            registers=168 if few and dtype != "fp32" else 255,
            wide_stores=True,
            async_copies=True,
            tensor_cores=dtype != "fp32",
        ),
    )


def join_splits_spec(dtype: str, splits: int = 8) -> KernelSpec:
    return KernelSpec(
        name=f"join_splits {dtype}, {splits} splits",
        function=products.join_splits_kernel,
        signature={"parts": "*fp32", "result": f"*{dtype}", "rows": "i32", "outputs": "i32"},
        constants={"bias": None, "splits": splits, "tile": products.JOINED},
        sixteens=("outputs",),
        expect=Expect(registers=64, wide_loads=True),
    )


def quantize_rows_spec(inputs: int) -> KernelSpec:
    constants = products.quantize_rows_constants(inputs)
    return KernelSpec(
        name=f"quantize_rows bf16 x {inputs}",
        function=products.quantize_rows_kernel,
        signature={"x": "*bf16", "numbers": "*fp8e4nv", "scales": "*fp32"},
        constants={name: constants[name] for name in ("inputs", "block_inputs")},
        options={"num_warps": constants["num_warps"]},
        architectures=(90, 100),
        expect=Expect(registers=128, wide_loads=True),
    )


SAMPLE_TYPES = {
    **dict.fromkeys(("temperatures", "top_p", "min_p", "peaks", "maxima"), "*fp32"),
    **dict.fromkeys(("top_k", "bounds", "counts", "candidates"), "*i32"),
    **dict.fromkeys(("keys", "positions", "masses", "races", "tokens"), "*i64"),
    **dict.fromkeys(("stride", "vocab", "readable", "blocks", "tiles"), "i32"),
}
IN_TILES = {"maxima": draw.maxima_kernel, "scan": draw.scan_kernel}
IN_ROWS = {"bound": draw.bound_kernel, "choose": draw.choose_kernel}


def sample_spec(dtype: str, launch: str) -> KernelSpec:
    """One of the four launches of the sampler."""
    function = (IN_TILES | IN_ROWS)[launch]
    types = {"logits": f"*{dtype}", **SAMPLE_TYPES}
    constants = {
        "block_size": draw.BLOCK,
        "most": draw.CANDIDATES,
        "shift": {"bf16": 16, "fp16": 13, "fp32": 0}[dtype],
        "tile": draw.TILE if launch in IN_TILES else draw.SEARCH,
    }
    return KernelSpec(
        name=f"sample {launch} {dtype}",
        function=function,
        signature={name: types[name] for name in function.arg_names if name in types},
        constants={name: constants[name] for name in function.arg_names if name in constants},
        options=draw.OPTIONS,
        sixteens=("stride", "readable") if launch in IN_TILES else ("stride",),
        expect=Expect(registers=64, wide_loads=launch in IN_TILES),
    )


CATALOG = [
    decode_spec("bf16", 128),
    *(on(architecture, decode_spec("bf16", head_dim)) for architecture, head_dim in OTHER_HEADS),
    *(on(90, decode_spec("bf16", 128, 64, group)) for group in (1, 2, 8)),
    on(80, decode_spec("bf16", 128, window=WINDOW)),
    on(80, decode_spec("fp32", 128)),
    on(90, decode_spec("fp32", 256)),
    *(on(80, decode_spec("bf16", 128, 64, group, queries=ROWS // group)) for group in (1, 8)),
    on(90, decode_spec("bf16", 128, 64, 8, queries=FEW)),
    on(80, decode_spec("bf16", 128, 16, 16, queries=FEW)),
    on(100, decode_spec("bf16", 256, 16, 8, queries=FEW)),
    *(on(90, decode_spec("fp32", head_dim, 16, 8, queries=FEW)) for head_dim in (80, 256)),
    on(90, decode_spec("bf16", 256, window=WINDOW, queries=FEW)),
    *(decode_spec("bf16", head_dim, 64, kv="int8") for head_dim in (128, 256)),
    *(on(architecture, decode_spec("bf16", 128, 64, kv="fp8")) for architecture in (90, 100)),
    on(90, decode_spec("bf16", 128, 64, 8, queries=FEW, kv="int8")),
    on(90, decode_spec("fp32", 128, kv="int8")),
    on(90, join_spec("bf16", 128)),
    on(80, splits_spec()),
    on(90, splits_spec(window=WINDOW)),
    prefill_spec("bf16", 128),
    *(on(architecture, prefill_spec("bf16", head_dim)) for architecture, head_dim in OTHER_HEADS),
    *(on(90, prefill_spec("bf16", 128, 64, group)) for group in (1, 8)),
    on(80, prefill_spec("bf16", 128, window=WINDOW)),
    on(80, prefill_spec("fp32", 128)),
    on(90, prefill_spec("fp32", 256)),
    *(prefill_spec("bf16", head_dim, 64, kv="int8") for head_dim in (64, 128, 256)),
    *(on(architecture, prefill_spec("bf16", 128, 64, kv="fp8")) for architecture in (90, 100)),
    on(90, prefill_spec("fp32", 128, kv="int8")),
    on(100, add_norm_spec("bf16")),
    *(on(architecture, rotate_store_spec("bf16", 80)) for architecture in (80, 100)),
    rotate_store_spec("bf16", 128, kv="int8"),
    *(on(architecture, rotate_store_spec("bf16", 128, kv="fp8")) for architecture in (90, 100)),
    on(80, swiglu_spec("bf16")),
    on(90, mask_spec("bf16")),
    *(product_spec("int4", "bf16", rows, 32) for rows in products.TritonProduct.ROWS),
    on(80, product_spec("int4", "bf16", 1, 128, ("zeros",))),
    on(90, product_spec("int4", "bf16", 300, 32, ("offsets", "bias"))),
    *(on(architecture, product_spec("int8", "bf16", 1)) for architecture in (80, 90)),
    on(80, product_spec("int8", "bf16", 300)),
    on(90, product_spec("int8", "bf16", 65, 3, inputs=4098)),
    *(on(architecture, product_spec("fp8", "bf16", 1, 128)) for architecture in (80, 90, 100)),
    *(on(80, product_spec("fp8", "bf16", 300, *more)) for more in ((), (128, ("bias",)))),
    *(on(90, product_spec("int4", "fp32", rows, 32)) for rows in (1, 300)),
    on(80, join_splits_spec("bf16")),
    on(90, quantize_rows_spec(4096)),
    *(on(100, sample_spec("bf16", launch)) for launch in (*IN_TILES, *IN_ROWS)),
    *(on(90, sample_spec("fp32", launch)) for launch in (*IN_TILES, *IN_ROWS)),
]


def everything() -> Iterator[KernelSpec]:
    for dtype, head_dim in product(TYPES, HEAD_DIMS):
        for page_size, group in product(PAGE_SIZES, GROUPS):
            yield decode_spec(dtype, head_dim, page_size, group)
            yield decode_spec(dtype, head_dim, page_size, group, queries=ROWS // group)
            yield decode_spec(dtype, head_dim, page_size, group, queries=FEW)
            yield prefill_spec(dtype, head_dim, page_size, group)
        yield decode_spec(dtype, head_dim, window=WINDOW)
        yield decode_spec(dtype, head_dim, window=WINDOW, queries=FEW)
        yield prefill_spec(dtype, head_dim, window=WINDOW)
        yield join_spec(dtype, head_dim)
        yield join_spec(dtype, head_dim, 4)
        yield rotate_store_spec(dtype, head_dim)
        yield rotate_store_spec(dtype, head_dim, norms=False)
        for kv, page_size in product(KV_TYPES, PAGE_SIZES):
            at_least = (90, 100) if kv == "fp8" else ARCHITECTURES  # sm_80 has no float8
            specs = [decode_spec(dtype, head_dim, page_size, group, kv=kv) for group in GROUPS]
            specs += [decode_spec(dtype, head_dim, page_size, 8, queries=FEW, kv=kv)]
            specs += [prefill_spec(dtype, head_dim, page_size, kv=kv), rotate_store_spec(dtype, head_dim, kv=kv)]
            yield from (replace(spec, architectures=at_least) for spec in specs)
    for shape, tile in product(tune.SHAPES, tune.TILES):
        yield decode_spec("bf16", shape.head_dim, shape.page_size, shape.group, tuning=Tuning(256, *tile))
    for group, window, queries in product(GROUPS, (None, WINDOW), (1, 4)):
        yield splits_spec(group, window, queries)
    for kind, dtype, rows, group in product(
        products.KINDS.values(), TYPES, products.TritonProduct.ROWS, (32, 128, 4096)
    ):
        yield product_spec(kind, dtype, rows, group)
        yield product_spec(kind, dtype, rows, group, ("zeros",))
    yield from (quantize_rows_spec(inputs) for inputs in (1024, 12288, 25600))
    for dtype in TYPES:
        yield join_splits_spec(dtype)
        yield mask_spec(dtype)
        yield from (add_norm_spec(dtype, width) for width in (1024, 2560, 8192))
        yield from (swiglu_spec(dtype, inner) for inner in (3072, 11008))
        yield from (sample_spec(dtype, launch) for launch in (*IN_TILES, *IN_ROWS))
