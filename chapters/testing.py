"""Runs pytest in a copy of the checkout and reads its results.

Each run is a fork of one process, which has imported the libraries already, and has a time limit.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from chapters.course import Course

AT_ONCE = max(1, min(os.cpu_count() or 1, 4))
# The time limit is ours: pytest's own faulthandler would cancel it at the first failure.
OPTIONS = "-q --color=no --tb=short --continue-on-collection-errors -p no:cacheprovider -p no:faulthandler"
SHRINKING = 2  # seconds in which Hypothesis simplifies an example that fails: a reader waits for it
NOT_COPIED = ("build", "dist", "workspace")

os.environ.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")  # macOS: a fork may use what was imported before
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # a run that is ended leaves a semaphore or two
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["chapters.preload"])

T = TypeVar("T")
U = TypeVar("U")


def copy_checkout(course: Course, into: Path, files: Mapping[str, str]) -> Path:
    """A new folder `into` with links to the files of the checkout, and with `files`, from their names to their texts,
    in place of those of the same name."""
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
    except OSError:  # a file system without links
        shutil.copy2(source, target)


@dataclass(frozen=True)
class Result:
    """The result of a test, or of a file that cannot be collected ("broken"). `error` is the first line of the
    exception or the reason of a skip, `text` all that pytest says of it."""

    id: str
    outcome: str
    error: str = ""
    text: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in ("failed", "broken")

    @property
    def line(self) -> str:
        return shorten(f"{self.id}: {self.error}")


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


def shorten(text: str, width: int = 160) -> str:
    """Shorten a text to a line or two; failures may quote whole objects."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


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
    events, theirs = CONTEXT.Pipe(duplex=False)
    arguments = [*OPTIONS.split(), f"--rootdir={copy}", f"--basetemp={copy / '.tmp'}", "-m", marks, *tests]
    process = CONTEXT.Process(target=_run, args=(copy, arguments, log, timeout, stop_at, theirs))
    began = time.monotonic()
    process.start()
    theirs.close()
    results: dict[str, Result] = {}
    collected, current, finished = 0, "", False
    try:
        for event in _received(events, process.sentinel):
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
    finally:
        _kill(process)
    output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    results.pop(current, None)  # the process ended in it
    stopped = ""
    if not finished or current:
        why = f"did not end within {timeout:g} s" if "Timeout (" in output else "pytest ended early"
        stopped = f"{current or ('the end of the run' if collected else 'the imports of the tests')}: {why}"
    return Run(tuple(results.values()), collected, stopped, time.monotonic() - began, output)


def at_once(work: Callable[[T], U], items: Sequence[T]) -> Iterator[U]:
    """Yields `work` of each item in order, with AT_ONCE of them in progress. An interrupt ends their runs."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            yield from pool.map(work, items)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                _kill(process)
            raise


def _received(events: Connection, end: int) -> Iterator[Any]:
    """What a run sends, up to the end of its process."""
    with suppress(EOFError):
        while events in wait([events, end]):
            event = events.recv()
            yield event
            if event is None:
                return


def _kill(process: Any) -> None:
    """End a run, and what its tests have started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _run(
    copy: Path, arguments: Sequence[str], log: Path, timeout: float, stop_at: str | None, events: Connection
) -> None:
    """In the fork: run pytest in a process group of its own."""
    import pytest
    from hypothesis.internal.conjecture import engine

    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    stacks = open(os.dup(output), "w")  # noqa: SIM115
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
    engine.MAX_SHRINKING_SECONDS = SHRINKING
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    pytest.main(list(arguments), [_Recorder(events, stop_at)])
    sys.stdout.flush()
    sys.stderr.flush()
    events.send(None)
    os._exit(0)  # threads that tests have left do not hold it


class _Recorder:
    """A plugin that sends what happens: the number of tests, the name of each that starts, each (when, Result)."""

    def __init__(self, events: Connection, stop_at: str | None) -> None:
        self._send, self._stop_at = events.send, stop_at
        self._session: Any = None

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            lines = [line[2:].strip() for line in report.longreprtext.split("\n") if line.startswith("E ")]
            error = lines[-1] if lines else report.longreprtext.strip()[-200:]
            self._send(("collect", Result(report.nodeid, "broken", error, report.longreprtext)))

    def pytest_collection_finish(self, session: Any) -> None:
        self._session = session
        self._send(len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        error = text = ""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = crash.message.split("\n")[0] if crash else report.longreprtext.strip().split("\n")[-1]
            text = "\n".join([report.longreprtext, *(content for _, content in report.sections)])
            if self._stop_at is not None and self._stop_at in text:
                self._session.shouldstop = "caught"
        elif report.skipped:
            error = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        self._send((report.when, Result(report.nodeid, report.outcome, error, text)))
