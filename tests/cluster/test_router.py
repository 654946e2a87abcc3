"""The router of Ray Serve, with Ray's own queue of requests. Nothing is started."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from phase6_integration.cluster.ray_router import PrefixRouter

DEPLOYMENT = DeploymentID("Replica", "nanoserve")


class Replica:
    """As a router sees one."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.routing_stats: dict[str, Any] = {}
        self.max_ongoing_requests = 1
        self.node_id, self.availability_zone, self.multiplexed_model_ids = "", None, set[str]()
        self.waiting = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.waiting


class Routed:
    """A router of two replicas."""

    def __init__(self) -> None:
        self.a, self.b = Replica("a"), Replica("b")
        self.router = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.router.initialize_state()
        self.router.update_replicas([self.a, self.b])  # type: ignore[list-item]

    @property
    def loads(self) -> dict[str, int]:
        return {name: view.load for name, view in self.router.table.replicas.items()}

    def request(self) -> PendingRequest:
        args = ["me", b"", array("Q", [1, 2]).tobytes()]
        return PendingRequest(args=args, kwargs={}, metadata=RequestMetadata("r", "r", call_method="generate"))

    async def choose(self, request: PendingRequest, **how: Any) -> Any:
        return await self.router._choose_replica_for_request(request, **how)

    def ended(self, replica: Replica) -> None:
        self.router.on_request_completed(replica.replica_id, "r")


def routed(use: Callable[[Routed], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(use(Routed()), 60)

    asyncio.run(run())


def test_a_request_that_ends_at_once_is_no_load_any_more() -> None:
    async def use(routed: Routed) -> None:
        chosen = await routed.choose(routed.request())
        assert routed.loads == {"a": 0, "b": 0} | {chosen.replica_id.unique_id: 1}
        routed.ended(chosen)
        routed.router.on_request_routed(SimpleNamespace(), chosen.replica_id, None)  # Ray is late with this
        assert routed.loads == {"a": 0, "b": 0}

    routed(use)


def test_a_request_goes_to_another_replica_if_the_first_choice_is_full() -> None:
    async def use(routed: Routed) -> None:
        routed.a.waiting, routed.router.table.replicas["b"].others = 1, 5
        chosen = await routed.choose(routed.request())
        assert chosen is routed.b
        assert routed.loads == {"a": 0, "b": 6}

    routed(use)


def test_a_request_that_a_replica_refuses_is_the_load_of_the_next_one() -> None:
    """Ray says that the refused call has ended when the request may be at another replica already."""

    async def use(routed: Routed) -> None:
        request = routed.request()
        first = await routed.choose(request)
        first.waiting = 1
        routed.router.on_new_queue_len_info(first.replica_id, 1)
        then = await routed.choose(request, is_retry=True)
        assert then is not first
        routed.ended(first)
        assert routed.loads[then.replica_id.unique_id] == 1
        routed.ended(then)
        assert routed.loads == {"a": 0, "b": 0}

    routed(use)


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_request_that_is_cancelled_before_it_is_sent_is_no_load(is_chosen: bool) -> None:
    """A replica may be chosen already: Ray then calls nothing."""

    async def use(routed: Routed) -> None:
        if not is_chosen:
            routed.a.waiting = routed.b.waiting = 1
        request = routed.request()
        choice = asyncio.create_task(routed.choose(request))
        while sum(routed.loads.values()) == 0 or request.future.done() != is_chosen:
            await asyncio.sleep(0)
        choice.cancel()
        with pytest.raises(asyncio.CancelledError):
            await choice
        assert routed.loads == {"a": 0, "b": 0}

    routed(use)
