"""MockServer: an asyncio server with every part of a real one. Only the model is a mock.

submit -> API adapter -> tokenizer -> scheduler -> model runner -> detokenizer -> the client's stream
                                          ^                              |
                                          +------- one token later ------+
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from phase0_request.batch import Batch, Event, StepOutput
from phase0_request.core import EngineCore
from phase0_request.detokenizer import Transcript
from phase0_request.lab.batcher import Batcher
from phase0_request.lab.trace import PipelineStage, RequestTracer
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import Tokenizer


class Model(Protocol):
    """The model interface of the server."""

    def check(self, params: SamplingParams) -> None: ...

    async def run(self, batch: Batch) -> Sequence[int | None]: ...


class StreamedToken(NamedTuple):
    """One item of a stream: a token and the text that it makes available. The last item has the finish reason."""

    token: int | None
    text: str
    finish_reason: FinishReason | None = None


class TokenStream:
    """The client's side of one request: an async iterator of StreamedToken that ends after the finish reason."""

    def __init__(self, request: Request, transcript: Transcript) -> None:
        self.request = request
        self.transcript = transcript
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


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step in a task of the event loop. Its output may be read once the task is done."""

    batch: Batch
    task: asyncio.Future[Sequence[int | None]]
    tokenizer: Tokenizer

    def output(self) -> StepOutput:
        """If the model fails, all requests of the step fail; if it returns an invalid token, the request of that."""
        try:
            tokens = self.task.result()
        except (Exception, asyncio.CancelledError) as error:
            why = f"the model failed: {error!r}"
            return StepOutput([None] * len(self.batch), dict.fromkeys(range(len(self.batch)), why))
        failed = {}
        for number, token in enumerate(tokens):
            try:
                self.tokenizer.token_bytes(0 if token is None else token)
            except ValueError as error:
                failed[number] = f"the model returned an invalid token: {error}"
        return StepOutput([*tokens], failed)


class MockRunner:
    """Runs each step of a model in a task, as a device would: the host does not wait for it."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.task: asyncio.Future[Sequence[int | None]] | None = None  # of the newest step

    def pack(self, batch: Batch) -> Batch:
        return batch

    def launch(self, batch: Batch) -> RunningStep:
        self.task = asyncio.ensure_future(self.model.run(batch))
        return RunningStep(batch, self.task, self.tokenizer)


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
        self.runner = MockRunner(model, tokenizer)
        self.core = EngineCore(self.batcher, self.runner, clock)
        self.trace = RequestTracer()
        self._clock = clock
        self._streams: dict[str, TokenStream] = {}
        self._numbers = itertools.count(1)
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "MockServer":
        self._loop = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop

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
        if self._loop is None or self._loop.done():
            raise RuntimeError("the server is not running; use it as `async with MockServer(...) as server`")
        params = params or SamplingParams()
        arrival = self._clock()
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"prompt must be a text of at least one character, got {prompt!r}")
        self.model.check(params)
        entered_tokenizer = self._clock()
        tokens = self.tokenizer.encode(prompt)
        request = Request(f"request-{next(self._numbers)}", tuple(tokens), params, priority, arrival)
        stream = TokenStream(request, Transcript(params, self.tokenizer))
        self.core.submit(request)
        self._streams[request.id] = stream
        self.trace.enter(request.id, PipelineStage.API, arrival)
        self.trace.enter(request.id, PipelineStage.TOKENIZER, entered_tokenizer)
        self.trace.enter(request.id, PipelineStage.SCHEDULER, self._clock())
        self._work.set()
        return stream

    def abort(self, request: Request) -> bool:
        """Abort a request in any state. False if its stream has ended."""
        if request.id not in self._streams:
            return False
        self.core.abort(request)
        self._close(request, None, self._streams[request.id].transcript.add(None, FinishReason.ABORT))
        return True

    async def _serve(self) -> None:
        """The serving loop: run steps while there is work, else sleep until a request arrives."""
        try:
            while True:
                if self.core.has_work:
                    await self._step()
                    await asyncio.sleep(0)  # let the clients read, even if the model never yields
                else:
                    self._work.clear()
                    await self._work.wait()
        finally:
            for stream in list(self._streams.values()):  # no client may wait for a loop that has stopped
                self.abort(stream.request)

    async def _step(self) -> None:
        """Launch a step, wait for its task, complete it, and deliver its events."""
        step = self.core.launch()
        if step is None:
            self.core.drain()  # of requests that were aborted: their streams have ended
            return
        for request, *_ in step.batch:
            self.trace.enter(request.id, PipelineStage.RUNNER, self._clock())
        assert self.runner.task is not None
        try:
            await asyncio.wait([self.runner.task])
        finally:
            self.runner.task.cancel()  # if the server stops; no effect on a task that is done
        for event in self.core.complete().events:
            self._deliver(event)

    def _deliver(self, event: Event) -> None:
        """Stream the text of a token. A stop string in it ends the request."""
        request, token, reason, _ = event
        stream = self._streams.get(request.id)
        if stream is None:
            return  # its stream has ended: it was aborted
        self.trace.enter(request.id, PipelineStage.DETOKENIZER, self._clock())
        text = stream.transcript.add(token, reason)
        if stream.transcript.finish_reason is FinishReason.STOP:
            self.core.stop(request)
        if request.finished:
            self._close(request, token, text)
        else:
            self.trace.enter(request.id, PipelineStage.SCHEDULER, self._clock())
            stream.put(StreamedToken(token, text))

    def _close(self, request: Request, token: int | None, text: str) -> None:
        """Send the last item of a stream, with the finish reason."""
        self.trace.enter(request.id, None, self._clock())
        self._streams.pop(request.id).put(StreamedToken(token, text, request.finish_reason))
