"""Server: the whole life of a request in one small asyncio program. Only the model is a mock.

submit -> API adapter -> tokenizer -> scheduler -> model runner -> detokenizer -> the client's stream
                                          ^                              |
                                          +------- one token later ------+
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple, Protocol

from phase0_request.batch import Batch, Event, StepTokens
from phase0_request.detokenizer import Detokenizer
from phase0_request.lab.batcher import Batcher
from phase0_request.lab.trace import Stage, Trace
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import Tokenizer


class Model(Protocol):
    """What the server needs of a model."""

    def check(self, params: SamplingParams) -> None: ...

    async def run(self, batch: Batch) -> StepTokens: ...


class Delta(NamedTuple):
    """What a client gets: a token, the text that can be shown since, and on the last one the reason for the end."""

    token: int | None
    text: str
    finish_reason: FinishReason | None = None


class Stream:
    """One request as its client sees it: an asynchronous iterator of deltas. Ends after the one with a reason."""

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self._deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self._ended = False

    def put(self, delta: Delta) -> None:
        self._deltas.put_nowait(delta)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._ended = delta.finish_reason is not None
        return delta


class Server:
    """Serves while it is entered: `async with Server(tokenizer, model) as server`. Leaving it ends what still runs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: Model,
        *,
        batch_size: int = 4,
        queue_limit: int = 256,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.batcher = Batcher(tokenizer.eos_ids, batch_size, queue_limit)
        self.trace = Trace()
        self.steps = 0
        self._clock = clock
        self._streams: dict[str, Stream] = {}
        self._numbers = itertools.count(1)
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._fault: str | None = None
        self._stopping = False

    async def __aenter__(self) -> "Server":
        if self._loop is not None:
            raise RuntimeError("the server is running already")
        self._stopping, self._fault = False, None
        self._loop = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        loop, self._loop = self._loop, None
        self._stopping = True
        try:
            if loop is not None:
                loop.cancel()
                await asyncio.gather(loop, return_exceptions=True)
        finally:
            self._end_all(FinishReason.ABORT)

    async def generate(
        self, prompt: str, params: SamplingParams | None = None, priority: int = 0
    ) -> AsyncGenerator[Delta, None]:
        """The answer to a prompt, token by token. Closing the generator before the end aborts the request."""
        stream = self.submit(prompt, params, priority)
        try:
            async for delta in stream:
                yield delta
        finally:
            self.abort(stream.request)

    def submit(self, prompt: str, params: SamplingParams | None = None, priority: int = 0) -> Stream:
        """Take a request in, or refuse it at once: ValueError if it is not valid, QueueFullError if too many wait."""
        if self._loop is None:
            raise RuntimeError("the server is not running; use it as `async with Server(...) as server`")
        if self._fault is not None:
            raise RuntimeError(f"the server has stopped: {self._fault}")
        params = params or SamplingParams()
        arrival = self._clock()
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt must be a text of at least one character, got {prompt!r}")
        self.model.check(params)
        entered_tokenizer = self._clock()
        tokens = self.tokenizer.encode(prompt)
        request = Request(f"request-{next(self._numbers)}", tuple(tokens), params, priority, arrival)
        stream = Stream(request, Detokenizer(self.tokenizer, params.stop, params.min_tokens))
        self.batcher.submit(request)
        self._streams[request.id] = stream
        self.trace.enter(request.id, Stage.API, arrival)
        self.trace.enter(request.id, Stage.TOKENIZER, entered_tokenizer)
        self.trace.enter(request.id, Stage.SCHEDULER, self._clock())
        self._work.set()
        return stream

    def abort(self, request: Request) -> bool:
        """End a request wherever it is. False if it had ended before."""
        return self._end(request, FinishReason.ABORT)

    async def _serve(self) -> None:
        """Step while there is work; sleep while there is none, until a request wakes it."""
        try:
            while True:
                batch = self.batcher.plan(self._clock())
                if batch:
                    await self._step(batch)
                    self.steps += 1
                    await asyncio.sleep(0)  # even a model that never waits leaves the clients a moment to read
                else:
                    self._work.clear()
                    await self._work.wait()
        except (Exception, asyncio.CancelledError) as error:
            if self._stopping:
                raise
            self._fault = f"{type(error).__name__}: {error}"  # of the server itself: nobody may be left waiting for it
            self._end_all(FinishReason.ERROR, f"the server failed: {self._fault}")

    async def _step(self, batch: Batch) -> None:
        """Run one step and hand out what came of it. If the model fails, it fails those in the step and no others."""
        for piece in batch:
            self.trace.enter(piece.request.id, Stage.RUNNER, self._clock())
        try:
            tokens = await self.model.run(batch)
        except (Exception, asyncio.CancelledError) as error:
            if self._is_cancelled():  # this loop itself, not something inside the model
                raise
            for piece in batch:
                self._end(piece.request, FinishReason.ERROR, f"the model failed: {error!r}")
            return
        for piece, token in zip(batch, tokens, strict=True):
            try:
                self.tokenizer.token_bytes(0 if token is None else token)
            except ValueError as error:
                self._end(piece.request, FinishReason.ERROR, f"the model gave a token that is none: {error}")
        for event in self.batcher.commit(batch, tokens, self._clock()):
            self._deliver(event)

    @staticmethod
    def _is_cancelled() -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    def _deliver(self, event: Event) -> None:
        """Turn a token into text for its client. A stop string in the text ends the request; a stop token has none."""
        request, token, reason, _ = event
        detokenizer = self._streams[request.id].detokenizer
        self.trace.enter(request.id, Stage.DETOKENIZER, self._clock())
        text = "" if token is None or reason is FinishReason.STOP else detokenizer.push([token])
        if detokenizer.stopped is not None and reason is FinishReason.LENGTH:
            request.stop_after_all()
        elif detokenizer.stopped is not None:
            self.batcher.finish(request, FinishReason.STOP, self._clock())
        if request.finished:
            self._close(request, token, text)
        else:
            self.trace.enter(request.id, Stage.SCHEDULER, self._clock())
            self._streams[request.id].put(Delta(token, text))

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> bool:
        """End a request from outside a step, and tell its client. False if the client has been told of an end."""
        if request.id not in self._streams:
            return False
        self.batcher.finish(request, reason, self._clock(), error)
        self._close(request, None, "")
        return True

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        for stream in list(self._streams.values()):
            self._end(stream.request, reason, error)

    def _close(self, request: Request, token: int | None, text: str) -> None:
        """The last a client hears: what was held back of its text, and the reason of the end."""
        stream = self._streams.pop(request.id)
        self.trace.leave(request.id, self._clock())
        stream.put(Delta(token, text + stream.detokenizer.flush(), request.finish_reason))
