"""Edits of logits before sampling: logit_bias, penalties, min_tokens."""

import gc
import math
import random
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from phase0_request import reason_to_finish
from phase2_prefill_decode.extras.penalties import Penalties, edit, pack_edits
from tests.phase2_prefill_decode.sampling_cases import (
    VOCAB,
    edited,
    edited_by,
    edits_in,
    packed,
    request_of,
    run,
    sampler_of,
    some_logits,
)
from tests.phase2_prefill_decode.steps import NothingWaits


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=20),
    steps=st.integers(1, 9),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.integers(-100, 100), max_size=4),
    least=st.integers(0, 30),
    penalties=st.tuples(*[st.sampled_from([0.0, 0.5, -1.5])] * 2, st.sampled_from([1.0, 1.3])),
)
def test_edits_match_a_loop_over_the_tokens(
    prompt: list[int], output: list[int], steps: int, bias: dict[int, int], least: int, penalties: tuple[float, ...]
) -> None:
    """In each of the last steps of an output, whose edits the sampler keeps from step to step."""
    presence, frequency, repetition = penalties
    request = request_of(
        "r", prompt, output[:-steps], max_tokens=50, min_tokens=least, logit_bias=bias, presence_penalty=presence,
        frequency_penalty=frequency, repetition_penalty=repetition, stop_token_ids=[3],
    )  # fmt: skip
    sampler, said = sampler_of([7], VOCAB), request.output_tokens
    for new in [[], *([token] for token in output[-steps:])]:
        said += new
        wanted = []
        for token, logit in enumerate(some_logits(1)[0].tolist()):
            x = -math.inf if token in (3, 7) and len(said) < least else logit + bias.get(token, 0)
            if token in prompt + said:
                x = x / repetition if x > 0 else x * repetition
            wanted.append(x - presence * (token in said) - frequency * said.count(token))
        found = edited_by(packed(sampler, [request]), some_logits(1))[0].tolist()
        near = [x == pytest.approx(y, rel=1e-5, abs=1e-5) for x, y in zip(found, wanted, strict=True)]
        wrong = [token for token, is_near in enumerate(near) if not is_near]
        assert not wrong, f"the logits of the tokens {wrong} after a prompt of {prompt} and an output of {said}"


@given(seed=st.integers(0, 1000), penalty=st.sampled_from([0.3, 0.9, 1.1, 2.0, 10.0]), output=st.integers(0, 9))
def test_the_repetition_penalty_is_that_of_transformers(seed: int, penalty: float, output: int) -> None:
    logits = some_logits(1, seed)
    tokens = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    prompt, said = tokens[: 12 - output], tokens[12 - output :]
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
    found = edited(logits, [request_of(prompt=prompt, output=said, repetition_penalty=penalty)])
    assert torch.equal(found, wanted)


def test_packing_a_step_costs_no_more_after_a_long_context() -> None:
    """All tokens of prompt and output were counted again at every step: the memory that takes shows it. The number of
    different tokens is the same here."""

    def peak(length: int) -> int:
        tokens = [token % VOCAB for token in range(length)]
        request = request_of(prompt=tokens, output=tokens, repetition_penalty=1.1, frequency_penalty=0.5)
        sampler = sampler_of((), VOCAB)
        edited_by(packed(sampler, [request]), some_logits(1))
        request.output_tokens.append(1)
        tracemalloc.start()
        edited_by(packed(sampler, [request]), some_logits(1))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(1000)  # what is imported or cached by the first one
    assert peak(30_000) < 1.5 * peak(1000)


def test_a_request_that_has_ended_leaves_nothing_in_the_sampler() -> None:
    sampler, request = sampler_of((), VOCAB), request_of(repetition_penalty=1.1)
    packed(sampler, [request])
    (penalties,) = (each for each in sampler.processors if isinstance(each, Penalties))
    assert len(penalties._edits) == 1
    del request
    gc.collect()
    assert len(penalties._edits) == 0


def test_biases_are_those_of_transformers_and_come_before_the_repetition_penalty() -> None:
    logits, biases = some_logits(1), {4: 2.5, 9: -100.0, 0: 100.0}
    tokens = torch.tensor([[4, 9]])
    wanted = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})(tokens, logits.clone())
    assert torch.equal(edited(logits, [request_of(logit_bias=biases)]), wanted)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(tokens, wanted)
    found = edited(logits, [request_of(prompt=(4, 9), logit_bias=biases, repetition_penalty=1.7)])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("output", [0, 2, 3, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_before_min_tokens_no_token_ends_the_request(output: int, ignore_eos: bool) -> None:
    """Every token is checked against `reason_to_finish`, and EOS against transformers, too."""
    logits, eos = some_logits(1), (3, 5)
    said = [1] * output
    request = request_of(output=said, min_tokens=3, stop_token_ids=(6,), ignore_eos=ignore_eos, logit_bias={0: 0.5})
    found = edited(logits, [request], eos)
    banned = (found == -torch.inf).nonzero()[:, 1].tolist()
    later = request_of(output=[1] * 9, max_tokens=20, stop_token_ids=(6,), ignore_eos=ignore_eos)
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
    logits, sampling = (
        some_logits(4, seed),
        packed(sampler_of((2,), VOCAB), known, [request.total for request in whole]),
    )
    for draw, edits in edits_in(sampling):
        edits.take(draw.output_index - 1, whole[draw.row].output_tokens[-1])
    found = edited_by(sampling, logits)
    off = (found - edited(logits, whole, (2,))).nan_to_num(0).abs() > 1e-5
    assert not off.any(), f"(request, token) of logits that are wrong with a token in flight: {off.nonzero().tolist()}"


def test_edits_change_only_their_own_row_and_not_the_given_logits() -> None:
    logits = some_logits(3)
    before = logits.clone()
    requests = [request_of(), request_of(logit_bias={2: 5.0}), request_of(output=(4,), presence_penalty=1.0)]
    run(sampler_of((), VOCAB), logits, requests)
    assert torch.equal(logits, before)
    changed = (edited(logits, requests) != logits).nonzero().tolist()
    assert changed == [[1, 2], [2, 4]]


def test_edits_wait_for_nothing_on_the_device() -> None:
    known = [request_of("a", output=(3, 4), presence_penalty=1.0), request_of("b", output=(5,), frequency_penalty=0.5)]
    logits, sampling = some_logits(2), packed(sampler_of((), VOCAB), known)
    edits = pack_edits(edits_in(sampling), torch.device("cpu"))
    with NothingWaits():
        found = edit(logits, edits)
    changed = (found != logits).nonzero().tolist()
    assert changed == [[0, 3], [0, 4], [1, 5]], "(row, token) of all penalties"


def test_edits_are_made_in_float32() -> None:
    """In bfloat16, 1/256 more on a logit of 4 would be rounded away, and two tokens would tie."""
    logits = torch.tensor([[4.0, 4.0, 0.0]], dtype=torch.bfloat16)
    assert run(sampler_of((), 3), logits, [request_of(temperature=0, logit_bias={1: 1 / 256})]).tokens == [1]
