"""A replica without Ray."""

import asyncio
from array import array

import msgspec

from phase0_request.params import SamplingParams
from phase6_integration.cluster.replica import Replica
from phase6_integration.engine.options import EngineOptions
from phase6_integration.process.messages import EngineRequest, Update

OPTIONS = EngineOptions(kv_cache_pages=64, threads=1, enable_prefix_caching=False)


def test_a_replica_without_prefix_caching_answers_and_reports_no_pages() -> None:
    async def run() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__(OPTIONS)  # type: ignore[misc]
        try:
            request = EngineRequest("r", [tuple(range(40))], SamplingParams(max_tokens=4, ignore_eos=True), [4])
            updates = [
                msgspec.msgpack.decode(body, type=Update)
                async for _, body in replica.generate("me", msgspec.msgpack.encode(request), array("Q").tobytes())
            ]
            assert sum(each.token is not None for update in updates for each in update.progress) == 4
            report = (await replica.record_routing_stats())["report"]
            assert msgspec.msgpack.decode(report) == {"version": 1, "changes": [[b"", b""]], "whole": None, "load": {}}
        finally:
            await replica.__del__()

    asyncio.run(run())
