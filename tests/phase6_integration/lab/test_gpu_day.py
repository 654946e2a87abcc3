"""The command for a GPU: what a call leaves in its folder, and how the next one goes on after a cut or a failure."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phase6_integration.lab import gpu_day
from phase6_integration.lab.gpu.rows import UNFINISHED, Day, Rows
from phase6_integration.lab.gpu_day import STAGES

ROOT = Path(__file__).parents[3]


def test_a_call_measures_the_rows_that_are_not_there_or_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure(number: int) -> dict[str, float]:
        measured.append(number)
        return {"ms": 1 / plan[number]}

    def run(name: str, out: Path, dry: bool, wanted: str, seconds: float) -> str:
        for number, figure in enumerate(plan):
            if isinstance(figure, str):
                return figure
            Day(name, dry, out, wanted).add(partial(measure, number), n=number)
        return "ok"

    def call(*options: str) -> tuple[int, list[int]]:
        """gpu_day's exit code, and the rows that it measured."""
        measured.clear()
        return gpu_day.main(["--dry", "--out", str(tmp_path), "--only", "serve", *options]), list(measured)

    monkeypatch.setattr(gpu_day, "run_stage", run)
    plan: list[Any] = [1.0, 0.0, 4.0, "cut after 9 s"]
    assert call() == (1, [0, 1, 2])
    plan[1:] = [2.0, 9.0, 5.0]
    assert call() == (0, [1, 3])
    rows = json.loads((tmp_path / "day.json").read_text())["figures"]["serve"]["rows"]
    assert {row["n"]: row["ms"] for row in rows.values()} == {0: 1, 1: 0.5, 2: 0.25, 3: 0.2}
    assert call() == (0, [])
    assert call("--again", "--seconds", "5") == (1, []), "too few for a stage"
    assert call("--again") == (0, [0, 1, 2, 3])
    assert call("--again", "--rows", "^(1|3)$") == (0, [1, 3])


def test_a_row_cut_while_it_was_written_is_not_there(tmp_path: Path) -> None:
    rows = Rows(tmp_path)
    rows.append("steps", {"n": 1, "model": "0.6b"}, {"ms": 1})
    rows.append("tune", {"n": 1}, {"ms": 2})
    rows.file.write_text(rows.file.read_text() + '{"stage": "steps", "key"')
    rows.forget("tune", finished=False)
    rows.append("tune", {"n": 2}, {"ms": 3})
    assert rows.of("tune") == {"1": {"n": 1, "ms": 2}, "2": {"n": 2, "ms": 3}}
    assert rows.of("steps") == {"1_0_6b": {"n": 1, "model": "0.6b", "ms": 1}}


ENDS = """
import os, sys
from pathlib import Path
from phase6_integration.lab.gpu.rows import Day
print("started", flush=True)
for n in range(3):
    Day("steps", True, Path(sys.argv[1])).add(lambda: os.kill(os.getpid(), 11) if n == 1 else {}, n=n)
"""


def test_a_row_that_ends_the_process_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an illegal access on the device ends it: nothing can be launched after it in the process."""
    run, command = subprocess.Popen, [sys.executable, "-c", ENDS, str(tmp_path)]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: run(command, **options))
    assert gpu_day.run_stage("steps", tmp_path, True, "", 60) == "ok"
    assert Rows(tmp_path).of("steps") == {"0": {"n": 0}, "1": {"n": 1, "error": UNFINISHED}, "2": {"n": 2}}
    assert (tmp_path / "day.log").read_text() == "started\n" * 2


HANGS = (
    "import subprocess, sys, time; subprocess.Popen([*sys.orig_argv[:1], '-c', 'input()'], close_fds=False); input()"
)


def test_a_stage_that_hangs_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, (inside, alive) = subprocess.Popen, os.pipe()  # an end of the pipe is open in every process of the stage
    start = partial(run, [sys.executable, "-c", HANGS], stdin=subprocess.PIPE, pass_fds=[alive])
    monkeypatch.setattr(subprocess, "Popen", lambda _, **more: start(**more))
    assert gpu_day.run_stage("steps", tmp_path, True, "", 0.5) == "cut after 0 s"
    os.close(alive)
    assert os.read(inside, 1) == b"", "nobody has it"
    os.close(inside)


def test_a_call_that_is_terminated_leaves_its_rows_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lent machine terminates a command at its limit. Here the stage does, as soon as it has a row."""
    run, (inside, alive) = subprocess.Popen, os.pipe()
    add = "from pathlib import Path; from phase6_integration.lab.gpu.rows import Day; "
    add += f"Day('steps', True, Path({str(tmp_path)!r})).add(dict, n=1); import os; os.kill(os.getppid(), 15); "
    start = partial(run, [sys.executable, "-c", add + HANGS], stdin=subprocess.PIPE, pass_fds=[alive])

    def first(_: object, **more: Any) -> Any:
        monkeypatch.undo()  # the record asks git
        return start(**more)

    monkeypatch.setattr(subprocess, "Popen", first)
    assert gpu_day.main(["--dry", "--out", str(tmp_path), "--only", "steps", "small"]) == 128 + 15
    os.close(alive)
    assert os.read(inside, 1) == b"", "nobody has it"
    os.close(inside)
    found = json.loads((tmp_path / "day.json").read_text())["figures"]
    assert {name: (stage["state"], stage["rows"]) for name, stage in found.items()} == {
        "steps": ("ended by SIGTERM", {"1": {"n": 1}})
    }


def test_every_test_that_needs_a_gpu_and_the_cases_of_every_triton_kernel_are_run() -> None:
    stages = [STAGES["tests"], STAGES["suites"]]
    collect = [[*gpu_day.pytest_command(some, dry=False)[3:], "-n0", "--collect-only", "-qq"] for some in stages]  # type: ignore[arg-type]
    program = f"import pytest\nfor one in {collect}: assert not pytest.main(one); print('END')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    tests, cases, _ = (  # how many, by file
        Counter(line.partition("::")[0] for line in out.splitlines() if "::" in line)
        for out in done.stdout.split("\nEND\n")
    )
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if any(word in file.read_text() for word in ("mark.gpu", "every_backend_and_dtype()"))
        and file != Path(__file__)
    }
    assert set(tests) == marked
    least = {"test_attention": 90, "test_kernels": 30, "test_pointwise": 44, "test_draw": 2, "test_mask": 10}
    least |= {"quantized/test_product": 120}
    counts = {name: cases[f"tests/phase2_prefill_decode/{name}.py"] for name in least}
    assert {name: count for name, count in counts.items() if count < least[name]} == {}


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
    found: dict[str, Any] = result["figures"]
    assert {name: stage["state"] for name, stage in found.items()} == dict.fromkeys(STAGES, "ok")
    measuring = {name for name, stage in STAGES.items() if isinstance(stage, str)}
    assert {name for name, stage in found.items() if stage["rows"]} == measuring
    assert [row["error"] for stage in found.values() for row in stage["rows"].values() if "error" in row] == []
    assert all(file.name in ("rows.jsonl", "day.json", "day.log") or file.suffix == ".log" for file in out.iterdir())
