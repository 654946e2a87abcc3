"""A pytest plugin (`-p chapters.plugin`): installs an overlay, and records why tests fail and where one hangs.
Its options come from `chapters.testing` through the environment:

NANO_COURSE_ROOT      the root of the course
NANO_COURSE_OVERLAY   a folder for `chapters.overlay` (may be absent)
NANO_COURSE_REPORT    a folder: `events.jsonl`, one object per line, flushed so that they survive a killed run, and
                      `stack.txt`, the stacks of all threads when the process crashed or its time was over
NANO_COURSE_TIMEOUT   after this many seconds the process ends itself
NANO_COURSE_STOP      an exercise id: end the run at the first failure that this exercise caused (may be absent)
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from chapters import overlay

_EXERCISE = re.compile(r"\bexercise (\d+\.\d+)\b")


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """The error, its causes and contexts, and the members of exception groups among them."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (error.__cause__, error.__context__, *group):
        yield from _chain(other, seen)


class Recorder:
    """Records the collected tests, each start, and each report with the exercises that its failure names."""

    def __init__(self, path: Path, stop_at: str | None) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._stop_at = stop_at

    def pytest_sessionfinish(self) -> None:
        self._write("finished")

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            errors = [line[2:].strip() for line in report.longreprtext.split("\n") if line.startswith("E ")]
            self._write("broken", id=report.nodeid, error=errors[-1] if errors else report.longreprtext.strip()[-200:])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", ids=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("start", id=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = ""
        exercises: list[str] = []
        if report.failed:
            raised = call.excinfo.value if call.excinfo else None
            texts = [str(link) for link in _chain(raised, set())]
            texts += [report.longreprtext, *(text for _, text in report.sections)]
            exercises = sorted({id for text in texts for id in _EXERCISE.findall(text)})
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else report.longreprtext).strip().split("\n")
            error = lines[0] if crash else lines[-1]
        elif report.skipped:
            error = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        values = {"outcome": report.outcome, "seconds": report.duration, "error": error, "exercises": exercises}
        self._write("report", id=item.nodeid, when=report.when, **values)
        if self._stop_at in exercises:
            item.session.shouldstop = f"exercise {self._stop_at} was caught"
        return report


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Set up before any conftest or test, and so any module of an exercise, is imported."""
    given = {name: os.environ.get(f"NANO_COURSE_{name}") for name in ("ROOT", "OVERLAY", "REPORT", "TIMEOUT", "STOP")}
    if given["REPORT"] and given["TIMEOUT"]:
        early_config.pluginmanager.register(Recorder(Path(given["REPORT"], "events.jsonl"), given["STOP"]))
        stack = os.open(Path(given["REPORT"], "stack.txt"), os.O_CREAT | os.O_WRONLY)
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(float(given["TIMEOUT"]), exit=True, file=stack)
    if given["ROOT"] and given["OVERLAY"]:
        overlay.install(Path(given["ROOT"]), Path(given["OVERLAY"]))
