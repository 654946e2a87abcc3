"""`python -m phase2_prefill_decode.lab cpu.beside`: steps of a model while another program wants one of the cores.

The other program is a loop that never waits. The steps are prompts and decodes. In turns they are timed alone, beside
the loop, and beside it with a thread fewer, which leaves the loop a core of its own.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from rich.console import Console

from phase0_request.lab.report import at_least_one, finish, parser, table
from phase0_request.support.machine import cores
from phase2_prefill_decode.lab.phases import Steps
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.model import Model

LOADS = {  # sequences, and of each the tokens to compute and all tokens
    "prompt_64": (1, 64, 64),
    "prompts_4x512": (4, 512, 512),
    "decode_1": (1, 1, 128),
    "decodes_16": (16, 1, 128),
}
WAYS = {"alone": "alone", "beside": "beside a loop", "fewer": "and a thread fewer"}
Load = Callable[[], AbstractContextManager[None]]
LOOP = sys.executable, "-c", "while True: pass"


@contextmanager
def busy_loop() -> Iterator[None]:
    process = subprocess.Popen(LOOP, start_new_session=True)  # Linux shares cores between sessions, then in each
    try:
        yield
    finally:
        process.kill()
        process.wait()


def summary(tokens: int, seconds: list[float]) -> dict[str, float]:
    return {
        "tokens_per_second": tokens * len(seconds) / sum(seconds),
        "median_ms": median(seconds) * 1e3,
        "p99_ms": sorted(seconds)[len(seconds) * 99 // 100] * 1e3,
        "steps": len(seconds),
    }


def measure(steps: Steps, rounds: int, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of each load. Those beside the loop also as multiples of those alone."""
    ways: dict[str, tuple[Load, int]] = {
        "alone": (nullcontext, cores()),
        "beside": (busy_loop, cores()),
        "fewer": (busy_loop, max(cores() - 1, 1)),
    }
    for name, (batch, tokens, context) in LOADS.items():
        times = {way: list[float]() for way in ways}
        for _ in range(rounds):
            for way, (load, threads) in ways.items():
                torch.set_num_threads(threads)
                with load():
                    times[way] += steps.times(steps.batch(batch, tokens, context), seconds)
        figures: dict[str, Any] = {way: summary(batch * tokens, found) for way, found in times.items()}
        for way in ("beside", "fewer"):
            of, alone = figures[way], figures["alone"]
            of["rate"] = of["tokens_per_second"] / alone["tokens_per_second"]
            of["p99"] = of["p99_ms"] / alone["p99_ms"]
        yield name, figures


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase2_prefill_decode.lab cpu.beside", __doc__)
    p.add_argument("--shape", choices=SHAPES, default="17m", help="(%(default)s)")
    p.add_argument("--rounds", type=at_least_one, default=5, help="of turns (%(default)s)")
    p.add_argument("--seconds", type=float, default=1.0, help="of a turn (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    steps, before = Steps(Model.random(SHAPES[options.shape], device="cpu")), torch.get_num_threads()
    try:
        figures = dict(measure(steps, options.rounds, options.seconds))
    finally:
        torch.set_num_threads(before)
    rows = [
        (f"{name.replace('_', ' ')}, {WAYS[way]}", of["tokens_per_second"], of["p99_ms"], *map("{:.2f}".format, over))
        for name, found in figures.items()
        for way, of in found.items()
        for over in [(of.get("rate", 1), of.get("p99", 1))]
    ]
    console.print(table(("", "tokens/s", "p99 ms", "of its rate", "of its p99"), rows))
    finish(p, options, arguments, {"threads": cores(), **figures})
    return 0
