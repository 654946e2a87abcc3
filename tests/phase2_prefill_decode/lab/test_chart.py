from matplotlib.figure import Figure

from phase2_prefill_decode.lab.chart import Mark, roofline
from phase2_prefill_decode.lab.roofline import Device

MARKS = [
    Mark("prefill", 200.0, 500.0, 790.0, "512 tokens"),
    Mark("prefill", 900.0, 1700.0, 800.0),  # faster than predicted: drawn as measured
    Mark("decode", 0.05, 0.4, 1.0, "1 sequence"),
]


def test_a_roofline_shows_every_mark_and_both_roofs() -> None:
    axes = Figure().subplots()
    roofline(axes, Device("a machine", 800e9, 20e9), MARKS)
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes.lines}
    assert lines["prefill, measured"] == [[200, 500], [900, 1700]]
    assert lines["prefill, predicted"] == [[200, 790], [900, 800]]
    roof = next(points for points in lines.values() if len(points) == 3)
    assert roof[1] == [40, 800]
    assert all(y == min(800, 20 * x) for x, y in roof)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    for mark in MARKS:
        assert left < mark.intensity < right
        assert bottom < min(mark.gflops, mark.predicted) <= max(mark.gflops, mark.predicted) < top
