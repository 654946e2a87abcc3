"""EngineClient: one engine process, from its start to its end: the channel to it, its time limits, and its exit.

A process that has failed is never used again. AsyncEngine decides whether another one is started.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from phase0_request.support import entry
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.health import Health
from phase6_integration.process.messages import (
    Dead,
    Frames,
    LoadModel,
    Logged,
    Ping,
    Pong,
    Ready,
    SideMessage,
    ToEngine,
    ToFront,
    Update,
    frame,
    to_front,
)
from phase6_integration.process.watchdog import Watchdog

log = logging.getLogger("phase6_integration.process.engine_process")  # its records arrive as messages
BUNDLED_ENGINE = "phase6_integration.process.engine_process:bundled_engine"
STOP_TIMEOUT = 2.0  # seconds the engine has to abort its requests, and its process to exit, before it is killed


class EngineClient(asyncio.Protocol):
    """Starts an engine process, passes messages, and reports once if the process fails: it dies, hangs or does not load
    in time. It runs on one event loop, without blocking it."""

    def __init__(
        self,
        options: EngineOptions,
        factory: str,
        *,
        on_message: Callable[[Ready | Update | SideMessage | Logged], None],
        on_failure: Callable[[Health, str], None],
        has_work: Callable[[], bool],
    ) -> None:
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.watchdog = Watchdog(
            options.hang_timeout,
            options.heartbeat_timeout,
            has_work=has_work,
            ping=lambda: self.send(Ping()),
            on_hang=self._hung,
        )
        self._factory = factory
        self._frames = Frames(to_front)
        self._on_message = on_message
        self._on_failure = on_failure
        self._transport: asyncio.Transport | None = None
        self._load_timer: asyncio.TimerHandle | None = None
        self._loaded = False
        self._ended = False  # it has failed, or is being stopped

    async def start(self) -> None:
        """Start the process, which loads the model. Returns at once; Ready is the first message."""
        ours, theirs = socket.socketpair()
        try:
            self.spawn(theirs)
        except BaseException:
            ours.close()
            raise
        loop = asyncio.get_running_loop()
        self._load_timer = loop.call_later(self.options.load_timeout, self._not_loaded)
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        self.send(LoadModel(self.options, self._factory))

    def spawn(self, end: socket.socket) -> None:
        """Start the process with its end of the socket pair."""
        with end:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "phase6_integration.process.engine_process",
                    str(end.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # so that Ctrl-C reaches this process only
                env=entry.environment(),
            )

    def send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._receive(message)

    def _receive(self, message: ToFront) -> None:
        self.watchdog.heard()
        match message:
            case Ready():
                self._loaded = True
                self._stop_timers()
                self._on_message(message)
                self.watchdog.start()
            case Update() | SideMessage():
                self._on_message(message)
            case Logged(level=level, text=text):
                log.log(level, text)
                if level == logging.INFO and not self._loaded:
                    self._on_message(message)
            case Dead(reason=reason):
                self._fail(Health.DEAD, reason)
            case Pong():
                return

    # It fails.

    def connection_lost(self, error: Exception | None) -> None:
        """The channel has closed: the process has exited or is about to."""
        code = self.process.poll() if self.process else None
        self._fail(Health.DEAD, "its process has ended" + (f" with status {code}" if code is not None else ""))

    def _hung(self) -> None:
        self._fail(Health.HUNG, f"it has sent nothing for {self.watchdog.silence:.0f} seconds")

    def _not_loaded(self) -> None:
        self._fail(Health.HUNG, f"the model was not loaded within {self.options.load_timeout:g} seconds")

    def _fail(self, health: Health, reason: str) -> None:
        if not self._ended:
            self.kill()
            self._on_failure(health, reason)

    # It ends.

    def kill(self) -> None:
        """End the process at once."""
        self._ended, self._loaded = True, False
        self._stop_timers()
        if self._transport is not None:
            self._transport.abort()
        if self.process is not None:
            self.process.kill()

    async def stop(self) -> None:
        """Close the channel, which ends the process, and wait for that. May be called repeatedly."""
        self._ended = True
        self._stop_timers()
        if self._transport is not None:
            self._transport.close()  # the engine reads EOF and exits
        process = self.process
        if process is None or process.returncode is not None:
            return
        try:
            if self._loaded:  # while loading it reads nothing
                await _end_of(process)
        finally:
            process.kill()  # no effect if it has exited; also on cancellation
        await _end_of(process)

    def _stop_timers(self) -> None:
        self.watchdog.stop()
        if self._load_timer is not None:
            self._load_timer.cancel()


async def _end_of(process: "subprocess.Popen[bytes]") -> None:
    """Wait STOP_TIMEOUT for the process to exit, in a thread of its own: the loop's executor may be blocked."""
    waiter = ThreadPoolExecutor(1)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.get_running_loop().run_in_executor(waiter, process.wait, STOP_TIMEOUT)
    finally:
        waiter.shutdown(wait=False)
