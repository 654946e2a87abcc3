"""Every way in which a request, a step or the server can end early. No client may wait for ever."""

import asyncio
from contextlib import aclosing

import pytest

from phase0_request import Batch, FinishReason, SamplingParams, Tokenizer
from phase0_request.lab.mock_model import MockModel
from phase0_request.lab.server import MockServer
from tests.phase0_request.lab.serving import ANSWERS, FREE, Gate, read
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
