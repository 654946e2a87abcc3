"""`python -m phase6_integration.lab record_cost`: what it costs to record an engine, and how large its record is.

The bundled model decodes for some requests, while one more waits. In "churn" their outputs are short, so that in each
step requests end and others are admitted. Blocks of steps without a record, with one, and with one that has the ids of
the tokens take turns; each line is packed as the server's engine packs it for the HTTP process. Each figure is the
median block.
"""

import gzip
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import msgspec
from rich.console import Console

from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase5_continuous.recorder import Line, Recorder, encoded
from phase6_integration.engine.engine import NanoServingEngine

RUNNING = 1, 16, 256
CHURN = 64
PROMPT, SHORT = 32, 16  # tokens of each prompt, and of an output in "churn"
BLOCK = 16  # steps: as many as a request takes to fill a page
ROUNDS = 12
MODES = "off", "record", "text"


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a step, what a record adds to that, and the bytes of its line: as JSON, and in a .gz file."""

    off_ms: float
    record_ms: float
    text_ms: float
    record_percent: float
    text_percent: float
    line_bytes: float
    line_gzip: float
    text_bytes: float
    text_gzip: float


class Load:
    """An engine with as many running requests as it may have, and one that waits."""

    def __init__(self, running: int, output: int) -> None:
        self.output, self.numbers, self.running = output, itertools.count(), running
        pages = (running + 1) * ((PROMPT + output) // 16 + 2)
        self.engine = NanoServingEngine.from_pretrained(
            kv_cache_pages=pages, max_num_seqs=running, max_num_batched_tokens=max(512, 2 * running)
        )
        self.core = self.engine.parts.core
        self.fill()

    def fill(self) -> None:
        """Submit requests until one waits, each with a prompt that no other shares."""
        while len(self.engine.parts.scheduler.sequences) <= self.running:
            number = next(self.numbers)
            prompt = [100 + (number + 7 * place * number) % 3000 for place in range(PROMPT)]
            length = self.output if number >= self.running or self.output > SHORT else 1 + number % SHORT
            params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
            self.core.submit(Request(f"request-{number}", tuple(prompt), params, arrival=self.core.clock()))

    def block(self) -> float:
        """The seconds of a step, on average."""
        start = time.perf_counter()
        for _ in range(BLOCK):
            self.core.step()
            self.fill()
        return (time.perf_counter() - start) / BLOCK


@contextmanager
def recorded(load: Load, mode: str) -> Iterator[list[Line]]:
    """The lines of a record, the header and a snapshot first; none if it is off."""
    lines, encode = list[Line](), msgspec.msgpack.Encoder().encode

    def write(line: Line) -> None:
        encode(line)
        lines.append(line)

    recorder = None if mode == "off" else Recorder(load.core, write, text=mode == "text")
    yield lines
    if recorder is not None:
        recorder.close()


def cost(running: int, output: int) -> Cost:
    load, seconds, lines = (
        Load(running, output),
        defaultdict[str, list[float]](list),
        defaultdict[str, list[Line]](list),
    )
    with load.engine:
        for _ in range(4):  # until all run
            load.block()
        for number in range(ROUNDS):
            for mode in (*MODES[number % 3 :], *MODES[: number % 3]):
                with recorded(load, mode) as written:
                    seconds[mode].append(load.block())
                lines[mode] += written[2:]
    off, record, text = (1e3 * median(seconds[mode]) for mode in MODES)
    more = [100 * median(a / b - 1 for a, b in zip(seconds[mode], seconds["off"], strict=True)) for mode in MODES[1:]]
    files = ["".join(f"{encoded(line)}\n" for line in lines[mode]).encode() for mode in MODES[1:]]
    sizes = [len(each) / (ROUNDS * BLOCK) for file in files for each in (file, gzip.compress(file))]
    return Cost(off, record, text, *more, *sizes)


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab record_cost", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    costs = {f"decode_{running}": cost(running, (3 * ROUNDS + 5) * BLOCK) for running in RUNNING}
    costs[f"churn_{CHURN}"] = cost(CHURN, SHORT)
    finish(p, options, arguments, {"steps": section(console, "A step without a record, and with", costs, digits=2)})
    return 0
