"""Charts of steps, on axes of matplotlib: their times, their speeds, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phase2_prefill_decode.lab.roofline import Device

if TYPE_CHECKING:
    from phase0_request.request import RequestTimes
    from phase2_prefill_decode.lab.phases import Point

INK, GREY, GREEN = "#34495e", "#667788", "#2e8b57"
LOOKS = {"prefill": ("o", "#1d6996"), "decode": ("s", "#c0392b")}  # distinct in shape as well as in colour
SIDES = {"prefill": (-1, "right"), "decode": (1, "left")}  # of the label below a mark: one may lie on another


@dataclass(frozen=True, slots=True)
class Mark:
    """One kind of step: its arithmetic intensity and its speed."""

    phase: str  # "prefill" or "decode"
    intensity: float  # operations a byte
    gflops: float  # measured
    predicted: float  # GFLOP/s too
    label: str = ""  # few words, or none


def roofline(axes: Any, device: Device, marks: Sequence[Mark]) -> None:
    """Draw both roofs of the device, the measured steps (filled) and the predicted ones (hollow)."""
    intensities = [mark.intensity for mark in marks]
    speeds = [speed for mark in marks for speed in (mark.gflops, mark.predicted)]
    left, right = min([device.ridge / 4, *intensities]) / 1.6, max([device.ridge * 4, *intensities]) * 1.6
    peak, low = device.flops / 1e9, device.attainable(left) / 1e9
    bottom, top = min([low, *speeds]) / 1.8, max([peak, *speeds]) * 2.2
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    axes.plot([left, device.ridge, right], [low, peak, peak], color=INK, linewidth=1.8)
    axes.plot([device.ridge] * 2, [bottom, peak], color=GREY, linewidth=0.9, linestyle=(0, (1, 2.5)))
    beside = {"textcoords": "offset points", "fontsize": 9}
    memory = f"memory, {_short(device.bytes_per_second)}B/s"
    axes.annotate(memory, (left, low), (24, -4), color=INK, va="top", **beside)
    axes.annotate(f"arithmetic, {_short(device.flops)}FLOP/s", (right, peak), (-4, 5), color=INK, ha="right", **beside)
    axes.annotate(f"ridge at {device.ridge:,.0f}", (device.ridge, bottom), (-4, 5), color=GREY, ha="right", **beside)
    for phase, (marker, color) in LOOKS.items():
        series = [mark for mark in marks if mark.phase == phase]
        at, measured = [mark.intensity for mark in series], [mark.gflops for mark in series]
        predicted = [mark.predicted for mark in series]
        axes.vlines(at, measured, predicted, color=color, linewidth=0.8, alpha=0.5)  # the gap to the prediction
        dots = {"linestyle": "none", "marker": marker, "markersize": 5.5, "color": color}
        axes.plot(at, predicted, **dots, markerfacecolor="white", label=f"{phase}, predicted", zorder=3)
        axes.plot(at, measured, **dots, label=f"{phase}, measured", zorder=4)
        aside, side = SIDES[phase]
        for mark in series:
            place = {"color": color, "ha": side, "va": "top", "textcoords": "offset points", "fontsize": 8}
            axes.annotate(mark.label, (mark.intensity, mark.gflops), (aside, -4), **place)
    axes.set(title=f"Roofline of {device.name}", xlabel="intensity, operations a byte", ylabel="GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        plain(axis)
    axes.legend(frameon=False, loc="lower right", fontsize=9, handletextpad=0.3)


def answer(axes: Any, prompt: int, times: RequestTimes) -> None:
    """One answer as a bar: the step of its prompt, then a step for each further token."""
    (_, blue), (_, red) = LOOKS.values()
    assert times.ttft is not None
    axes.barh(0, times.ttft * 1e3, color=blue, height=0.6)
    for earlier, later in zip(times.tokens, times.tokens[1:], strict=False):
        left = (earlier - times.arrival) * 1e3
        axes.barh(0, (later - earlier) * 1e3, left=left, color=red, height=0.6, edgecolor="white", linewidth=0.6)
    title = f"{prompt} tokens of prompt in one step, then {len(times.itl)} steps of one token"
    axes.set(xlabel="ms since the request arrived", yticks=[], title=title)
    axes.grid(axis="y", visible=False)


def step_times(axes: Any, xs: Sequence[int], points: Sequence[Point]) -> None:
    """The times of some steps, measured and predicted."""
    axes.plot(xs, [p.seconds * 1e3 for p in points], "o-", color=LOOKS[points[0].phase][1], label="measured")
    axes.plot(xs, [p.predicted * 1e3 for p in points], "--", color=GREY, label="predicted")
    axes.legend(frameon=False)


def shares(axes: Any, xs: Sequence[int], points: Sequence[Point], device: Device) -> None:
    """The speeds of some steps as shares of the device's, so that both fit on one axis."""
    computed = [100e9 * p.gflops / device.flops for p in points]
    read = [100e9 * p.gb_per_second / device.bytes_per_second for p in points]
    axes.plot(xs, computed, "o-", color=LOOKS["prefill"][1], label="of the GFLOP/s")
    axes.plot(xs, read, "s-", color=GREEN, label="of the GB/s")
    axes.set(ylim=(0, 100))
    axes.legend(frameon=False)


def plain(axis: Any) -> None:
    """A logarithmic axis with a few plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_major_formatter(lambda number, _: f"{number:,.10g}")
    axis.set_minor_formatter(NullFormatter())


def _short(number: float) -> str:
    """Three digits and the letter of their size: 4.8e12 is "4.8 T"."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g} "
