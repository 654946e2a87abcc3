"""Servers to test with: what they know, and models that wait, never wait, or are let through step by step."""

import asyncio

from phase0_request import Batch, FinishReason, Tokenizer
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.server import Server, Stream

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
