"""The replicas of a deployment: follows their events, and chooses the one that gets a request.

It decides like `kvpool route`: with one `Router` over one `ClusterIndex`, which follows the events of the replicas.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvpool.cluster.index import MAX_NODES, ClusterIndex
from kvpool.cluster.proxy.passing import NOTHING, RoutingRequest
from kvpool.cluster.router import Route, Router, RoutingConfig
from kvpool.cluster.subscriber import NodeSubscriber
from kvpool.errors import NoNodeError

log = logging.getLogger("kvpool")


class Ticket:
    """What routing needs of a request, and the route that it got. Several threads use it, because a handle has its own.

    It is an argument of the call, because Ray shows a router only those. The replica gets None in its place.
    """

    def __init__(self, asked: RoutingRequest = NOTHING) -> None:
        self.asked = asked
        self.failed: set[str] = set()  # replicas that did not answer it
        self.offered: set[str] = set()  # replicas chosen in the current attempt that did not take it
        self.route: Route | None = None
        self.num_replicas = 0  # replicas to choose from in the current attempt; 0 before one was there
        self.describe: Callable[[], dict[str, Any]] | None = (
            None  # the replicas and decisions of the router, for people
        )
        self._is_over = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()

    def take(self, route: Route) -> None:
        """A replica was chosen; the one before it, if there was one, did not take the request."""
        with self._lock:
            before, self.route = self.route, route
            is_over = self._is_over
        if before is not None:
            before.end()
        if is_over:
            route.end()
        self.offered.add(str(route.node))

    def first_token(self) -> None:
        """The answer begins."""
        if self.route is not None:
            self.route.first_token()

    def fail(self) -> None:
        """The chosen replica did not answer: the next attempt goes to another one."""
        with self._lock:
            route, self.route = self.route, None
        if route is not None:
            route.end()
            self.failed.add(str(route.node))
        self.offered.clear()
        self.num_replicas = 0

    def end(self) -> None:
        """The request is over. If a router chooses a replica for it later, `take` ends that route at once."""
        with self._lock:
            self._is_over = True
            route = self.route
        if route is not None:
            route.end()


class ReplicaTable:
    """Follows the events of replicas by their metadata: `{"block_size": 16, "events": "tcp://…", "replay": "tcp://…", …}`.

    `follow` is for tests: it replaces the subscriber to a replica's events.
    """

    def __init__(self, routing: RoutingConfig | None = None, *, follow: Callable[..., Any] = NodeSubscriber) -> None:
        self._routing = routing
        self._follow = follow
        self._followers: dict[str, Any] = {}
        self._said: dict[str, Mapping[str, Any]] = {}
        self._leaving: list[threading.Thread] = []
        self._index: ClusterIndex | None = None
        self._router: Router | None = None

    def set(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the replicas that there are now. Others are removed with all that they held."""
        for name in self._followers.keys() - replicas.keys():
            self.remove(name)
        for name, said in replicas.items():
            if name not in self._followers and "events" in said:
                self._add(name, said)

    def _add(self, name: str, said: Mapping[str, Any]) -> None:
        if self._index is None or self._router is None:
            self._index = ClusterIndex(said["block_size"])
            self._router = Router(self._index, self._routing)
        for thread in self._leaving:
            thread.join()  # frees their places
        self._leaving.clear()
        if len(self._followers) == MAX_NODES:
            log.warning("replica %s gets only what the others cannot take: one router knows %d", name, MAX_NODES)
            return
        self._router.add_node(name)
        self._said[name] = said
        self._followers[name] = self._follow(self._index, name, said["events"], said["replay"])

    def remove(self, name: str) -> None:
        """Removes a replica that died or was stopped. Its follower ends by itself within a tenth of a second."""
        if (follower := self._followers.pop(name, None)) is None:
            return
        del self._said[name]
        assert self._router is not None
        router = self._router
        router.set_ready(name, False)

        def leave() -> None:
            follower.close()
            router.remove_node(name)

        self._leaving.append(threading.Thread(target=leave, name=f"kvpool-leave-{name}", daemon=True))
        self._leaving[-1].start()

    def choose(self, ticket: Ticket, among: Collection[str]) -> str | None:
        """The replica for a request, out of those that Ray sees now; None if this table knows none of them.

        Replicas that were already tried come last: one that was full or slow may take the request the next time.
        """
        ticket.num_replicas, ticket.describe = len(among), self.described
        if self._index is None or self._router is None:
            return None
        others = self._followers.keys() - among
        for exclude in (ticket.failed | ticket.offered, ticket.failed, set()):
            try:
                route = self._router.route(
                    ticket.asked.tokens,
                    session=ticket.asked.session,
                    lora_name=ticket.asked.lora_name,
                    extra_keys=ticket.asked.extra_keys(self._index.block_size),
                    exclude=others | exclude,
                )
            except NoNodeError:
                ticket.offered.clear()
                continue
            ticket.take(route)
            return str(route.node)
        return None

    def described(self) -> dict[str, Any]:
        """Replicas, decisions and the index, for people."""
        if self._index is None or self._router is None:
            return {"nodes": {}, "router": None, "index": None}
        loads, followers, said = self._router.nodes, dict(self._followers), dict(self._said)
        nodes = {
            name: {**said[name], **loads[name]._asdict(), "events": follower.stats._asdict()}
            for name, follower in followers.items()
            if name in loads and name in said
        }
        return {"nodes": nodes, "router": self._router.stats()._asdict(), "index": self._index.stats()._asdict()}

    def close(self) -> None:
        """Stops following."""
        self.set({})
        for thread in self._leaving:
            thread.join()
