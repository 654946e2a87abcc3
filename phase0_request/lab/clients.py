"""The demo: clients arrive, ask what the corpus can answer, and read the answers as they are written."""

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phase0_request.lab.corpus.generate import load
from phase0_request.lab.mock_model import MockModel, StepCost
from phase0_request.lab.server import Server, Stream
from phase0_request.metrics import Summary, summarize
from phase0_request.params import SamplingParams
from phase0_request.queue import QueueFullError
from phase0_request.request import Request
from phase0_request.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Who comes and when."""

    num_requests: int = 16
    batch_size: int = 4
    arrival_rate: float = 8.0  # requests a second, at random moments (a Poisson process); 0: all at once
    queue_limit: int = 256
    max_tokens: int = 128
    seed: int = 0
    cost: StepCost = field(default_factory=StepCost)

    def __post_init__(self) -> None:
        at_least = {"num_requests": 1, "batch_size": 1, "queue_limit": 1, "max_tokens": 1, "arrival_rate": 0}
        for name, low in at_least.items():
            given = getattr(self, name)
            if not low <= given < float("inf"):
                raise ValueError(f"{name.replace('_', '-')} must be at least {low} and finite, got {given}")


@dataclass(slots=True)
class Client:
    """One who asks: the question, and as much of the answer as has come."""

    question: str
    arrives_at: float  # seconds after the start
    stream: Stream | None = None
    answer: str = ""
    refusal: str | None = None

    @property
    def request(self) -> Request | None:
        return self.stream.request if self.stream else None

    async def talk(self, server: Server, params: SamplingParams) -> None:
        """Wait for the moment, ask, read to the end. Leaving early aborts the request."""
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
    """One run of a workload against a server of its own."""

    workload: Workload
    tokenizer: Tokenizer
    clients: list[Client]
    server: Server

    @classmethod
    def of(cls, workload: Workload) -> "Demo":
        tokenizer = Tokenizer.from_pretrained()
        known = [(fact.questions[0], fact.answer) for fact in load().facts]
        model = MockModel.replaying(tokenizer, known, workload.cost)
        server = Server(tokenizer, model, batch_size=workload.batch_size, queue_limit=workload.queue_limit)
        return cls(workload, tokenizer, _clients(workload, [question for question, _ in known]), server)

    async def run(self, on_change: Callable[[], None] = lambda: None, frame: float = 0.05) -> Summary:
        """Serve every client. `on_change` is called every `frame` seconds while they talk."""
        params = SamplingParams(max_tokens=self.workload.max_tokens)
        async with self.server, asyncio.TaskGroup() as group:
            talks = [group.create_task(client.talk(self.server, params)) for client in self.clients]
            while (await asyncio.wait(talks, timeout=frame))[1]:
                on_change()
        return summarize(client.request for client in self.clients if client.request is not None)


def _clients(workload: Workload, questions: Sequence[str]) -> list[Client]:
    """Questions and moments of arrival, the same for the same seed."""
    rng = random.Random(workload.seed)
    rate = workload.arrival_rate
    moments = itertools.accumulate(rng.expovariate(rate) if rate else 0.0 for _ in range(workload.num_requests))
    return [Client(rng.choice(questions), moment) for moment in moments]
