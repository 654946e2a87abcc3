"""Draws a scene: one bar for each step, as long as it took, with the shares of its prefill and decode tokens."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phase0_request.core import Step
from phase0_request.lab.palette import DECODE, PREFILL
from phase3_chunked_prefill.lab.stall import WHOLE, Outcome, Played

PLAIN = {PREFILL: "#", DECODE: "="}  # where there are no colours
EIGHTHS = " ▏▎▍▌▋▊▉█"
HEAD = "step  prefill  decode        ms"
LABEL = len(HEAD) + 2  # columns before the bar
EDGE = 3  # steps shown before the long prompt arrives and after its last piece


def key(coloured: bool) -> Text:
    """The key to the bars."""
    prefill, decode = (("█", colour) if coloured else (PLAIN[colour], "") for colour in (PREFILL, DECODE))
    return Text.assemble("A bar is as long as its step took. Its tokens: ", prefill, " prefill, ", decode, " decode.")


def shown(played: Played) -> Iterator[tuple[int, Step]]:
    """The steps of the long prompt and a few on both sides, numbered from its arrival."""
    busy = [number for number, step in enumerate(played.steps) if step.prefill_tokens]
    for number, step in enumerate(played.steps):
        if busy[0] - EDGE <= number <= busy[-1] + EDGE:
            yield number - busy[0], step


def line(number: int, step: Step, longest: float, width: int, coloured: bool) -> Text:
    """The line of one step. `longest` seconds are the full width."""
    label = f"{number:>+4}{step.prefill_tokens or '':>9}{step.decode_tokens or '':>8}{step.seconds * 1e3:>10,.1f}"
    return Text.assemble((f"{label:<{LABEL}}", "dim"), bar(step, longest, max(width - LABEL, 2), coloured))


def bar(step: Step, longest: float, width: int, coloured: bool) -> Text:
    """Prefill in whole columns, then decode in eighths of one. Each is at least as long as can be seen."""
    columns = min(step.seconds / longest, 1.0) * width
    share = step.prefill_tokens / (step.prefill_tokens + step.decode_tokens)
    prefill = min(max(round(columns * share), 1), width - 1) if step.prefill_tokens else 0
    rest = columns - prefill
    if not coloured:
        decode = PLAIN[DECODE] * (max(round(rest), 1) if step.decode_tokens else 0)
        return Text(PLAIN[PREFILL] * prefill + decode)
    eighths = max(round(rest * 8), 1) if step.decode_tokens else 0
    decode = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
    return Text.assemble(("█" * prefill, PREFILL), (decode, DECODE))


def summary(outcomes: Sequence[Outcome]) -> RenderableType:
    """The gaps of the decodes and the times of the long prompt. The first outcome is that of the whole prompt."""
    table = Table(header_style="dim", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("long prompt", no_wrap=True)
    for name in ("worst gap", "median gap", "first token", "all ended"):
        table.add_column(name, justify="right", no_wrap=True)
    for o in outcomes:
        times = (o.worst_gap_ms, o.p50_gap_ms, o.ttft_ms, o.total_ms)
        name = "whole" if o.chunk == WHOLE else f"in chunks of {o.chunk}"
        table.add_row(name, *(f"{ms:,.1f} ms" for ms in times))
    return Group(table, Text(), Text(_conclusion(*outcomes), "dim"))


def _conclusion(whole: Outcome, cut: Outcome) -> str:
    shorter, longer = whole.worst_gap_ms / cut.worst_gap_ms, cut.total_ms / whole.total_ms - 1
    times, share = round(max(shorter, 1 / shorter), 1), round(abs(longer), 2)
    gap = f"{times:.1f} times {'shorter' if shorter > 1 else 'longer'}" if times > 1 else "as long"
    total = f"{share:.0%} {'longer' if longer > 0 else 'less'}" if share >= 0.05 else "as long"  # less is noise
    return (
        f"Undisturbed, a decode waits {whole.calm_gap_ms:.1f} ms for its next token. In chunks of {cut.chunk} the "
        f"worst gap is {gap}, and everything takes {total}."
    )
