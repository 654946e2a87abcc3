"""A replica without Ray."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from ray.exceptions import ActorDiedError

from phase0_request.params import SamplingParams
from phase6_integration.cluster import replica as module
from phase6_integration.cluster.digest import Digest, ReplicaReport
from phase6_integration.cluster.replica import Replica
from phase6_integration.engine.options import EngineOptions
from phase6_integration.extras.kv_events.kv_events import BlockStored, EventBatch
from phase6_integration.process.messages import EngineRequest, Update

OPTIONS = EngineOptions(kv_cache_pages=64, threads=1, enable_prefix_caching=False)


class Fronts:
    """Stands in for Ray's actors. They die when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dead = False
        monkeypatch.setattr(module, "WATCH", 0.01)
        monkeypatch.setattr(module.ray, "get_actor", lambda name, namespace: SimpleNamespace(__ray_ready__=self))

    async def remote(self) -> None:
        if self.dead:
            raise ActorDiedError


@asynccontextmanager
async def loaded() -> AsyncIterator[Replica]:
    replica = Replica.__new__(Replica)
    await replica.__init__(OPTIONS)  # type: ignore[misc]
    try:
        yield replica
    finally:
        await replica._client.stop()
        replica.__del__()


def call(replica: Replica, tokens: int) -> AsyncIterator[bytes]:
    request = EngineRequest("r", [tuple(range(40))], SamplingParams(max_tokens=tokens, ignore_eos=True), [tokens])
    return replica.generate("me", msgspec.msgpack.encode(request), array("Q").tobytes())


async def reported(replica: Replica) -> ReplicaReport:
    return msgspec.msgpack.decode((await replica.record_routing_stats())["report"], type=ReplicaReport)


def test_a_replica_without_prefix_caching_answers_and_reports_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with loaded() as replica:
            updates = [msgspec.msgpack.decode(body, type=Update) async for body in call(replica, 4)]
            assert sum(each.token is not None for update in updates for each in update.progress) == 4
            report = await reported(replica)
            assert (report.version, report.changes, report.whole, report.load) == (1, [(b"", b"")], None, {})

    Fronts(monkeypatch)
    asyncio.run(run())


def test_a_front_that_dies_ends_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before their last token."""
    fronts = Fronts(monkeypatch)

    async def run() -> None:
        async with loaded() as replica:
            tokens = 0
            async for body in call(replica, 900):
                tokens += len(msgspec.msgpack.decode(body, type=Update).progress)
                fronts.dead = True
            assert tokens < 800
            report = await reported(replica)
            assert report.load == {}
            assert (report.gauges.running, report.gauges.pages_used) == (0, 0)

    asyncio.run(run())


def test_events_that_cannot_be_read_empty_the_digest_and_the_next_ones_are_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "RETRY", 0.0)
    address = f"ipc://{tmp_path}/events"

    async def run() -> None:
        replica = Replica.__new__(Replica)
        replica._digest = Digest()
        replica._client = replica._directory = SimpleNamespace(kill=int, cleanup=int)  # type: ignore[assignment]
        replica._fronts = {}
        with zmq.Context() as context, context.socket(zmq.PUB) as socket:
            socket.bind(address)
            replica._following = asyncio.create_task(replica._follow(address))

            numbers = count()

            async def until(pages: set[int], again: bytes | None = None) -> None:
                """Wait for these pages. A message is sent again and again: before a connection it would be lost."""
                while replica._digest.pages != pages:
                    if again is not None:
                        socket.send_multipart([b"", next(numbers).to_bytes(8, "big"), again])
                    await asyncio.sleep(0.01)

            await until({1}, stored(1))
            socket.send_multipart([b"", next(numbers).to_bytes(8, "big"), b"nothing"])
            await until(set())
            await until({2}, stored(2))
            assert replica._digest.pages == {2}, "the page of before the fault is forgotten"
            assert not replica._following.done()

    asyncio.run(asyncio.wait_for(run(), 60))


def stored(page: int) -> bytes:
    event: Any = BlockStored([page], None, [5] * 16, 16, None, "GPU", None)
    return msgspec.msgpack.encode(EventBatch(0.0, [event]))
