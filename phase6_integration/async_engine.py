"""AsyncEngine: an engine in a process of its own, seen from an event loop. Ask, and read the answers as they come."""

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

from phase0_request.queue import QueueFullError
from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.threads import threads_for
from phase5_continuous.deadlines import Deadlines
from phase6_integration.answers import Answer, AnswerState, Ask
from phase6_integration.hub import directory_of
from phase6_integration.options import EngineOptions, openmp_environment
from phase6_integration.reply import Reply
from phase6_integration.stats import Gauges
from phase6_integration.watchdog import Watchdog
from phase6_integration.wire import Dead, Finish, Frames, Load, Logged, Ready, Submit, ToEngine, ToFront, Update, frame

log = logging.getLogger(__name__)
engine_log = logging.getLogger(f"{__name__}.process")  # what the engine itself says
BUNDLED_ENGINE = "phase6_integration.engine_process:bundled_engine"
LAST_WORDS = 5.0  # seconds that a process has to end by itself once nobody listens


class Health(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # no new requests; those that live are served to their end
    HUNG = "hung"  # it has work, and has not said a word for too long
    DEAD = "dead"
    STOPPED = "stopped"  # it was closed, or never started


class UnavailableError(RuntimeError):
    """There is no engine to ask, and why."""

    def __init__(self, health: Health, reason: str) -> None:
        super().__init__(f"the engine is {health.value}: {reason}")
        self.health = health
        self.reason = reason


class StepReport(NamedTuple):
    """What one step did."""

    prefill_tokens: int
    decode_tokens: int
    seconds: float
    gauges: Gauges
    answered: int = 0  # tokens of prompts whose first token it yielded
    generated: int = 0  # tokens that it yielded


class Observer(Protocol):
    """Who wants to know of everything, as metrics do."""

    def stepped(self, report: StepReport) -> None: ...

    def finished(self, ask: Ask, state: AnswerState, reason: FinishReason) -> None: ...


class AsyncEngine:
    """The front's side of an engine. All of it happens on one event loop, and none of it waits."""

    def __init__(self, options: EngineOptions | None = None, *, factory: str = BUNDLED_ENGINE) -> None:
        """Reads what is known of the model without loading it. `factory` is what the process makes the engine with."""
        options = options or EngineOptions()
        directory = directory_of(options.model)
        self.config = ModelConfig.from_pretrained(directory)
        self.options = replace(options, model=str(directory), threads=options.threads or threads_for(self.config))
        self.tokenizer = Tokenizer.from_pretrained(directory) if (directory / "tokenizer.json").exists() else None
        self.max_model_len = min(
            self.config.max_position_embeddings, options.max_model_len or self.config.max_position_embeddings
        )
        self.health = Health.STOPPED
        self.reason = "it has not been started"
        self.gauges = Gauges()
        self.ready_word: Ready | None = None
        self.observers: list[Observer] = []
        self._factory = factory
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._warm: asyncio.Future[list[int]] | None = None  # the first chat loads what templates need: a second or two
        self._settled = asyncio.Event()  # it is ready, or never will be
        self._idle = asyncio.Event()
        self._live: dict[str, tuple[Answer, Reply]] = {}  # until the engine's last word on them
        self._waiting: set[str] = set()  # those of them not known to be admitted
        self._watchdog = Watchdog(self.options.hang_timeout, working=lambda: bool(self._live), bark=self._hung)

    # It starts.

    async def start(self) -> None:
        """Start the process, which loads the model. Returns at once; `ready` waits."""
        if self.health is not Health.STOPPED or self._settled.is_set():
            raise RuntimeError("an engine is started once")
        ours, theirs = socket.socketpair()
        self.spawn(theirs)
        self.health, self.reason = Health.LOADING, "the model is being loaded"
        loop = asyncio.get_running_loop()
        if self.tokenizer is not None and self.tokenizer.chat_template is not None:
            self._warm = loop.run_in_executor(None, self.tokenizer.chat, [{"role": "user", "content": "Hello"}])
            self._warm.add_done_callback(lambda warm: warm.cancelled() or warm.exception())
        transport, _ = await loop.create_unix_connection(lambda: _Ear(self), sock=ours)
        self._transport = transport
        self._say(Load(self.options, self._factory))

    def spawn(self, end: socket.socket) -> None:
        """Have the engine at the other end of the line: a process, which loads what a server needs and no more."""
        path = os.pathsep.join(filter(None, sys.path))
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "phase6_integration.engine_process", str(end.fileno()), str(os.getpid())],
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the front; this one could not even ignore it before it has begun
                env={**os.environ, **openmp_environment(self.options.threads or 1), "PYTHONPATH": path},
            )

    async def ready(self) -> None:
        """Returns once requests can be taken; UnavailableError if that will never be."""
        await self._settled.wait()
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

    # Requests come, and are let go of.

    # region submit
    def submit(self, asks: Sequence[Ask]) -> Reply:
        """Take them all in, or none: ValueError for what can never be served, QueueFullError if too many wait,
        UnavailableError if there is no engine to serve them."""
        if self.health is not Health.READY:
            raise UnavailableError(self.health, self.reason)
        if not asks:
            raise ValueError("there is nothing to answer")
        limit = self.options.max_num_queued_reqs
        if len(asks) > limit:
            raise ValueError(f"{len(asks)} answers are asked for at once; at most {limit} may wait")
        if len(self._waiting) + len(asks) > limit:
            raise QueueFullError(limit)
        for ask in asks:
            self._check(ask)
        if len({ask.id for ask in asks} | self._live.keys()) < len(asks) + len(self._live):
            raise ValueError("ids of requests are unique among those that live")
        now = time.monotonic()
        answers = [Answer(index, ask, now, self.tokenizer) for index, ask in enumerate(asks)]
        reply = Reply(answers, self.abort)
        if not self._live:
            self._watchdog.hear()
            self._idle.clear()
        for answer in answers:
            ask = answer.ask
            self._live[ask.id] = answer, reply
            self._waiting.add(ask.id)
            self._say(Submit(ask.id, ask.prompt, ask.params, ask.priority, ask.cache_salt, now, ask.timeout))
        return reply

    # endregion

    def abort(self, answers: Sequence[Answer]) -> None:
        """Nobody reads these any more."""
        for answer in answers:
            self._cut(answer, FinishReason.ABORT)

    def _cut(self, answer: Answer, reason: FinishReason, error: str | None = None) -> None:
        """End an answer for its client here and now. The engine is told, and has the last word later."""
        if not answer.done:
            self._live[answer.ask.id][1].put(answer.end(reason, error))
            self._say(Finish(answer.ask.id, FinishReason.ABORT))

    def _check(self, ask: Ask) -> None:
        """What the engine would refuse later is refused now."""
        Request(ask.id, ask.prompt, ask.params, ask.priority, cache_salt=ask.cache_salt)
        Deadlines(total=ask.timeout)
        for text in (ask.id, ask.cache_salt):
            text.encode()  # half of a surrogate pair is a ValueError, as all else is
        vocabulary, params = self.config.vocab_size, ask.params
        for token in (max(ask.prompt), *params.stop_token_ids, *dict(params.logit_bias)):
            if token >= vocabulary:
                raise ValueError(f"token {token} is not of this model; its ids go to {vocabulary - 1}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings are found in text, and this model has no tokenizer; use stop_token_ids")
        if len(ask.prompt) + params.max_tokens > self.max_model_len:
            raise ValueError(
                f"the prompt has {len(ask.prompt)} tokens and max_tokens is {params.max_tokens}; together they may be "
                f"{self.max_model_len}"
            )

    # The engine speaks.

    def hear(self, message: ToFront) -> None:
        self._watchdog.hear()
        match message:
            case Update():
                self._update(message)
            case Ready():
                self.ready_word = message
                self.max_model_len = message.max_model_len
                self.gauges = Gauges(pages_total=message.pages, pages_free=message.pages)
                if self.health is Health.LOADING:
                    self.health, self.reason = Health.READY, "ready"
                self._settled.set()
                self._watchdog.start()
            case Logged(level=level, text=text):
                engine_log.log(level, text)
            case Dead():
                self._fail(Health.DEAD, message.reason)

    # region update
    def _update(self, update: Update) -> None:
        """Hand out what a step has yielded. An answer may end here, by a stop string: then the engine is told."""
        self.gauges = update.gauges
        for name, admitted, cached in ((one.id, one.admitted, one.cached) for one in update.started):
            answer, reply = self._live[name]
            answer.state.times.admitted, answer.state.cached_tokens = admitted, cached
            self._waiting.discard(name)
            reply.admit()
        reasons = {one.id: one.reason for one in update.ended}
        answered = 0
        for output in update.outputs:
            answer, reply = self._live[output.id]
            if answer.done:
                continue
            if not answer.state.generated:
                answered += len(answer.ask.prompt)
            if output.prompt_logprobs is not None:
                answer.state.prompt_logprobs = output.prompt_logprobs
            try:
                delta = answer.take(output.token, output.logprobs, reasons.get(output.id), update.at)
            except Exception:
                log.exception("the text of request %s cannot be made", output.id)
                delta = answer.end(FinishReason.ERROR, "its text cannot be made")
            if delta is None:
                continue
            reply.put(delta)
            if delta.finish_reason is not None and output.id not in reasons:
                stopped = delta.finish_reason is FinishReason.STOP
                self._say(Finish(output.id, FinishReason.STOP if stopped else FinishReason.ABORT))
        for one in update.ended:
            self._end(one.id, one.reason, one.error, update.at)
        tokens = update.prefill_tokens, update.decode_tokens
        report = StepReport(*tokens, update.seconds, update.gauges, answered, len(update.outputs))
        for observer in self.observers:
            observer.stepped(report)

    # endregion

    def _end(self, name: str, reason: FinishReason, error: str | None, at: float) -> None:
        """The last of a request."""
        answer, reply = self._live.pop(name)
        self._waiting.discard(name)
        answer.state.times.finish(at)
        if not answer.done:
            reply.put(answer.end(reason, error))
        for observer in self.observers:
            observer.finished(answer.ask, answer.state, answer.reason or reason)
        if not self._live:
            self._idle.set()

    def _say(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    # It ends, one way or another.

    def lost(self) -> None:
        """The line is closed: the process has ended, or is about to."""
        if self.health not in (Health.STOPPED, Health.DEAD, Health.HUNG):
            code = self._process.poll() if self._process else None
            self._fail(Health.DEAD, "its process has ended" + (f" with status {code}" if code is not None else ""))

    def _hung(self) -> None:
        self._fail(Health.HUNG, f"it has work and has not said a word for {self._watchdog.limit:g} seconds")

    def _fail(self, health: Health, reason: str) -> None:
        """It will not say another word. Everyone who waits for one is told."""
        log.error("the engine is %s: %s", health.value, reason)
        self.health, self.reason = health, reason
        self._settled.set()
        self._kill()
        self._end_all(f"the engine is {health.value}")

    def _end_all(self, error: str) -> None:
        now = time.monotonic()
        for name in list(self._live):
            self._end(name, FinishReason.ERROR, error, now)
        self.gauges = replace(self.gauges, running=0, waiting=0, pages_used=0)

    def _kill(self) -> None:
        self._watchdog.stop()
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            self._process.kill()

    async def drain(self, timeout: float) -> None:
        """Take no more requests, and serve those that live to their end. Who lives after `timeout` ends in error."""
        if self.health is Health.READY:
            self.health, self.reason = Health.DRAINING, "it is about to stop"
        if await self._is_idle(timeout):
            return
        for answer, _ in list(self._live.values()):
            self._cut(answer, FinishReason.ERROR, "the server is stopping")
        await self._is_idle(LAST_WORDS)

    async def _is_idle(self, timeout: float) -> bool:
        """Whether the engine has said its last word on everyone, now or before the time is up."""
        if self._live:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)
        return not self._live

    async def close(self) -> None:
        """End the process, and with it all that lives. May be called again."""
        if self.health is not Health.STOPPED:
            self.health, self.reason = Health.STOPPED, "it was closed"
        self._settled.set()
        self._end_all("the engine was closed")
        self._watchdog.stop()
        if self._transport is not None:
            self._transport.close()  # it hears that nobody listens, and ends
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            if self.ready_word is not None:  # while it loads it hears nothing
                await _end_of(process)
        finally:
            process.kill()  # unless it has ended; also if nobody waits any more
        await _end_of(process)


async def _end_of(process: "subprocess.Popen[bytes]") -> None:
    """It has ended, or has had its time. A thread of its own waits: the loop's may all be in calls without end."""
    waiter = ThreadPoolExecutor(1)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.get_running_loop().run_in_executor(waiter, process.wait, LAST_WORDS)
    finally:
        waiter.shutdown(wait=False)


class _Ear(asyncio.Protocol):
    """What comes over the line, as messages."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._frames = Frames.for_front()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._engine.hear(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.lost()
