"""The live view over HTTP: its page, details of single blocks, and a server that needs only the standard library.

`serve` is for engines without a server of their own. `kvpool serve` and `kvpool route` send the same page and answers.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy as np

from kvpool.checks import is_local_name, is_loopback
from kvpool.config import Tier
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError
from kvpool.manager import KVCacheManager
from kvpool.manager.snapshots import RunsSnapshot
from kvpool.view.frames import MAX_NAME
from kvpool.view.hub import Hub

PREFIX = "/view/"
_PAGES = {"/": "index.html", "/docs": "api.html"}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_SEND_SECONDS = 30.0  # a page that takes longer to read a message counts as gone
_ASK_SECONDS = 1.0  # how soon a stream notices that the view was closed


class Asset(NamedTuple):
    """A file of the page."""

    content: bytes
    kind: str


def asset(path: str) -> Asset | None:
    """The file at a path: the page at `/`, a server's API at `/docs`, the files that they load below `/view/`; else None."""
    name = _PAGES.get(path) or path.removeprefix(PREFIX)
    stem, _, ending = name.partition(".")
    if not stem.replace("-", "").isalnum() or ending not in _KINDS or not (path in _PAGES or path.startswith(PREFIX)):
        return None
    file = resources.files("kvpool.view").joinpath("page", name)
    return Asset(file.read_bytes(), _KINDS[ending]) if file.is_file() else None


def block_details(hub: Hub, pool: int, tier: str, block_id: int) -> dict[str, Any]:
    """Who uses a block now: its run, the runs before it, and the runs that continue it."""
    try:
        where = Tier[tier]
    except KeyError:
        raise InvalidArgumentError(f"there is no tier {tier!r}; pools exist on GPU, HOST and DISK") from None
    block = hub.manager.inspect.block(block_id, pool=pool, tier=where)
    details: dict[str, Any] = {
        "block": block.block_id,
        "pool": block.pool,
        "tier": block.tier.name,
        "state": block.state.value,
        "group": block.group,
        "position": block.position,
        "published": block.is_published,
        "requests": [hub.names.name_of(request)[:MAX_NAME] for request in block.request_ids[:32]],
        "num_requests": len(block.request_ids),
    }
    look = hub.last_look
    runs = hub.manager.inspect.runs_snapshot() if look is None or look.runs is None else look.runs
    found = _run_of(runs, pool, where, block_id)
    return details | ({} if found is None else {"run": _run_details(runs, found, hub.manager.inspect.now)})


def _run_of(runs: RunsSnapshot, pool: int, tier: Tier, block_id: int) -> int | None:
    ends = np.cumsum(runs.num_blocks)
    for of_pool, ids in zip(runs.pools, runs.block_ids, strict=True):
        if of_pool == pool:
            places = np.searchsorted(ends, np.flatnonzero(ids == block_id), side="right")
            matching = places[runs.tier[places] == tier]
            if len(matching):
                return int(matching[0])
    return None


def _run_details(runs: RunsSnapshot, run: int, now: float) -> dict[str, Any]:
    below = np.zeros(len(runs.number), np.bool_)
    below[run] = True
    for place in range(run + 1, len(below)):  # parents come before their children
        below[place] = runs.parent[place] >= 0 and below[runs.parent[place]]
    above, parent = 0, int(runs.parent[run])
    while parent >= 0:
        above, parent = above + 1, int(runs.parent[parent])
    scope = runs.scopes[int(runs.scope[run])]
    return {
        "number": int(runs.number[run]),
        "start": int(runs.start[run]),
        "blocks": int(runs.num_blocks[run]),
        "tenant": scope.tenant,
        "adapter": scope.adapter,
        "priority": int(runs.priority[run]),
        "pinned": bool(runs.is_pinned[run]),
        "hits": int(runs.num_hits[run]),
        "idle_seconds": max(0.0, round(now - float(runs.last_access_at[run]), 1)),
        "runs_above": above,
        "children": int((runs.parent == run).sum()),
        "runs_below": int(below.sum()) - 1,
        "blocks_below": int(runs.num_blocks[below].sum()) - int(runs.num_blocks[run]),
    }


class LiveView:
    """A running live view: where it is (`url`), and its end (`close`, or a `with` statement)."""

    def __init__(self, hub: Hub, host: str, port: int, key: str | None) -> None:
        self.hub = hub
        self._server = _ViewServer((host, port), hub, key)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvpool-view-http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens at."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        host = str(self._server.server_address[0])
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    def wait(self) -> None:
        """Returns when it was closed; Ctrl-C ends the waiting."""
        self._thread.join()

    def close(self) -> None:
        """Stops listening, ends the streams, and stops sampling the manager."""
        self._server.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.hub.close()

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def serve(
    manager: KVCacheManager,
    *,
    host: str = "127.0.0.1",
    port: int = 8077,
    key: str | None = None,
    title: str = "kvpool",
    rate: float = 10.0,
    events: bool = True,
    more: Callable[[], Mapping[str, Any]] | None = None,
) -> LiveView:
    """Shows a manager in the browser while it works; returns at once, and costs nothing while no page is open.

    The page changes nothing. It listens only to this machine, unless `key` is given, which the page then asks for. The
    manager is sampled at most `rate` times a second. `events=False` leaves out the list of events, for which the manager
    computes digests of what it stores. `more` is called at every sample for what the manager does not know. It may return
    waiting requests: `{"waiting": [[name, tenant, tokens, seconds], ...], "num_waiting": 1}`. Port 0 takes a free one.
    """
    if not isinstance(manager, KVCacheManager):
        raise InvalidArgumentError(f"serve takes a KVCacheManager, got {type(manager).__name__}")
    if not key and not is_loopback(host):
        raise ConfigError(f"host {host!r} can be reached by others: give a key, which the page then asks for")
    return LiveView(Hub(manager, title=title, rate=rate, events=events, more=more), host, port, key)


def has_key(authorization: str, wanted: bytes) -> bool:
    """Whether this header brings the key that has this SHA-256 digest."""
    scheme, _, given = authorization.partition(" ")
    digest = hashlib.sha256(given.strip().encode("utf-8", "surrogatepass")).digest()
    return hmac.compare_digest(digest, wanted) and scheme.lower() == "bearer"


class _ViewServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], hub: Hub, key: str | None) -> None:
        self.hub = hub
        self.digest = hashlib.sha256(key.encode()).digest() if key else None
        self.closing = threading.Event()
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that left in the middle of an answer is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: _ViewServer
    timeout = _SEND_SECONDS
    server_version = "kvpool"
    sys_version = ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        found = asset(address.path)
        if found is not None:
            self._answer(200, found.content, found.kind)
        elif address.path not in ("/view/stream", "/view/block"):
            self._problem(404, f"there is nothing at {address.path}")
        elif not self._is_allowed():
            self._problem(401, "this view needs its key: send 'Authorization: Bearer KEY'")
        elif address.path == "/view/stream":
            self._stream()
        else:
            self._block({name: values[0] for name, values in parse_qs(address.query).items()})

    def _is_allowed(self) -> bool:
        if self.server.digest is None:
            return is_local_name(self.headers.get("host", ""))
        return has_key(self.headers.get("authorization", ""), self.server.digest)

    def _stream(self) -> None:
        news = threading.Event()
        try:
            viewer = self.server.hub.join(news.set)
        except KVPoolError as error:
            self._problem(503, str(error))
            return
        try:
            self.send_response(200)
            self._headers("text/event-stream")
            self.end_headers()
            while not self.server.closing.is_set():
                if news.wait(_ASK_SECONDS):
                    news.clear()
                    self.wfile.write(viewer.take())
        except OSError:  # the page is gone, or does not read
            self.close_connection = True
        finally:
            self.server.hub.leave(viewer)

    def _block(self, asked: dict[str, str]) -> None:
        try:
            pool, block_id = int(asked.get("pool", "0")), int(asked.get("id", ""))
        except ValueError:
            self._problem(400, "give the numbers of a pool and a block: ?pool=0&tier=GPU&id=7")
            return
        try:
            details = block_details(self.server.hub, pool, asked.get("tier", "GPU"), block_id)
        except KVPoolError as error:
            self._problem(400, str(error))
            return
        self._answer(200, json.dumps(details).encode(), "application/json")

    def _problem(self, status: int, message: str) -> None:
        self._answer(status, json.dumps({"error": {"message": message}}).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self._headers(kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _headers(self, kind: str) -> None:
        self.send_header("content-type", kind)
        for name, value in HEADERS.items():
            self.send_header(name, value)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""
