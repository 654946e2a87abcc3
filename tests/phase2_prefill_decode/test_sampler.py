"""The Sampler: greedy rows, failures, log-probabilities, seeds, padded vocabularies, independence of the batch."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phase0_request import Batch, Request, SamplingParams, Slice, StepOutput
from phase2_prefill_decode.kernels.draw import SamplingInputs
from phase2_prefill_decode.sampling.sampler import Sampler
from tests.phase1_kv_pool.support import needs_gpu
from tests.phase2_prefill_decode.sampling_cases import (
    VOCAB,
    logprobs_in,
    packed,
    request_of,
    run,
    sampled,
    sampler_of,
    some_logits,
)
from tests.phase2_prefill_decode.steps import Asked, output_of

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Greedy.


@pytest.mark.proof
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_likeliest_token_and_the_first_of_a_tie(dtype: torch.dtype, device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [-1.0, -3.0, -torch.inf, -1.0], [0.0, 0.0, 0.0, 5.0]])
    logits, sampler = logits.to(device, dtype), sampler_of((), 4, device)
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
    sampling = packed(sampler_of((), VOCAB), requests)
    assert not sampling.works
    params = SamplingInputs(*map(torch.from_numpy, sampling.columns))
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


SAMPLED: dict[str, Any] = {
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "seed": 8,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 2.0,
    "logit_bias": {1: 1.0},
    "logprobs": 0,
    "allowed_token_ids": (1,),
    "bad_words": ((1,),),
}
ELSEWHERE = {  # what asks nothing of the sampler alone, or needs a tokenizer
    "max_tokens", "stop", "stop_token_ids", "ignore_eos", "prompt_logprobs", "include_stop_str_in_output",
    "skip_special_tokens", "grammar", "prediction", "embed",
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_each_parameter_alone_asks_something_of_the_sampler(name: str) -> None:
    sampler = sampler_of((0,), VOCAB)
    requests = [request_of(output=(2,), **{"seed": 7} | one) for one in ({}, {name: SAMPLED[name]})]
    plain, asked = (packed(sampler, [request]) for request in requests)
    assert not plain.works
    assert asked.works or any((a != b).any() for a, b in zip(asked.columns, plain.columns, strict=True))


def test_every_parameter_is_of_the_sampler_or_of_another_part() -> None:
    assert SAMPLED.keys() | ELSEWHERE == {field.name for field in fields(SamplingParams)}


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
    sampler = sampler_of((), 20, device, seed=0)
    sampling = packed(sampler, requests)
    draws = sampled(sampler, torch.cat((healthy[:1], row, healthy[1:])).to(device), sampling)
    assert 0 <= int(draws[0][1]) < 20  # the next step may use it before the host reads it
    found = output_of(draws, sampling.works, range(3), 3)
    alone = run(sampler, healthy.to(device), [requests[0], requests[2]])
    assert found.tokens == [alone.tokens[0], None, alone.tokens[1]]
    assert list(found.failed) == [1]
    assert [*logprobs_in(found)] == ([0, 2] if "logprobs" in asked else [])
    assert message in found.failed[1]


def test_only_slices_that_complete_their_requests_get_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 0.0], [3.0, 0.0]])
    sampler = sampler_of((), 2)
    requests = [request_of(f"r{n}", (1, 2), temperature=0, logprobs=0) for n in range(6)]
    parts = [Slice(request, 0, 2 if n in (1, 2, 4) else 1) for n, request in enumerate(requests)]
    sampling = Asked(*sampler.pack(Batch(tuple(parts))))
    output = output_of(sampled(sampler, logits, sampling), sampling.works, (1, 2, 4), 6)
    assert output.tokens == [None, 1, None, None, 0, None]
    assert list(output.failed) == [2]
    assert [*logprobs_in(output)] == [1, 4]
    sampling = packed(sampler, [])
    nothing = output_of(sampled(sampler, torch.empty(0, 2), sampling), sampling.works, (), 2)
    assert nothing == StepOutput([None, None])


def test_logits_of_another_shape_are_refused() -> None:
    sampler = sampler_of((), VOCAB)
    sampling = packed(sampler, [request_of(), request_of()])
    with pytest.raises(ValueError, match=r"\[2, 30\] for these requests, got \[1, 30\]"):
        sampled(sampler, some_logits(1), sampling)


# Log-probabilities.


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_those_of_the_model_before_any_edit(dtype: torch.dtype) -> None:
    logits = some_logits(4).to(dtype)
    heavy: dict[str, Any] = {"logit_bias": {7: 90.0}, "temperature": 0.2, "top_k": 3}
    requests = [request_of(logprobs=5, temperature=0), request_of(), request_of(logprobs=0), request_of(logprobs=20)]
    requests[3] = request_of(logprobs=20, **heavy)
    output = run(sampler_of((), VOCAB, seed=0), logits, requests)
    wanted = logits.double().log_softmax(-1)
    assert [*logprobs_in(output)] == [0, 2, 3]
    assert output.tokens[3] == 7
    for row, many in ((0, 5), (2, 0), (3, 20)):
        token, found = output.tokens[row], logprobs_in(output)[row]
        assert token is not None
        assert found.logprob == pytest.approx(float(wanted[row, token]), abs=1e-5)
        order = sorted(range(VOCAB), key=lambda id, row=row: (-float(wanted[row, id]), id))
        assert [id for id, _ in found.top] == order[:many]
        assert [p for _, p in found.top] == pytest.approx([float(wanted[row, id]) for id in order[:many]], abs=1e-5)


def test_of_equally_likely_alternatives_the_lower_id_comes_first() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, 4000] = logits[0, 30] = 1.0
    logits[1, 1000:] = -1e-30
    output = run(sampler_of((), 5000), logits, [request_of(temperature=0, logprobs=20) for _ in range(2)])
    assert [id for id, _ in logprobs_in(output)[0].top] == [30, 4000, *range(18)]
    assert [id for id, _ in logprobs_in(output)[1].top] == [*range(20)]


def test_a_token_without_probability_is_no_alternative() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    found = logprobs_in(run(sampler_of((), 4), logits, [request_of(temperature=0, logprobs=20)]))[0]
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
        return tokens_over_time(sampler_of((), 1000, seed=of_sampler), request_of(id, seed=seed), 40)

    assert tokens(1) == tokens(1) == tokens(1, "another", 3)
    assert tokens(0) == tokens(0, "another", 3)  # 0 is a seed like any other
    assert len(set(tokens(1))) > 30  # not one number at every position
    for other in (2, -1, 0, (1 << 63) - 1):
        assert sum(a == b for a, b in zip(tokens(1), tokens(other), strict=True)) < 5
    assert tokens(None) != tokens(None)  # without any seed, every engine is new
    assert tokens(None, of_sampler=3) == tokens(None, of_sampler=3)
    assert tokens(None, "another", 3) != tokens(None, of_sampler=3)
    assert tokens(None, of_sampler=4) != tokens(None, of_sampler=3)


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
    sampler = sampler_of((2,), VOCAB, device, seed=0)
    logits = some_logits(len(crowd), seed).to(device, dtype)
    logits[data.draw(st.integers(0, len(crowd) - 1))] = data.draw(st.sampled_from([0.0, math.nan, -1.0]))
    requests = [request_of(f"{i}", (1, 5, 8), (3, 8, 8)[: i % 4], **asked) for i, asked in enumerate(crowd)]
    order = data.draw(st.permutations(range(len(crowd))))
    company = order[: data.draw(st.integers(1, len(crowd)))]
    found = run(sampler, logits[company], [requests[i] for i in company])
    for row, i in enumerate(company):
        alone = run(sampler, logits[i : i + 1], [requests[i]])
        assert found.tokens[row] == alone.tokens[0]
        assert found.failed.get(row) == alone.failed.get(0)
        assert logprobs_in(found).get(row) == logprobs_in(alone).get(0)


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
    """Also where a penalty applies to it, and where its bias raises it."""
    logits, bias = padded_logits(), [{}, {22: 100.0}]
    requests = [
        request_of(f"{n}", prompt=(1, 21), **params, repetition_penalty=1.5 if n % 2 else 1, logit_bias=bias[n // 3])
        for n in range(6)
    ]
    without = [request_of(f"{n}", prompt=(1, 1), **params, repetition_penalty=1.5 if n % 2 else 1) for n in range(6)]
    wanted = run(sampler_of((), 20, seed=0), logits[:, :20], without).tokens
    assert run(sampler_of((), 24, seed=0, num_tokens=20), logits, requests).tokens == wanted
