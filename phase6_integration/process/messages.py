"""The messages between the HTTP process and the engine process, and the channel that carries them.

The two processes are joined by a pair of sockets. Messages are msgpack, with four bytes of length before each. Bytes
that decode to none of these types are refused.
"""

import contextlib
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.stats import Gauges

HEADER = 4
MAX_FRAME = 1 << 28  # bytes of a message: longer ones are refused as corrupt
CHUNK = 1 << 16


class FrameTooLargeError(ValueError):
    """The length of a message is beyond MAX_FRAME: these bytes are not messages."""


class LoadModel(msgspec.Struct, tag=True, frozen=True):
    """To the engine, first: what to load, and the function, `module:name`, that builds the engine."""

    options: EngineOptions
    factory: str


class EngineRequest(msgspec.Struct, tag=True, frozen=True):
    """To the engine: generate n completions of each prompt. Completion i is sample i % n of prompt i // n. Shared
    parts are checked, sent and kept once."""

    id: str  # `{id}-{number}` names a completion, and must be unique among unfinished ones
    prompts: list[tuple[int, ...]]
    params: SamplingParams
    lengths: list[int]  # max_tokens for each prompt
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None  # seconds from arrival; None: no limit
    client: str = ""  # an opaque id of the client that sent it
    arrival: float = 0.0  # set by AsyncEngine, on the monotonic clock, which all processes of a machine share

    @property
    def numbers(self) -> range:
        """The numbers of its completions."""
        return range(len(self.prompts) * self.n)

    def name(self, number: int) -> str:
        """The id of a completion."""
        return f"{self.id}-{number}"

    def size_of(self, number: int) -> tuple[int, int]:
        """The tokens of a completion's prompt, and its max_tokens."""
        prompt = number // self.n
        return len(self.prompts[prompt]), self.lengths[prompt]

    def completion(self, number: int) -> Request:
        """A completion for the scheduler. Sample i of a seeded request has the seed + i."""
        prompt, sample = divmod(number, self.n)
        seed = self.params.seed
        if seed is not None:
            seed = (seed + sample + (1 << 63)) % (1 << 64) - (1 << 63)
        params = self.params.vary(self.lengths[prompt], seed)
        name, tokens = self.name(number), self.prompts[prompt]
        return Request(name, tokens, params, self.priority, self.arrival, self.cache_salt, self.client)


class Finish(msgspec.Struct, tag=True, frozen=True):
    """To the engine: finish this request now, because of a stop string or because its client has disconnected."""

    id: str
    reason: FinishReason


class Ping(msgspec.Struct, tag=True, frozen=True):
    """To the engine, while it is idle: answer with a Pong."""


class SideMessage(msgspec.Struct, tag=True, frozen=True):
    """To or from the engine: an extra's message to its other side. It is ignored if that side is missing."""

    name: str  # of the extra
    body: bytes


class Pong(msgspec.Struct, tag=True, frozen=True):
    """From the engine: it reads its messages."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """From the engine: the model is loaded and warmed up."""

    max_model_len: int
    pages: int
    page_size: int
    device: str
    dtype: str
    linear: str = ""  # how the linear layers compute
    kv_cache_dtype: str = ""
    kv_cache_bytes: int = 0


class Progress(msgspec.Struct, array_like=True, frozen=True):
    """What a step has done for one completion: admitted it, drawn a token, ended it, or more than one of these. Each
    completion is admitted at most once and ends exactly once: no progress follows its finish reason."""

    id: str
    token: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    admitted: float | None = None  # when
    cached: int = 0  # tokens of its prompt that the prefix cache had when it was admitted
    more: bytes | None = None  # about the token, from an extra to its other side


class Update(msgspec.Struct, tag=True, frozen=True):
    """From the engine, after each step: all events since the previous update, in order."""

    at: float
    seconds: float  # duration of the step
    prefill_tokens: int
    decode_tokens: int
    progress: list[Progress]
    gauges: Gauges


class Logged(msgspec.Struct, tag=True, frozen=True):
    """From the engine: a log record, which the HTTP process writes in its own format."""

    level: int
    text: str


class Dead(msgspec.Struct, tag=True, frozen=True):
    """From the engine, last: it has failed and ends."""

    reason: str


ToEngine = LoadModel | EngineRequest | Finish | Ping | SideMessage
ToFront = Ready | Update | Pong | Logged | SideMessage | Dead

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
to_front = msgspec.msgpack.Decoder(ToFront)


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "big") + body


class Frames:
    """Decodes a stream of bytes, which may be cut anywhere, into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    # region exercise 6.1
    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that are whole, in order. The rest waits for the next call. FrameTooLargeError if a length
        is above MAX_FRAME. A refused message is dropped: the next call begins after it."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER:
                length = int.from_bytes(buffer[start : start + HEADER], "big")
                if length > MAX_FRAME:
                    raise FrameTooLargeError(f"a message of {length} bytes was announced; at most {MAX_FRAME} are read")
                stop = start + HEADER + length
                if len(buffer) < stop:
                    break
                body = bytes(buffer[start + HEADER : stop])
                start = stop
                yield self._decoder.decode(body)
        finally:
            del buffer[:start]

    # endregion


class Channel:
    """The engine's end of a socket pair. Sending never blocks: bytes that the socket does not take are buffered and go
    out with the next call. An idle engine sleeps in `receive` until a message arrives."""

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Any] = to_engine) -> None:
        end.setblocking(False)
        self._socket = end
        self._selector = selectors.DefaultSelector()  # `select` would refuse descriptors from 1024 on
        self._selector.register(end, selectors.EVENT_READ)
        self._frames = Frames(decoder)
        self._unsent = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message, and send as much of the queue as the socket takes now."""
        self._unsent += frame(message)
        self._push()

    def receive(self, wait: bool, timeout: float | None = None) -> list[Any]:
        """The messages that have arrived whole. With `wait`, sleep until this socket or a watched descriptor is
        readable, or until the timeout. EOFError once the HTTP process has closed."""
        while True:
            selected = self._selector.select(timeout if wait else 0)
            for key, _ in selected:
                if key.data is not None:
                    key.data()
            ready = {key.fd: events for key, events in selected}
            own = ready.pop(self._socket.fileno(), 0)
            if own & selectors.EVENT_WRITE:
                self._push()
            if own & selectors.EVENT_READ:
                return self._read()
            if not wait or timeout is not None or ready:
                return []

    def watch(self, descriptor: int, then: Callable[[], object] | None = None) -> None:
        """Have `receive` also wake up and call `then` when another descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, then)

    def fileno(self) -> int:
        """A descriptor that is readable when `receive` has something to do."""
        return self._selector.fileno()

    def close(self) -> None:
        self._selector.close()
        self._socket.close()

    def flush(self) -> None:
        """Block until all messages are sent: the last thing an engine does."""
        self._socket.setblocking(True)
        self._socket.sendall(self._unsent)
        self._unsent.clear()

    def _read(self) -> list[Any]:
        """Read all available bytes, CHUNK at a time, and return the messages that are whole, if any."""
        messages: list[Any] = []
        while True:
            try:
                data = self._socket.recv(CHUNK)
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the HTTP process has closed the channel")
            messages += self._frames.feed(data)
            if len(data) < CHUNK and messages:
                return messages

    def _push(self) -> None:
        """Send unsent bytes until none are left or the socket would block."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        self._selector.modify(self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0))
