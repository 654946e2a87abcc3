"""`python -m phase2_prefill_decode "What is a KV cache?"`: a streamed answer, then where its time went."""

import argparse
import io
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase0_request.lab import palette
from phase0_request.params import SamplingParams
from phase0_request.request import Request, RequestTimes
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.lab.word_wrap import WordWrap
from phase2_prefill_decode.threads import use_threads_for

QUESTION = "What is a KV cache?"
BAR = 28  # columns for the time from the prompt to the last token, where there is room
NUMBERS = 50  # columns beside it
EIGHTHS = " ▏▎▍▌▋▊▉█"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m phase2_prefill_decode", description=__doc__)
    p.add_argument("question", nargs="?", default=QUESTION, help="(%(default)s)")
    p.add_argument(
        "--model", type=Path, default=BUNDLED, metavar="DIR", help="in Hugging Face layout (the bundled one)"
    )
    p.add_argument("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    p.add_argument("--max-tokens", type=int, default=96, help="(%(default)s)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    p.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    p.add_argument("--seed", type=int, default=None, help="of the draws; the same seed, the same answer")
    return p


def answer(options: argparse.Namespace, params: SamplingParams) -> Iterator[str | Request]:
    """The pieces of the answer's text, then the request itself."""
    from phase2_prefill_decode.engine import static  # loads torch, Triton and numba, after the arguments are checked
    from phase2_prefill_decode.loading.model import Model

    model = Model.load(options.model, progress=True)
    use_threads_for(model.config)
    if model.tokenizer is None:
        raise ValueError(f"{str(options.model)!r} has no tokenizer.json")
    messages = [{"role": "user", "content": options.question}]
    prompt = options.question if options.raw else model.tokenizer.chat(messages)
    engine = static(model)
    engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))  # warm up
    with closing(engine.stream([prompt], params)) as deltas:
        for delta in deltas:
            yield delta.text
    yield delta.request


def picture(request: Request, width: int, ascii_only: bool = False) -> RenderableType:
    """Both phases on one time axis. A narrow terminal shows the numbers alone."""
    times, prompt, answer = request.times, len(request.prompt_tokens), len(request.output_tokens)
    prefill, decode = times.ttft or 0.0, times.tokens[-1] - times.tokens[0]
    bar = min(BAR, width - NUMBERS) if width >= 60 else 0
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2 if bar else 1, 0, 0))
    for name in ("", "steps", "tokens", "time", "a token"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    if bar:
        table.add_column("when", no_wrap=True)
    share = prefill / (prefill + decode)
    rows = (
        ("prefill", 1, prompt, prefill, (0.0, share), palette.PREFILL),
        ("decode", answer - 1, answer - 1, decode, (share, 1.0), palette.DECODE),
    )
    for name, steps, tokens, seconds, span, colour in rows:
        each = _ms(seconds / tokens) if tokens else ""
        when = [Text(_span(*span, bar, ascii_only), colour)] if bar else []
        table.add_row(name, str(steps), str(tokens), _ms(seconds), each, *when)
    table.width = Console(width=200).measure(table).maximum  # a terminal may break a line; no number is cut
    return Group(Text(), table, Text(_conclusion(times, prompt), "dim"))


def _conclusion(times: RequestTimes, prompt: int) -> str:
    prefill = times.ttft or 0.0
    if not times.itl:
        return "One token: the prompt's own step made it."
    step = sum(times.itl) / len(times.itl)
    return (
        f"The prompt's step computed {prompt} tokens in {_ms(prefill)}; a step for one token takes {_ms(step)}. "
        f"A token costs {step * prompt / prefill:.0f} times as much when it comes alone."
    )


def _span(start: float, stop: float, columns: int, ascii_only: bool) -> str:
    """A bar over a part of the axis, to an eighth of a column."""
    first, last = round(start * columns * 8), max(round(stop * columns * 8), round(start * columns * 8) + 1)
    cells = []
    for column in range(columns):
        full = min(last - 8 * column, 8) - max(first - 8 * column, 0)
        cells.append(" " if full <= 0 else "#" if ascii_only else EIGHTHS[full])
    return "".join(cells)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 0.01 else f"{seconds * 1e3:,.2f} ms"


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    options = p.parse_args(arguments)
    try:
        params = SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, seed=options.seed
        )
    except ValueError as error:
        p.error(str(error))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal has no letter for
    console = Console(highlight=False)
    wrap = WordWrap(console.width if console.is_terminal else sys.maxsize)
    started = time.perf_counter()
    try:
        for piece in answer(options, params):
            if not isinstance(piece, Request):
                console.out(wrap.push(piece), end="")
                console.file.flush()
            elif piece.error is not None:
                raise ValueError(piece.error)
            else:
                console.out(wrap.end(), end="")
                drawn = picture(piece, console.width, console.options.ascii_only)
                console.print("\n", drawn, sep="", crop=False)
    except (ValueError, OSError) as error:
        print(f"{p.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.print(f"\nStopped after {time.perf_counter() - started:.1f} s.")
        return 130
    return 0
