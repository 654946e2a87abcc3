"""What a run of pytest tells: the results of its tests, as they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHRINKING = 2  # seconds in which Hypothesis simplifies an example that fails: a reader waits for it


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
