"""serve: the life of a server process, from its options to its exit code.

The port is bound first, so that a port in use is an error at once. The engine then loads in its own process, while this
one imports FastAPI and answers 503. On a signal the engine is drained before uvicorn stops: a client that connects
meanwhile gets a 503, not a closed port. If the engine fails for good, the responses are completed and the process ends
with a status of its own, so that its supervisor starts another. Every wait during shutdown has a time limit.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from phase6_integration.api.settings import ServerSettings
from phase6_integration.engine.gc_freeze import gc_freeze
from phase6_integration.engine.generation_config import sampling_defaults
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.health import UnavailableError
from phase6_integration.wings.edge.api_keys import ApiKeys
from phase6_integration.wings.edge.listener import BACKLOG, Listener
from phase6_integration.wings.edge.notify import Notifier
from phase6_integration.wings.edge.tls import Tls
from phase6_integration.wings.observe import logs

ENGINE = "phase6_integration.wings.structured.isolated_grammars:isolating_engine"
ENGINE_FAILED = 70  # exit status: EX_SOFTWARE of sysexits.h
IMPORTS = 30.0  # seconds, with much to spare, that the server takes to start beside the loading of the model
LINGER = 5  # seconds for responses to reach their clients, once all requests have ended

logger = logging.getLogger("nanoserve")


def serve(options: EngineOptions, settings: ServerSettings, warnings: Sequence[str] = ()) -> int:
    """Serve until a signal. Exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 if the server cannot start, 70 if its
    engine has failed for good, 128 + n if a second signal n interrupts the shutdown. Once the server has started, this
    function ends the process."""
    logs.configure(settings)
    for warning in warnings:
        logger.warning(warning)
    try:
        listener = Listener(settings)
    except OSError as error:
        return _failed(f"cannot listen on {settings.uds or f'{settings.host} port {settings.port}'}: {error}")
    with contextlib.closing(listener):
        try:
            tls = None if settings.ssl_certfile is None else Tls(settings)
            engine = AsyncEngine(options, factory=ENGINE)
            settings = replace(settings, sampling_defaults=_defaults(settings, Path(engine.options.model)))
        except (OSError, ValueError) as error:
            return _failed(error)
        more_files()
        return _run(_Lifecycle(engine, settings, listener, tls))


def _defaults(settings: ServerSettings, model: Path) -> dict[str, Any]:
    """The sampling defaults of requests, which the log names."""
    found = sampling_defaults(settings.generation_config, model, settings.override_generation_config)
    if found:
        logger.info(
            "sampling defaults of requests, by --generation-config",
            extra={"fields": {name: str(value) for name, value in found.items()}},
        )
    return found


def _run(server: "_Lifecycle") -> NoReturn:
    """Run the server and end the process without waiting for threads."""
    code = 1
    try:
        code = _new_loop().run_until_complete(server.run())
    except Exception:
        logger.exception("the server has failed")
    server.listener.close()
    logs.drain()
    os._exit(code)


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _failed(error: object, status: int = 1) -> int:
    first, *_ = str(error).splitlines() or [type(error).__name__]
    print(f"nanoserve serve: {first}", file=sys.stderr)
    return status


class _Signals:
    """SIGTERM and SIGINT: the first one starts the shutdown, the second one skips its waits."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.stop_now = asyncio.Event()
        self.code = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received, number)

    def _received(self, number: int) -> None:
        if number == signal.SIGINT or self.stop.is_set():
            self.code = 128 + number
        if self.stop.is_set():
            self.stop_now.set()
        self.stop.set()


async def _unless(event: asyncio.Event, work: Awaitable[object]) -> bool:
    """Await the work and return True, or cancel it and return False once the event is set."""
    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        for task in (doing, waiting):
            task.cancel()
        await asyncio.gather(doing, waiting, return_exceptions=True)


class _Lifecycle:
    """Starts, serves and shuts down."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, listener: Listener, tls: Tls | None) -> None:
        self.engine = engine
        self.settings = settings
        self.listener = listener
        self.tls = tls
        self.notifier = Notifier()
        self.keys = ApiKeys(settings.api_keys, settings.api_key_file)

    async def run(self) -> int:
        start = time.monotonic()
        signals, beating = _Signals(), asyncio.create_task(self.notifier.beat())
        if self.keys.file is not None or self.tls is not None:  # otherwise a closed terminal ends the server, as usual
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        self.notifier.send(f"EXTEND_TIMEOUT_USEC={round((self.engine.options.load_timeout + IMPORTS) * 1e6)}")
        self._log("loading", model=self.settings.model_name, directory=self.engine.options.model)
        failure = None
        try:
            await self.engine.start()
            making = asyncio.ensure_future(
                asyncio.to_thread(self._server)
            )  # in a thread, so that signals are handled during the imports
            if await _unless(signals.stop, making):
                failure = await self._serve(making.result(), signals, start)
        finally:
            await _unless(signals.stop_now, self.engine.close())
            beating.cancel()
        if failure is not None:
            return _failed(failure, ENGINE_FAILED if self.engine.ready_info else 1)
        self._log("stopped", at_once=signals.stop_now.is_set())
        return signals.code

    def _reload(self) -> None:
        """Read the files again that may change while the server runs."""
        if self.keys.file is not None:
            self.keys.reload()
        if self.tls is not None:
            self.tls.reload()

    async def _serve(self, server: "Any", signals: _Signals, start: float) -> str | None:
        """Serve connections until the end. Returns the reason if the engine has failed."""
        serving = asyncio.create_task(server.serve(sockets=[self.listener.socket]))
        serving.add_done_callback(lambda _: signals.stop.set())  # also if uvicorn fails
        self._log("listening", url=self.listener.url, answers="503 while it loads")
        failure = await self._serve_until(signals.stop, start)
        self.notifier.send("STOPPING=1")
        if failure is None:
            self._log("draining", at_most=float(self.settings.shutdown_timeout))
            await _unless(signals.stop_now, self.engine.drain(self.settings.shutdown_timeout))
        server.should_exit = True
        await _unless(signals.stop_now, serving)
        return failure

    async def _serve_until(self, stop: asyncio.Event, start: float) -> str | None:
        """Wait for the engine to load, then for the event. Returns the reason if the engine fails for good before."""
        try:
            with gc_freeze():
                ready = await _unless(stop, self.engine.ready())
        except UnavailableError as error:
            return error.reason
        if ready:
            self._log_ready(time.monotonic() - start)
            self.notifier.send("READY=1")
            if await _unless(stop, self.engine.failed.wait()):
                if not self.settings.keep_alive_on_engine_death:
                    return f"the engine is {self.engine.health.value}: {self.engine.reason}"
                await stop.wait()
        return None

    def _server(self) -> "Any":
        import uvicorn

        from phase6_integration.app import create_app
        from phase6_integration.wings.edge.transport import transport_config

        class Server(uvicorn.Server):
            """Without uvicorn's signal handlers, which would close the port first."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        tls, app = self.tls, create_app(self.engine, self.settings, self.keys)
        app.state.server.tokenizers.start()
        config = transport_config(
            app,
            self.settings,
            backlog=BACKLOG,
            timeout_graceful_shutdown=LINGER,
            ssl_context_factory=None if tls is None else lambda *_: tls.context,
        )
        return Server(config)

    def _log(self, what: str, **fields: object) -> None:
        logger.info(what, extra={"fields": fields})

    def _log_ready(self, seconds: float) -> None:
        info = self.engine.ready_info
        assert info is not None
        self._log(
            "ready",
            url=self.listener.url,
            model=self.settings.model_name,
            device=info.device,
            dtype=info.dtype,
            linear=info.linear,
            context=info.max_model_len,
            pages=info.pages,
            page_size=info.page_size,
            after=seconds,
        )
        if self.listener.page is not None:
            self._log("playground", url=self.listener.page)


def more_files() -> None:
    """Raise the limit of open files to its maximum. Each connection is one, and connections beyond it are closed
    without a message."""
    if sys.platform == "win32":
        return
    import resource

    before, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has no numeric maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    logger.debug("files that may be open", extra={"fields": {"before": before, "now": now}})
