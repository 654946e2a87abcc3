"""IsolatingRunner: an exception in a step fails only the requests that cause it."""

from collections.abc import Sequence
from typing import Any

import pytest

from phase0_request import Batch, Request, SamplingParams, Slice, StepOutput, TokenLogprobs
from phase1_kv_pool import PagedCache
from phase6_integration.isolation import BLAMED, BrokenError, IsolatingRunner


class Step:
    def __init__(self, batch: Batch, runner: "Runner") -> None:
        self.batch = batch
        self.runner = runner
        self.drawn = [n for n, piece in enumerate(batch.slices) if piece.completes]
        self.slices = len(batch)

    def output(self, numbers: Sequence[int], slices: int) -> StepOutput:
        self.runner.maybe("output", self.batch)
        tokens = [len(piece.request.prompt_tokens) if piece.completes else None for piece in self.batch.slices]
        quiet = {n: "no token can be drawn" for n, p in enumerate(self.batch.slices) if p.request.id == "nan"}
        logprobs = {n: TokenLogprobs(-1.0 * len(self.batch), ()) for n in numbers if n not in quiet}
        return StepOutput(tokens, quiet, logprobs, {n: [] for n in range(slices)})


class Runner:
    """Raises at one stage of a step, for some requests in it."""

    def __init__(self, stage: str, bad: set[str]) -> None:
        self.stage = stage
        self.bad = bad
        self.ran: list[list[str]] = []

    def maybe(self, stage: str, batch: Batch) -> None:
        if stage == self.stage and any(piece.request.id in self.bad for piece in batch):
            raise RuntimeError("secret")

    def pack(self, batch: Batch) -> Step:
        self.ran.append([piece.request.id for piece in batch])
        self.maybe("pack", batch)
        return Step(batch, self)

    def launch(self, step: Step) -> Step:
        self.maybe("launch", step.batch)
        return step


def outcome(runner: Runner, names: Sequence[str], pages: int = 8) -> StepOutput:
    isolating: IsolatingRunner[Any] = IsolatingRunner(runner, PagedCache(pages, 4))
    slices = []
    for n, name in enumerate(names):
        request = Request(name, (1,) * (n + 1), SamplingParams())
        slices.append(Slice(request, 0, n + 1 if name != "chunk" else n))
    attempt = isolating.pack(Batch(tuple(slices)))
    return isolating.launch(attempt).output(attempt.drawn, attempt.slices)


STAGES = pytest.mark.parametrize("stage", ["pack", "launch", "output"])


@STAGES
def test_a_step_that_succeeds_runs_once_as_a_batch(stage: str) -> None:
    runner = Runner(stage, set())
    found = outcome(runner, ["a", "nan", "chunk", "d"])
    assert (found.tokens, dict(found.failed)) == ([1, 2, None, 4], {1: "no token can be drawn"})
    assert runner.ran == [["a", "nan", "chunk", "d"]], "computed once, together"


@pytest.mark.proof
@STAGES
def test_only_the_request_that_raises_fails(stage: str) -> None:
    found = outcome(Runner(stage, {"c"}), ["a", "nan", "c", "chunk", "e"])
    assert found.tokens == [1, 2, None, None, 5]
    assert found.failed == {1: "no token can be drawn", 2: BLAMED}
    assert {number: logprobs.logprob for number, logprobs in found.logprobs.items()} == {0: -1.0, 4: -1.0}
    assert set(found.prompt_logprobs) == {0, 1, 3, 4}


@STAGES
def test_all_requests_fail_if_all_raise_and_the_probe_succeeds(stage: str) -> None:
    found = outcome(Runner(stage, {"a", "b"}), ["a", "b"])
    assert found.failed == {0: BLAMED, 1: BLAMED}


@STAGES
def test_the_engine_is_broken_if_the_probe_raises_too(stage: str) -> None:
    with pytest.raises(BrokenError, match=r"no step can be computed any more \(RuntimeError\)"):
        outcome(Runner(stage, {"a", "b", "\0probe"}), ["a", "b"])


def test_the_probe_frees_its_page_and_is_skipped_without_one() -> None:
    runner, cache = Runner("launch", {"a"}), PagedCache(1, 4)
    held = Request("holder", (1,))
    cache.attach(held)
    cache.grow(held, 1)
    isolating: IsolatingRunner[Any] = IsolatingRunner(runner, cache)
    batch = Batch((Slice(Request("a", (1,)), 0, 1),))
    for pages in (0, 1):
        output = isolating.launch(isolating.pack(batch)).output([0], 1)
        assert output.failed == {0: BLAMED}
        assert (["\0probe"] in runner.ran) == bool(pages)
        if not pages:
            cache.release(held)
    assert cache.usage.free == 1
