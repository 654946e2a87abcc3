"""The viewer of every demo: a line for each step, with a sign for each request and a bar of its time or tokens.

    step  prefill decode pages      ms  requests
       1      120            8    21.3  ▒▒▒··  ██████████████
     2-9               3     9     2.0  ███··  █

Steps are recorded while the engine runs and shown afterwards, so that drawing takes no time from them. It needs no more
than 80 columns, and writes the same lines to a file. The record of phase 5 holds more and is another: the demos of
phases 0 to 4 cannot import it, and these lines need only a step and the states of its requests.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from typing import Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from phase0_request.core import Step
from phase0_request.request import Request, RequestState

WAITING, PREFILL, DECODE, PREEMPTED, LEFT_OUT, GONE = "·▒█x- "
KEY = {  # of each sign, its name and its colour: those of the book's drawings
    WAITING: ("waiting", "dim"),
    PREFILL: ("prefill", "yellow"),
    DECODE: ("decode", "cyan"),
    PREEMPTED: ("preempted", "bold red"),
    LEFT_OUT: ("left out", "magenta"),
}
IDLE = {
    RequestState.WAITING: WAITING,
    RequestState.RUNNING: LEFT_OUT,
    RequestState.PREEMPTED: PREEMPTED,
    RequestState.FINISHED: GONE,
}
HEAD = "step     prefill decode pages      ms  "
BEFORE = len(HEAD)  # columns
ASCII = str.maketrans({WAITING: ".", PREFILL: "+", DECODE: "#", "░": "_"})
PAUSE = 0.06  # seconds between two lines on a terminal


Bar = Literal["time", "tokens"]


class Line(NamedTuple):
    """One step, or several in a row that differ only in their time."""

    first: int
    last: int
    prefill: int
    decode: int
    pages: int
    seconds: float  # on average; 0: not known
    signs: str  # one for each request, or for each page

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode


class Recording:
    """The steps of one run. The requests have their columns in the order in which they were seen first."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.lines: list[Line] = []
        self.steps = 0
        self._requests = {request.id: request for request in requests}

    def add(self, step: Step, others: Iterable[Request] = ()) -> None:
        """Record a step that has been committed. `others` are requests that may not have been in a step yet."""
        did = {
            request.id: DECODE if length == 1 and start >= len(request.prompt_tokens) else PREFILL
            for request, start, length, _ in step.batch
        }
        for request in (*(piece.request for piece in step.batch), *others):
            self._requests.setdefault(request.id, request)
        self.steps += 1
        signs = "".join(did.get(name) or IDLE[request.state] for name, request in self._requests.items())
        counts = step.prefill_tokens, step.decode_tokens, step.pages
        self.lines.append(Line(self.steps, self.steps, *counts, step.seconds, signs.rstrip(GONE)))

    def show(self, console: Console, title: str, longest: float | None = None, bar: Bar = "time") -> None:
        """Print the lines. A step of `longest` seconds has the longest bar; by default the longest step of these."""
        show(console, title, self.lines, "requests", longest, bar)


def folded(lines: Iterable[Line]) -> Iterator[Line]:
    """Join steps in a row that only decode, all of them the same requests."""
    for _, group in groupby(lines, key=lambda line: line.signs if not line.prefill else line):
        steps = list(group)
        yield steps[-1]._replace(first=steps[0].first, seconds=fmean(line.seconds for line in steps))


def show(
    console: Console,
    title: str,
    lines: Sequence[Line],
    columns: str,
    longest: float | None = None,
    bar: Bar = "time",
) -> None:
    """Print lines of signs, one for each of `columns`: requests or pages. The bar is the step's time or tokens."""
    long = attrgetter("seconds" if bar == "time" else "tokens")
    longest = longest or max(map(long, lines), default=0.0)
    signs = max((len(line.signs) for line in lines), default=0)
    width = max(min(console.width, 100) - BEFORE - signs - 3, 1)
    console.print(title, style="bold", highlight=False)
    if columns == "requests":
        console.print(_key({sign for line in lines for sign in line.signs}, console.options.ascii_only))
    label = (f"{bar} of the step" if width > 18 else bar) if any(line.seconds for line in lines) else ""
    under = signs + 2 if len(columns) < signs + 2 else len(columns) + 1
    console.print(f"{HEAD}{columns:<{under}}{label}", style="dim", no_wrap=True, highlight=False, overflow="ellipsis")
    for line in folded(lines):
        share = long(line) / longest if line.seconds else 0.0
        console.print(_text(line, signs, width, share, console.options.ascii_only), no_wrap=True)
        if console.is_terminal:
            time.sleep(PAUSE)


def _key(signs: Collection[str], ascii_only: bool) -> Text:
    names = [(_sign(sign, ascii_only), *KEY[sign]) for sign in KEY if sign in signs]
    return Text.assemble(*(part for sign, name, style in names for part in ((sign, style), f" {name}   ")))


def _sign(sign: str, ascii_only: bool) -> str:
    return sign.translate(ASCII) if ascii_only else sign


def _text(line: Line, signs: int, width: int, share: float, ascii_only: bool) -> Text:
    steps = f"{line.first}" if line.first == line.last else f"{line.first}-{line.last}"
    counts = f"{line.prefill or '':>7} {line.decode or '':>6} {line.pages or '':>5}"
    time_of_a_step = f"{line.seconds * 1e3:,.1f}" if line.seconds else ""
    text = Text(f"{steps:<9}{counts} {time_of_a_step:>7}  ", "dim")
    for sign in line.signs:
        text.append(_sign(sign, ascii_only), KEY[sign][1] if sign in KEY else "")
    if line.seconds:
        bar = min(max(round(share * width), 1), width)
        text.append(" " * (signs - len(line.signs) + 2))
        text.append(("#" if ascii_only else "█") * bar, KEY[PREFILL if line.prefill else DECODE][1])
    return text
