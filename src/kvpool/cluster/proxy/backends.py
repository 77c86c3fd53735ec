"""The servers behind a proxy: their addresses, health checks, event feeds and time limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from kvpool.checks import check_int, check_number, show
from kvpool.cluster.index import ClusterIndex
from kvpool.cluster.publisher import port_above
from kvpool.cluster.router import NodeLoad, Router
from kvpool.cluster.subscriber import NodeSubscriber
from kvpool.errors import ConfigError
from kvpool.quiet import QuietLog
from kvpool.terminal import is_http

log = logging.getLogger("kvpool")
_LACKS_SECONDS = 10.0  # an adapter may be loaded in the meantime
_MOST_LACKS = 1024
_LINES_A_MINUTE = 10  # in the log, about each server that comes and goes


@dataclass(frozen=True)
class ProxyLimits:
    """`body_bytes` and `send_seconds` are those of a server: the size of a body, and how long a client may take to send a
    part of it, or to read a part of an answer.

    The proxy gives up an answer if its server sends nothing for `silence_seconds`. If a server answers nobody for
    `lost_seconds`, not even health checks, its requests count as lost: they go elsewhere, or end with an error.
    """

    body_bytes: int = 4 << 20
    send_seconds: float = 30.0
    silence_seconds: float = 600.0
    lost_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_int(self.body_bytes, "body_bytes", 1, 2**40)
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if not 0 < check_number(value, each.name, "seconds, more than 0") <= 1e9:
                raise ConfigError(f"{each.name}={value} must be seconds, more than 0")


class Backend(NamedTuple):
    """A server by its URL, which is its name; where it publishes events and where it sends them again, if it does."""

    url: str
    events: str | None
    replay: str | None

    @classmethod
    def parse(cls, text: str) -> Backend:
        """`http://HOST:PORT[=tcp://HOST:PORT[,tcp://HOST:PORT]]`; replay is one port above the events' unless said.

        >>> Backend.parse("http://127.0.0.1:8000=tcp://127.0.0.1:5557")
        Backend(url='http://127.0.0.1:8000', events='tcp://127.0.0.1:5557', replay='tcp://127.0.0.1:5558')
        """
        url, _, sockets = text.partition("=")
        events, _, replay = sockets.partition(",")
        if not is_http(url) or "?" in url or "#" in url:
            raise ConfigError(f"a backend is http://HOST:PORT=tcp://HOST:PORT, got {show(text)}")
        if not events:
            return cls(url.rstrip("/"), None, None)
        return cls(url.rstrip("/"), events, replay or port_above(events))


class NodeLostError(Exception):
    """A server has answered nobody for too long; its requests are lost."""


class _Waiting:
    """A task that waits for a server. A lost server and a client that leaves both cancel it; this tells which one did."""

    __slots__ = ("_num_before", "_num_cancels", "_task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._num_cancels = 0
        self._num_before: int = getattr(task, "cancelling", lambda: 0)()

    def give_up(self) -> None:
        """Its server is lost."""
        self._num_cancels += 1
        self._task.cancel()

    def is_lost_only(self) -> bool:
        """Whether only `give_up` cancelled it; undoes that cancellation. Python 3.10 cannot tell."""
        left = self._num_before
        if hasattr(self._task, "uncancel"):  # since Python 3.11 a task counts what cancelled it
            for _ in range(self._num_cancels):
                left = self._task.uncancel()
        return self._num_cancels > 0 and left <= self._num_before


class Backends:
    """Watches servers. One that does not answer gets no requests, and its blocks are forgotten.

    A health check runs `every` so many seconds, with `patience` seconds for the answer. If a server gives none for
    `lost_seconds`, its requests count as lost.
    """

    def __init__(
        self,
        backends: list[Backend],
        index: ClusterIndex,
        router: Router,
        client: Any,
        *,
        every: float,
        patience: float,
        lost_seconds: float,
    ) -> None:
        self._client = client
        self._index = index
        self._router = router
        self._every, self._patience, self._lost_seconds = every, patience, lost_seconds
        self._followers: dict[str, NodeSubscriber] = {}
        self._lost: set[str] = set()
        self._silent: set[str] = set()
        self._untold: set[str] = set()  # servers whose last change is not in the log yet
        self._lacks: dict[tuple[str, str], float] = {}  # when a server said that it does not have a model
        self.urls = [backend.url for backend in backends]
        self._quiet = {url: QuietLog(log, _LINES_A_MINUTE) for url in self.urls}
        self._waiting: dict[str, set[_Waiting]] = {url: set() for url in self.urls}
        for backend in backends:
            router.add_node(backend.url)
            router.set_ready(backend.url, False)  # until it answers
            if backend.events is not None:
                self._followers[backend.url] = NodeSubscriber(index, backend.url, backend.events, backend.replay)

    async def watch(self) -> None:
        """Runs the health checks of all servers, independently of each other."""
        await asyncio.gather(*(self._watch(url) for url in self.urls))

    async def _watch(self, url: str) -> None:
        clock = asyncio.get_running_loop().time
        heard = clock()
        while True:
            answers = await self._answers(url)
            self.note(url, is_ready=bool(answers))
            if answers is not None:
                heard = clock()
                self._silent.discard(url)
                self._lost.discard(url)
            else:
                self._silent.add(url)
                if clock() - heard >= self._lost_seconds:
                    self._give_up(url)
            await asyncio.sleep(self._every)

    def _give_up(self, url: str) -> None:
        """Ends all waits for this server."""
        self._lost.add(url)
        for waiting in self._waiting[url]:
            waiting.give_up()

    @contextmanager
    def waiting(self, url: str) -> Iterator[None]:
        """Wraps a wait for a server; raises `NodeLostError` if the server is lost."""
        task = asyncio.current_task()
        assert task is not None
        if url in self._lost:
            raise NodeLostError(f"{url} answers nobody")
        waiting = _Waiting(task)
        self._waiting[url].add(waiting)
        try:
            yield
        except asyncio.CancelledError:
            if not waiting.is_lost_only():
                raise
            raise NodeLostError(f"{url} answers nobody") from None
        finally:
            self._waiting[url].discard(waiting)

    async def _answers(self, url: str) -> bool | None:
        """Whether a server takes requests, by `/ready`, or by `/health` if it has no such path. None: no answer."""
        try:
            answer = await self._client.get(f"{url}/ready", timeout=self._patience)
            if answer.status_code == 404:
                answer = await self._client.get(f"{url}/health", timeout=self._patience)
        except Exception as error:
            log.debug("%s does not answer: %s", url, error)
            return None
        return bool(answer.status_code == 200)

    def note(self, url: str, *, is_ready: bool) -> None:
        """Records whether a server is ready, after a health check or a failed request."""
        if self._router.nodes[url].is_ready != is_ready:
            self._router.set_ready(url, is_ready)
            if is_ready and (follower := self._followers.get(url)):
                follower.resync()  # its blocks were forgotten
            self._untold.add(url)
            self._tell(url, is_ready)
        elif url in self._untold and self._quiet[url].is_due:
            self._tell(url, is_ready)

    def note_lack(self, url: str, model: str | None) -> None:
        """A server said that it does not have this model or adapter. It is believed for a while."""
        if model is not None:
            self._lacks[url, model] = time.monotonic()
            while len(self._lacks) > _MOST_LACKS:
                del self._lacks[next(iter(self._lacks))]

    def without(self, model: str | None) -> set[str]:
        """The servers that said lately that they do not have this model."""
        since = time.monotonic() - _LACKS_SECONDS
        return {url for (url, name), at in self._lacks.items() if name == model and at > since}

    def _tell(self, url: str, is_ready: bool) -> None:
        """Logs the state of a server; later, if it changed too often in this minute."""
        if (added := self._quiet[url].added()) is not None:
            self._untold.discard(url)
            log.warning("%s %s%s", url, "takes requests" if is_ready else "does not answer: it gets no requests", added)

    def _state(self, url: str, load: NodeLoad) -> str:
        if load.is_ready:
            return "ready"
        return "lost" if url in self._lost else "silent" if url in self._silent else "not ready"

    def described(self) -> dict[str, Any]:
        """Every server, for people."""
        loads, blocks = self._router.nodes, self._index.node_blocks()
        return {
            url: {
                "state": self._state(url, loads[url]),
                **loads[url]._asdict(),
                "blocks": blocks[url]._asdict(),
                "events": self._followers[url].stats._asdict() if url in self._followers else None,
            }
            for url in self.urls
        }

    def close(self) -> None:
        """Stops following."""
        for follower in self._followers.values():
            follower.close()
