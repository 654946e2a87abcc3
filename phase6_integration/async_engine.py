"""AsyncEngine: runs an engine in a process of its own and serves it on an asyncio event loop.

Requests go in with `submit`; an OutputStream yields their text as the engine generates it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import Enum
from typing import NamedTuple, Protocol

import msgspec

from phase0_request import safe_path
from phase0_request.queue import QueueFullError
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.threads import threads_for
from phase5_continuous.deadlines import Deadlines
from phase6_integration.hub import directory_of
from phase6_integration.messages import (
    Dead,
    EngineRequest,
    Finish,
    Frames,
    Load,
    Logged,
    Ready,
    ToEngine,
    ToFront,
    Update,
    frame,
)
from phase6_integration.options import EngineOptions, openmp_environment
from phase6_integration.outputs import OutputProcessor, OutputState, OutputStream
from phase6_integration.stats import Gauges
from phase6_integration.watchdog import Watchdog

log = logging.getLogger(__name__)
engine_log = logging.getLogger(f"{__name__}.process")  # records of the engine process
BUNDLED_ENGINE = "phase6_integration.engine_process:bundled_engine"
STOP_TIMEOUT = 5.0  # seconds the engine has to abort its requests, and its process to exit, before it is killed


class Health(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # refuses new requests; running ones are completed
    HUNG = "hung"  # has requests, and has sent nothing for too long
    DEAD = "dead"
    STOPPED = "stopped"  # closed, or never started


class UnavailableError(RuntimeError):
    """The engine cannot take requests: `health` and `reason` say why."""

    def __init__(self, health: Health, reason: str) -> None:
        super().__init__(f"the engine is {health.value}: {reason}")
        self.health = health
        self.reason = reason


class StepReport(NamedTuple):
    """Statistics of one step."""

    prefill_tokens: int
    decode_tokens: int
    seconds: float
    gauges: Gauges
    prompt_tokens: int = 0  # lengths of the prompts that got their first token
    generated: int = 0  # tokens


class Observer(Protocol):
    """Called after every step and every finished request; metrics are one."""

    def stepped(self, report: StepReport) -> None: ...

    def finished(self, request: EngineRequest, state: OutputState, reason: FinishReason) -> None: ...


class AsyncEngine:
    """The HTTP process's handle of an engine process. Everything runs on one event loop, without blocking it."""

    def __init__(self, options: EngineOptions | None = None, *, factory: str = BUNDLED_ENGINE) -> None:
        """Read the model's config and tokenizer. `factory`, a `module:name`, builds the engine in its process."""
        options = options or EngineOptions()
        directory = directory_of(options.model, options.revision)
        self.config = ModelConfig.from_pretrained(directory)
        threads = options.threads or threads_for(self.config)
        self.options = replace(options, model=str(directory), revision=None, threads=threads)
        self.tokenizer = Tokenizer.from_pretrained(directory) if (directory / "tokenizer.json").exists() else None
        self.max_model_len = min(
            self.config.max_position_embeddings, options.max_model_len or self.config.max_position_embeddings
        )
        self.health = Health.STOPPED
        self.reason = "it has not been started"
        self.gauges = Gauges()
        self.ready_info: Ready | None = None
        self.observers: list[Observer] = []
        self._factory = factory
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._warm: asyncio.Future[list[int]] | None = None  # loads the template library, which takes a second or two
        self._load_ended = asyncio.Event()  # ready, or failed
        self._idle = asyncio.Event()
        self._live: dict[str, tuple[OutputProcessor, OutputStream]] = {}  # by id, until the engine reports the end
        self._waiting: set[str] = set()  # ids of live requests that are not admitted yet
        self._watchdog = Watchdog(self.options.hang_timeout, has_work=lambda: bool(self._live), on_hang=self._hung)

    # Start.

    async def start(self) -> None:
        """Start the engine process, which loads the model. Returns at once; `ready` waits for it."""
        if self.health is not Health.STOPPED or self._load_ended.is_set():
            raise RuntimeError("an engine can be started only once")
        ours, theirs = socket.socketpair()
        self.spawn(theirs)
        self.health, self.reason = Health.LOADING, "the model is being loaded"
        loop = asyncio.get_running_loop()
        if self.tokenizer is not None and self.tokenizer.chat_template is not None:
            self._warm = loop.run_in_executor(None, self.tokenizer.chat, [{"role": "user", "content": "Hello"}])
            self._warm.add_done_callback(lambda warm: warm.cancelled() or warm.exception())
        transport, _ = await loop.create_unix_connection(lambda: _EngineProtocol(self), sock=ours)
        self._transport = transport
        self._send(Load(self.options, self._factory))

    def spawn(self, end: socket.socket) -> None:
        """Start the engine process with its end of the socket pair."""
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "phase6_integration.engine_process", str(end.fileno()), str(os.getpid())],
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # so that Ctrl-C reaches this process only
                env={**safe_path.environment(), **openmp_environment(self.options.threads or 1)},
            )

    async def ready(self) -> None:
        """Wait until the engine takes requests. UnavailableError if it has failed."""
        await self._load_ended.wait()
        if self._warm is not None:
            await asyncio.wait([self._warm])
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

    # region submit
    def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        """Submit all requests, or none. ValueError if one can never be served, QueueFullError if too many wait,
        UnavailableError if the engine is not ready."""
        if self.health is not Health.READY:
            raise UnavailableError(self.health, self.reason)
        if not requests:
            raise ValueError("at least one request is needed")
        limit = self.options.max_num_queued_reqs
        if len(requests) > limit:
            raise ValueError(f"{len(requests)} completions are requested at once; at most {limit} may wait")
        if len(self._waiting) + len(requests) > limit:
            raise QueueFullError(limit)
        for request in requests:
            self._check(request)
        if len({request.id for request in requests} | self._live.keys()) < len(requests) + len(self._live):
            raise ValueError("a request id must be unique among unfinished requests")
        now = time.monotonic()
        stamped = [msgspec.structs.replace(request, arrival=now) for request in requests]
        outputs = [OutputProcessor(index, request, self.tokenizer) for index, request in enumerate(stamped)]
        stream = OutputStream(outputs, self.abort)
        if not self._live:
            self._watchdog.reset()
            self._idle.clear()
        for output in outputs:
            request = output.request
            self._live[request.id] = output, stream
            self._waiting.add(request.id)
            self._send(request)
        return stream

    # endregion

    def abort(self, outputs: Sequence[OutputProcessor]) -> None:
        """Abort requests, of which some may have finished."""
        for output in outputs:
            self._finish_early(output, FinishReason.ABORT)

    def _finish_early(self, output: OutputProcessor, reason: FinishReason, error: str | None = None) -> None:
        """Send the client its last chunk now, and have the engine abort the request."""
        if not output.done:
            self._live[output.request.id][1].put(output.finish(reason, error))
            self._send(Finish(output.request.id, FinishReason.ABORT))

    def _check(self, request: EngineRequest) -> None:
        """Refuse here what the engine would refuse: the request's own limits, the vocabulary and the context."""
        Request(request.id, request.prompt, request.params, request.priority, cache_salt=request.cache_salt)
        Deadlines(total=request.timeout)
        for text in (request.id, request.cache_salt):
            text.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
        vocabulary, params = self.config.vocab_size, request.params
        for token in (max(request.prompt), *params.stop_token_ids, *dict(params.logit_bias)):
            if token >= vocabulary:
                raise ValueError(f"token ids of this model run from 0 to {vocabulary - 1}, got {token}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which this model has not; use stop_token_ids")
        if len(request.prompt) + params.max_tokens > self.max_model_len:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {params.max_tokens}; "
                f"together they may be {self.max_model_len}"
            )

    # Messages of the engine.

    def handle(self, message: ToFront) -> None:
        self._watchdog.reset()
        match message:
            case Update():
                self._update(message)
            case Ready():
                self.ready_info = message
                self.max_model_len = message.max_model_len
                self.gauges = Gauges(pages_total=message.pages, pages_free=message.pages)
                if self.health is Health.LOADING:
                    self.health, self.reason = Health.READY, "ready"
                self._load_ended.set()
                self._watchdog.start()
            case Logged(level=level, text=text):
                engine_log.log(level, text)
            case Dead():
                self._fail(Health.DEAD, message.reason)

    # region update
    def _update(self, update: Update) -> None:
        """Pass the results of a step to their streams. A stop string is found here, and then the engine is notified."""
        self.gauges = update.gauges
        for started in update.started:
            output, stream = self._live[started.id]
            output.state.times.admitted, output.state.cached_tokens = started.admitted, started.cached
            self._waiting.discard(started.id)
            stream.mark_admitted()
        reasons = {ended.id: ended.reason for ended in update.ended}
        prompt_tokens = 0
        for new in update.outputs:
            output, stream = self._live[new.id]
            if output.done:
                continue
            if not output.state.generated:
                prompt_tokens += len(output.request.prompt)
            if new.prompt_logprobs is not None:
                output.state.prompt_logprobs = new.prompt_logprobs
            try:
                chunk = output.append(new.token, new.logprobs, reasons.get(new.id), update.at)
            except Exception:
                log.exception("detokenizing request %s failed", new.id)
                chunk = output.finish(FinishReason.ERROR, "its text cannot be made")
            if chunk is None:
                continue
            stream.put(chunk)
            if chunk.finish_reason is not None and new.id not in reasons:
                stopped = chunk.finish_reason is FinishReason.STOP
                self._send(Finish(new.id, FinishReason.STOP if stopped else FinishReason.ABORT))
        for ended in update.ended:
            self._end(ended.id, ended.reason, ended.error, update.at)
        tokens = update.prefill_tokens, update.decode_tokens
        report = StepReport(*tokens, update.seconds, update.gauges, prompt_tokens, len(update.outputs))
        for observer in self.observers:
            observer.stepped(report)

    # endregion

    def _end(self, id: str, reason: FinishReason, error: str | None, at: float) -> None:
        """Remove a request after the engine's last message about it."""
        output, stream = self._live.pop(id)
        self._waiting.discard(id)
        output.state.times.finish(at)
        if not output.done:
            stream.put(output.finish(reason, error))
        for observer in self.observers:
            observer.finished(output.request, output.state, output.reason or reason)
        if not self._live:
            self._idle.set()

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    # Failure and shutdown.

    def lost(self) -> None:
        """Called when the channel closes: the engine process has exited or is about to."""
        if self.health not in (Health.STOPPED, Health.DEAD, Health.HUNG):
            code = self._process.poll() if self._process else None
            self._fail(Health.DEAD, "its process has ended" + (f" with status {code}" if code is not None else ""))

    def _hung(self) -> None:
        self._fail(Health.HUNG, f"it has requests and has sent nothing for {self._watchdog.limit:g} seconds")

    def _fail(self, health: Health, reason: str) -> None:
        """Kill the engine process and end every live request with an error."""
        log.error("the engine is %s: %s", health.value, reason)
        self.health, self.reason = health, reason
        self._load_ended.set()
        self._kill()
        self._end_all(f"the engine is {health.value}")

    def _end_all(self, error: str) -> None:
        now = time.monotonic()
        for id in list(self._live):
            self._end(id, FinishReason.ERROR, error, now)
        self.gauges = replace(self.gauges, running=0, waiting=0, pages_used=0)

    def _kill(self) -> None:
        self._watchdog.stop()
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            self._process.kill()

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait for the live ones. Those that remain after `timeout` end with an error."""
        if self.health is Health.READY:
            self.health, self.reason = Health.DRAINING, "it is about to stop"
        if await self._is_idle(timeout):
            return
        for output, _ in list(self._live.values()):
            self._finish_early(output, FinishReason.ERROR, "the server is stopping")
        await self._is_idle(STOP_TIMEOUT)

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
        self._end_all("the engine was closed")
        self._watchdog.stop()
        if self._transport is not None:
            self._transport.close()  # the engine reads EOF and exits
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            if self.ready_info is not None:  # while loading it reads nothing
                await _end_of(process)
        finally:
            process.kill()  # no effect if it has exited; also on cancellation
        await _end_of(process)


async def _end_of(process: "subprocess.Popen[bytes]") -> None:
    """Wait STOP_TIMEOUT for the process to exit, in a thread of its own: the loop's executor may be blocked."""
    waiter = ThreadPoolExecutor(1)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.get_running_loop().run_in_executor(waiter, process.wait, STOP_TIMEOUT)
    finally:
        waiter.shutdown(wait=False)


class _EngineProtocol(asyncio.Protocol):
    """Decodes the engine's messages and passes them to AsyncEngine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._frames = Frames.for_front()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._engine.handle(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.lost()
