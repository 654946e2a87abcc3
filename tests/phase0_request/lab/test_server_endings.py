"""Every way in which a request, a step or the server can end before its time. Nobody may be left waiting."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from phase0_request import Batch, FinishReason, SamplingParams, Tokenizer
from phase0_request.lab.mock_model import MockModel
from phase0_request.lab.server import Server
from tests.phase0_request.lab.serving import ANSWERS, FREE, Gate, instant, read, serving
from tests.phase0_request.support import run


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


def test_a_loop_cancelled_from_outside_ends_and_takes_everyone_with_it(tokenizer: Tokenizer) -> None:
    """As when the program shuts down around a server that nobody left: it must not hold the program up."""

    async def scene() -> None:
        model = Gate(tokenizer)
        server = Server(tokenizer, model, batch_size=1)
        await server.__aenter__()
        seated, queued = server.submit("Count."), server.submit("Why pages?")
        await model.entered.wait()
        assert server._loop is not None
        server._loop.cancel()
        await asyncio.wait_for(asyncio.gather(server._loop, return_exceptions=True), 5)
        assert [await read(stream) for stream in (seated, queued)] == [("", FinishReason.ERROR)] * 2
        with pytest.raises(RuntimeError, match="the server has stopped: CancelledError"):
            server.submit("Count.")
        await server.__aexit__()

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
