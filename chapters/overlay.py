"""A pytest plugin (`-p chapters.overlay`): run tests with some modules taken from another folder, and write down why
tests fail. It acts only on what `chapters.checking` puts in the environment:

NANO_COURSE_ROOT      the root of the course
NANO_COURSE_OVERLAY   a folder that mirrors the root; a module found there is loaded from it (may be absent)
NANO_COURSE_REPORT    where events go, a JSON object a line, each flushed so that a killed run still tells its story
NANO_COURSE_STOP      an exercise id: end the run at the first failure that this exercise caused (may be absent)

Modules are replaced in this process only; a test that starts another Python sees the reference there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

_EXERCISE = re.compile(r"\bexercise (\d+\.\d+)\b")


class OverlayLoader(SourceFileLoader):
    """Runs another file's code in the place of the reference. `__file__` stays the reference's, so that data lying
    beside a module is still found; line numbers and tracebacks are those of the code that really runs."""

    def __init__(self, name: str, reference: Path, replacement: Path) -> None:
        super().__init__(name, str(reference))
        self._replacement = replacement

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._replacement.read_bytes(), str(self._replacement), "exec", dont_inherit=True)


class OverlayFinder(MetaPathFinder):
    """Finds the modules whose file is in the overlay folder, and no others."""

    def __init__(self, root: Path, overlay: Path) -> None:
        self._files = {_module_name(path.relative_to(overlay)): path for path in overlay.rglob("*.py")}
        self._references = {name: root / path.relative_to(overlay) for name, path in self._files.items()}
        early = sorted(self._files.keys() & sys.modules.keys())
        if early:
            raise pytest.UsageError(f"imported before the overlay could replace them: {', '.join(early)}")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._files:
            return None
        reference = self._references[fullname]
        packages = [str(reference.parent)] if reference.name == "__init__.py" else None
        loader = OverlayLoader(fullname, reference, self._files[fullname])
        return spec_from_file_location(fullname, reference, loader=loader, submodule_search_locations=packages)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """The error, its causes and contexts, and the members of groups among them."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    group = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (error.__cause__, error.__context__, *group):
        yield from _chain(other, seen)


class Recorder:
    """Writes what happens: the tests collected, each start, each report with the exercises its failure names."""

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
            item.session.shouldstop = f"exercise {self._stop_at} was noticed"
        return report


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any conftest or test is imported."""
    overlay = os.environ.get("NANO_COURSE_OVERLAY")
    if overlay:
        sys.meta_path.insert(0, OverlayFinder(Path(os.environ["NANO_COURSE_ROOT"]), Path(overlay)))


def pytest_configure(config: pytest.Config) -> None:
    report = os.environ.get("NANO_COURSE_REPORT")
    if report:
        config.pluginmanager.register(Recorder(Path(report), os.environ.get("NANO_COURSE_STOP")))
