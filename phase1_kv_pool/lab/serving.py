"""ServingSimulator: serves requests of unknown lengths from one memory, without a model."""

import itertools
import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from phase0_request.request import Request
from phase0_request.support.checks import check_int, check_number
from phase1_kv_pool.lab.memories import KVMemory

PROMPT_SIGMA = 1.0  # of the logarithm of the prompt length: one prompt in six is 2.7 times the median or longer


class TraceRequest(NamedTuple):
    """One request of a trace. The memory does not know `length` in advance: it sees the prompt, then a token a step."""

    number: int
    prompt: int
    length: int  # tokens at the end: prompt and answer
    arrival: int = 0  # the step in which it arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticTrace:
    """Random request lengths: log-normal prompts, geometric answers, both cut at max_context."""

    num_requests: int = 2000
    median_prompt: int = 128
    mean_answer: int = 200
    max_context: int = 2048
    arrival_rate: float = 0.0  # requests a step, at random times; 0: all at the start
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in {"num_requests": 1, "median_prompt": 1, "mean_answer": 2, "max_context": 2}.items():
            check_int(name.replace("_", "-"), getattr(self, name), low)
        check_number("arrival-rate", self.arrival_rate, 0)

    def requests(self) -> tuple[TraceRequest, ...]:
        """The requests in order of arrival. Deterministic for a seed."""
        rng = random.Random(self.seed)
        rate = self.arrival_rate
        moments = itertools.accumulate(rng.expovariate(rate) if rate else 0.0 for _ in range(self.num_requests))
        return tuple(self._request(number, int(moment), rng) for number, moment in enumerate(moments))

    def _request(self, number: int, arrival: int, rng: random.Random) -> TraceRequest:
        prompt = round(rng.lognormvariate(math.log(self.median_prompt), PROMPT_SIGMA))
        prompt = min(max(prompt, 1), self.max_context - 1)
        # The integer part of an exponential is geometric; this rate gives the requested mean.
        answer = 1 + int(rng.expovariate(math.log(self.mean_answer / (self.mean_answer - 1))))
        return TraceRequest(number, prompt, min(prompt + answer, self.max_context), arrival)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that has arrived. `tokens` is its length so far; while it runs, the memory holds all of them."""

    spec: TraceRequest
    request: Request
    tokens: int

    @classmethod
    def of(cls, spec: TraceRequest) -> "ActiveRequest":
        return cls(spec, Request(f"r{spec.number}", (0,) * spec.prompt), spec.prompt)


class ServingSimulator:
    """First come, first served, one token for each running request in every step; the same rules for every memory.

    A step frees finished requests, grows each running request by one token, and admits waiting requests in order while
    their tokens fit. When a request cannot grow, the youngest running request is preempted: its memory is freed and it
    returns to the front of the queue, to be recomputed later. This repeats until the request can grow or is itself the
    youngest. A step with a preemption admits no request, or the preempted one would return at once. The oldest request
    always makes progress, so every request finishes.
    """

    def __init__(self, memory: KVMemory, requests: Iterable[TraceRequest]) -> None:
        self.memory = memory
        self.coming = deque(sorted(requests, key=lambda request: request.arrival))
        self.waiting: deque[ActiveRequest] = deque()
        self.running: list[ActiveRequest] = []  # oldest first
        self.done: list[ActiveRequest] = []
        self.steps = 0
        self.preemptions = 0
        self.recomputed = 0  # tokens to compute again because of preemptions

    @property
    def unfinished(self) -> bool:
        return bool(self.coming or self.waiting or self.running)

    @property
    def tokens(self) -> int:
        """The number of slots that hold a token."""
        return sum(active.tokens for active in self.running)

    def step(self) -> None:
        while self.coming and self.coming[0].arrival <= self.steps:
            self.waiting.append(ActiveRequest.of(self.coming.popleft()))
        before = self.preemptions
        self._finish()
        self._grow()
        if self.preemptions == before:
            self._admit()
        self.steps += 1

    def _finish(self) -> None:
        ended = [active for active in self.running if active.tokens == active.spec.length]
        for active in ended:
            self.memory.release(active.request)
        if ended:
            self.running = [active for active in self.running if active.tokens < active.spec.length]
            self.done += ended

    def _grow(self) -> None:
        turn = 0
        while turn < len(self.running):
            active = self.running[turn]
            if self.memory.grow(active.request, active.tokens + 1):
                active.tokens += 1
                turn += 1
            else:
                self._preempt_youngest()  # this may be the same request, which ends its turn

    def _preempt_youngest(self) -> None:
        youngest = self.running.pop()
        if not self.running:
            raise self._too_small(youngest, youngest.tokens + 1)
        self.memory.release(youngest.request)
        self.waiting.appendleft(youngest)
        self.preemptions += 1
        self.recomputed += youngest.tokens

    def _admit(self) -> None:
        while self.waiting and self.memory.admit(self.waiting[0].request, self.waiting[0].tokens):
            self.running.append(self.waiting.popleft())
        if self.waiting and not self.running:
            raise self._too_small(self.waiting[0], self.waiting[0].tokens)

    def _too_small(self, active: ActiveRequest, tokens: int) -> ValueError:
        return ValueError(
            f"request {active.request.id} with {tokens} tokens is alone in {self.memory.slots} slots, no room"
        )


class Cell(NamedTuple):
    """One allocated page: the number of its request, and how many of its slots hold a token."""

    owner: int
    tokens: int


def cells(simulator: ServingSimulator, page_size: int) -> list[Cell | None]:
    """Every page of the memory in order; None for a free page. Blocks are drawn as pages, too."""
    pages: list[Cell | None] = [None] * (simulator.memory.slots // page_size)
    for active in simulator.running:
        left = active.tokens
        for start, length in simulator.memory.spans(active.request):
            for page in range(start // page_size, (start + length) // page_size):
                pages[page] = Cell(active.spec.number, min(left, page_size))
                left -= min(left, page_size)
    return pages


def contiguous_runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Group a page table into runs of contiguous pages: (first page, number of pages)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
