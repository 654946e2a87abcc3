"""The engine process: reads requests, runs steps, sends their results. It handles token ids only, no HTTP and no text.

It is a separate process because both sides are Python. In threads of one process, a step and the event loop would take
turns at the interpreter lock; and a step that hangs inside a library could not be detected or killed.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

from phase0_request.core import EngineCore, Step
from phase0_request.params import TokenLogprobs
from phase0_request.request import FinishReason, Request
from phase2_prefill_decode.extras.outcome import extras_of
from phase2_prefill_decode.extras.parallel.ranks import RankError, die_with
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.gc_freeze import gc_freeze
from phase6_integration.engine.isolation import BrokenError
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.stats import Gauges
from phase6_integration.process.messages import (
    Channel,
    Dead,
    EngineRequest,
    Finish,
    LoadModel,
    Logged,
    Ping,
    Pong,
    Progress,
    Ready,
    Recorded,
    ToEngine,
    Update,
    Watch,
)
from phase6_integration.process.recording import Recording

if TYPE_CHECKING:
    from phase2_prefill_decode.backend import Processes

log = logging.getLogger(__name__)
CLOCKED = 0.5  # seconds after which deadlines are looked at if all wait for their grammars, and snapshots that wait


class GrammarWork(Protocol):
    """The work for grammars that goes on beside the steps."""

    def fileno(self) -> int: ...

    def prepare(self, request: Request) -> object: ...

    def receive(self, scheduler: Scheduler, now: float) -> None: ...


class Loop:
    """The engine loop: runs steps while there is work and sleeps otherwise. Messages are read between two steps."""

    def __init__(
        self,
        channel: Channel,
        core: EngineCore[Scheduler, Any],
        grammars: GrammarWork | None = None,
    ) -> None:
        self.channel = channel
        self.core = core
        self.scheduler = core.scheduler
        self.grammars = grammars
        self._all_wait = False  # each request that runs waits for its grammar
        self._requests: dict[str, Request] = {}  # the end of each is not sent yet
        self._unannounced: dict[str, Request] = {}  # the admission of each is not sent yet
        self._unscored: set[str] = set()  # the prompt logprobs of each are not sent yet
        self._recording = Recording(core, lambda line: self.channel.send(Recorded(line)))

    # region exercise 6.2
    def run(self) -> NoReturn:
        """Read messages and run steps until the HTTP process closes the channel."""
        while True:
            wait = self._all_wait or not self.core.has_work
            timeout = CLOCKED if self._all_wait or self._recording.is_waiting else None
            for message in self.channel.receive(wait, timeout):
                self.handle(message)
            self.turn()

    def turn(self) -> None:
        """Run a step, if there is work, and send what it did. Watchers get a snapshot before it."""
        self._recording.write()
        if self.grammars is not None:
            self.grammars.receive(self.scheduler, self.core.clock())
        step = self.core.step() if self.core.has_work else None
        self._all_wait = step is None and self.scheduler.is_waiting
        if step is not None:
            self.channel.send(self._update(step))
        else:
            self._recording.flush()

    def handle(self, message: ToEngine) -> None:
        """Act on one message: submit completions, finish one, answer a ping. ValueError for a second LoadModel."""
        match message:
            case EngineRequest():
                for number in message.numbers:
                    self._submit(message.completion(number), message.timeout)
            case Finish(id=id, reason=reason):
                request = self._requests.get(id)
                if request is not None:
                    self.core.finish(request, reason)
            case Ping():
                self.channel.send(Pong())
            case Watch():
                self._recording.watch(message)
            case LoadModel():
                raise ValueError("an engine can be loaded only once")

    def _submit(self, request: Request, timeout: float | None) -> None:
        """Submit a request. One that the engine refuses is reported as ended at once."""
        try:
            self.core.submit(request, timeout)
        except ValueError as error:  # AsyncEngine should have refused it
            log.error("request %s is refused: %s", request.id, error)
            request.finish(FinishReason.ERROR, self.core.clock(), str(error))
            refused = Progress(request.id, finish_reason=FinishReason.ERROR, error=request.error)
            self.channel.send(Update(self.core.clock(), 0.0, 0, 0, [refused], Gauges.read(self.scheduler)))
            return
        self._requests[request.id] = self._unannounced[request.id] = request
        if request.params.grammar is not None and self.grammars is not None:
            self.grammars.prepare(request)
        if request.params.prompt_logprobs is not None:
            self._unscored.add(request.id)

    def _update(self, step: Step) -> Update:
        """The message about a step: requests that were admitted, tokens, requests that ended, and the gauges."""
        progress = self._admitted(step)
        for request, token, reason, more in step.events:
            scores = None
            if token is not None and request.id in self._unscored:
                self._unscored.discard(request.id)
                scores = extras_of(request).prompt_logprobs or None
            error = None if reason is None else request.error
            extras = extras_of(request)
            end = extras.accepted_drafts, extras.rejected_drafts, extras.embedding
            logprobs = cast(TokenLogprobs | None, more)
            progress.append(Progress(request.id, token, logprobs, scores, reason, error, None, 0, *end))
            if reason is not None:
                self._requests.pop(request.id, None)
                self._unannounced.pop(request.id, None)
                self._unscored.discard(request.id)
        tokens = step.prefill_tokens, step.decode_tokens
        return Update(self.core.clock(), step.seconds, *tokens, progress, Gauges.read(self.scheduler))

    def _admitted(self, step: Step) -> list[Progress]:
        """Requests that were admitted in this step. The first slice starts after the cached part of the prompt."""
        admitted = []
        for request, start, _, _ in step.batch if self._unannounced else ():
            if self._unannounced.pop(request.id, None) is not None:
                admitted.append(Progress(request.id, admitted=request.times.admitted or 0.0, cached=start))
        return admitted

    # endregion


class LoadedEngine(NamedTuple):
    """What a factory returns: an engine, ready to run."""

    core: EngineCore[Scheduler, Any]
    ready: Ready
    grammars: GrammarWork | None = None
    processes: "Processes | None" = None


def bundled_engine(
    options: EngineOptions, grammar_work: Callable[[Any, EngineOptions], GrammarWork] | None = None
) -> LoadedEngine:
    """The default factory: the engine of these options. `grammar_work` follows grammars elsewhere; without it they are
    followed in this process, which is for clients that are trusted."""
    from phase6_integration.engine.assemble import assemble

    parts = assemble(options)
    grammars = None
    if grammar_work is not None and parts.model.tokenizer is not None:
        grammars = grammar_work(parts.sampler, options)
    decoder, cache = parts.model.decoder, parts.scheduler.cache
    context, dtype = parts.model.config.max_position_embeddings, str(decoder.dtype).removeprefix("torch.")
    layout, pages, matrices = parts.layout, cache.usage.total, decoder.layers[0].mlp.down_proj.kernel
    ready = Ready(
        context, pages, cache.page_size, str(decoder.device), dtype, matrices, layout.dtype,
        pages * layout.bytes_per_page,
    )  # fmt: skip
    return LoadedEngine(parts.core, ready, grammars, decoder.processes)


class ChannelHandler(logging.Handler):
    """Sends log records to the HTTP process."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(ConnectionError):  # the HTTP process has gone
            text = record.getMessage() if record.levelno == logging.INFO else self.format(record)
            self._channel.send(Logged(record.levelno, text))


def serve(channel: Channel) -> int:
    """Load the model that the first message names, then serve. A failure is reported before this process exits."""
    try:
        while not (arrived := channel.receive(wait=True)):  # half a message
            continue
        load, *others = arrived
        if not isinstance(load, LoadModel):
            raise ValueError(f"the first message must be LoadModel, got {type(load).__name__}")
        try:
            with gc_freeze():
                engine: LoadedEngine = resolve_name(load.factory)(load.options)
        except (ValueError, OSError, MemoryError) as error:  # a missing file, or too little memory
            return _failed(channel, str(error))
        channel.send(engine.ready)
        if engine.grammars is not None:
            channel.watch(engine.grammars.fileno())
        if engine.processes is not None:
            for descriptor in engine.processes.filenos():
                channel.watch(descriptor, engine.processes.check)
        loop = Loop(channel, engine.core, engine.grammars)
        for message in others:
            loop.handle(message)
        loop.run()
    except (EOFError, ConnectionError):  # the HTTP process has gone
        return 0
    except RankError as error:
        return _failed(channel, str(error))
    except Exception as error:
        log.exception("the engine has failed")
        return _failed(channel, str(error) if isinstance(error, BrokenError) else f"{type(error).__name__}: {error}")


def _failed(channel: Channel, reason: str) -> int:
    channel.send(Dead(reason))
    channel.flush()
    return 1


def main() -> int:
    """Run the process. It ignores signals: the HTTP process drains it, then closes the channel. If the HTTP process
    dies, the kernel kills this one, even in the middle of a step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, parent = map(int, sys.argv[1:])
    if not die_with(parent):
        return 0
    channel = Channel(socket.socket(fileno=descriptor))
    logging.basicConfig(level=logging.WARNING, handlers=[ChannelHandler(channel)])
    logging.getLogger("phase2_prefill_decode").setLevel(logging.INFO)  # how far the kernels are compiled
    logging.captureWarnings(True)
    status = serve(channel)
    os._exit(status)  # does not wait for threads of libraries


if __name__ == "__main__":
    main()
