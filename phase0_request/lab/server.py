"""MockServer: an asyncio server with every part of a real one. Only the model is a mock.

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
from phase0_request.lab.trace import PipelineStage, RequestTracer
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import Tokenizer


class Model(Protocol):
    """The model interface of the server."""

    def check(self, params: SamplingParams) -> None: ...

    async def run(self, batch: Batch) -> StepTokens: ...


class StreamedToken(NamedTuple):
    """One item of a stream: a token and the text that it makes available. The last item has the finish reason."""

    token: int | None
    text: str
    finish_reason: FinishReason | None = None


class TokenStream:
    """The client's side of one request: an async iterator of StreamedToken that ends after the finish reason."""

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self._items: asyncio.Queue[StreamedToken] = asyncio.Queue()
        self._ended = False

    def put(self, item: StreamedToken) -> None:
        self._items.put_nowait(item)

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> StreamedToken:
        if self._ended:
            raise StopAsyncIteration
        item = await self._items.get()
        self._ended = item.finish_reason is not None
        return item


class MockServer:
    """Serves inside `async with MockServer(tokenizer, model) as server`; leaving it aborts unfinished requests."""

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
        self.trace = RequestTracer()
        self.steps = 0
        self._clock = clock
        self._streams: dict[str, TokenStream] = {}
        self._numbers = itertools.count(1)
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._stopping = False

    async def __aenter__(self) -> "MockServer":
        if self._loop is not None:
            raise RuntimeError("the server is running already")
        self._stopping, self._failure = False, None
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
    ) -> AsyncGenerator[StreamedToken, None]:
        """Stream the answer to a prompt. Closing the generator early aborts the request."""
        stream = self.submit(prompt, params, priority)
        try:
            async for item in stream:
                yield item
        finally:
            self.abort(stream.request)

    def submit(self, prompt: str, params: SamplingParams | None = None, priority: int = 0) -> TokenStream:
        """Submit a request. Raises ValueError if it is invalid and QueueFullError if the queue is full."""
        if self._loop is None:
            raise RuntimeError("the server is not running; use it as `async with MockServer(...) as server`")
        if self._failure is not None:
            raise RuntimeError(f"the server has stopped: {self._failure}")
        params = params or SamplingParams()
        arrival = self._clock()
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt must be a text of at least one character, got {prompt!r}")
        self.model.check(params)
        entered_tokenizer = self._clock()
        tokens = self.tokenizer.encode(prompt)
        request = Request(f"request-{next(self._numbers)}", tuple(tokens), params, priority, arrival)
        stream = TokenStream(request, Detokenizer(self.tokenizer, params))
        self.batcher.submit(request)
        self._streams[request.id] = stream
        self.trace.enter(request.id, PipelineStage.API, arrival)
        self.trace.enter(request.id, PipelineStage.TOKENIZER, entered_tokenizer)
        self.trace.enter(request.id, PipelineStage.SCHEDULER, self._clock())
        self._work.set()
        return stream

    def abort(self, request: Request) -> bool:
        """Abort a request in any state. False if it is finished already."""
        return self._end(request, FinishReason.ABORT)

    async def _serve(self) -> None:
        """The serving loop: run steps while there is work, else sleep until a request arrives."""
        try:
            while True:
                batch = self.batcher.plan(self._clock())
                if batch:
                    await self._step(batch)
                    self.steps += 1
                    await asyncio.sleep(0)  # let the clients read, even if the model never yields
                else:
                    self._work.clear()
                    await self._work.wait()
        except (Exception, asyncio.CancelledError) as error:
            if self._stopping:
                raise
            self._failure = f"{type(error).__name__}: {error}"  # a bug of the server: no client may wait for ever
            self._end_all(FinishReason.ERROR, f"the server failed: {self._failure}")

    async def _step(self, batch: Batch) -> None:
        """Run one step and deliver its events. If the model fails, only the requests of this step end with an error."""
        for piece in batch:
            self.trace.enter(piece.request.id, PipelineStage.RUNNER, self._clock())
        try:
            tokens = await self.model.run(batch)
        except (Exception, asyncio.CancelledError) as error:
            if self._is_cancelled():  # the serving loop was cancelled, not a task inside the model
                raise
            for piece in batch:
                self._end(piece.request, FinishReason.ERROR, f"the model failed: {error!r}")
            return
        for piece, token in zip(batch, tokens, strict=True):
            try:
                self.tokenizer.token_bytes(0 if token is None else token)
            except ValueError as error:
                self._end(piece.request, FinishReason.ERROR, f"the model returned an invalid token: {error}")
        for event in self.batcher.commit(batch, tokens, self._clock()):
            self._deliver(event)

    @staticmethod
    def _is_cancelled() -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    def _deliver(self, event: Event) -> None:
        """Stream the text of a token. A stop string in it ends the request; a stop token has no text."""
        request, token, reason, _ = event
        detokenizer = self._streams[request.id].detokenizer
        self.trace.enter(request.id, PipelineStage.DETOKENIZER, self._clock())
        text = "" if token is None or reason is FinishReason.STOP else detokenizer.push([token])
        if detokenizer.stopped is not None and reason is FinishReason.LENGTH:
            request.stop_after_all()
        elif detokenizer.stopped is not None:
            self.batcher.finish(request, FinishReason.STOP, self._clock())
        if request.finished:
            self._close(request, token, text)
        else:
            self.trace.enter(request.id, PipelineStage.SCHEDULER, self._clock())
            self._streams[request.id].put(StreamedToken(token, text))

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> bool:
        """End a request outside a step and send its finish reason. False if that was sent before."""
        if request.id not in self._streams:
            return False
        self.batcher.finish(request, reason, self._clock(), error)
        self._close(request, None, "")
        return True

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        for stream in list(self._streams.values()):
            self._end(stream.request, reason, error)

    def _close(self, request: Request, token: int | None, text: str) -> None:
        """Send the last item of a stream: the text held back and the finish reason."""
        stream = self._streams.pop(request.id)
        self.trace.leave(request.id, self._clock())
        stream.put(StreamedToken(token, text + stream.detokenizer.flush(), request.finish_reason))
