"""Speculation: drafts change how long an output takes, and nothing else. The oracle is the engine without drafts."""

import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.support.checks import ConfigError
from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.generation import Completion
from phase2_prefill_decode.model import Model
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.engine import continuous
from phase5_continuous.extras.invariants import check
from phase5_continuous.extras.speculation import suffix
from phase5_continuous.extras.speculation.speculation import Speculation, speculation_in, speculation_of
from phase5_continuous.extras.speculation.suffix import SuffixProposer
from phase5_continuous.lab.constrained import SCHEMA, fits, json_grammar
from phase5_continuous.scheduler import Scheduler
from tests.phase2_prefill_decode.models import saved, tiny_model
from tests.phase2_prefill_decode.test_draw import exact, misfit
from tests.phase5_continuous.support import request

NGRAM = {"method": "ngram", "prompt_lookup_min": 1}


class Replay:
    """Proposes what each prompt is known to be answered with; every few tokens, one is wrong."""

    def __init__(self, outputs: dict[tuple[int, ...], list[list[int]]], wrong: int = 5) -> None:
        self.outputs = outputs
        self.wrong = wrong

    def propose(self, request: Request, most: int) -> Sequence[int]:
        done, total = len(request.output_tokens), len(request.prompt_tokens)
        outputs = self.outputs[request.prompt_tokens]
        known = next((each for each in outputs if each[:done] == request.output_tokens), outputs[0])
        return [
            token + 1 if (total + done + place) % self.wrong == 0 else token
            for place, token in enumerate(known[done : done + most])
        ]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def chatty(request: pytest.FixtureRequest) -> Model:
    """The bundled model. In bfloat16 a step of few rows is one kernel."""
    return Model.load(device="cpu", dtype=request.param)


def facts(answers: Sequence[Completion]) -> list[Any]:
    return [(each.output_tokens, each.text, each.finish_reason, each.more) for each in answers]


def answered(model: Model, name: str) -> tuple[list[list[int]], list[SamplingParams], list[Completion]]:
    """The prompts and parameters of a case, for four requests, and their answers without drafts."""
    assert model.tokenizer is not None
    fields = {"max_tokens": 40, "ignore_eos": True, **CASES[name]}
    params = [SamplingParams(**fields).vary(fields["max_tokens"], seed) for seed in range(4)]
    questions = ["What is a KV cache?", "Why does paging matter?"] * 2
    prompts = [model.tokenizer.chat([{"role": "user", "content": question}]) for question in questions]
    return prompts, params, continuous(model).generate(prompts, params)


def with_drafts(model: Model, prompts: list[list[int]], wanted: Sequence[Completion], **more: Any) -> Engine[Scheduler]:
    """An engine that drafts what it is known to answer, with a wrong token here and there."""
    outputs = dict[tuple[int, ...], list[list[int]]]()
    for prompt, answer in zip(prompts, wanted, strict=True):
        outputs.setdefault(tuple(prompt), []).append(list(answer.output_tokens))
    engine = continuous(model, speculative_config=NGRAM, **more)
    engine.core.scheduler.extender = Speculation(Replay(outputs), 5, spare_rows=1000)
    return engine


JSON = {"grammar": json_grammar(SCHEMA), "ignore_eos": False, "max_tokens": 100}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    "filters": {"temperature": 1.5, "top_k": 20, "min_p": 0.02, "seed": 4},
    "penalties": {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "sampled with penalties": {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "seed": 5},
    "bias": {"temperature": 0.8, "logit_bias": {260: 4.0, 261: -100}, "seed": 6},
    "min_tokens": {"temperature": 0, "min_tokens": 30, "ignore_eos": False},
    "stop token": {"temperature": 0, "ignore_eos": False, "max_tokens": 200},
    "stop string": {"temperature": 0, "stop": ["the"]},
    "logprobs": {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 1, "seed": 7},
    "length": {"temperature": 0, "max_tokens": 3},
    "bad words": {"temperature": 0, "bad_words": [[260], [265, 266]]},
    "allowed tokens": {"temperature": 1.0, "allowed_token_ids": range(260, 700), "seed": 8},
    "grammar": {"temperature": 0, **JSON},
    "sampled by a grammar": {"temperature": 1.0, **JSON, "seed": 9},
    "logprobs by a grammar": {"temperature": 1.0, **JSON, "logprobs": 1, "seed": 10},
}


@pytest.mark.parametrize("name", CASES)
def test_the_output_is_that_without_drafts(chatty: Model, name: str) -> None:
    """Tokens, text, finish reason and logprobs, bit for bit; of several requests at once, some of them with the same
    prompt, in a pool that holds few of them."""
    prompts, params, wanted = answered(chatty, name)
    assert "grammar" not in CASES[name] or all(fits(answer.text) for answer in wanted)
    for more in ({"budget": TokenBudget(16, 24), "cache": PrefixCache(24, 4)}, {"cache": PagedCache(28, 4)}):
        engine = with_drafts(chatty, prompts, wanted, **more)
        assert facts(engine.generate(prompts, params)) == facts(wanted)
        speculation, scheduler = speculation_in(engine.core.scheduler), engine.core.scheduler
        assert speculation is not None
        assert sum(speculation.accepted) > 0
        check(scheduler)
        assert scheduler.cache.usage.referenced == 0


SOURCES: dict[str, dict[str, Any]] = {
    "ngram": {**NGRAM},
    "suffix": {"method": "suffix", "prompt_lookup_min": 3, "prompt_lookup_max": 3},
    "prediction": {"method": "ngram"},
    "ngram under a mask": {**NGRAM},
    "draft model": {"method": "draft_model"},
}


@pytest.mark.parametrize("source", SOURCES)
def test_outputs_with_drafts_have_the_exact_distribution(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four tokens at temperature 1 with top-p, by transformers' logits in float64."""
    monkeypatch.setattr(suffix, "FOLLOWING", 2)
    size, prompt, allowed = 6, [1, 2, 4, 1, 5, 2, 4], [0, 1, 2, 4] if "mask" in source else [*range(6)]
    params = SamplingParams(max_tokens=4, top_p=0.9, allowed_token_ids=allowed if "mask" in source else None)
    oracle = tiny_model("llama", vocab_size=size, seed=3)
    model = Model.load(saved(oracle, tmp_path), device="cpu", dtype="float32")
    texts, p = torch.tensor([prompt]), np.ones(1)
    for _ in range(4):
        with torch.no_grad():
            logits = oracle.double()(texts).logits[:, -1].numpy()
        logits[:, [token not in allowed for token in range(size)]] = -np.inf
        p = (p[:, None] * [exact(row, params) for row in logits]).ravel()
        texts = torch.cat((texts.repeat_interleave(size, 0), torch.arange(size).repeat(len(texts))[:, None]), 1)
    if source == "prediction":
        params = replace(params, prediction=texts[p.argmax(), len(prompt) :].tolist())
    config = {**SOURCES[source], "spare_rows": 1000}
    if source == "draft model":
        config["model"] = str(saved(tiny_model("llama", vocab_size=size, seed=4), tmp_path / "draft"))
    engine = continuous(model, speculative_config=config)
    speculation = speculation_in(engine.core.scheduler)
    assert speculation is not None
    if speculation.draft_model is not None:
        speculation.draft_model.cost = 0
    answers = engine.generate([prompt] * 2000, [replace(params, seed=seed) for seed in range(2000)])
    assert misfit(np.array([answer.output_tokens for answer in answers]) @ size ** np.arange(4)[::-1], p) < 4
    assert sum(speculation.accepted) > 500


def test_a_run_of_accepted_tokens_takes_one_step(chatty: Model) -> None:
    params, prompt = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True), [5, 6, 7]
    wanted = continuous(chatty).generate([prompt], params)
    engine = with_drafts(chatty, [prompt], wanted)
    assert speculation_in(engine.core.scheduler) is not None
    speculation_in(engine.core.scheduler).proposer = Replay({(5, 6, 7): [list(wanted[0].output_tokens)]}, wrong=1000)
    engine.generate([prompt], params)
    assert engine.core.steps == 1 + 4, "a prompt and four slices of six"
    assert speculation_in(engine.core.scheduler).accepted == [4] * 5


def test_text_that_repeats_is_drafted_from_the_request_itself(chatty: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logit_bias={300: 100.0})  # always this token
    wanted = continuous(chatty).generate([[5, 6, 7]], params)
    engine = continuous(chatty, speculative_config=NGRAM)
    assert facts(engine.generate([[5, 6, 7]], params)) == facts(wanted)
    assert engine.core.steps < 20


def test_what_one_request_said_is_drafted_for_another_of_the_same_salt(chatty: Model) -> None:
    assert chatty.tokenizer is not None
    prompt = tuple(chatty.tokenizer.chat([{"role": "user", "content": "What is a KV cache?"}]))
    engine, params = continuous(chatty, speculative_config={"method": "suffix"}), SamplingParams(temperature=0)
    steps, outputs = [], []
    for number, salt in enumerate(("a", "a", "b")):
        made, before = Request(f"{number}", prompt, params, cache_salt=salt), engine.core.steps
        engine.core.submit(made)
        for _ in engine.core.run():
            continue
        steps.append(engine.core.steps - before)
        outputs.append(made.output_tokens)
    assert outputs == [outputs[0]] * 3
    assert steps[1] < steps[0] / 2
    assert steps[2] == steps[0], "nobody learns what others are told"


def test_only_the_latest_outputs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "KEPT", 20)
    proposer = SuffixProposer(2, 4)
    said = [request(f"{number}", 5, 40) for number in range(9)]
    for number, each in enumerate(said):
        each.output_tokens += range(100 * number, 100 * number + 20)
        assert not proposer.propose(each, 3)
    for number, found in ((8, True), (0, False)):
        asked = request("new", 5, 40)
        asked.output_tokens += range(100 * number, 100 * number + 6)
        following = list(range(100 * number + 6, 100 * number + 9))
        assert list(proposer.propose(asked, 3)) == (following if found else [])


def with_draft_model(model: Model, pages: int | None = None, **more: Any) -> Engine[Scheduler]:
    """An engine of the bundled model, for which the bundled model drafts too, from a pool of so many pages."""
    config = {"method": "draft_model", "model": str(BUNDLED), "num_speculative_tokens": 5, "spare_rows": 1000}
    engine = continuous(model, speculative_config=config, **more)
    assert speculation_in(engine.core.scheduler) is not None
    drafter = speculation_in(engine.core.scheduler).draft_model
    assert drafter is not None
    drafter.cost = 0  # as if it were much smaller
    if pages is not None:
        held = drafter.cache.allocator.allocate(drafter.cache.usage.free - pages)
        assert held
    return engine


@pytest.mark.parametrize("name", ["sampled with penalties", "stop token", "logprobs", "sampled by a grammar"])
def test_a_model_that_drafts_for_itself_is_never_wrong(chatty: Model, name: str) -> None:
    """It draws with the same noise, at any temperature, but without masks. Then with prompts in chunks, preemption, and
    a pool of the drafts that holds half of the requests."""
    prompts, params, wanted = answered(chatty, name)
    small = {"budget": TokenBudget(16, 24), "cache": PagedCache(28, 4)}
    for engine in (with_draft_model(chatty), with_draft_model(chatty, 14, **small)):
        assert facts(engine.generate(prompts, params)) == facts(wanted)
        speculation = speculation_in(engine.core.scheduler)
        assert speculation is not None
        accepted = sum(speculation.accepted)
        assert accepted == speculation.drafted > 0 or ("grammar" in CASES[name] and accepted > 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "method must be one of ngram, suffix"),
        ({"method": "eagle"}, "method must be one of ngram, suffix, draft_model, got 'eagle'"),
        ({"method": "draft_model"}, "model must be a directory or the name of a repository, got None"),
        (
            {"method": "draft_model", "model": "m", "prompt_lookup_min": 1},
            "for draft_model, model, got 'prompt_lookup_min'",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 64"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min must be an integer from 1 to 4, got 5"),
        ({"method": "ngram", "draft": 1, "model": ""}, r"of the keys method, .* got 'draft, model'"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speculation_of(config)


def test_a_draft_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    model = Model.load(device="cpu", dtype="float32")

    def start(directory: Path) -> None:
        continuous(model, speculative_config={"method": "draft_model", "model": str(directory)})

    small = saved(tiny_model("llama", vocab_size=320), tmp_path / "small")
    with pytest.raises(ConfigError, match=r"must have the vocabulary of the model, 4096 tokens; .*small has 320"):
        start(small)
    other = Path(shutil.copytree(BUNDLED, tmp_path / "other"))
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_end|>", "<|end|>"))
    with pytest.raises(ConfigError, match=r"must have the tokenizer of the model; token 2 of .*other is another"):
        start(other)


def test_a_step_with_drafts_that_fails_is_planned_again(chatty: Model) -> None:
    params, prompt, rng = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), [5, 6, 7], random.Random(1)
    wanted = continuous(chatty).generate([prompt], params)
    engine = with_drafts(chatty, [prompt], wanted)
    launch = engine.core.runner.launch

    def shaky(step: Any) -> Any:
        if rng.random() < 0.3:
            raise RuntimeError("the device is lost")
        return launch(step)

    engine.core.runner.launch = shaky  # type: ignore[method-assign]
    made = Request("r", tuple(prompt), params)
    engine.core.submit(made)
    while engine.core.has_work:
        with suppress(RuntimeError):
            engine.core.step()
        check(engine.core.scheduler)
    assert made.output_tokens == wanted[0].output_tokens
