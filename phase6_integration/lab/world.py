"""The state of the demo: an engine, its clients, and a record of its last steps."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phase0_request.core import Step
from phase0_request.detokenizer import Detokenizer
from phase0_request.lab.corpus.facts import read
from phase0_request.request import FinishReason, Request, RequestState
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.engine.stats import Gauges
from phase6_integration.lab.show import Show

# Every prompt begins with one of these system messages: prefixes to share.
INSTRUCTIONS = (
    "You are a careful assistant. You answer questions about serving language models, in one plain sentence, and you "
    "say only what you know to be true.",
    "You teach newcomers. Your answers are short and friendly, they name things by their usual names, and they need no "
    "knowledge that a curious reader would not have.",
)
WINDOW = 100  # steps that are kept


def open_engine(show: Show) -> NanoServingEngine:
    return NanoServingEngine.from_pretrained(
        kv_cache_pages=show.pages,
        page_size=show.page_size,
        max_num_seqs=show.max_running,
        max_num_batched_tokens=show.budget,
        max_chunk_size=show.chunk,
        max_model_len=min(512, show.pages * show.page_size),
        threads=1,
    )


def questions(show: Show) -> Sequence[tuple[str, str]]:
    """Pairs of system message and question, drawn by the seed. A question repeats only after all have been drawn."""
    rng = random.Random(show.seed)
    known = [fact.questions[0] for fact in read() if fact.source == "serving" and fact.topic]
    drawn: list[str] = []
    while len(drawn) < show.requests:
        drawn += rng.sample(known, min(len(known), show.requests - len(drawn)))
    return [(rng.choice(INSTRUCTIONS), question) for question in drawn]


class Row(NamedTuple):
    """One step."""

    number: int
    prefill_tokens: int
    decode_tokens: int
    requests: int
    milliseconds: float
    after: Gauges


@dataclass(slots=True)
class Client:
    """One request and its text. `cached` counts the prompt tokens that the prefix cache had."""

    question: str
    request: Request
    detokenizer: Detokenizer
    cached: int | None = None  # None: not scheduled yet
    answer: str = ""

    @property
    def state(self) -> str:
        """The state of the request, or its finish reason."""
        if self.request.finish_reason is not None:
            return self.request.finish_reason.value
        if self.request.state is RequestState.RUNNING:
            return "decode" if self.request.output_tokens else "prefill"
        return str(self.request.state.value)


@dataclass(slots=True)
class World:
    """An engine, its clients and its last steps. All its times are wall-clock times of the engine's clock."""

    show: Show
    engine: NanoServingEngine
    clients: list[Client] = field(default_factory=list)
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    steps: int = 0
    tokens: int = 0  # generated
    start: float = 0.0
    seconds: float = 0.0  # from the arrival of the requests to the end of the last step

    @classmethod
    def of(cls, show: Show, engine: NanoServingEngine) -> "World":
        """All requests arrive at once."""
        tokenizer = engine.parts.model.tokenizer
        assert tokenizer is not None
        prompts = [
            (question, tokenizer.chat([{"role": "system", "content": system}, {"role": "user", "content": question}]))
            for system, question in questions(show)
        ]
        world = cls(show, engine, start=engine.parts.core.clock())
        for question, prompt in prompts:
            world.clients.append(Client(question, engine.add_request(prompt, show.params), Detokenizer(tokenizer)))
        return world

    @property
    def finished(self) -> int:
        return sum(client.request.finished for client in self.clients)

    @property
    def throughput(self) -> float:
        """Generated tokens per second since the start."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def step(self) -> None:
        """Run one step of the engine and record it."""
        step = self.engine.step()
        self.seconds = self.engine.parts.core.clock() - self.start
        if step is not None and step.batch:
            self.steps += 1
            self._record(step)

    def _record(self, step: Step) -> None:
        by_request = {client.request.id: client for client in self.clients}
        for request, start, _ in step.batch:
            client = by_request[request.id]
            client.cached = start if client.cached is None else client.cached
        for request, token, reason, _ in step.events:
            client = by_request[request.id]
            self.tokens += token is not None
            if token is not None and reason is not FinishReason.STOP:  # the EOS token is not part of the answer
                client.answer += client.detokenizer.push([token])
            if reason is not None:
                client.answer += client.detokenizer.flush()
        milliseconds, now = step.seconds * 1e3, Gauges.read(self.engine.parts.scheduler)
        self.rows.append(Row(self.steps, step.prefill_tokens, step.decode_tokens, len(step.batch), milliseconds, now))
