"""The demo: questions to two assistants, whose instructions every prompt repeats, through the whole engine. What each
step did, and how far each request is, is written down as it happens."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phase0_request.detokenizer import Detokenizer
from phase0_request.lab.corpus.facts import read
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request, RequestState
from phase0_request.tokenizer import Tokenizer
from phase5_continuous.core import Step
from phase6_integration import gauges
from phase6_integration.engine import NanoServingEngine
from phase6_integration.gauges import Gauges

INSTRUCTIONS = (
    "You are a careful assistant. You answer questions about serving language models, in one plain sentence, and you "
    "say only what you know to be true.",
    "You teach newcomers. Your answers are short and friendly, they name things by their usual names, and they need no "
    "knowledge that a curious reader would not have.",
)
WINDOW = 100  # steps that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """How many come, and the engine that serves them. It is small, so that there is something to decide."""

    requests: int = 16
    max_tokens: int = 48
    temperature: float = 0.0
    max_running: int = 6
    budget: int = 64  # tokens of a step
    chunk: int = 48  # tokens of one prompt in a step
    pages: int = 64
    page_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"requests must be at least 1, got {self.requests}")
        self.params  # noqa: B018  what is wrong with them is said now

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)

    def engine(self) -> NanoServingEngine:
        return NanoServingEngine.from_pretrained(
            kv_cache_pages=self.pages,
            page_size=self.page_size,
            max_num_seqs=self.max_running,
            max_num_batched_tokens=self.budget,
            max_chunk_size=self.chunk,
            max_model_len=min(512, self.pages * self.page_size),
            threads=1,  # so small a model gains nothing from a second
        )

    def questions(self) -> Sequence[tuple[str, str]]:
        """An instruction and a question each, drawn by the seed. No question comes twice before all have come."""
        rng = random.Random(self.seed)
        known = [fact.questions[0] for fact in read() if fact.source == "serving" and fact.topic]
        drawn: list[str] = []
        while len(drawn) < self.requests:
            drawn += rng.sample(known, min(len(known), self.requests - len(drawn)))
        return [(rng.choice(INSTRUCTIONS), question) for question in drawn]


class Row(NamedTuple):
    """One step."""

    number: int
    prefill_tokens: int
    decode_tokens: int
    requests: int  # in it
    milliseconds: float
    after: Gauges


@dataclass(slots=True)
class Client:
    """One request as its sender sees it. `cached` tokens of its prompt did not have to be computed."""

    question: str
    request: Request
    detokenizer: Detokenizer
    cached: int | None = None  # None: not begun
    answer: str = ""

    @property
    def state(self) -> str:
        """Where it is, in a word."""
        if self.request.finish_reason is not None:
            return self.request.finish_reason.value
        if self.cached is None or self.request.state is RequestState.PREEMPTED:
            return self.request.state.value
        return "decode" if self.request.output_tokens else "prefill"


@dataclass(slots=True)
class World:
    """An engine, everyone who asks it, and its last steps."""

    show: Show
    engine: NanoServingEngine
    clients: list[Client] = field(default_factory=list)
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    steps: int = 0

    @classmethod
    def of(cls, show: Show, engine: NanoServingEngine) -> "World":
        """All ask at once."""
        world, tokenizer = cls(show, engine), engine.parts.model.tokenizer
        assert tokenizer is not None
        for instruction, question in show.questions():
            request = engine.add_request(prompt_of(tokenizer, instruction, question), show.params)
            world.clients.append(Client(question, request, Detokenizer(tokenizer)))
        return world

    @property
    def going(self) -> bool:
        return self.engine.has_work

    @property
    def done(self) -> int:
        return sum(client.request.finished for client in self.clients)

    def step(self) -> None:
        """One step of the engine, written down."""
        step = self.engine.step()
        if step is None or not step.batch:
            return
        self.steps += 1
        self._remember(step)

    def _remember(self, step: Step) -> None:
        by_request = {client.request.id: client for client in self.clients}
        for request, start, _ in step.batch:
            client = by_request[request.id]
            client.cached = start if client.cached is None else client.cached
        for request, token, reason, _ in step.events:
            client = by_request[request.id]
            if token is not None and reason is not FinishReason.STOP:  # what ends an answer is no part of it
                client.answer += client.detokenizer.push([token])
            if reason is not None:
                client.answer += client.detokenizer.flush()
        now = gauges.read(self.engine.parts.scheduler)
        spent = sum(step.spent) * 1e3
        self.rows.append(Row(self.steps, step.prefill_tokens, step.decode_tokens, len(step.batch), spent, now))


def prompt_of(tokenizer: Tokenizer, instruction: str, question: str) -> list[int]:
    return tokenizer.chat([{"role": "system", "content": instruction}, {"role": "user", "content": question}])
