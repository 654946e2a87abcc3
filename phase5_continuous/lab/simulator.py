"""`python -m phase5_continuous.lab simulator`: compares ways to serve on one trace, with a cost model for the model.

Scheduler, cache and loop are those of the engine. Only the runner differs: it predicts how long each step takes on the
device, and advances the clock by that. Ended requests leave nothing in memory, so a trace may have any length.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from phase0_request.core import EngineCore, Step
from phase0_request.machine import record
from phase0_request.queue import QueueFullError
from phase1_kv_pool.cache import KVCache, PagedCache
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.roofline import DEVICES, Device, named
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.static import PagedScheduler, StaticScheduler
from phase3_chunked_prefill.budget import TokenBudget
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.lab.report import events, table
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
EVERY = 1000  # steps between two updates of the progress bar


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
        if self.way not in WAYS:
            raise ValueError(f"a way is one of {', '.join(WAYS)}, got {self.way!r}")
        if self.model not in MODELS:
            raise ValueError(f"a model is one of {', '.join(MODELS)}, got {self.model!r}")

    def cache(self) -> KVCache:
        return (PrefixCache if self.prefix_cache else PagedCache)(self.pages, self.page_size)

    def scheduler(self) -> PagedScheduler[Any]:
        if self.way == "static":
            return StaticScheduler(self.cache(), [EOS], batch_size=self.max_running, queue_limit=self.queue_limit)
        whole = self.way == "whole"
        return Scheduler(
            self.cache(),
            [EOS],
            TokenBudget(WHOLE, WHOLE) if whole else TokenBudget(self.chunk, self.budget),
            policy=policy("fcfs" if whole else self.way),
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
        self.core: EngineCore[PagedScheduler[Any], VirtualStep] = EngineCore(self.scheduler, self.runner, self.clock)
        self.stats = Stats(slo or SLO())
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._next = next(self._arrivals, None)
        self._came = 0

    @property
    def going(self) -> bool:
        return self._next is not None or self.core.has_work

    # region step
    def step(self) -> Step | None:
        """Submit the requests that have arrived, and run a step. None if there is none: skip to the next arrival."""
        while self._next is not None and self._next.time <= self.clock.now:
            self._submit(self._next)
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

    def run(self) -> Outcome:
        while self.going:
            self.step()
        return self.outcome()

    def outcome(self) -> Outcome:
        """The figures up to now."""
        return self.stats.outcome(self.clock.now, self.preemptions)

    @property
    def preemptions(self) -> int:
        return self.scheduler.running_set.num_preemptions if isinstance(self.scheduler, Scheduler) else 0

    def _submit(self, arrival: Arrival) -> None:
        one = request(self._came, arrival, self.setting.max_tokens)
        self._came += 1
        self.stats.arrive(arrival.time)
        try:
            self.core.submit(one)
        except (ValueError, QueueFullError):  # too large for the pool, or the queue is full
            self.stats.refused += 1
        else:
            self.runner.answers[one.id] = arrival.answer


def simulate(
    arrivals: Iterable[Arrival], setting: Setting, slo: SLO | None = None, bar: Progress | None = None
) -> Outcome:
    """All of it, to its end."""
    simulation = Simulation(arrivals, setting, slo)
    while simulation.going:
        for _ in range(EVERY):
            if simulation.going:
                simulation.step()
        if bar is not None:
            bar.update(bar.task_ids[-1], completed=simulation.stats.ended + simulation.stats.refused)
    return simulation.outcome()


def parser() -> argparse.ArgumentParser:
    """The command line, with its defaults from Trace and Setting. Of a trace it has only what is typed."""
    trace, setting, slo = DEFAULT, Setting(), SLO()
    p = argparse.ArgumentParser(prog="python -m phase5_continuous.lab simulator", description=__doc__)
    p.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="(all)")
    p.add_argument("--trace", type=Path, metavar="FILE", help="arrivals as JSON, in place of the next group")
    t = p.add_argument_group("arrivals", argument_default=argparse.SUPPRESS)
    t.add_argument("--kind", choices=KINDS, help=f"({trace.kind})")
    t.add_argument("-n", "--requests", type=int, help=f"({trace.requests})")
    t.add_argument("--rate", type=float, help=f"requests a second ({trace.rate})")
    t.add_argument("--prompt", type=int, help=f"tokens, the median ({trace.prompt})")
    t.add_argument("--answer", type=int, help=f"tokens, the median ({trace.answer})")
    t.add_argument("--spread", type=float, help=f"of the logarithm of lengths ({trace.spread})")
    t.add_argument("--max-prompt", type=int, help=f"({trace.max_prompt})")
    t.add_argument("--max-answer", type=int, help=f"({trace.max_answer})")
    t.add_argument("--seed", type=int, help=f"({trace.seed})")
    m = p.add_argument_group("engine")
    m.add_argument("--model", choices=MODELS, default=setting.model, help="(%(default)s)")
    m.add_argument("--device", choices=DEVICES, default=setting.device.name, help="(%(default)s)")
    m.add_argument("--pages", type=int, default=setting.pages, help="(%(default)s)")
    m.add_argument("--page-size", type=int, default=setting.page_size, help="(%(default)s)")
    m.add_argument("--max-running", type=int, default=setting.max_running, help="(%(default)s)")
    m.add_argument("--chunk", type=int, default=setting.chunk, help="(%(default)s)")
    m.add_argument("--budget", type=int, default=setting.budget, help="tokens a step (%(default)s)")
    m.add_argument("--queue-limit", type=int, help="refuse requests when so many wait (none)")
    m.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", help="share no prefixes")
    m.add_argument(
        "--host-time", type=Path, metavar="FILE",
        help="charge a step with a prompt for its launches: what `phase6_integration.lab host_time` wrote (no time)",
    )  # fmt: skip
    m.add_argument("--ttft", type=float, default=slo.ttft, help="seconds to the first token (SLO) (%(default)s)")
    m.add_argument(
        "--gap", type=float, default=slo.gap, help="p99 of the seconds from token to token (SLO) (%(default)s)"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return p


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    given = p.parse_args(arguments)
    options = vars(given)
    console = Console()
    try:
        trace = {name: options[name] for name in Trace.__dataclass_fields__ if name in options}
        if given.trace is not None and trace:
            raise ValueError(f"--trace has all arrivals; it goes without --{next(iter(trace)).replace('_', '-')}")
        come: Trace | list[Arrival] = replace(DEFAULT, **trace) if given.trace is None else load(given.trace)
        longest = come.max_answer if isinstance(come, Trace) else max(one.answer for one in come)
        names = ("model", "pages", "page_size", "max_running", "chunk", "budget", "prefix_cache", "queue_limit")
        launch = 0.0 if given.host_time is None else launch_seconds(given.host_time, given.model)
        engine = {name: options[name] for name in names}
        setting = Setting(device=named(given.device), max_tokens=longest, launch=launch, **engine)
        outcomes = compare(come, setting, SLO(given.ttft, given.gap), given.ways, console)
    except (ValueError, OSError) as error:
        p.error(str(error))
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
    console.print(table(outcomes))
    if (counted := events(outcomes)) is not None:
        console.print("", counted, sep="\n")
    if given.json is not None:
        what = asdict(come) if isinstance(come, Trace) else {"file": given.trace.name, "requests": len(come)}
        figures: dict[str, Any] = {"trace": what, "ways": {way: asdict(o) for way, o in outcomes.items()}}
        record(given.json, " ".join([p.prog, *_given(p, options)]), figures)
        console.print(f"\nFigures written to {given.json}")
    return 0


def launch_seconds(file: Path, model: str) -> float:
    """The host's time to launch a mixed step of a model, as `phase6_integration.lab host_time` measured it."""
    row = json.loads(file.read_text("utf-8"))["figures"].get(f"{model}_mixed")
    if row is None:
        raise ValueError(f"{file} has no mixed step of {model!r}: run the lab with --models {model}")
    return float(row["host_ms"]["median"]) / 1e3


def compare(
    come: Trace | Sequence[Arrival], setting: Setting, slo: SLO, ways: Sequence[str], console: Console
) -> dict[str, Outcome]:
    """Serve the same arrivals in each way."""
    columns = TextColumn("{task.description:>15}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    outcomes = {}
    with Progress(*columns, console=console, transient=True) as bar:
        for way in ways:
            bar.add_task(way, total=come.requests if isinstance(come, Trace) else len(come))
            arrivals = come.arrivals() if isinstance(come, Trace) else come
            outcomes[way] = simulate(arrivals, replace(setting, way=way), slo, bar)
    return outcomes


def _given(p: argparse.ArgumentParser, options: dict[str, Any]) -> Iterator[str]:
    """The options that differ from their defaults, as they would be typed."""
    for name, value in options.items():
        if name != "json" and value != p.get_default(name):
            if name == "prefix_cache":
                yield "--no-prefix-cache"
            else:
                yield f"--{name.replace('_', '-')} {' '.join(value) if isinstance(value, list) else value}"
