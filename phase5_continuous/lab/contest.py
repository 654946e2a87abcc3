"""The capstone's contest: entries, traces and scores. Simulated, so a row is the same on every machine.

An entry is a policy, an eviction order and a way to share between tenants. Each may be the reader's own; the scheduler,
the loop and the chunker are those of the engine.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.fairness import FairQueues, FairShare
from phase5_continuous.extras.invariants import check
from phase5_continuous.lab import fairness
from phase5_continuous.lab.simulator import Setting, Simulation
from phase5_continuous.lab.stats import SLO
from phase5_continuous.lab.traces import EOS, WORD, Arrival, Trace
from phase5_continuous.policies import ByPriority, FirstComeFirstServed, LongestPrefixFirst, Policy
from phase5_continuous.scheduler import Scheduler

GOAL = SLO(ttft=1.0, gap=0.05)
LONGEST_WAIT = 20.0  # seconds to the first admission; a policy that lets a request wait longer starves it
CHECKED = 64  # steps between two checks of the invariants
SHARES = ("bursty", "long prompts", "shared prefixes", "tenants", "fairness", "hit rate")  # their mean is the score
DOCUMENTS, DOCUMENT = 40, 1536  # of the trace of shared prefixes, and the tokens of each
CONTENDED = 4.0  # seconds in which all tenants of the last trace have requests waiting


class EntryError(Exception):
    """An entry broke a rule of the contest."""


@dataclass(frozen=True)
class Entry:
    """What competes."""

    name: str
    policy: Callable[[], Policy] = FirstComeFirstServed
    cache: Callable[[int, int], PagedCache] = PrefixCache
    share: Callable[[], FairShare] = FairShare
    tenants: bool = True  # False: all requests count as those of one tenant

    def scheduler(self, pages: int, page_size: int, budget: TokenBudget, max_running: int) -> Scheduler:
        policy = CheckedPolicy(self.policy())
        cache, turns = self.cache(pages, page_size), lambda limit: FairQueues(limit, self.share())
        return Scheduler(cache, [EOS], budget, policy=policy, turns=turns, max_running=max_running)


OURS = (
    Entry("one queue", tenants=False),
    Entry("fcfs"),
    Entry("priority", ByPriority),
    Entry("longest-prefix", LongestPrefixFirst),
)


class CheckedPolicy(Policy):
    """A policy that raises if the one it wraps returns anything but a finite number."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def bound(self) -> float:
        return self.policy.bound

    def rank(self, request: Request) -> float:
        return self._finite("rank", self.policy.rank(request), request)

    def head_start(self, request: Request, cache: PagedCache) -> float:
        return self._finite("head_start", self.policy.head_start(request, cache), request)

    def _finite(self, name: str, seconds: float, request: Request) -> float:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
            raise EntryError(f"{name} must return a finite number, got {seconds!r} for request {request.id}")
        return seconds


# The traces: name, and the arrivals for a number of requests and a rate.


def bursty(requests: int, rate: float) -> list[Arrival]:
    """Calms and bursts: the engine is idle at one moment and far above its capacity at the next."""
    return [*Trace(kind="bursty", requests=requests, rate=rate, seed=7).arrivals()]


def long_prompts(requests: int, rate: float) -> list[Arrival]:
    """Short questions, and among them one document in ten that is thirty times as long."""
    few = requests // 10
    short = Trace(requests=requests - few, rate=0.9 * rate, prompt=96, answer=64, seed=11)
    long = Trace(requests=few, rate=0.1 * rate, prompt=3072, spread=0.4, max_prompt=8192, answer=32, seed=12)
    unique = (a._replace(prompt=(4096 + a.prompt[0], *a.prompt[1:])) for a in long.arrivals())
    return sorted(chain(short.arrivals(), unique), key=lambda arrival: arrival.time)


def shared_prefixes(requests: int, rate: float) -> list[Arrival]:
    """Questions about documents, some of which are asked about far more often than others. A prompt is a document and a
    question, and not all documents fit into the cache at once."""
    rng, now, come = random.Random(5), 0.0, []
    popular = [1 / (number + 1) for number in range(DOCUMENTS)]
    for number in range(requests):
        now += rng.expovariate(rate)
        (document,) = rng.choices(range(DOCUMENTS), popular)
        question = (2 + DOCUMENTS + number, *(WORD,) * rng.randint(15, 95))
        prompt = (2 + document, *(WORD,) * (DOCUMENT - 1), *question)
        come.append(Arrival(now, prompt, rng.randint(16, 96)))
    return come


def tenants(requests: int, rate: float) -> list[Arrival]:
    """Three tenants that send all their requests at once, of very different sizes, and one that asks now and then."""
    sizes = {"chats": (128, 128), "documents": (1024, 32), "essays": (32, 512)}
    count = requests // 4
    floods = (fairness.arrivals(name, [0.0] * count, *size) for name, size in sizes.items())
    modest = fairness.arrivals("modest", [4 * number / rate for number in range(count)], 128, 48)
    return sorted(chain(*floods, modest), key=lambda arrival: arrival.time)


TRACES: dict[str, tuple[Callable[[int, float], list[Arrival]], int, float]] = {
    "bursty": (bursty, 500, 150.0),
    "long prompts": (long_prompts, 300, 105.0),
    "shared prefixes": (shared_prefixes, 400, 72.0),
    "tenants": (tenants, 320, 20.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Setting):
    """The simulated machine: an 8B model on one large GPU, with room for 48 requests and few pages."""

    entry: Entry = OURS[0]
    pages: int = 1536
    max_running: int = 48

    def scheduler(self) -> Scheduler:
        budget = TokenBudget(self.chunk, self.budget)
        return self.entry.scheduler(self.pages, self.page_size, budget, self.max_running)


@dataclass
class Run:
    """Counts what one trace's requests got."""

    met: int = 0
    ended: int = 0
    longest_wait: float = 0.0
    computed: Counter[str] = field(default_factory=Counter)  # tokens in the contended seconds, by tenant

    def end(self, request: Request) -> None:
        times = request.times
        self.ended += 1
        self.met += GOAL.met(request)
        self.longest_wait = max(self.longest_wait, times.queue_time or 0.0)

    @property
    def attainment(self) -> float:
        """The share of the requests that met the SLO."""
        return self.met / self.ended if self.ended else 0.0

    @property
    def fairness(self) -> float:
        """Jain's index of the tokens that the tenants with a flood of requests got: 1 if equal, 1/3 if one has all."""
        got = [self.computed[name] for name in ("chats", "documents", "essays")]
        return sum(got) ** 2 / (len(got) * sum(n * n for n in got)) if any(got) else 0.0


def play(entry: Entry, arrivals: Sequence[Arrival]) -> tuple[Run, float]:
    """Serve a trace on the simulated machine. Returns also the hit rate. EntryError if a request starves."""
    longest = max(arrival.answer for arrival in arrivals)
    come = arrivals if entry.tenants else [arrival._replace(tenant="") for arrival in arrivals]
    simulation, run = Simulation(come, Machine(entry=entry, max_tokens=longest)), Run()
    scheduler = simulation.scheduler
    assert isinstance(scheduler, Scheduler)
    while simulation.going:
        step = simulation.step()
        if step is None:
            continue
        if simulation.core.steps % CHECKED == 0:
            check(scheduler)
        for request, _, length, _ in step.batch:
            if simulation.clock.now <= CONTENDED:
                run.computed[arrivals[int(request.id[1:])].tenant] += length
        for event in step.events:
            if event.finish_reason is not None:
                run.end(event.request)
        if simulation.clock.now > arrivals[-1].time + 2 * LONGEST_WAIT:
            waiting = len(scheduler.sequences)
            raise EntryError(f"{waiting} requests have not ended {2 * LONGEST_WAIT:.0f} seconds after the last arrival")
    check(scheduler)
    if run.longest_wait > LONGEST_WAIT:
        raise EntryError(f"a request waited {run.longest_wait:.0f} seconds; at most {LONGEST_WAIT:.0f} are allowed")
    if (refused := len(arrivals) - run.ended) > 0:
        raise EntryError(f"{refused} requests were refused: the cache must have room for every prompt")
    cache = scheduler.cache
    return run, cache.counts.hit_rate if isinstance(cache, PrefixCache) else 0.0


def score(entry: Entry) -> dict[str, float]:
    """Play all traces. The score is the mean of six shares: the requests that met the SLO on each trace, fairness
    between tenants, and the hit rate on shared prefixes."""
    shares: dict[str, float] = {}
    longest = 0.0
    for name, (trace, requests, rate) in TRACES.items():
        run, hits = play(entry, trace(requests, rate))
        shares[name] = run.attainment
        longest = max(longest, run.longest_wait)
        if name == "shared prefixes":
            shares["hit rate"] = hits
        if name == "tenants":
            shares["fairness"] = run.fairness
    ordered = {name: round(shares[name], 4) for name in SHARES}
    return {"score": round(100 * sum(ordered.values()) / len(ordered), 2), **ordered, "longest wait": round(longest, 2)}
