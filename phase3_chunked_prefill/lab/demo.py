"""`python -m phase3_chunked_prefill`: eight requests decode when a long prompt arrives, first whole, then in chunks."""

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from phase3_chunked_prefill.lab.stall import Outcome, Stage

COLUMNS = 60  # numbers, and a bar that can be read
RUNS = 5  # of each chunk size; the fastest is shown, since other programs can only slow a run down
LONGEST, SHORTEST = 2016, 256  # tokens of the long prompt, where its length is chosen
SECONDS = 20.0  # that all runs may take, about


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m phase3_chunked_prefill", description=__doc__)
    p.add_argument(
        "--prompt",
        type=int,
        help=f"tokens of the long prompt ({LONGEST}; fewer where that takes {SECONDS:.0f} seconds)",
    )
    p.add_argument("--decodes", type=int, default=8, help="requests that are decoding (%(default)s)")
    p.add_argument("--chunk", type=int, default=128, help="tokens of it in a step, from a page of 16 on (%(default)s)")
    p.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="that the longest step takes on a terminal, others in proportion; elsewhere none (%(default)s)",
    )
    return p


def stage_of(options: argparse.Namespace) -> "Stage":
    """Make a stage with the bundled model. Answers are long enough to outlast the long prompt."""
    if options.chunk < 16:
        raise ValueError(f"chunk must be at least a page of 16 tokens, got {options.chunk}")
    if not 0 <= options.seconds < float("inf"):
        raise ValueError(f"seconds must be at least 0 and finite, got {options.seconds}")
    # torch and numba load here, so that a bad option is refused at once
    from phase2_prefill_decode.threads import use_threads_for
    from phase3_chunked_prefill.engine import load
    from phase3_chunked_prefill.lab.stall import Scene, Stage

    prompt = LONGEST if options.prompt is None else options.prompt
    arrives, pieces = 8, -(-prompt // (options.chunk // 16 * 16))
    scene = Scene(options.decodes, answer=1 + arrives + pieces + 8, arrives=arrives, prompt=prompt)
    model = load(progress=True)
    stage = Stage(model, scene)
    use_threads_for(model.config)
    return stage


def shorten(stage: "Stage") -> None:
    """Give the long prompt as many tokens as fit into SECONDS, by the time of a short one on this machine."""
    from phase3_chunked_prefill.lab.stall import WHOLE, judge

    each = judge(WHOLE, stage.play(WHOLE, prompt=SHORTEST)).ttft_ms / 1e3 / SHORTEST
    fitting = int(SECONDS / (2 * RUNS * each)) // 16 * 16
    stage.scene = replace(stage.scene, prompt=min(max(fitting, SHORTEST), stage.scene.prompt))


def watch(stage: "Stage", chunk: int, seconds: float, console: Console) -> "list[Outcome]":
    """Draw the fastest of several runs, first whole, then in chunks. The longest step has the terminal's width."""
    from phase3_chunked_prefill.lab import view
    from phase3_chunked_prefill.lab.stall import WHOLE, judge

    coloured = console.color_system is not None and not console.no_color
    sizes = track((WHOLE, chunk) * RUNS, "running", transient=True, console=console)
    runs = [(judge(size, played), played) for size in sizes for played in [stage.play(size)]]
    best = [min(column, key=lambda run: run[0].total_ms) for column in (runs[::2], runs[1::2])]
    longest = 0.0
    console.print(view.key(coloured))
    tokens = "token" if stage.scene.prompt == 1 else "tokens"
    for head, (_, played) in zip(("whole", f"in chunks of at most {chunk}"), best, strict=True):
        longest = longest or max(step.seconds for _, step in view.shown(played))
        console.print(f"\n[bold]A prompt of {stage.scene.prompt:,} {tokens} arrives, {head}[/bold]")
        console.print(view.HEAD, style="dim")
        for number, step in view.shown(played):
            if console.is_terminal:
                time.sleep(step.seconds / longest * seconds)
            console.print(view.line(number, step, longest, console.width, coloured), no_wrap=True)
    return [outcome for outcome, _ in best]


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    options = p.parse_args(arguments)
    console = Console(highlight=False)
    if console.width < COLUMNS:
        p.error(f"a terminal must have at least {COLUMNS} columns to draw on, this one has {console.width}")
    try:
        stage = stage_of(options)
    except ValueError as error:
        p.error(str(error))
    try:
        with console.status("warming up"):
            stage.play(options.chunk, prompt=min(2 * options.chunk, stage.scene.prompt))
            if options.prompt is None:
                shorten(stage)
        outcomes = watch(stage, options.chunk, options.seconds, console)
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
    from phase3_chunked_prefill.lab import view

    console.print("", view.summary(outcomes), sep="\n")
    return 0
