"""A front whose replicas are functions of the test. Nothing is started."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorUnavailableError

from phase0_request.params import SamplingParams
from phase6_integration.cluster import front
from phase6_integration.cluster.front import ClusterEngine
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.health import Health
from phase6_integration.process.messages import EngineRequest, Ready

REQUEST = EngineRequest("r", [(1, 2, 3)], SamplingParams(), [4])


class ResponseGenerator:
    """Stands in for a DeploymentResponseGenerator: it fails if it should, and else says nothing."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()
        yield b""

    def cancel(self) -> None:
        """It has no effect on a replica that cannot be reached."""


class Replicas:
    """Stands in for a DeploymentHandle."""

    def __init__(self, error: Exception | None = None, failures: int = 0) -> None:
        self.error = error
        self.failures = failures  # before one is ready
        self.ready = self.generate = self
        self.called: list[EngineRequest] = []

    def options(self, **_: Any) -> "Replicas":
        return self

    def remote(self, *arguments: Any) -> Any:
        if not arguments:
            return self._ready()
        self.called.append(msgspec.msgpack.decode(arguments[1], type=EngineRequest))
        return ResponseGenerator(self.error)

    async def _ready(self) -> bytes:
        if self.failures:
            self.failures -= 1
            raise ValueError("it is of another version")
        return msgspec.msgpack.encode(Ready(64, 8, 16, "cpu", "float32"))


def with_front(replicas: Replicas, use: Callable[[ClusterEngine], Any]) -> None:
    async def run() -> None:
        async with ClusterEngine(EngineOptions(), replicas, "me") as engine:  # type: ignore[arg-type]
            await use(engine)

    asyncio.run(run())


def test_a_client_that_hangs_up_before_its_request_is_sent_leaves_nothing() -> None:
    async def use(engine: ClusterEngine) -> None:
        engine.abort(engine.submit(REQUEST))
        await asyncio.wait_for(engine.drain(60), 10)
        assert engine.unfinished == 0

    with_front(Replicas(), use)


def test_a_replica_that_could_not_be_reached_may_still_run_what_it_is_asked_again() -> None:
    """So each attempt has a name of its own: an engine has no two requests of one name."""
    replicas = Replicas(ActorUnavailableError("it is silent", None))

    async def use(engine: ClusterEngine) -> None:
        [chunk async for chunk in engine.submit(REQUEST)]
        names = [request.id for request in replicas.called]
        assert len(names) == len(set(names)) == 3

    with_front(replicas, use)


def test_a_front_that_cannot_ask_whether_replicas_are_ready_says_why_and_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        engine = ClusterEngine(EngineOptions(), Replicas(failures=2), "me")  # type: ignore[arg-type]
        await engine.start()
        while "another version" not in engine.reason:
            await asyncio.sleep(0)
        assert engine.health is Health.LOADING
        await asyncio.wait_for(engine.ready(), 10)
        await engine.close()

    monkeypatch.setattr(front, "RETRY", 0.01)
    asyncio.run(run())
