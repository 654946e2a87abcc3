"""`python -m phase6_integration.lab gpu_day`: tests and measures this project on a GPU, stage by stage.

Each stage is a process of its own, ended after its seconds if it has a cap. What it finds is in --out as it is found:
rows.jsonl, a row at a time; day.log, what stages print; after each stage, and at SIGTERM, day.json. A call with the
folder of an earlier one measures the rows that are not there or failed.
It needs torch, pytest, rich and the phases, no network and no package of the server.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phase0_request.lab.record import record
from phase0_request.support import entry
from phase6_integration.lab.gpu.rows import Day, Rows

# What is worth most first. A stage is "module:function" of the folder `gpu`, which imports only what it measures with,
# or the arguments of pytest. `-m gpu` leaves out what runs on a CPU too: Triton kernels run on the GPU if there is one.
# What is compiled ahead of time needs no GPU, and a minute.
PHASES = ("tests/phase1_kv_pool", "tests/phase2_prefill_decode")
KERNELS = "(test_kernels.py or test_product.py or triton) and not (compiles or shared_memory or grid_counts)"
STAGES: dict[str, str | tuple[str, ...]] = {
    "tests": ("-m", "gpu", "tests/gpu", *PHASES),
    "suites": ("-m", "not gpu and not slow", "-k", KERNELS, *PHASES),
    "families": "serving:serve_families",
    "small": "serving:serve_small",
    "serve": "serving:serve",
    "serve_kv_fp8": "serving:serve",
    "serve_all_fp8": "serving:serve",
    "steps": "steps:steps_8b",
    "mixed": "steps:mixed",
    "levers": "levers:levers",
    "kernels": "kernels:kernels",
    "profiles": "steps:profiles",
    "serve_fp8": "serving:serve",
    "serve_int4": "serving:serve",
    "products": "kernels:products",
    "sampling": "kernels:sampling",
    "smoke": "checks:smoke",
    "racecheck": "checks:racecheck",
    "beside": "serving:beside",
}
WORKERS = 12  # of pytest: each has a context on the GPU
LEAST = 10.0  # seconds that a stage is started for
CUT, ENDED = "cut", "ended by SIGTERM"
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


def run_for(seconds: float, command: list[str], **options: Any) -> int | str:
    """Run a process. At SIGTERM and after its seconds it ends with what it has started: pytest's workers hold the GPU.
    Returns its code, or CUT or ENDED."""
    process: subprocess.Popen[bytes] | None = None
    why = ""

    def end(reason: str = "") -> None:
        nonlocal why
        why = why or reason
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    handler = signal.signal(signal.SIGTERM, lambda *_: end(ENDED))
    try:
        with subprocess.Popen(command, process_group=0, **options) as process:
            if why:  # the signal came before the process was known
                end()
            try:
                code = process.wait(None if seconds == float("inf") else seconds)
            except subprocess.TimeoutExpired:
                end(CUT)
            finally:
                end()
        return why or code
    finally:
        signal.signal(signal.SIGTERM, handler)


def run_stage(name: str, out: Path, dry: bool, wanted: str, seconds: float) -> str:
    """Run a stage, and again behind the row that ended its process. Returns its state."""
    stage, rows, end = STAGES[name], Rows(out), time.monotonic() + seconds
    command = [sys.executable, "-m", "phase6_integration.lab", "gpu_day", "--stage", name, "--out", str(out)]
    if not isinstance(stage, str):
        command = pytest_command(stage, dry)
    else:
        command += [f"--rows={wanted}", *(["--dry"] if dry else [])]
    environment = {**entry.environment(), "PYTHONUNBUFFERED": "1"}
    while True:
        before, left = len(rows.of(name)), end - time.monotonic()
        with (out / "day.log").open("a") as log:
            code = run_for(left, command, cwd=ROOT, stdout=log, stderr=log, env=environment)
        if code == CUT:
            return f"cut after {seconds:.0f} s"
        if code == ENDED:
            return ENDED
        if code == 0 or len(rows.of(name)) == before or end - time.monotonic() < LEAST:
            return "ok" if code == 0 else f"failed with {code}"


def gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def capped(text: str) -> tuple[str, float]:
    """A stage and its cap, of STAGE or STAGE=SECONDS."""
    name, _, seconds = text.partition("=")
    if name not in STAGES:
        raise argparse.ArgumentTypeError(f"there is no stage {name!r}; there are {', '.join(STAGES)}")
    return name, float(seconds or "inf")


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m phase6_integration.lab gpu_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--only", nargs="+", type=capped, metavar="STAGE[=SECONDS]", help=", ".join(STAGES))
    p.add_argument("--rows", default="", metavar="REGEX", help="only rows with this in their names, as in day.json")
    p.add_argument("--out", type=Path, default=Path("gpu_day"), metavar="FOLDER", help="(%(default)s)")
    p.add_argument("--seconds", type=float, help="for this call; the next one goes on (no limit)")
    p.add_argument("--dry", action="store_true", help="everything on a CPU, with tiny shapes: the figures mean nothing")
    p.add_argument("--again", action="store_true", help="measure what is in the folder already, too")
    p.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)  # in this process
    options = p.parse_args(arguments)
    out: Path = options.out.resolve()
    if options.stage is not None:
        module, _, function = str(STAGES[options.stage]).partition(":")
        day = Day(options.stage, options.dry, out, options.rows)
        getattr(import_module(f"phase6_integration.lab.gpu.{module}"), function)(day)
        return 0
    if not options.dry and not gpu_is_there():
        p.error("torch sees no GPU here; --dry tries everything on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    rows, file, end = Rows(out), out / "day.json", time.monotonic() + (options.seconds or float("inf"))
    figures: dict[str, Any] = json.loads(file.read_text())["figures"] if file.exists() else {}
    chosen: dict[str, float] = dict(options.only or map(capped, STAGES))
    for name, cap in chosen.items():
        if figures.get(name, {}).get("state") == "ok" and not (options.again or options.rows):
            continue
        seconds = min(cap, end - time.monotonic())
        if seconds < LEAST:
            print(f"{name}: no time is left; call this again", flush=True)
            return 1
        rows.forget(name, finished=options.again)
        start, log = time.monotonic(), out / "day.log"
        log.touch()
        logged = log.stat().st_size
        state = run_stage(name, out, options.dry, options.rows, seconds)
        found = rows.of(name)
        said = log.read_bytes()[logged:].decode(errors="replace")
        figures[name] = {"state": state, "seconds": round(time.monotonic() - start, 1), "rows": found}
        if not isinstance(STAGES[name], str):
            figures[name]["last_line"] = said.rstrip().rpartition("\n")[2].strip("= ")  # how many tests passed
        record(file, " ".join([p.prog, *(sys.argv[2:] if arguments is None else arguments)]), figures)
        failed = [row for row in found.values() if "error" in row]
        what = figures[name].get("last_line") or f"{len(found)} rows, {len(failed)} failed"
        print(f"{name}: {state}, {figures[name]['seconds']} s, {what}", flush=True)
        print(*(f"  {json.dumps(row)[:400]}" for row in failed), sep="\n", end="\n" if failed else "", flush=True)
        if state != "ok":
            print(said[-LOGGED:], flush=True)
        if state == ENDED:
            return 128 + signal.SIGTERM
    print(f"Everything is in {options.out}")
    return 0 if all(figures[name]["state"] == "ok" for name in chosen) else 1
