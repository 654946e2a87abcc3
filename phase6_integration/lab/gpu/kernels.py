"""The stages of `gpu_day` that measure kernels: attention over pages, products with quantized weights and sampling,
beside the device's ceilings.

Attention is compared with every backend of torch's scaled_dot_product_attention, each forced: left to itself, torch
takes FlashAttention 2, which is not the fastest on every GPU.
"""

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from phase0_request.batch import Batch, Slice
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.layer import KVLayer
from phase1_kv_pool.layer import quantize as quantize_heads
from phase1_kv_pool.layout import SCALE_BYTES
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.extras.quantized.layout import SCHEMES
from phase2_prefill_decode.extras.quantized.quantize import quantize
from phase2_prefill_decode.extras.quantized.weight import QuantizedWeight
from phase2_prefill_decode.kernels.attention import Attend, AttentionMetadata
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.lab import ceilings
from phase2_prefill_decode.sampling.sampler import Sampler
from phase2_prefill_decode.transfer import moved
from phase6_integration.lab.gpu.rows import Day, Row

GROUPS, PAGE_SIZES = (4, 8), (16, 64)  # that of 8B first, and the page size that ships
DECODES = ((256, 2048), (64, 2048), (1, 32_768), (16, 4096), (4, 16_384))  # sequences, tokens of each
PREFILLS = ((2048, 2048), (8192, 8192), (1024, 1024), (2048, 16_384))  # new tokens, all tokens
OUT_OF_CACHE = 1 << 29  # bytes of keys and values that are read before the same are read again
PRODUCTS, ROWS = ((24_576, 4096), (4096, 12_288)), (1, 16, 64, 256, 2048)  # of 8B: outputs and inputs, and rows
LAYERS = 36  # calls of a decode step, which share one plan
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)  # MATH is not fused
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "top_p": SamplingParams(top_p=0.9),
    "top_k, top_p": SamplingParams(top_k=50, top_p=0.9),
    "temperature": SamplingParams(),
}


def kernels(day: Day) -> None:
    """Ceilings of this device, then attention beside them."""
    best = limits(day)
    for group in day.some(GROUPS, (2,)):
        for new, length in day.some(PREFILLS, ((40, 40),)):
            if new == length:
                day.add(partial(sdpa, day, new, group), what="sdpa", group=group, new=new)
        for page_size in PAGE_SIZES:
            shape = {"group": group, "page_size": page_size}
            for what, in_8_bits in {"decode": False, "decode_fp8": True}.items():
                for batch, length in day.some(DECODES, ((2, 70),)):
                    sizes = [(1, length)] * batch
                    measure = partial(decode, day, best["read_gb_per_second"], sizes, page_size, group, in_8_bits)
                    day.add(measure, what=what, **shape, batch=batch, length=length)
            for new, length in day.some(PREFILLS, ((40, 40), (40, 70))):
                measure = partial(prefill, day, best["gflops_bfloat16"], new, length, page_size, group)
                day.add(measure, what="prefill", **shape, new=new, length=length)


def limits(day: Day) -> Row:
    """What this device can do at best: bytes copied and read, and matrix products. A row of the stage that asks."""
    if day.dry:
        ceilings.SIZES, ceilings.OUT_OF_CACHE, ceilings.WIDTH = {"cpu": (16, 24, 32)}, {"cpu": 1 << 20}, 256
    best = replace(day, wanted="").add(lambda: dict(ceilings.measure(day.device)["best"]), what="ceilings")
    if best is None:
        raise RuntimeError("this device's ceilings could not be measured, so nothing can be compared with them")
    return best


def decode(day: Day, best: float, sizes: Sequence[tuple[int, int]], page_size: int, group: int, fp8: bool) -> Row:
    """One layer of a decode step, with its share of the plan, beside the read of as many bytes."""
    call, read, _ = attention(day, sizes, page_size, group, fp8)
    seconds = day.seconds(call, LAYERS)
    rate = read / seconds / 1e9
    return {"us": seconds * 1e6, "gb_per_second": rate, "of_read": rate / best}


def prefill(day: Day, product: float, new: int, length: int, page_size: int, group: int) -> Row:
    """One layer of a prompt or a chunk, beside a matrix product and the best of torch's backends."""
    call, _, operations = attention(day, [(new, length)], page_size, group)
    seconds = day.seconds(call, 4)
    rate = operations / seconds / 1e9
    row = {"us": seconds * 1e6, "tflops": rate / 1e3, "of_product": rate / product}
    if new != length:  # torch's causal mask is for whole prompts
        return row
    peer = day.add(partial(sdpa, day, new, group), what="sdpa", group=group, new=new)
    return row | ({} if peer is None else {"of_sdpa": peer["us"] / row["us"], "sdpa": peer["best"]})


def shape_of(day: Day) -> tuple[int, int, torch.dtype]:
    """KV heads, their size and type."""
    return (2, 16, torch.float32) if day.dry else (8, 128, torch.bfloat16)


def attention(
    day: Day,
    sizes: Sequence[tuple[int, int]],
    page_size: int,
    group: int,
    fp8: bool = False,
    attend: Attend | None = None,
) -> tuple[Callable[[], Tensor], int, int]:
    """A call of one layer's attention over pages in random order; the bytes of keys and values that it reads, and its
    operations. `sizes` are (new, all) tokens of each sequence. As in a step, each call reads another layer of the pool,
    so that no cache holds it; the layers have one plan."""
    kv_heads, head_dim, dtype = shape_of(day)
    counts = [-(-length // page_size) for _, length in sizes]
    order = torch.randperm(sum(counts), dtype=torch.int32).split_with_sizes(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(day.device)
    starts = torch.tensor([0, *(new for new, _ in sizes)]).cumsum(0).int().to(day.device)
    lengths = torch.tensor([length for _, length in sizes], dtype=torch.int32, device=day.device)
    longest, total = (max(column) for column in zip(*sizes, strict=True))
    known = tuple(sizes) if longest > 1 or day.dry else ()  # a recorded decode step does not know them
    metadata = AttentionMetadata(starts, lengths, table, longest, total, known)
    shape = sum(counts), kv_heads, page_size, head_dim
    head = head_dim + SCALE_BYTES if fp8 else head_dim * dtype.itemsize
    read = sum(length for _, length in sizes) * kv_heads * head * 2
    layers = day.some((ceil(OUT_OF_CACHE / read),), (2,))[0]
    pools = cycle(
        [pages(torch.randn(2, *shape, device=day.device, dtype=dtype), fp8) for _ in range(min(layers, LAYERS))]
    )
    heads = kv_heads * group
    query = torch.randn(sum(new for new, _ in sizes), heads, head_dim, device=day.device, dtype=dtype)
    attend = attend or backend_for(day.device).attend
    pairs = sum(new * (2 * length - new + 1) // 2 for new, length in sizes)

    def call() -> Tensor:
        return attend(query, next(pools), metadata, head_dim**-0.5, None, None)

    return call, read, 4 * pairs * heads * head_dim


def pages(kv: Tensor, fp8: bool) -> KVLayer:
    """Keys and values as a layer of a pool."""
    if not fp8:
        return KVLayer(*kv)
    numbers, scales = quantize_heads(kv, torch.float8_e4m3fn)
    return KVLayer(*numbers, *scales)


def sdpa(day: Day, tokens: int, group: int) -> Row:
    """torch's attention over the same heads without pages: microseconds of each backend, and the best of them."""
    kv_heads, head_dim, dtype = shape_of(day)
    q, k, v = (
        torch.randn(1, heads, tokens, head_dim, device=day.device, dtype=dtype)
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    found = {backend.name.lower(): forced(day, backend, q, k, v) for backend in BACKENDS}
    ran = {name: row["us"] for name, row in found.items() if row["us"] is not None}
    if not ran:
        raise RuntimeError(f"no backend takes these shapes: {found}")
    best = min(ran, key=ran.__getitem__)
    return {"us": ran[best], "best": best, **found}


def forced(day: Day, backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Row:
    """Microseconds of one backend, or why it refuses. One that takes no groups of query heads gets keys and values with
    a copy for each query head, made before the clock starts: a prompt is bound by arithmetic, so they cost it little.
    """
    reasons: list[str] = []
    for copies in (1, q.shape[1] // k.shape[1]):
        keys, values = (side.repeat_interleave(copies, 1) for side in (k, v))
        call = partial(scaled_dot_product_attention, q, keys, values, is_causal=True, enable_gqa=copies == 1)
        heads = "grouped" if copies == 1 else "expanded"
        with warnings.catch_warnings(record=True) as said, sdpa_kernel(backend):
            warnings.simplefilter("always")
            try:
                return {"us": day.seconds(call, 4) * 1e6, "heads": heads}
            except RuntimeError as error:
                reasons += [f"{heads}: {error}", *(str(warning.message) for warning in said)]
    return {"us": None, "refused": " / ".join(reasons)[:600]}


def products(day: Day) -> None:
    """Products of few and many rows with a weight in each scheme, beside torch's with one in bfloat16."""
    for outputs, inputs in day.some(PRODUCTS, ((96, 64),)):
        for scheme in (None, *SCHEMES):
            for rows in day.some(ROWS, (3,)):
                measure = partial(multiply, day, outputs, inputs, scheme, rows)
                shape = {"outputs": outputs, "inputs": inputs}
                day.add(measure, what="product", **shape, scheme=scheme or "none", rows=rows)


def check_close(found: Tensor, wanted: Tensor, most: float) -> None:
    """Refuse to time a product that is wrong: its error is at most this share of it."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    if not error <= most:
        raise RuntimeError(f"the product is {error:.1%} off its reference, and rounding explains {most:.0%}")


def multiply(
    day: Day, outputs: int, inputs: int, scheme: str | None, rows: int, linear: Callable[[Any], Any] | None = None
) -> Row:
    """One product. As in a step, each call reads another weight, so that no cache holds it."""
    dtype = shape_of(day)[2]
    dense = torch.randn(outputs, inputs, device=day.device, dtype=dtype)
    weight: Tensor | QuantizedWeight = dense if scheme is None else quantize(dense, scheme)
    copies = day.some((ceil(OUT_OF_CACHE / weight.nbytes),), (1,))[0]
    made = linear or (lambda weight: backend_for(day.device).linear(weight, None))
    linears = cycle([made(deepcopy(weight)) for _ in range(copies)])
    x = torch.randn(rows, inputs, device=day.device, dtype=dtype)
    wide = weight if isinstance(weight, Tensor) else weight.dequantize()
    check_close(next(linears)(x), x @ wide.to(dtype).t(), 0.05 if scheme == "fp8" else 0.02)  # fp8 rounds rows, too
    seconds = day.seconds(lambda: next(linears)(x), 20)
    rate = {"gb_per_second": weight.nbytes / seconds / 1e9, "tflops": 2 * rows * outputs * inputs / seconds / 1e12}
    return {"us": seconds * 1e6, **rate}


def sampling(day: Day) -> None:
    """The draw, from logits of a model and from flat ones. They are where the head has just left them: in the cache."""
    for rows in day.some((256, 64, 1), (4,)):
        for shape, make in {"peaked": peaked, "flat": flat}.items():
            for name in KINDS:
                day.add(partial(draw, day, rows, make, KINDS[name]), what="sample", rows=rows, logits=shape, kind=name)


def flat(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """Logits of a model of 8B with random weights. A nucleus has tens of thousands of tokens, so the kernel for top-p
    searches whole rows: its worst case."""
    return (torch.randn(rows, vocabulary, device=device) * 1.28).to(torch.bfloat16)


def peaked(rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """Logits of a trained model: some tokens stand out, each with a probability that falls with the square of its rank.
    A nucleus of 0.9 has about six."""
    logits = torch.randn(rows, vocabulary, device=device) * 2
    ranks = torch.arange(1, min(64, vocabulary) + 1, device=device)
    tokens = torch.rand(rows, vocabulary, device=device).topk(len(ranks), -1).indices
    return logits.scatter_(1, tokens, (20 - 2 * ranks.log()).expand(rows, -1)).to(torch.bfloat16)


@torch.inference_mode()
def draw(day: Day, rows: int, make: Callable[[int, int, torch.device], Tensor], params: SamplingParams) -> Row:
    """The kernels of a draw, with the parameters of the requests on the device already."""
    vocabulary = day.some((151_936,), (500,))[0]
    sampler = Sampler(vocabulary, 0, draw=backend_for(day.device).draw)
    requests = [Request(f"{number}", (1,), params) for number in range(rows)]
    batch = Batch(tuple(Slice(request, 0, request.total) for request in requests))
    tensors = SamplingInputs(*(moved(torch.from_numpy(c), day.device) for c in sampler.pack(batch)[0]))
    return {"us": day.seconds(partial(sampler.sample, make(rows, vocabulary, day.device), tensors)) * 1e6}
