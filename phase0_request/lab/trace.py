"""RequestTracer: records which pipeline stage each request is in."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class PipelineStage(Enum):
    """The stages that a request passes. The last three repeat for every token."""

    API = "API adapter"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    RUNNER = "model runner"
    DETOKENIZER = "detokenizer"


class Span(NamedTuple):
    request_id: str
    stage: PipelineStage
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(slots=True)
class _Path:
    entries: list[tuple[PipelineStage, float]] = field(default_factory=list)
    left: float | None = None


class RequestTracer:
    """Records the spans of requests: of all unfinished ones, and of the last `keep` finished ones.

    Entering a stage ends the span of the previous stage, so the spans of a request have no gaps. Times are seconds on
    the caller's clock.
    """

    def __init__(self, keep: int = 1000) -> None:
        self._paths: dict[str, _Path] = {}
        self._left: deque[str] = deque()
        self._keep = keep

    def enter(self, request_id: str, stage: PipelineStage, now: float) -> None:
        """Start a span. Entering the current stage again has no effect."""
        path = self._paths.setdefault(request_id, _Path())
        if path.left is not None:
            raise ValueError(f"request {request_id} has left; it cannot enter {stage.value}")
        if not path.entries or path.entries[-1][0] is not stage:
            path.entries.append((stage, now))

    def leave(self, request_id: str, now: float) -> None:
        """End the last span of a finished request."""
        self._paths[request_id].left = now
        self._left.append(request_id)
        if len(self._left) > self._keep:
            del self._paths[self._left.popleft()]

    def spans(self, request_id: str | None = None) -> Iterator[Span]:
        """The spans of one request, or of all finished requests, in order of time."""
        for key in self._paths if request_id is None else [request_id]:
            path = self._paths[key]
            if path.left is None:
                continue
            ends = [start for _, start in path.entries[1:]] + [path.left]
            yield from (Span(key, stage, start, end) for (stage, start), end in zip(path.entries, ends, strict=True))

    def seconds_by_stage(self, request_id: str | None = None) -> dict[PipelineStage, float]:
        """Total seconds in each stage."""
        totals = dict.fromkeys(PipelineStage, 0.0)
        for span in self.spans(request_id):
            totals[span.stage] += span.seconds
        return totals
