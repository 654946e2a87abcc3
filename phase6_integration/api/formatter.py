"""Formatter: writes the outputs of one request as OpenAI's JSON, whole or in chunks.

Chunks are many and small, so they are assembled from bytes: what all of them share is encoded once. A whole response
may be large, so it is encoded in pieces while it is sent: logprobs are iterators until then.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from phase6_integration.api.errors import RequestError
from phase6_integration.api.logprobs import for_prompt
from phase6_integration.api.parsing import excluding_fields
from phase6_integration.api.schemas import SamplingFields, StreamOptions
from phase6_integration.api.state import ServerState
from phase6_integration.process.outputs import Chunk, Output

KEEP_ALIVE = b": keep-alive\n\n"
BLOCK = 64  # items of an iterator that are encoded at a time
LINE_BREAKS = {line.encode(): b"\\u%04x" % ord(line) for line in "\x85\u2028\u2029"}
_encode = msgspec.json.Encoder(enc_hook=list).encode  # an iterator is an array


def encode(value: Any) -> bytes:
    """The JSON of a value, on one line also for clients that split lines where Unicode does: JSON escapes only \\n and
    other characters below U+0020. Line breaks occur in strings alone, where an escape stands for the character."""
    data = _encode(value)
    if not data.isascii():
        for line_break, escape in LINE_BREAKS.items():
            data = data.replace(line_break, escape)
    return data


def object_of(text: str) -> msgspec.Raw:
    """The object that the arguments of a call are, as JSON. It is empty for those that were cut off, or are nested too
    deeply to be read."""
    try:
        value = json.loads(text or "{}")
        return msgspec.Raw(encode(value if isinstance(value, dict) else {}))
    except (ValueError, RecursionError):
        return msgspec.Raw(b"{}")


def pieces(value: Any) -> Iterator[bytes]:
    """The JSON of a value in pieces: an object field by field, a tuple item by item, an iterator BLOCK items at a
    time."""
    if isinstance(value, dict) and value:
        before = b"{"
        for name, field in value.items():
            yield before + encode(name) + b":"
            yield from pieces(field)
            before = b","
        yield b"}"
    elif isinstance(value, tuple):
        yield b"["
        for index, item in enumerate(value):
            yield b"," if index else b""
            yield from pieces(item)
        yield b"]"
    elif isinstance(value, Iterator):
        before = b"["
        while block := list(islice(value, BLOCK)):
            yield before + encode(block)[1:-1]
            before = b","
        yield b"]" if before == b"," else b"[]"
    else:
        yield encode(value)


class Formatter(ABC):
    """The response to one request. Its choices are numbered as the outputs of the engine are."""

    prefix: str  # of the id, such as "cmpl-"
    object: str
    chunk_object: str
    length_field = "max_tokens"  # of the request
    own_fields: Mapping[str, str] = {}  # its fields, by those of the chat or completion that it has become
    done = b"data: [DONE]\n\n"  # the end of a stream
    stream_type = b"text/event-stream; charset=utf-8"
    keep_alive = KEEP_ALIVE  # in the silences of a stream

    def __init__(
        self, server: ServerState, body: SamplingFields, request_id: str, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        options = body.stream_options or StreamOptions()
        self.id, self.request_id = f"{self.prefix}{body.request_id or request_id}", request_id
        self.model, self.fingerprint = server.model_name(body.model), server.fingerprint
        self.created = int(time.time())
        self.n = body.n or 1
        self.prompt_tokens = sum(map(len, prompts))  # each prompt counts once, whatever n is
        self.include_usage = bool(options.include_usage)
        self.continuous_usage = self.include_usage and options.continuous_usage_stats  # alone no effect, as in vLLM
        self.logprobs = False  # whether they are requested
        self.prompts, self.names = prompts, server.names
        self.returns_ids = bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self.first_event: dict[str, Any] = {}  # fields that only the first event of a stream has
        field = server.grammars.field(body)
        self.grammar_fields: tuple[str, ...] = () if field is None else (field,)
        self.excluding = excluding_fields(body)
        self.notes: tuple[str, ...] = ()  # what of a JSON schema is not enforced
        self.outputs: Sequence[Output] = ()  # once they are submitted
        self._unwritten: dict[int, Chunk] = {}  # by index
        self._delivered: dict[int, int] = {}  # tokens in the chunks of a stream, by index
        self._head = encode(self._top(self.chunk_object))[:-1] + b',"choices":['

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a chunk before the first text of an output."""
        return None

    @abstractmethod
    def choice(self, index: int, new: Chunk) -> dict[str, Any]:
        """A choice of the whole response."""

    @abstractmethod
    def delta(self, index: int, new: Chunk) -> dict[str, Any]:
        """A choice of a chunk of a stream."""

    def about_prompt(self, index: int) -> dict[str, Any]:
        """What is requested about the prompt of a choice."""
        prompt, scores = self.prompts[index // self.n], None
        if self._prompt_logprobs is not None:
            found = self.outputs[index].prompt_logprobs or ()
            scores = for_prompt(self.names, prompt, found, self._prompt_logprobs)
        return {"prompt_logprobs": scores, "prompt_token_ids": iter(prompt) if self.returns_ids else None}

    def fields(self) -> dict[str, Any]:
        """More fields of the whole response."""
        return {}

    def accumulate(self, chunk: Chunk) -> Chunk:
        """Append a chunk to those of its output that are not written. Returns all of them, joined."""
        unwritten = self._unwritten.setdefault(chunk.index, chunk)
        if unwritten is not chunk:
            unwritten.extend(chunk)
        return unwritten

    def has_news(self, new: Chunk) -> bool:
        """Whether there is a chunk to send."""
        return bool(new.text) or new.finish_reason is not None

    def to_chunk(self, chunk: Chunk) -> bytes:
        """The event for a chunk. Without text it is empty: tokens without text are sent with the text that follows."""
        new = self.accumulate(chunk)
        index = new.index
        if not self.has_news(new):
            return b""
        begin = b""
        if index not in self._delivered:
            self._delivered[index] = 0
            opening = self.opening(index)
            begin = b"" if opening is None else self.event(opening)
        self._delivered[index] += len(new.tokens)
        if new.finish_reason is not None:  # the token that ended it counts too, and has no text
            self._delivered[index] = self.outputs[index].generated
        return begin + self.event(self.delta(index, self._unwritten.pop(index)))

    def event(self, choice: dict[str, Any]) -> bytes:
        usage = b""
        if self.continuous_usage:
            usage = b',"usage":' + encode(self._usage(sum(self._delivered.values())))
        elif self.include_usage:
            usage = b',"usage":null'
        more, self.first_event = self.first_event, {}
        first = b"," + encode(more)[1:-1] if more else b""
        return b"".join((b"data: ", self._head, encode(choice), b"]", first, usage, b"}\n\n"))

    def last_chunk(self) -> bytes:
        """The chunk with the usage, if requested."""
        if not self.include_usage:
            return b""
        return b"".join((b"data: ", self._head, b'],"usage":', encode(self.usage), b"}\n\n"))

    def failed(self, error: RequestError) -> bytes:
        """The event for an error, after which nothing comes but `done`."""
        return b"data: " + error.content + b"\n\n"

    def whole(self) -> Iterator[bytes]:
        """The whole response in pieces. Each choice is freed once it is written."""
        before = encode(self._top(self.object))[:-1] + b',"choices":['
        for index in sorted(self._unwritten):
            yield before
            yield from pieces(self.choice(index, self._unwritten.pop(index)))
            before = b","
        yield b'],"usage":' + encode(self.usage)
        for name, value in self.fields().items():
            yield b"," + encode(name) + b":"
            yield from pieces(value)
        yield b"}"

    @property
    def usage(self) -> dict[str, Any]:
        return self._usage(sum(output.generated for output in self.outputs))

    def _usage(self, completion: int) -> dict[str, Any]:
        prompt = self.prompt_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        cached = sum(output.cached_tokens for output in self.outputs[:: self.n])
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def _top(self, object: str) -> dict[str, Any]:
        about = {"id": self.id, "object": object, "created": self.created, "model": self.model}
        return {**about, "system_fingerprint": self.fingerprint}
