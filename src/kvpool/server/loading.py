"""What a server answers while its models are loaded: it lives, and is not ready."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive, Scope, Send

from kvpool.server.errors import Problem
from kvpool.version import __version__

_RETRY_SECONDS = 5


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """`/health` and `/version` as ever, status 503 for everything else."""
    known = {"/health": {"status": "ok"}, "/version": {"version": __version__}}
    body, status = known.get(scope["path"]), 200
    headers = [(b"content-type", b"application/json")]
    if body is None:
        problem = Problem(503, "the models are being loaded", code="loading")
        body, status = problem.body(), problem.status
        headers.append((b"retry-after", str(_RETRY_SECONDS).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@contextmanager
def answering(uvicorn: Any, sockets: Sequence[socket.socket], options: Mapping[str, Any]) -> Iterator[None]:
    """While it is open, a thread answers on these sockets, which stay open. `options` are those of uvicorn."""
    server = uvicorn.Server(uvicorn.Config(_app, lifespan="off", timeout_graceful_shutdown=1, **options))
    copies = [one.dup() for one in sockets]  # uvicorn closes what it is given
    thread = threading.Thread(target=server.run, args=(copies,), name="kvpool-loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
