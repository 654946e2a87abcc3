"""Running tests with an overlay, in a process of their own that cannot outlive its time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chapters.course import Course

_OPTIONS = "-q --color=no --tb=short --maxfail=0 --continue-on-collection-errors -p no:cacheprovider -p chapters.plugin"
_OWN_LIMIT = "-p no:faulthandler"  # pytest's own would forget our time limit at the first failure
_running: set[subprocess.Popen[bytes]] = set()


def shorten(text: str, width: int = 160) -> str:
    """What fits on a line or two of a terminal; failures quote whole objects."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


@dataclass(frozen=True)
class Result:
    """A test that ran, or a file that could not be collected. `error` is the first line of what was raised, or the
    reason of a skip; `exercises` are those that the failure names."""

    id: str
    outcome: str
    seconds: float = 0.0
    error: str = ""
    exercises: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return shorten(f"{self.id}: {self.error}")


@dataclass(frozen=True)
class Run:
    """One run of pytest: the tests that ran to their end, and the files that could not be collected. `stopped` says
    why the run itself did not reach its end, if so, `current` which test it was in, and `stack` where its threads
    were, if that is known."""

    results: tuple[Result, ...]
    broken: tuple[Result, ...]
    collected: tuple[str, ...]
    stopped: str
    current: str
    seconds: float
    output: str
    stack: str

    @property
    def last_line(self) -> str:
        return _last_line(self.output)

    @property
    def where(self) -> str:
        return self.current or ("the end of the run" if self.collected else "the imports of the tests")

    @property
    def failures(self) -> tuple[Result, ...]:
        return (*self.broken, *(result for result in self.results if result.outcome == "failed"))


def run_tests(
    course: Course,
    tests: Iterable[str],
    *,
    timeout: float,
    overlay: Path | None = None,
    stop_at: str | None = None,
    options: Sequence[str] = (),
) -> Run:
    """Run `tests` from the root, without those marked slow unless `options` choose by another mark. After `timeout`
    seconds the process ends itself, what it started is killed, and the run says so."""
    command = [sys.executable, "-m", "pytest", *_OPTIONS.split(), *_OWN_LIMIT.split(), "-m", "not slow"]
    command += [f"--rootdir={course.root}", *options, *tests]
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        given = {"ROOT": course.root, "OVERLAY": overlay, "REPORT": scratch, "TIMEOUT": timeout, "STOP": stop_at}
        began = time.monotonic()
        _execute(command, course.root, _environment(course.root, given), Path(scratch, "output.txt"))
        seconds = time.monotonic() - began
        events, stack, output = (_read(Path(scratch, name)) for name in ("events.jsonl", "stack.txt", "output.txt"))
    whole = events[: events.rfind("\n") + 1].splitlines()  # a killed run may leave half a line
    late = f"did not end within {timeout:g} s" if stack.startswith("Timeout") else ""
    return _run([json.loads(line) for line in whole], late, seconds, output, stack)


def _execute(command: list[str], cwd: Path, environment: dict[str, str], output: Path) -> None:
    """Run one command to its end, in a process group of its own so that its children end with it."""
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            process.wait()
        finally:
            _kill(process)


def stop_all() -> None:
    """Kill what still runs: a Ctrl-C reaches us but not the process groups we started."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the group, the test's own children included; a group that is gone already is what we want."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    _running.discard(process)


def _environment(root: Path, given: dict[str, Any]) -> dict[str, str]:
    """The caller's environment with what the plugin is given, and without what would steer pytest from outside. Plugins
    that are installed here are not loaded: no test of the course needs one, and with them a start takes two seconds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NANO_COURSE_"))}
    home = Path(__file__).resolve().parent.parent
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), str(home), kept.get("PYTHONPATH")]))
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return kept | {f"NANO_COURSE_{name}": str(value) for name, value in given.items() if value is not None}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["pytest said nothing"])[-1]


def _run(events: list[dict[str, Any]], late: str, seconds: float, output: str, stack: str) -> Run:
    """Put the events of one run together. Setup, call and teardown of a test become one result, the worst of them; a
    test without its teardown has no result, since the process ended in it."""
    results: dict[str, Result] = {}
    broken: list[Result] = []
    collected: tuple[str, ...] = ()
    current = ""
    stopped = late or shorten(f"pytest ended early: {(stack.splitlines() or [_last_line(output)])[0]}")
    for event in events:
        if event["event"] == "finished":
            stopped = late or ("interrupted" if current else "")
        elif event["event"] == "collected":
            collected = tuple(event["ids"])
        elif event["event"] == "start":
            current = event["id"]
        elif event["event"] == "broken":
            broken.append(Result(event["id"], "failed", error=event["error"]))
        else:
            told = (event["outcome"], event["seconds"], event["error"], tuple(event["exercises"]))
            new = Result(event["id"], *told)
            old = results.get(new.id, Result(new.id, "passed"))
            worst = max(old, new, key=lambda result: ("passed", "skipped", "failed").index(result.outcome))
            results[new.id] = replace(worst, seconds=old.seconds + new.seconds)
            current = "" if event["when"] == "teardown" else current
    results.pop(current, None)
    return Run(tuple(results.values()), tuple(broken), collected, stopped, current, seconds, output, stack)
