"""Front: the OpenAI server as a Ray Serve ingress. Its engine is all replicas together.

The application, and what AsyncEngine does with tokens, are those of `nanoserve serve`: only the client is another one,
which sends each completion to a replica instead of to a process of its own.
"""

import asyncio
import logging
import time
from array import array
from contextvars import Context
from dataclasses import replace
from pathlib import Path

import msgspec
import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from phase0_request.request import FinishReason
from phase4_radix.extras.block_hashes import block_hashes
from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from phase6_integration.cluster.routing import tables, total
from phase6_integration.engine.generation_config import sampling_defaults
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.stats import Gauges
from phase6_integration.process.async_engine import AsyncEngine
from phase6_integration.process.engine_client import EngineClient
from phase6_integration.process.health import Health, UnavailableError
from phase6_integration.process.messages import EngineRequest, Finish, Logged, Ready, ToEngine, Update

ATTEMPTS = 3  # replicas that may die of one request before it is given up
RETRY = 1.0  # seconds
LOST = (RayActorError, RayServeException)  # of a replica that is gone
encode = msgspec.msgpack.Encoder().encode
decode_update = msgspec.msgpack.Decoder(Update).decode
log = logging.getLogger("nanoserve")


class ReplicasClient(EngineClient):
    """Stands in for the process of an engine: each completion is a call of a replica that streams its updates."""

    def __init__(self, engine: "ClusterEngine", replicas: DeploymentHandle, name: str) -> None:
        super().__init__(
            engine.options, "", on_message=engine.handle, on_failure=lambda *_: None, has_work=lambda: False
        )
        self._engine = engine
        self._replicas = replicas
        self._name = name  # of this front, to replicas
        self._calls: dict[str, asyncio.Task[None]] = {}  # by the id of the completion
        self._loading: asyncio.Task[None] | None = None
        self._page_size = engine.options.page_size

    async def start(self) -> None:
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        """Wait for the first replica."""
        while True:
            try:
                ready = msgspec.msgpack.decode(await self._replicas.ready.remote(), type=Ready)
                break
            except LOST as error:
                log.warning("a replica was lost before it was ready: %s", error)
            except Exception as error:
                log.exception("a replica cannot say that it is ready")
                self._engine.handle(Logged(logging.ERROR, f"a replica cannot say that it is ready: {error}"))
                await asyncio.sleep(RETRY)
        self._page_size = ready.page_size
        self._engine.handle(ready)

    def send(self, message: ToEngine) -> None:
        match message:
            case EngineRequest():
                salt = message.cache_salt
                pages = [array("Q", block_hashes(each, self._page_size, salt)).tobytes() for each in message.prompts]
                for number in message.numbers:  # in contexts of their own: Ray would give all calls one id
                    complete = self._complete(message, number, pages[number // message.n])
                    self._calls[message.name(number)] = asyncio.create_task(complete, context=Context())
            case Finish(id=id):
                if (running := self._calls.get(id)) is not None:
                    asyncio.get_running_loop().call_soon(
                        running.cancel
                    )  # once it has begun: only then it ends in order

    async def stop(self) -> None:
        for call in [*self._calls.values()]:
            call.cancel()
        if self._loading is not None:
            self._loading.cancel()

    # A completion.

    async def _complete(self, request: EngineRequest, number: int, pages: bytes) -> None:
        """Have one completion generated, and end it in every case."""
        id, reason, error = request.name(number), FinishReason.ERROR, None
        left = None if request.timeout is None else request.arrival + request.timeout - time.monotonic()
        try:
            async with asyncio.timeout(left):
                await self._attempt(request, number, pages)
        except asyncio.CancelledError:
            reason = FinishReason.ABORT
        except TimeoutError:
            reason = FinishReason.TIMEOUT
        except UnavailableError as lost:
            log.warning("request %s: %s", id, lost.reason)
            error = lost
        except Exception:
            log.exception("request %s failed", id)
        finally:
            del self._calls[id]
            self._engine.end(id, reason, error)

    async def _attempt(self, request: EngineRequest, number: int, pages: bytes) -> None:
        """Call a replica. If it is lost before the first token, call another."""
        completion, id = request.completion(number), request.name(number)
        for attempt in range(ATTEMPTS):
            message = EngineRequest(
                f"{self._name}.{attempt}.{id}", [completion.prompt_tokens], completion.params,
                [completion.params.max_tokens], 1, request.priority, request.cache_salt, request.timeout,
                request.client,
            )  # fmt: skip
            call = self._replicas.options(stream=True).generate.remote(self._name, encode(message), pages)
            begun = False
            try:
                async for body in call:
                    update = self._translate(decode_update(body), id)
                    begun = begun or any(progress.token is not None for progress in update.progress)
                    self._engine.handle(update)
                    if update.progress[-1].finish_reason is not None:
                        return
            except LOST as error:
                log.warning("request %s: its replica is lost: %s", id, type(error).__name__)
            finally:
                call.cancel()  # no effect if it has ended
            if begun:
                raise UnavailableError(Health.LOST, "its replica was lost after the first token")
        raise UnavailableError(Health.LOST, f"{ATTEMPTS} replicas were lost before the first token")

    def _translate(self, update: Update, id: str) -> Update:
        """An update with the id that this process knows, and in its time: the replica's clock is another machine's."""
        now = time.monotonic()
        progress = [
            msgspec.structs.replace(each, id=id, admitted=each.admitted and now - (update.at - each.admitted))
            for each in update.progress
        ]
        return msgspec.structs.replace(update, at=now, progress=progress)


class ClusterEngine(AsyncEngine):
    """An AsyncEngine that has its completions generated by replicas."""

    has_side_messages = False  # each replica has a process of its own

    def __init__(self, options: EngineOptions, replicas: DeploymentHandle, name: str) -> None:
        super().__init__(options)
        self._replicas = replicas
        self._name = name

    @property
    def gauges(self) -> Gauges:
        """Those of all replicas, as they have last reported them to our router."""
        return total(table.gauges for table in tables)

    @gauges.setter
    def gauges(self, gauges: Gauges) -> None:
        """An update has those of one replica."""

    async def _start_process(self) -> None:
        self._client = ReplicasClient(self, self._replicas, self._name)
        await self._client.start()

    def end(self, id: str, reason: FinishReason, error: UnavailableError | None = None) -> None:
        """End a completion, if it has not ended."""
        if id in self._live:
            self._end(id, reason, time.monotonic(), error)


@serve.ingress()
class Front:
    """The ingress deployment."""

    async def __init__(  # type: ignore[misc]
        self, options: EngineOptions, settings: ServerSettings, replicas: DeploymentHandle
    ) -> None:
        """Start at once. Until the first replica is ready, answers are 503."""
        self.engine = ClusterEngine(options, replicas, ray.get_runtime_context().get_actor_name() or "")
        defaults = sampling_defaults(
            settings.generation_config, Path(self.engine.options.model), settings.override_generation_config
        )
        self.settings = replace(settings, sampling_defaults=defaults)
        await self.engine.start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app(self.engine, self.settings)
        app.state.server.tokenizers.start()
        return app
