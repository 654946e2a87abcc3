"""Output processing in the HTTP process: token ids come from the engine, and text goes out to the client.

`Output` detokenizes one completion. `OutputStream` collects the chunks of all completions of a request; iterating over
it is how a client reads them.
"""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from phase0_request.detokenizer import Transcript
from phase0_request.request import FinishReason, RequestTimes
from phase0_request.tokenizer import Tokenizer
from phase6_integration.process.health import UnavailableError
from phase6_integration.process.messages import EngineRequest

SUCCESS = (None, FinishReason.STOP, FinishReason.LENGTH)
JOINED = 256  # tokens: unread chunks are joined up to this length


class Details(Protocol):
    """An extra's data about one output, beside its text."""

    def add(self, more: bytes) -> None:
        """Add the bytes that the engine's side of the extra sent with the next token."""
        ...


_integers = partial(array, "i")


@dataclass(slots=True)
class Chunk:
    """New text of one completion, with its tokens. Only the last chunk of a completion may be empty."""

    index: int  # of the completion in its OutputStream
    text: str = ""
    tokens: "array[int]" = field(default_factory=_integers)  # of this text, without those that ended it
    offsets: "array[int]" = field(default_factory=_integers)  # in the whole output text, where each token begins
    ended_by: "array[int]" = field(default_factory=_integers)  # the stop token, or those of the stop string
    finish_reason: FinishReason | None = None  # set on the last chunk
    error: str | UnavailableError | None = None  # cause of FinishReason.ERROR: for the log, not for the client

    def extend(self, later: "Chunk") -> None:
        """Append a later chunk of the same request."""
        self.text += later.text
        self.tokens += later.tokens
        self.offsets += later.offsets
        self.ended_by += later.ended_by
        self.finish_reason, self.error = later.finish_reason, later.error

    def split(self, count: int) -> tuple["Chunk", "Chunk"]:
        """Two chunks without text: the first `count` tokens, and the rest."""
        if count == len(self.tokens):
            return self, Chunk(self.index)
        first = Chunk(self.index, "", self.tokens[:count], self.offsets[:count])
        return first, Chunk(self.index, "", self.tokens[count:], self.offsets[count:])

    @property
    def token_ids(self) -> list[int]:
        """All tokens that were generated for this chunk."""
        return [*self.tokens, *self.ended_by]


class Output:
    """One completion: makes chunks of its tokens, and counts and times them for usage, metrics and the access log. Text
    comes out as whole characters in which no stop string can begin; a token comes out together with its text."""

    def __init__(self, request: EngineRequest, number: int, tokenizer: Tokenizer | None) -> None:
        self.id, self.index = request.name(number), number
        self.prompt_tokens, self.max_tokens = request.size_of(number)
        self.times = RequestTimes(request.arrival, tokens=array("d"))  # a token's time is the end of its step
        self.cached_tokens = 0  # of its prompt, known once it is admitted
        self.generated = 0  # tokens, including the one that ended it
        self.details: Details | None = None
        self.reason: FinishReason | None = None  # why it ended, once the last chunk has been made
        self._transcript = Transcript(request.params, tokenizer)
        self._sent_chars = 0
        self._held = Chunk(number)  # tokens with text that is not fully sent yet

    @property
    def done(self) -> bool:
        return self.reason is not None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the output."""
        return self._transcript.stop_reason

    def append(self, token: int, reason: FinishReason | None, at: float) -> Chunk | None:
        """Add a token, with the finish reason if it is the last. None if no text is ready yet."""
        self.generated += 1
        self.times.tokens.append(at)
        self._hold(token)
        transcript = self._transcript
        text = transcript.add(token, reason)
        if transcript.finish_reason is not None:
            stop_tokens = int(reason is FinishReason.STOP and not transcript.includes_stop)
            return self._last(transcript.finish_reason, text, stop_tokens)
        if not transcript.has_text:
            return self._chunk("", 1)
        return self._chunk(text, self._count_begun(text)) if text else None

    def finish(self, reason: FinishReason, error: str | UnavailableError | None = None) -> Chunk:
        """End the output between two tokens. Returns the last chunk, with the text held back so far."""
        return self._last(reason, self._transcript.add(None, reason), error=error)

    def _last(
        self, reason: FinishReason, text: str, stop_tokens: int = 0, error: str | UnavailableError | None = None
    ) -> Chunk:
        """The last chunk. It leaves out the last `stop_tokens` tokens, which ended the output, and the tokens of an
        excluded stop string."""
        self.reason = reason
        count = len(self._held.tokens) - stop_tokens
        if isinstance(self.stop_reason, str) and not self._transcript.includes_stop:
            count = self._count_begun(text)
        chunk = self._chunk(text, count)
        chunk.ended_by = self._held.tokens
        chunk.finish_reason, chunk.error = reason, error
        return chunk

    # region exercise 6.4
    def _hold(self, token: int) -> None:
        """Keep a token until its text is sent."""
        held = self._held
        held.tokens.append(token)
        held.offsets.append(self._sent_chars + self._transcript.held_chars)

    def _count_begun(self, text: str) -> int:
        """Count the held tokens that begin before `text`, which is sent next, ends."""
        end, offsets = self._sent_chars + len(text), self._held.offsets
        return next((i for i, offset in enumerate(offsets) if offset >= end), len(offsets))

    def _chunk(self, text: str, count: int) -> Chunk:
        """A chunk of this text and the first `count` of the held tokens."""
        self._sent_chars += len(text)
        chunk, self._held = self._held.split(count)
        chunk.text = text
        return chunk

    # endregion


class OutputStream:
    """The outputs of one request. Iterating yields lists of chunks, all that came since the last turn. The unread
    chunks of an output are joined: a slow reader gets fewer and longer ones."""

    def __init__(
        self, request: EngineRequest, tokenizer: Tokenizer | None, abort: Callable[["OutputStream"], None]
    ) -> None:
        self.request = request
        self.outputs = [Output(request, number, tokenizer) for number in request.numbers]
        self._abort = abort
        self._chunks: list[Chunk] = []
        self._newest: dict[int, Chunk] = {}  # of each output, its last unread chunk
        self._unfinished = len(self.outputs)  # completions without their last chunk
        self._arrived = asyncio.Event()

    def abort(self) -> None:
        """Abort every completion that has not finished. May be called repeatedly."""
        self._abort(self)

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        return self.turns()

    async def turns(self, silence: float | None = None) -> AsyncIterator[list[Chunk]]:
        """Yield the chunks since the last turn, until the last chunk of every completion has been yielded. When none
        has come for `silence` seconds, yield an empty list."""
        while self._unfinished or self._chunks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence):
                    await self._arrived.wait()
            self._arrived.clear()
            chunks, self._chunks, self._newest = self._chunks, [], {}
            yield chunks

    def put(self, chunk: Chunk) -> None:
        """Add a chunk, and wake the reader. It is joined to the unread chunk of the same output, up to JOINED tokens;
        the chunk of a failure stays by itself."""
        newest, failed = self._newest.get(chunk.index), chunk.finish_reason not in SUCCESS
        if newest is not None and len(newest.tokens) < JOINED and not failed:
            newest.extend(chunk)
        else:
            self._chunks.append(chunk)
            self._newest[chunk.index] = chunk
        self._unfinished -= chunk.finish_reason is not None
        self._arrived.set()
