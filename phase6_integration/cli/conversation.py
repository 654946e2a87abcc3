"""Who answers in a conversation: an engine of our own, or a server. To a chat they are the same."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import msgspec

from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase6_integration.async_engine import AsyncEngine
from phase6_integration.http_client import LostError, Pool, Target, first_model
from phase6_integration.messages import EngineRequest
from phase6_integration.options import EngineOptions

Messages = Sequence[Mapping[str, str]]


class AnswerError(RuntimeError):
    """There is no answer, or no more of it, and why."""


class Facts(NamedTuple):
    """What an answer took."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cut: bool  # at max_tokens


class Speaker(Protocol):
    """Says an answer piece by piece, and at last what it took. To close the generator is to stop it."""

    @property
    def name(self) -> str: ...

    def answer(self, messages: Messages, params: SamplingParams) -> AsyncGenerator[str | Facts]: ...

    async def close(self) -> None: ...


class Local:
    """An engine of our own."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.name = engine.options.model.rstrip("/").rpartition("/")[2]
        self._numbers = itertools.count(1)

    @classmethod
    async def open(cls, options: EngineOptions) -> "Local":
        engine = AsyncEngine(options)
        if engine.tokenizer is None or engine.tokenizer.chat_template is None:
            raise AnswerError("this model has no chat template, so it cannot chat; `nanoserve generate` continues text")
        await engine.start()
        try:
            await engine.ready()
        except BaseException:
            await engine.close()
            raise
        return cls(engine)

    async def answer(self, messages: Messages, params: SamplingParams) -> AsyncGenerator[str | Facts]:
        engine = self.engine
        assert engine.tokenizer is not None
        prompt = tuple(engine.tokenizer.chat(messages))
        room = engine.max_model_len - len(prompt)
        if room < 1:
            raise AnswerError(f"the conversation has {len(prompt)} tokens; the context ends at {engine.max_model_len}")
        params = replace(params, max_tokens=min(params.max_tokens, room))
        reason = None
        with engine.submit([EngineRequest(f"chat-{next(self._numbers)}", prompt, params)]) as reply:
            async for deltas in reply:
                for delta in deltas:
                    reason = delta.finish_reason or reason
                    if delta.text:
                        yield delta.text
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise AnswerError(f"the answer ended by {reason.value if reason else 'nothing'}: {engine.reason}")
        state = reply.states[0]
        yield Facts(len(prompt), state.cached_tokens, state.generated, reason is FinishReason.LENGTH)

    async def close(self) -> None:
        await self.engine.close()


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = "no reason given"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Events:
    """A response as the data of its events, to be read as they come. What is no stream is one event at its end."""

    def __init__(self) -> None:
        self.status = 0
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        self._rest += data
        if self.status == 200:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self.queue.put_nowait(line[5:].strip())

    def end(self, _: object = None) -> None:
        if self._rest and self.status != 200:
            self.queue.put_nowait(self._rest)
        self.queue.put_nowait(None)


@dataclass
class Remote:
    """A server. `name` is the model's there."""

    pool: Pool
    name: str

    @classmethod
    async def open(cls, target: Target, model: str | None) -> "Remote":
        pool = Pool(target, time.perf_counter)
        return cls(pool, model or await first_model(pool))

    # region remote
    async def answer(self, messages: Messages, params: SamplingParams) -> AsyncGenerator[str | Facts]:
        target, events = self.pool.target, _Events()
        request = target.request("POST", "/v1/chat/completions", msgspec.json.encode(self.body(messages, params)))
        exchange = asyncio.ensure_future(self.pool.exchange(request, events))
        exchange.add_done_callback(events.end)
        usage, reason, done = None, None, False
        try:
            while (event := await events.queue.get()) is not None and not done:
                if event == b"[DONE]":
                    done = True
                    continue
                chunk = _read(event, events.status)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    if choice.delta.content:
                        yield choice.delta.content
            await exchange
        except LostError as error:
            raise AnswerError(str(error)) from None
        finally:
            exchange.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await exchange
        if not done:
            raise AnswerError("the stream ended before the answer did")
        if usage is not None:
            cached = usage.prompt_tokens_details
            hits = (cached.cached_tokens or 0) if cached else 0
            yield Facts(usage.prompt_tokens, hits, usage.completion_tokens, reason == "length")

    # endregion

    def body(self, messages: Messages, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": list(messages),
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if params.seed is None else body | {"seed": params.seed}

    async def close(self) -> None:
        self.pool.close()


def _read(event: bytes, status: int) -> _Chunk:
    """An event, or the error that it is."""
    try:
        chunk = _decode(event)
    except msgspec.DecodeError:
        raise AnswerError(f"the server answered {status} with something that is no event of a chat") from None
    if chunk.error is not None:
        raise AnswerError(chunk.error.message if status == 200 else f"{status}: {chunk.error.message}")
    return chunk
