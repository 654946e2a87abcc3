"""The engine's process: hear what the front says, step, say what came of it. It knows no HTTP and no text.

It is a process of its own because both sides are Python. On threads of one process a step and the event loop would take
turns at the interpreter; and a step that hangs inside a library could not be watched, nor ended, from the same process.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from phase0_request.request import FinishReason, Request
from phase5_continuous.core import EngineCore, Step
from phase5_continuous.deadlines import Deadlines
from phase5_continuous.scheduler import Scheduler
from phase6_integration.gc_freeze import gc_freeze
from phase6_integration.isolation import BrokenError
from phase6_integration.options import EngineOptions
from phase6_integration.stats import Gauges
from phase6_integration.wire import (
    Dead,
    Ended,
    Finish,
    Line,
    Load,
    Logged,
    Output,
    Ready,
    Started,
    Submit,
    ToEngine,
    Update,
)

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1


class Loop:
    """Steps while there is work, sleeps while there is none; every word of the front is heard between two steps."""

    def __init__(self, line: Line, core: EngineCore[Any], scheduler: Scheduler) -> None:
        self.line = line
        self.core = core
        self.scheduler = scheduler
        self._requests: dict[str, Request] = {}  # everyone of whose end the front has not been told
        self._unannounced: dict[str, Request] = {}  # those of them that were not admitted when last looked at

    # region run
    def run(self) -> None:
        """Until the front goes."""
        while True:
            for message in self.line.receive(wait=not self.core.has_work):
                self.hear(message)
            step = self.core.step() if self.core.has_work else None
            if step is not None:
                self.line.send(self._update(step))

    # endregion

    def hear(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Finish(id=name, reason=reason):
                request = self._requests.get(name)
                if request is not None:
                    self.core.finish(request, reason)
            case Load():
                raise ValueError("an engine is loaded once")

    def _submit(self, ask: Submit) -> None:
        request = Request(ask.id, ask.prompt, ask.params, ask.priority, ask.arrival, ask.cache_salt)
        deadlines = None if ask.timeout is None else Deadlines(total=ask.timeout)
        try:
            self.core.submit(request, deadlines)
        except ValueError as error:  # the front has let by what can never be served
            log.error("request %s is refused: %s", ask.id, error)
            request.finish(FinishReason.ERROR, self.core.clock(), str(error))
            ended = [Ended(request.id, FinishReason.ERROR, request.error)]
            self.line.send(Update(self.core.clock(), 0.0, 0, 0, [], [], ended, Gauges.read(self.scheduler)))
            return
        self._requests[ask.id] = self._unannounced[ask.id] = request

    def _update(self, step: Step) -> Update:
        started = self._started(step)
        outputs, ended = [], []
        for request, token, reason, logprobs in step.events:
            if token is not None:
                scores = request.prompt_logprobs if len(request.output_tokens) == 1 else None
                outputs.append(Output(request.id, token, logprobs, scores or None))
            if reason is not None:
                ended.append(Ended(request.id, reason, request.error))
                self._requests.pop(request.id, None)
                self._unannounced.pop(request.id, None)
        now = Gauges.read(self.scheduler)
        seconds = sum(step.spent)
        return Update(self.core.clock(), seconds, step.prefill_tokens, step.decode_tokens, started, outputs, ended, now)

    def _started(self, step: Step) -> list[Started]:
        """Whose first slice this was. It began after what the cache had of its prompt."""
        if not self._unannounced:
            return []
        started = []
        for request, start, _ in step.batch:
            if self._unannounced.pop(request.id, None) is not None:
                started.append(Started(request.id, request.times.admitted or 0.0, start))
        return started


Made = tuple[EngineCore[Any], Scheduler, Ready]


def bundled_engine(options: EngineOptions) -> Made:
    """What a server loads. Others can be named instead: tests have engines that fail in every way there is."""
    from phase6_integration.assemble import assemble

    parts = assemble(options)
    decoder, cache = parts.model.decoder, parts.scheduler.cache
    context, dtype = parts.model.config.max_position_embeddings, str(decoder.dtype).removeprefix("torch.")
    ready = Ready(context, cache.usage.total, cache.page_size, str(decoder.device), dtype)
    return parts.core, parts.scheduler, ready


class ToTheFront(logging.Handler):
    """A log whose lines go to the front."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(ConnectionError):  # nobody is left to tell
            self._line.send(Logged(record.levelno, self.format(record)))


def _made(load: Load, line: Line) -> Made | None:
    """The engine. What a machine or a directory lacks is a reason, not a fault: it is said in a line."""
    try:
        return _function(load.factory)(load.options)
    except (ValueError, OSError, MemoryError) as error:
        line.send(Dead(str(error)))
        line.flush()
        return None


def serve(line: Line) -> int:
    """Load what the first word says, then serve. Whatever goes wrong is said to the front before this process ends."""
    try:
        first, *others = line.receive(wait=True)
        if not isinstance(first, Load):
            raise ValueError(f"the first word must be Load, got {type(first).__name__}")
        with gc_freeze():
            made = _made(first, line)
        if made is None:
            return 1
        core, scheduler, ready = made
        line.send(ready)
        loop = Loop(line, core, scheduler)
        for message in others:
            loop.hear(message)
        loop.run()
    except (EOFError, ConnectionError):  # the front has gone, and nobody is left to serve
        return 0
    except Exception as error:
        log.exception("the engine has failed")
        line.send(Dead(str(error) if isinstance(error, BrokenError) else f"{type(error).__name__}: {error}"))
        line.flush()
        return 1
    return 0


def _function(name: str) -> Callable[[EngineOptions], Made]:
    module, _, attribute = name.partition(":")
    found: Callable[[EngineOptions], Made] = getattr(import_module(module), attribute)
    return found


def main() -> int:
    """Signals are the front's affair: it drains the engine, then lets go of it. If the front itself dies, so does this,
    even in the middle of a step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descriptor, front = map(int, sys.argv[1:])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != front:  # it died before that
            return 0
    line = Line(socket.socket(fileno=descriptor))
    logging.basicConfig(level=logging.WARNING, handlers=[ToTheFront(line)])
    logging.captureWarnings(True)
    status = serve(line)
    sys.stderr.flush()
    os._exit(status)  # threads of libraries are not worth waiting for


if __name__ == "__main__":
    main()
