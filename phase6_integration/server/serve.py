"""serve: a server from its first line to its exit code.

The port is taken first, so that one in use is an error at once. The engine then loads in its own process while this one
loads the HTTP front and says 503. At a signal the engine is drained before uvicorn is told to end: whoever asks in the
meantime hears why, instead of finding a closed port. Nothing that is waited for at the end can take for ever.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Iterator
from typing import Any, NoReturn

from phase6_integration import loaded
from phase6_integration.async_engine import AsyncEngine, UnavailableError
from phase6_integration.options import EngineOptions
from phase6_integration.server import logs
from phase6_integration.server.listening import BACKLOG, bind, more_files
from phase6_integration.server.settings import ServerSettings

LINGER = 5  # seconds that responses are given to reach their clients, once all answers have ended

logger = logging.getLogger("nanoserve")


def serve(options: EngineOptions, settings: ServerSettings) -> int:
    """Serve until a signal: 0 after an orderly end by SIGTERM, 130 by Ctrl-C, 1 if it could not begin, 128 + n if a
    second signal n cut the end short. A server that has begun takes this process with it at its end."""
    logs.configure(settings)
    try:
        listener = bind(settings.host, settings.port)
    except OSError as error:
        return _failed(f"cannot listen on {settings.host} port {settings.port}: {error}")
    with listener:
        try:
            engine = AsyncEngine(options)
        except (OSError, ValueError) as error:
            return _failed(error)
        more_files()
        return _run(_Front(engine, settings, listener))


def _run(front: "_Front") -> NoReturn:
    """To the end of this process. Left to themselves, a loop and an interpreter wait for their threads, and a template
    may never leave the one it is in."""
    code = 1
    try:
        code = _new_loop().run_until_complete(front.run())
    except Exception:
        logger.exception("the server has failed")
    logging.shutdown()
    os._exit(code)


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _failed(error: object) -> int:
    first, *_ = str(error).splitlines() or [type(error).__name__]
    print(f"nanoserve serve: {first}", file=sys.stderr)
    return 1


class _Signals:
    """SIGTERM and SIGINT: the first asks for an end, the second insists on it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()
        self.code = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._heard, number)

    def _heard(self, number: int) -> None:
        if number == signal.SIGINT or self.asked.is_set():
            self.code = 128 + number
        if self.asked.is_set():
            self.insisted.set()
        self.asked.set()


async def _unless(event: asyncio.Event, work: Awaitable[object]) -> bool:
    """Do the work to its end and return True; or leave it, once the event is set. What the work raises is raised."""
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


class _Front:
    """One life of the server."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings, listener: socket.socket) -> None:
        self.engine = engine
        self.settings = settings
        self.listener = listener

    async def run(self) -> int:
        start = time.monotonic()
        signals = _Signals()
        self._say("loading", model=self.settings.model_name, directory=self.engine.options.model)
        failure = None
        try:
            await self.engine.start()
            making = asyncio.ensure_future(asyncio.to_thread(self._server))  # a signal is heard while it imports
            if await _unless(signals.asked, making):
                failure = await self._live(making.result(), signals, start)
        finally:
            await _unless(signals.insisted, self.engine.close())
        if failure is not None:
            return _failed(failure)
        self._say("stopped", at_once=signals.insisted.is_set())
        return signals.code

    async def _live(self, server: "Any", signals: _Signals, start: float) -> str | None:
        """From the first connection to the last. Why the engine could not be loaded, if it could not."""
        serving = asyncio.create_task(server.serve(sockets=[self.listener]))
        serving.add_done_callback(lambda _: signals.asked.set())  # should it fail, nothing is left to wait for
        self._say("listening", url=self._url)
        failure = await self._serve_until(signals.asked, start)
        if failure is None:
            self._say("draining", at_most=float(self.settings.shutdown_timeout))
            await _unless(signals.insisted, self.engine.drain(self.settings.shutdown_timeout))
        server.should_exit = True
        await _unless(signals.insisted, serving)
        return failure

    async def _serve_until(self, asked: asyncio.Event, start: float) -> str | None:
        """Load, then serve, until the event is set. Why the engine could not be loaded, if it could not."""
        try:
            with loaded.for_good():
                ready = await _unless(asked, self.engine.ready())
            if ready:
                self._say_ready(time.monotonic() - start)
                await asked.wait()
        except UnavailableError as error:
            return error.reason
        return None

    def _server(self) -> "Any":
        import uvicorn

        from phase6_integration.server.app import create_app
        from phase6_integration.server.connection import connections

        class Server(uvicorn.Server):
            """Signals are not its business: by its own rules it would close the port first."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        config = uvicorn.Config(
            create_app(self.engine, self.settings),
            http=connections(self.settings),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=round(self.settings.idle_timeout),
            timeout_graceful_shutdown=LINGER,
        )
        return Server(config)

    @property
    def _url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _say(self, what: str, **fields: object) -> None:
        logger.info(what, extra={"fields": fields})

    def _say_ready(self, seconds: float) -> None:
        word = self.engine.ready_word
        assert word is not None
        self._say(
            "ready",
            url=self._url,
            model=self.settings.model_name,
            device=word.device,
            dtype=word.dtype,
            context=word.max_model_len,
            pages=word.pages,
            page_size=word.page_size,
            after=seconds,
        )
