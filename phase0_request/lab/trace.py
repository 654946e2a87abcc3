"""Trace: where each request was, and since when. Entering a stage leaves the one before, so no time goes missing."""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple


class Stage(Enum):
    """The five parts of a server that a request passes; the last three again for every token."""

    API = "API adapter"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    RUNNER = "model runner"
    DETOKENIZER = "detokenizer"


class Span(NamedTuple):
    request_id: str
    stage: Stage
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(slots=True)
class _Path:
    entries: list[tuple[Stage, float]] = field(default_factory=list)
    left: float | None = None


class Trace:
    """The paths of requests through the stages, of the last `keep` that have left and of all that have not.

    Times are seconds on the clock of whoever records.
    """

    def __init__(self, keep: int = 1000) -> None:
        self._paths: dict[str, _Path] = {}
        self._left: deque[str] = deque()
        self._keep = keep

    def enter(self, request_id: str, stage: Stage, now: float) -> None:
        """A request moves on into a stage. Entering the stage it is in already changes nothing."""
        path = self._paths.setdefault(request_id, _Path())
        if path.left is not None:
            raise ValueError(f"request {request_id} has left; it cannot enter {stage.value}")
        if not path.entries or path.entries[-1][0] is not stage:
            path.entries.append((stage, now))

    def leave(self, request_id: str, now: float) -> None:
        """It is done with: nothing of it happens after this."""
        self._paths[request_id].left = now
        self._left.append(request_id)
        if len(self._left) > self._keep:
            del self._paths[self._left.popleft()]

    def spans(self, request_id: str | None = None) -> Iterator[Span]:
        """Stay after stay, of one request or of all that have left, in order of entry."""
        for key in self._paths if request_id is None else [request_id]:
            path = self._paths[key]
            if path.left is None:
                continue
            ends = [start for _, start in path.entries[1:]] + [path.left]
            yield from (Span(key, stage, start, end) for (stage, start), end in zip(path.entries, ends, strict=True))

    def seconds_by_stage(self, request_id: str | None = None) -> dict[Stage, float]:
        """How long was spent in each stage altogether."""
        totals = dict.fromkeys(Stage, 0.0)
        for span in self.spans(request_id):
            totals[span.stage] += span.seconds
        return totals

    def as_json(self) -> list[dict[str, Any]]:
        """One object a request: its stays, in seconds since the first entry of any request."""
        zero = self._zero()
        requests: dict[str, list[dict[str, Any]]] = {}
        for span in self.spans():
            stay = {"stage": span.stage.value, "start": span.start - zero, "stop": span.stop - zero}
            requests.setdefault(span.request_id, []).append(stay)
        return [{"request": key, "spans": stays} for key, stays in requests.items()]

    def as_chrome(self) -> dict[str, Any]:
        """The format that chrome://tracing and Perfetto open: a row a request, microseconds."""
        zero = self._zero()
        rows = {key: row for row, key in enumerate(self._paths)}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": key}} for key, row in rows.items()
        ]
        stays = [
            {
                "ph": "X",
                "name": span.stage.value,
                "cat": "stage",
                "pid": 0,
                "tid": rows[span.request_id],
                "ts": (span.start - zero) * 1e6,
                "dur": span.seconds * 1e6,
            }
            for span in self.spans()
        ]
        return {"displayTimeUnit": "ms", "traceEvents": [*names, *stays]}

    def write(self, file: Path) -> int:
        """As Chrome's format if the name ends in .chrome.json, else as plain JSON. Returns how many requests."""
        content = self.as_chrome() if file.name.endswith(".chrome.json") else self.as_json()
        file.write_text(json.dumps(content, indent=1) + "\n")
        return len({span.request_id for span in self.spans()})

    def _zero(self) -> float:
        return min((path.entries[0][1] for path in self._paths.values()), default=0.0)
