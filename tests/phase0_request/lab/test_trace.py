import itertools

import pytest

from phase0_request.lab.trace import PipelineStage, RequestTracer


def example() -> RequestTracer:
    trace = RequestTracer()
    for stage, now in (
        (PipelineStage.API, 10.0),
        (PipelineStage.TOKENIZER, 10.1),
        (PipelineStage.SCHEDULER, 10.2),
        (PipelineStage.RUNNER, 10.5),
        (PipelineStage.DETOKENIZER, 11.0),
        (PipelineStage.SCHEDULER, 11.1),
        (PipelineStage.RUNNER, 11.2),
        (PipelineStage.DETOKENIZER, 11.7),
    ):
        trace.enter("a", stage, now)
    trace.leave("a", 12.0)
    trace.enter("b", PipelineStage.API, 11.0)
    trace.leave("b", 11.5)
    trace.enter("still here", PipelineStage.API, 11.0)
    return trace


def test_spans_have_no_gaps() -> None:
    spans = list(example().spans("a"))
    assert [span.stage for span in spans][:3] == [PipelineStage.API, PipelineStage.TOKENIZER, PipelineStage.SCHEDULER]
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    assert (spans[0].start, spans[-1].stop) == (10.0, 12.0)


def test_stage_times_add_up_to_the_total() -> None:
    totals = example().seconds_by_stage("a")
    assert totals[PipelineStage.RUNNER] == pytest.approx(1.0)
    assert totals[PipelineStage.SCHEDULER] == pytest.approx(0.4)
    assert sum(totals.values()) == pytest.approx(2.0)
    assert sum(example().seconds_by_stage().values()) == pytest.approx(2.5)


def test_entering_a_stage_twice_is_one_span_and_leaving_is_final() -> None:
    trace = RequestTracer()
    trace.enter("a", PipelineStage.RUNNER, 1.0)
    trace.enter("a", PipelineStage.RUNNER, 2.0)
    trace.leave("a", 3.0)
    assert [tuple(span) for span in trace.spans()] == [("a", PipelineStage.RUNNER, 1.0, 3.0)]
    with pytest.raises(ValueError, match="request a has left"):
        trace.enter("a", PipelineStage.API, 4.0)
