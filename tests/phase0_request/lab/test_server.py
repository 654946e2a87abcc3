"""The server with a mock model: answers, and every way in which a request, a step or the server can end early.
No client may wait for ever."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from phase0_request import Batch, FinishReason, Tokenizer
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.server import MockServer, TokenStream
from phase0_request.lab.trace import PipelineStage
from tests.phase0_request.support import run

ANSWERS = {
    "What is a page?": "A page is a block of sixteen tokens, caf\u00e9 and \u4f60\u597d included.",
    "Why pages?": "Because nobody knows in advance how long an answer will be.",
    "Count.": "One, two, three, four, five, six, seven, eight, nine, ten.",
}
FREE = StepCost(0, 0, 0)
Scene = Callable[[MockServer], Coroutine[Any, Any, None]]


class Gate(MockModel):
    """A mock with steps that wait for `open`, so that a test can act in the middle of a step."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], eos: int) -> None:
        super().__init__(answers, eos, FREE)
        self.entered, self.open = asyncio.Event(), asyncio.Event()

    async def run(self, batch: Batch) -> list[int | None]:
        self.entered.set()
        await self.open.wait()
        return await super().run(batch)


async def read(stream: TokenStream) -> tuple[str, FinishReason | None]:
    items = [item async for item in stream]
    assert all(item.finish_reason is None for item in items[:-1])
    return "".join(item.text for item in items), items[-1].finish_reason


def answers(tokenizer: Tokenizer) -> dict[tuple[int, ...], list[int]]:
    return {tuple(tokenizer.encode(question)): tokenizer.encode(answer) for question, answer in ANSWERS.items()}


def play(tokenizer: Tokenizer, scene: Scene, model: MockModel | None = None, **options: int) -> None:
    async def whole() -> None:
        served = model or MockModel(answers(tokenizer), min(tokenizer.eos_ids), FREE)
        async with MockServer(tokenizer, served, **options) as server:
            await scene(server)

    run(whole())


def gated(tokenizer: Tokenizer) -> Gate:
    return Gate(answers(tokenizer), min(tokenizer.eos_ids))


@pytest.mark.proof
def test_an_answer_streams_token_by_token_and_its_trace_has_every_stage(tokenizer: Tokenizer) -> None:
    async def scene(server: MockServer) -> None:
        stream = server.submit("What is a page?")
        items = [item async for item in stream]
        assert [item.token for item in items[:-1]] == tokenizer.encode(ANSWERS["What is a page?"])
        assert items[-1].token in tokenizer.eos_ids
        assert items[-1].finish_reason is FinishReason.STOP
        assert "".join(item.text for item in items) == ANSWERS["What is a page?"]
        spans = list(server.trace.spans(stream.request.id))
        rounds = [PipelineStage.SCHEDULER, PipelineStage.RUNNER, PipelineStage.DETOKENIZER] * len(items)
        assert [span.stage for span in spans] == [PipelineStage.API, PipelineStage.TOKENIZER, *rounds]
        arrival = stream.request.times.arrival
        assert spans[0].start == arrival
        total = sum(server.trace.seconds_by_stage(stream.request.id).values())
        assert total == pytest.approx(spans[-1].stop - arrival)

    play(tokenizer, scene)


@pytest.mark.parametrize("moment", ["waiting", "in a step", "finished"])
def test_abort_is_legal_in_every_state(tokenizer: Tokenizer, moment: str) -> None:
    model = gated(tokenizer)

    async def scene(server: MockServer) -> None:
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

    play(tokenizer, scene, model, batch_size=1)
