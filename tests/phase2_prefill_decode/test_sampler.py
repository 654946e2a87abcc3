"""The Sampler: edits of logits, greedy rows, failures, log-probabilities, seeds, and independence of the batch."""

import gc
import math
import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from phase0_request import Request, SamplingParams, StepOutput, reason_to_finish
from phase2_prefill_decode.sampler import Sampler, edit
from phase2_prefill_decode.sampling import sampling_tensors
from tests.phase1_kv_pool.support import needs_gpu

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 30


def request_of(id: str = "r", prompt: Sequence[int] = (1,), output: Sequence[int] = (), **params: Any) -> Request:
    request = Request(id, tuple(prompt), SamplingParams(**params))
    request.output_tokens += output
    return request


def run(sampler: Sampler, logits: Tensor, requests: Sequence[Request]) -> StepOutput:
    sampled = sampler.sample(logits.to(sampler.device), sampler.pack(requests))
    return sampled.fetch().output(range(len(requests)), len(requests))


def edited(logits: Tensor, requests: Sequence[Request], eos_ids: Sequence[int] = ()) -> Tensor:
    edits = Sampler(eos_ids, logits.shape[1]).pack(requests).edits
    return logits if edits is None else edit(logits, edits)


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=40),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.integers(-100, 100), max_size=4),
    least=st.integers(0, 50),
    penalties=st.tuples(*[st.sampled_from([0.0, 0.5, -1.5])] * 2, st.sampled_from([1.0, 1.3])),
)
def test_edits_match_a_loop_over_the_tokens(
    prompt: list[int], output: list[int], bias: dict[int, int], least: int, penalties: tuple[float, float, float]
) -> None:
    presence, frequency, repetition = penalties
    request = request_of(
        "r", prompt, output, max_tokens=50, min_tokens=least, logit_bias=bias, presence_penalty=presence,
        frequency_penalty=frequency, repetition_penalty=repetition, stop_token_ids=[3],
    )  # fmt: skip
    wanted = []
    for token, logit in enumerate(some_logits(1)[0].tolist()):
        x = -math.inf if token in (3, 7) and len(output) < least else logit + bias.get(token, 0)
        if token in prompt + output:
            x = x / repetition if x > 0 else x * repetition
        wanted.append(x - presence * (token in output) - frequency * output.count(token))
    assert edited(some_logits(1), [request], [7])[0].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


# Greedy.


@pytest.mark.proof
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_likeliest_token_and_the_first_of_a_tie(dtype: torch.dtype, device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [-1.0, -3.0, -torch.inf, -1.0], [0.0, 0.0, 0.0, 5.0]], dtype=dtype)
    sampler = Sampler((), 4, device)
    assert run(sampler, logits, [request_of(temperature=0) for _ in range(3)]).tokens == [1, 0, 3]
    assert run(sampler, logits, [request_of(top_k=1, seed=i) for i in range(3)]).tokens == [1, 0, 3]


def test_parameters_are_packed_by_row() -> None:
    """In the tensors that the kernel takes. `top_k=1` is greedy."""
    requests = [
        request_of(temperature=0, seed=1),
        request_of(prompt=(1,) * 7, temperature=0.5, seed=-(1 << 63)),
        request_of(top_k=5, top_p=0.25, seed=(1 << 63) - 1),
        request_of(min_p=0.5, top_k=1, seed=0),
    ]
    sampling = Sampler((), VOCAB).pack(requests)
    assert (sampling.rows, sampling.edits, sampling.padding, sampling.logprobs) == (4, None, None, ())
    params = sampling_tensors(torch.from_numpy(sampling.params))
    assert params.temperatures.tolist() == [0, 0.5, 1, 0]
    assert params.top_k.tolist() == [0, 0, 5, 1]
    assert params.top_p.tolist() == [1, 1, 0.25, 1]
    assert params.min_p.tolist() == [0, 0, 0, 0.5]
    assert params.keys.tolist() == [1, -(1 << 63), (1 << 63) - 1, 0]
    assert params.positions.tolist() == [1, 7, 1, 1]
    assert [of.dtype for of in (params.temperatures, params.top_k, params.keys)] == [
        torch.float32,
        torch.int32,
        torch.int64,
    ]


# Edits.


@given(seed=st.integers(0, 1000), penalty=st.sampled_from([0.3, 0.9, 1.1, 2.0, 10.0]), output=st.integers(0, 9))
def test_the_repetition_penalty_is_that_of_transformers(seed: int, penalty: float, output: int) -> None:
    logits = some_logits(1, seed)
    tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    prompt, said = tokens[: 12 - output], tokens[12 - output :]
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    found = edited(logits, [request_of(prompt=prompt, output=said, repetition_penalty=penalty)])
    assert torch.equal(found, wanted)


@given(
    output=st.lists(st.integers(0, 9), max_size=20),
    least=st.integers(0, 20),
    penalties=st.tuples(*[st.sampled_from([0.0, 0.7])] * 2, st.sampled_from([1.0, 1.3])),
)
def test_edits_that_are_kept_up_to_date_are_those_of_a_new_sampler(
    output: list[int], least: int, penalties: tuple[float, float, float]
) -> None:
    presence, frequency, repetition = penalties
    request = request_of(
        prompt=(2, 2, 11), max_tokens=30, min_tokens=least, stop_token_ids=[3, 4], logit_bias={3: 5.0, 7: -1.0},
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition,
    )  # fmt: skip
    logits, sampler = some_logits(1), Sampler((9,), VOCAB)
    for token in output:
        edits = sampler.pack([request]).edits
        assert edits is not None
        assert torch.equal(edit(logits, edits), edited(logits, [request], eos_ids=(9,)))
        request.output_tokens.append(token)


def test_packing_a_step_costs_no_more_after_a_long_context() -> None:
    """All tokens of prompt and output were counted again at every step: the memory that takes shows it. The number of
    different tokens is the same here."""

    def peak(length: int) -> int:
        tokens = [token % VOCAB for token in range(length)]
        request = request_of(prompt=tokens, output=tokens, repetition_penalty=1.1, frequency_penalty=0.5)
        sampler = Sampler((), VOCAB)
        sampler.pack([request])
        request.output_tokens.append(1)
        tracemalloc.start()
        sampler.pack([request])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(1000)  # what is imported or cached by the first one
    assert peak(30_000) < 1.5 * peak(1000)


def test_a_request_that_has_ended_leaves_nothing_in_the_sampler() -> None:
    sampler, request = Sampler((), VOCAB), request_of(repetition_penalty=1.1)
    sampler.pack([request])
    assert len(sampler._edits) == 1
    del request
    gc.collect()
    assert len(sampler._edits) == 0


def test_presence_and_frequency_penalties_are_those_of_openai() -> None:
    """mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, where c counts the output and not the prompt."""
    logits = some_logits(2)
    rows = [
        request_of(prompt=(3, 3, 9), output=(7, 7, 7, 2), presence_penalty=0.5, frequency_penalty=0.25),
        request_of(prompt=(7,), output=(5, 0), presence_penalty=-2.0),
    ]
    counts = torch.zeros(2, VOCAB)
    counts[0, 7], counts[0, 2], counts[1, 5], counts[1, 0] = 3, 1, 1, 1
    alpha_presence, alpha_frequency = torch.tensor([[0.5], [-2.0]]), torch.tensor([[0.25], [0.0]])
    wanted = logits - counts * alpha_frequency - (counts > 0) * alpha_presence
    assert torch.allclose(edited(logits, rows), wanted, rtol=0, atol=1e-6)


def test_biases_are_those_of_transformers_and_come_before_the_repetition_penalty() -> None:
    logits, biases = some_logits(1), {4: 2.5, 9: -100.0, 0: 100.0}
    tokens = torch.tensor([[4, 9]])
    wanted = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})(tokens, logits.clone())
    assert torch.equal(edited(logits, [request_of(logit_bias=biases)]), wanted)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(tokens, wanted)
    found = edited(logits, [request_of(prompt=(4, 9), logit_bias=biases, repetition_penalty=1.7)])
    assert torch.equal(found, wanted)


def test_a_logit_bias_of_100_decides() -> None:
    logits, sampler = some_logits(300).clamp_(-10, 10), Sampler((), VOCAB)
    likeliest = int(logits[0].argmax())
    forced = [request_of(seed=i, logit_bias={11: 100}) for i in range(300)]
    assert set(run(sampler, logits, forced).tokens) == {11}
    banned = [request_of(seed=i, logit_bias={likeliest: -100}) for i in range(300)]
    assert likeliest not in run(sampler, logits[:1].expand(300, -1), banned).tokens
    assert likeliest in run(sampler, logits[:1].expand(300, -1), [request_of(seed=i) for i in range(300)]).tokens


@pytest.mark.parametrize("output", [0, 2, 3, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_before_min_tokens_no_token_ends_the_request(output: int, ignore_eos: bool) -> None:
    """Every token is checked against `reason_to_finish`, and EOS against transformers, too."""
    logits, eos = some_logits(1), (3, 5)
    said = [1] * output
    request = request_of(output=said, min_tokens=3, stop_token_ids=(6, 900), ignore_eos=ignore_eos, logit_bias={0: 0.5})
    found = edited(logits, [request], eos)
    banned = (found == -torch.inf).nonzero()[:, 1].tolist()
    later = request_of(output=[1] * 9, max_tokens=20, stop_token_ids=(6, 900), ignore_eos=ignore_eos)
    for token in range(VOCAB):
        later.output_tokens[-1] = token
        assert (token in banned) == (output < 3 and reason_to_finish(later, eos) is not None)
    if not ignore_eos:
        processor = MinNewTokensLengthLogitsProcessor(1, 3, list(eos))
        wanted = processor(torch.ones(1, 1 + output, dtype=torch.int64), logits.clone())[0, list(eos)]
        assert torch.equal(found[0, list(eos)], wanted)


@pytest.mark.parametrize("seed", range(20))
def test_a_token_in_flight_counts_as_one_that_the_host_knows(seed: int) -> None:
    rng = random.Random(seed)
    known, whole = [], []
    for row in range(4):
        output = rng.choices(range(4), k=rng.randint(1, 5))
        params: dict[str, Any] = {
            "presence_penalty": rng.choice([0.0, 1.5]),
            "frequency_penalty": rng.choice([0.0, -0.7]),
            "repetition_penalty": rng.choice([1.0, 1.3]),
            "logit_bias": rng.choice([{}, {1: 2.0}]),
            "min_tokens": rng.choice([0, 3]),
        }
        prompt = rng.choices(range(6), k=2)
        known.append(request_of(f"r{row}", prompt=prompt, output=output[:-1], **params))
        whole.append(request_of(f"r{row}", prompt=prompt, output=output, **params))
    logits, newest = some_logits(4, seed), torch.tensor([request.output_tokens[-1] for request in whole])
    edits = Sampler((2,), VOCAB).pack(known, [request.total for request in whole]).edits
    found = logits if edits is None else edit(logits, edits, newest)
    assert torch.allclose(found, edited(logits, whole, (2,)), rtol=0, atol=1e-5)


def test_edits_change_only_their_own_row_and_not_the_given_logits() -> None:
    logits = some_logits(3)
    before = logits.clone()
    requests = [request_of(), request_of(logit_bias={2: 5.0}), request_of(output=(4,), presence_penalty=1.0)]
    run(Sampler((), VOCAB), logits, requests)
    assert torch.equal(logits, before)
    changed = (edited(logits, requests) != logits).nonzero().tolist()
    assert changed == [[1, 2], [2, 4]]


def test_edits_are_made_in_float32() -> None:
    """In bfloat16, 1/256 more on a logit of 4 would be rounded away, and two tokens would tie."""
    logits = torch.tensor([[4.0, 4.0, 0.0]], dtype=torch.bfloat16)
    assert run(Sampler((), 3), logits, [request_of(temperature=0, logit_bias={1: 1 / 256})]).tokens == [1]


def test_a_token_beyond_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="request odd names token 30; ids run from 0 to 29"):
        Sampler((), VOCAB).pack([request_of(), request_of("odd", logit_bias={VOCAB: 1.0})])


# Rows that cannot be sampled.

SICK = {
    "NaN": ([0.0, math.nan, 1.0, math.inf], "NaN"),
    "+inf": ([0.0, math.inf, 1.0, -math.inf], "+inf"),
    "none": ([-math.inf] * 4, "all logits are -inf"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sick", SICK)
@pytest.mark.parametrize(
    "asked", [{"temperature": 0}, {}, {"top_p": 0.5, "top_k": 2, "min_p": 0.1, "logprobs": 2}, {"logit_bias": {0: 3.0}}]
)
def test_a_row_of_nan_or_inf_fails_alone_with_its_reason(asked: dict[str, Any], sick: str, device: str) -> None:
    numbers, message = SICK[sick]
    healthy = some_logits(2, vocab=20)
    row = torch.tensor([numbers]).repeat(1, 5)
    requests = [request_of(f"{i}", **asked) for i in range(3)]
    sampler = Sampler((), 20, device, seed=0)
    sampled = sampler.sample(torch.cat((healthy[:1], row, healthy[1:])).to(device), sampler.pack(requests))
    assert 0 <= int(sampled.tokens[1]) < 20  # the next step may use it before the host reads it
    found = sampled.fetch().output(range(3), 3)
    alone = run(sampler, healthy, [requests[0], requests[2]])
    assert found.tokens == [alone.tokens[0], None, alone.tokens[1]]
    assert list(found.failed) == [1]
    assert [*found.logprobs] == ([0, 2] if "logprobs" in asked else [])
    assert message in found.failed[1]


def test_a_request_that_excludes_every_token_fails() -> None:
    request = request_of(min_tokens=1, stop_token_ids=(0, 1))
    assert "min_tokens" in run(Sampler((2,), 3), some_logits(1, vocab=3), [request]).failed[0]


def test_only_slices_that_complete_their_requests_get_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 0.0], [3.0, 0.0]])
    sampler = Sampler((), 2)
    requests = [request_of(temperature=0, logprobs=0) for _ in range(3)]
    output = sampler.sample(logits, sampler.pack(requests)).fetch().output((1, 2, 4), 6)
    assert output.tokens == [None, 1, None, None, 0, None]
    assert list(output.failed) == [2]
    assert [*output.logprobs] == [1, 4]
    nothing = sampler.sample(torch.empty(0, 2), sampler.pack([])).fetch().output((), 2)
    assert nothing == StepOutput([None, None])


def test_logits_of_another_shape_are_refused() -> None:
    sampler = Sampler((), VOCAB)
    sampling = sampler.pack([request_of(), request_of()])
    with pytest.raises(ValueError, match=r"\[2, 30\] for 2 requests, got \[1, 30\]"):
        sampler.sample(some_logits(1), sampling)
    with pytest.raises(ValueError, match="vocab_size must be an integer from 1, got 0"):
        Sampler((), 0)


# Log-probabilities.


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_those_of_the_model_before_any_edit(dtype: torch.dtype) -> None:
    logits = some_logits(4).to(dtype)
    heavy: dict[str, Any] = {"logit_bias": {7: 90.0}, "temperature": 0.2, "top_k": 3}
    requests = [request_of(logprobs=5, temperature=0), request_of(), request_of(logprobs=0), request_of(logprobs=20)]
    requests[3] = request_of(logprobs=20, **heavy)
    output = run(Sampler((), VOCAB, seed=0), logits, requests)
    wanted = logits.double().log_softmax(-1)
    assert [*output.logprobs] == [0, 2, 3]
    assert output.tokens[3] == 7
    for row, many in ((0, 5), (2, 0), (3, 20)):
        token, found = output.tokens[row], output.logprobs[row]
        assert token is not None
        assert found.logprob == pytest.approx(float(wanted[row, token]), abs=1e-5)
        order = sorted(range(VOCAB), key=lambda id, row=row: (-float(wanted[row, id]), id))
        assert [id for id, _ in found.top] == order[:many]
        assert [p for _, p in found.top] == pytest.approx([float(wanted[row, id]) for id in order[:many]], abs=1e-5)


def test_of_equally_likely_alternatives_the_lower_id_comes_first() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, 4000] = logits[0, 30] = 1.0
    logits[1, 1000:] = -1e-30
    output = run(Sampler((), 5000), logits, [request_of(temperature=0, logprobs=20) for _ in range(2)])
    assert [id for id, _ in output.logprobs[0].top] == [30, 4000, *range(18)]
    assert [id for id, _ in output.logprobs[1].top] == [*range(20)]


def test_a_token_without_probability_is_no_alternative() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    found = run(Sampler((), 4), logits, [request_of(temperature=0, logprobs=20)]).logprobs[0]
    assert [id for id, _ in found.top] == [2, 0]


# Seeds and batches.


def tokens_over_time(sampler: Sampler, request: Request, steps: int) -> list[int | None]:
    """The tokens that a request draws, step by step, from one distribution."""
    logits = torch.zeros(1, 1000)
    tokens = []
    for _ in range(steps):
        (token,) = run(sampler, logits, [request]).tokens
        assert token is not None
        request.output_tokens.append(token)
        tokens.append(token)
    return tokens


def test_the_same_seed_draws_the_same_tokens_and_another_does_not() -> None:
    def tokens(seed: int | None, id: str = "r", of_sampler: int | None = None) -> list[int | None]:
        return tokens_over_time(Sampler((), 1000, seed=of_sampler), request_of(id, seed=seed), 40)

    assert tokens(1) == tokens(1) == tokens(1, "another", 3)
    assert tokens(0) == tokens(0, "another", 3)  # 0 is a seed like any other
    assert len(set(tokens(1))) > 30  # not one number at every position
    for other in (2, -1, 0, (1 << 63) - 1):
        assert sum(a == b for a, b in zip(tokens(1), tokens(other), strict=True)) < 5
    assert tokens(None) != tokens(None)  # without any seed, every engine is new
    assert tokens(None, of_sampler=3) == tokens(None, of_sampler=3)
    assert tokens(None, "another", 3) != tokens(None, of_sampler=3)
    assert tokens(None, of_sampler=4) != tokens(None, of_sampler=3)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_preempted_request_draws_the_same_tokens(seed: int | None) -> None:
    sampler = Sampler((), 1000, seed=0)
    whole = tokens_over_time(sampler, request_of(seed=seed), 20)
    first = request_of(seed=seed)
    kept = tokens_over_time(sampler, first, 8)
    first.computed = 0  # as after a preemption
    tokens_over_time(sampler, request_of("another", seed=seed), 7)
    assert kept + tokens_over_time(sampler, first, 12) == whole


ONE_REQUEST = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 17]),
        "top_p": st.sampled_from([0.1, 0.6, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -0.4]),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.4]),
        "logit_bias": st.sampled_from([{}, {3: 1.5, 8: -100.0}]),
        "min_tokens": st.sampled_from([0, 3]),
        "seed": st.sampled_from([None, 0, 1]),
        "logprobs": st.sampled_from([None, 0, 3, 8]),
    },
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(crowd=st.lists(ONE_REQUEST, min_size=2, max_size=7), seed=st.integers(0, 99), data=st.data())
def test_the_batch_changes_no_draw(
    dtype: torch.dtype, device: str, crowd: list[dict[str, Any]], seed: int, data: st.DataObject
) -> None:
    """Alone, in any batch and in any row: the same tokens, failures and log-probabilities, to the last bit."""
    sampler = Sampler((2,), VOCAB, device, seed=0)
    logits = some_logits(len(crowd), seed).to(dtype)
    logits[data.draw(st.integers(0, len(crowd) - 1))] = data.draw(st.sampled_from([0.0, math.nan, -1.0]))
    requests = [request_of(f"{i}", (1, 5, 8), (3, 8, 8)[: i % 4], **asked) for i, asked in enumerate(crowd)]
    order = data.draw(st.permutations(range(len(crowd))))
    company = order[: data.draw(st.integers(1, len(crowd)))]
    found = run(sampler, logits[company], [requests[i] for i in company])
    for row, i in enumerate(company):
        alone = run(sampler, logits[i : i + 1], [requests[i]])
        assert found.tokens[row] == alone.tokens[0]
        assert found.failed.get(row) == alone.failed.get(0)
        assert found.logprobs.get(row) == alone.logprobs.get(0)


def test_the_batch_changes_no_draw_from_a_real_vocabulary() -> None:
    vocab = 151_936
    logits = some_logits(6, vocab=vocab) * torch.tensor([[0.0], [0.2], [1.0], [1.0], [2.0], [4.0]])
    asked: list[dict[str, Any]] = [
        {"top_p": 0.99},
        {"top_p": 0.9, "top_k": 2000},
        {},
        {"top_k": 50},
        {"min_p": 0.1},
        {},
    ]
    requests = [request_of(f"{i}", logprobs=3, **one) for i, one in enumerate(asked)]
    sampler = Sampler((), vocab, seed=0)
    together = run(sampler, logits, requests)
    for row, request in enumerate(requests):
        alone = run(sampler, logits[row : row + 1], [request])
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs[row] == alone.logprobs[0]


# Padded vocabularies: lm_head has rows from which no token may be drawn.


def padded_logits() -> Tensor:
    """Logits of 20 tokens and 4 padded ids, which are by far the likeliest."""
    logits = some_logits(6, vocab=24)
    logits[:, 20:] += 50
    return logits


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"seed": 3}, {"seed": 3, "top_k": 21, "top_p": 0.9, "min_p": 0.01}]
)
def test_a_padded_id_is_drawn_as_if_it_had_no_row(params: dict[str, Any]) -> None:
    """Also where a penalty applies to it, and next to a request that raises one."""
    logits = padded_logits()
    requests = [request_of(f"{n}", prompt=(1, 21), **params, repetition_penalty=1.5 if n % 2 else 1) for n in range(6)]
    without = [request_of(f"{n}", prompt=(1, 1), **params, repetition_penalty=1.5 if n % 2 else 1) for n in range(6)]
    wanted = run(Sampler((), 20, seed=0), logits[:, :20], without).tokens
    sampler = Sampler((), 24, seed=0, num_tokens=20)
    assert run(sampler, logits, requests).tokens == wanted
    beside = [*requests[:5], request_of("5", logit_bias={22: 1.0}, **params)]
    found = run(sampler, logits, beside)
    assert found.tokens[:5] == wanted[:5]
    assert found.tokens[5] == 22


def test_only_a_positive_bias_makes_a_padded_id_drawable() -> None:
    sampler = Sampler((), 24, num_tokens=20)
    requests = [request_of(f"{n}", temperature=0, logit_bias={23: bias}) for n, bias in enumerate((-1.0, 0.0, 100.0))]
    tokens = run(sampler, padded_logits()[:3], requests).tokens
    assert [token is not None and token < 20 for token in tokens] == [True, True, False]
    assert tokens[2] == 23


def test_the_logprob_of_a_padded_id_is_the_models_own() -> None:
    logits = padded_logits()[:1]
    request = request_of(temperature=0, logprobs=1, logit_bias={23: 100.0})
    found = run(Sampler((), 24, num_tokens=20), logits, [request]).logprobs[0]
    assert found.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 23]))
