"""Running one step ahead: every answer is the one that the engine gives without it."""

import random
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from phase0_request import Batch, FinishReason, RequestState, SamplingParams
from phase2_prefill_decode.extras.outcome import extras_of
from phase2_prefill_decode.generation import Completion
from phase6_integration.engine.engine import NanoServingEngine

SMALL = {"kv_cache_pages": 20, "page_size": 4, "max_chunk_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 6}
TEXTS = ["What is a KV cache?", "Paging", "A radix tree", "Paging", "What is a page?", "Hello there, who"]
ANIMAL = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind_of_animal": {"enum": ["cat", "dog"]}},
        "required": ["name", "kind_of_animal"],
        "additionalProperties": False,
    }
)


def params(rng: random.Random, number: int) -> SamplingParams:
    """Anything that depends on the tokens so far, and so on one that is still in flight."""
    some: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.8, 1.5]),
        "top_p": rng.choice([1.0, 0.8]),
        "top_k": rng.choice([0, 5]),
        "min_p": rng.choice([0.0, 0.05]),
        "presence_penalty": rng.choice([0.0, 1.5]),
        "frequency_penalty": rng.choice([0.0, 0.9]),
        "repetition_penalty": rng.choice([1.0, 1.4]),
        "logit_bias": rng.choice([(), {7: 4.0, 300: -2.0}]),
        "min_tokens": rng.choice([0, 6]),
        "max_tokens": rng.choice([1, 2, 20, 30]),
        "logprobs": rng.choice([None, 0, 3]),
        "prompt_logprobs": rng.choice([None, None, 2]),
        "stop": rng.choice([(), ("e",), (" the",)]),
        "stop_token_ids": rng.choice([(), (70, 71, 72, 73)]),
        "ignore_eos": rng.random() < 0.5,
        "grammar": rng.choice([None, None, ANIMAL]),
        "bad_words": rng.choice([(), [[300], [70, 71]]]),
        "allowed_token_ids": rng.choice([None, None, [*range(3000)]]),
    }
    some["min_tokens"] = min(some["min_tokens"], some["max_tokens"])
    return SamplingParams(seed=number, **some)


def told(answer: Completion) -> tuple[Any, ...]:
    request = answer.request
    return request.output_tokens, answer.text, answer.finish_reason, answer.more, extras_of(request).prompt_logprobs


@pytest.mark.parametrize("seed", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_running_ahead(seed: int) -> None:
    """With penalties, min_tokens, seeds, logprobs, grammars, stop strings, preemption: each with a token in flight."""
    answers = {}
    for ahead in (False, True):
        rng = random.Random(seed)
        with NanoServingEngine.from_pretrained(
            **SMALL, async_scheduling=ahead, speculative_config=None, seed=1, dtype="float32", check_invariants=True
        ) as engine:
            asked = [(rng.choice(TEXTS) * rng.choice([1, 3]), params(rng, number)) for number in range(30)]
            answers[ahead] = engine.generate([text for text, _ in asked], [one for _, one in asked])
            assert engine.get_stats()["preemptions"] > 0
            assert engine.get_stats()["pages"]["used"] == 0
    for without, ahead_of in zip(answers[False], answers[True], strict=True):
        for one, other in zip(told(without), told(ahead_of), strict=True):
            assert str(one) == str(other) or torch.allclose(numbers(one), numbers(other), atol=1e-4)


def numbers(found: list[Any]) -> torch.Tensor:
    """The log-probabilities of logprobs. Those of other batches may differ in their last bits."""
    return torch.tensor([one.logprob for one in found])


@pytest.mark.parametrize("stage", ["pack", "launch"])
def test_a_step_that_fails_ahead_of_another_costs_only_the_request_at_fault(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after it has read tokens that were never drawn: it is void, and planned again."""
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    wanted = {}
    for fails in (False, True):
        with NanoServingEngine.from_pretrained(
            **{**SMALL, "kv_cache_pages": 80}, async_scheduling=True, speculative_config=None, check_invariants=True
        ) as engine:
            if fails:
                raise_at(stage, engine, monkeypatch)
            requests = [engine.add_request(f"{text} {number}", greedy) for number, text in enumerate(TEXTS)]
            while engine.has_work:
                engine.step()
                assert not fails or RequestState.PREEMPTED not in {request.state for request in requests}
            wanted[fails] = [(request.finish_reason, request.output_tokens) for request in requests]
            assert engine.get_stats()["pages"]["used"] == 0
    assert wanted[True][0][0] is FinishReason.ERROR
    assert len(wanted[True][0][1]) >= 4
    assert wanted[True][1:] == wanted[False][1:]


def raise_at(stage: str, engine: NanoServingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step raise that computes the fifth token of the first request's answer."""
    runner = engine.parts.core.runner.runner  # type: ignore[attr-defined]
    pack, launch = runner.pack, runner.launch
    poisoned = set()

    def bad_pack(batch: Batch) -> Any:
        one = next((piece for piece in batch if piece.request.id == "added-1"), None)
        bad = one is not None and one.stop >= len(one.request.prompt_tokens) + 4 and one.request.params.max_tokens == 20
        if bad and stage == "pack":
            raise RuntimeError("poison")
        packed = pack(batch)
        if bad:
            poisoned.add(id(packed))
        return packed

    def bad_launch(packed: Any) -> Any:
        if id(packed) in poisoned:
            raise RuntimeError("poison")
        return launch(packed)

    monkeypatch.setattr(runner, "pack", bad_pack)
    monkeypatch.setattr(runner, "launch", bad_launch)
