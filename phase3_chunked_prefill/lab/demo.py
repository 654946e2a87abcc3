"""`python -m phase3_chunked_prefill`: eight requests decode when a long prompt arrives, first whole, then in chunks."""

import argparse

from rich.console import Console

from phase0_request.lab.report import table
from phase0_request.lab.viewer import Recording

ARRIVES = 3  # steps before the long prompt


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase3_chunked_prefill", description=__doc__)
    p.add_argument("--prompt", type=int, default=1024, help="tokens of the long prompt (%(default)s)")
    p.add_argument("--decodes", type=int, default=8, help="requests that are decoding (%(default)s)")
    p.add_argument("--chunk", type=int, default=128, help="tokens of the prompt in a step (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    if options.chunk < 16:
        p.error(f"chunk must be at least a page of 16 tokens, got {options.chunk}")
    from phase2_prefill_decode.model import (
        Model,  # torch and numba load here, after the options have been checked
    )
    from phase3_chunked_prefill.lab.stall import WHOLE, Scene, Stage, judge

    pieces = -(-options.prompt // (options.chunk // 16 * 16))
    try:
        scene = Scene(options.decodes, answer=ARRIVES + pieces + 6, arrives=ARRIVES, prompt=options.prompt)
        stage = Stage(Model.load(progress=True), scene)
    except ValueError as error:
        p.error(str(error))
    stage.play(options.chunk, prompt=min(2 * options.chunk, options.prompt))  # warms up
    longest, rows = 0.0, []
    for name, chunk in (("whole", WHOLE), (f"in chunks of {options.chunk}", options.chunk)):
        outcome, played = min(
            ((judge(chunk, played), played) for played in (stage.play(chunk) for _ in range(3))),
            key=lambda run: run[0].total_ms,  # other programs can only slow a run down
        )
        recording = Recording([*played.decodes, played.long])
        for step in played.steps:
            recording.add(step)
        longest = max(longest, *(step.seconds for step in played.steps))
        recording.show(console, f"A prompt of {options.prompt:,} tokens arrives, {name}", longest)
        console.print()
        rows.append((name, outcome.worst_gap_ms, outcome.p50_gap_ms, outcome.ttft_ms, outcome.total_ms))
    console.print(table(("ms", "worst gap", "median gap", "first token", "all ended"), rows))
    console.print(f"Undisturbed, a decode waits {outcome.calm_gap_ms:.1f} ms for its next token.")
    return 0
