"""The charts of the notebooks of chapters 0 and 1. Their cells run the engine; what they ran is drawn here."""

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from chapters.charts import BLUE, GREY, RED, STYLE, curves
from phase0_request import Request
from phase0_request.lab.trace import PipelineStage, RequestTracer
from phase1_kv_pool import KVLayout
from phase1_kv_pool.lab.fragmentation import Outcome
from phase1_kv_pool.lab.serving import Cell

plt.rcParams.update(STYLE)
GIB = 1 << 30
STAGES = dict(zip(PipelineStage, ("#8e44ad", "#27ae60", "#f1c40f", BLUE, RED), strict=True))


def panels(columns: int = 1, rows: int = 1, high: float = 3.3, **more: Any) -> Any:
    """Axes of a figure that is as wide as a page."""
    return plt.subplots(rows, columns, figsize=(9.5, high), layout="constrained", **more)[1]


def bars(title: str, values: Mapping[str, float]) -> None:
    axes = panels(high=2.4)
    axes.bar_label(axes.barh(list(values), list(values.values()), color=BLUE), fmt="%.2f", padding=4)
    axes.set(title=title)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    plt.show()


def timeline(trace: RequestTracer, requests: Iterable[Request], start: float) -> None:
    """A row for each request, coloured by the stage that it is in."""
    axes, names = panels(high=2.8), [request.id for request in requests]
    for row, name in enumerate(names):
        for span in trace.spans(name):
            place = [((span.start - start) * 1e3, span.seconds * 1e3)], (row - 0.36, 0.72)
            axes.broken_barh(*place, color=STAGES[span.stage], edgecolor="white", linewidth=0.4)
    axes.set(title="Five requests through the stages, batch size three", xlabel="ms since the first arrival")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    patches = [Patch(color=color) for color in STAGES.values()]
    axes.legend(patches, [stage.value for stage in STAGES], ncols=5, bbox_to_anchor=(0.8, -0.25), frameon=False)
    plt.show()


def waits(rates: Sequence[float], medians: Mapping[int, Sequence[float]]) -> None:
    """The median time to first token by rate of arrivals, for each batch size."""
    axes = panels()
    named = {f"batch size {size}": seconds for size, seconds in medians.items()}
    curves(axes, rates, named, title="Median time to first token, seconds", xlabel="requests a second", yscale="log")
    plt.show()


def contexts(models: Mapping[str, KVLayout], free: int) -> None:
    """The memory of one request by its number of tokens."""
    axes, lengths = panels(), [1 << power for power in range(10, 18)]
    for (name, layout), color in zip(models.items(), ("#0b3c5d", BLUE, "#4a94b1", RED, "#d98032"), strict=True):
        axes.plot(lengths, [n * layout.bytes_per_token / GIB for n in lengths], "o-", color=color, label=name)
    axes.axhline(free / GIB, color=GREY, linestyle="--", linewidth=1)
    axes.annotate("free beside the weights", (lengths[0], free / GIB), (0, 5), textcoords="offset points", color=GREY)
    axes.set(title="Keys and values of one request, GiB", xlabel="tokens", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    plt.show()


def page_sizes(outcomes: Mapping[int, Outcome]) -> None:
    """What is full and what is empty, by page size."""
    left, right = panels(2)
    sizes = list(outcomes)
    full = [100 * each.utilisation for each in outcomes.values()]
    curves(left, sizes, {"": full}, title="Tokens in reserved slots, %")
    right.plot(sizes, [each.waste_per_request for each in outcomes.values()], "o-", color=RED, label="measured")
    right.plot(sizes, [(size - 1) / 2 for size in sizes], "--", color=GREY, label="(page size - 1) / 2")
    right.set(title="Empty slots per request")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set(xlabel="tokens per page")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))
    plt.show()


def page_maps(memories: Mapping[str, Sequence[Cell | None]], page_size: int, across: int = 16) -> None:
    """Each page in the colour of its request, pale where it is empty; white is free."""
    for axes, (title, pages) in zip(panels(len(memories), high=2.8), memories.items(), strict=True):
        rows = -(-len(pages) // across)
        image = [[(1.0, 1.0, 1.0)] * across for _ in range(rows)]
        for number, cell in enumerate(pages):
            if cell is not None:
                color = colorsys.hls_to_rgb(cell.owner * 0.618034 % 1, 0.45, 0.6)
                full = 0.12 + 0.88 * cell.tokens / page_size
                red, green, blue = (1 - full * (1 - part) for part in color)
                image[number // across][number % across] = red, green, blue
        axes.imshow(image, aspect="equal")
        axes.set_xticks([x - 0.5 for x in range(across + 1)], [])
        axes.set_yticks([y - 0.5 for y in range(rows + 1)], [])
        axes.grid(color="#cfd8de", linewidth=0.6)
        axes.set_axisbelow(False)
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=10)
    plt.show()


def runs(steps: Sequence[int], lengths: Sequence[float]) -> None:
    axes = panels(high=2.4)
    axes.plot(steps, lengths, color=BLUE)
    axes.set(title="Mean length of a run of contiguous pages", xlabel="step", ylim=0)
    plt.show()
