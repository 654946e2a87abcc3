"""RequestTracer: records which pipeline stage each request is in."""

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import NamedTuple


class PipelineStage(Enum):
    """The stages that a request passes. The last three repeat for every token."""

    API = "API adapter"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    RUNNER = "model runner"
    DETOKENIZER = "detokenizer"


class Span(NamedTuple):
    stage: PipelineStage
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


class RequestTracer:
    """Entering a stage ends the span of the previous one, so the spans of a request have no gaps. Times are seconds on
    the caller's clock."""

    def __init__(self) -> None:
        self._entries: dict[str, list[tuple[PipelineStage | None, float]]] = defaultdict(list)

    def enter(self, request_id: str, stage: PipelineStage | None, now: float) -> None:
        """Start a span. None ends the last one: the request has left."""
        self._entries[request_id].append((stage, now))

    def spans(self, request_id: str) -> Iterator[Span]:
        """The spans of a request, in order of time."""
        for (stage, start), (_, stop) in pairwise(self._entries[request_id]):
            if stage is not None:
                yield Span(stage, start, stop)

    def seconds_by_stage(self, request_id: str) -> dict[PipelineStage, float]:
        totals = dict.fromkeys(PipelineStage, 0.0)
        for span in self.spans(request_id):
            totals[span.stage] += span.seconds
        return totals
