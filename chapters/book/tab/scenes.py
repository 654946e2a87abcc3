"""Scenes: an engine that serves made-up requests, as a reader sets it. Its model computes nothing, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phase0_request.batch import Batch, StepOutput
from phase0_request.core import EngineCore
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.connect import turns
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.recorder import Recorder
from phase5_continuous.policies import POLICIES
from phase5_continuous.scheduler import Scheduler

STEP, TOKEN = 0.008, 0.0001  # seconds: a step, and what each token adds to it
WORD = 100
LONGEST = 4000  # steps


@dataclass(frozen=True)
class Scene:
    """What a reader can set."""

    requests: int = 12
    every: int = 2  # steps between two arrivals
    prompt: int = 48  # tokens of the average prompt
    answer: int = 24
    shared: int = 0  # tokens that all requests of a group begin with
    groups: int = 1
    long: int = 0  # the prompt of one more request, which arrives in the middle
    greedy: int = 0  # requests of another tenant, at once
    pages: int = 64
    page_size: int = 16
    running: int = 8
    budget: int = 64
    chunk: int = 32
    policy: str = "fcfs"
    cache: str = "prefix"
    batching: str = "continuous"


class Clock:
    """Time passes only with steps."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Filling:
    """A runner whose answers are all one word."""

    clock: Clock

    def pack(self, batch: Batch) -> Batch:
        return batch

    def launch(self, batch: Batch) -> Filled:
        self.clock.now += STEP + TOKEN * batch.num_tokens
        return Filled([WORD if part.completes else None for part in batch])


@dataclass
class Filled:
    tokens: list[int | None]

    def output(self) -> StepOutput:
        return StepOutput(self.tokens)


def play(controls: Mapping[str, Any]) -> list[Line]:
    """The record of an engine that serves the requests of a scene."""
    scene, lines = Scene(**controls), list[Line]()
    core = engine(scene)
    Recorder(core, lines.append)
    arrivals, steps = list(requests(scene)), 0
    while (arrivals or core.has_work) and steps < LONGEST:
        while arrivals and (arrivals[0][0] <= steps or not core.has_work):
            request = arrivals.pop(0)[1]
            request.arrival = core.clock()
            core.submit(request)
        core.step()
        steps += 1
    return lines


def engine(scene: Scene) -> EngineCore[StaticScheduler | Scheduler, Batch]:
    cache = (PrefixCache if scene.cache == "prefix" else PagedCache)(scene.pages, scene.page_size)
    scheduler: StaticScheduler | Scheduler
    if scene.batching == "static":
        scheduler = StaticScheduler(cache, batch_size=scene.running)
    else:
        budget = TokenBudget(min(scene.chunk, scene.budget), scene.budget)
        policy = POLICIES[scene.policy]()
        scheduler = Scheduler(cache, (), budget, policy=policy, turns=turns(), max_running=scene.running)
    clock = Clock()
    return EngineCore(scheduler, Filling(clock), clock)


def requests(scene: Scene) -> Iterator[tuple[int, Request]]:
    """The requests and the steps at which they arrive, in order."""
    drawn, most = random.Random(1), scene.pages * scene.page_size

    def around(mean: int) -> int:
        return max(1, round(mean * drawn.uniform(0.4, 1.6)))

    def made(name: str, tokens: Sequence[int], **more: Any) -> Request:
        answer = min(around(scene.answer), max(1, most - len(tokens)))
        return Request(name, tuple(tokens[: most - answer]), SamplingParams(max_tokens=answer), **more)

    prefixes = [[drawn.randrange(3, 4000) for _ in range(scene.shared)] for _ in range(scene.groups)]
    for number in range(scene.requests):
        own = [drawn.randrange(3, 4000) for _ in range(around(scene.prompt))]
        prefix = prefixes[number % scene.groups]
        yield number * scene.every, made(f"{number}", [*prefix, *own], priority=number % 3 - 1)
        if number == scene.requests // 2:
            if scene.long:
                yield number * scene.every, made("long", [drawn.randrange(3, 4000) for _ in range(scene.long)])
            for each in range(scene.greedy):
                own = [drawn.randrange(3, 4000) for _ in range(around(scene.prompt))]
                yield number * scene.every, made(f"greedy {each}", own, tenant="greedy")
