"""The request router of the engines' deployment: Ray Serve asks it to which replica a call goes."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from kvpool.cluster.router import RoutingConfig
from kvpool.server.on_ray.replica_table import ReplicaTable, Ticket


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a call to the replica that has most of its prompt cached and least to do, as `kvpool route` does.

    Ray says which replicas there are, and retries calls that none of them accepted. Each handle has its own router. So each
    front knows what all replicas have cached, but only the load that it makes itself.
    """

    # A busy replica may answer late how many calls it has. Choosing another one for that would lose the cached prefix.
    queue_len_response_deadline_s = 5.0
    max_queue_len_response_deadline_s = 10.0

    def initialize_state(self, **routing: Any) -> None:
        """Called by Ray with `request_router_kwargs`: fields of a `RoutingConfig`."""
        self._table = ReplicaTable(RoutingConfig(**routing))

    def update_replicas(self, replicas: list[Any]) -> None:
        """Replicas came or went."""
        super().update_replicas(replicas)
        self._table.set({each.replica_id.unique_id: each.replica_metadata for each in replicas})

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """A call showed that a replica is dead, before Ray's controller knows."""
        super().on_replica_actor_died(replica_id)
        self._table.remove(replica_id.unique_id)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """The replica for a call. All of them if the call is not from the front or nothing is known of them."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait before it asks full replicas again
        tickets = [each for each in (pending_request.args if pending_request else ()) if isinstance(each, Ticket)]
        if not tickets:
            return [candidate_replicas]
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        chosen = self._table.choose(tickets[0], replicas.keys())
        return [candidate_replicas] if chosen is None else [[replicas[chosen]]]
