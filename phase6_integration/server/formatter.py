"""Formatter: writes the outputs of one request as OpenAI's JSON, whole or in chunks.

Chunks are many and small, so they are assembled from bytes: what all of them share is encoded once.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from phase0_request.request import TokenLogprobs
from phase6_integration.outputs import Chunk, OutputState
from phase6_integration.server.dependencies import ServerState
from phase6_integration.server.schemas import SamplingFields, StreamOptions

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Accumulator:
    """The chunks of one output that are not written yet, joined."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.offsets += chunk.offsets
        self.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason.value

    def clear(self) -> None:
        self.text, self.finish_reason = "", None
        self.tokens.clear()
        self.offsets.clear()
        self.logprobs.clear()


class Formatter(ABC):
    """The response to one request. Its choices are numbered as the outputs of the engine are."""

    prefix: str  # of the id
    object: str
    chunk_object: str

    def __init__(
        self, server: ServerState, body: SamplingFields, request_id: str, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        options = body.stream_options or StreamOptions()
        self.id = f"{self.prefix}-{body.request_id or request_id}"
        self.model = server.model_name(body.model)
        self.created = int(time.time())
        self.n = body.n or 1
        self.prompt_tokens = sum(map(len, prompts))  # each prompt counts once, whatever n is
        self.include_usage, self.continuous_usage = options.include_usage, options.continuous_usage_stats
        self.logprobs = False  # whether they are requested
        self.names = server.names
        self._hides_cached = server.settings.hide_cached_tokens
        self.outputs: Sequence[OutputState] = ()  # once they are submitted
        self._accumulated = [Accumulator() for _ in range(len(prompts) * self.n)]
        self._head = encode(self._top(self.chunk_object))[:-1] + b',"choices":['

    def opening(self) -> list[dict[str, Any]]:
        """The choices of the chunks that begin a stream."""
        return []

    @abstractmethod
    def choice(self, index: int, new: Accumulator) -> dict[str, Any]:
        """A choice of the whole response."""

    @abstractmethod
    def delta(self, index: int, new: Accumulator) -> dict[str, Any]:
        """A choice of a chunk of a stream."""

    def accumulate(self, chunk: Chunk) -> None:
        """Add a chunk to the whole response."""
        self._accumulated[chunk.index].add(chunk)

    def to_chunk(self, chunk: Chunk) -> bytes:
        """The event for a chunk. Without text it is empty: tokens without text are sent with the text that follows."""
        new = self._accumulated[chunk.index]
        new.add(chunk)
        if not new.text and new.finish_reason is None:
            return b""
        event = self.event(self.delta(chunk.index, new))
        new.clear()
        return event

    def event(self, choice: dict[str, Any]) -> bytes:
        usage = b""
        if self.continuous_usage:
            usage = b',"usage":' + encode(self.usage)
        elif self.include_usage:
            usage = b',"usage":null'
        return b"".join((b"data: ", self._head, encode(choice), b"]", usage, b"}\n\n"))

    def last_chunk(self) -> bytes:
        """The chunk with the usage, if requested."""
        if not self.include_usage:
            return b""
        return b"".join((b"data: ", self._head, b'],"usage":', encode(self.usage), b"}\n\n"))

    def whole(self) -> bytes:
        """The whole response. Each choice is freed once it is encoded: with logprobs it is many times larger."""
        choices = []
        for index, output in enumerate(self._accumulated):
            choices.append(encode(self.choice(index, output)))
            output.clear()
        head, usage = encode(self._top(self.object))[:-1], encode(self.usage)
        return b"".join((head, b',"choices":[', b",".join(choices), b'],"usage":', usage, b"}"))

    @property
    def scores(self) -> int:
        """The number of logprobs in the response: encoding them takes long."""
        outputs = self.outputs if self.logprobs else ()
        return sum(output.generated + len(output.prompt_logprobs or ()) for output in outputs)

    @property
    def completion_tokens(self) -> int:
        return sum(output.generated for output in self.outputs)

    @property
    def usage(self) -> dict[str, Any]:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        if self._hides_cached:
            return counts
        cached = sum(output.cached_tokens for output in self.outputs[:: self.n])
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def _top(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}
