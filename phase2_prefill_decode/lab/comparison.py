"""Comparison of engines: workloads, results and tables.

Another engine's results are read from its output: lines such as `requests=8 prompt=128 output=64 …: 7.02 s`.
"""

import argparse
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from phase2_prefill_decode.lab.shapes import SHAPES

LINE = re.compile(r"requests=(\d+) prompt=(\d+) output=(\d+)\b.*?: ([\d.]+) s")
VERSION = re.compile(r"\bversion[ :=]+v?(\d\S*)")


@dataclass(frozen=True, slots=True)
class Workload:
    """Concurrent requests with prompts and outputs of these lengths."""

    requests: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.output}"

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(10, vocabulary - 10) for _ in range(self.prompt)] for _ in range(self.requests)]

    def rate(self, seconds: float) -> float:
        """Tokens a second: of the answers, or of the prompts if the answers are of one token."""
        return self.requests * (self.output if self.output > 1 else self.prompt) / seconds


WORKLOADS = (Workload(1, 16, 64), Workload(8, 128, 64), Workload(16, 128, 64), Workload(4, 512, 1))


@dataclass(frozen=True, slots=True)
class Result:
    """The best of the runs of one engine on one workload."""

    engine: str
    workload: str
    seconds: float
    tokens_per_second: float


class Beside(NamedTuple):
    """The results of another engine, read from its printed output."""

    shape: str
    name: str
    file: Path
    text: str

    @classmethod
    def of(cls, option: str) -> "Beside":
        """From --beside, with the file read."""
        shape, _, rest = option.partition(":")
        name, _, file = rest.partition("=")
        if shape not in SHAPES or not name or not file:
            raise argparse.ArgumentTypeError(
                f"{option!r} must be SHAPE:NAME=FILE with one of the shapes {', '.join(SHAPES)}"
            )
        try:
            read = cls(shape, name, Path(file), Path(file).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"{file} cannot be read: {error}") from error
        if not any(read.results()):
            wanted = ", ".join(workload.name for workload in WORKLOADS)
            raise argparse.ArgumentTypeError(f"{file} has no line for any of the workloads {wanted}")
        return read

    @property
    def option(self) -> str:
        return f"--beside {self.shape}:{self.name}={self.file}"

    @property
    def version(self) -> str | None:
        """As the file gives it."""
        found = VERSION.search(self.text)
        return found[1] if found else None

    def results(self) -> Iterator[Result]:
        """For the same workloads."""
        known = {workload.name for workload in WORKLOADS}
        for line in self.text.splitlines():
            if (found := LINE.search(line)) and "shared=5" not in line:
                workload = Workload(*(int(number) for number in found.groups()[:3]))
                if workload.name in known:
                    yield Result(self.name, workload.name, float(found[4]), workload.rate(float(found[4])))


def compared(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """By workload: tokens a second of each engine, and the ratios of the first to each of the others."""
    figures: dict[str, dict[str, float]] = {}
    first = results[0].engine
    for result in results:
        row = figures.setdefault(result.workload, {})
        row[result.engine] = result.tokens_per_second
        if result.engine != first:
            row[f"over_{result.engine}"] = row[first] / result.tokens_per_second
    return figures


def table(shape: str, results: Sequence[Result]) -> Table:
    """One row per workload, one column per engine, and the ratios of this engine to each of the others."""
    engines = list(dict.fromkeys(result.engine for result in results))
    rates: Mapping[tuple[str, str], float] = {(r.workload, r.engine): r.tokens_per_second for r in results}
    drawn = Table(title=f"{shape}: tokens a second", header_style="dim", box=None, padding=(0, 2, 0, 0))
    drawn.add_column("requests x prompt + answer")
    for engine in engines:
        drawn.add_column(engine, justify="right")
    for workload in dict.fromkeys(result.workload for result in results):
        cells = []
        for engine in engines:
            rate = rates.get((workload, engine))
            ratio = "" if rate is None or engine == engines[0] else f"  {rates[workload, engines[0]] / rate:.2f}x"
            cells.append("" if rate is None else f"{rate:,.1f}{ratio}")
        drawn.add_row(workload, *cells)
    return drawn
