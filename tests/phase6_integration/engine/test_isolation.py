"""IsolatingRunner: an exception in a step fails only the requests that cause it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from phase0_request import Batch, FinishReason, Request, SamplingParams, Slice, StepOutput, TokenLogprobs, core
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.extras.outcome import Forced, SliceOutcome, outcome_of
from phase3_chunked_prefill import TokenBudget
from phase5_continuous import Scheduler
from phase6_integration.engine.isolation import (
    BLAMED,
    CALM_STEPS,
    FAILED_STEPS,
    BrokenError,
    IsolatingCore,
    IsolatingRunner,
    LoadShedding,
)
from phase6_integration.engine.stats import Gauges
from tests.phase5_continuous.support import PackedBatch


@dataclass
class Step(PackedBatch):
    runner: "Runner"

    def output(self) -> StepOutput:
        self.runner.maybe("output", self.batch)
        numbers = [n for n, piece in enumerate(self.batch.slices) if piece.completes]
        tokens = [len(piece.request.prompt_tokens) if piece.completes else None for piece in self.batch.slices]
        quiet = {n: "no token can be drawn" for n, p in enumerate(self.batch.slices) if p.request.id == "nan"}
        logprobs = {n: TokenLogprobs(-1.0 * len(self.batch), ()) for n in numbers if n not in quiet}
        output = StepOutput(tokens, quiet)
        for number, found in logprobs.items():
            outcome_of(output, number).logprobs = found
        for number in numbers if self.runner.scores else ():
            outcome_of(output, number).forced = Forced((7,))
        return output


def is_probe(piece: Slice) -> bool:
    return set(piece.request.tokens(0, piece.stop)) == {0}


class Runner:
    """Raises at one stage of a step, for some requests in it."""

    scores = True

    def __init__(self, stage: str, bad: set[str]) -> None:
        self.stage = stage
        self.bad = bad
        self.ran: list[list[str]] = []
        self.probes: list[Slice] = []

    def maybe(self, stage: str, batch: Batch) -> None:
        if stage == self.stage and any(piece.request.id in self.bad for piece in batch if not is_probe(piece)):
            raise RuntimeError("secret")

    def pack(self, batch: Batch) -> Step:
        self.ran.append([piece.request.id for piece in batch])
        self.probes += [piece for piece in batch if is_probe(piece)]
        self.maybe("pack", batch)
        return Step(batch, self)

    def launch(self, step: Step) -> Step:
        self.maybe("launch", step.batch)
        return step


class Small(Runner):
    """Raises at one stage of a step with too many tokens."""

    scores = False

    def __init__(self, stage: str, most: int) -> None:
        super().__init__(stage, set())
        self.most = most

    def maybe(self, stage: str, batch: Batch) -> None:
        if stage == self.stage and sum(piece.length for piece in batch) > self.most:
            raise RuntimeError("could not create a primitive")


def outcome(runner: Runner, names: Sequence[str]) -> StepOutput:
    isolating: IsolatingRunner[Any] = IsolatingRunner(runner, LoadShedding(Scheduler(PagedCache(8, 4))))
    slices = []
    for n, name in enumerate(names):
        request = Request(name, (1,) * (n + 1), SamplingParams(seed=n))
        slices.append(Slice(request, 0, n + 1 if name != "chunk" else n))
    return isolating.launch(isolating.pack(Batch(tuple(slices)))).output()


EMPTY = core.Step()
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
    assert found.tokens == [1, 2, None, None, 5], f"slice 2 raises, slice 3 is a chunk; the tokens are {found.tokens}"
    assert found.failed == {1: "no token can be drawn", 2: BLAMED}, (
        f"slice 1 failed by itself, slice 2 raises alone; failed are {found.failed}"
    )
    outcomes = {n: outcome for n, outcome in found.more.items() if isinstance(outcome, SliceOutcome)}
    assert {n: outcome.logprobs for n, outcome in outcomes.items() if outcome.logprobs is not None} == dict.fromkeys(
        (0, 4), TokenLogprobs(-1.0, ())
    )
    assert {n for n, outcome in outcomes.items() if outcome.forced} == {0, 1, 4}, "what a grammar forces, too"


@STAGES
def test_the_probe_has_the_shape_that_failed_and_nothing_of_the_request(stage: str) -> None:
    runner = Runner(stage, {"a", "chunk"})
    found = outcome(runner, ["a", "b", "chunk"])
    assert found.failed == {0: BLAMED, 2: BLAMED}, "a probe of its shape succeeds: it is the request's fault"
    assert [(one.request.id, one.start, one.length, one.completes) for one in runner.probes] == [
        ("a", 0, 1, True),
        ("chunk", 0, 2, False),
    ]
    assert {one.request.params for one in runner.probes} == {SamplingParams()}, "a probe has default parameters"


def budget(scheduler: Scheduler) -> tuple[int, int]:
    return scheduler.budget.max_batched_tokens, scheduler.budget.max_chunk_size


@STAGES
def test_if_the_probe_fails_too_no_request_does_and_steps_are_halved_until_they_succeed(stage: str) -> None:
    """The engine's memory is short: a step of more than 16 tokens raises, whatever is in it."""
    scheduler = Scheduler(PagedCache(256, 4), budget=TokenBudget(48, 64))
    runner = Small(stage, most=16)
    engine: IsolatingCore[Any] = IsolatingCore(scheduler, IsolatingRunner(runner, LoadShedding(scheduler)))
    request = Request("long", (1,) * 60, SamplingParams(max_tokens=2 * CALM_STEPS + 60, ignore_eos=True))
    engine.submit(request)
    assert [engine.step() for _ in range(2)] == [EMPTY, EMPTY]
    assert budget(scheduler) == (16, 16), f"two failed steps halve the budget twice; it is {budget(scheduler)}"
    while request.computed < 60:
        engine.step()
    assert not request.finished, "memory was short, and the request was ended for it"
    runner.most = 64  # there is memory again
    for _ in range(2 * CALM_STEPS):
        engine.step()
    assert budget(scheduler) == (64, 48), "back to what it was"


@STAGES
def test_failed_steps_in_a_row_break_the_engine(stage: str) -> None:
    scheduler = Scheduler(PagedCache(64, 4))
    engine: IsolatingCore[Any] = IsolatingCore(
        scheduler, IsolatingRunner(Small(stage, most=0), LoadShedding(scheduler))
    )
    engine.submit(Request("one", (1,) * 60))
    for _ in range(FAILED_STEPS - 1):
        assert engine.step() == EMPTY
    with pytest.raises(BrokenError, match=r"no step can be computed any more \(RuntimeError at \d+ tokens\)"):
        engine.step()


@STAGES
def test_a_request_that_fails_with_its_next_step_in_flight_gives_its_pages_back_at_once(stage: str) -> None:
    """That step is void, and nothing comes after it: the caller must hear that the pages are free."""
    scheduler = Scheduler(PagedCache(64, 4), ahead=1)
    runner = Runner(stage, set())
    engine: IsolatingCore[Any] = IsolatingCore(scheduler, IsolatingRunner(runner, LoadShedding(scheduler)))
    engine.submit(Request("a", (1,) * 9, SamplingParams(max_tokens=9)))
    engine.step()
    runner.bad = {"a"}
    steps = []
    while engine.has_work:
        steps.append((engine.step(), Gauges.read(scheduler)))
    reasons = [event.finish_reason for step, _ in steps if step for event in step.events]
    assert reasons[-1] is FinishReason.ERROR
    last, gauges = steps[-1]
    assert last == EMPTY
    assert (gauges.running, gauges.pages_used) == (0, 0)
