"""The capstone: rows that are the same everywhere, rules that are checked, and the leaderboard."""

import json
import re
from pathlib import Path

import pytest

from phase5_continuous.lab import capstone, contest
from phase5_continuous.lab.contest import OURS, SHARES, Entry, score

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "phase5_continuous" / "lab" / "example_policy.py"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same traces with a few requests."""
    traces = {name: (make, 40, rate) for name, (make, _, rate) in contest.TRACES.items()}
    monkeypatch.setattr(contest, "TRACES", traces)


ROWS = [pytest.param(one, marks=() if one.name == "longest-prefix" else pytest.mark.slow, id=one.name) for one in OURS]


@pytest.mark.parametrize("entry", ROWS)
def test_the_rows_of_ours_in_the_leaderboard_are_what_the_simulation_gives(entry: Entry) -> None:
    assert capstone.read(capstone.LEADERBOARD)[entry.name] == score(entry), (
        "run python -m phase5_continuous.lab capstone"
    )


def test_the_page_shows_ours_as_in_the_leaderboard() -> None:
    page = (ROOT / "chapters" / "capstone.md").read_text("utf-8")
    (table,) = re.findall(r"<!-- leaderboard -->\n(.*?)<!-- /leaderboard -->", page, re.DOTALL)
    rows = capstone.read(capstone.LEADERBOARD)
    assert table == capstone.markdown({entry.name: rows[entry.name] for entry in OURS})


@pytest.mark.usefixtures("small")
def test_an_entry_is_scored_and_takes_its_place_in_the_leaderboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = tmp_path / "board.json"
    capstone.write(board, {"fcfs": dict.fromkeys(("score", *SHARES, "longest wait"), 0.0)})
    assert capstone.main([str(EXAMPLE), "--leaderboard", str(board)]) == 0
    rows = json.loads(board.read_text())["rows"]
    assert list(rows) == ["example_policy", "fcfs"], "the best comes first"
    row = rows["example_policy"]
    assert row == score(capstone.load(EXAMPLE))
    assert row["score"] == pytest.approx(100 * sum(row[name] for name in SHARES) / 6, abs=0.01)
    assert "example_policy" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.py must define at least one of the functions policy, cache, share"),
        (
            "policy = type('Odd', (ShortPromptsFirst,), {'head_start': lambda self, request, cache: '4'})\n",
            "head_start must return a finite number, got '4' for request r0",
        ),
        (
            "policy = type('Unknown', (ShortPromptsFirst,), {'rank': lambda self, request: float('nan')})\n",
            "rank must return a finite number, got nan for request r0",
        ),
    ],
)
def test_an_entry_that_breaks_a_rule_gets_no_row(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board, mine = tmp_path / "board.json", tmp_path / "mine.py"
    mine.write_text("from phase5_continuous.lab.example_policy import ShortPromptsFirst\n" + text)
    with pytest.raises(SystemExit):
        capstone.main([str(mine), "--leaderboard", str(board)])
    assert message in " ".join(capsys.readouterr().err.split())
    assert not board.exists()
