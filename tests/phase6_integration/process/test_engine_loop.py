"""The loop of the engine process: when it waits for messages, what it does with them, and what it reports of steps."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from phase0_request import Batch, FinishReason, Request, SamplingParams, StepOutput, TokenLogprobs
from phase0_request.core import EngineCore
from phase2_prefill_decode.extras.outcome import outcome_of
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.record.recorder import Recorder
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.engine_process import Loop
from phase6_integration.process.messages import (
    Channel,
    EngineRequest,
    Finish,
    LoadModel,
    Ping,
    Pong,
    Progress,
    Recorded,
    Update,
    Watch,
)
from tests.phase5_continuous.support import PackedBatch

FIRST = 100  # the tokens of every answer: 100, 101, 102, ...


@dataclass
class Step(PackedBatch):
    grammars: "Compiled | None" = None

    def output(self) -> StepOutput:
        tokens = [FIRST + len(piece.request.output_tokens) if piece.completes else None for piece in self.batch]
        scored = [n for n, piece in enumerate(self.batch) if piece.request.params.prompt_logprobs is not None]
        scores = {n: [TokenLogprobs(-1.0, ())] * (self.batch.slices[n].length - 1) for n in scored}
        late = {}
        if self.grammars is not None and not self.grammars.ready:
            late = {n: self.grammars for n, piece in enumerate(self.batch) if piece.request.params.grammar}
        output = StepOutput(tokens)
        for n, found in scores.items():
            if found:
                outcome_of(output, n).prompt_logprobs = found
        for n, grammars in late.items():
            outcome_of(output, n).late = grammars
        return output


@dataclass
class Runner:
    grammars: "Compiled | None" = None

    def pack(self, batch: Batch) -> Step:
        return Step(batch, self.grammars)

    def launch(self, step: Step) -> Step:
        return step


@dataclass
class Line:
    """The channel: what arrives at each `receive`, and what was sent. When an idle engine has nothing left to wait for,
    the HTTP process closes it."""

    arrivals: deque[list[Any]]
    core: EngineCore[Scheduler, Step]
    sent: list[Any] = field(default_factory=list)
    waited: int = 0

    def receive(self, wait: bool, timeout: float | None = None) -> list[Any]:
        if not self.core.has_work:
            assert wait, "an idle engine polls for messages: it must wait for one"
        elif not cast(Scheduler, self.core.scheduler).is_waiting:
            assert not wait, "the engine waits for messages while it has requests"
        self.waited += wait
        if wait and not self.arrivals:
            raise EOFError
        return self.arrivals.popleft() if self.arrivals else []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def idle_loop(grammars: "Compiled | None" = None, now: float = 1.0) -> tuple[Loop, Line]:
    """A loop that has had no messages yet."""
    scheduler = Scheduler(PrefixCache(8, 4), budget=TokenBudget(32, 32))
    core = EngineCore(scheduler, Runner(grammars), clock=lambda: now)
    line = Line(deque(), core)
    return Loop(cast(Channel, line), core, grammars), line


def run(*arrivals: list[Any], now: float = 1.0) -> tuple[Loop, Line]:
    """Run the loop until it is idle and all messages have come: one list at each time that it looks."""
    loop, line = idle_loop(now=now)
    line.arrivals.extend(arrivals)
    with pytest.raises(EOFError):
        loop.run()
    return loop, line


def ask(id: str, prompt: int = 3, max_tokens: int = 3, **more: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=more.pop("prompt_logprobs", None))
    return EngineRequest(id, [tuple(range(5, 5 + prompt))], params, [max_tokens], **more)


def updates(line: Line) -> list[Update]:
    return [message for message in line.sent if isinstance(message, Update)]


def progress(line: Line) -> list[Progress]:
    return [progress for update in updates(line) for progress in update.progress]


def tokens(line: Line, id: str) -> list[int]:
    return [new.token for new in progress(line) if new.id == f"{id}-0" and new.token is not None]


def ends(line: Line) -> dict[str, FinishReason]:
    ended = [(new.id, new.finish_reason) for new in progress(line) if new.finish_reason is not None]
    assert len(dict(ended)) == len(ended), f"a request has ended twice: {ended}"
    return {id.removesuffix("-0"): reason for id, reason in ended}


def admitted(line: Line) -> list[tuple[str, float, int]]:
    return [(new.id, new.admitted, new.cached) for new in progress(line) if new.admitted is not None]


def test_each_step_is_reported_in_one_message_and_each_token_once() -> None:
    loop, line = run([ask("a", max_tokens=3), ask("b", max_tokens=2)])
    assert (tokens(line, "a"), tokens(line, "b")) == ([100, 101, 102], [100, 101])
    assert ends(line) == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}
    first, second, third = updates(line)
    ids = [[new.id for new in update.progress if new.token is not None] for update in (first, second, third)]
    assert ids == [["a-0", "b-0"], ["a-0", "b-0"], ["a-0"]], "the token that ends a request is reported too"
    assert (first.prefill_tokens, first.decode_tokens, second.prefill_tokens, second.decode_tokens) == (6, 0, 0, 2)
    assert [new.finish_reason for new in second.progress] == [None, FinishReason.LENGTH]
    assert (first.gauges.running, third.gauges.running, third.gauges.pages_used) == (2, 0, 0)
    assert line.waited == 2, "it waits for the first message, and again when both requests have ended"
    assert not loop._requests, f"requests that have ended are still known: {[*loop._requests]}"


def test_a_request_is_announced_once_in_the_step_that_admits_it_with_its_cached_tokens() -> None:
    _, line = run([ask("a", prompt=9)], [ask("b", prompt=9, arrival=0.5)])
    assert admitted(line) == [("a-0", 1.0, 0), ("b-0", 1.0, 8)], "two full pages of b are cached"
    first, second, *_ = updates(line)
    assert (first.progress[0].admitted, second.progress[0].admitted) == (1.0, 1.0), "ahead of its first token"


def test_messages_are_read_between_two_steps() -> None:
    finish = Finish("a-0", FinishReason.STOP)
    _, line = run([ask("a", max_tokens=20)], [Ping()], [], [finish, Finish("unknown-0", FinishReason.ABORT)], [finish])
    assert ends(line) == {"a": FinishReason.STOP}
    assert tokens(line, "a") == [100, 101, 102], "three steps were run before the message came"
    assert line.sent.index(Pong()) == 1, "a ping is answered after the first step, not at the end"


def test_a_request_that_the_engine_refuses_ends_at_once_and_leaves_nothing() -> None:
    loop, line = run([ask("large", prompt=40)], [ask("a", max_tokens=1)])
    refused, served = updates(line)
    (ended,) = refused.progress
    assert (ended.id, ended.finish_reason, ended.token) == ("large-0", FinishReason.ERROR, None)
    assert "can never be served: its prompt has 40 tokens" in str(ended.error)
    assert (refused.at, refused.seconds) == (1.0, 0.0), "the time of a refusal is that of the core's clock"
    assert {new.id for new in served.progress} == {"a-0"}
    assert not loop._requests


def test_a_deadline_is_that_of_the_request_and_one_that_was_never_admitted_is_not_announced() -> None:
    loop, line = run([ask("late", timeout=5.0), ask("patient", timeout=50.0, max_tokens=1), ask("free")], now=10.0)
    assert ends(line) == {"late": FinishReason.TIMEOUT, "patient": FinishReason.LENGTH, "free": FinishReason.LENGTH}
    assert [id for id, *_ in admitted(line)] == ["patient-0", "free-0"]
    assert not loop._unannounced, f"ended requests are still to be announced: {[*loop._unannounced]}"


def test_prompt_logprobs_come_with_the_first_token_only() -> None:
    _, line = run([ask("scored", prompt=4, prompt_logprobs=0), ask("plain", prompt=4)])
    found = [(new.id, new.prompt_logprobs) for new in progress(line) if new.token is not None][:4]
    wanted = [("scored-0", [TokenLogprobs(-1.0, ())] * 3), ("plain-0", None), ("scored-0", None), ("plain-0", None)]
    assert found == wanted, "a request that has none says None, not []; one that has some says them once"


def test_an_engine_is_loaded_once() -> None:
    with pytest.raises(ValueError, match="an engine can be loaded only once"):
        idle_loop()[0].handle(LoadModel(EngineOptions(), "a:b"))


# Requests that wait for their grammars, and what is done for these beside the steps.


class Compiled:
    """Grammars that are compiled when a test says so."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.ready = False
        self.arrives = False  # between two turns

    def fileno(self) -> int:
        raise NotImplementedError

    def prepare(self, request: Request) -> None:
        self.prepared.append(request.id)

    def receive(self, scheduler: Scheduler, now: float) -> None:
        self.ready = self.ready or self.arrives

    def done(self) -> bool:
        return self.ready


def bound(id: str, **more: Any) -> EngineRequest:
    return EngineRequest(id, [(5, 6, 7)], SamplingParams(max_tokens=3, grammar="g"), [3], **more)


def with_grammars() -> tuple[Loop, Line, Compiled]:
    grammars = Compiled()
    loop, line = idle_loop(grammars)
    return loop, line, grammars


def test_a_request_waits_for_its_grammar_and_the_others_go_on() -> None:
    loop, line, grammars = with_grammars()
    for message in (bound("a"), ask("b", max_tokens=9)):
        loop.handle(message)
    assert grammars.prepared == ["a-0"], "it is compiled while the prompt is computed"
    for _ in range(4):
        loop.turn()
    assert (tokens(line, "a"), len(tokens(line, "b"))) == ([], 4)
    grammars.ready = True
    loop.turn()
    assert (tokens(line, "a"), len(tokens(line, "b"))) == ([100], 5)


def test_a_request_can_be_ended_while_its_grammar_is_compiled() -> None:
    loop, line, _ = with_grammars()
    loop.handle(bound("a"))
    loop.turn()
    loop.handle(Finish("a-0", FinishReason.ABORT))
    loop.turn()
    assert ends(line) == {"a": FinishReason.ABORT}
    assert not loop.core.has_work


def test_an_engine_in_which_all_wait_for_grammars_sleeps() -> None:
    loop, line, grammars = with_grammars()
    line.arrivals.extend([[bound("a")], [], []])
    with pytest.raises(EOFError):
        loop.run()
    assert line.waited == 3, "for the first message, and in each turn after the one that computed the prompt"
    assert tokens(line, "a") == []
    grammars.ready = True
    loop.turn()
    assert tokens(line, "a") == [100]


def test_an_answer_that_arrives_between_two_turns_is_seen_before_the_engine_sleeps() -> None:
    loop, line, grammars = with_grammars()
    loop.handle(bound("a"))
    loop.turn()
    grammars.arrives = True
    loop.turn()
    assert tokens(line, "a") == [100], "nothing else would wake it"


# Those who watch.


def snapshots(line: Line) -> int:
    return sum("snapshot" in message.line for message in line.sent if isinstance(message, Recorded))


def watched_loop(now: list[float]) -> tuple[Loop, Line]:
    """A loop with something to tell, and one reader of its record."""
    loop, line = idle_loop()
    loop.core.clock = lambda: now[0]
    loop.handle(ask("a", max_tokens=1))
    loop.turn()
    loop.handle(Watch(True))
    loop.turn()
    assert snapshots(line) == 1
    return loop, line


def test_readers_that_come_together_share_a_snapshot_and_those_after_them_wait_a_second() -> None:
    """Fault: each of thousands of connections made the step thread write the whole cache."""
    loop, line = watched_loop(now := [1.0])
    for now[0] in (1.1, 1.2, 1.9):
        for _ in range(100):
            loop.handle(Watch(True))
        loop.turn()
    assert snapshots(line) == 1
    now[0] = 2.0
    loop.turn()
    loop.turn()
    assert snapshots(line) == 2


def test_a_snapshot_that_waits_is_written_by_an_idle_engine_too() -> None:
    loop, line = watched_loop(now := [1.0])
    timeouts: list[float | None] = []

    def receive(wait: bool, timeout: float | None = None) -> list[Any]:
        timeouts.append(timeout)
        if timeout is None:
            raise EOFError  # it sleeps until a message comes
        now[0] += timeout
        return []

    line.receive = receive  # type: ignore[method-assign]
    loop.handle(Watch(True))
    with pytest.raises(EOFError):
        loop.run()
    assert snapshots(line) == 2
    assert len(timeouts) < 5


def test_no_snapshot_is_written_for_readers_that_have_left() -> None:
    loop, line = watched_loop(now := [1.0])
    before = len(line.sent)
    for _ in range(100):
        loop.handle(Watch(False))
        loop.handle(Watch(True))
    loop.handle(Watch(False))
    now[0] = 9.0
    loop.turn()
    assert len(line.sent) == before


def test_a_snapshot_that_takes_long_is_followed_by_a_longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a large cache, written once a second, would leave the steps no time."""
    loop, line = watched_loop(now := [1.0])
    snapshot = Recorder.snapshot

    def slow(recorder: Recorder) -> None:
        snapshot(recorder)
        now[0] += 0.5

    monkeypatch.setattr(Recorder, "snapshot", slow)
    for now[0] in (2.0, 5.0, 12.0, 13.0):
        loop.handle(Watch(True))
        loop.turn()
    assert snapshots(line) == 3, "at 2, not at 5, and at 12.5"
