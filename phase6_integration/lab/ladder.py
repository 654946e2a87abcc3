"""`nanoserve bench ladder`: one trace through transformers and the engines of phases 2 to 6: what each phase bought.

Chats with one system prompt arrive one after the other, faster than they can be served; between them come a few long
prompts. All engines have the same weights in float32 and the same pool, which is too small for all requests at once.
They must give the same tokens, greedily; then their times are comparable.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from phase0_request import safe_path
from phase0_request.machine import describe, record
from phase0_request.metrics import percentile, summarize
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.lab.bench import at_least_one, save_random
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.model import default_device
from phase6_integration.lab.rungs import PAGE_SIZE, Build, Rung, rungs

NAMES = ("transformers", "phase2", "phase3", "phase4", "phase5", "phase6")
COLUMNS = {
    "ttft_p50_ms": ("TTFT\np50", ",.0f"),
    "ttft_p99_ms": ("\np99", ",.0f"),
    "itl_mean_ms": ("ITL\nmean", ",.1f"),
    "itl_p99_ms": ("\np99", ",.1f"),
    "tokens_per_second": ("tokens\n/s", ",.0f"),
    "tokens_per_step": ("tokens\n/step", ".1f"),
    "pages": ("pages\nheld", "d"),
    "hit_rate": ("hit\nrate", ".0%"),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Chats after one system prompt, and long prompts of their own. Lengths in tokens."""

    requests: int = 48
    rate: float = 16.0  # arrivals a second
    system: int = 256
    question: int = 32  # on average
    answer: int = 48  # the median; one in six is twice as long or longer
    max_tokens: int = 192  # all that an engine knows of an answer's length
    long: int = 1536
    num_long: int = 3
    pages: int = 384
    seed: int = 0

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


def measure(build: Build, trace: Trace, vocabulary: int, runs: int) -> Served:
    """The run with the highest throughput, after one with a few requests that compiles what has to be compiled."""
    found = []
    small = replace(trace, requests=4, num_long=1, answer=4, seed=1)
    for run in range(runs + 1):
        one = trace if run else small
        _, answers = one.make(vocabulary, 0.0)
        rung = build(answers)
        requests, _ = one.make(vocabulary, time.perf_counter())  # an engine may take a while to be made
        served = serve(rung, requests, answers)
        found += [served] * (run > 0)
    return max(found, key=lambda served: served.tokens_per_second)


def climb(directory: Path, names: Sequence[str], trace: Trace, runs: int, console: Console) -> dict[str, Served]:
    """Measure the rungs of these names."""
    vocabulary = json.loads((directory / "config.json").read_text("utf-8"))["vocab_size"]
    known = rungs(directory, trace.pages)
    steps = track(names, "ladder", console=console, transient=True)
    return {name: measure(known[name], trace, vocabulary, runs) for name in steps}


def in_the_workspace(arguments: Sequence[str], console: Console) -> dict[str, dict[str, Any]]:
    """The same ladder with the reader's own phases, in a process of its own. RuntimeError if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.json"
        command = [sys.executable, "-m", "chapters", "mine", "ladder"]
        console.print("Now with your own phases.")
        done = subprocess.run([*command, *arguments, "--json", str(file)], env=safe_path.environment())
        if not file.exists():
            raise RuntimeError(f"the ladder with your workspace ended with {done.returncode}; see above")
        found: dict[str, dict[str, Any]] = json.loads(file.read_text("utf-8"))["figures"]["rungs"]
        return found


def table(served: dict[str, dict[str, Any]]) -> Table:
    drawn = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    drawn.add_column("times\nin ms", no_wrap=True)
    for name, _ in COLUMNS.values():
        drawn.add_column(name, justify="right", no_wrap=True)
    for rung, row in served.items():
        drawn.add_row(rung.replace("phase", "phase "), *(f"{row[key]:{spec}}" for key, (_, spec) in COLUMNS.items()))
    return drawn


def different(served: dict[str, dict[str, Any]]) -> list[str]:
    """The rungs with answers that differ from those of the first rung."""
    first = next(iter(served.values()))["answers"]
    return [name for name, row in served.items() if row["answers"] != first]


def add_flags(p: argparse._ActionsContainer) -> None:
    trace = Trace()
    p.add_argument("--shape", choices=SHAPES, default="17m", help="of the model, with random weights (17m)")
    p.add_argument("--rungs", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"{', '.join(NAMES)} (all)")
    p.add_argument("--requests", type=at_least_one, default=trace.requests, help=f"in the trace ({trace.requests})")
    p.add_argument("--rate", type=float, default=trace.rate, help=f"arrivals a second ({trace.rate:g})")
    p.add_argument("--pages", type=at_least_one, default=trace.pages, help=f"of the pool ({trace.pages})")
    p.add_argument("--runs", type=at_least_one, default=1, help="of which the best counts (1)")
    p.add_argument("--threads", type=at_least_one, default=None, help="on a CPU (torch's choice)")
    p.add_argument("--mine", action="store_true", default=False, help="the phases of your workspace beside ours")
    p.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures here")


def words(options: argparse.Namespace) -> list[str]:
    """The options that change the figures, as they would be typed."""
    flags = [f"--shape {options.shape}", f"--requests {options.requests}", f"--rate {options.rate:g}"]
    flags += [f"--pages {options.pages}", f"--runs {options.runs}", f"--threads {torch.get_num_threads()}"]
    return [word for flag in flags for word in flag.split()]


def run(options: argparse.Namespace) -> int:
    """The exit code: 1 if two engines gave different tokens."""
    from transformers.utils.logging import disable_progress_bar

    console = Console()
    if options.mine and find_spec("chapters") is None:
        raise RuntimeError("--mine needs your workspace, and that is in a clone of the repository: run it there")
    trace = Trace(requests=options.requests, rate=options.rate, pages=options.pages)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quiet: Any = disable_progress_bar
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        save_random(options.shape, Path(folder))
        measured = climb(Path(folder), options.rungs, trace, options.runs, console)
    served = {name: asdict(row) for name, row in measured.items()}
    figures: dict[str, Any] = {"trace": asdict(trace) | {"page_size": PAGE_SIZE}, "rungs": served}
    rows = dict(served)
    if options.mine:
        ours = [name for name in options.rungs if name != "transformers"]
        figures["mine"] = in_the_workspace([*words(options), "--rungs", *ours], console)
        rows |= {f"yours, {name}": row for name, row in figures["mine"].items()}
    console.print(table(rows))
    if options.json is not None:
        machine, on_gpu = describe(), default_device().type == "cuda"
        command = " ".join(["nanoserve bench ladder", *words(options)])
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
