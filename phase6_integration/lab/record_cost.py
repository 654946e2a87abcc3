"""`python -m phase6_integration.lab record_cost`: what it costs to record an engine, and how large its record is.

The bundled model decodes for some requests, while one more waits. In "churn" their outputs are short, so that in each
step requests end and others are admitted. What is measured is the time in the recorder's own calls, of which each line
is packed as the server's engine packs it for the HTTP process, and beside it the time of the whole step: on a machine
with other work, two runs differ by more than a record costs. Records without the ids of the tokens and with them take
turns. Each figure is the median of blocks of steps.
"""

import gzip
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import msgspec
from rich.console import Console

from phase0_request.lab.report import finish, parser, section
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase2_prefill_decode.model import default_device
from phase5_continuous.extras.record.lines import Line
from phase5_continuous.extras.record.record_file import encoded
from phase5_continuous.extras.record.recorder import Recorder
from phase6_integration.engine.engine import NanoServingEngine

RUNNING = 1, 16, 256
CHURN = 64
PROMPT, SHORT = 32, 16  # tokens of each prompt, and of an output in "churn"
BLOCK = 16  # steps: as many as a request takes to fill a page
ROUNDS = 12
CALLS = "submitted", "planned", "completed", "grown", "swapped", "released", "stored", "removed"


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a step, what a record adds to that, and the bytes of its line: as JSON, and in a .gz file. In two
    columns each: without and with the ids of the tokens."""

    step_ms: float
    record_us: float
    text_us: float
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


class Timed(Recorder):
    """A recorder that knows how long it takes, and keeps its lines."""

    def __init__(self, load: Load, text: bool) -> None:
        self.lines, self.encode, self.seconds = list[Line](), msgspec.msgpack.Encoder().encode, 0.0
        for name in CALLS:
            setattr(self, name, self.timed(getattr(self, name)))
        super().__init__(load.core, self.keep, text=text)

    def keep(self, line: Line) -> None:
        self.encode(line)
        self.lines.append(line)

    def timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: object) -> None:
            start = time.perf_counter()
            call(*arguments)
            self.seconds += time.perf_counter() - start

        return timed


def cost(running: int, output: int) -> Cost:
    load = Load(running, output)
    steps, spent, lines = list[float](), defaultdict[bool, list[float]](list), defaultdict[bool, list[Line]](list)
    with load.engine:
        for _ in range(4):  # until all run
            load.block()
        for number in range(2 * ROUNDS):
            text = number % 2 == 1
            recorder = Timed(load, text)
            recorder.seconds, recorder.lines = 0.0, []  # without the header and the snapshot
            seconds = load.block()
            spent[text].append(recorder.seconds / BLOCK)
            steps.append(seconds - spent[text][-1])
            lines[text] += recorder.lines
            recorder.close()
    files = ["".join(f"{encoded(line)}\n" for line in lines[text]).encode() for text in (False, True)]
    sizes = [len(each) / (ROUNDS * BLOCK) for file in files for each in (file, gzip.compress(file))]
    step, record, text_too = median(steps), median(spent[False]), median(spent[True])
    return Cost(1e3 * step, 1e6 * record, 1e6 * text_too, 100 * record / step, 100 * text_too / step, *sizes)


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab record_cost", __doc__)
    options, console = p.parse_args(arguments), Console(highlight=False)
    costs = {f"decode_{running}": cost(running, (2 * ROUNDS + 5) * BLOCK) for running in RUNNING}
    costs[f"churn_{CHURN}"] = cost(CHURN, SHORT)
    figures = {"steps": section(console, "A step, and what a record takes of it", costs, digits=2)}
    finish(p, options, arguments, figures, gpu=default_device().type == "cuda")
    return 0
