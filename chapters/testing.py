"""Runs pytest in a copy of the checkout and reads its results."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from chapters.course import Course
from chapters.events import Result

if sys.platform == "emscripten":  # a browser's tab has no processes
    from chapters.unforked import at_once as at_once
    from chapters.unforked import run_pytest
else:
    from chapters.forked import at_once as at_once
    from chapters.forked import run_pytest

# The time limit is ours: pytest's own faulthandler would cancel it at the first failure.
OPTIONS = "-q --color=no --tb=short --continue-on-collection-errors -p no:cacheprovider -p no:faulthandler"
FAULT = "Fatal Python error: Segmentation fault"  # faulthandler's words
NOT_COPIED = ("build", "dist", "workspace")


def copy_checkout(course: Course, into: Path, files: Mapping[str, str]) -> Path:
    """A new folder `into` with links to the files of the checkout, and with `files`, from their names to their texts,
    in place of files of the same name."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    # The rewritten tests that pytest keeps hold the paths of the checkout.
    ignored = shutil.ignore_patterns("node_modules", "*-pytest-*.pyc")
    for path in course.root.iterdir():
        if path.is_dir() and not path.name.startswith(".") and path.name not in NOT_COPIED:
            shutil.copytree(path, into / path.name, copy_function=_link, ignore=ignored)
        elif path.is_file():
            _link(str(path), str(into / path.name))
    for name, text in files.items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).unlink(missing_ok=True)  # it may be a link to the file of the checkout
        (into / name).write_text(text, encoding="utf-8")
    return into


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except (OSError, AttributeError):  # a file system without links
        shutil.copy2(source, target)


@dataclass(frozen=True)
class Run:
    """One run of pytest: its completed tests, and the files that cannot be collected. If the run was cut short,
    `stopped` says where and why."""

    results: tuple[Result, ...]
    collected: int
    stopped: str
    seconds: float
    output: str

    @property
    def last_line(self) -> str:
        return (self.output.strip().splitlines() or ["no output"])[-1]

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.failed]

    def count(self, outcome: str) -> int:
        return sum(result.outcome == outcome for result in self.results)


def run_tests(
    copy: Path,
    tests: Iterable[str],
    *,
    timeout: float,
    log: Path | None = None,
    stop_at: str | None = None,
    marks: str = "not slow",
) -> Run:
    """Run `tests` with these marks in a copy of the checkout. The first failure with `stop_at` in its text ends the
    run. After `timeout` seconds the run ends itself; the processes that it started are killed."""
    log = log or copy / "output.txt"
    arguments = [*OPTIONS.split(), f"--rootdir={copy}", f"--basetemp={copy / '.tmp'}", "-m", marks, *tests]
    began = time.monotonic()
    results: dict[str, Result] = {}
    collected, current, finished = 0, "", False
    with closing(run_pytest(copy, arguments, log, timeout, stop_at)) as events:
        for event in events:
            if event is None:
                finished = True
            elif isinstance(event, int):
                collected = event
            elif isinstance(event, str):
                current = event
            else:
                when, result = event
                worst = results.get(result.id)
                results[result.id] = worst if worst and worst.outcome != "passed" else result
                current = "" if when == "teardown" else current
    output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    results.pop(current, None)  # the process ended in it
    stopped = ""
    if not finished or current:
        why = f"did not end within {timeout:g} s" if "Timeout (" in output else "pytest ended early"
        if FAULT in output:
            why = "the code read or wrote memory that is not its own: is a mask missing in a kernel?"
        stopped = f"{current or ('the end of the run' if collected else 'the imports of the tests')}: {why}"
    return Run(tuple(results.values()), collected, stopped, time.monotonic() - began, output)
