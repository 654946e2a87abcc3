"""The roofline as a chart, on axes of matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phase2_prefill_decode.lab.roofline import Device

INK, GREY = "#34495e", "#667788"
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
        axis.set_major_formatter(lambda number, _: f"{number:,.10g}")
    axes.legend(frameon=False, loc="lower right", fontsize=9, handletextpad=0.3)


def _short(number: float) -> str:
    """Three digits and the letter of their size: 4.8e12 is "4.8 T"."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g} "
