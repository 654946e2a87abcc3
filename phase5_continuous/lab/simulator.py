"""`python -m phase5_continuous.lab simulator`: compares ways to serve on one trace, with a cost model for the model.

Scheduler, cache and loop are those of the engine. Only the runner differs: it predicts how long each step takes on the
device, and advances the clock by that. Ended requests leave nothing in memory, so a trace may have any length.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track

from phase0_request.core import EngineCore, Step
from phase0_request.lab.report import add_fields, finish, parser, table
from phase0_request.queue import QueueFullError
from phase0_request.support.checks import check_choice
from phase1_kv_pool.cache import PagedCache
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import DEVICES, Device, named
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.scheduler import StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.connect import turns
from phase5_continuous.lab.stats import SLO, Outcome, Stats
from phase5_continuous.lab.traces import EOS, KINDS, Arrival, Trace, load, request
from phase5_continuous.lab.virtual import StepTimes, VirtualClock, VirtualRunner, VirtualStep
from phase5_continuous.policies import policy
from phase5_continuous.scheduler import Scheduler

MODELS = SHAPES | {
    "8b": ModelConfig(
        model_type="qwen3", vocab_size=151_936, num_hidden_layers=36, hidden_size=4096, intermediate_size=12_288,
        num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, qk_norm=True, tie_word_embeddings=False, max_position_embeddings=40_960,
    ),
}  # fmt: skip
WHOLE = 1 << 20  # tokens: a budget that cuts no prompt
WAYS = ("static", "whole", "fcfs", "priority", "longest-prefix")
DEFAULT = Trace(requests=20_000, rate=30.0)  # of the command


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A way to schedule, and the machine that it schedules for.

    static          phase 2's batches, each of which runs until its last request has ended
    whole           continuous batching with whole prompts
    fcfs, priority, longest-prefix      with chunks, under each policy
    """

    way: str = "fcfs"
    model: str = "8b"
    device: Device = DEVICES["H100 SXM"]
    pages: int = 8192
    page_size: int = 16
    max_running: int = 256
    chunk: int = 512
    budget: int = 1024  # tokens a step
    prefix_cache: bool = True
    queue_limit: int | None = None
    launch: float = 0.0  # seconds of the host to launch a step with a prompt, see VirtualRunner
    max_tokens: int = 512  # limit of an answer: the scheduler does not know its length

    def __post_init__(self) -> None:
        check_choice("way", self.way, WAYS)
        check_choice("model", self.model, MODELS)

    def cache(self) -> PagedCache:
        return (PrefixCache if self.prefix_cache else PagedCache)(self.pages, self.page_size)

    def scheduler(self) -> StaticScheduler | Scheduler:
        if self.way == "static":
            return StaticScheduler(self.cache(), [EOS], batch_size=self.max_running, queue_limit=self.queue_limit)
        whole = self.way == "whole"
        return Scheduler(
            self.cache(),
            [EOS],
            TokenBudget(WHOLE, WHOLE) if whole else TokenBudget(self.chunk, self.budget),
            policy=policy("fcfs" if whole else self.way),
            turns=turns(),
            max_running=self.max_running,
            queue_limit=self.queue_limit,
        )

    def times(self) -> StepTimes:
        return StepTimes(CostModel(MODELS[self.model]), self.device)


class Simulation:
    """Arrivals, served step by step in virtual time."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        setting: Setting,
        slo: SLO | None = None,
    ) -> None:
        self.setting = setting
        self.clock = VirtualClock()
        self.runner = VirtualRunner(setting.times(), self.clock, setting.launch)
        self.scheduler = setting.scheduler()
        self.core: EngineCore[StaticScheduler | Scheduler, VirtualStep] = EngineCore(
            self.scheduler, self.runner, self.clock
        )
        self.stats = Stats(slo or SLO())
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._next = next(self._arrivals, None)
        self._came = 0

    @property
    def going(self) -> bool:
        return self._next is not None or self.core.has_work

    # region step
    def step(self) -> Step | None:
        """Submit the requests that have arrived, and run a step. None if no step is ready: skip to the next arrival."""
        while self._next is not None and self._next.time <= self.clock.now:
            self.submit(self._next)
            self._next = next(self._arrivals, None)
        step = self.core.step()
        if step is None:
            if self._next is not None:
                self.clock.now = self._next.time
            return None
        self.stats.step(step.prefill_tokens, len(step.batch), len(self.runner.answers))
        for event in step.events:
            if event.finish_reason is not None:
                self.stats.end(event.request)
                del self.runner.answers[event.request.id]
        return step

    # endregion

    def outcome(self) -> Outcome:
        """The figures up to now."""
        return self.stats.outcome(self.clock.now, self.preemptions)

    @property
    def preemptions(self) -> int:
        return self.scheduler.running_set.num_preemptions if isinstance(self.scheduler, Scheduler) else 0

    def submit(self, arrival: Arrival) -> None:
        """Let a request arrive now. It joins the next step."""
        new = request(self._came, arrival, self.setting.max_tokens)
        self._came += 1
        self.stats.arrive(arrival.time)
        try:
            self.core.submit(new)
        except (ValueError, QueueFullError):  # too large for the pool, or the queue is full
            self.stats.refused += 1
        else:
            self.runner.answers[new.id] = arrival.answer


def simulate(arrivals: Iterable[Arrival], setting: Setting, slo: SLO | None = None) -> Outcome:
    """All of it, to its end."""
    simulation = Simulation(arrivals, setting, slo)
    while simulation.going:
        simulation.step()
    return simulation.outcome()


def main(arguments: list[str] | None = None) -> int:
    slo = SLO()
    p = parser("phase5_continuous.lab simulator", __doc__)
    p.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="(all)")
    p.add_argument("--trace", type=Path, metavar="FILE", help="arrivals as JSON, in place of those below")
    p.add_argument("--kind", choices=KINDS, default=DEFAULT.kind, help="(%(default)s)")
    p.add_argument("-n", "--requests", type=int, default=DEFAULT.requests, help="(%(default)s)")
    add_fields(p, DEFAULT, {"rate": "requests a second", "prompt": "tokens, median", "answer": "the same", "seed": ""})
    p.add_argument("--model", choices=MODELS, default="8b", help="(%(default)s)")
    p.add_argument("--device", choices=DEVICES, default="H100 SXM", help="(%(default)s)")
    add_fields(p, Setting(), dict.fromkeys(("pages", "max_running", "chunk", "budget"), ""))
    p.add_argument("--queue-limit", type=int, help="refuse requests when so many wait (none)")
    p.add_argument(
        "--host-time", type=Path, metavar="FILE",
        help="charge a step with a prompt for its launches: what `phase6_integration.lab host_time` wrote (no time)",
    )  # fmt: skip
    add_fields(p, slo, {"ttft": "seconds to the first token (SLO)", "gap": "p99 from token to token (SLO)"})
    options, console = p.parse_args(arguments), Console(highlight=False)
    given = vars(options)
    try:
        if options.trace is None:
            made = replace(DEFAULT, **{name: given[name] for name in given if name in Trace.__dataclass_fields__})
            arrivals, longest, about = made.arrivals, made.max_answer, asdict(made)
        else:
            read = load(options.trace)
            arrivals, longest = read.__iter__, max(arrival.answer for arrival in read)
            about = {"file": options.trace.name, "requests": len(read)}
        launch = 0.0 if options.host_time is None else launch_seconds(options.host_time, options.model)
        setting = Setting(
            model=options.model, device=named(options.device), launch=launch, max_tokens=longest,
            queue_limit=options.queue_limit,
            **{name: given[name] for name in ("pages", "max_running", "chunk", "budget")},
        )  # fmt: skip
        ways = track(options.ways, "simulating", console=console, transient=True)
        slo = SLO(options.ttft, options.gap)
        outcomes = {way: simulate(arrivals(), replace(setting, way=way), slo) for way in ways}
    except (ValueError, OSError) as error:
        p.error(str(error))
    shown = {name: get for name, get in COLUMNS.items() if any(map(get, outcomes.values()))}
    rows = [(way, *(get(o) for get in shown.values())) for way, o in outcomes.items()]
    console.print(table(("times\nin ms", *shown), rows))
    finish(p, options, arguments, {"trace": about, "ways": {way: asdict(o) for way, o in outcomes.items()}})
    return 0


COLUMNS: dict[str, Callable[[Outcome], float]] = {
    "tokens\n/s": lambda o: o.tokens_per_second,
    "good-\nput/s": lambda o: o.goodput,
    "% met\nSLO": lambda o: 100 * o.attainment,
    "TTFT\np50": lambda o: 1e3 * o.ttft_p50,
    "\np99": lambda o: 1e3 * o.ttft_p99,
    "ITL\np50": lambda o: 1e3 * o.itl_p50,
    "ITL\np99": lambda o: 1e3 * o.itl_p99,
    "most\nwait": lambda o: 1e3 * o.queue_max,
    "\nfair": lambda o: o.fairness,
    "pre-\nempted": lambda o: o.preemptions,
    "re-\nfused": lambda o: o.refused,
}


def launch_seconds(file: Path, model: str) -> float:
    """The host's time to launch a mixed step of a model, as `phase6_integration.lab host_time` measured it."""
    row = json.loads(file.read_text("utf-8"))["figures"].get(f"{model}_mixed")
    if row is None:
        raise ValueError(f"{file} has no mixed step of {model!r}: run the lab with --models {model}")
    return float(row["host_ms"]["median"]) / 1e3
