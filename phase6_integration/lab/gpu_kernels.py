"""The stage of `gpu_day` that measures kernels: attention over pages and sampling, beside the device's ceilings."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.lab.timing import clock_seconds
from phase2_prefill_decode.kernels.attention import AttentionMetadata
from phase2_prefill_decode.sampler import Sampler
from phase2_prefill_decode.sampling import moved, sampling_tensors
from phase3_chunked_prefill.kernels.attention import ATTEND
from phase6_integration.lab.gpu_rows import SAMPLED, Day, limits


def kernels(day: Day) -> None:
    """Ceilings of this device, then attention and sampling beside them."""
    with day.row(what="ceilings") as row:
        row |= limits(day)
    copy, product = row["copy_gb_per_second"], row["gflops_bfloat16"]
    for group in day.some((4, 8), (2,)):
        for page_size in (16, 64):
            for batch, length in day.some(((1, 32_768), (4, 16_384), (16, 4096), (64, 2048), (256, 2048)), ((2, 70),)):
                with day.row(what="decode", group=group, page_size=page_size, batch=batch, length=length) as row:
                    call, read, _ = attention(day, [(1, length)] * batch, page_size, group)
                    row["us"] = (seconds := day.seconds(call)) * 1e6
                    row |= {"gb_per_second": read / seconds / 1e9, "of_copy": read / seconds / 1e9 / copy}
            for new, length in day.some(((1024, 1024), (2048, 2048), (8192, 8192), (2048, 16_384)), ((40, 70),)):
                with day.row(what="prefill", group=group, page_size=page_size, new=new, length=length) as row:
                    call, _, operations = attention(day, [(new, length)], page_size, group)
                    row["us"] = (seconds := day.seconds(call, 3)) * 1e6
                    row["tflops"] = operations / seconds / 1e12
                    row["of_product"] = row["tflops"] * 1e3 / product
                    if new == length:
                        row["of_sdpa"] = day.seconds(sdpa(day, new, group), 3) / seconds
    for rows in day.some((1, 64, 256), (4,)):
        for name, asked in SAMPLED.items():
            with day.row(what="sample", rows=rows, how=name) as row, torch.inference_mode():
                vocabulary = day.some([151_936], [500])[0]
                sampler = Sampler((), vocabulary, day.device, 0)
                requests = [Request(f"{n}", (1,), SamplingParams(**asked)) for n in range(rows)]
                logits = torch.randn(rows, vocabulary, device=day.device).to(torch.bfloat16) * 3
                row["us"] = clock_seconds([partial(sampling(sampler, requests), logits)] * day.some([20], [1])[0]) * 1e6


def sampling(sampler: Sampler, requests: Sequence[Request]) -> Callable[[Tensor], object]:
    """A call of the kernel, with the parameters of the requests on the device already."""
    params = sampling_tensors(moved(torch.from_numpy(sampler.pack(requests).params), sampler.device))
    return lambda logits: sampler.draw(logits, params)


def attention(
    day: Day, sizes: Sequence[tuple[int, int]], page_size: int, group: int
) -> tuple[Callable[[], Tensor], int, int]:
    """A call of one layer's attention over pages in random order; the bytes of keys and values that it reads, and its
    operations. `sizes` are (new, all) tokens of each sequence."""
    kv_heads, head_dim, dtype = (2, 16, torch.float32) if day.dry else (8, 128, torch.bfloat16)
    counts = [-(-length // page_size) for _, length in sizes]
    order = torch.randperm(sum(counts), dtype=torch.int32).split_with_sizes(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(day.device)
    starts = torch.tensor([0, *(new for new, _ in sizes)]).cumsum(0).int().to(day.device)
    lengths = torch.tensor([length for _, length in sizes], dtype=torch.int32, device=day.device)
    longest = [max(one) for one in zip(*sizes, strict=True)]
    metadata = AttentionMetadata(starts, lengths, table, longest[0], longest[1], tuple(sizes))
    shape = sum(counts), kv_heads, page_size, head_dim
    keys, values = (torch.randn(shape, device=day.device, dtype=dtype) for _ in "kv")
    tokens = sum(new for new, _ in sizes)
    query = torch.randn(tokens, kv_heads * group, head_dim, device=day.device, dtype=dtype)
    attend = ATTEND.on(day.device)
    read = sum(length for _, length in sizes) * kv_heads * head_dim * 2 * query.element_size()
    pairs = sum(new * (2 * length - new + 1) // 2 for new, length in sizes)
    return (
        lambda: attend(query, keys, values, metadata, head_dim**-0.5, None),
        read,
        4 * pairs * kv_heads * group * head_dim,
    )


def sdpa(day: Day, tokens: int, group: int) -> Callable[[], Tensor]:
    """torch's attention over the same heads, without pages."""
    kv_heads, head_dim, dtype = (2, 16, torch.float32) if day.dry else (8, 128, torch.bfloat16)
    q, k, v = (
        torch.randn(1, heads, tokens, head_dim, device=day.device, dtype=dtype)
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    call = torch.nn.functional.scaled_dot_product_attention
    return lambda: call(q, k, v, is_causal=True, enable_gqa=True)
