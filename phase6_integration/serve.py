"""serve: the life of a server process, from its options to its exit code.

The port is bound first, so that a port in use is an error at once. The engine then loads in its own process, while this
one imports FastAPI and answers 503. On a signal the engine is drained before uvicorn stops: a client that connects
meanwhile gets a 503, not a closed port. If the engine fails for good, the responses are completed and the process ends
with a status of its own, so that its supervisor starts another. Every wait during shutdown has a time limit.
"""

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import uvloop

from phase6_integration import connect, logs
from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.gc_freeze import gc_freeze
from phase6_integration.engine.generation_config import sampling_defaults
from phase6_integration.engine.options import EngineOptions
from phase6_integration.listener import listen, url_of
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.health import UnavailableError

ENGINE_FAILED = 70  # exit status: EX_SOFTWARE of sysexits.h
SPARE_FILES = 64  # kept for the engine, files and responses: without them the kernel closes connections silently

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger("nanoserve")


def serve(
    options: EngineOptions,
    settings: ServerSettings,
    warnings: Sequence[str] = (),
    formatter: logging.Formatter | None = None,
) -> int:
    """Serve until a signal. Exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 if the server cannot start, 70 if its
    engine has failed for good, 128 + n if a second signal n interrupts the shutdown. Once the server has started, this
    function ends the process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would take the cores of the engine
    logs.configure(settings, formatter)
    for warning in warnings:
        logger.warning(warning)
    if (files := max_open_files()) <= SPARE_FILES:
        few = f"at most {files} files may be open, of which the server needs {SPARE_FILES} for itself and one for each"
        return _failed(f"{few} connection: raise the limit, for example with `ulimit -n 4096`")
    try:
        listener = listen(settings)
    except OSError as error:
        return _failed(f"cannot listen on {settings.uds or f'{settings.host} port {settings.port}'}: {error}")
    try:
        context = connect.tls_context(settings)
        engine = AsyncEngine(options)
        defaults = sampling_defaults(
            settings.generation_config, Path(engine.options.model), settings.override_generation_config
        )
    except (OSError, ValueError) as error:
        _withdraw(settings)
        return _failed(error)
    if defaults:
        fields = {name: str(value) for name, value in defaults.items()}
        logger.info("sampling defaults of requests, by --generation-config", extra={"fields": fields})
    return _run(_Lifecycle(engine, replace(settings, sampling_defaults=defaults), listener, context))


def _failed(error: object, status: int = 1) -> int:
    first, *_ = str(error).splitlines() or [type(error).__name__]
    logger.error(first)
    logs.drain()
    return status


def _run(server: "_Lifecycle") -> NoReturn:
    """Run the server and end the process without waiting for threads."""
    code = 1
    try:
        code = uvloop.new_event_loop().run_until_complete(server.run())
    except Exception:
        logger.exception("the server has failed")
    connect.flush()
    logs.drain()
    os._exit(code)


class _Lifecycle:
    """Starts, serves and shuts down. A signal cancels what is awaited: the first one starts the shutdown, the second
    one skips its waits."""

    def __init__(
        self, engine: AsyncEngine, settings: ServerSettings, listener: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.listener = listener
        self.context = context
        self.url = url_of(listener, "http" if context is None else "https")
        self.received: list[int] = []  # signals to stop

    async def run(self) -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            self.received.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        failure = None
        with contextlib.suppress(asyncio.CancelledError):  # by a second signal
            failure = await self._serve()
            await self.engine.close()
        if failure is not None:
            return _failed(failure, ENGINE_FAILED if self.engine.ready_info else 1)
        self._log("stopped", at_once=len(self.received) > 1)
        return 0 if self.received == [signal.SIGTERM] else 128 + self.received[-1]

    async def _serve(self) -> str | None:
        """Serve connections until a signal. Returns the reason if the engine fails for good first."""
        failure, server = None, None
        async with asyncio.TaskGroup() as group:
            try:
                self._log("loading", model=self.settings.model_name, directory=self.engine.options.model)
                start = time.monotonic()
                await self.engine.start()
                server = await asyncio.to_thread(self._server)  # signals are handled during the imports
                group.create_task(server.serve(sockets=[self.listener]))
                self._log("listening", url=self.url, answers="503 while it loads")
                failure = await self._until_failure(start)
            except asyncio.CancelledError:
                self._log("draining", at_most=float(self.settings.shutdown_timeout))
                await self.engine.drain(self.settings.shutdown_timeout)
            finally:
                _withdraw(self.settings)
            if server is not None:
                server.should_exit = True
        return failure

    async def _until_failure(self, start: float) -> str:
        """Wait until the engine fails for good. Returns the reason."""
        try:
            with gc_freeze():
                await self.engine.ready()
        except UnavailableError as error:
            return error.reason
        assert self.engine.ready_info is not None
        info = msgspec.structs.asdict(self.engine.ready_info)
        self._log("ready", url=self.url, model=self.settings.model_name, **info, after=time.monotonic() - start)
        await self.engine.failed.wait()
        return f"the engine is {self.engine.health.value}: {self.engine.reason}"

    def _server(self) -> "uvicorn.Server":
        import uvicorn

        class Server(uvicorn.Server):
            """A server without uvicorn's signal handlers, which would close the port first."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        connections = max_open_files() - SPARE_FILES
        app = connect.create_app(self.engine, self.settings)
        app.state.server.tokenizers.start()
        return Server(connect.server_config(app, self.settings, connections, self.context))

    def _log(self, what: str, **fields: object) -> None:
        logger.info(what, extra={"fields": fields})


def _withdraw(settings: ServerSettings) -> None:
    """Remove the file of the Unix socket."""
    if settings.uds is not None:
        Path(settings.uds).unlink(missing_ok=True)


def max_open_files() -> float:
    """Raise the limit of open files to its maximum and return it: each connection is an open file."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has no numeric maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else limit
