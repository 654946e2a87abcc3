"""Parse the response to one request into its Outcome: token counts, and the moments at which text arrived."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request. Times are seconds on the client's clock; token counts are from the server's usage.

    Latencies count from the plan, so that a request that waited in the client has waited: a late start would hide what
    made it late. They end with the last text, as vLLM's do, not with the usage after it."""

    planned: float
    ended: float
    deliveries: Sequence[float] = ()  # arrivals of streamed text; one may carry several tokens
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # of the input, if the server reports them
    error: str | None = None
    lateness: float = 0.0  # from the plan until it was sent
    text: str = ""

    @property
    def sent(self) -> float:
        return self.planned + self.lateness

    @property
    def last(self) -> float:
        """The end of the answer."""
        return self.deliveries[-1] if self.deliveries else self.ended

    @property
    def e2el(self) -> float:
        return self.last - self.planned

    @property
    def ttft(self) -> float:
        """Time to first token. NaN without streaming."""
        return self.deliveries[0] - self.planned if self.deliveries else math.nan

    @property
    def tpot(self) -> float:
        """Time per output token after the first. NaN for a single token or without streaming."""
        if not self.deliveries or self.output_tokens < 2:
            return math.nan
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between deliveries."""
        return [later - earlier for earlier, later in zip(self.deliveries, self.deliveries[1:], strict=False)]


class _Cached(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Cached | None = None


class _Message(msgspec.Struct):
    content: str | None = ""
    reasoning: str | None = ""
    reasoning_content: str | None = ""  # an older name of it


class _Choice(msgspec.Struct):
    text: str | None = ""  # of a completion
    delta: _Message | None = None  # of a chat, streamed
    message: _Message | None = None  # and whole
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = "an error without a message"


class _Chunk(msgspec.Struct):
    """The fields of a completion, or of a chunk of one, that matter here. Others are skipped unparsed."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Chunk).decode
NOT_ONE = msgspec.DecodeError, UnicodeDecodeError, RecursionError  # what is no _Chunk


def on_one_line(words: str) -> str:
    """A server's words, shortened, with only characters that a terminal can show."""
    return "".join(character if character.isprintable() else " " for character in words[:500])


@dataclass(slots=True)
class Response:
    """Receives a body from a connection. `outcome` gives the result; an incomplete response is an error."""

    planned: float
    streamed: bool
    lateness: float = 0.0
    status: int = 0
    deliveries: list[float] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    _usage: _Usage | None = None
    _error: str | None = None
    _reason: str | None = None
    _done: bool = False
    _rest: bytes = b""  # an incomplete line, or the whole body if it is no stream

    def feed(self, data: bytes, now: float) -> None:
        """Take a piece of the body. Each event is one line, `data: ...`; other lines are comments."""
        if not self.streamed or self.status != 200:
            self._rest += data
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def outcome(self, ended: float, error: str | None = None) -> Outcome:
        """The result, once the response has ended or the connection has failed."""
        if error is not None:
            self._error = error
        elif self.status != 200 or not self.streamed:
            self._take_whole()
        elif self._error is None and not self._done:
            self._error = "the stream ended without [DONE]"
        if self._error is None and self._reason is None:
            self._error = "the answer has no finish_reason"
        if self._error is None and self._usage is None:
            self._error = "the server sent no usage"
        usage = self._usage or _Usage(0, 0)
        cached = usage.prompt_tokens_details
        return Outcome(
            self.planned,
            ended,
            self.deliveries,
            usage.prompt_tokens,
            usage.completion_tokens,
            (cached.cached_tokens or 0) if cached else 0,
            self._error,
            self.lateness,
            "".join(self._texts),
        )

    def _event(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._done = True
            return
        try:
            chunk = _decode(event)
        except NOT_ONE as error:
            self._error = f"an event of the stream is not what it should be: {error}"
            return
        text = self._take(chunk)
        # An answer without any text counts as delivered when it ends.
        if text or (not self.deliveries and any(choice.finish_reason for choice in chunk.choices)):
            self.deliveries.append(now)

    def _take_whole(self) -> None:
        try:
            chunk = _decode(self._rest)
        except NOT_ONE:
            chunk = _Chunk(error=_Error(f"a body that is no JSON object of a completion, {len(self._rest)} bytes"))
        self._take(chunk)
        if self.status != 200:
            self._error = f"answered {self.status}: {self._error or 'no reason given'}"

    def _take(self, chunk: _Chunk) -> bool:
        """Take one event. Return whether it has any text or reasoning."""
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.error is not None:
            self._error = on_one_line(chunk.error.message)
        some = False
        for choice in chunk.choices:
            self._reason = choice.finish_reason or self._reason
            message = choice.delta or choice.message or _Message(choice.text)
            self._texts.append(message.content or "")
            some = some or bool(message.content or message.reasoning or message.reasoning_content)
        return some
