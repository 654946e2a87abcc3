"""Replica: an engine process as a Ray actor. Requests and updates are the messages that an engine process reads and
sends.

If the engine fails, the actor ends with it, and Ray Serve starts another: there is nothing in it to be saved.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import ray
import zmq
import zmq.asyncio
from ray.exceptions import ActorUnavailableError, RayActorError

from phase0_request.request import FinishReason
from phase6_integration.cluster.digest import Digest
from phase6_integration.engine.located import located
from phase6_integration.engine.options import EngineOptions
from phase6_integration.engine.stats import Gauges
from phase6_integration.extras.kv_events.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from phase6_integration.process.engine_client import BUNDLED_ENGINE, EngineClient
from phase6_integration.process.health import Health
from phase6_integration.process.messages import EngineRequest, Finish, Logged, Progress, Ready, SideMessage, Update

ENGINE_FAILED = 70  # exit status of the actor
NAMESPACE = "serve"  # of the actors of Ray Serve
WATCH = 2.0  # seconds between two looks at whether a front lives
RETRY = 1.0  # seconds
INTERVAL = 0.02  # seconds between two updates of a request: each costs Ray about a millisecond
encode = msgspec.msgpack.Encoder().encode
log = logging.getLogger("nanoserve")


class Unsent:
    """What the engine has said of one request and its front has not got yet."""

    def __init__(self, front: str) -> None:
        self.front = front
        self.progress: list[Progress] = []
        self.at = 0.0  # the end of the last step
        self.arrived = asyncio.Event()


class Replica:
    """The deployment. Its methods run on one event loop."""

    async def __init__(self, options: EngineOptions) -> None:  # type: ignore[misc]
        """Load the model. Ray Serve sends requests only after this."""
        self._unsent: dict[str, Unsent] = {}
        self._fronts: dict[str, asyncio.Task[None]] = {}  # by name, what watches it
        self._gauges = Gauges()
        self._digest = Digest()
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        options, _ = located(options)
        self._directory = tempfile.TemporaryDirectory(prefix="nanoserve-")
        events = f"ipc://{self._directory.name}/kv_events"
        self._following = asyncio.create_task(self._follow(events))
        if options.enable_prefix_caching:
            options = replace(options, more={**options.more, "kv_events_config": {"endpoint": events}})
        self._client = EngineClient(
            options,
            BUNDLED_ENGINE,
            on_message=self._receive,
            on_failure=self._failed,
            has_work=lambda: bool(self._unsent),
        )
        await self._client.start()
        self._info = await self._ready

    # Called by fronts.

    async def ready(self) -> bytes:
        """What the engine said when it was loaded."""
        return encode(self._info)

    async def generate(self, front: str, message: bytes, pages: bytes) -> AsyncIterator[bytes]:
        """Generate one completion. Yields the updates about it. `pages` are hashes of the prompt, for the router. A
        front that cancels the call aborts the request. So does one that dies."""
        request = msgspec.msgpack.decode(message, type=EngineRequest)
        (number,) = request.numbers
        id = request.name(number)
        unsent = self._unsent[id] = Unsent(front)
        if front not in self._fronts:
            self._fronts[front] = asyncio.create_task(self._watch(front))
        reason: FinishReason | None = None
        sent = 0.0
        self._client.watchdog.work_begins()
        self._client.send(msgspec.structs.replace(request, arrival=time.monotonic()))  # on the clock of this machine
        try:
            while reason is None:
                await unsent.arrived.wait()
                if (early := sent + INTERVAL - time.monotonic()) > 0:
                    await asyncio.sleep(early)
                sent = time.monotonic()
                unsent.arrived.clear()
                progress, unsent.progress = unsent.progress, []
                reason = progress[-1].finish_reason
                yield encode(Update(unsent.at, 0.0, 0, 0, progress, self._gauges))
        finally:
            del self._unsent[id]
            if reason is None:
                self._client.send(Finish(id, FinishReason.ABORT))

    async def _watch(self, front: str) -> None:
        """Abort the requests of a front once it has died: Ray does not cancel the calls of a dead caller."""
        try:
            actor = ray.get_actor(front, NAMESPACE)
            while True:
                with contextlib.suppress(ActorUnavailableError):
                    await actor.__ray_ready__.remote()
                await asyncio.sleep(WATCH)
        except (RayActorError, ValueError) as error:  # ValueError: no actor has this name
            log.warning("a front is gone: %s", error)
        del self._fronts[front]
        for id, unsent in self._unsent.items():
            if unsent.front == front:
                self._client.send(Finish(id, FinishReason.ABORT))

    # Called by Ray Serve.

    async def record_routing_stats(self) -> dict[str, bytes]:
        """What routers learn, each few tenths of a second."""
        load = Counter(unsent.front for unsent in self._unsent.values())
        return {"report": encode(self._digest.report(load, self._gauges))}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy learns."""
        return {"waiting": self._gauges.waiting, "pages_used": self._gauges.usage}

    def __del__(self) -> None:
        """The end, once all requests have ended or the grace period is over. May be called again."""
        for task in (self._following, *self._fronts.values()):
            task.cancel()
        self._client.kill()
        self._directory.cleanup()

    # What the engine has cached.

    async def _follow(self, endpoint: str) -> None:
        """Keep the digest equal to the engine's prefix cache. If events are missing or cannot be read, it begins anew:
        a router may know too little, and not too much."""
        while True:
            try:
                await self._read_events(endpoint)
            except Exception:
                log.exception("the engine's KV events cannot be read: what is cached now is not routed to")
                self._digest.clear()
                await asyncio.sleep(RETRY)

    async def _read_events(self, endpoint: str) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.set_hwm(0)
            socket.connect(endpoint)
            socket.subscribe(b"")
            expected = 0
            while True:
                _, number, body = await socket.recv_multipart()
                if int.from_bytes(number, "big") != expected:
                    self._digest.clear()
                expected = int.from_bytes(number, "big") + 1
                for event in msgspec.msgpack.decode(body, type=EventBatch).events:
                    match event:
                        case BlockStored():
                            self._digest.stored(event.block_hashes)
                        case BlockRemoved():
                            self._digest.removed(event.block_hashes)
                        case AllBlocksCleared():
                            self._digest.clear()

    # Called by the engine's client.

    def _receive(self, message: Ready | Update | SideMessage | Logged) -> None:
        match message:
            case Ready():
                self._ready.set_result(message)
            case Update():
                self._gauges = message.gauges
                for progress in message.progress:
                    if (unsent := self._unsent.get(progress.id)) is not None:
                        unsent.progress.append(progress)
                        unsent.at = message.at
                        unsent.arrived.set()

    def _failed(self, health: Health, reason: str) -> None:
        log.error("the engine is %s: %s", health.value, reason)
        if not self._ready.done():
            self._ready.set_exception(RuntimeError(f"the engine is {health.value}: {reason}"))
            return
        self._directory.cleanup()
        os._exit(ENGINE_FAILED)
