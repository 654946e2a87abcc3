"""The demo's simulation: records what each request did in each step. Step times come from the cost model."""

import math
from collections import deque
from dataclasses import dataclass, field

from phase0_request.core import Step
from phase0_request.request import RequestState
from phase2_prefill_decode.lab.roofline import DEVICES
from phase5_continuous.lab.simulator import Setting, Simulation
from phase5_continuous.lab.traces import KINDS, Trace
from phase5_continuous.policies import POLICIES
from phase5_continuous.scheduler import Scheduler

WAITING, PREFILL, DECODE, PREEMPTED, LEFT_OUT = "\u00b7", "\u2592", "\u2588", "x", "-"
SIGNS = {WAITING: "waiting", PREFILL: "prefill", DECODE: "decode", PREEMPTED: "preempted", LEFT_OUT: "left out"}
WINDOW = 400  # steps that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """The options of the demo: arrivals, engine, and speed."""

    kind: str = "poisson"
    requests: int = 60
    rate: float = 40.0
    policy: str = "fcfs"
    pages: int = 64
    page_size: int = 16
    max_running: int = 12
    chunk: int = 64
    budget: int = 96
    seed: int = 0
    steps_per_second: float = 15.0

    def __post_init__(self) -> None:
        if not 0 < self.steps_per_second < math.inf:
            raise ValueError(f"steps-per-second must be above 0 and finite, got {self.steps_per_second}")
        if self.kind not in KINDS:
            raise ValueError(f"a trace is one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.policy not in POLICIES:
            raise ValueError(f"a policy is one of {', '.join(POLICIES)}, got {self.policy!r}")

    def trace(self) -> Trace:
        return Trace(
            kind=self.kind, requests=self.requests, rate=self.rate, prompt=60, answer=30, max_prompt=300,
            max_answer=100, seed=self.seed,
        )  # fmt: skip

    def simulation(self) -> Simulation:
        trace = self.trace()
        setting = Setting(
            way=self.policy, model="8b", device=DEVICES["H100 SXM"], pages=self.pages, page_size=self.page_size,
            max_running=self.max_running, chunk=self.chunk, budget=self.budget, max_tokens=trace.max_answer,
        )  # fmt: skip
        return Simulation(trace.arrivals(), setting)


@dataclass(slots=True)
class Strip:
    """One request over time: a sign for each step, from its first on."""

    name: str
    first: int
    signs: list[str] = field(default_factory=list)

    def window(self, start: int, stop: int) -> str:
        """The steps from `start` up to `stop`; blank before its arrival and after its end."""
        return "".join(
            self.signs[step - self.first] if 0 <= step - self.first < len(self.signs) else " "
            for step in range(start, stop)
        )


class World:
    """A simulation with a record of its last steps."""

    def __init__(self, show: Show) -> None:
        self.show = show
        self.simulation = show.simulation()
        scheduler = self.simulation.scheduler
        assert isinstance(scheduler, Scheduler)
        self.scheduler = scheduler
        self.strips: dict[str, Strip] = {}  # in the order of arrival
        self.pages: deque[int] = deque(maxlen=WINDOW)  # in use in each step
        self.tokens: deque[int] = deque(maxlen=WINDOW)  # computed
        self.ended: deque[float] = deque(maxlen=WINDOW)  # when each step ended
        self.output_tokens: deque[int] = deque(maxlen=WINDOW)  # of each step
        self.last: Step | None = None

    @property
    def going(self) -> bool:
        return self.simulation.going

    @property
    def steps(self) -> int:
        return self.simulation.core.steps

    def step(self) -> None:
        """Run the next step that computes something; idle time is skipped."""
        while self.going:
            before = {sequence.request.id: sequence.request.state for sequence in self.scheduler.sequences}
            step = self.simulation.step()
            if step is not None and step.batch:
                self._remember(step, before)
                return

    def throughput(self, seconds: float = 1.0) -> float:
        """Output tokens a second, over the last seconds."""
        now = self.simulation.clock.now
        recent = [tokens for end, tokens in zip(self.ended, self.output_tokens, strict=True) if end > now - seconds]
        return sum(recent) / min(seconds, now) if now else 0.0

    def _remember(self, step: Step, before: dict[str, RequestState]) -> None:
        self.last = step
        self.pages.append(step.pages)
        self.tokens.append(step.prefill_tokens + step.decode_tokens)
        self.ended.append(self.simulation.clock.now)
        self.output_tokens.append(sum(event.token is not None for event in step.events))
        took_part = {
            request.id: DECODE if length == 1 and start >= len(request.prompt_tokens) else PREFILL
            for request, start, length in step.batch
        }
        idle = {RequestState.PREEMPTED: PREEMPTED, RequestState.RUNNING: LEFT_OUT}
        states = before | {sequence.request.id: sequence.request.state for sequence in self.scheduler.sequences}
        for name, state in states.items():
            strip = self.strips.setdefault(name, Strip(name, self.steps - 1))
            strip.signs.append(took_part.get(name) or idle.get(state, WAITING))
        gone = [name for name, strip in self.strips.items() if strip.first + len(strip.signs) < self.steps - WINDOW]
        for name in gone:
            del self.strips[name]
