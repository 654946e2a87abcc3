"""The roofline as a chart, on axes of matplotlib."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import atan2, degrees
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


def roofline(axes: Any, device: Device, marks: Iterable[Mark]) -> None:
    """Draw both roofs of the device, the measured steps (filled) and the predicted ones (hollow)."""
    marks = list(marks)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _set_limits(axes, device, marks)
    _roofs(axes, device)
    for phase, (marker, color) in LOOKS.items():
        series = [mark for mark in marks if mark.phase == phase]
        if series:
            _series(axes, series, phase, marker, color)
    axes.set(title=f"Roofline of {device.name}", xlabel="intensity, operations a byte", ylabel="GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda number, _: f"{number:,.10g}")
    axes.legend(frameon=False, loc="lower right", fontsize=9, handletextpad=0.3)


def _set_limits(axes: Any, device: Device, marks: Sequence[Mark]) -> None:
    """Set limits that show all marks, and the ridge with at least half a decade on each side."""
    intensities = [mark.intensity for mark in marks]
    left, right = min([device.ridge / 4, *intensities]) / 1.6, max([device.ridge * 4, *intensities]) * 1.6
    speeds = [speed for mark in marks for speed in (mark.gflops, mark.predicted)]
    bottom = min([device.attainable(left) / 1e9, *speeds]) / 1.8
    axes.set(xlim=(left, right), ylim=(bottom, max([device.flops / 1e9, *speeds]) * 2.2))


def _roofs(axes: Any, device: Device) -> None:
    (left, right), bottom = axes.get_xlim(), axes.get_ylim()[0]
    peak = device.flops / 1e9
    axes.plot([left, device.ridge, right], [device.attainable(left) / 1e9, peak, peak], color=INK, linewidth=1.8)
    axes.plot([device.ridge] * 2, [bottom, peak], color=GREY, linewidth=0.9, linestyle=(0, (1, 2.5)))
    x = left * 1.25
    y = 1.35 * device.attainable(x) / 1e9
    axes.text(
        x,
        y,
        f"memory, {_short(device.bytes_per_second)}B/s",
        rotation=degrees(atan2(y, x)),  # where both axes are logarithms, this is along the roof
        rotation_mode="anchor",
        transform_rotates_text=True,
        color=INK,
        fontsize=9,
    )
    beside = {"textcoords": "offset points", "ha": "right", "fontsize": 9}
    axes.annotate(f"arithmetic, {_short(device.flops)}FLOP/s", (right, peak), (-4, 5), color=INK, **beside)
    axes.annotate(f"ridge at {device.ridge:,.0f}", (device.ridge, bottom), (-4, 5), color=GREY, **beside)


def _series(axes: Any, series: Sequence[Mark], phase: str, marker: str, color: str) -> None:
    at = [mark.intensity for mark in series]
    measured, predicted = [mark.gflops for mark in series], [mark.predicted for mark in series]
    axes.vlines(at, measured, predicted, color=color, linewidth=0.8, alpha=0.5)  # the gap to the prediction
    dots = {"linestyle": "none", "marker": marker, "markersize": 5.5, "color": color}
    axes.plot(at, predicted, **dots, markerfacecolor="white", label=f"{phase}, predicted", zorder=3)
    axes.plot(at, measured, **dots, label=f"{phase}, measured", zorder=4)
    aside, side = SIDES[phase]
    for mark in series:
        axes.annotate(
            mark.label,
            (mark.intensity, mark.gflops),
            (aside, -4),
            textcoords="offset points",
            color=color,
            fontsize=8,
            ha=side,
            va="top",
        )


def _short(number: float) -> str:
    """Three digits and the letter of their size: 4.8e12 is "4.8 T"."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g} "
