"""The command for a GPU: what a call leaves in its folder, and how the next one goes on after a cut or a failure."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from phase6_integration.lab import gpu_day
from phase6_integration.lab.gpu.rows import UNFINISHED, Day, Rows
from phase6_integration.lab.gpu.stages import CALLS, STAGES

ROOT = Path(__file__).parents[3]


def test_every_stage_belongs_to_a_call_that_ends_with_what_it_keeps_for_the_next() -> None:
    assert {name for names in CALLS.values() for name in names} == set(STAGES)
    for names in CALLS.values():
        assert [STAGES[name].again for name in names] == [False] * (len(names) - 1) + [True]
        assert sum(STAGES[name].share for name in names) <= 540, "each stage has its whole share of a call of 560 s"


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[Any]]:
    """What stages do instead of running: the rows that they append in turn, and a state at the end of those."""
    plans: dict[str, list[Any]] = {}

    def run(name: str, out: Path, dry: bool, seconds: float) -> str:
        ran.append(name)
        given[name] = seconds
        day = Day(name, dry, out)
        for number, figure in enumerate(plan := plans.get(name, [1.0])):
            if isinstance(figure, str):
                return figure
            day.add(lambda number=number: measured.append((name, number)) or {"ms": plan[number]}, n=number)  # type: ignore[misc, func-returns-value]
        return "ok"

    monkeypatch.setattr(gpu_day, "run_stage", run)
    monkeypatch.setattr(gpu_day.packing, "unpack", lambda out: None)
    ran.clear()
    measured.clear()
    return plans


ran: list[str] = []
given: dict[str, float] = {}  # seconds
measured: list[tuple[str, int]] = []


def call(out: Path, *options: str) -> tuple[int, list[str], list[tuple[str, int]]]:
    """gpu_day's exit code, the stages that it ran and the rows that they measured."""
    ran.clear()
    measured.clear()
    return gpu_day.main(["--dry", "--out", str(out), *options]), list(ran), list(measured)


def figures(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "day.json").read_text())["figures"])


def test_a_stage_that_was_cut_keeps_its_rows_and_the_next_call_measures_the_others(
    stages: dict[str, list[Any]], tmp_path: Path
) -> None:
    stages["serve"] = [1.0, 2.0, 3.0, "cut after 9 s"]
    assert call(tmp_path, "--only", "serve") == (1, ["serve"], [("serve", n) for n in range(3)])
    stages["serve"] = [9.0, 9.0, 9.0, 4.0, 5.0]
    assert call(tmp_path, "--only", "serve") == (0, ["serve"], [("serve", 3), ("serve", 4)])
    assert [row["ms"] for row in figures(tmp_path)["serve"]["rows"]] == [1, 2, 3, 4, 5]
    assert call(tmp_path, "--only", "serve") == (0, [], [])
    assert call(tmp_path, "--only", "serve", "--again")[2] == [("serve", n) for n in range(5)]


def test_a_row_cut_while_it_was_written_is_not_there_and_one_that_had_begun_says_what_cut_it(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    rows.append("steps", {"n": 1}, {"ms": 1})
    rows.append("tune", {"n": 1}, {"ms": 2})
    rows.file.write_text(rows.file.read_text() + '{"stage": "steps", "key"')
    rows.forget("tune", finished=False)
    rows.append("tune", {"n": 2}, {"ms": 3})
    assert rows.of("tune") == [{"n": 1, "ms": 2}, {"n": 2, "ms": 3}]
    assert rows.of("steps") == [{"n": 1, "ms": 1}]
    rows.append("tune", {"n": 3}, {"error": UNFINISHED})
    rows.blame("tune", "cut after 9 s")
    assert rows.of("tune")[2:] == [{"n": 3, "error": "cut after 9 s"}]


ENDS = """
import os, signal, sys
from pathlib import Path
from phase6_integration.lab.gpu.rows import Day
print("started", flush=True)
day = Day("steps", True, Path(sys.argv[1]))
day.add(lambda: {}, n=0)
day.add(lambda: ACT, n=1)
day.add(lambda: {}, n=2)
"""


@pytest.mark.parametrize("act", ["os.kill(os.getpid(), 11)", pytest.param("signal.pause()", marks=pytest.mark.slow)])
def test_a_row_that_ends_the_process_takes_no_other_with_it_and_one_that_is_cut_says_so(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an illegal access on the device ends it: nothing can be launched after it in the process."""
    program = tmp_path / "ends.py"
    program.write_text(ENDS.replace("ACT", act))
    run, command = gpu_day.run_process, [sys.executable, str(program), str(tmp_path)]
    monkeypatch.setattr(gpu_day, "run_process", lambda _, log, seconds: run(command, log, seconds))
    dies = act.startswith("os")
    state = gpu_day.run_stage("steps", tmp_path, True, 60 if dies else 15)
    first, second, *others = Rows(tmp_path).of("steps")
    assert (first, second["n"]) == ({"n": 0}, 1)
    if dies:
        assert (state, second["error"], others) == ("ok", "the process ended", [{"n": 2}])
        assert (tmp_path / "day.log").read_text() == "started\n" * 2
    else:
        assert (state[:9], second["error"], others) == ("cut after", state, [])


# Importing what the machine with a GPU lacks raises ImportError.
WITHOUT_SERVER = """
import sys
for name in ("msgspec", "fastapi", "starlette", "pydantic", "uvicorn", "httptools"):
    sys.modules[name] = None
"""


@pytest.mark.slow
def test_a_dry_run_fills_every_stage_without_the_packages_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_SERVER)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "phase6_integration.lab", "gpu_day", "--dry", "--out", str(out)]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "day.json").read_text())
    assert result["command"] == "python -m phase6_integration.lab gpu_day --dry --out out"
    assert {"torch", "transformers"} <= set(result["versions"])
    found: dict[str, Any] = result["figures"]
    assert set(found) == set(STAGES)
    assert {name: stage["state"] for name, stage in found.items()} == dict.fromkeys(STAGES, "ok")
    assert [name for name, stage in found.items() if not stage["rows"]] == []
    assert [row["error"] for stage in found.values() for row in stage["rows"] if "error" in row] == []
    left = {"rows.jsonl", "day.log", "day.json", "reports.tar.gz.00", "triton.tar.gz.00"}
    assert {file.name for file in out.iterdir()} == left
    with tarfile.open(out / "reports.tar.gz.00") as tar:
        assert {"tests.xml", "suites.xml", "profiles/ahead-decode-2.json.gz"} <= set(tar.getnames())
