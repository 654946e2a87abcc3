# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Triton kernels that store what `sample` computes inside: the score of each token, and the threshold of a filter."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from phase2_prefill_decode.kernels.triton.draw import (
    LOG2_E,
    LOWEST,
    OPTIONS,
    SHIFTS,
    arrival,
    order,
    search,
    start_of,
    weigh,
)
from tests.phase1_kv_pool.support import device_of


@triton.jit
def scores_kernel(logits, temperatures, keys, positions, weights, times, count, tile: tl.constexpr):
    token = tl.arange(0, tile)
    x = tl.load(logits + token, mask=token < count, other=0.0)
    scale = tl.div_rn(LOG2_E, tl.load(temperatures))
    tl.store(weights + token, weigh(x, 0.0, scale), mask=token < count)
    tl.store(times + token, arrival(start_of(keys, positions, 0), token), mask=token < count)


def scores(logits: Tensor, *row: Tensor) -> tuple[Tensor, Tensor]:
    device = device_of("triton")
    logits = logits.to(device)
    weights, times = torch.empty_like(logits), torch.empty_like(logits)
    row = tuple(of.to(device) for of in row)
    tile = triton.next_power_of_2(len(logits))
    with torch.cuda.device(logits.get_device()), np.errstate(over="ignore"):  # the interpreter's
        scores_kernel[(1,)](logits, *row, weights, times, len(logits), tile=tile, **OPTIONS)
    return weights.cpu(), times.cpu()


@triton.jit
def threshold_kernel(logits, found, count, enough, peak, lowest, counting: tl.constexpr, shift: tl.constexpr):
    top = order(tl.full((), peak, tl.float32))
    low = tl.full((), lowest, tl.int32)
    if counting:
        threshold = search((logits, None, count), None, low, top, enough, shift, 64)
    else:
        threshold = search((logits, None, count), (peak, LOG2_E, 0.0), low, top, enough, shift, 64)
    tl.store(found, threshold)


def threshold(logits: Tensor, enough: int, counting: bool) -> int:
    """The order that `search` finds for the logits of one row: so many reach it, or weigh so much."""
    device = device_of("triton")
    found = torch.zeros(1, dtype=torch.int32, device=device)
    logits = logits.to(device)
    with torch.cuda.device(logits.get_device()), np.errstate(over="ignore", invalid="ignore"):
        threshold_kernel[(1,)](
            logits, found, len(logits), enough, float(logits.max()), int(getattr(LOWEST, "value", LOWEST)),
            counting=counting, shift=SHIFTS[logits.dtype], **OPTIONS,
        )  # fmt: skip
    return int(found)
