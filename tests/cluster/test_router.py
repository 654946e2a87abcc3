"""The router of Ray Serve, called in the orders in which Ray calls it. Nothing is started."""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

from phase6_integration.cluster.ray_router import PrefixRouter

REPLICAS: list[Any] = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "ab"]


def router() -> PrefixRouter:
    made = PrefixRouter.__new__(PrefixRouter)
    made.initialize_state()
    made.table.keep("ab")
    return made


async def choose(router: PrefixRouter) -> tuple[Any, Any]:
    """Have a request routed. Returns its future, and the replica that it should go to."""
    metadata = SimpleNamespace(internal_request_id="r", call_method="generate")
    future = asyncio.get_running_loop().create_future()
    request: Any = SimpleNamespace(metadata=metadata, args=["me", b"", array("Q", [1, 2]).tobytes()], future=future)
    return future, (await router.choose_replicas(REPLICAS, request))[0][0]


def loads(router: PrefixRouter) -> dict[str, int]:
    return {name: view.load for name, view in router.table.replicas.items()}


async def end(router: PrefixRouter, future: Any, replica: Any) -> None:
    future.set_result(replica)
    await asyncio.sleep(0)
    assert loads(router)[replica.replica_id.unique_id] == 1
    router.on_request_completed(replica.replica_id, "r")
    router.on_request_routed(SimpleNamespace(), replica.replica_id, None)  # Ray is late with this if it was short


def test_a_request_that_ends_at_once_is_no_load_any_more() -> None:
    async def run() -> None:
        for replica in REPLICAS:  # the first choice, and the other one
            made = router()
            future, _ = await choose(made)
            await end(made, future, replica)
            assert loads(made) == {"a": 0, "b": 0}

    asyncio.run(run())


def test_a_request_that_a_replica_refuses_is_the_load_of_the_next_one() -> None:
    """Ray says that the refused call has ended when the request may be at another replica already."""

    async def run() -> None:
        made, (a, b) = router(), REPLICAS
        future, _ = await choose(made)
        future.set_result(a)
        future, _ = await choose(made)
        future.set_result(b)
        await asyncio.sleep(0)
        made.on_request_completed(a.replica_id, "r")
        assert loads(made) == {"a": 0, "b": 1}
        made.on_request_completed(b.replica_id, "r")
        assert loads(made) == {"a": 0, "b": 0}

    asyncio.run(run())


def test_a_request_that_is_cancelled_before_it_is_sent_is_no_load() -> None:
    async def run() -> None:
        made = router()
        future, _ = await choose(made)
        assert sum(loads(made).values()) == 1
        future.cancel()
        await asyncio.sleep(0)
        assert loads(made) == {"a": 0, "b": 0}

    asyncio.run(run())
