"""The loop of the engine process over a channel and a runner that are scripts."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from phase0_request import Batch, Request, SamplingParams, StepOutput, TokenLogprobs
from phase0_request.core import CoreObserver, EngineCore
from phase2_prefill_decode.extras.outcome import outcome_of
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.loop_hooks import Extra, LoopHooks, Send
from phase6_integration.process.engine_process import Loop
from phase6_integration.process.messages import Channel, EngineRequest, Progress, Update
from tests.phase5_continuous.support import PackedBatch

FIRST = 100  # the tokens of every answer: 100, 101, 102, ...
POLLS = 1000  # no script has as many messages


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
    polls: int = 0

    def receive(self, wait: bool, timeout: float | None = None) -> list[Any]:
        self.polls += 1
        assert self.polls < POLLS, (
            f"the loop looked for messages {POLLS} times: it neither sleeps nor runs its requests"
        )
        if not self.core.has_work:
            assert wait, "an idle engine polls for messages: it must wait for one"
        elif not cast(Scheduler, self.core.scheduler).has_blocked:
            assert not wait, "the engine waits for messages while it has requests"
        self.waited += wait
        if wait and not self.arrivals:
            raise EOFError
        return self.arrivals.popleft() if self.arrivals else []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def idle_loop(grammars: "Compiled | None" = None, now: float = 1.0, extras: Sequence[Extra] = ()) -> tuple[Loop, Line]:
    """A loop that has had no messages yet."""
    scheduler = Scheduler(PrefixCache(8, 4), budget=TokenBudget(32, 32))
    core = EngineCore(scheduler, Runner(grammars), clock=lambda: now)
    line = Line(deque(), core)
    return Loop(cast(Channel, line), core, extras), line


def ask(id: str, prompt: int = 3, max_tokens: int = 3, **more: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=more.pop("prompt_logprobs", None))
    return EngineRequest(id, [tuple(range(5, 5 + prompt))], params, [max_tokens], **more)


class Compiled(CoreObserver):
    """Grammars that are compiled when a test says so."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.ready = False
        self.arrives = False  # between two turns

    def hooks(self, core: EngineCore[Scheduler, Any], _: Send) -> LoopHooks:
        core.observers.append(self)
        return LoopHooks(before_step=self.receive)

    def submitted(self, request: Request) -> None:
        if request.params.grammar is not None:
            self.prepared.append(request.id)

    def receive(self) -> None:
        self.ready = self.ready or self.arrives

    def done(self) -> bool:
        return self.ready


def run(*arrivals: list[Any], now: float = 1.0, extras: Sequence[Extra] = ()) -> tuple[Loop, Line]:
    """Run the loop until it is idle and all messages have come: one list at each time that it looks."""
    loop, line = idle_loop(now=now, extras=extras)
    line.arrivals.extend(arrivals)
    with pytest.raises(EOFError):
        loop.run()
    return loop, line


def updates(line: Line) -> list[Update]:
    return [message for message in line.sent if isinstance(message, Update)]


def progress(line: Line) -> list[Progress]:
    return [progress for update in updates(line) for progress in update.progress]
