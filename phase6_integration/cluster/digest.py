"""Digests: what a replica has cached, as the hashes of its pages, sent to routers as changes.

A report goes to every router, none of them answers, and each may miss some. So a report repeats the changes of the last
HISTORY reports, and each SNAPSHOT-th one is whole: a router that has missed more is right again with that one.
"""

from array import array
from collections import deque
from collections.abc import Iterable

import msgspec

from phase6_integration.engine.stats import Gauges

HISTORY = 8
SNAPSHOT = 16


class ReplicaReport(msgspec.Struct, frozen=True):
    """What a replica tells routers about itself. Hashes are 64-bit integers in an array's bytes."""

    version: int  # of the digest; each report has the next one
    changes: list[tuple[bytes, bytes]]  # pages added and pages removed, of each of the last reports, oldest first
    whole: bytes | None  # all pages
    load: dict[str, int]  # unfinished requests, by the front that sent them
    gauges: Gauges


class Digest:
    """The pages of one replica. Not thread-safe."""

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.version = 0
        self._changed: dict[int, bool] = {}  # since the last report; True: added
        self._history: deque[tuple[bytes, bytes]] = deque(maxlen=HISTORY)

    def stored(self, hashes: Iterable[int]) -> None:
        for page in hashes:
            self.pages.add(page)
            self._changed[page] = True

    def removed(self, hashes: Iterable[int]) -> None:
        for page in hashes:
            self.pages.discard(page)
            self._changed[page] = False

    def clear(self) -> None:
        self.removed([*self.pages])

    def report(self, load: dict[str, int], gauges: Gauges) -> ReplicaReport:
        """The next report, with the changes since the one before."""
        added, removed = array("Q"), array("Q")
        for page, is_added in self._changed.items():
            (added if is_added else removed).append(page)
        self._changed.clear()
        self._history.append((added.tobytes(), removed.tobytes()))
        self.version += 1
        whole = array("Q", self.pages).tobytes() if self.version % SNAPSHOT == 0 else None
        return ReplicaReport(self.version, [*self._history], whole, load, gauges)


class DigestView:
    """The digest of a replica as a router knows it. Reports may be missing or come twice, but not out of order."""

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.version = 0

    def apply(self, report: ReplicaReport) -> bool:
        """Whether the view now equals the report's. If not, too many were missed, and it stays as it was."""
        missed = report.version - self.version
        if missed <= 0:
            return missed == 0
        if missed <= len(report.changes):
            for added, removed in report.changes[-missed:]:
                self.pages.difference_update(array("Q", removed))
                self.pages.update(array("Q", added))
        elif report.whole is not None:
            self.pages = set(array("Q", report.whole))
        else:
            return False
        self.version = report.version
        return True
