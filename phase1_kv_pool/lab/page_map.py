"""The page map: the same requests in the same memory twice, in pages and in blocks of the longest length."""

import math
from dataclasses import dataclass, field

from phase1_kv_pool.lab.memories import ContiguousMax, Memory, Pages
from phase1_kv_pool.lab.serving import Serving, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How large the memory is, who comes, and how fast time goes."""

    pages: int = 128
    page_size: int = 16
    steps_per_second: float = 30.0
    trace: Trace = field(
        default_factory=lambda: Trace(
            num_requests=80, median_prompt=32, mean_answer=64, max_context=256, arrival_rate=0.6
        )
    )

    def __post_init__(self) -> None:
        for name in ("pages", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.steps_per_second < math.inf:
            raise ValueError(f"steps-per-second must be above 0 and finite, got {self.steps_per_second}")
        longest = self.trace.max_context
        if longest % self.page_size:
            raise ValueError(
                f"max-context must be a multiple of page-size, so that blocks and pages are drawn alike; "
                f"got {longest} and {self.page_size}"
            )
        if self.slots < longest:
            raise ValueError(
                f"pages must be at least {longest // self.page_size} to hold {longest} tokens, got {self.pages}"
            )

    @property
    def slots(self) -> int:
        return self.pages * self.page_size


@dataclass(frozen=True, slots=True)
class Cell:
    """A page's worth of slots: whose it is, and how many of them hold a token."""

    owner: int  # the number of the request
    tokens: int


@dataclass(frozen=True, slots=True)
class Counts:
    """One memory at one moment."""

    running: int
    waiting: int
    done: int
    preempted: int  # each time growth was refused, one was
    used: int  # pages
    free: int
    tokens: int
    wasted: int  # slots reserved without a token


class World:
    """One memory, and those who live in it."""

    def __init__(self, name: str, memory: Memory, setting: Setting) -> None:
        self.name = name
        self.setting = setting
        self.serving = Serving(memory, setting.trace.jobs())
        self.most_running = 0
        self._tokens = self._reserved = 0  # summed over the steps

    def step(self) -> None:
        if not self.serving.unfinished:
            return
        self.serving.step()
        self.most_running = max(self.most_running, len(self.serving.running))
        self._tokens += self.serving.tokens
        self._reserved += self.serving.memory.reserved

    @property
    def utilisation(self) -> float:
        """The share of reserved slots that held a token, over all steps so far."""
        return self._tokens / self._reserved if self._reserved else 1.0

    def cells(self) -> list[Cell | None]:
        """Every page of the memory in order; None is a free one."""
        size = self.setting.page_size
        cells: list[Cell | None] = [None] * self.setting.pages
        for live in self.serving.running:
            left = live.tokens
            for start, length in self.serving.memory.spans(live.request):
                for page in range(start // size, (start + length) // size):
                    cells[page] = Cell(live.job.number, min(left, size))
                    left -= min(left, size)
        return cells

    def counts(self) -> Counts:
        serving, reserved = self.serving, self.serving.memory.reserved
        used = reserved // self.setting.page_size
        return Counts(
            running=len(serving.running),
            waiting=len(serving.waiting),
            done=len(serving.done),
            preempted=serving.preemptions,
            used=used,
            free=self.setting.pages - used,
            tokens=serving.tokens,
            wasted=reserved - serving.tokens,
        )


class PageMap:
    """Both worlds, step by step. It is over when the paged one has served everyone; the other is behind by then."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.paged = World(f"pages of {setting.page_size}", Pages(setting.slots, setting.page_size), setting)
        longest = setting.trace.max_context
        self.contiguous = World(f"blocks of {longest}", ContiguousMax(setting.slots, longest), setting)

    @property
    def worlds(self) -> tuple[World, World]:
        return self.paged, self.contiguous

    @property
    def steps(self) -> int:
        return self.paged.serving.steps

    @property
    def going(self) -> bool:
        return self.paged.serving.unfinished

    def step(self) -> None:
        for world in self.worlds:
            world.step()

    def finish(self) -> None:
        """Let each world come to its own end."""
        for world in self.worlds:
            while world.serving.unfinished:
                world.step()
