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
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple, NoReturn

from phase0_request.core import EngineCore, EngineFailedError, Step
from phase0_request.request import FinishReason, Request
from phase0_request.support.entry import die_with
from phase5_continuous.scheduler import Scheduler
from phase6_integration.engine.gc_freeze import gc_freeze
from phase6_integration.engine.isolation import BrokenError
from phase6_integration.engine.loop_hooks import Extra
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
    SideMessage,
    ToEngine,
    Update,
)

log = logging.getLogger(__name__)
CLOCKED = 0.5  # seconds that an engine sleeps at most if all requests wait, which have deadlines, or an extra is due


class Loop:
    """The engine loop: runs steps while there is work and sleeps otherwise. Messages are read between two steps."""

    def __init__(
        self,
        channel: Channel,
        core: EngineCore[Scheduler, Any],
        extras: Sequence[Extra] = (),
    ) -> None:
        self.channel = channel
        self.core = core
        self.scheduler = core.scheduler
        self.hooks = [extra(core, lambda name, body: channel.send(SideMessage(name, body))) for extra in extras]
        for hooks in self.hooks:
            for descriptor in hooks.descriptors:
                channel.watch(descriptor, hooks.woken)
        self._all_blocked = False  # every running request waits for an extra
        self._requests: dict[str, Request] = {}  # their end has not been sent yet
        self._unannounced: dict[str, Request] = {}  # their admission has not been sent yet

    # region exercise 6.2
    def run(self) -> NoReturn:
        """Read messages and run steps until the HTTP process closes the channel."""
        while True:
            wait = self._all_blocked or not self.core.has_work
            soon = self._all_blocked or any(hooks.is_due() for hooks in self.hooks)
            for message in self.channel.receive(wait, CLOCKED if soon else None):
                self.handle(message)
            self.turn()

    # endregion

    def turn(self) -> None:
        """Run a step, if there is work, and send its results."""
        for hooks in self.hooks:
            hooks.before_step()
        # region exercise 6.2
        step = self.core.step() if self.core.has_work else None
        self._all_blocked = step is None and self.scheduler.has_blocked
        if step is not None:
            self.channel.send(self._update(step))
        # endregion
        for hooks in self.hooks if step is None else ():
            hooks.no_step()

    def handle(self, message: ToEngine) -> None:
        """Act on one message: submit completions, finish one, answer a ping, or pass it on to an extra. ValueError for
        a second LoadModel."""
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
            case SideMessage(name=name, body=body):
                for hooks in self.hooks:
                    if hooks.name == name:
                        hooks.received(body)
            case LoadModel():
                raise ValueError("an engine can be loaded only once")

    def _submit(self, request: Request, timeout: float | None) -> None:
        """Submit a request. If the engine refuses it, report at once that it has ended."""
        try:
            self.core.submit(request, timeout)
        except ValueError as error:  # AsyncEngine should have refused it
            log.error("request %s is refused: %s", request.id, error)
            request.finish(FinishReason.ERROR, self.core.clock(), str(error))
            refused = Progress(request.id, finish_reason=FinishReason.ERROR, error=request.error)
            self.channel.send(Update(self.core.clock(), 0.0, 0, 0, [refused], Gauges.read(self.scheduler)))
            return
        self._requests[request.id] = self._unannounced[request.id] = request

    def _update(self, step: Step) -> Update:
        """The message about a step: admitted requests, tokens, ended requests, and the gauges."""
        progress = self._admitted(step)
        for request, token, reason, more in step.events:
            error = None if reason is None else request.error
            said = None if more is None and request.more is None else self._reported(request, token, more)
            progress.append(Progress(request.id, token, reason, error, more=said))
            if reason is not None:
                self._requests.pop(request.id, None)
                self._unannounced.pop(request.id, None)
        tokens = step.prefill_tokens, step.decode_tokens
        return Update(self.core.clock(), step.seconds, *tokens, progress, Gauges.read(self.scheduler))

    def _reported(self, request: Request, token: int | None, more: object) -> bytes | None:
        """The bytes that an extra adds to the progress of a request."""
        return next((said for hooks in self.hooks if (said := hooks.report(request, token, more)) is not None), None)

    def _admitted(self, step: Step) -> list[Progress]:
        """The requests admitted in this step. The first slice starts after the cached part of the prompt."""
        admitted = []
        for request, start, _, _ in step.batch if self._unannounced else ():
            if self._unannounced.pop(request.id, None) is not None:
                admitted.append(Progress(request.id, admitted=request.times.admitted or 0.0, cached=start))
        return admitted


class LoadedEngine(NamedTuple):
    """An engine that a factory has made, ready to run."""

    core: EngineCore[Scheduler, Any]
    ready: Ready
    extras: Sequence[Extra] = ()


def bundled_engine(options: EngineOptions) -> LoadedEngine:
    """The default factory: the engine of these options, with its extras."""
    from phase6_integration.engine.assemble import assemble
    from phase6_integration.engine.connect_engine import loop_extras

    parts = assemble(options)
    decoder, cache = parts.model.decoder, parts.scheduler.cache
    ready = Ready(
        max_model_len=parts.model.config.max_position_embeddings,
        pages=cache.usage.total,
        page_size=cache.page_size,
        device=str(decoder.device),
        dtype=str(decoder.dtype).removeprefix("torch."),
        linear=decoder.layers[0].mlp.down_proj.kernel,
        kv_cache_dtype=parts.layout.dtype,
        kv_cache_bytes=cache.usage.total * parts.layout.bytes_per_page,
    )
    return LoadedEngine(parts.core, ready, loop_extras(parts.model, parts.sampler, options))


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
        loop = Loop(channel, engine.core, engine.extras)
        for message in others:
            loop.handle(message)
        loop.run()
    except (EOFError, ConnectionError):  # the HTTP process has gone
        return 0
    except EngineFailedError as error:
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
    for name in ("phase2_prefill_decode", "phase6_integration.engine.connect_engine"):  # how far the start has come
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
    status = serve(channel)
    os._exit(status)  # does not wait for threads of libraries


if __name__ == "__main__":
    main()
