"""PrefixRouter: the routing table as a request router of Ray Serve. One lives in each process that has a handle.

Ray pickles this module by value, with its globals: state does not belong here.
"""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from phase6_integration.cluster.digest import ReplicaReport
from phase6_integration.cluster.routing import RoutingPolicy, RoutingTable


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has most of its prompt cached, unless that one is too busy."""

    def initialize_state(self, **policy: Any) -> None:
        self.table = RoutingTable(RoutingPolicy(**policy))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """The replicas have changed, or have reported."""
        super().update_replicas(replicas)
        self.table.keep(replica.replica_id.unique_id for replica in replicas)
        for replica in replicas:
            if (report := (replica.routing_stats or {}).get("report")) is not None:
                self.table.report(replica.replica_id.unique_id, msgspec.msgpack.decode(report, type=ReplicaReport))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each. The request counts from now on: others may be routed before it is sent."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        front, pages = prompt_of(pending_request)
        self.table.front = front or self.table.front
        order = self.table.choose(pages, [*replicas])
        if order and pending_request is not None and not pending_request.future.done():
            self.table.send(order[0], pending_request.metadata.internal_request_id, pages)
        return [[replicas[name]] for name in order]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Choose a replica, which need not be the first choice. Ray sends the request to it before anything else can
        happen. What Ray offers for this would miss cases: `on_request_routed` comes too late, as a short request may
        have ended before, and nothing is called if the request is cancelled just after the choice."""
        id, (_, pages) = pending_request.metadata.internal_request_id, prompt_of(pending_request)
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except asyncio.CancelledError:
            self.table.finish(id)
            raise
        if (name := replica.replica_id.unique_id) in self.table.replicas:
            self.table.send(name, id, pages)
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A replica has ended a request or refused it: then it may be at another one already."""
        if (view := self.table.replicas.get(replica_id.unique_id)) is not None:
            view.finish(internal_request_id)


def prompt_of(request: PendingRequest | None) -> tuple[str, Sequence[int]]:
    """The name of this front, and the hashes of the pages of the prompt. Only calls of `generate` have them."""
    if request is None or request.metadata.call_method != "generate":
        return "", ()
    front, _, pages = request.args
    return front, array("Q", pages)
