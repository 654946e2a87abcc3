"""Output processing in the HTTP process: token ids come from the engine, and text goes out to the client.

`OutputProcessor` detokenizes one request. `OutputStream` collects the chunks of all requests that were submitted
together; iterating over it is how a client reads them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from phase0_request.detokenizer import Detokenizer
from phase0_request.request import FinishReason, RequestTimes, TokenLogprobs
from phase0_request.tokenizer import Tokenizer
from phase6_integration.health import Health
from phase6_integration.messages import EngineRequest


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of one request, with its tokens. Only the last chunk of a request may be empty."""

    index: int  # of the request in its OutputStream
    text: str
    tokens: tuple[int, ...] = ()  # the tokens of this text, without the one that ended it
    offsets: tuple[int, ...] = ()  # where in the whole output text each token begins, in characters
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if requested
    finish_reason: FinishReason | None = None  # set on the last chunk
    error: str | None = None  # cause of FinishReason.ERROR: for the log, not for the client
    health: Health | None = None  # of the engine, if that is the cause


@dataclass(slots=True)
class OutputTimes(RequestTimes):
    """Seconds on the monotonic clock. A token's time is the end of its step."""

    @property
    def queue(self) -> float | None:
        return self.queue_time

    @property
    def prefill(self) -> float | None:
        """First admission to first token."""
        return self.tokens[0] - self.admitted if self.tokens and self.admitted is not None else None

    @property
    def decode(self) -> float | None:
        """First token to last token."""
        return self.tokens[-1] - self.tokens[0] if self.tokens else None


@dataclass(slots=True)
class OutputState:
    """Counts and times of one request, for usage, logprobs, metrics and the access log."""

    times: OutputTimes
    cached_tokens: int = 0  # of its prompt, known once it is admitted
    generated: int = 0  # tokens, including the one that ended it
    prompt_logprobs: list[TokenLogprobs] | None = None  # if requested: of all but the first prompt token
    stop_reason: str | int | None = None  # the stop string or stop token that ended it


@dataclass(slots=True)
class _Token:
    """A token whose text is not fully sent yet."""

    id: int
    offset: int
    logprobs: TokenLogprobs | None


class OutputProcessor:
    """Detokenizes one request. Text comes out as whole characters in which no stop string can begin; a token comes out
    together with its text."""

    def __init__(self, index: int, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.state = OutputState(OutputTimes(request.arrival))
        self.reason: FinishReason | None = None  # why it ended, once the last chunk has been made
        self._detokenizer = Detokenizer(tokenizer, params.stop, params.min_tokens) if tokenizer else None
        self._sent_chars = 0
        self._held: list[_Token] = []
        self._stops = frozenset(params.stop_token_ids)

    @property
    def done(self) -> bool:
        return self.reason is not None

    def append(self, token: int, logprob: TokenLogprobs | None, reason: FinishReason | None, at: float) -> Chunk | None:
        """Add a token, with the finish reason if it is the last. None if no text is ready yet."""
        state = self.state
        state.generated += 1
        state.times.tokens.append(at)
        if reason is FinishReason.STOP:  # the token that ends the output is not part of it
            if token in self._stops:
                state.stop_reason = token
            return self.finish(reason)
        text = ""
        if self._detokenizer is None:
            self._held.append(_Token(token, 0, logprob))
        else:
            self._held.append(_Token(token, self._sent_chars + self._detokenizer.held, logprob))
            text = self._detokenizer.push([token])
            if self._detokenizer.stopped is not None:
                state.stop_reason = self._detokenizer.stopped
                reason = FinishReason.STOP
        if reason is not None:
            return self.finish(reason, text=text)
        return self._chunk(text) if text or self._detokenizer is None else None

    def finish(
        self, reason: FinishReason, error: str | None = None, text: str = "", health: Health | None = None
    ) -> Chunk:
        """The last chunk, with the text held back so far. Tokens of a stop string are dropped with its text."""
        self.reason = reason
        if self._detokenizer is not None:
            text += self._detokenizer.flush()
        stopped = self._detokenizer is not None and self._detokenizer.stopped is not None
        return self._chunk(text, reason, error, health, everything=not stopped)

    def _chunk(
        self,
        text: str,
        reason: FinishReason | None = None,
        error: str | None = None,
        health: Health | None = None,
        everything: bool = False,
    ) -> Chunk:
        self._sent_chars += len(text)
        # region exercise 6.2
        held = self._held
        if everything or self._detokenizer is None:
            shown = len(held)
        else:
            shown = next((i for i, token in enumerate(held) if token.offset >= self._sent_chars), len(held))
        out, self._held = held[:shown], held[shown:]
        # endregion
        return Chunk(
            self.index,
            text,
            tuple(token.id for token in out),
            tuple(token.offset for token in out),
            tuple(token.logprobs for token in out if token.logprobs is not None),
            reason,
            error,
            health,
        )


class OutputStream:
    """The outputs of requests that were submitted together. Iterating yields lists of chunks, everything since the last
    turn. A slow reader gets longer lists; what waits for it is bounded by the length of the outputs."""

    def __init__(self, outputs: Sequence[OutputProcessor], abort: Callable[[Sequence[OutputProcessor]], None]) -> None:
        self._abort = abort
        self._outputs = outputs
        self._chunks: list[Chunk] = []
        self._unfinished = len(outputs)  # requests whose last chunk has not arrived
        self._arrived = asyncio.Event()
        self._admitted = asyncio.Event()

    @property
    def states(self) -> list[OutputState]:
        return [output.state for output in self._outputs]

    async def admitted(self, seconds: float | None = None) -> bool:
        """Wait until the first request is admitted or has finished. False if that takes longer than so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._admitted.wait()
        return self._admitted.is_set()

    def abort(self) -> None:
        """Abort every request that has not finished. May be called repeatedly."""
        self._abort(self._outputs)

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        while self._unfinished or self._chunks:
            # region exercise 6.5
            await self._arrived.wait()
            self._arrived.clear()
            chunks, self._chunks = self._chunks, []
            # endregion
            if chunks:
                yield chunks

    def mark_admitted(self) -> None:
        self._admitted.set()

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._unfinished -= chunk.finish_reason is not None
        self._arrived.set()
        self._admitted.set()
