"""Formatter: writes the outputs of one request as OpenAI's JSON, whole or in chunks.

Chunks are many and small, so they are assembled from bytes: what all of them share is encoded once. A whole response
may be large, so it is encoded in pieces while it is sent: what extras add may be iterators until then.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from phase0_request.request import FinishReason
from phase6_integration.api.additions import Asked, Json
from phase6_integration.api.errors import RequestError
from phase6_integration.api.schemas import StreamOptions
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
    """The response to one request. Its choices have the numbers of the engine's outputs."""

    prefix: str  # of the id, such as "cmpl-"
    object: str
    chunk_object: str
    length_field = "max_tokens"  # of the request
    own_fields: Mapping[str, str] = {}  # names of its fields, by those of the chat or completion that it becomes
    done = b"data: [DONE]\n\n"  # the end of a stream
    stream_type = b"text/event-stream; charset=utf-8"
    keep_alive = KEEP_ALIVE  # in the silences of a stream

    def __init__(self, server: ServerState, asked: Asked, request_id: str) -> None:
        body = asked.body
        options = body.stream_options or StreamOptions()
        self.id, self.request_id = f"{self.prefix}{body.request_id or request_id}", request_id
        self.model, self.fingerprint = server.model_name(body.model), server.fingerprint
        self.created = int(time.time())
        self.n, self.prompts = body.n or 1, asked.prompts
        self.prompt_tokens = sum(map(len, asked.prompts))  # each prompt counts once, whatever n is
        self.include_usage = bool(options.include_usage)
        self.continuous_usage = self.include_usage and options.continuous_usage_stats  # alone no effect, as in vLLM
        self.additions, self._first_event = asked.additions, asked.first_event  # which features fill in
        self.outputs: Sequence[Output] = ()
        self._unwritten: dict[int, Chunk] = {}  # by index
        self._delivered: dict[int, int] = {}  # tokens in the chunks of a stream, by index
        self._head = encode(self._top(self.chunk_object))[:-1] + b',"choices":['

    def begin(self, outputs: Sequence[Output]) -> None:
        """The outputs are submitted."""
        self.outputs = outputs
        for addition in self.additions:
            addition.outputs = outputs

    @abstractmethod
    def text(self, new: Chunk, whole: bool) -> Json:
        """The fields of a choice that have its text, in a whole response or an event."""

    def opening(self, index: int) -> Json | None:
        """The choice of an event before the first text of an output."""
        return None

    def choice(self, index: int, new: Chunk) -> Json:
        """A choice of the whole response."""
        return self._written(index, new, whole=True)

    def delta(self, index: int, new: Chunk) -> Json:
        """A choice of an event of a stream."""
        return self._written(index, new, whole=False)

    def _written(self, index: int, new: Chunk, whole: bool) -> Json:
        reason = new.finish_reason
        stop = self.outputs[index].stop_reason if reason is FinishReason.STOP else None
        choice = {"index": index, **self.text(new, whole), "finish_reason": reason, "stop_reason": stop}
        for addition in self.additions:
            addition.write(choice, new, whole)
        return choice

    def accumulate(self, chunk: Chunk) -> bool:
        """Append a chunk to the unwritten ones of its output. Returns whether there is something to send:
        tokens without text are sent with the text that follows."""
        news = [addition.read(chunk) for addition in self.additions]
        new = self._unwritten.setdefault(chunk.index, chunk)
        if new is not chunk:
            new.extend(chunk)
        return bool(new.text) or new.finish_reason is not None or any(news)

    def to_chunk(self, chunk: Chunk) -> bytes:
        """The event for a chunk, if there is something to send."""
        if not self.accumulate(chunk):
            return b""
        index, begin = chunk.index, b""
        new = self._unwritten.pop(index)
        if index not in self._delivered:
            self._delivered[index] = 0
            begin = self._beginning(index)
        self._delivered[index] += len(new.tokens)
        if new.finish_reason is not None:  # the token that ended it counts too, and has no text
            self._delivered[index] = self.outputs[index].generated
        return begin + self.event(self.delta(index, new))

    def _beginning(self, index: int) -> bytes:
        choice = self.opening(index)
        if choice is None:
            return b""
        choice |= {"finish_reason": None, "stop_reason": None}
        for addition in self.additions:
            addition.write(choice, None, whole=False)
        return self.event(choice)

    def event(self, choice: Json) -> bytes:
        usage = b""
        if self.continuous_usage:
            usage = b',"usage":' + encode(self._usage(sum(self._delivered.values())))
        elif self.include_usage:
            usage = b',"usage":null'
        first = b"," + encode(self._first_event)[1:-1] if self._first_event else b""
        self._first_event = {}
        return b"".join((b"data: ", self._head, encode(choice), b"]", first, usage, b"}\n\n"))

    def last_chunk(self) -> bytes:
        """The chunk with the usage, if requested."""
        if not self.include_usage:
            return b""
        return b"".join((b"data: ", self._head, b'],"usage":', encode(self.usage), b"}\n\n"))

    def failed(self, error: RequestError) -> bytes:
        """The event for an error. Only `done` follows it."""
        return b"data: " + error.content + b"\n\n"

    def whole(self) -> Iterator[bytes]:
        """The whole response in pieces. Each choice is freed once it is written."""
        before = encode(self._top(self.object))[:-1] + b',"choices":['
        for index in sorted(self._unwritten):
            yield before
            yield from pieces(self.choice(index, self._unwritten.pop(index)))
            before = b","
        yield b'],"usage":' + encode(self.usage)
        for addition in self.additions:
            for name, value in addition.fields().items():
                yield b"," + encode(name) + b":"
                yield from pieces(value)
        yield b"}"

    @property
    def usage(self) -> Json:
        return self._usage(sum(output.generated for output in self.outputs))

    def _usage(self, completion: int) -> Json:
        prompt = self.prompt_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        cached = sum(output.cached_tokens for output in self.outputs[:: self.n])
        usage = {**counts, "prompt_tokens_details": {"cached_tokens": cached}}
        for addition in self.additions:
            addition.usage(usage)
        return usage

    def _top(self, object: str) -> Json:
        about = {"id": self.id, "object": object, "created": self.created, "model": self.model}
        return {**about, "system_fingerprint": self.fingerprint}
