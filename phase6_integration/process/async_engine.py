"""AsyncEngine: runs an engine in a process of its own and serves it on an asyncio event loop.

Requests go in with `submit`; an OutputStream yields their text as the engine generates it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from phase0_request.queue import QueueFullError
from phase0_request.request import FinishReason
from phase0_request.support.checks import check_number
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.connect import check_params
from phase6_integration.engine.located import located
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.stats import Gauges
from phase6_integration.process.engine_client import BUNDLED_ENGINE, STOP_TIMEOUT, EngineClient
from phase6_integration.process.health import Health, UnavailableError
from phase6_integration.process.messages import (
    EngineRequest,
    Finish,
    Logged,
    Progress,
    Ready,
    SideMessage,
    ToEngine,
    Update,
)
from phase6_integration.process.outputs import Details, Output, OutputStream

log = logging.getLogger(__name__)
RESTART_DELAY = 1.0  # seconds before the first restart; each further one doubles it
MAX_RESTART_DELAY = 30.0
STABLE = 600.0  # seconds that an engine must run for its earlier restarts to be forgotten


class Observer:
    """Called for every step, and every completion that has finished; for messages of extras, and when the engine ends.
    A method that an observer does not define does nothing."""

    def stepped(self, update: Update, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has run a step. The counts are for the prompts whose first output token it drew."""

    def finished(self, stream: OutputStream, output: Output, reason: FinishReason) -> None:
        """A completion, one of the outputs of its stream, has finished."""

    def received(self, message: SideMessage) -> None:
        """An extra in the engine process has sent a message."""

    def ended(self) -> None:
        """The engine's process has failed or is about to end, and sends nothing more."""


class AsyncEngine:
    """The HTTP process's handle of the engine. It runs on one event loop, without blocking it."""

    client_type = EngineClient
    has_side_messages = True  # it has a process of its own, whose extras can be sent messages

    def __init__(self, options: EngineOptions | None = None, *, factory: str = BUNDLED_ENGINE) -> None:
        """Read the model's config and tokenizer. `factory`, a `module:name`, builds the engine in its process."""
        self.options, self.config = located(options or EngineOptions())
        directory = Path(self.options.tokenizer or self.options.model)
        self.tokenizer: Tokenizer | None = None  # of a model without one, clients send and get token ids
        if self.options.tokenizer is not None or Tokenizer.is_in(directory):
            self.tokenizer = Tokenizer.from_pretrained(directory)
        claimed = self.config.max_position_embeddings
        self.max_model_len = min(claimed, self.options.context(claimed))
        self.health = Health.STOPPED
        self.reason = "it has not been started"
        self.gauges = Gauges()
        self.ready_info: Ready | None = None
        self.observers: list[Observer] = []
        self.details: Callable[[], Details] | None = None  # makes what an extra keeps of an output
        self.restarts = 0
        self.failed = asyncio.Event()  # the engine is hung or dead, and is not started again
        self._factory = factory
        self._client: EngineClient | None = None  # of the current process
        self._load_ended = asyncio.Event()  # ready, or failed
        self._ready_at = 0.0
        self._failures = 0  # in succession: a process that ran for STABLE seconds ends the row
        self._restarting: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._live: dict[str, tuple[Output, OutputStream]] = {}  # by id, until the engine reports the end
        self._waiting: set[str] = set()  # ids of live completions that are not admitted yet

    # Start.

    async def start(self) -> None:
        """Start the engine process, which loads the model. Returns at once; `ready` waits for it."""
        if self.health is not Health.STOPPED or self._load_ended.is_set():
            raise RuntimeError("an engine can be started only once")
        self.health, self.reason = Health.LOADING, "the model is being loaded"
        await self._start_process()

    async def _start_process(self) -> None:
        self._client = self.client_type(
            self.options,
            self._factory,
            on_message=self.handle,
            on_failure=self._process_failed,
            has_work=lambda: bool(self._live),
        )
        await self._client.start()

    async def ready(self) -> None:
        """Wait until the engine takes requests. UnavailableError if it has failed."""
        await self._load_ended.wait()
        if self.health is not Health.READY:
            raise UnavailableError(self.health, self.reason)

    async def __aenter__(self) -> "AsyncEngine":
        await self.start()
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Requests.

    @property
    def unfinished(self) -> int:
        """The number of submitted requests that have not finished."""
        return len({stream for _, stream in self._live.values()})

    def submit(self, request: EngineRequest) -> OutputStream:
        """Submit all completions of a request, or none. ValueError if it can never be served, QueueFullError if too
        many wait, UnavailableError if the engine is not ready."""
        if self.health is not Health.READY:
            raise UnavailableError(self.health, self.reason)
        count, client = len(request.numbers), request.client
        limit = self.options.max_num_queued_reqs
        share = self.options.queued_per_client if client else limit
        if count > share:
            raise ValueError(f"{count} completions are requested at once; at most {share} may wait")
        if len(self._waiting) + count > limit:
            raise QueueFullError(limit)
        if sum(self._live[id][1].request.client == client for id in self._waiting) + count > share:
            raise QueueFullError(share)
        self._check(request)
        request = msgspec.structs.replace(request, arrival=time.monotonic())
        stream = OutputStream(request, self.tokenizer, self.abort)
        live = {output.id: (output, stream) for output in stream.outputs}
        if live.keys() & self._live.keys():
            raise ValueError("a request id must be unique among unfinished requests")
        if not self._live:
            self._idle.clear()
            if self._client is not None:
                self._client.watchdog.work_begins()
        self._live |= live
        self._waiting |= live.keys()
        self._send(request)
        return stream

    def abort(self, stream: OutputStream) -> None:
        """Abort the completions of a request that have not finished."""
        for output in stream.outputs:
            self._finish_early(output, FinishReason.ABORT)

    def _finish_early(self, output: Output, reason: FinishReason, error: UnavailableError | None = None) -> None:
        """Send the client its last chunk now, and have the engine abort the completion."""
        if not output.done:
            self._live[output.id][1].put(output.finish(reason, error))
            self._send(Finish(output.id, FinishReason.ABORT))

    def _check(self, request: EngineRequest) -> None:
        """Raise a ValueError for a request that the engine would refuse."""
        request.id.encode(), request.cache_salt.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
        if request.timeout is not None:
            check_number(f"request {request.id}: timeout", request.timeout, 0, above=True)
        for number in range(0, len(request.prompts) * request.n, request.n):  # a completion of each prompt
            completion = request.completion(number)
            check_params(completion.params)
            completion.check_fits(self.config.vocab_size, self.max_model_len, self.tokenizer is not None)

    # Messages of the engine.

    def handle(self, message: Ready | Update | SideMessage | Logged) -> None:
        match message:
            case Update():
                self._update(message)
            case SideMessage():
                for observer in self.observers:
                    observer.received(message)
            case Ready():
                self._process_ready(message)
            case Logged(text=text) if self.health is Health.LOADING:
                self.reason = text  # its progress

    def _process_ready(self, ready: Ready) -> None:
        """Take requests from now on."""
        self.ready_info, self._ready_at = ready, time.monotonic()
        self.max_model_len = ready.max_model_len
        self.gauges = Gauges(pages_total=ready.pages, pages_free=ready.pages)
        if self.health is Health.LOADING:
            self.health, self.reason = Health.READY, "ready"
        self._load_ended.set()

    def _update(self, update: Update) -> None:
        """Pass the results of a step to their streams."""
        self.gauges = update.gauges
        prompt_tokens = cached_tokens = 0
        for progress in update.progress:
            output, stream = self._live[progress.id]
            if progress.admitted is not None:
                output.times.admitted, output.cached_tokens = progress.admitted, progress.cached
                self._waiting.discard(progress.id)
            if progress.token is not None and not output.done:
                if not output.generated:
                    prompt_tokens += output.prompt_tokens
                    cached_tokens += output.cached_tokens
                self._add_token(output, stream, progress, progress.token, update.at)
            if progress.finish_reason is not None:
                self._end(progress.id, progress.finish_reason, update.at, progress.error)
        for observer in self.observers:
            observer.stepped(update, prompt_tokens, cached_tokens)

    def _add_token(self, output: Output, stream: OutputStream, progress: Progress, token: int, at: float) -> None:
        """Turn a token into text. A stop string is found here; the engine is then notified."""
        if progress.more is not None and self.details is not None:
            output.details = output.details or self.details()
            output.details.add(progress.more)
        try:
            chunk = output.append(token, progress.finish_reason, at)
        except Exception:
            log.exception("detokenizing request %s failed", output.id)
            chunk = output.finish(FinishReason.ERROR, "its text cannot be made")
        if chunk is None:
            return
        stream.put(chunk)
        if chunk.finish_reason is not None and progress.finish_reason is None:
            stopped = chunk.finish_reason is FinishReason.STOP
            self._send(Finish(output.id, FinishReason.STOP if stopped else FinishReason.ABORT))

    def _end(self, id: str, reason: FinishReason, at: float, error: str | UnavailableError | None = None) -> None:
        """Remove a completion after the engine's last message about it, or because its engine has failed."""
        output, stream = self._live.pop(id)
        self._waiting.discard(id)
        output.times.finished = at
        if not output.done:
            stream.put(output.finish(reason, error))
        for observer in self.observers:
            observer.finished(stream, output, output.reason or reason)
        if not self._live:
            self._idle.set()

    def send(self, message: SideMessage) -> None:
        """Send a message to the other side of an extra."""
        self._send(message)

    def _send(self, message: ToEngine) -> None:
        if self._client is not None:
            self._client.send(message)

    # Failure and shutdown.

    def _process_failed(self, health: Health, reason: str) -> None:
        """End all requests, and start another process, up to `max_engine_restarts` in a row. One that fails to load the
        first time is not followed by another: that would fail as well."""
        log.error("the engine is %s: %s", health.value, reason)
        if self.health is Health.READY and time.monotonic() - self._ready_at > STABLE:
            self._failures = 0
        may_restart = self.ready_info is not None and self.health in (Health.READY, Health.LOADING)
        self._end_all(health, reason)
        if may_restart and self._failures < self.options.max_engine_restarts:
            self._failures += 1
            self.restarts += 1
            self.health, self.reason = Health.LOADING, f"it was {health.value} and is started again: {reason}"
            self._restarting = asyncio.create_task(self._restart())
        else:
            self.health, self.reason = health, reason
            self._load_ended.set()
            self.failed.set()

    async def _restart(self) -> None:
        """Wait for the failed process to exit, so that its memory is free, and start another."""
        assert self._client is not None
        try:
            await self._client.stop()
            await asyncio.sleep(min(RESTART_DELAY * 2 ** (self._failures - 1), MAX_RESTART_DELAY))
            await self._start_process()
        except Exception as error:  # of any kind: else clients would wait for an engine that never comes
            self._process_failed(Health.DEAD, f"its process cannot be started: {error}")

    def _end_all(self, health: Health, reason: str) -> None:
        """End live requests with an error."""
        now = time.monotonic()
        for id in list(self._live):
            self._end(id, FinishReason.ERROR, now, UnavailableError(health, reason))
        self._end_observers()
        self.gauges = replace(self.gauges, running=0, waiting=0, pages_used=0)

    def _end_observers(self) -> None:
        for observer in self.observers:
            observer.ended()

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait for the live ones. Those that remain after `timeout` end with an error."""
        if self.health in (Health.READY, Health.LOADING):
            self.health, self.reason = Health.DRAINING, "it is about to stop"
        if not await self._is_idle(timeout):
            for output, _ in list(self._live.values()):
                self._finish_early(output, FinishReason.ERROR, UnavailableError(self.health, self.reason))
            await self._is_idle(STOP_TIMEOUT)
        self._end_observers()

    async def _is_idle(self, timeout: float) -> bool:
        """Whether the engine has ended every request, now or before the time is up."""
        if self._live:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)
        return not self._live

    async def close(self) -> None:
        """End every live request and the engine process. May be called repeatedly."""
        if self.health is not Health.STOPPED:
            self.health, self.reason = Health.STOPPED, "it was closed"
        self._load_ended.set()
        self._end_all(Health.STOPPED, self.reason)
        if self._restarting is not None:
            self._restarting.cancel()
        if self._client is not None:
            await self._client.stop()
