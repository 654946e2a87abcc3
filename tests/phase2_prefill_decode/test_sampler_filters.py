"""Filters: which tokens may be drawn, against transformers, and how often they are, against exact probabilities."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from phase0_request import Request, SamplingParams
from phase2_prefill_decode import filters
from phase2_prefill_decode.filters import draw
from phase2_prefill_decode.sampler import Sampler, weights_of
from phase2_prefill_decode.sampling import uniform
from tests.phase1_kv_pool.support import needs_gpu
from tests.phase2_prefill_decode.test_sampler_draws import z_of_chi_square

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
N = 100_000
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "heat": {"temperature": 3.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 12, "top_p": 0.7},
    "min_p and top_p": {"min_p": 0.05, "top_p": 0.9},
    "min_p and top_k": {"min_p": 0.02, "top_k": 4},
    "all": {"temperature": 1.5, "min_p": 0.03, "top_k": 15, "top_p": 0.85},
}


def exact(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution in float64, one filter after the other by their definitions."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p[p < params.min_p * p.max()] = 0
    if params.top_k:
        p[np.argsort(-p)[params.top_k :]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    if params.top_p < 1:
        p[order[before >= params.top_p]] = 0
    return p / p.sum()


def in_small_parts(patch: pytest.MonkeyPatch) -> None:
    """Use the code paths of a large vocabulary on a small one."""
    patch.setattr(filters, "LARGE", 8)
    patch.setattr(filters, "BLOCK", 7)
    patch.setattr(filters, "HEAD", 2)


@pytest.fixture(scope="module")
def luck() -> Tensor:
    """The uniform numbers of 100,000 seeds at one position."""
    return torch.tensor([uniform(seed, 1) for seed in range(N)], dtype=torch.float64)


def weights(logits: Tensor, *params: SamplingParams) -> Tensor:
    """The weight of each token in a draw, row by row: with params for each row, or the same for all."""
    rows = params if len(params) > 1 else params * len(logits)
    draws = Sampler((), logits.shape[1], logits.device).pack([Request("r", (1,), one) for one in rows]).draws
    assert draws is not None
    return weights_of(logits, logits.amax(-1), draws)


def tokens_of(sampler: Sampler, logits: Tensor, requests: list[Request]) -> np.ndarray:
    sampled = sampler.sample(logits.expand(len(requests), -1), sampler.pack(requests))
    output = sampled.fetch().output(range(len(requests)), len(requests))
    assert output.failed == {}
    return np.array(output.tokens, dtype=int)


def misfit(tokens: np.ndarray, p: np.ndarray) -> float:
    """How many standard deviations a chi-square is off; infinite if a token was drawn that has no probability."""
    counts = np.bincount(tokens, minlength=len(p))
    if counts[p == 0].any():
        return math.inf
    likely = p * len(tokens) >= 5  # the others are counted together, as a chi-square test requires
    expected, found = p[likely] * len(tokens), counts[likely]
    if p[~likely].sum() > 0:
        expected, found = np.append(expected, p[~likely].sum() * len(tokens)), np.append(found, counts[~likely].sum())
    return abs(z_of_chi_square(found, expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asked", ASKED)
def test_100_000_draws_have_the_exact_distribution(asked: str, device: str, luck: Tensor) -> None:
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(1)) * 1.5
    params = SamplingParams(**ASKED[asked])
    tokens = draw(weights(logits.to(device), params).expand(N, -1), luck.to(device))
    assert misfit(tokens.cpu().numpy(), exact(logits[0].numpy(), params)) < 4


@pytest.mark.proof
def test_consecutive_seeds_draw_the_exact_distribution() -> None:
    logits = torch.randn(32, generator=torch.Generator().manual_seed(2)) * 1.5
    params = SamplingParams(temperature=0.8, top_p=0.9)
    requests = [Request("same", (1,), replace(params, seed=seed)) for seed in range(5000)]
    assert misfit(tokens_of(Sampler((), 32), logits, requests), exact(logits.numpy(), params)) < 4


def test_positions_of_one_seed_draw_the_exact_distribution() -> None:
    logits = torch.randn(32, generator=torch.Generator().manual_seed(3)) * 1.5
    params = SamplingParams(seed=5, top_k=20)
    requests = [Request("same", (1,) * length, params) for length in range(1, 4000)]
    assert misfit(tokens_of(Sampler((), 32), logits, requests), exact(logits.numpy(), params)) < 4


def stays(logits: Tensor, params: SamplingParams) -> Tensor:
    """Which tokens of each row may be drawn."""
    return weights(logits, params) > 0


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    k=st.sampled_from([0, 2, 3, 10, 49, 50, 51, 1000]),
    p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    small=st.booleans(),
)
def test_filters_keep_the_tokens_that_transformers_keeps(
    seed: int, temperature: float, min_p: float, k: int, p: float, small: bool
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed)) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if k:
        warpers.append(TopKLogitsWarper(k))
    if p < 1:
        warpers.append(TopPLogitsWarper(p))
    wanted = warpers(torch.zeros(3, 1, dtype=torch.int64), logits.clone()) > -torch.inf
    with pytest.MonkeyPatch.context() as patch:
        if small:
            in_small_parts(patch)
        found = stays(logits, SamplingParams(temperature=temperature, min_p=min_p, top_k=k, top_p=p))
    assert torch.equal(found, wanted)


def test_each_row_has_its_own_filters() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 2
    values: dict[str, list[float]] = {"top_k": [0, 2, 3, 9], "top_p": [1.0, 0.6, 0.9], "min_p": [0.0, 0.05, 0.2]}
    asked = [SamplingParams(**dict(zip(values, one, strict=True))) for one in product(*values.values())]
    together = weights(logits.expand(len(asked), -1), *asked)
    alone = torch.cat([weights(logits, one) for one in asked])
    assert torch.equal(together, alone)
    assert (together > 0).sum(-1).unique().numel() > 5


def test_a_tie_at_the_cutoff_is_kept_whole() -> None:
    logits = torch.tensor([[2.0, 3.0, 2.0, 0.0, 2.0]])
    assert stays(logits, SamplingParams(top_k=2)).tolist() == [[True, True, True, False, True]]
    assert stays(logits, SamplingParams(top_p=0.5)).tolist() == [[True, True, True, False, True]]
    assert stays(logits, SamplingParams(top_p=0.4)).tolist() == [[False, True, False, False, False]]
    assert stays(logits, SamplingParams(min_p=1.0)).tolist() == [[False, True, False, False, False]]


def test_top_p_is_a_share_of_the_probability_left_by_earlier_filters() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert stays(logits, SamplingParams(top_p=0.6)).sum() == 2
    assert stays(logits, SamplingParams(top_p=0.6, top_k=3)).sum() == 2  # 0.4 + 0.3 of 0.9
    assert stays(logits, SamplingParams(top_p=0.55, top_k=2)).sum() == 1  # 0.4 of 0.7
    assert stays(logits, SamplingParams(top_p=0.55, min_p=0.7)).sum() == 1


def test_top_p_is_reached_by_a_token_that_makes_the_sum_exact() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    assert stays(logits, SamplingParams(top_p=0.5)).tolist() == [[True, False, False], [False, True, False]]
    assert stays(logits, SamplingParams(top_p=0.75)).all()  # a tie is not split


def test_top_p_keeps_one_token_at_least() -> None:
    logits = torch.zeros(1, 40)
    logits[0, 17] = 0.001
    assert stays(logits, SamplingParams(top_p=1e-300)).nonzero().tolist() == [[0, 17]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_the_coldest_temperatures_do_not_overflow(temperature: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 3.1e38, -torch.inf], [1.0, 2.0, 2.0, 0.0, -1e-30]])
    found = stays(logits, SamplingParams(temperature=temperature))
    assert found.tolist() == [[False, False, False, True, False], [False, True, True, False, False]]


def test_the_blockwise_search_of_a_large_vocabulary_matches_one_running_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two-level search over blocks finds exactly the token of one running sum, for any shape of weights."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 20_011, generator=generator) * torch.arange(60)[:, None] / 10
    heavy = filters.weigh(logits, logits.amax(-1), torch.ones(60), logits.shape[1])
    heavy[::3] *= torch.rand(20, 20_011, generator=generator) < 0.01
    uniforms = torch.rand(60, dtype=torch.float64, generator=generator)
    uniforms[:3], uniforms[3:6] = 0.0, 1 - 2.0**-53  # the extremes of `uniform`
    strides = draw(heavy, uniforms)
    monkeypatch.setattr(filters, "LARGE", 1 << 20)
    assert torch.equal(strides, draw(heavy, uniforms))
    assert bool((heavy[torch.arange(60), strides] > 0).all())
    assert strides.unique().numel() > 30


@pytest.mark.parametrize("vocab", [1, 2, 50, 4096, 151_936])
def test_sums_of_weights_are_exact(vocab: int) -> None:
    """Weights are whole numbers, and even those of a flat distribution, the largest sum, stay below 2^53."""
    flat = torch.zeros(1, vocab)
    heavy = filters.weigh(flat, flat.amax(-1), torch.ones(1), flat.shape[1]).double()
    assert float(heavy.max()) * vocab < 2**53
    assert float(heavy.max()) * vocab >= 2**51  # and no resolution is lost
    spread = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)) * 5
    heavy = filters.weigh(spread, spread.amax(-1), torch.ones(1), spread.shape[1]).double()
    assert torch.equal(heavy, heavy.round())
    p = spread.double().softmax(-1)
    assert torch.allclose(heavy / heavy.sum(), p, rtol=0, atol=3e-7 * float(p.max()))
