"""`python -m phase6_integration.lab gpu_day`: one command that tests and measures this project on a GPU.

Its stages run one after the other, each in a process of its own and no longer than its cap. After each the JSON is
written anew, so a cut loses nothing, and the next call goes on where this one ended. It needs torch and the phases,
neither the packages of the HTTP server nor a network.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from phase0_request import safe_path
from phase0_request.machine import record

CAPS = {  # the most seconds of each stage
    "smoke": 180, "tests": 480, "kernels": 240, "step": 300, "idle": 300, "serve": 480, "beside": 300, "vllm": 480,
}  # fmt: skip
NEEDED = {"beside": "transformers", "vllm": "vllm"}  # packages that stages need
LEAST = 10.0  # seconds that a stage is started for
LOG = 4000  # characters of a stage's output that are kept
Results = dict[str, Any]


def finished(result: Results) -> bool:
    return bool(result["state"] == "ok")


def run_stage(name: str, dry: bool, seconds: float) -> Results:
    """Run a stage in a process, and end it after so many seconds. Returns its state, its rows and its output."""
    if name in NEEDED and find_spec(NEEDED[name]) is None:
        return {
            "state": "ok",
            "seconds": 0.0,
            "rows": [{"not_available": f"{NEEDED[name]} is not installed"}],
            "log": "",
        }
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        command = [sys.executable, "-m", "phase6_integration.lab", "gpu_day", "--rows", str(rows), "--only", name]
        child = subprocess.Popen(
            [*command, *(["--dry"] if dry else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=safe_path.environment(),
            start_new_session=True,  # so that what it starts ends with it
        )
        try:
            log, _ = child.communicate(timeout=seconds)
            state = "ok" if child.returncode == 0 else f"failed with {child.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            log, _ = child.communicate()
            state = f"cut after {seconds:.0f} s"
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    return {"state": state, "seconds": round(time.monotonic() - start, 1), "rows": found, "log": log[-LOG:]}


def run_here(name: str, rows: Path, dry: bool) -> int:
    """Run a stage in this process."""
    from phase6_integration.lab.gpu_rows import Day
    from phase6_integration.lab.gpu_stages import STAGES

    with rows.open("a") as file:
        STAGES[name](Day(dry, file))
    return 0


def known(file: Path) -> dict[str, Results]:
    """The stages that an earlier call has left in the file."""
    return dict(json.loads(file.read_text("utf-8"))["figures"]) if file.exists() else {}


def gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m phase6_integration.lab gpu_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--only", nargs="+", choices=CAPS, default=list(CAPS), metavar="STAGE", help=", ".join(CAPS))
    p.add_argument("--again", action="store_true", help="run stages that are in the file already, too")
    p.add_argument("--seconds", type=float, default=float("inf"), help="for this call; the next one goes on (no limit)")
    p.add_argument("--dry", action="store_true", help="everything on a CPU, with tiny shapes: the figures mean nothing")
    p.add_argument("--json", type=Path, default=Path("gpu_day.json"), metavar="FILE", help="(%(default)s)")
    p.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of the process of one stage
    options = p.parse_args(arguments)
    if options.rows is not None:
        return run_here(options.only[0], options.rows, options.dry)
    if not options.dry and not gpu_is_there():
        p.error("torch sees no GPU here; --dry tries everything on the CPU")
    console, end = Console(soft_wrap=True), time.monotonic() + options.seconds
    figures = known(options.json)
    command = " ".join([p.prog, *(sys.argv[2:] if arguments is None else arguments)])
    for name in options.only:
        if name in figures and finished(figures[name]) and not options.again:
            console.print(f"{name}: done before", highlight=False)
            continue
        seconds = min(CAPS[name], end - time.monotonic())
        if seconds < LEAST:
            console.print(f"{name}: no time is left; call this again", highlight=False)
            break
        with console.status(f"{name}: at most {seconds:.0f} s"):
            figures[name] = found = run_stage(name, options.dry, seconds)
        record(options.json, command, figures)
        failed = [row for row in found["rows"] if "error" in row]
        console.print(
            f"{name}: {found['state']}, {found['seconds']} s, {len(found['rows'])} rows, {len(failed)} failed",
            highlight=False,
        )
        for row in failed:
            console.print(f"  {json.dumps(row)[:400]}", markup=False, highlight=False)
        if not finished(found):
            console.print(found["log"], markup=False, highlight=False)
    console.print(f"Figures written to {options.json}")
    return 0 if all(name in figures and finished(figures[name]) for name in options.only) else 1
