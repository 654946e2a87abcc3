"""`python -m phase6_integration.lab gpu_day`: tests and measures this project on a GPU, stage by stage.

Each stage is a process of its own. What it finds is in --out as it is found: rows.jsonl, a row at a time; day.log, what
stages print; after each stage day.json. A call with the folder of an earlier one measures the rows
that are not there or failed.
It needs torch, pytest, rich and the phases, no network and no package of the server.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phase0_request import entry
from phase0_request.lab.record import record
from phase6_integration.lab.gpu.rows import Day, Rows

# What is worth most first. A stage is "module:function" of the folder `gpu`, which imports only what it measures with,
# or the arguments of pytest. `-m gpu` leaves out what runs on a CPU too: Triton kernels run on the GPU if there is one.
# What is compiled ahead of time needs no GPU, and a minute.
PHASES = ("tests/phase1_kv_pool", "tests/phase2_prefill_decode")
KERNELS = "(test_kernels.py or test_product.py or triton) and not (compiles or shared_memory or grid_counts)"
STAGES: dict[str, str | tuple[str, ...]] = {
    "smoke": "checks:smoke",
    "tests": ("-m", "gpu", "tests/gpu", *PHASES),
    "suites": ("-m", "not gpu and not slow", "-k", KERNELS, *PHASES),
    "racecheck": "checks:racecheck",
    "kernels": "kernels:kernels",
    "products": "kernels:products",
    "sampling": "kernels:sampling",
    "steps": "steps:steps_8b",
    "tune": "steps:tune",
    "profiles": "steps:profiles",
    "serve": "serving:serve_8b",
    "quantized": "serving:serve_quantized",
    "mixed": "steps:mixed",
    "drafts": "serving:serve_drafts",
    "small": "serving:serve_small",
    "beside": "serving:beside",
}
WORKERS = 12  # of pytest: each has a context on the GPU
LEAST = 10.0  # seconds that a stage is started for
LOGGED = 3000  # characters of the log that are printed if a stage fails
ROOT = Path(__file__).parents[2]


def pytest_command(selected: tuple[str, ...], dry: bool) -> list[str]:
    """pytest on these tests, in parallel. Those of a file that imports a package which is not installed are errors, and
    the others run. pytest-benchmark may be there and warns of others, and warnings are errors: it stays out."""
    plain = ["-v", "--tb=short", "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    workers = min(os.cpu_count() or 1, WORKERS)
    parallel = ["-n", f"{workers}", "--dist=worksteal"] if find_spec("xdist") else []
    some = ["tests/phase1_kv_pool/test_kernels.py"] if dry else [*parallel, *selected]
    return [sys.executable, "-m", "pytest", *plain, *some]


def run_stage(name: str, out: Path, dry: bool, seconds: float | None) -> str:
    """Run a stage, and again behind the row that ended its process. Returns its state."""
    stage, rows, end = STAGES[name], Rows(out), time.monotonic() + (seconds or float("inf"))
    command = [sys.executable, "-m", "phase6_integration.lab", "gpu_day", "--stage", name, "--out", str(out)]
    if not isinstance(stage, str):
        command = pytest_command(stage, dry)
    elif dry:
        command.append("--dry")
    while True:
        before, left = len(rows.of(name)), None if seconds is None else end - time.monotonic()
        with (out / "day.log").open("a") as log:
            environment = {**entry.environment(), "PYTHONUNBUFFERED": "1"}
            try:
                code = subprocess.run(
                    command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=left, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                return f"cut after {seconds:.0f} s"
        if code == 0 or len(rows.of(name)) == before or (left is not None and end - time.monotonic() < LEAST):
            return "ok" if code == 0 else f"failed with {code}"


def gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m phase6_integration.lab gpu_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    p.add_argument("--out", type=Path, default=Path("gpu_day"), metavar="FOLDER", help="(%(default)s)")
    p.add_argument("--seconds", type=float, help="for this call; the next one goes on (no limit)")
    p.add_argument("--dry", action="store_true", help="everything on a CPU, with tiny shapes: the figures mean nothing")
    p.add_argument("--again", action="store_true", help="measure what is in the folder already, too")
    p.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)  # in this process
    options = p.parse_args(arguments)
    out: Path = options.out.resolve()
    if options.stage is not None:
        module, _, function = str(STAGES[options.stage]).partition(":")
        getattr(import_module(f"phase6_integration.lab.gpu.{module}"), function)(Day(options.stage, options.dry, out))
        return 0
    if not options.dry and not gpu_is_there():
        p.error("torch sees no GPU here; --dry tries everything on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    rows, file, end = Rows(out), out / "day.json", time.monotonic() + (options.seconds or float("inf"))
    figures: dict[str, Any] = json.loads(file.read_text())["figures"] if file.exists() else {}
    chosen = options.only or [*STAGES]
    for name in chosen:
        if figures.get(name, {}).get("state") == "ok" and not options.again:
            continue
        seconds = None if options.seconds is None else end - time.monotonic()
        if seconds is not None and seconds < LEAST:
            print(f"{name}: no time is left; call this again", flush=True)
            return 1
        rows.forget(name, finished=options.again)
        start, log = time.monotonic(), out / "day.log"
        log.touch()
        logged = log.stat().st_size
        state = run_stage(name, out, options.dry, seconds)
        found = rows.of(name)
        figures[name] = {"state": state, "seconds": round(time.monotonic() - start, 1), "rows": found}
        record(file, " ".join([p.prog, *(sys.argv[2:] if arguments is None else arguments)]), figures)
        failed = [row for row in found.values() if "error" in row]
        print(f"{name}: {state}, {figures[name]['seconds']} s, {len(found)} rows, {len(failed)} failed", flush=True)
        print(*(f"  {json.dumps(row)[:400]}" for row in failed), sep="\n", end="\n" if failed else "", flush=True)
        if state != "ok":
            print(log.read_bytes()[logged:].decode(errors="replace")[-LOGGED:], flush=True)
    print(f"Everything is in {options.out}")
    return 0 if all(figures[name]["state"] == "ok" for name in chosen) else 1
