"""Shape: how the answers to one request are written down, whole or in chunks.

Chunks are many and small, so they are put together from bytes: what is the same in all of them is encoded once.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phase0_request.request import TokenLogprobs
from phase6_integration.answers import AnswerState, Delta
from phase6_integration.server.logprobs import Names

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Call:
    """What all that is sent for one request has in common."""

    id: str
    model: str
    prompts: Sequence[tuple[int, ...]]
    n: int = 1
    include_usage: bool = False  # of a stream: one more chunk at the end
    continuous_usage: bool = False  # of a stream: in every chunk
    delivers: bool = True  # False: max_tokens was 0, and the one token that the engine draws is not shown
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however often it is answered."""
        return sum(map(len, self.prompts))


@dataclass(slots=True)
class Part:
    """What one answer has gained since it was last written down."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.offsets += delta.offsets
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value


class Shape(ABC):
    """Of one request. Choices are numbered as the answers of its reply are."""

    object: str
    chunk_object: str

    def __init__(self, call: Call, names: Names, logprobs: bool) -> None:
        self.call = call
        self.names = names
        self.logprobs = logprobs  # whether they were asked for
        self.answers: Sequence[AnswerState] = ()  # the reply's, once it is submitted
        self._parts = [Part() for _ in range(len(call.prompts) * call.n)]
        self._head = encode(self._top(self.chunk_object))[:-1] + b',"choices":['

    def opening(self) -> list[dict[str, Any]]:
        """The choices that a stream begins with, before there is any text."""
        return []

    @abstractmethod
    def choice(self, index: int, part: Part) -> dict[str, Any]:
        """One of the choices of the whole response."""

    @abstractmethod
    def piece(self, index: int, part: Part) -> dict[str, Any]:
        """The choice of a chunk."""

    def take(self, delta: Delta) -> None:
        """Keep what an answer has gained, for the whole response."""
        self._parts[delta.index].add(delta)

    def told(self, delta: Delta) -> bytes:
        """The chunk that tells what an answer has gained; none as long as there is no text to show."""
        part = self._parts[delta.index]
        part.add(delta)
        if not part.text and part.finish_reason is None:
            return b""
        self._parts[delta.index] = Part()
        return self.chunk(self.piece(delta.index, part))

    def chunk(self, choice: dict[str, Any]) -> bytes:
        usage = b""
        if self.call.continuous_usage:
            usage = b',"usage":' + encode(self.usage)
        elif self.call.include_usage:
            usage = b',"usage":null'
        return b"".join((b"data: ", self._head, encode(choice), b"]", usage, b"}\n\n"))

    def last_chunk(self) -> bytes:
        """The usage, if a stream is to end with it."""
        if not self.call.include_usage:
            return b""
        return b"".join((b"data: ", self._head, b'],"usage":', encode(self.usage), b"}\n\n"))

    def whole(self) -> bytes:
        """The response. Each choice is let go of once it is written: with logprobs it is many times as large."""
        choices = []
        for index, part in enumerate(self._parts):
            choices.append(encode(self.choice(index, part)))
            self._parts[index] = Part()
        head, usage = encode(self._top(self.object))[:-1], encode(self.usage)
        return b"".join((head, b',"choices":[', b",".join(choices), b'],"usage":', usage, b"}"))

    @property
    def scores(self) -> int:
        """How many tokens have logprobs in the response: what takes long to write down."""
        answers = self.answers if self.logprobs else ()
        return sum(answer.generated + len(answer.prompt_logprobs or ()) for answer in answers)

    @property
    def usage(self) -> dict[str, Any]:
        call = self.call
        prompt = call.prompt_tokens
        completion = sum(answer.generated for answer in self.answers) if call.delivers else 0
        cached = sum(answer.cached_tokens for answer in self.answers[:: call.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _top(self, object: str) -> dict[str, Any]:
        return {"id": self.call.id, "object": object, "created": self.call.created, "model": self.call.model}
