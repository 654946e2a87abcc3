"""Every way in which a request, a step or the server can end early. No client may wait for ever."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from phase0_request import Batch, FinishReason, SamplingParams, Tokenizer
from phase0_request.lab.mock_model import MockModel
from phase0_request.lab.server import MockServer
from tests.phase0_request.lab.serving import ANSWERS, FREE, Gate, instant, read, serving
from tests.phase0_request.support import run


def test_closing_the_generator_aborts_the_request(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        model.open.set()
        async with MockServer(tokenizer, model, batch_size=1) as server:
            async with aclosing(server.generate("Count.")) as answer:
                await anext(answer)
                (request,) = server.batcher.running.values()
            assert request.finish_reason is FinishReason.ABORT
            assert not server.batcher.running
            assert await read(server.submit("Why pages?")) == (ANSWERS["Why pages?"], FinishReason.STOP)

    run(scene())


def test_cancelling_the_reader_aborts_the_request(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with MockServer(tokenizer, model, batch_size=1) as server:

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
def test_abort_is_legal_in_every_state(tokenizer: Tokenizer, moment: str) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with MockServer(tokenizer, model, batch_size=1) as server:
            running, queued = server.submit("Count."), server.submit("Why pages?")
            await model.entered.wait()
            victim, other = (queued, running) if moment == "waiting" else (running, queued)
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


def test_a_failed_step_ends_only_its_requests(tokenizer: Tokenizer) -> None:
    class Flaky(MockModel):
        failures = 2

        async def run(self, batch: Batch) -> list[int | None]:
            self.failures -= 1
            if self.failures == 1:
                raise RuntimeError("the device fell over")
            if self.failures == 0:
                raise asyncio.CancelledError  # a task inside the model was cancelled, not the server
            return await super().run(batch)

    async def scene() -> None:
        mock = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
        async with MockServer(tokenizer, Flaky(mock._answers, mock._eos_id, FREE), batch_size=1) as server:
            failed, other, waiting = (server.submit(q) for q in ("Count.", "Count.", "Why pages?"))
            assert await read(failed) == ("", FinishReason.ERROR)
            assert await read(other) == ("", FinishReason.ERROR)
            assert failed.request.error == "the model failed: RuntimeError('the device fell over')"
            assert await read(waiting) == (ANSWERS["Why pages?"], FinishReason.STOP)

    run(scene())


@pytest.mark.parametrize("max_tokens", [1, 9], ids=["as its last token", "in the middle"])
def test_an_invalid_token_ends_only_its_request(tokenizer: Tokenizer, max_tokens: int) -> None:
    async def scene() -> None:
        bad, good = tuple(tokenizer.encode("Count.")), tuple(tokenizer.encode("Why pages?"))
        model = MockModel({bad: [-1], good: tokenizer.encode("Fine.")}, 2, FREE)
        async with MockServer(tokenizer, model, batch_size=2) as server:
            failed = server.submit("Count.", SamplingParams(max_tokens=max_tokens))
            other = server.submit("Why pages?")
            assert (await read(failed))[1] is FinishReason.ERROR
            assert failed.request.finish_reason is FinishReason.ERROR
            assert "got -1" in (failed.request.error or "")
            assert await read(other) == ("Fine.", FinishReason.STOP)

    run(scene())


def test_a_bug_in_the_server_ends_every_request_with_an_error(tokenizer: Tokenizer) -> None:
    class Incomplete(MockModel):
        async def run(self, batch: Batch) -> Sequence[int | None]:  # type: ignore[override]
            return [2, None]  # EOS for the first request, no token for the second

    async def scene() -> None:
        mock = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
        async with MockServer(tokenizer, Incomplete(mock._answers, mock._eos_id, FREE), batch_size=2) as server:
            streams = [server.submit(question) for question in ANSWERS]
            for stream in streams:
                assert await read(stream) == ("", FinishReason.ERROR)
            with pytest.raises(RuntimeError, match="the server has stopped: ValueError"):
                server.submit("Count.")

    run(scene())


def test_stopping_the_server_aborts_unfinished_requests(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        model = Gate(tokenizer)
        async with MockServer(tokenizer, model, batch_size=1) as server:
            streams = [server.submit("Count."), server.submit("Why pages?")]
            await model.entered.wait()
        assert [await read(stream) for stream in streams] == [("", FinishReason.ABORT)] * 2
        with pytest.raises(RuntimeError, match="not running"):
            server.submit("Count.")

    run(scene())


def test_an_idle_server_does_not_poll(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, slept = asyncio.sleep, []

    async def counted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async def scene() -> None:
        async with MockServer(tokenizer, instant(tokenizer)) as server:
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
            assert plans <= before + 1  # one more empty plan, then it sleeps
            assert set(slept) == {0}

    run(scene())


def test_cancelling_the_serving_loop_ends_every_request(tokenizer: Tokenizer) -> None:
    """As when the program shuts down inside the `async with` block."""

    async def scene() -> None:
        model = Gate(tokenizer)
        server = MockServer(tokenizer, model, batch_size=1)
        await server.__aenter__()
        running, queued = server.submit("Count."), server.submit("Why pages?")
        await model.entered.wait()
        assert server._loop is not None
        server._loop.cancel()
        await asyncio.wait_for(asyncio.gather(server._loop, return_exceptions=True), 5)
        assert [await read(stream) for stream in (running, queued)] == [("", FinishReason.ERROR)] * 2
        with pytest.raises(RuntimeError, match="the server has stopped: CancelledError"):
            server.submit("Count.")
        await server.__aexit__()

    run(scene())


def test_a_server_cannot_be_entered_twice_at_a_time(tokenizer: Tokenizer) -> None:
    async def scene() -> None:
        server = serving(tokenizer)
        async with server:
            with pytest.raises(RuntimeError, match="running already"):
                await server.__aenter__()
            assert (await read(server.submit("Count.")))[1] is FinishReason.STOP
        async with server:
            assert (await read(server.submit("Count.")))[1] is FinishReason.STOP

    run(scene())


def test_stopping_aborts_every_request_even_if_it_is_cancelled(tokenizer: Tokenizer) -> None:
    class Stubborn(MockModel):
        async def run(self, batch: Batch) -> list[int | None]:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await release.wait()
                raise
            return []

    async def scene() -> None:
        mock = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
        server = MockServer(tokenizer, Stubborn(mock._answers, mock._eos_id, FREE))
        await server.__aenter__()
        stream = server.submit("Count.")
        await entered.wait()
        stopping = asyncio.create_task(server.__aexit__())
        await asyncio.sleep(0)
        stopping.cancel()
        release.set()
        await asyncio.gather(stopping, return_exceptions=True)
        assert await read(stream) == ("", FinishReason.ABORT)

    entered, release = asyncio.Event(), asyncio.Event()
    run(scene())
