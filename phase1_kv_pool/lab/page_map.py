"""PageMap: simulates the same requests twice, with pages and with contiguous blocks, and maps every page."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from phase0_request.checks import check_int, check_number
from phase1_kv_pool.lab.memories import ContiguousMax, KVMemory, PagedMemory
from phase1_kv_pool.lab.serving import ServingSimulator, SyntheticTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMapConfig:
    """Size of the memory, the trace of requests, and the speed of the animation."""

    pages: int = 128
    page_size: int = 16
    steps_per_second: float = 30.0
    trace: SyntheticTrace = field(
        default_factory=lambda: SyntheticTrace(
            num_requests=80, median_prompt=32, mean_answer=64, max_context=256, arrival_rate=0.6
        )
    )

    def __post_init__(self) -> None:
        for name in ("pages", "page_size"):
            check_int(name.replace("_", "-"), getattr(self, name), 1)
        check_number("steps-per-second", self.steps_per_second, 0, above=True)
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
    """One allocated page: its request, and how many of its slots hold a token."""

    owner: int  # the number of the request
    tokens: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one memory after a step."""

    running: int
    waiting: int
    done: int
    preempted: int  # number of preemptions so far
    used: int  # pages
    free: int
    tokens: int
    wasted: int  # slots reserved without a token


class MemorySimulation:
    """One memory and the simulated requests in it."""

    def __init__(self, name: str, memory: KVMemory, config: PageMapConfig) -> None:
        self.name = name
        self.config = config
        self.simulator = ServingSimulator(memory, config.trace.requests())
        self.most_running = 0
        self._tokens = self._reserved = 0  # summed over the steps

    def step(self) -> None:
        if not self.simulator.unfinished:
            return
        self.simulator.step()
        self.most_running = max(self.most_running, len(self.simulator.running))
        self._tokens += self.simulator.tokens
        self._reserved += self.simulator.memory.reserved

    @property
    def utilisation(self) -> float:
        """The share of allocated slots that held a token, over all steps so far."""
        return self._tokens / self._reserved if self._reserved else 1.0

    def cells(self) -> list[Cell | None]:
        """Every page of the memory in order; None for a free page."""
        size = self.config.page_size
        cells: list[Cell | None] = [None] * self.config.pages
        for active in self.simulator.running:
            left = active.tokens
            for start, length in self.simulator.memory.spans(active.request):
                for page in range(start // size, (start + length) // size):
                    cells[page] = Cell(active.spec.number, min(left, size))
                    left -= min(left, size)
        return cells

    def counts(self) -> Counts:
        simulator, reserved = self.simulator, self.simulator.memory.reserved
        used = reserved // self.config.page_size
        return Counts(
            running=len(simulator.running),
            waiting=len(simulator.waiting),
            done=len(simulator.done),
            preempted=simulator.preemptions,
            used=used,
            free=self.config.pages - used,
            tokens=simulator.tokens,
            wasted=reserved - simulator.tokens,
        )


class PageMap:
    """Both simulations, step by step. `going` until the paged one has served every request."""

    def __init__(self, config: PageMapConfig) -> None:
        self.config = config
        longest, memory = config.trace.max_context, PagedMemory(config.slots, config.page_size)
        self.paged = MemorySimulation(f"pages of {config.page_size}", memory, config)
        self.contiguous = MemorySimulation(f"blocks of {longest}", ContiguousMax(config.slots, longest), config)

    @property
    def simulations(self) -> tuple[MemorySimulation, MemorySimulation]:
        return self.paged, self.contiguous

    @property
    def steps(self) -> int:
        return self.paged.simulator.steps

    @property
    def going(self) -> bool:
        return self.paged.simulator.unfinished

    def step(self) -> None:
        for simulation in self.simulations:
            simulation.step()

    def finish(self) -> None:
        """Run both simulations to their end."""
        for simulation in self.simulations:
            while simulation.simulator.unfinished:
                simulation.step()


def contiguous_runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Group a page table into runs of contiguous pages: (first page, number of pages)."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and page == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((page, 1))
    return found
