"""The demo's clients: each arrives at its time, asks a question of the corpus and reads the streamed answer."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phase0_request.checks import check_int, check_number
from phase0_request.lab.corpus.generate import load
from phase0_request.lab.metrics import Summary, summarize
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.server import MockServer, TokenStream
from phase0_request.params import SamplingParams
from phase0_request.queue import QueueFullError
from phase0_request.request import Request
from phase0_request.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Load and limits of one demo run."""

    num_requests: int = 16
    batch_size: int = 4
    arrival_rate: float = 8.0  # requests a second, a Poisson process; 0: all at once
    queue_limit: int = 256
    max_tokens: int = 128
    seed: int = 0
    cost: StepCost = field(default_factory=StepCost)

    def __post_init__(self) -> None:
        for name in ("num_requests", "batch_size", "queue_limit", "max_tokens"):
            check_int(name.replace("_", "-"), getattr(self, name), 1)
        check_number("arrival-rate", self.arrival_rate, 0)


@dataclass(slots=True)
class DemoClient:
    """One client: its question, and the answer received so far."""

    question: str
    arrives_at: float  # seconds after the start
    stream: TokenStream | None = None
    answer: str = ""
    refusal: str | None = None

    @property
    def request(self) -> Request | None:
        return self.stream.request if self.stream else None

    async def talk(self, server: MockServer, params: SamplingParams) -> None:
        """Wait for the arrival time, ask, and read the answer. Cancelling this aborts the request."""
        await asyncio.sleep(self.arrives_at)
        try:
            self.stream = server.submit(self.question, params)
        except QueueFullError as error:
            self.refusal = str(error)
            return
        try:
            async for delta in self.stream:
                self.answer += delta.text
        finally:
            server.abort(self.stream.request)


@dataclass(slots=True)
class Demo:
    """One run: the clients, and the server that answers them."""

    config: DemoConfig
    tokenizer: Tokenizer
    clients: list[DemoClient]
    server: MockServer

    @classmethod
    def of(cls, config: DemoConfig) -> "Demo":
        tokenizer = Tokenizer.from_pretrained()
        known = [(fact.questions[0], fact.answer) for fact in load().facts]
        model = MockModel.replaying(tokenizer, known, config.cost)
        server = MockServer(tokenizer, model, batch_size=config.batch_size, queue_limit=config.queue_limit)
        return cls(config, tokenizer, _clients(config, [question for question, _ in known]), server)

    async def run(self, on_change: Callable[[], None] = lambda: None, frame: float = 0.05) -> Summary:
        """Serve every client. Calls `on_change` every `frame` seconds until all answers are complete."""
        params = SamplingParams(max_tokens=self.config.max_tokens)
        async with self.server, asyncio.TaskGroup() as group:
            talks = [group.create_task(client.talk(self.server, params)) for client in self.clients]
            while (await asyncio.wait(talks, timeout=frame))[1]:
                on_change()
        return summarize(client.request for client in self.clients if client.request is not None)


def _clients(config: DemoConfig, questions: Sequence[str]) -> list[DemoClient]:
    """Questions and arrival times, deterministic for a seed."""
    rng = random.Random(config.seed)
    rate = config.arrival_rate
    moments = itertools.accumulate(rng.expovariate(rate) if rate else 0.0 for _ in range(config.num_requests))
    return [DemoClient(rng.choice(questions), moment) for moment in moments]
