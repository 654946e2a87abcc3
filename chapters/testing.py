"""Runs tests with an overlay, each run in a fork of one process, with a time limit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import LifoQueue
from threading import Event, Thread
from typing import Any

from chapters import overlay
from chapters.course import Course

AT_ONCE = max(1, min(os.cpu_count() or 1, 4))
LOOK = 0.5  # seconds between two looks at how far a run is


def shorten(text: str, width: int = 160) -> str:
    """Shorten a text to a line or two; failures may quote whole objects."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


@dataclass(frozen=True)
class Result:
    """The result of a test, or of a file that could not be collected. `error` is the first line of the exception or the
    reason of a skip; `exercises` are those that the failure names; `details` are those of `plugin.describe`."""

    id: str
    outcome: str
    seconds: float = 0.0
    error: str = ""
    exercises: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict, hash=False)

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


class Runner:
    """Runs tests of a course, one run at a time. The first run imports everything; later ones start with the libraries
    that the one before had imported. Closing it ends what is running."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._process: subprocess.Popen[str] | None = None
        self._fork = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self,
        tests: Iterable[str],
        *,
        timeout: float,
        overlay: Path | None = None,
        stop_at: str | None = None,
        options: Sequence[str] = (),
        progress: Callable[[int, int], object] | None = None,
    ) -> Run:
        """Run `tests` from the root, without those marked slow unless `options` select by another mark. After `timeout`
        seconds the run ends itself, and the processes that it started are killed. `progress` is called with the number
        of tests that have ended, and of all, while they run."""
        with tempfile.TemporaryDirectory(prefix="course-") as scratch:
            job = {"root": str(self._course.root), "report": scratch, "timeout": timeout, "stop_at": stop_at}
            job |= {"overlay": str(overlay) if overlay else None, "arguments": ["-m", "not slow", *options, *tests]}
            began = time.monotonic()
            with _watched(Path(scratch, "events.jsonl"), progress):
                self._execute(json.dumps(job))
            seconds = time.monotonic() - began
            events = _events(Path(scratch, "events.jsonl"))
            stack, output = (_read(Path(scratch, name)) for name in ("stack.txt", "output.txt"))
        late = f"did not end within {timeout:g} s" if stack.startswith("Timeout") else ""
        return _run(events, late, seconds, output, stack)

    def _execute(self, job: str) -> None:
        """Hand the job over and wait for its end."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "chapters.prepared"],
                cwd=self._course.root,
                env=_environment(self._course.root),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{job}\n")
        self._process.stdin.flush()
        self._fork = int(self._process.stdout.readline() or 0)
        if not self._process.stdout.readline():  # it was killed
            self.close()
        self._fork = 0

    def close(self) -> None:
        """Kill the process, and the run if there is one: a Ctrl-C does not reach their process groups."""
        for group in filter(None, (self._fork, self._process.pid if self._process else 0)):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        if self._process:
            self._process.communicate()
        self._process, self._fork = None, 0


class Runners:
    """Several runners, for threads: each run takes the one that was used last among those that are free."""

    def __init__(self, course: Course, size: int = AT_ONCE) -> None:
        self.size = size
        self._all = [Runner(course) for _ in range(size)]
        self._free: LifoQueue[Runner] = LifoQueue()

    def __enter__(self) -> Runners:
        for runner in self._all:
            self._free.put(runner)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, tests: Iterable[str], **options: Any) -> Run:
        runner = self._free.get()
        try:
            return runner.run(tests, **options)
        finally:
            self._free.put(runner)

    def prepare(self, tests: Iterable[str]) -> None:
        """Import the libraries that these tests need, so that a first run starts fast."""
        self.run(tests, timeout=600, options=["--collect-only"])

    def close(self) -> None:
        for runner in self._all:
            runner.close()


def run_tests(course: Course, tests: Iterable[str], **options: Any) -> Run:
    """A single run: see `Runner.run`."""
    with Runner(course) as runner:
        return runner.run(tests, **options)


@contextmanager
def _watched(events: Path, progress: Callable[[int, int], object] | None) -> Iterator[None]:
    """Meanwhile, tell `progress` in a thread how far the run is, and once at the end."""
    if progress is None:
        yield
        return
    ended = Event()

    def watch() -> None:
        is_over = False
        while not is_over:
            is_over = ended.wait(LOOK)
            written = _events(events)
            tests = sum(len(event["ids"]) for event in written if event["event"] == "collected")
            if tests:
                progress(sum(event.get("when") == "teardown" for event in written), tests)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _environment(root: Path) -> dict[str, str]:
    """The caller's environment without what changes the words of pytest: its options, and the two variables by which it
    knows CI. Installed plugins are not loaded: no test of the course needs one, and they add two seconds to a start."""
    without = re.compile("PYTEST_|NANO_COURSE_|CI$|BUILD_NUMBER$")
    kept = {name: value for name, value in os.environ.items() if not without.match(name)}
    forks = {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}  # for macOS: a fork may use what was imported before it
    return overlay.environment(root, kept) | forks | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _events(file: Path) -> list[dict[str, Any]]:
    """The events so far. A run that goes on, or was killed, may have written a part of the last line."""
    text = _read(file)
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


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
            named = tuple(event["exercises"])
            new = Result(event["id"], event["outcome"], event["seconds"], event["error"], named, event["details"])
            old = results.get(new.id, Result(new.id, "passed"))
            worst = max(old, new, key=lambda result: ("passed", "skipped", "failed").index(result.outcome))
            results[new.id] = replace(worst, seconds=old.seconds + new.seconds)
            current = "" if event["when"] == "teardown" else current
    results.pop(current, None)
    return Run(tuple(results.values()), tuple(broken), collected, stopped, current, seconds, output, stack)
