"""The charts of the notebooks of chapters 6 and 7. Their cells load a server, or run steps; what they found is drawn
here."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt

from chapters.charts import BLUE, GREEN, GREY, RED, STYLE, curves
from chapters.notebook_charts import panels
from phase6_integration.load.report import Report
from phase6_integration.load.response import Outcome

plt.rcParams.update(STYLE)
PARTS = {"queue": GREY, "prefill": BLUE, "decode": GREEN, "HTTP and the client": RED}


def by_clients(reports: Mapping[int, Report], places: int) -> None:
    """What all clients and each of them get, by their number. Dotted: the requests that may run at once."""
    clients, all_panels = list(reports), panels(3)
    rate, *times = all_panels
    rate.plot(clients, [report.output_throughput for report in reports.values()], "o-", color=GREEN)
    rate.set(title="Tokens a second, all clients")
    for axes, name in zip(times, ("ttft", "itl"), strict=True):
        seen = {q: [report.latencies[f"{q}_{name}_ms"] or 0.0 for report in reports.values()] for q in ("p50", "p99")}
        curves(axes, clients, seen, title=f"{name.upper()}, ms")
    for axes in all_panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, map(str, clients))
        axes.set(xlabel="clients at once", ylim=0)
        axes.axvline(places, color=GREY, linestyle=":", linewidth=1)
    plt.show()


def parts(spent: Mapping[int, Mapping[str, float]]) -> None:
    """Where the time of a mean request goes, by the number of clients."""
    axes, left = panels(high=2.9), [0.0] * len(spent)
    for part, color in PARTS.items():
        widths = [max(each[part], 0) for each in spent.values()]
        axes.barh([str(clients) for clients in spent], widths, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.annotate(f"{total:,.0f}", (total, row), (5, -4), textcoords="offset points", color=GREY)
    axes.set(title="Milliseconds of a mean request", ylabel="clients at once", xlim=(0, 1.08 * max(left)))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.12))
    plt.show()


def streams(outcomes: Sequence[Outcome]) -> None:
    """Each delivery of each stream, a row for each; a grey line is the wait for the first."""
    axes, start = panels(), min(stream.sent for stream in outcomes)
    for row, stream in enumerate(sorted(outcomes, key=lambda stream: stream.sent), 1):
        axes.hlines(row, stream.sent - start, stream.deliveries[0] - start, color=GREY, linewidth=2)
        moments = [moment - start for moment in stream.deliveries]
        axes.plot(moments, [row] * len(moments), "|", color=GREEN, markersize=11)
        place, said = (stream.ended - start, row), f"{stream.input_tokens} in, {stream.output_tokens} out"
        axes.annotate(said, place, (6, -3), textcoords="offset points", color=GREY, fontsize=8)
    title = "What eight clients were sent, and when; beside it, their tokens in and out"
    axes.set(title=title, xlabel="seconds", ylabel="client")
    axes.set_xlim(right=1.17 * max(stream.ended - start for stream in outcomes))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    plt.show()


def lanes(timelines: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> None:
    """When the host works, and when the device does."""
    both = panels(rows=len(timelines), high=3.0, sharex=True)
    end = max(lanes["device"][-1][1] for lanes in timelines.values())
    for axes, (title, lanes) in zip(both, timelines.items(), strict=True):
        for place, (lane, color) in enumerate((("host", RED), ("device", BLUE))):
            bars = [(start, stop - start) for start, stop in lanes[lane]]
            axes.broken_barh(bars, (place - 0.35, 0.7), color=color, edgecolor="white")
        axes.set(title=title, xlim=(0, end), ylim=(1.5, -0.5))
        axes.set_yticks((0, 1), ("host", "device"))
    both[-1].set_xlabel("ms")
    plt.show()


def by_batch(sizes: Sequence[int], named: Mapping[str, Sequence[float]], title: str, **settings: Any) -> None:
    """A share in percent, by the requests that decode."""
    axes, marks = panels(high=3.0), "o-" if len(sizes) < 20 else "-"
    if len(sizes) < 20:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))
    for (name, shares), color in zip(named.items(), (BLUE, RED), strict=False):
        axes.plot(sizes, [100 * share for share in shares], marks, color=color, label=name)
    axes.set(title=title, xlabel="requests that decode", ylim=0, **settings)
    if len(named) > 1:
        axes.legend(frameon=False)
    plt.show()
