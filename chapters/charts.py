"""`python -m chapters.charts`: every chart of the book, drawn from the result files and from nothing else."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent / "figures"
BLUE, RED, GREEN, GREY = "#1d6996", "#c0392b", "#2e8b57", "#667788"

STYLE: Any = {
    "svg.hashsalt": "nano-serving",  # the same chart is the same file
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "grid.color": "#e3e8ec",
    "axes.grid": True,
    "axes.axisbelow": True,
}


def batching(figure: Any, result: dict[str, Any]) -> None:
    """What a larger batch buys, and what it costs."""
    rows = sorted(result["figures"]["batching"].values(), key=lambda row: row["batch_size"])
    sizes = [row["batch_size"] for row in rows]
    left, right = figure.subplots(1, 2)
    left.plot(sizes, [row["tokens_per_second"] for row in rows], "o-", color=BLUE)
    left.set(title="Throughput, tokens a second", xlabel="batch size (seats)", ylim=0)
    for key, name, color in (("itl_p50_ms", "p50", BLUE), ("itl_p99_ms", "p99", RED)):
        values = [row[key] for row in rows]
        right.plot(sizes, values, "o-", color=color)
        right.annotate(name, (sizes[-1], values[-1]), (6, -3), textcoords="offset points", color=color)
    right.set(title="Between two tokens (ITL), ms", xlabel="batch size (seats)", ylim=0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))


def _policy_order(name: str) -> tuple[str, int]:
    """Contiguous blocks first, then pages by their size."""
    kind, _, size = name.partition("_")
    return kind, int(size) if size.isdecimal() else 0


def fragmentation(figure: Any, result: dict[str, Any]) -> None:
    """What is in the memory while somebody waits for it, under each way to give it out."""
    outcomes = dict(sorted(result["figures"]["policies"].items(), key=lambda item: _policy_order(item[0])))
    axes = figure.subplots()
    names = [name.replace("_", " ").replace("pages", "pages of") for name in outcomes]
    tokens = [o["memory_share"] for o in outcomes.values()]
    empty = [o["reserved_share"] - o["memory_share"] for o in outcomes.values()]
    free = [1 - o["reserved_share"] for o in outcomes.values()]
    axes.barh(names, tokens, color=GREEN, label="tokens")
    axes.barh(names, empty, left=tokens, color=RED, label="reserved and empty")
    axes.barh(names, free, left=[t + e for t, e in zip(tokens, empty, strict=True)], color="#d5dbe0", label="free")
    for row, outcome in enumerate(outcomes.values()):
        axes.text(0.01, row, f"{outcome['mean_running']:.0f} requests at once", color="white", va="center", fontsize=9)
    axes.set(title="Share of the memory, while somebody waits for some", xlim=(0, 1))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.07))


Chart = tuple[str, tuple[float, float], Callable[[Any, dict[str, Any]], None]]
CHARTS: dict[str, Chart] = {
    "batching.svg": ("phase0.json", (8.8, 3.2), batching),
    "fragmentation.svg": ("fragmentation.json", (8.8, 3.6), fragmentation),
}


def fingerprint(name: str, results: Path = RESULTS) -> str:
    """What a chart was drawn from. It stands in the file, so that a chart older than its figures can be told."""
    source = CHARTS[name][0]
    return f"{source} {hashlib.sha256((results / source).read_bytes()).hexdigest()[:16]}"


def draw(name: str, results: Path = RESULTS, figures: Path = FIGURES) -> Path:
    """Draw one chart and return its file."""
    import matplotlib
    from matplotlib.figure import Figure

    source, size, paint = CHARTS[name]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        paint(figure, json.loads((results / source).read_text("utf-8")))
        figure.savefig(figures / name, metadata={"Date": None, "Source": fingerprint(name, results)})
    return figures / name


if __name__ == "__main__":
    for chart in CHARTS:
        print(draw(chart).name)
