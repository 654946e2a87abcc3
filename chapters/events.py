"""What a run of pytest tells: the results of its tests, as they come."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

# What NumPy warns of in Triton's interpreter, and why.
WARNINGS = {
    "overflow encountered in exp": "exp of a large number: subtract the maximum before",
    "invalid value encountered in divide": "0 / 0: a row without keys, or one of which all scores are masked",
    "invalid value encountered in subtract": "inf - inf: a maximum of no scores must be finite",
}
SHRINKING = 2  # seconds in which Hypothesis simplifies an example that fails: a reader waits for it
# What it adds about lines of libraries, and, since those seconds are few, about its slowness.
_NOISE = re.compile(
    r"E?\s*(Explanation:$|These lines were always and only run|/\S+:\d+$|\(and \d+ more with settings\.verbosity"
    r"|WARNING: Hypothesis has spent more than five minutes|PLEASE REPORT THIS)"
)


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


def shorten(text: str, width: int = 160) -> str:
    """Shorten a text to a line or two; failures may quote whole objects."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 3]}..."


def cut(error: BaseException, root: Path) -> BaseException:
    """The error with the lines of its traceback that are below `root`: the reader's, of the tests and of the phases.
    One that only repeats another, as Triton's interpreter raises them, gives way to that one."""
    frames: list[TracebackType] = []
    while True:
        step = error.__traceback__
        while step is not None:
            frames.append(step)
            step = step.tb_next
        cause = error.__cause__
        if cause is None or str(error) != repr(cause):
            break
        for note in getattr(error, "__notes__", ()):
            cause.add_note(note)
        error = cause
    kept = None
    for frame in reversed([frame for frame in frames if root in Path(frame.tb_frame.f_code.co_filename).parents]):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(kept) if kept else error


class Recorder:
    """A plugin that sends what happens: the number of tests, the name of each that starts, each (when, Result)."""

    def __init__(self, send: Callable[[Any], None], stop_at: str | None) -> None:
        self._send, self._stop_at = send, stop_at
        self._session: Any = None

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            lines = [line[2:].strip() for line in report.longreprtext.split("\n") if line.startswith("E ")]
            error = lines[-1] if lines else report.longreprtext.strip()[-200:]
            self._send(("collect", Result(report.nodeid, "broken", error, report.longreprtext)))

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Run the tests in the order in which they are named, even if their files are named as a whole, too."""
        places = {item: [at for at, name in enumerate(config.args) if item.nodeid.startswith(name)] for item in items}
        items.sort(key=lambda item: min(places[item], default=len(config.args)))

    def pytest_collection_finish(self, session: Any) -> None:
        self._session = session
        self._send(len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._send(nodeid)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Before pytest writes its report."""
        if call.excinfo is not None and isinstance(call.excinfo.value, Exception):
            error = cut(call.excinfo.value, item.config.rootpath)
            for warning, why in WARNINGS.items():
                if isinstance(error, RuntimeWarning) and warning in str(error):
                    error.add_note(why)
            call.excinfo = type(call.excinfo).from_exception(error)

    def pytest_runtest_logreport(self, report: Any) -> None:
        error = text = ""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = crash.message.split("\n")[0] if crash else report.longreprtext.strip().split("\n")[-1]
            text = "\n".join([report.longreprtext, *(content for _, content in report.sections)])
            text = "\n".join(line for line in text.split("\n") if not _NOISE.match(line))
            if self._stop_at is not None and self._stop_at in text:
                self._session.shouldstop = "caught"
        elif report.skipped:
            error = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        self._send((report.when, Result(report.nodeid, report.outcome, error, text)))
