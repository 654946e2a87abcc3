"""The kernel variants of this phase, as launches ask for them.

catalog() takes a minute: every kernel, head size, page size and group at least once, the attention kernels for each
architecture. everything() crosses them: that takes many minutes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, product

import torch

from phase1_kv_pool.lab.ahead import ARCHITECTURES, Expect, Variant, launched
from phase1_kv_pool.lab.catalog import DTYPES, HEAD_DIMS, KV_DTYPES, KV_HEADS, layer, on
from phase2_prefill_decode.extras.grammar import triton_mask
from phase2_prefill_decode.extras.quantized import triton_product as products
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.kernels.triton import attention, decode, draw, pointwise
from phase2_prefill_decode.kernels.triton.plan import FEW, ROWS
from phase2_prefill_decode.kernels.triton.tuning import Tuning
from phase2_prefill_decode.lab import tune

GROUPS = (1, 2, 4, 8)
PAGE_SIZES = (16, 64)
WINDOW = 4096
VOCABULARY = 151_936
ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "i8": 1, "fp8e4nv": 1}
EXPECTED = {  # of kernels whose variants all meet the same bounds
    "splits": Expect(registers=64),
    "join": Expect(registers=128, wide_loads=True),
    "add_norm": Expect(registers=64, wide_loads=True, wide_stores=True),
    "rotate_store": Expect(registers=96, wide_loads=True, wide_stores=True),
    "swiglu": Expect(registers=64, wide_loads=True, wide_stores=True),
    "apply_mask": Expect(registers=64, wide_loads=True, wide_stores=True),
    "join_splits": Expect(registers=64, wide_loads=True),
    "quantize_rows": Expect(registers=128, wide_loads=True),
    **dict.fromkeys(("maxima", "scan"), Expect(registers=64, wide_loads=True)),
    **dict.fromkeys(("bound", "choose"), Expect(registers=64)),
}
Architectures = Iterable[int]


def expected(variant: Variant) -> Expect:
    """The bounds of a variant. Attention loads K and V by asynchronous copies, with buffers for both."""
    name, dtypes = variant.name.partition(" ")[0], variant.dtypes
    if name in EXPECTED:
        return EXPECTED[name]
    values = {variant.function.arg_names[place]: value for (place,), value in variant.constants.items()}
    halves, stages = dtypes[0] != "fp32", variant.options["num_stages"]
    if name == "product":
        registers = 168 if values["tile_rows"] <= 16 and halves else 255
        return Expect(registers=registers, wide_stores=True, async_copies=True, tensor_cores=halves)
    if name == "widen":
        return Expect(registers=128, wide_stores=True)
    buffers = 2 * (stages - 1) * values["tile"] * values["block_dim"] * ITEM_SIZES[dtypes[1]]
    return Expect(shared=buffers, wide_loads=True, async_copies=stages > 1, tensor_cores=halves)


def variants(about: str, launch: Callable[[], object], architectures: Architectures = ARCHITECTURES) -> list[Variant]:
    found = (replace(variant, expect=expected(variant)) for variant in launched(about, launch))
    return [*on(architectures, found)]


def attend(
    dtype: str,
    head_dim: int,
    page_size: int = 16,
    group: int = 4,
    window: int | None = None,
    kv: str = "",
    new: int = 1,
    sinks: bool = False,
    architectures: Architectures = ARCHITECTURES,
    tuning: Tuning | None = None,
) -> list[Variant]:
    """A long sequence with `new` new tokens, and a prompt beside it: more tokens than the decode kernel takes. A few
    new tokens are alone, as in the verification of drafts."""
    sizes = ((new, 2 * WINDOW), *(() if 1 < new <= FEW else ((200, 200),)))
    starts = torch.tensor([0, *accumulate(count for count, _ in sizes)], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in sizes], dtype=torch.int32)
    table = torch.zeros(len(sizes), 2 * WINDOW // page_size + 1, dtype=torch.int32)
    metadata = AttentionMetadata(starts, lengths, table, max(count for count, _ in sizes), 2 * WINDOW, sizes)
    query = torch.zeros(int(starts[-1]), KV_HEADS * group, head_dim, dtype=DTYPES[dtype])
    pages = layer(dtype, head_dim, page_size, kv)
    starts_at = query[0, :, 0].contiguous() if sinks else None
    launch: Callable[[], object] = partial(attention.attend, query, pages, metadata, 1.0, window, starts_at)
    more = [f"window {window}"] * bool(window) + ["sinks"] * sinks + [kv] * bool(kv) + [f"{new} new"] * (new > 1)
    if tuning is not None:
        more.append(f"{tuning.tile}/{tuning.num_warps}/{tuning.num_stages}")
        launch = partial(decode.decode, query, pages, query, replace(metadata, max_seqlen_q=1), 1.0, tuning=tuning)
    about = ", ".join([f"{dtype} x {head_dim}", f"pages of {page_size}", f"group {group}", *more])
    return variants(about, launch, architectures)


def rotate_store(
    dtype: str, head_dim: int, norms: bool = True, kv: str = "", architectures: Architectures = ARCHITECTURES
) -> list[Variant]:
    qkv, rotation = torch.zeros(3, 6 * KV_HEADS * head_dim, dtype=DTYPES[dtype]), torch.zeros(9, head_dim // 2)
    numbers, weights = torch.zeros(3, dtype=torch.int64), (qkv[0, :head_dim].clone(), qkv[0, :head_dim].clone())
    about = f"{dtype} x {head_dim}" + ("" if norms else ", no norms") + (kv and f", {kv}")
    arguments = qkv, rotation, rotation, numbers, numbers, layer(dtype, head_dim, 16, kv), weights if norms else None
    return variants(about, lambda: pointwise.rotate_store(*arguments, 1e-6), architectures)


def add_norm(dtype: str, width: int = 4096, architectures: Architectures = ARCHITECTURES) -> list[Variant]:
    x = torch.zeros(3, width, dtype=DTYPES[dtype])
    return variants(f"{dtype} x {width}", lambda: pointwise.add_norm(x, x, x[0], 1e-6), architectures)


def swiglu(dtype: str, inner: int = 12_288, architectures: Architectures = ARCHITECTURES) -> list[Variant]:
    x = torch.zeros(3, 2 * inner, dtype=DTYPES[dtype])
    return variants(f"{dtype} x {inner}", lambda: pointwise.swiglu(x), architectures)


def sample(dtype: str, architectures: Architectures = ARCHITECTURES) -> list[Variant]:
    """The mask, and the four launches of the sampler."""
    logits, words = torch.zeros(3, VOCABULARY, dtype=DTYPES[dtype]), torch.zeros(3, VOCABULARY // 32, dtype=torch.int32)
    numbers, floats = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    inputs = SamplingInputs(numbers, numbers, numbers.int(), floats, floats, floats)

    def launch() -> None:
        triton_mask.apply_mask(logits, words, numbers)
        draw.draw(logits, inputs, VOCABULARY - 267)

    return variants(dtype, launch, architectures)


def multiply(
    kind: str, dtype: str, rows: int, group: int = 4096, besides: tuple[str, ...] = (), inputs: int = 4096,
    architectures: Architectures = ARCHITECTURES,
) -> list[Variant]:  # fmt: skip
    """A product with a quantized weight of 4096 outputs: in splits, or of many rows, for which it is widened."""
    numbers = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[kind]
    values = torch.zeros(4096, inputs // 2 if kind == "int4" else inputs, dtype=numbers)
    scales = torch.zeros(4096, inputs // group, dtype=DTYPES[dtype])
    weight = QuantizedWeight(
        values=values,
        scales=scales,
        zeros=scales if "zeros" in besides else None,
        offsets=scales if "offsets" in besides else None,
    )
    multiplied = products.TritonProduct(weight, scales[:, 0].contiguous() if "bias" in besides else None)
    about = ", ".join([f"{kind} {dtype}", f"{rows} rows", f"groups of {group}", *besides])
    return variants(about, lambda: multiplied(torch.zeros(rows, inputs, dtype=DTYPES[dtype])), architectures)


def quantize_rows(inputs: int) -> list[Variant]:
    x, kernel = torch.zeros(3, inputs, dtype=torch.bfloat16), products.quantize_rows_kernel
    arguments = x, x.to(torch.float8_e4m3fn), torch.zeros(3, 1)
    return variants(f"bf16 x {inputs}", lambda: kernel[3,](*arguments, **products.quantize_rows_constants(inputs)))


def catalog() -> Iterator[Variant]:
    yield from attend("bf16", 128)
    for architecture, head_dim in ((80, 64), (90, 80), (100, 96), (80, 256), (100, 256)):
        yield from attend("bf16", head_dim, architectures=(architecture,))
    for group in (1, 2, 8):
        yield from attend("bf16", 128, 64, group, architectures=(90,))
    yield from attend("bf16", 128, window=WINDOW, architectures=(80,))
    for architecture, head_dim in ((80, 64), (90, 128)):
        yield from attend("bf16", head_dim, 16, 8, 128, sinks=True, architectures=(architecture,))
    yield from attend("fp32", 128, architectures=(80,))
    yield from attend("fp32", 256, architectures=(90,))
    for group in (1, 8):
        yield from attend("bf16", 128, 64, group, new=ROWS // group, architectures=(80,))
    for head_dim, page_size, group, architecture in ((128, 64, 8, 90), (128, 16, 16, 80), (256, 16, 8, 100)):
        yield from attend("bf16", head_dim, page_size, group, new=FEW, architectures=(architecture,))
    for head_dim in (80, 256):
        yield from attend("fp32", head_dim, 16, 8, new=FEW, architectures=(90,))
    yield from attend("bf16", 256, window=WINDOW, new=FEW, architectures=(90,))
    for head_dim in (64, 128, 256):
        yield from attend("bf16", head_dim, 64, kv="int8")
    yield from attend("bf16", 128, 64, kv="fp8")
    yield from attend("bf16", 128, 64, 8, kv="int8", new=FEW, architectures=(90,))
    yield from attend("fp32", 128, kv="int8", architectures=(90,))
    yield from add_norm("bf16", architectures=(100,))
    yield from rotate_store("bf16", 80, architectures=(80, 100))
    yield from rotate_store("bf16", 128, kv="int8")
    yield from rotate_store("bf16", 128, kv="fp8")
    yield from swiglu("bf16", architectures=(80,))
    for rows in products.TritonProduct.ROWS:
        yield from multiply("int4", "bf16", rows, 32)
    yield from multiply("int4", "bf16", 1, 128, ("zeros",), architectures=(80,))
    yield from multiply("int4", "bf16", 100, 32, ("offsets", "bias"), architectures=(90,))
    yield from multiply("int8", "bf16", 1, architectures=(80, 90))
    for rows in (100, 300):
        yield from multiply("int8", "bf16", rows, architectures=(80,))
    yield from multiply("int8", "bf16", 65, 3, inputs=4098, architectures=(90,))
    yield from multiply("fp8", "bf16", 1, 128)
    yield from multiply("fp8", "fp16", 100, architectures=(80,))
    yield from multiply("fp8", "bf16", 300, 128, ("bias",), architectures=(80,))
    for rows in (1, 100):
        yield from multiply("int4", "fp32", rows, 32, architectures=(90,))
    yield from quantize_rows(4096)
    yield from sample("bf16", (100,))
    yield from sample("fp32", (90,))


def everything() -> Iterator[Variant]:
    for dtype, head_dim in product(DTYPES, HEAD_DIMS):
        for page_size, group, new in product(PAGE_SIZES, GROUPS, (1, FEW, ROWS)):
            yield from attend(dtype, head_dim, page_size, group, new=min(new, max(ROWS // group, FEW)))
        for new in (1, FEW):
            yield from attend(dtype, head_dim, window=WINDOW, new=new)
        for norms, kv in ((False, ""), (True, ""), *((True, kv) for kv in KV_DTYPES)):
            yield from rotate_store(dtype, head_dim, norms, kv)
        for kv, page_size, (group, new) in product(KV_DTYPES, PAGE_SIZES, (*((g, 1) for g in GROUPS), (8, FEW))):
            yield from attend(dtype, head_dim, page_size, group, kv=kv, new=new)
    for shape, tile in product(tune.SHAPES, tune.TILES):
        yield from attend("bf16", shape.head_dim, shape.page_size, shape.group, tuning=Tuning(256, *tile))
    for kind, dtype, rows, group, besides in product(
        products.KINDS.values(), DTYPES, products.TritonProduct.ROWS, (32, 128, 4096), ((), ("zeros",))
    ):
        yield from multiply(kind, dtype, rows, group, besides)
    for inputs in (1024, 12_288, 25_600):
        yield from quantize_rows(inputs)
    for dtype in DTYPES:
        yield from sample(dtype)
        for width, inner in ((1024, 3072), (2560, 11_008), (8192, 12_288)):
            yield from (*add_norm(dtype, width), *swiglu(dtype, inner))
