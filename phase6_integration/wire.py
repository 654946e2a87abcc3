"""What the front and the engine say to each other, and the line they say it over.

The two are processes joined by a pair of sockets. Messages are msgpack, four bytes of length before each; what arrives
must be of one of these types, or it is refused.
"""

import select
import socket
from collections.abc import Iterator
from typing import Any

import msgspec

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, TokenLogprobs
from phase6_integration.options import EngineOptions
from phase6_integration.stats import Gauges

HEADER = 4
CHUNK = 1 << 16


class Load(msgspec.Struct, tag=True, frozen=True):
    """The first word: what to load, and the function, `module:name`, that makes an engine of it."""

    options: EngineOptions
    factory: str


class Submit(msgspec.Struct, tag=True, frozen=True):
    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    cache_salt: str
    arrival: float  # on the monotonic clock, which all processes of a machine share
    timeout: float | None


class Finish(msgspec.Struct, tag=True, frozen=True):
    """To the engine: this one has ended, by a stop string or because its client has left."""

    id: str
    reason: FinishReason


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is loaded and warm."""

    max_model_len: int
    pages: int
    page_size: int
    device: str
    dtype: str


class Output(msgspec.Struct, array_like=True, frozen=True):
    """One more token of one answer. With the first comes what was asked about the prompt."""

    id: str
    token: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Started(msgspec.Struct, array_like=True, frozen=True):
    """A request was given room; so many tokens of its prompt were there already."""

    id: str
    admitted: float
    cached: int


class Ended(msgspec.Struct, array_like=True, frozen=True):
    """The last word on a request. There is one for each that was submitted."""

    id: str
    reason: FinishReason
    error: str | None = None


class Update(msgspec.Struct, tag=True, frozen=True):
    """What has happened since the last one."""

    at: float
    seconds: float  # that the step took
    prefill_tokens: int
    decode_tokens: int
    started: list[Started]
    outputs: list[Output]
    ended: list[Ended]
    gauges: Gauges


class Logged(msgspec.Struct, tag=True, frozen=True):
    """For the front's log: what the engine has to say has one form with all else."""

    level: int
    text: str


class Dead(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot go on. Its last word."""

    reason: str


ToEngine = Load | Submit | Finish
ToFront = Ready | Update | Logged | Dead

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToEngine | ToFront) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "big") + body


class Frames:
    """Bytes in, in any pieces; messages out."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    @classmethod
    def for_engine(cls) -> "Frames":
        return cls(_to_engine)

    @classmethod
    def for_front(cls) -> "Frames":
        return cls(_to_front)

    def feed(self, data: bytes) -> Iterator[Any]:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            # region exercise 6.1
            while len(buffer) - start >= HEADER:
                stop = start + HEADER + int.from_bytes(buffer[start : start + HEADER], "big")
                if len(buffer) < stop:
                    break
                body = bytes(buffer[start + HEADER : stop])
                start = stop
                yield self._decoder.decode(body)
            # endregion
        finally:
            del buffer[:start]


class Line:
    """The engine's end. It never waits for the front to read: what does not fit into the socket is kept, and goes with
    the next word. While the engine is idle it sleeps here, until someone says something."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._frames = Frames.for_engine()
        self._unsent = bytearray()

    def send(self, message: ToFront) -> None:
        self._unsent += frame(message)
        self._push()

    # region receive
    def receive(self, wait: bool) -> list[ToEngine]:
        """What has been said since; with `wait`, at least one word. EOFError once the front has gone."""
        while True:
            want_to_write = [self._socket] if self._unsent else []
            readable, writable, _ = select.select([self._socket], want_to_write, [], None if wait else 0)
            if writable:
                self._push()
            if readable:
                return self._read()
            if not wait:
                return []

    # endregion

    def flush(self) -> None:
        """Wait until all has been said: the last thing an engine does."""
        self._socket.setblocking(True)
        self._socket.sendall(self._unsent)
        self._unsent.clear()

    def _read(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._socket.recv(CHUNK)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the front has gone")
            messages += self._frames.feed(data)
            if len(data) < CHUNK and messages:
                return messages

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
