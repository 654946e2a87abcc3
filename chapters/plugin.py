"""A pytest plugin that records why tests fail, so that `check` can say it in a few lines."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Generator, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from chapters import pictures

SHRINKING = 2  # seconds in which Hypothesis simplifies an example that fails: a reader waits for it
_EXAMPLE = ("Failing test case", "Falsifying example")  # how Hypothesis begins a note
_ADVICE = ("Explanation:", "You can reproduce")  # and how its last ones begin
_INVARIANT = "hypothesis_stateful_invariant"  # how Hypothesis marks the method
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
    """Records the collected tests, each start, and each report with the exercises that its failure names: one line
    of JSON each, flushed so that they survive a killed run. The first failure that exercise `stop_at` caused ends the
    run."""

    def __init__(self, path: Path, stop_at: str | None, overlay: str | None) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._stop_at = stop_at
        self._overlay = overlay

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
        if engine := sys.modules.get("hypothesis.internal.conjecture.engine"):
            engine.MAX_SHRINKING_SECONDS = SHRINKING  # type: ignore[attr-defined]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("start", id=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = ""
        exercises: list[str] = []
        details: dict[str, Any] = {}
        if report.failed:
            raised = call.excinfo.value if call.excinfo else None
            texts = [str(link) for link in _chain(raised, set())]
            texts += [report.longreprtext, *(text for _, text in report.sections)]
            exercises = sorted({id for text in texts for id in _EXERCISE.findall(text)})
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else report.longreprtext).strip().split("\n")
            error = lines[0] if crash else lines[-1]
            if call.excinfo and report.when == "call":
                details = describe(item, call.excinfo, self._overlay)
        elif report.skipped:
            error = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        values: dict[str, Any] = {"outcome": report.outcome, "seconds": report.duration, "error": error}
        values |= {"exercises": exercises, "details": details}
        self._write("report", id=item.nodeid, when=report.when, **values)
        if self._stop_at in exercises:
            item.session.shouldstop = f"exercise {self._stop_at} was caught"
        return report


def describe(item: pytest.Item, info: pytest.ExceptionInfo[BaseException], overlay: str | None) -> dict[str, Any]:
    """What a failure shows: the parameters, the example, the statement of the test, the message, the lines of the
    workspace's code, innermost last, and pictures of what the test held."""
    if isinstance(info.value, BaseExceptionGroup):  # Hypothesis found several failures
        info = pytest.ExceptionInfo.from_exception(info.value.exceptions[0])
    entries = list(info.traceback)
    cause = info.value.__cause__  # Triton's interpreter raises its own error from that of a kernel
    origin = list(pytest.ExceptionInfo.from_exception(cause).traceback) if cause and cause.__traceback__ else []
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    its = [entry for entry in entries if str(entry.path) == str(item.path)]
    notes = [note for link in _chain(info.value, set()) for note in getattr(link, "__notes__", ())]
    first = next((note for note in notes if note.startswith(_EXAMPLE)), "\0")
    example = notes[notes.index(first) :] if first in notes else []
    return {
        "given": {name: _short(value) for name, value in parameters.items()},
        "example": _steps(example, its),
        "statement": _statement(its[-1]) if its else "",
        "line": its[-1].lineno + 1 if its else 0,
        "message": info.exconly(tryshort=True).partition(first)[0].rstrip(),
        "frames": [
            (str(Path(entry.path).relative_to(overlay)), entry.lineno + 1, entry.name)
            for entry in (*entries, *origin)
            if overlay and Path(entry.path).is_relative_to(overlay)
        ],
        "pictures": pictures.draw(entry.frame.f_locals for entry in entries),
    }


def _steps(example: Iterable[str], entries: Iterable[Any]) -> str:
    """An example without the invariants of its state machine, which follow every step, and without the teardown."""
    machines = [type(entry.frame.f_locals.get("self")) for entry in entries]
    marked = {name for machine in machines for name in dir(machine) if hasattr(getattr(machine, name), _INVARIANT)}
    left_out = {f"state.{name}()" for name in (*marked, "teardown")}
    lines = takewhile(lambda line: not line.startswith(_ADVICE), "\n".join(example).split("\n"))
    return "\n".join(line for line in lines if line.strip() not in left_out)


def _statement(entry: Any) -> str:
    """The statement of a test, after the `with pytest.raises(...)` around it: that is what was expected."""
    line, source = entry.lineno + 1, Path(entry.path).read_text(encoding="utf-8")
    blocks = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.With)]
    around = [node for node in blocks if node.lineno < line <= (node.end_lineno or 0)]
    expected = [f"with {ast.unparse(item)}:\n    " for node in around for item in node.items]
    return "".join(text for text in expected if "pytest.raises" in text) + str(entry.statement).strip()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
