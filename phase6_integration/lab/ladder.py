"""`nanoserve bench ladder`: one trace through transformers and the engines of phases 2 to 6: what each phase bought.

Chats with one system prompt arrive one after the other, faster than they can be served; between them come a few long
prompts. All engines have the same weights in float32 and the same pool, which is too small for all requests at once.
They must give the same tokens, greedily; then their times are comparable.

A run of a few requests says how fast this machine is, and with that the trace gets as many as fit into the time.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console

from phase0_request import entry
from phase0_request.lab.metrics import percentile, summarize
from phase0_request.lab.record import record
from phase0_request.lab.report import table
from phase0_request.machine import describe
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.lab.bench import at_least_one, save_random
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.model import default_device
from phase6_integration.engine.progress import reported
from phase6_integration.lab.rungs import PAGE_SIZE, Build, Rung, rungs

NAMES = ("transformers", "phase2", "phase3", "phase4", "phase5", "phase6")
COLUMNS = {
    "TTFT\np50": "ttft_p50_ms", "\np99": "ttft_p99_ms", "ITL\nmean": "itl_mean_ms", "ITL\np99": "itl_p99_ms",
    "tokens\n/s": "tokens_per_second", "tokens\n/step": "tokens_per_step", "pages\nheld": "pages",
    "hit\nrate": "hit_rate",
}  # fmt: skip
FEWEST, MOST = 12, 48  # requests of a trace that is made to fit; the figures of the results page are of the most
TRIED = 8  # requests that say how fast a machine is
ALL_TO_FIRST = 2.5  # measured: the time of all rungs, in that of the first, transformers


@dataclass(frozen=True, slots=True)
class Trace:
    """Chats after one system prompt, and long prompts of their own. Lengths in tokens."""

    requests: int = MOST
    rate: float = 16.0  # arrivals a second
    system: int = 256
    question: int = 32  # on average
    answer: int = 48  # the median; one in six is twice as long or longer
    max_tokens: int = 192  # all that an engine knows of an answer's length
    long: int = 1536
    num_long: int = 3
    pages: int = 384
    seed: int = 0

    @classmethod
    def of(cls, requests: int, rate: float, pages: int | None = None) -> "Trace":
        """A trace of so many requests. The long prompts among them, and the pool, are in proportion."""
        whole, share = cls(), requests / MOST
        long = max(round(whole.num_long * share), 1)
        return cls(requests=requests, rate=rate, num_long=long, pages=pages or max(round(whole.pages * share), 192))

    def make(self, vocabulary: int, start: float) -> tuple[list[Request], dict[str, int]]:
        """The requests, and the length of each answer."""
        rng, tokens = random.Random(self.seed), range(10, vocabulary - 10)
        system = rng.choices(tokens, k=self.system)
        every = self.requests // (self.num_long + 1)
        long = {every * (number + 1) for number in range(self.num_long)}
        requests, answers, now = [], {}, 0.0
        for number in range(self.requests):
            now += rng.expovariate(self.rate)
            question = rng.choices(tokens, k=rng.randint(self.question // 2, self.question * 3 // 2))
            prompt = rng.choices(tokens, k=self.long) if number in long else system + question
            params = SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)
            requests.append(Request(f"r{number}", tuple(prompt), params, arrival=start + now))
            answers[f"r{number}"] = min(max(round(rng.lognormvariate(0, 0.7) * self.answer), 2), self.max_tokens - 1)
        return requests, answers


@dataclass(frozen=True, slots=True)
class Served:
    """One run of one engine."""

    requests: int
    tokens: int
    seconds: float  # from the first arrival to the last end
    tokens_per_second: float
    tokens_per_step: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    itl_p99_ms: float
    pages: int  # held by requests, at most
    hit_rate: float  # share of the prompts' tokens that were found in the prefix cache
    answers: str  # a digest of all tokens


def serve(rung: Rung, requests: Sequence[Request], answers: dict[str, int]) -> Served:
    """Submit each request when it arrives, and step until all have ended."""
    waiting, clock = deque(requests), time.perf_counter
    while waiting or rung.has_work:
        while waiting and waiting[0].arrival <= clock():
            rung.submit(waiting.popleft())
        if not rung.has_work:
            if waiting:
                time.sleep(max(waiting[0].arrival - clock(), 0))
            continue
        for request in rung.step():
            if len(request.output_tokens) == answers[request.id]:
                rung.finish(request)
    found = summarize(requests)
    ttft, itl = ([1e3 * seconds for seconds in times] for times in (found.ttft, found.itl))
    return Served(
        requests=found.requests,
        tokens=found.tokens,
        seconds=found.seconds,
        tokens_per_second=found.tokens_per_second,
        tokens_per_step=found.tokens / rung.steps,
        ttft_p50_ms=percentile(ttft, 50),
        ttft_p99_ms=percentile(ttft, 99),
        itl_mean_ms=mean(itl),
        itl_p99_ms=percentile(itl, 99),
        pages=rung.pages,
        hit_rate=rung.hit_rate,
        answers=hashlib.sha256(repr([request.output_tokens for request in requests]).encode()).hexdigest()[:16],
    )


Say = Callable[[str], object]  # shows what is done now


class Ladder:
    """The engines over one model, and how they are measured."""

    def __init__(self, directory: Path, names: Sequence[str], say: Say = print) -> None:
        self.directory = directory
        self.names = names
        self.say = say
        self.vocabulary = json.loads((directory / "config.json").read_text("utf-8"))["vocab_size"]

    def fitting(self, seconds: float, rate: float, pages: int | None = None) -> Trace:
        """The trace of as many requests as all rungs serve in the time, by the speed of the first. Of two tries, the
        faster: other programs can only slow one down."""
        self.say(f"trying {TRIED} requests")
        tried = Trace.of(TRIED, rate, pages or Trace().pages)
        served = self.measure(rungs(self.directory, tried.pages)[self.names[0]], tried, runs=2)
        each = served.seconds / TRIED * (ALL_TO_FIRST if self.names[0] == NAMES[0] else len(self.names))
        requests = min(max(int(seconds / each), FEWEST), MOST)
        self.say(f"{requests} requests: about {each * requests:.0f} seconds a run of all on this machine.")
        return Trace.of(requests, rate, pages)

    def climb(self, trace: Trace, runs: int) -> dict[str, Served]:
        """Measure the rungs."""
        known, found = rungs(self.directory, trace.pages), {}
        for name in self.names:
            self.say(name.replace("phase", "phase "))
            found[name] = self.measure(known[name], trace, runs)
        return found

    def measure(self, build: Build, trace: Trace, runs: int) -> Served:
        """The run with the highest throughput, after one with a few requests, in which all is used once."""
        served = []
        for played in (replace(trace, requests=4, num_long=1, answer=4, seed=1), *[trace] * runs):
            _, answers = played.make(self.vocabulary, 0.0)
            rung = build(answers)
            requests, _ = played.make(self.vocabulary, time.perf_counter())  # an engine may take a while to be made
            served.append(serve(rung, requests, answers))
        return max(served[1:], key=lambda run: run.tokens_per_second)


def in_the_workspace(arguments: Sequence[str], console: Console) -> dict[str, dict[str, Any]]:
    """The same ladder with the reader's own phases, in a process of its own. RuntimeError if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.json"
        command = [sys.executable, "-m", "chapters", "mine", "ladder"]
        console.print("Now with your own phases.")
        done = subprocess.run([*command, *arguments, "--json", str(file)], env=entry.environment())
        if not file.exists():
            raise RuntimeError(f"the ladder with your workspace ended with {done.returncode}; see above")
        found: dict[str, dict[str, Any]] = json.loads(file.read_text("utf-8"))["figures"]["rungs"]
        return found


def different(served: dict[str, dict[str, Any]]) -> list[str]:
    """The rungs with answers that differ from those of the first rung."""
    first = next(iter(served.values()))["answers"]
    return [name for name, row in served.items() if row["answers"] != first]


def add_flags(p: argparse._ActionsContainer) -> None:
    trace = Trace()
    p.add_argument("--shape", choices=SHAPES, default="17m", help="of the model, with random weights (17m)")
    p.add_argument("--rungs", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"{', '.join(NAMES)} (all)")
    p.add_argument("--requests", type=at_least_one, help=f"in the trace (as fit into --seconds, {FEWEST} to {MOST})")
    p.add_argument("--seconds", type=float, default=120.0, help="for all rungs; engines are made besides (120)")
    p.add_argument("--rate", type=float, default=trace.rate, help=f"arrivals a second ({trace.rate:g})")
    p.add_argument("--pages", type=at_least_one, help=f"of the pool ({trace.pages} for {MOST} requests)")
    p.add_argument("--runs", type=at_least_one, default=1, help="of which the best counts (1)")
    p.add_argument("--threads", type=at_least_one, default=None, help="on a CPU (torch's choice)")
    p.add_argument("--mine", action="store_true", default=False, help="the phases of your workspace beside ours")
    p.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures here")


def words(options: argparse.Namespace, trace: Trace) -> list[str]:
    """The options that change the figures, as they would be typed."""
    flags = [f"--shape {options.shape}", f"--requests {trace.requests}", f"--rate {trace.rate:g}"]
    flags += [f"--pages {trace.pages}", f"--runs {options.runs}", f"--threads {torch.get_num_threads()}"]
    return [word for flag in flags for word in flag.split()]


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 if two engines gave different tokens."""
    from transformers.utils.logging import disable_progress_bar

    console = Console(highlight=False)
    if options.mine and find_spec("chapters") is None:
        raise RuntimeError("--mine needs your workspace, and that is in a clone of the repository: run it there")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quiet: Any = disable_progress_bar
    quiet()

    def say(words: str) -> None:
        console.print(words, soft_wrap=True)

    with tempfile.TemporaryDirectory() as folder, reported(say):
        save_random(options.shape, Path(folder))
        ladder = Ladder(Path(folder), options.rungs, say)
        if options.requests is not None:
            trace = Trace.of(options.requests, options.rate, options.pages)
        else:
            trace = ladder.fitting(options.seconds / options.runs, options.rate, options.pages)
        served = {name: asdict(row) for name, row in ladder.climb(trace, options.runs).items()}
    figures: dict[str, Any] = {"trace": asdict(trace) | {"page_size": PAGE_SIZE}, "rungs": served}
    rows = dict(served)
    if options.mine:
        ours = [name for name in options.rungs if name != "transformers"]
        figures["mine"] = in_the_workspace([*words(options, trace), "--rungs", *ours], console)
        rows |= {f"yours, {name}": row for name, row in figures["mine"].items()}
    cells = [(name.replace("phase", "phase "), *(row[key] for key in COLUMNS.values())) for name, row in rows.items()]
    console.print(table(("times\nin ms", *COLUMNS), cells))
    if options.json is not None:
        machine, on_gpu = describe(), default_device().type == "cuda"
        command = " ".join(["nanoserve bench ladder", *words(options, trace)])
        record(options.json, command, figures, device=machine.gpu if on_gpu else machine.cpu)
        console.print(f"\nFigures written to {options.json}")
    wrong = different(rows)
    if wrong:
        console.print(f"The tokens of {', '.join(wrong)} differ from those of {next(iter(rows))}.")
    else:
        console.print(f"All answers are the same, token by token: {next(iter(rows.values()))['tokens']:,} tokens.")
    return 1 if wrong else 0


def main(arguments: list[str] | None = None, prog: str = "python -m phase6_integration.lab ladder") -> int:
    p = argparse.ArgumentParser(prog=prog, description=__doc__)
    add_flags(p)
    try:
        return run(p.parse_args(arguments))
    except RuntimeError as error:
        print(f"{p.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{p.prog}: stopped", file=sys.stderr)
        return 130
