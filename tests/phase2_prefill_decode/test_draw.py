"""The kernel `sample`: which tokens may be drawn, against transformers; how often, against exact probabilities; and
every backend against the reference, draw for draw."""

import math
from itertools import product
from typing import Any

import numba
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
from phase2_prefill_decode.backend import triton_backend
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.kernels.draw import SamplingInputs, arrivals, keep, numbers, reference, weigh
from phase2_prefill_decode.sampling.sampler import pack_columns
from tests.phase1_kv_pool.support import bits, device_of, every_backend, every_backend_and_dtype, needs_gpu
from tests.phase2_prefill_decode.backends import backend_of
from tests.phase2_prefill_decode.test_sampler_draws import z_of_chi_square

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


def tensors(*asked: SamplingParams, device: str | torch.device = "cpu") -> SamplingInputs:
    """The parameters of one row for each, with keys and positions of their own."""
    requests = [Request("r", (1,) * (1 + row), one) for row, one in enumerate(asked)]
    totals = [request.total for request in requests]
    columns = pack_columns(requests, totals, lambda request: hash(request.total))
    return SamplingInputs(*(torch.from_numpy(column).to(device) for column in columns))


def repeated(params: SamplingParams, rows: int) -> SamplingInputs:
    """So many rows that differ in their keys."""
    one = tensors(params)
    columns = one.top_k, one.temperatures, one.top_p, one.min_p
    return SamplingInputs(torch.arange(rows), torch.ones(rows, dtype=torch.int64), *(of.repeat(rows) for of in columns))


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize("asked", ASKED)
def test_100_000_draws_have_the_exact_distribution(asked: str, device: str) -> None:
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(1)) * 1.5
    params = SamplingParams(**ASKED[asked])
    given = [getattr(repeated(params, N), name).to(device) for name in SamplingInputs._fields]
    tokens, _ = backend_for(torch.device(device)).draw(logits.to(device).expand(N, -1), SamplingInputs(*given), 32)
    assert misfit(tokens.cpu().numpy(), exact(logits[0].numpy(), params)) < 4


# Filters, of the reference.


def stays(logits: Tensor, *asked: SamplingParams) -> Tensor:
    """Which tokens of each row may be drawn: with parameters for each row, or the same for all."""
    params = tensors(*(asked if len(asked) > 1 else asked * len(logits)))
    return keep(logits, weigh(logits, logits.amax(-1), params.temperatures), params) > 0


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    k=st.sampled_from([0, 2, 3, 10, 49, 50, 51, 1000]),
    p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_filters_keep_the_tokens_that_transformers_keeps(
    seed: int, temperature: float, min_p: float, k: int, p: float
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
    found = stays(logits, SamplingParams(temperature=temperature, min_p=min_p, top_k=k, top_p=p))
    for row, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        counts, others = (int(mine.sum()), int(theirs.sum())), (mine != theirs).nonzero().flatten().tolist()
        asked = f"temperature {temperature}, min_p {min_p}, top_k {k}, top_p {p}"
        assert not others, f"row {row}, {asked}: kept {counts[0]} tokens, expected {counts[1]}; they differ in {others}"


def test_each_row_has_its_own_filters() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 2
    values: dict[str, list[float]] = {"top_k": [0, 2, 3, 9], "top_p": [1.0, 0.6, 0.9], "min_p": [0.0, 0.05, 0.2]}
    asked = [SamplingParams(**dict(zip(values, one, strict=True))) for one in product(*values.values())]
    together = stays(logits.expand(len(asked), -1), *asked)
    alone = torch.cat([stays(logits, one) for one in asked])
    wrong = [str(one) for one, same in zip(asked, (together == alone).all(-1), strict=True) if not same]
    assert not wrong, f"in a batch of {len(asked)} rows, other tokens stay than alone, for {wrong[0]}"
    assert together.sum(-1).unique().numel() > 5


TIES, SHARES, HALVES = [2.0, 3.0, 2.0, 0.0, 2.0], [0.4, 0.3, 0.2, 0.1], [0.25, 0.5, 0.25]
HUGE, SMALL = [3e38, -3e38, 0.0, 3.1e38, -math.inf], [1.0, 2.0, 2.0, 0.0, -1e-30]


def logs(shares: list[float]) -> list[float]:
    return [math.log(share) for share in shares]


@pytest.mark.parametrize(
    ("logits", "asked", "kept"),
    [
        (TIES, {"top_k": 2}, "x x x - x"),  # a tie at the cutoff is kept whole
        (TIES, {"top_p": 0.5}, "x x x - x"),
        (TIES, {"top_p": 0.4}, "- x - - -"),
        (TIES, {"min_p": 1.0}, "- x - - -"),
        (logs(SHARES), {"top_p": 0.6}, "x x - -"),  # a share of the probability left by earlier filters
        (logs(SHARES), {"top_p": 0.6, "top_k": 3}, "x x - -"),  # 0.4 + 0.3 of 0.9
        (logs(SHARES), {"top_p": 0.55, "top_k": 2}, "x - - -"),  # 0.4 of 0.7
        (logs(SHARES), {"top_p": 0.55, "min_p": 0.7}, "x - - -"),
        (logs(HALVES), {"top_p": 0.5}, "- x -"),  # reached by the token that makes the sum exact
        (logs(HALVES), {"top_p": 0.75}, "x x x"),
        ([0.0, 0.001, 0.0], {"top_p": 1e-300}, "- x -"),  # one token at least
        *((HUGE, {"temperature": cold}, "- - - x -") for cold in (1e-6, 1e-40, 5e-324)),  # no overflow
        *((SMALL, {"temperature": cold}, "- x x - -") for cold in (1e-6, 1e-40, 5e-324)),
    ],
)
def test_edges_of_filters(logits: list[float], asked: dict[str, Any], kept: str) -> None:
    (found,) = stays(torch.tensor([logits]), SamplingParams(**asked)).tolist()
    marks = " ".join("x" if stay else "-" for stay in found)
    assert marks == kept, f"of logits {[round(each, 2) for each in logits]} with {asked}, x are the tokens that stay"


@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_weights_are_exponentials_in_float32(temperature: float) -> None:
    logits = torch.linspace(-90, 0, 5001)[None] * temperature
    found = weigh(logits, torch.zeros(1), torch.tensor([temperature])).double()
    wanted = (logits.double() / float(torch.tensor(temperature))).exp()
    assert torch.allclose(found[wanted > 1e-30], wanted[wanted > 1e-30], rtol=1e-5, atol=0)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6)
    assert found[0, -1] == 1


# Backends against the reference.

VOCAB = 700  # several blocks, the last one not full


def rows_of_logits() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    some = torch.randn(VOCAB, generator=generator) * 3
    ties, zeros, few, one, none, nan, minus_nan, inf = (some.clone() for _ in range(8))
    zeros = torch.where(some > 1, -0.0, some.clamp(max=0.0))  # 0 and -0 are equal, and the largest
    few[:-60] = -torch.inf
    one[:] = -torch.inf
    one[VOCAB - 1] = -5.0
    none[:] = -torch.inf
    nan[650] = torch.nan
    minus_nan[3] = -torch.tensor(torch.nan)
    inf[690] = torch.inf
    rows = {"some": some, "ties": ties.round(), "flat": some * 0 - 2, "zeros": zeros, "sharp": some * 20, "few": few}
    return rows | {"one": one, "none": none, "NaN": nan, "-NaN": minus_nan, "inf": inf, "close": 8 + some / 1000}


EDGES = [
    {"temperature": 0.0},
    {},
    {"temperature": 1e-30},
    {"temperature": 100.0, "top_p": 0.5},
    {"top_k": 2},
    {"top_k": VOCAB},
    {"top_k": 60, "top_p": 0.7},
    {"top_k": VOCAB - 1, "min_p": 0.001},
    {"top_p": 1e-9},
    {"top_p": 1 - 2.0**-24},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_k": 5, "top_p": 0.9},
]


def assert_as_reference(backend: str, logits: Tensor, asked: list[dict[str, Any]], num_tokens: int) -> Tensor:
    device, rows = device_of(backend), [SamplingParams(**one) for one in asked]
    wanted, peaks = reference(logits, tensors(*rows), num_tokens)
    tokens, found = backend_of(backend).draw(logits.to(device), tensors(*rows, device=device), num_tokens)
    for row, (one, token, right) in enumerate(zip(asked, tokens.tolist(), wanted.tolist(), strict=True)):
        assert token == right, f"row {row} of {len(asked)}, with {one}: {backend} draws {token}, the reference {right}"
    torch.testing.assert_close(found.cpu(), peaks, rtol=0, atol=0, equal_nan=True)
    return wanted


@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype()[3:])
def test_every_backend_draws_the_same_tokens(backend: str, dtype: torch.dtype) -> None:
    """All edges of logits with all edges of parameters, in one batch. Interpreted, every seventh pair."""
    logits = rows_of_logits()
    step = 7 if backend == "triton" and not torch.cuda.is_available() else 1
    pairs = [
        (row, one)
        for i, row in enumerate(logits.values())
        for j, one in enumerate(EDGES)
        if (i + j + (dtype == torch.float16)) % step == 0
    ]
    batch = torch.stack([row for row, _ in pairs]).to(dtype)
    tokens = assert_as_reference(backend, batch, [one for _, one in pairs], VOCAB)
    assert tokens.unique().numel() > 5


@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype()[3:])
@pytest.mark.parametrize("vocab", [1, 129, 4501])
def test_any_vocabulary_with_padding_and_rows_apart(backend: str, dtype: torch.dtype, vocab: int) -> None:
    wide = (torch.randn(5, vocab + 39, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
    wide[:, vocab:] = 100
    wide[0, vocab:] = torch.nan
    asked: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"temperature": 0}, {"min_p": 0.01}]
    assert_as_reference(backend, wide[:, : vocab + 7], asked, vocab)


def test_a_cpu_draws_the_same_from_a_real_vocabulary() -> None:
    logits = torch.randn(12, 151_936, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)[:, None] / 3
    assert_as_reference("cpu", logits.bfloat16(), [EDGES[i] for i in range(12)], 151_669)


def scores_of(backend: str, logits: Tensor, temperature: float, key: int, position: int) -> tuple[Tensor, Tensor]:
    """Weights and times of arrival as a backend computes them. logits [tokens], of which 0 is the largest."""
    heat, seeds = torch.tensor([temperature]), (torch.tensor([key]), torch.tensor([position]))
    if backend == "reference":
        weights = weigh(logits[None], torch.zeros(1), heat)[0]
        return weights, arrivals(numbers(*seeds, len(logits)))[0]
    backend_of(backend)
    if backend == "cpu":
        from phase2_prefill_decode.extras.cpu import draw as cpu

        scale = cpu.LOG2_E / heat.numpy()[0]
        weigh_one, arrival, start_of, random_bits = cpu.weigh, cpu.arrival, cpu.start_of, cpu.random_bits

        @numba.njit
        def scores_on_cpu(logits: Any, scale: Any, key: int, position: int) -> Any:
            start, weights, times = start_of(key, position), np.empty_like(logits), np.empty_like(logits)
            for token in range(len(logits)):
                weights[token] = weigh_one(logits[token], np.float32(0), scale)
                times[token] = arrival(random_bits(start, token))
            return weights, times

        weights, times = scores_on_cpu(logits.numpy(), scale, key, position)
        return torch.from_numpy(weights), torch.from_numpy(times)
    from tests.phase2_prefill_decode.sample_scores import scores

    return scores(logits, heat, *seeds)


@pytest.mark.parametrize("backend", every_backend()[1:])
@pytest.mark.parametrize("temperature", [0.7, 1e-30, 37.3])
def test_every_backend_computes_the_same_scores_to_the_last_bit(backend: str, temperature: float) -> None:
    """A draw would show a difference of one bit once in millions of times."""
    logits = -torch.cat((torch.rand(900, generator=torch.Generator().manual_seed(1)) * 80, torch.logspace(-38, 38, 99)))
    logits = torch.cat((logits, torch.tensor([0.0, -0.0, -torch.inf])))
    wanted = scores_of("reference", logits, temperature, -7, 12)
    found = scores_of(backend, logits, temperature, -7, 12)
    assert torch.equal(bits(found[0]), bits(wanted[0]))
    assert torch.equal(bits(found[1]), bits(wanted[1]))


@pytest.mark.parametrize("backend", every_backend()[2:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_threshold_of_a_filter_is_found_exactly(backend: str, dtype: torch.dtype) -> None:
    """Of logits that are neighbours, of either sign: the k-th largest, and the one at which the weights suffice."""
    backend_of(backend)
    from tests.phase2_prefill_decode.sample_scores import threshold

    step = torch.finfo(dtype).eps  # between neighbours from 1 to 2
    logits = torch.tensor([sign * (1.5 + n * step) for sign in (1, -1) for n in (-1, 0, 1)] * 2, dtype=dtype)
    logits = torch.cat((logits, torch.tensor([0.0, -0.0, 3.0, -7.0], dtype=dtype))).float()
    ranked = logits.sort(descending=True).values
    weights = (weigh(logits[None], ranked[:1], torch.ones(1))[0].double() * 2**32).floor()
    for k in (1, 3, 9, 13):
        number = ranked[k - 1]
        stay = logits >= number
        for enough, counting in ((k, True), (int(weights[stay].sum()), False)):
            found = threshold(logits.to(dtype), enough, counting)
            reached = torch.tensor(found ^ ((found >> 31) & 0x7FFFFFFF), dtype=torch.int32).view(torch.float32)
            wanted = f"{enough} of the {'logits' if counting else 'weight'} must reach the threshold, {float(number)}"
            assert torch.equal(logits >= reached, stay), f"{wanted}; found {float(reached)}"
            assert dtype == torch.float32 or found % (1 << 13) == 0, "the lower 13 bits of an order are zeros"
            assert dtype == torch.float16 or reached == number, f"{wanted}; found {float(reached)}"


SIZES = [
    {"ROW_CANDIDATES": 8, "SEARCH": 256},  # most filters need the whole row
    {"BLOCK": 32, "TILE": 128, "SEARCH": 64, "ROW_CANDIDATES": 128},  # many tiles, and the candidates of a few of them
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("backend", "dtype"), every_backend_and_dtype()[6:7])
def test_no_split_of_the_vocabulary_changes_a_draw(
    backend: str, dtype: torch.dtype, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_of(backend)
    from phase2_prefill_decode.kernels.triton import draw as sample

    for name, value in sizes.items():
        monkeypatch.setattr(sample, name, value)
    rows = rows_of_logits()
    batch = torch.stack([rows["ties"], rows["some"], rows["some"], rows["close"], rows["some"]]).to(dtype)
    assert_as_reference(backend, batch, [EDGES[i] for i in (0, 1, 6, 3, 11)], 400)


@pytest.mark.gpu
@needs_gpu
def test_a_captured_launch_follows_logits_and_parameters() -> None:
    rows = rows_of_logits()
    edges = [SamplingParams(**one) for one in EDGES]
    first, later = torch.stack([rows["some"]] * 12).cuda(), torch.stack([*rows.values()])
    params, sample = tensors(*edges[:1] * 12, device="cuda"), triton_backend().draw
    sample(first, params, VOCAB)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = sample(first, params, VOCAB)
    first.copy_(later)
    for name in SamplingInputs._fields:
        getattr(params, name).copy_(getattr(tensors(*edges), name))
    graph.replay()
    assert tokens.tolist() == reference(later, tensors(*edges), VOCAB)[0].tolist()
