"""The charts of the notebooks of chapters 3 to 5. Their cells run the engine; what they ran is drawn here."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt

from chapters.charts import BLUE, GREEN, GREY, RED, STYLE, curves
from phase3_chunked_prefill.lab.stall import Outcome, Played

plt.rcParams.update(STYLE | {"figure.dpi": 110})
Rows = Sequence[Mapping[Any, str]]  # what each request did, step by step


def panels(columns: int = 1, rows: int = 1, high: float = 3.3, **more: Any) -> Any:
    """Axes of a figure that is as wide as a page."""
    return plt.subplots(rows, columns, figsize=(9.5, high), layout="constrained", **more)[1]


def gaps(played: Mapping[str, Played]) -> None:
    """The time between two tokens of a decode, over time: a panel for each chunk size, all on one linear scale."""
    axes = panels(rows=len(played), high=5.6, sharex=True, sharey=True)
    for one, (name, (_, decodes, long)) in zip(axes, played.items(), strict=True):
        arrival, moments = long.times.arrival, decodes[0].times.tokens
        waits = [(later - earlier) * 1e3 for earlier, later in pairwise(moments)]
        each, ttft = "a token of all eight requests", "first token of the long prompt"
        one.vlines([moment - arrival for moment in moments[1:]], 0, waits, color=RED, linewidth=2, label=each)
        one.axvline(long.times.ttft, color=GREEN, linewidth=1.2, linestyle="--", zorder=3, label=ttft)
        one.set_title(name, fontsize=10)
    first = next(iter(played.values())).long.times.ttft
    axes[0].set_xlim(-0.1 * (first or 0), None)
    axes[len(played) // 2].set_ylabel("ms between two tokens")
    axes[-1].set_xlabel("seconds since the long prompt arrived")
    axes[0].legend(frameon=False, ncols=2, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.98))
    plt.show()


def tradeoff(outcomes: Mapping[str, Outcome]) -> None:
    """First token against gaps, and what each chunk size costs in all."""
    left, right = panels(2)
    rows = list(outcomes.values())
    left.plot([o.ttft_ms for o in rows], [o.worst_gap_ms for o in rows], "o-", color=BLUE)
    for name, o in outcomes.items():
        left.annotate(name, (o.ttft_ms, o.worst_gap_ms), (5, 5), textcoords="offset points", color=GREY, fontsize=9)
    left.set(title="Worst gap of a decode, ms", xlabel="first token of the long prompt, ms", ylim=0)
    left.margins(x=0.12)
    right.bar(list(outcomes), [o.total_ms for o in rows], 0.6, color=BLUE)
    right.set(title="All requests have ended after, ms", xlabel="chunk size")
    right.grid(axis="x", visible=False)
    plt.show()


def predicted(title: str, steps: Sequence[float], best: Sequence[float], mixed: Mapping[str, Sequence[Any]]) -> None:
    """Steps in order beside their prediction; and measured against predicted, (predicted, measured) for each."""
    left, right = panels(2)
    left.plot(steps, "o-", color=RED, markersize=4, label="measured")
    left.plot(best, "--", color=GREY, label="predicted, at best")
    left.set(title=title, xlabel="step", ylim=0)
    left.legend(frameon=False)
    for (name, points), color in zip(mixed.items(), (GREEN, BLUE, RED), strict=False):
        right.plot(*zip(*points, strict=True), "o", color=color, markersize=4, label=name)
    every = [number for points in mixed.values() for point in points for number in point]
    right.plot([min(every), max(every)], [min(every), max(every)], "--", color=GREY)
    right.set(title="Mixed steps, ms", xlabel="predicted", ylabel="measured", xscale="log", yscale="log")
    right.legend(frameon=False)
    plt.show()


def beside(x: Sequence[float], label: str, *charts: tuple[str, Mapping[str, Sequence[float]], float | None]) -> None:
    """Curves over one axis: a chart for each (title, curves by name, upper limit)."""
    for axes, (title, named, top) in zip(panels(len(charts)), charts, strict=True):
        curves(axes, x, named, title=title, xlabel=label, ylim=(0, top))
    plt.show()


def pressure(pages: Sequence[int], hit_rates: Mapping[str, Sequence[float]], found: Sequence[int], worth: int) -> None:
    """Hit rates by cache size, up to what is worth keeping; and the cached tokens of single requests."""
    left, right = panels(2, width_ratios=(2, 3))
    curves(left, pages, hit_rates, title="Hit rate, %", xlabel="pages of the cache", ylim=(-3, 100))
    left.axvline(worth, color=GREY, linewidth=1, linestyle="--")
    right.bar(range(len(found)), found, color=BLUE)
    right.set(title="Cached tokens of each request, at random in 88 pages", xlabel="request", yticks=range(0, 513, 128))
    right.grid(axis="x", visible=False)
    plt.show()


def by_size(pages: Sequence[int], hit_rates: Mapping[str, Sequence[float]]) -> None:
    """Hit rates by cache size, on a logarithmic axis."""
    axes = panels()
    curves(axes, pages, hit_rates, title="Hit rate, %", xlabel="pages of the cache, 16 tokens each", ylim=(0, 100))
    axes.set_xscale("log")
    axes.set_xticks(pages, [f"{count:,}" for count in pages])
    axes.minorticks_off()
    plt.show()


def batches(watched: Mapping[str, Rows], requests: int) -> None:
    """What every request did in every step: a row for each request, a panel for each way."""
    colors = {"prefill": BLUE, "decode": GREEN, "preempted": RED}
    for axes, (name, rows) in zip(panels(rows=len(watched), high=6, sharex=True), watched.items(), strict=True):
        for did, color in colors.items():
            where = [(step, request) for step, row in enumerate(rows) for request, what in row.items() if what == did]
            axes.scatter(*zip(*where, strict=True), c=color, s=5, marker="s", linewidths=0, label=did) if where else ()
        axes.set(title=f"{name}: {len(rows)} steps", ylabel="request", ylim=(requests, -1))
    axes.set_xlabel("step")
    axes.legend(frameon=False, ncols=3, loc="lower right")
    plt.show()


def memory(pages: Mapping[str, Sequence[int]], lost: Iterable[int], total: int) -> None:
    """The pages in use after each step, and the steps in which a request was preempted."""
    axes = panels(high=2.8)
    for (name, used), color in zip(pages.items(), (GREY, GREEN), strict=True):
        axes.step(range(len(used)), used, where="post", color=color, linewidth=1.3, label=name)
    steps = list(lost)
    axes.plot(steps, [used[step - 1] for step in steps], "v", color=RED, markersize=6, label="a preemption")
    axes.set(title="Pages in use", xlabel="step", ylim=(0, total + 4))
    axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98))
    plt.show()


def goodput(rates: Sequence[int], simulated: Mapping[str, Sequence[float]], measured: Mapping[str, Any]) -> None:
    """Requests that met the SLO by the rate of arrivals. Wide lines lie under narrow ones: some ways are the same."""
    styles = (GREY, ":", 1.5), ("#c3d2dc", "-", 9), (BLUE, "-", 4.5), (GREEN, "-", 1.5), (RED, "--", 1.5)
    axes = panels(high=4)
    for (way, kept), (color, line, width) in zip(simulated.items(), styles, strict=True):
        axes.plot(rates, kept, line, color=color, linewidth=width, label=f"{way}, simulated")
    for (way, points), mark in zip(measured.items(), ("s", "o"), strict=True):
        axes.plot(
            points.keys(), points.values(), f"{mark}-", color="black", markersize=5, label=f"{way}, measured here"
        )
    axes.plot(rates, rates, color="#d5dce1", linewidth=1, zorder=0)
    axes.set(title="Requests a second that met the SLO", xlabel="arrivals a second", xlim=0, ylim=0)
    axes.legend(frameon=False)
    plt.show()
