"""Mock servers for tests: known answers, and models that sleep, never sleep, or wait for the test at each step."""

import asyncio

from phase0_request import Batch, FinishReason, Tokenizer
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.server import MockServer, TokenStream

ANSWERS = {
    "What is a page?": "A page is a block of sixteen tokens, caf\u00e9 and \u4f60\u597d included.",
    "Why pages?": "Because nobody knows in advance how long an answer will be.",
    "Count.": "One, two, three, four, five, six, seven, eight, nine, ten.",
}
FREE = StepCost(0, 0, 0)


class Gate(MockModel):
    """A mock with steps that wait for `open`, so that a test can act in the middle of a step."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        mock = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
        super().__init__(mock._answers, mock._eos_id, FREE)
        self.entered = asyncio.Event()
        self.open = asyncio.Event()

    async def run(self, batch: Batch) -> list[int | None]:
        self.entered.set()
        await self.open.wait()
        return await super().run(batch)


def serving(tokenizer: Tokenizer, batch_size: int = 2, queue_limit: int = 8) -> MockServer:
    model = MockModel.replaying(tokenizer, ANSWERS.items(), FREE)
    return MockServer(tokenizer, model, batch_size=batch_size, queue_limit=queue_limit)


class Instant(MockModel):
    """A mock that never awaits, like a model that computes in the event loop's thread."""

    async def run(self, batch: Batch) -> list[int | None]:
        return self.step(batch)


def instant(tokenizer: Tokenizer, **answers: str) -> Instant:
    pairs = {tuple(tokenizer.encode(q)): tokenizer.encode(a) for q, a in (answers or ANSWERS).items()}
    return Instant(pairs, 2, FREE)


async def read(stream: TokenStream) -> tuple[str, FinishReason | None]:
    items = [item async for item in stream]
    assert all(d.finish_reason is None for d in items[:-1])
    return "".join(d.text for d in items), items[-1].finish_reason
