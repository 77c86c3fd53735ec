"""A request on its way to a replica, as the front and the router of its handle see it. It never leaves their process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kvpool.cluster.proxy.prompt_tokens import NOTHING, Asked
from kvpool.cluster.router import Route


class Ticket:
    """What routing needs of a request, and the route that it got. Any thread may use it: a handle routes in one of its own.

    It is an argument of the call, because that is what Ray shows a router; a replica gets None in its place.
    """

    def __init__(self, asked: Asked = NOTHING) -> None:
        self.asked = asked
        self.failed: set[str] = set()  # replicas that did not answer it
        self.offered: set[str] = set()  # replicas chosen in the current attempt that did not take it
        self.route: Route | None = None
        self.num_replicas = 0  # to choose from, in the current attempt; 0 while nobody was there to take it
        self.describe: Callable[[], dict[str, Any]] | None = None  # the router's replicas and decisions, for people
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
        """The request is over, also for a router that still has a replica in mind for it."""
        with self._lock:
            self._is_over = True
            route = self.route
        if route is not None:
            route.end()
