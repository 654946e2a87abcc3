# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A Triton kernel that stores what `sample` computes for each token: for the test of backends bit by bit."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from phase1_kv_pool.kernels import device_of
from phase2_prefill_decode.kernels.triton.sample import LOG2_E, OPTIONS, arrival, start_of, weigh


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
    with np.errstate(over="ignore"):  # the interpreter's
        scores_kernel[(1,)](logits, *row, weights, times, len(logits), tile=tile, **OPTIONS)
    return weights.cpu(), times.cpu()
