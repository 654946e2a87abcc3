"""Serving without a model: requests whose lengths nobody knows in advance, and one memory that they share."""

import itertools
import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from phase0_request.request import Request
from phase1_kv_pool.lab.memories import Memory

PROMPT_SIGMA = 1.0  # of the logarithm of a prompt's length: one in six is 2.7 times as long as the median, or longer


@dataclass(frozen=True, slots=True)
class Job:
    """One request as fate knows it. Whoever gives out memory sees the prompt, then a token a step, then the end."""

    number: int
    prompt: int
    length: int  # tokens at the end: prompt and answer
    arrival: int = 0  # the step in which it comes

    def __post_init__(self) -> None:
        if not 1 <= self.prompt < self.length:
            raise ValueError(f"job {self.number}: a prompt of {self.prompt} tokens cannot end at {self.length}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Prompts of log-normal length, answers of geometric length; what passes max_context is cut."""

    num_requests: int = 2000
    median_prompt: int = 128
    mean_answer: int = 200
    max_context: int = 2048
    arrival_rate: float = 0.0  # requests a step, at random moments; 0: all are there at the start
    seed: int = 0

    def __post_init__(self) -> None:
        lowest = {"num_requests": 1, "median_prompt": 1, "mean_answer": 2, "max_context": 2, "arrival_rate": 0}
        for name, low in lowest.items():
            given = getattr(self, name)
            if not low <= given < math.inf:
                raise ValueError(f"{name.replace('_', '-')} must be at least {low} and finite, got {given}")

    def jobs(self) -> tuple[Job, ...]:
        """The same for the same seed, in order of arrival."""
        rng = random.Random(self.seed)
        rate = self.arrival_rate
        moments = itertools.accumulate(rng.expovariate(rate) if rate else 0.0 for _ in range(self.num_requests))
        return tuple(self._job(number, int(moment), rng) for number, moment in enumerate(moments))

    def _job(self, number: int, arrival: int, rng: random.Random) -> Job:
        prompt = round(rng.lognormvariate(math.log(self.median_prompt), PROMPT_SIGMA))
        prompt = min(max(prompt, 1), self.max_context - 1)
        # A whole part of an exponential is geometric; this rate gives it the mean asked for.
        answer = 1 + int(rng.expovariate(math.log(self.mean_answer / (self.mean_answer - 1))))
        return Job(number, prompt, min(prompt + answer, self.max_context), arrival)


@dataclass(slots=True, eq=False)
class Live:
    """A job that has come. `tokens` are those known so far; while it runs, the memory holds them all."""

    job: Job
    request: Request
    tokens: int

    @classmethod
    def of(cls, job: Job) -> "Live":
        return cls(job, Request(f"r{job.number}", (0,) * job.prompt), job.prompt)


class Serving:
    """First come, first served, a token for everyone in every step; the same rules whatever the memory.

    A step: those who are done leave; everyone running gets room for one token more; who waits is admitted, in order,
    as long as what the next one has so far fits. When there is no room to grow, the youngest that runs is preempted:
    it gives back all it holds and goes to the front of the queue, to be computed anew when it is admitted again. That
    is repeated until there is room, or until the one that wanted to grow was the youngest itself. A step that preempts
    admits nobody, or the preempted would be back at once. The oldest always moves on, so everyone ends.
    """

    def __init__(self, memory: Memory, jobs: Iterable[Job]) -> None:
        self.memory = memory
        self.coming = deque(sorted(jobs, key=lambda job: job.arrival))
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []  # oldest first
        self.done: list[Live] = []
        self.steps = 0
        self.preemptions = 0
        self.recomputed = 0  # tokens whose work preemptions threw away

    @property
    def unfinished(self) -> bool:
        return bool(self.coming or self.waiting or self.running)

    @property
    def tokens(self) -> int:
        """Slots that hold a token."""
        return sum(live.tokens for live in self.running)

    def step(self) -> None:
        while self.coming and self.coming[0].arrival <= self.steps:
            self.waiting.append(Live.of(self.coming.popleft()))
        before = self.preemptions
        self._leave()
        self._grow()
        if self.preemptions == before:
            self._admit()
        self.steps += 1

    def _leave(self) -> None:
        ended = [live for live in self.running if live.tokens == live.job.length]
        for live in ended:
            self.memory.release(live.request)
        if ended:
            self.running = [live for live in self.running if live.tokens < live.job.length]
            self.done += ended

    def _grow(self) -> None:
        turn = 0
        while turn < len(self.running):
            live = self.running[turn]
            if self.memory.grow(live.request, live.tokens + 1):
                live.tokens += 1
                turn += 1
            else:
                self._preempt_youngest()  # which may be this one, and then its turn is over

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

    def _too_small(self, live: Live, tokens: int) -> ValueError:
        return ValueError(
            f"request {live.request.id} with {tokens} tokens is alone in {self.memory.slots} slots, no room"
        )
