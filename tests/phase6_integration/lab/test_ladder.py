"""The ladder: every engine gives the tokens of transformers, and each phase shows in its figures."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from chapters import charts
from phase2_prefill_decode.lab.random_weights import save_random
from phase2_prefill_decode.lab.shapes import SHAPES
from phase6_integration.lab.gpu.rows import TINY
from phase6_integration.lab.ladder import NAMES, Trace, climb, different

SMALL = Trace(
    requests=8, rate=1e6, system=32, question=8, answer=8, max_tokens=24, long=96, num_long=1, pages=18, seed=3
)


def test_every_rung_gives_the_same_tokens_and_shows_what_its_phase_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "17m", TINY)
    save_random("17m", tmp_path)
    rows = climb(tmp_path, NAMES, SMALL, runs=1)
    _, answers = SMALL.make(TINY.vocab_size, 0.0)
    assert different(rows) == []
    assert {row["tokens"] for row in rows.values()} == {sum(answers.values())}
    assert all(row["requests"] == 8 and row["pages"] <= SMALL.pages for row in rows.values())
    assert [name for name, row in rows.items() if row["hit_rate"] > 0] == ["phase4", "phase5", "phase6"]
    assert rows["phase5"]["tokens_per_step"] > 1.2 * rows["phase2"]["tokens_per_step"]
    assert rows["phase2"]["tokens_per_step"] > rows["transformers"]["tokens_per_step"]  # pages are not padded

    rows["phase4"]["answers"] = "others"
    assert different(rows) == ["phase4"]
    charts.ladder(figure := Figure(), {"figures": {"rungs": rows, "mine": {"phase5": rows["phase5"]}}})
    assert len(figure.axes) == 4
