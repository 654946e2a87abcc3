import asyncio

import pytest

from phase0_request import FinishReason, QueueFullError, RequestState, SamplingParams, Tokenizer
from phase0_request.lab.server import MockServer, StreamedToken
from phase0_request.lab.trace import PipelineStage
from tests.phase0_request.lab.serving import ANSWERS, Gate, instant, read, serving
from tests.phase0_request.support import run


@pytest.mark.proof
def test_an_answer_streams_token_by_token(tokenizer: Tokenizer) -> None:
    async def scene() -> list[StreamedToken]:
        async with serving(tokenizer) as server:
            return [item async for item in server.generate("What is a page?")]

    items = run(scene())
    expected = tokenizer.encode(ANSWERS["What is a page?"])
    assert [d.token for d in items[:-1]] == expected
    assert items[-1].token in tokenizer.eos_ids
    assert items[-1].finish_reason is FinishReason.STOP
    assert "".join(d.text for d in items) == ANSWERS["What is a page?"]


def test_every_request_gets_its_own_answer_in_any_batch(tokenizer: Tokenizer) -> None:
    async def scene() -> list[tuple[str, FinishReason | None]]:
        async with serving(tokenizer, batch_size=3, queue_limit=100) as server:
            streams = [server.submit(question) for question in list(ANSWERS) * 10]
            return await asyncio.gather(*map(read, streams))

    assert run(scene()) == [(answer, FinishReason.STOP) for answer in list(ANSWERS.values()) * 10]


def test_a_stop_string_ends_the_request_and_frees_its_place_in_the_batch(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        async with serving(tokenizer, batch_size=1) as server:
            stream = server.submit("Count.", SamplingParams(stop=", four"))
            assert await read(stream) == ("One, two, three", FinishReason.STOP)
            assert stream.request.finish_reason is FinishReason.STOP
            said = tokenizer.decode(stream.request.output_tokens)
            assert said == "One, two, three, four"
            assert not server.batcher.running
            assert (await read(server.submit("Why pages?")))[1] is FinishReason.STOP

    run(scene())


def test_finished_requests_leave_no_state_behind(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with MockServer(tokenizer, model, batch_size=2) as server:
            streams = [server.submit("Count.", SamplingParams(max_tokens=n)) for n in (1, 2, 30, 40)]
            await model.entered.wait()
            server.abort(streams[0].request)
            server.abort(streams[3].request)
            model.open.set()
            await asyncio.gather(*map(read, streams))
            assert not server._streams
            assert not server.batcher.running
            assert not server.batcher.waiting
            assert {span.request_id for span in server.trace.spans()} == {s.request.id for s in streams}

    run(scene())


def test_streams_and_aborts_work_with_a_model_that_never_awaits(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        async with MockServer(tokenizer, instant(tokenizer)) as server:
            stream = server.submit("Count.", SamplingParams(max_tokens=10_000, ignore_eos=True))
            for _ in range(3):
                await anext(stream)
            assert len(stream.request.output_tokens) <= 4
            server.abort(stream.request)
            assert (await read(stream))[1] is FinishReason.ABORT

    run(scene())


def test_invalid_requests_are_refused_and_the_others_are_served(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        async with serving(tokenizer) as server:
            for prompt in ("", None, 5, b"bytes"):
                with pytest.raises(ValueError, match="prompt must be a text"):
                    server.submit(prompt)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="top_k=3 is not supported"):
                await anext(server.generate("Count.", SamplingParams(top_k=3)))
            assert await read(server.submit("Count.")) == (ANSWERS["Count."], FinishReason.STOP)

    run(scene())


def test_a_full_queue_refuses_new_requests_and_keeps_the_waiting_ones(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with MockServer(tokenizer, model, batch_size=1, queue_limit=2) as server:
            first = server.submit("Count.")
            await model.entered.wait()
            waiting = [server.submit("Count."), server.submit("Why pages?")]
            with pytest.raises(QueueFullError, match="2 requests wait already"):
                server.submit("Count.")
            model.open.set()
            texts = [text for text, _ in await asyncio.gather(*map(read, [first, *waiting]))]
            assert texts == [ANSWERS["Count."], ANSWERS["Count."], ANSWERS["Why pages?"]]
            assert await read(server.submit("Count.")) == (ANSWERS["Count."], FinishReason.STOP)

    run(scene())


def test_a_late_request_joins_a_running_batch(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        async with serving(tokenizer) as server:
            early = server.submit("Count.")
            await anext(early)
            late = server.submit("Why pages?")
            await anext(late)
            assert early.request.state is RequestState.RUNNING
            assert late.request.state is RequestState.RUNNING
            assert len(early.request.output_tokens) < len(tokenizer.encode(ANSWERS["Count."]))

    run(scene())


def test_the_trace_has_every_stage(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        async with serving(tokenizer) as server:
            stream = server.submit("Count.")
            await read(stream)
        spans = list(server.trace.spans(stream.request.id))
        tokens = len(stream.request.output_tokens)
        assert [s.stage for s in spans[:3]] == [PipelineStage.API, PipelineStage.TOKENIZER, PipelineStage.SCHEDULER]
        rounds = [PipelineStage.SCHEDULER, PipelineStage.RUNNER, PipelineStage.DETOKENIZER] * tokens
        assert [s.stage for s in spans[2:]] == rounds
        times = stream.request.times
        assert spans[0].start == times.arrival
        assert times.finished is not None
        assert sum(s.seconds for s in spans) == pytest.approx(spans[-1].stop - times.arrival)

    run(scene())
