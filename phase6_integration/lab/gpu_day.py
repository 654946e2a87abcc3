"""`python -m phase6_integration.lab gpu_day`: tests and measures this project on a GPU, in three calls.

Each stage is a process of its own, with a share of the call's seconds. All that it finds is in --out as it is found:
rows.jsonl, a row at a time; day.log, what stages print; after each stage day.json. A call with the folder of an earlier
one goes on: it measures the rows that are not there or failed. It ends by packing into the folder, in files of at most
15 MiB, the reports (the tests' JUnit XML, profiles) and Triton's cache; a fresh machine unpacks them.
It needs torch, pytest, rich and the phases, no network and no package of the server.
"""

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from phase0_request import entry
from phase0_request.lab.record import record
from phase6_integration.lab.gpu import packing
from phase6_integration.lab.gpu.rows import Day, Rows
from phase6_integration.lab.gpu.stages import CALLS, STAGES

LEAST = 10.0  # seconds that a stage is started for
LONGEST = 900.0  # seconds of a stage, in a call without a limit
LAST_WORDS = 5.0  # seconds before its cut in which a stage writes where it is
LOGGED = 3000  # characters of the log that are printed if a stage fails
Results = dict[str, Any]


def run_process(command: list[str], log: Path, seconds: float) -> str:
    """Run a command that writes to the log, and end it with all that it started after so many seconds."""
    environment = {**entry.environment(), "TRITON_CACHE_DIR": str(packing.CACHE), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        code = child.wait(seconds)
        return "ok" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        return f"cut after {seconds:.0f} s"
    finally:
        kill_group(child.pid)
        child.wait()


def kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of it has ended


def run_stage(name: str, out: Path, dry: bool, seconds: float) -> str:
    """Run a stage, and again behind the row that ended its process. Returns its state."""
    rows, end = Rows(out), time.monotonic() + seconds  # the same clock in all processes
    if (package := STAGES[name].needs) is not None and find_spec(package) is None:
        rows.append(name, {}, {"not_available": f"{package} is not installed"})
        return "ok"
    command = [sys.executable, "-m", "phase6_integration.lab", "gpu_day", "--stage", name, "--out", str(out)]
    while True:
        before, left = len(rows.of(name)), end - time.monotonic()
        options = ["--end", f"{end:.1f}", *(["--dry"] if dry else [])]
        state = run_process([*command, *options], out / "day.log", left)
        if state.startswith("cut"):
            rows.blame(name, state)
        if not state.startswith("failed") or len(rows.of(name)) == before or end - time.monotonic() < LEAST:
            return state


def failed(rows: list[Results]) -> list[Results]:
    return [row for row in rows if "error" in row]


class Call:
    """The stages of one call, and the folder in which they leave what they find."""

    def __init__(self, out: Path, dry: bool, seconds: float, command: str) -> None:
        self.out, self.dry, self.command = out, dry, command
        self.end = time.monotonic() + seconds
        self.rows, self.json = Rows(out), out / "day.json"
        self.figures: dict[str, Results] = json.loads(self.json.read_text())["figures"] if self.json.exists() else {}

    def run(self, name: str, again: bool, part: float) -> bool:
        """Run a stage that has not ended yet, in this part of the time that is left. Returns whether it has now."""
        if self.has_ended(name) and not again:
            print(f"{name}: done before", flush=True)
            return True
        seconds = min(LONGEST, part * (self.end - time.monotonic()))
        if seconds < LEAST:
            print(f"{name}: no time is left; call this again", flush=True)
            return False
        self.rows.forget(name, finished=again)
        log = self.out / "day.log"
        with log.open("a") as file:
            file.write(f"\n== {name}, at most {seconds:.0f} s\n")
        start, logged = time.monotonic(), log.stat().st_size
        state = run_stage(name, self.out, self.dry, seconds)
        self.figures[name] = {"state": state, "seconds": round(time.monotonic() - start, 1), "rows": self.rows.of(name)}
        record(self.json, self.command, self.figures)
        self.report(name, log.read_bytes()[logged:].decode(errors="replace"))
        return self.has_ended(name)

    def has_ended(self, name: str) -> bool:
        found = self.figures.get(name)
        return found is not None and found["state"] == "ok" and not failed(found["rows"])

    def report(self, name: str, log: str) -> None:
        found = self.figures[name]
        bad = failed(found["rows"])
        counts = f"{len(found['rows'])} rows, {len(bad)} failed"
        print(f"{name}: {found['state']}, {found['seconds']} s, {counts}", flush=True)
        for row in bad:
            print(f"  {json.dumps(row)[:400]}", flush=True)
        if found["state"] != "ok":
            print(log[-LOGGED:], flush=True)


def gpu_is_there() -> bool:
    import torch

    return torch.cuda.is_available()


def terminate(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m phase6_integration.lab gpu_day",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--call", type=int, choices=CALLS, help="the stages of this call (without it: of all three)")
    p.add_argument("--out", type=Path, default=Path("gpu_day"), metavar="FOLDER", help="(%(default)s)")
    p.add_argument("--seconds", type=float, default=float("inf"), help="for this call; the next one goes on (no limit)")
    p.add_argument("--dry", action="store_true", help="everything on a CPU, with tiny shapes: the figures mean nothing")
    p.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    p.add_argument("--again", action="store_true", help="measure what is in the folder already, too")
    p.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)  # in this process
    p.add_argument("--end", type=float, help=argparse.SUPPRESS)  # of the stage, by the clock
    options = p.parse_args(arguments)
    out: Path = options.out.resolve()
    if options.stage is not None:
        faulthandler.enable()
        if options.end is not None:
            faulthandler.dump_traceback_later(max(options.end - time.monotonic() - LAST_WORDS, 1))
        STAGES[options.stage].run(Day(options.stage, options.dry, out, options.end))
        return 0
    if not options.dry and not gpu_is_there():
        p.error("torch sees no GPU here; --dry tries everything on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, terminate)  # so that a stage ends with this process
    packing.unpack(out)
    command = " ".join([p.prog, *(sys.argv[2:] if arguments is None else arguments)])
    call = Call(out, options.dry, options.seconds, command)
    calls = CALLS if options.call is None else (options.call,)
    chosen = options.only or [name for number in calls for name in CALLS[number]]
    ended = []
    for place, name in enumerate(chosen):
        waiting = [later for later in chosen[place + 1 :] if STAGES[later].again or not call.has_ended(later)]
        share = STAGES[name].share
        part = share / (share + sum(STAGES[later].share for later in waiting))
        ended.append(call.run(name, options.again or STAGES[name].again, part))
    print(f"Everything is in {options.out}")
    return 0 if all(ended) else 1
