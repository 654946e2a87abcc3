import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from phase0_request import (
    Batch,
    Delta,
    FinishReason,
    MockModel,
    QueueFullError,
    RequestState,
    SamplingParams,
    Server,
    Stage,
    StepCost,
    Stream,
    Tokenizer,
)
from tests.phase0_request.support import run

ANSWERS = {
    "What is a page?": "A page is a block of sixteen tokens, caf\u00e9 and \u4f60\u597d included.",
    "Why pages?": "Because nobody knows in advance how long an answer will be.",
    "Count.": "One, two, three, four, five, six, seven, eight, nine, ten.",
}
FREE = StepCost(0, 0, 0)


class Gate(MockModel):
    """A mock whose steps wait until they are let through, so that a test can act in the middle of one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        mock = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
        super().__init__(mock._answers, mock._eos_id, FREE)
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    async def run(self, batch: Batch) -> list[int | None]:
        self.entered.set()
        await self.open.wait()
        return await super().run(batch)


def serving(tokenizer: Tokenizer, batch_size: int = 2, queue_limit: int = 8) -> Server:
    model = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
    return Server(tokenizer, model, batch_size=batch_size, queue_limit=queue_limit)


class Instant(MockModel):
    """A mock that never waits: the shape of a model that computes in the event loop's own thread."""

    async def run(self, batch: Batch) -> list[int | None]:
        return self.step(batch)


def instant(tokenizer: Tokenizer, **answers: str) -> Instant:
    pairs = {tuple(tokenizer.encode(q)): tokenizer.encode(a) for q, a in (answers or ANSWERS).items()}
    return Instant(pairs, 2, FREE)


async def read(stream: Stream) -> tuple[str, FinishReason | None]:
    deltas = [delta async for delta in stream]
    assert all(d.finish_reason is None for d in deltas[:-1])
    return "".join(d.text for d in deltas), deltas[-1].finish_reason


@pytest.mark.proof
def test_an_answer_streams_token_by_token(tokenizer: Tokenizer) -> None:
    async def scene() -> list[Delta]:
        async with serving(tokenizer) as server:
            return [delta async for delta in server.generate("What is a page?")]

    deltas = run(scene())
    expected = tokenizer.encode(ANSWERS["What is a page?"])
    assert [d.token for d in deltas[:-1]] == expected
    assert deltas[-1].token in tokenizer.eos_ids
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert "".join(d.text for d in deltas) == ANSWERS["What is a page?"]


def test_everyone_gets_their_own_answer_whatever_the_company(tokenizer: Tokenizer) -> None:
    async def scene() -> list[tuple[str, FinishReason | None]]:
        async with serving(tokenizer, batch_size=3, queue_limit=100) as server:
            streams = [server.submit(question) for question in list(ANSWERS) * 10]
            return await asyncio.gather(*map(read, streams))

    assert run(scene()) == [(answer, FinishReason.STOP) for answer in list(ANSWERS.values()) * 10]


def test_parameters_are_honoured(tokenizer: Tokenizer) -> None:
    async def scene() -> list[tuple[str, FinishReason | None]]:
        async with serving(tokenizer) as server:
            cases = [SamplingParams(max_tokens=3), SamplingParams(stop=", four"), SamplingParams(stop=["zzz", "n"])]
            return [await read(server.submit("Count.", params)) for params in cases]

    short, stopped, early = run(scene())
    assert short == (tokenizer.decode(tokenizer.encode(ANSWERS["Count."])[:3]), FinishReason.LENGTH)
    assert stopped == ("One, two, three", FinishReason.STOP)
    assert early == ("O", FinishReason.STOP)


def test_a_stop_string_ends_the_work_and_frees_the_seat(tokenizer: Tokenizer) -> None:
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


def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop(tokenizer: Tokenizer) -> None:
    upto = len(tokenizer.encode("One, two, three"))

    async def scene() -> None:
        async with serving(tokenizer) as server:
            stream = server.submit("Count.", SamplingParams(stop=" three", max_tokens=upto))
            assert await read(stream) == ("One, two,", FinishReason.STOP)
            assert stream.request.finish_reason is FinishReason.STOP

    run(scene())


def test_what_was_held_back_is_shown_at_the_end_whatever_the_end(tokenizer: Tokenizer) -> None:
    """The answer ends in the beginning of a stop string: by EOS, by length, by an abort and by an error."""
    upto = len(tokenizer.encode("One, two"))

    async def scene() -> None:
        model = Gate(tokenizer)
        model.open.set()
        async with Server(tokenizer, model) as server:
            by_eos = server.submit("Count.", SamplingParams(stop=" ten.!"))
            assert await read(by_eos) == (ANSWERS["Count."], FinishReason.STOP)
            by_length = server.submit("Count.", SamplingParams(stop=" two!", max_tokens=upto))
            assert await read(by_length) == ("One, two", FinishReason.LENGTH)
            aborted = server.submit("Count.", SamplingParams(stop="One, two, three!"))
            while len(aborted.request.output_tokens) < upto:
                await asyncio.sleep(0)
            server.abort(aborted.request)
            text, reason = await read(aborted)
            assert reason is FinishReason.ABORT
            assert text == tokenizer.decode(aborted.request.output_tokens)

    run(scene())


def test_a_stop_token_is_not_shown_and_the_first_tokens_are_not_searched(tokenizer: Tokenizer) -> None:
    (two,) = tokenizer.encode(" two")

    async def scene() -> None:
        async with serving(tokenizer) as server:
            stopped = server.submit("Count.", SamplingParams(stop_token_ids=[two]))
            assert await read(stopped) == ("One,", FinishReason.STOP)
            assert stopped.request.output_tokens[-1] == two
            late = server.submit("Count.", SamplingParams(stop=[", "], min_tokens=3))
            assert await read(late) == ("One, two", FinishReason.STOP)

    run(scene())


def test_the_urgent_pass_those_who_wait(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with Server(tokenizer, model, batch_size=1) as server:
            seated = server.submit("Count.")
            await model.entered.wait()
            patient = server.submit("Why pages?")
            urgent = server.generate("What is a page?", priority=-1)
            first = asyncio.ensure_future(anext(urgent))
            await asyncio.sleep(0)
            assert [request.priority for request in server.batcher.waiting] == [-1, 0]
            model.open.set()
            await first
            assert patient.request.state is RequestState.WAITING
            await urgent.aclose()
            await asyncio.gather(read(seated), read(patient))
            with pytest.raises(ValueError, match="priority must be an integer"):
                server.submit("Count.", priority="high")  # type: ignore[arg-type]
            assert (await read(server.submit("Count.")))[1] is FinishReason.STOP

    run(scene())


def test_nothing_is_kept_of_those_who_have_left(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with Server(tokenizer, model, batch_size=2) as server:
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


def test_a_model_that_never_waits_still_streams(tokenizer: Tokenizer) -> None:
    """Its clients read between its steps, and an abort is heard."""

    async def scene() -> None:
        async with Server(tokenizer, instant(tokenizer)) as server:
            stream = server.submit("Count.", SamplingParams(max_tokens=10_000, ignore_eos=True))
            for _ in range(3):
                await anext(stream)
            assert len(stream.request.output_tokens) <= 4
            server.abort(stream.request)
            assert (await read(stream))[1] is FinishReason.ABORT

    run(scene())


def test_bad_requests_are_refused_and_the_others_are_served(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        async with serving(tokenizer) as server:
            for prompt in ("", None, 5, b"bytes"):
                with pytest.raises(ValueError, match="prompt must be a text"):
                    server.submit(prompt)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="top_k=3 is not supported"):
                await anext(server.generate("Count.", SamplingParams(top_k=3)))
            assert await read(server.submit("Count.")) == (ANSWERS["Count."], FinishReason.STOP)

    run(scene())


def test_past_its_queue_limit_it_refuses_and_loses_nobody(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with Server(tokenizer, model, batch_size=1, queue_limit=2) as server:
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


def test_a_request_that_comes_later_joins_those_already_decoding(tokenizer: Tokenizer) -> None:
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


def test_closing_the_generator_aborts_the_request(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        model.open.set()
        async with Server(tokenizer, model, batch_size=1) as server:
            async with aclosing(server.generate("Count.")) as answer:
                await anext(answer)
                (request,) = server.batcher.running.values()
            assert request.finish_reason is FinishReason.ABORT
            assert not server.batcher.running
            assert await read(server.submit("Why pages?")) == (ANSWERS["Why pages?"], FinishReason.STOP)

    run(scene())


def test_a_cancelled_reader_aborts_its_request(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with Server(tokenizer, model, batch_size=1) as server:

            async def reader() -> None:
                async for _ in server.generate("Count."):
                    pass

            task = asyncio.create_task(reader())
            await model.entered.wait()
            (request,) = server.batcher.running.values()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert request.finish_reason is FinishReason.ABORT

    run(scene())


@pytest.mark.parametrize("moment", ["waiting", "in a step", "finished"])
def test_abort_is_legal_at_any_moment(tokenizer: Tokenizer, moment: str) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with Server(tokenizer, model, batch_size=1) as server:
            seated, queued = server.submit("Count."), server.submit("Why pages?")
            await model.entered.wait()
            victim, other = (queued, seated) if moment == "waiting" else (seated, queued)
            if moment == "finished":
                model.open.set()
                await read(victim)
            assert server.abort(victim.request) == (moment != "finished")
            assert not server.abort(victim.request)
            model.open.set()
            if moment != "finished":
                assert await read(victim) == ("", FinishReason.ABORT)
                assert victim.request.output_tokens == []
            assert (await read(other))[1] is FinishReason.STOP

    run(scene())


def test_a_failing_step_ends_its_requests_and_the_server_goes_on(tokenizer: Tokenizer) -> None:
    class Flaky(MockModel):
        failures = 2

        async def run(self, batch: Batch) -> list[int | None]:
            self.failures -= 1
            if self.failures == 1:
                raise RuntimeError("the device fell over")
            if self.failures == 0:
                raise asyncio.CancelledError  # as when something inside it was cancelled; the server itself is not
            return await super().run(batch)

    async def scene() -> None:
        mock = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
        async with Server(tokenizer, Flaky(mock._answers, mock._eos_id, FREE), batch_size=1) as server:
            struck, other, waiting = (server.submit(q) for q in ("Count.", "Count.", "Why pages?"))
            assert await read(struck) == ("", FinishReason.ERROR)
            assert await read(other) == ("", FinishReason.ERROR)
            assert struck.request.error == "the model failed: RuntimeError('the device fell over')"
            assert await read(waiting) == (ANSWERS["Why pages?"], FinishReason.STOP)

    run(scene())


@pytest.mark.parametrize("max_tokens", [1, 9], ids=["as its last token", "in the middle"])
def test_a_token_that_is_none_ends_that_request_alone(tokenizer: Tokenizer, max_tokens: int) -> None:
    async def scene() -> None:
        bad, good = tuple(tokenizer.encode("Count.")), tuple(tokenizer.encode("Why pages?"))
        model = MockModel({bad: [99_999], good: tokenizer.encode("Fine.")}, 2, FREE)
        async with Server(tokenizer, model, batch_size=2) as server:
            struck = server.submit("Count.", SamplingParams(max_tokens=max_tokens))
            other = server.submit("Why pages?")
            assert (await read(struck))[1] is FinishReason.ERROR
            assert struck.request.finish_reason is FinishReason.ERROR
            assert "99999" in (struck.request.error or "")
            assert await read(other) == ("Fine.", FinishReason.STOP)

    run(scene())


def test_when_the_server_itself_is_broken_nobody_waits_for_ever(tokenizer: Tokenizer) -> None:
    class Forgetful(MockModel):
        async def run(self, batch: Batch) -> Sequence[int | None]:  # type: ignore[override]
            return [2, None]  # an end for the first, and nothing for the second

    async def scene() -> None:
        mock = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
        async with Server(tokenizer, Forgetful(mock._answers, mock._eos_id, FREE), batch_size=2) as server:
            streams = [server.submit(question) for question in ANSWERS]
            for stream in streams:
                assert await read(stream) == ("", FinishReason.ERROR)
            with pytest.raises(RuntimeError, match="the server has stopped: ValueError"):
                server.submit("Count.")

    run(scene())


def test_stopping_ends_what_still_runs(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with Server(tokenizer, model, batch_size=1) as server:
            streams = [server.submit("Count."), server.submit("Why pages?")]
            await model.entered.wait()
        assert [await read(stream) for stream in streams] == [("", FinishReason.ABORT)] * 2
        with pytest.raises(RuntimeError, match="not running"):
            server.submit("Count.")

    run(scene())


def test_an_idle_server_is_woken_by_a_request_and_not_by_a_clock(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, slept = asyncio.sleep, []

    async def counted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async def scene() -> None:
        async with Server(tokenizer, instant(tokenizer)) as server:
            plans = 0
            plan = server.batcher.plan

            def counting(now: float) -> Batch:
                nonlocal plans
                plans += 1
                return plan(now)

            monkeypatch.setattr(server.batcher, "plan", counting)
            monkeypatch.setattr(asyncio, "sleep", counted)
            for _ in range(100):
                await sleep(0)
            assert plans <= 1
            await read(server.submit("Count."))
            before = plans
            for _ in range(100):
                await sleep(0)
            assert plans <= before + 1  # it looks once more, finds nobody, and waits
            assert set(slept) == {0}

    run(scene())


def test_a_server_is_entered_once_at_a_time(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        server = serving(tokenizer)
        async with server:
            with pytest.raises(RuntimeError, match="running already"):
                await server.__aenter__()
            assert (await read(server.submit("Count.")))[1] is FinishReason.STOP
        async with server:
            assert (await read(server.submit("Count.")))[1] is FinishReason.STOP

    run(scene())


def test_stopping_ends_everyone_even_when_the_stopping_is_cancelled(tokenizer: Tokenizer) -> None:
    class Stubborn(MockModel):
        async def run(self, batch: Batch) -> list[int | None]:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await let_go.wait()
                raise
            return []

    async def scene() -> None:
        mock = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
        server = Server(tokenizer, Stubborn(mock._answers, mock._eos_id, FREE))
        await server.__aenter__()
        stream = server.submit("Count.")
        await entered.wait()
        stopping = asyncio.create_task(server.__aexit__())
        await asyncio.sleep(0)
        stopping.cancel()
        let_go.set()
        await asyncio.gather(stopping, return_exceptions=True)
        assert await read(stream) == ("", FinishReason.ABORT)

    entered, let_go = asyncio.Event(), asyncio.Event()
    run(scene())


def test_every_stage_is_on_the_trace(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        async with serving(tokenizer) as server:
            stream = server.submit("Count.")
            await read(stream)
        spans = list(server.trace.spans(stream.request.id))
        tokens = len(stream.request.output_tokens)
        assert [s.stage for s in spans[:3]] == [Stage.API, Stage.TOKENIZER, Stage.SCHEDULER]
        rounds = [Stage.SCHEDULER, Stage.RUNNER, Stage.DETOKENIZER] * tokens
        assert [s.stage for s in spans[2:]] == rounds
        times = stream.request.times
        assert spans[0].start == times.arrival
        assert times.finished is not None
        assert sum(s.seconds for s in spans) == pytest.approx(spans[-1].stop - times.arrival)

    run(scene())
