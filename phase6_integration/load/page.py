"""One page of a run: its figures and plots, in a file that needs nothing else. Plots are SVG that stretches with the
page; their labels are HTML, which does not."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

from phase6_integration.load.report import SHOWN, Report
from phase6_integration.load.response import Outcome

BINS, ROWS = 60, 400  # bars over the time of a run; requests that are drawn, at most
A, B, BAD, NONE = "var(--a)", "var(--b)", "var(--bad)", "var(--none)"


def page(report: Report, url: str) -> str:
    """The HTML of a run."""
    title = f"{escape(report.model_id)} under load"
    style = Path(__file__).with_suffix(".css").read_text("utf-8")
    rate = "all at once" if math.isinf(report.request_rate) else f"{report.request_rate:g} requests/s"
    limit = f", at most {report.max_concurrency} at a time" if report.max_concurrency else ""
    about = f"{report.num_prompts:,} requests to {escape(url)}, {rate}{limit}, in {report.duration:,.1f} s"
    warnings = [report.late] * bool(report.late) + [f"{count} x {why}" for why, count in report.errors.items()]
    figures = {
        "requests/s": report.request_throughput,
        "good requests/s": report.request_goodput,
        "output tokens/s": report.output_throughput,
        "median TTFT, ms": report.latencies["p50_ttft_ms"],
        "p99 TTFT, ms": report.latencies["p99_ttft_ms"],
        "median TPOT, ms": report.latencies["p50_tpot_ms"],
        "p99 ITL, ms": report.latencies["p99_itl_ms"],
        "failed": float(report.failed),
    }
    tiles = "".join(f"<div><b>{_short(v)}</b><small>{k}</small></div>" for k, v in figures.items() if v is not None)
    rows = ["".join(f"<th>{name}</th>" for name in ("milliseconds", *SHOWN))]
    rows += ["".join(f"<td>{cell}</td>" for cell in row) for row in report.measured]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{style}</style><header><h1>{title}</h1><p>{about}; seed {report.seed}.</p>"
        + "".join(f'<p class="bad">{escape(line)}</p>' for line in warnings)
        + f'</header><div class="tiles">{tiles}</div><div class="plots">{"".join(_plots(report))}</div>'
        f'<div class="table"><table><tr>{"</tr><tr>".join(rows)}</tr></table></div></html>\n'
    )


def _plots(report: Report) -> Iterable[str]:
    whole = [outcome for outcome in report.outcomes if outcome.error is None]
    itl = [gap for outcome in whole for gap in outcome.itl]
    limits = report.slo.given
    if any(outcome.deliveries for outcome in whole):
        yield _cdf("Time to first token", "requests", [o.ttft for o in whole if o.deliveries], limits.get("ttft"))
    if itl:
        yield _cdf("Between deliveries (ITL)", "gaps", itl, limits.get("itl"))
    if whole:
        yield _cdf("End to end", "requests", [outcome.e2el for outcome in whole], limits.get("e2el"))
    yield _timeline(report)
    width = max(report.duration, 1e-9) / BINS

    def bins(events: Iterable[tuple[float, float]]) -> list[float]:
        heights = [0.0] * BINS
        for moment, height in events:
            heights[max(0, min(int((moment - report.start) / width), BINS - 1))] += height
        return heights

    spread = ((d, o.output_tokens / len(o.deliveries) / width) for o in whole for d in o.deliveries)
    yield _bars("Output", "tokens/s", report.duration, [(A, "", bins(spread))])
    kept = bins((o.ended, 1 / width) for o in whole if report.slo.kept(o))
    missed = bins((o.ended, 1 / width) for o in whole if not report.slo.kept(o))
    failed = bins((o.ended, 1 / width) for o in report.outcomes if o.error is not None)
    slo = "kept " + ", ".join(f"{name} {ms:g} ms" for name, ms in limits.items()) if limits else "completed"
    layers = [(A, slo, kept), (B, "missed it", missed), (BAD, "failed", failed)]
    yield _bars(
        "Goodput", "requests/s", report.duration, [layer for layer in layers if any(layer[2]) or layer is layers[0]]
    )


def _plot(title: str, about: str, marks: str, x: Iterable[tuple[float, str]], y: Iterable[tuple[float, str]]) -> str:
    """Marks on a square of 1000. Ticks are shares of an axis with their labels."""
    x, y = list(x), list(y)
    grid = "".join(f"M0 {1000 - 1000 * at:.1f}H1000" for at, _ in y) + "".join(
        f"M{1000 * at:.1f} 0V1000" for at, _ in x
    )
    labels = "".join(f'<span class="x" style="left:{100 * at:.2f}%">{text}</span>' for at, text in x)
    labels += "".join(f'<span class="y" style="bottom:{100 * at:.2f}%">{text}</span>' for at, text in y)
    return (
        f'<figure><figcaption>{title}<span>{about}</span></figcaption><div class="plot">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f'<path class="grid" d="{grid}"/>{marks}</svg>{labels}</div></figure>'
    )


def _cdf(title: str, what: str, seconds: Sequence[float], limit: float | None) -> str:
    """The share of values up to each length, over a logarithmic axis."""
    values = sorted(max(value * 1e3, 1e-3) for value in seconds)
    low = math.log10(min(max(values[0], 0.1), limit or math.inf) / 1.1)
    high = math.log10(max(values[-1], limit or 0, 0.1) * 1.1)

    def at(value: float) -> float:
        return (math.log10(value) - low) / (high - low)

    steps = (1, 2, 5) if high - low < 2.2 else (1, 3) if high - low < 3 else (1,)
    ticks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high)) for step in steps]
    points = sorted({round(i * (len(values) - 1) / 300) for i in range(301)})
    line = "".join(f"L{max(1000 * at(values[i]), 0):.1f} {1000 - 1000 * (i + 1) / len(values):.1f}" for i in points)
    marks = f'<path stroke="{A}" d="M{max(1000 * at(values[0]), 0):.1f} 1000{line}H1000"/>'
    about = f"share of {len(values):,} {what} within milliseconds"
    if limit is not None:
        marks += f'<path stroke="{BAD}" stroke-dasharray="5 4" d="M{1000 * at(limit):.1f} 0V1000"/>'
        about += f'<i style="background:{BAD}"></i>the limit'
    return _plot(title, about, marks, [(at(t), _short(t)) for t in ticks if 0 <= at(t) <= 1], _ticks(100, "%"))


def _timeline(report: Report) -> str:
    """A line for each request: its wait for the first token, and its answer."""
    every = -(-len(report.outcomes) // ROWS) or 1
    rows = sorted(report.outcomes, key=lambda outcome: outcome.planned)[::every]
    scale, height = 1000 / max(report.duration, 1e-9), 1000 / max(len(rows), 1)

    def rect(outcome: Outcome, row: int, begin: float, end: float, color: str) -> str:
        place = f'x="{(begin - report.start) * scale:.1f}" width="{max((end - begin) * scale, 0.5):.1f}"'
        place += f' y="{row * height:.1f}" height="{max(height * 0.85, 0.8):.1f}"'
        words = f"TTFT {outcome.ttft * 1e3:,.1f} ms, " * bool(outcome.deliveries)
        words += f"{outcome.output_tokens} tokens in {outcome.e2el:,.2f} s"
        return f'<rect fill="{color}" {place}><title>{escape(outcome.error or words)}</title></rect>'

    marks = ""
    for row, outcome in enumerate(rows):
        first = outcome.deliveries[0] if outcome.deliveries else outcome.ended
        failed = outcome.error is not None
        marks += rect(outcome, row, outcome.planned, first, BAD if failed else B)
        if first < outcome.last:
            marks += rect(outcome, row, first, outcome.last, BAD if failed else A)
    about = f'over seconds<i style="background:{B}"></i>until the first token<i style="background:{A}"></i>answer'
    x = _ticks(report.duration)
    return _plot(f"Requests{f', each {every}th' if every > 1 else ''}", about, marks, x, [])


def _bars(title: str, unit: str, seconds: float, layers: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """Stacked bars over time."""
    tops = [*accumulate((heights for _, _, heights in layers), lambda a, b: [x + y for x, y in zip(a, b, strict=True)])]
    most, marks = max(tops[-1]) or 1.0, ""
    for (color, _, heights), top in zip(layers, tops, strict=True):
        for place, (height, upper) in enumerate(zip(heights, top, strict=True)):
            if height:
                where = f'x="{place * 1000 / BINS:.1f}" width="{900 / BINS:.1f}" y="{1000 - 1000 * upper / most:.1f}"'
                marks += f'<rect fill="{color}" {where} height="{1000 * height / most:.1f}"/>'
    keys = "".join(f'<i style="background:{color}"></i>{escape(name)}' for color, name, _ in layers if name)
    return _plot(title, f"{unit} over seconds{keys}", marks, _ticks(seconds), _ticks(most))


def _ticks(most: float, unit: str = "") -> list[tuple[float, str]]:
    """Round numbers from 0 to the most, as shares of it."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if most / (power * each) <= 5)
    return [(i * step / most, _short(i * step) + unit) for i in range(int(most / step + 1e-9) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
