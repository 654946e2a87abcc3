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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from phase0_request.lab.metrics import summarize
from phase0_request.lab.report import at_least_one, finish, parser, table
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.support import entry
from phase2_prefill_decode.lab.random_weights import save_random
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.model import default_device
from phase6_integration.lab.peers.rungs import PAGE_SIZE, Answers, Build, Rung, rungs
from phase6_integration.support.progress import reported

NAMES = ("transformers", "phase2", "phase3", "phase4", "phase5", "phase6")
COLUMNS = {
    "TTFT\np50": "ttft_p50_ms", "\np99": "ttft_p99_ms", "ITL\nmean": "itl_mean_ms", "ITL\np99": "itl_p99_ms",
    "tokens\n/s": "tokens_per_second", "tokens\n/step": "tokens_per_step", "pages\nheld": "pages",
    "hit\nrate": "hit_rate",
}  # fmt: skip
REQUESTS = 48  # of the trace on the results page
Served = dict[str, Any]  # the figures of one run of one engine


@dataclass(frozen=True, slots=True)
class Trace:
    """Chats after one system prompt, and long prompts of their own. Lengths in tokens."""

    requests: int = REQUESTS
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
        """A trace of this many requests. The long prompts among them, and the pool, are in proportion."""
        whole, share = cls(), requests / REQUESTS
        long = max(round(whole.num_long * share), 1)
        return cls(requests=requests, rate=rate, num_long=long, pages=pages or max(round(whole.pages * share), 192))

    def make(self, vocabulary: int, start: float) -> tuple[list[Request], Answers]:
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


def serve(rung: Rung, requests: Sequence[Request]) -> Served:
    """Submit each request when it arrives, and step until all have ended."""
    waiting, clock = deque(requests), time.perf_counter
    while waiting or rung.has_work:
        while waiting and waiting[0].arrival <= clock():
            rung.submit(waiting.popleft())
        if rung.has_work:
            rung.step()
        elif waiting:
            time.sleep(max(waiting[0].arrival - clock(), 0))
    tokens = repr([request.output_tokens for request in requests])
    figures = summarize(requests).figures()
    return {
        **figures,
        "tokens_per_step": figures["tokens"] / rung.steps,
        "pages": rung.pages,  # held by requests, at most
        "hit_rate": rung.hit_rate,  # share of the prompts' tokens that were found in the prefix cache
        "answers": hashlib.sha256(tokens.encode()).hexdigest()[:16],
    }


def measure(build: Build, trace: Trace, vocabulary: int, runs: int) -> Served:
    """The run with the highest throughput, after one with a few requests, in which all is used once."""
    served = []
    for played in (replace(trace, requests=4, num_long=1, answer=4, seed=1), *[trace] * runs):
        _, answers = played.make(vocabulary, 0.0)
        rung = build(answers)
        requests, _ = played.make(vocabulary, time.perf_counter())  # an engine may take a while to be made
        served.append(serve(rung, requests))
    return max(served[1:], key=lambda run: float(run["tokens_per_second"]))


def climb(
    directory: Path, names: Sequence[str], trace: Trace, runs: int, say: Callable[[str], object] = print
) -> dict[str, Served]:
    """Measure the rungs of these names over the model in the directory."""
    known, served = rungs(directory, trace.pages), {}
    vocabulary = json.loads((directory / "config.json").read_text("utf-8"))["vocab_size"]
    for name in names:
        say(name.replace("phase", "phase "))
        served[name] = measure(known[name], trace, vocabulary, runs)
    return served


def in_the_workspace(arguments: Sequence[str], console: Console) -> dict[str, Served]:
    """The same ladder with the reader's own phases, in a process of its own. RuntimeError if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.json"
        command = [sys.executable, "-m", "chapters", "mine", "ladder"]
        console.print("Now with your own phases.")
        done = subprocess.run([*command, *arguments, "--json", str(file)], env=entry.environment())
        if not file.exists():
            raise RuntimeError(f"the ladder with your workspace ended with {done.returncode}; see above")
        mine: dict[str, Served] = json.loads(file.read_text("utf-8"))["figures"]["rungs"]
        return mine


def different(served: dict[str, Served]) -> list[str]:
    """The rungs with answers that differ from the first rung's."""
    first = next(iter(served.values()))["answers"]
    return [name for name, row in served.items() if row["answers"] != first]


def words(options: argparse.Namespace, trace: Trace) -> list[str]:
    """The options that change the figures, as they would be typed."""
    flags = [f"--shape {options.shape}", f"--requests {trace.requests}", f"--rate {trace.rate:g}"]
    flags += [f"--pages {trace.pages}", f"--runs {options.runs}", f"--threads {torch.get_num_threads()}"]
    return [word for flag in flags for word in flag.split()]


def run(p: argparse.ArgumentParser, options: argparse.Namespace) -> int:
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

    trace = Trace.of(options.requests, options.rate, options.pages)
    with tempfile.TemporaryDirectory() as folder, reported(say):
        save_random(options.shape, Path(folder))
        served = climb(Path(folder), options.rungs, trace, options.runs, say)
    figures: dict[str, Any] = {"trace": asdict(trace) | {"page_size": PAGE_SIZE}, "rungs": served}
    rows = dict(served)
    if options.mine:
        ours = [name for name in options.rungs if name != "transformers"]
        figures["mine"] = in_the_workspace([*words(options, trace), "--rungs", *ours], console)
        rows |= {f"yours, {name}": row for name, row in figures["mine"].items()}
    cells = [(name.replace("phase", "phase "), *(row[key] for key in COLUMNS.values())) for name, row in rows.items()]
    console.print(table(("times\nin ms", *COLUMNS), cells))
    finish(p, options, words(options, trace), figures, gpu=default_device().type == "cuda")
    wrong = different(rows)
    if wrong:
        console.print(f"The tokens of {', '.join(wrong)} differ from those of {next(iter(rows))}.")
    else:
        console.print(f"All answers are the same, token by token: {next(iter(rows.values()))['tokens']:,} tokens.")
    return 1 if wrong else 0


def main(arguments: list[str] | None = None, prog: str = "python -m phase6_integration.lab ladder") -> int:
    p, trace = parser("phase6_integration.lab ladder", __doc__), Trace()
    p.prog = prog
    p.add_argument("--shape", choices=SHAPES, default="17m", help="of the model, with random weights (%(default)s)")
    p.add_argument("--rungs", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"{', '.join(NAMES)} (all)")
    p.add_argument("--requests", type=at_least_one, default=REQUESTS, help="fewer for a slow machine (%(default)s)")
    p.add_argument("--rate", type=float, default=trace.rate, help="arrivals a second (%(default)s)")
    p.add_argument("--pages", type=at_least_one, help=f"of the pool ({trace.pages} for {REQUESTS} requests)")
    p.add_argument("--runs", type=at_least_one, default=1, help="of which the best counts (%(default)s)")
    p.add_argument("--threads", type=at_least_one, help="on a CPU (torch's choice)")
    p.add_argument("--mine", action="store_true", help="the phases of your workspace beside ours")
    try:
        return run(p, p.parse_args(arguments))
    except RuntimeError as error:
        print(f"{p.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{p.prog}: stopped", file=sys.stderr)
        return 130
