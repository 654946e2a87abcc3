"""Runs tests with an overlay in a process of their own, with a time limit."""

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
_OWN_LIMIT = "-p no:faulthandler"  # pytest's own would cancel our time limit at the first failure
_running: set[subprocess.Popen[bytes]] = set()


def shorten(text: str, width: int = 160) -> str:
    """Shorten a text to a line or two; failures may quote whole objects."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


@dataclass(frozen=True)
class Result:
    """The result of a test, or of a file that could not be collected. `error` is the first line of the exception or the
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
    """One run of pytest: the completed tests, and the files that could not be collected. If the run was cut short,
    `stopped` says why, `current` names the test it was in, and `stack` holds the stacks of its threads, if known."""

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
    """Run `tests` from the root, without those marked slow unless `options` select by another mark. After `timeout`
    seconds the process ends itself, and the processes that it started are killed."""
    command = [sys.executable, "-m", "pytest", *_OPTIONS.split(), *_OWN_LIMIT.split(), "-m", "not slow"]
    command += [f"--rootdir={course.root}", *options, *tests]
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        given = {"ROOT": course.root, "OVERLAY": overlay, "REPORT": scratch, "TIMEOUT": timeout, "STOP": stop_at}
        began = time.monotonic()
        _execute(command, course.root, _environment(course.root, given), Path(scratch, "output.txt"))
        seconds = time.monotonic() - began
        events, stack, output = (_read(Path(scratch, name)) for name in ("events.jsonl", "stack.txt", "output.txt"))
    whole = events[: events.rfind("\n") + 1].splitlines()  # a killed run may leave an incomplete line
    late = f"did not end within {timeout:g} s" if stack.startswith("Timeout") else ""
    return _run([json.loads(line) for line in whole], late, seconds, output, stack)


def _execute(command: list[str], cwd: Path, environment: dict[str, str], output: Path) -> None:
    """Run a command in a process group of its own, so that its children end with it."""
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
    """Kill all running tests: a Ctrl-C does not reach their process groups."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group, if it still exists."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
    _running.discard(process)


def _environment(root: Path, given: dict[str, Any]) -> dict[str, str]:
    """The caller's environment with the plugin's options and without pytest's. Installed plugins are not loaded: no
    test of the course needs one, and they add two seconds to every start."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NANO_COURSE_"))}
    home = Path(__file__).resolve().parent.parent
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), str(home), kept.get("PYTHONPATH")]))
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return kept | {f"NANO_COURSE_{name}": str(value) for name, value in given.items() if value is not None}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


def _run(events: list[dict[str, Any]], late: str, seconds: float, output: str, stack: str) -> Run:
    """Combine the events of one run. Setup, call and teardown of a test become one result, the worst of the three; a
    test without a teardown has no result, since the process ended in it."""
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
            new = Result(event["id"], event["outcome"], event["seconds"], event["error"], tuple(event["exercises"]))
            old = results.get(new.id, Result(new.id, "passed"))
            worst = max(old, new, key=lambda result: ("passed", "skipped", "failed").index(result.outcome))
            results[new.id] = replace(worst, seconds=old.seconds + new.seconds)
            current = "" if event["when"] == "teardown" else current
    results.pop(current, None)
    return Run(tuple(results.values()), tuple(broken), collected, stopped, current, seconds, output, stack)
