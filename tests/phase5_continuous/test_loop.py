"""EngineCore over a device that runs up to one step behind, and that fails now and then."""

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from unittest.mock import Mock

import pytest

from phase0_request import Batch, FinishReason, Request, StepOutput
from phase0_request.core import EngineCore
from phase1_kv_pool import PagedCache
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase3_chunked_prefill.chunker import Chunker
from phase4_radix.extras.invariants import check_cache
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.admission import Admission
from phase5_continuous.extras.invariants import check
from phase5_continuous.running import RunningSet
from phase5_continuous.scheduler import Scheduler
from phase5_continuous.turns import OneQueue
from tests.phase5_continuous.support import EOS, Device, PackedBatch, alone, request


class BrokenError(Exception):
    """The device failed, and the steps in flight are lost."""


@dataclass
class Step(PackedBatch):
    """A packed batch, and then the launched step."""

    runner: "Runner"

    def output(self) -> StepOutput:
        self.runner.may_break("output")
        return StepOutput(self.runner.device.land())


@dataclass
class Runner:
    """Fails in one step of ten, at the launch or when the output is fetched."""

    device: Device
    breaks: str
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def pack(self, batch: Batch) -> Step:
        return Step(batch, self)

    def launch(self, step: Step) -> Step:
        self.may_break("launch")
        self.device.launch(step.batch)
        return step

    def may_break(self, moment: str) -> None:
        if moment == self.breaks and self.rng.random() < 0.1:
            self.device.steps.clear()
            raise BrokenError


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("breaks", ["never", "launch", "output"])
def test_steps_lost_in_flight_are_run_again_and_each_token_is_delivered_once(breaks: str, ahead: int) -> None:
    cache = PrefixCache(20, 4)
    scheduler, runner = Scheduler(cache, EOS, watermark=0, ahead=ahead), Runner(Device(cache), breaks)
    loop = EngineCore(scheduler, runner)
    requests: list[Request] = [request(f"r{n}", 5 + n, 30, ignore_eos=n % 2 == 0) for n in range(6)]
    delivered = {one.id: list[int]() for one in requests}
    for one in requests:
        loop.submit(one)
    broken = behind = 0
    for _ in range(1000):
        try:
            step = loop.step()
        except BrokenError:
            broken += 1
            continue
        finally:
            check(scheduler)
        behind = max(behind, len(runner.device.steps))
        for event in step.events if step else ():
            if event.token is not None:
                delivered[event.request.id].append(event.token)
    assert not loop.has_work
    wrong = {one.id: delivered[one.id] for one in requests if delivered[one.id] != alone(one, EOS)[0]}
    assert not wrong, f"a device that breaks at {breaks}, {ahead} ahead: these requests got other tokens {wrong}"
    assert behind == ahead, f"{behind} steps were in flight behind the oldest, and ahead is {ahead}"
    assert (broken > 3) == (breaks != "never")
    assert cache.usage.referenced == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_reports_its_tokens_pages_times_and_events(ahead: int) -> None:
    """The clock shows a second more each time that it is read."""
    seconds, cache = itertools.count(), PagedCache(32, 4)
    scheduler = Scheduler(cache, EOS, TokenBudget(8, 16), ahead=ahead)
    loop = EngineCore(scheduler, Runner(Device(cache), "never"), clock=lambda: float(next(seconds)))
    loop.submit(request("a", 20, 3))
    steps = list(loop.run())
    kinds = [(step.prefill_tokens, step.decode_tokens) for step in steps]
    assert kinds == [(8, 0), (8, 0), (4, 0), (0, 1), (0, 1)], "prefill and decode tokens of each step"
    assert [step.pages for step in steps] == [5, 5, 5, 6, 6], "pages that the request holds while each step runs"
    assert [len(step.events) for step in steps] == [0, 0, 1, 1, 1], "events of each step"
    assert loop.steps == 5
    if ahead:
        parts = sum(s.plan + s.pack + s.run + s.commit for s in steps)
        assert sum(step.seconds for step in steps) < parts, "steps overlap"
    else:
        assert [(s.plan, s.pack, s.run, s.commit) for s in steps] == [(1.0, 1.0, 1.0, 1.0)] * 5
        assert [step.seconds for step in steps] == [4.0] * 5


def test_an_abort_without_a_step_is_reported_and_then_there_is_nothing_to_do() -> None:
    cache = PagedCache(32, 4)
    loop = EngineCore(Scheduler(cache, EOS), Runner(Device(cache), "never"))
    assert (idle := loop.step()) is None, f"there is nothing to do, and step returned {idle}"
    one = request("a")
    loop.submit(one)
    assert loop.abort(one)
    assert not loop.abort(one)
    step = loop.step()
    assert step is not None, "the abort of a request is an event, also without a step"
    assert [(event.token, event.finish_reason) for event in step.events] == [(None, FinishReason.ABORT)]
    assert (len(step.batch), step.prefill_tokens, step.seconds) == (0, 0, 0.0)
    assert loop.step() is None
    assert not loop.has_work


Line = tuple[str, int]
PARTS = Scheduler, StaticScheduler, RunningSet, Admission, OneQueue, Chunker
TRACED = {sys.modules[part.__module__].__file__ for part in PARTS}


def tracing(lines: set[Line], interrupted: Line | None) -> Callable[[FrameType, str, object], object]:
    """A trace function that adds the lines that run in TRACED, and raises Ctrl-C at one of them."""

    def trace(frame: FrameType, event: str, argument: object) -> object:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line":
            lines.add(place)
            if place == interrupted:
                raise KeyboardInterrupt
        return trace if place[0] in TRACED else None

    return trace


def static_scheduler(cache: PagedCache) -> StaticScheduler:
    return StaticScheduler(cache, EOS, batch_size=2)


def scheduler_with(ahead: int) -> Callable[[PagedCache], Scheduler]:
    return lambda cache: Scheduler(cache, EOS, TokenBudget(8, 16), watermark=0, ahead=ahead)


@pytest.mark.parametrize("make", [scheduler_with(0), scheduler_with(1), static_scheduler], ids=["0", "1", "static"])
def test_every_request_continues_after_an_interrupt_anywhere_in_its_scheduler(
    make: Callable[[PagedCache], StaticScheduler | Scheduler],
) -> None:
    """At each line once, in a pool in which requests are preempted and end in flight. A token that an interrupt keeps
    from its request, in the commit of phase 0, is not looked at."""
    lines, seen, place = set[Line](), set[Line](), None
    while True:
        cache = PrefixCache(14, 4)
        scheduler, runner = make(cache), Runner(Device(cache), "never")
        loop = EngineCore(scheduler, runner)
        requests = [request(f"r{n}", 3 + 6 * n, 12, ignore_eos=n % 2 == 0) for n in range(4)]
        for one in requests:
            loop.submit(one)
        sys.settrace(tracing(lines, place))
        try:
            for _ in loop.run():
                pass
        except KeyboardInterrupt:
            runner.device.steps.clear()
        finally:
            sys.settrace(None)
        if isinstance(scheduler, Scheduler):
            check(scheduler)
        for _ in loop.run():
            check_cache(cache)
        assert [one.output_tokens for one in requests] == [alone(one, EOS)[0] for one in requests]
        assert cache.usage.referenced == 0
        if place is not None:
            seen.add(place)
        if not (left := lines - seen):
            break
        place = min(left)
    assert len(seen) > (20 if make is static_scheduler else 100)


@pytest.mark.parametrize("make", [scheduler_with(0), scheduler_with(1), static_scheduler], ids=["0", "1", "static"])
def test_an_interrupt_in_the_look_up_of_a_prefix_locks_nothing_and_is_passed_on(
    make: Callable[[PagedCache], StaticScheduler | Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, one = PrefixCache(14, 4), request("a", 9, 12)
    loop = EngineCore(make(cache), Runner(Device(cache), "never"))
    loop.submit(one)
    with monkeypatch.context() as patch:
        patch.setattr(cache.tree, "match", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    for _ in loop.run():
        check_cache(cache)
    assert one.output_tokens == alone(one, EOS)[0]
    assert cache.usage.referenced == 0
