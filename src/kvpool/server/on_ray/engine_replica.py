"""One engine as a replica on Ray Serve: it answers the requests of a front, and publishes events of its cache.

A replica calls its ASGI application without a socket (`called`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpool.cluster.proxy.passing import is_event_stream
from kvpool.errors import SequenceStateError
from kvpool.quiet import QuietErrors
from kvpool.server.auth import Access
from kvpool.server.limits import Limits
from kvpool.server.serve_settings import ModelSettings

_quiet = QuietErrors(logging.getLogger("kvpool"))
Message = MutableMapping[str, Any]
MOST_WAITING = 64  # messages of an answer that wait to be taken


class Head(NamedTuple):
    """The first part of an answer: all of it, or the beginning of a stream."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def scope_for(method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """The scope of a request; it can be pickled."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": headers,
        "client": None,
        "server": None,
    }


async def called(app: Any, scope: dict[str, Any], content: bytes) -> AsyncIterator[Head | bytes]:
    """Calls an application: yields the `Head` of its answer, then the stream, several parts at once if they come fast.

    Ending the iteration cancels the work of the application, like a client that hangs up. Not taking parts makes the
    application wait in its `send`, like a client that does not read.
    """
    messages = _SentMessages()
    given = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if given:
            return given.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # nobody hangs up this way

    async def run() -> None:
        try:
            await app(scope, receive, messages.send)
        finally:
            messages.end()

    running = asyncio.ensure_future(run())
    try:
        start = await messages.get()
        if start is None:
            await running
            raise RuntimeError(f"{scope['path']} was not answered")
        headers = [(bytes(name), bytes(value)) for name, value in start.get("headers", ())]
        body, is_last = await messages.next_part()
        while not is_last and (not body or not is_event_stream(headers)):
            more, is_last = await messages.next_part()
            body += more
        yield Head(start["status"], headers, body)
        while not is_last:
            body, is_last = await messages.next_part()
            if body:
                yield body
    finally:
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled() and (error := running.exception()):
            _quiet.error(error, "%s failed", scope["path"])


class _SentMessages:
    """Messages that an application has sent and that wait to be taken, at most `MOST_WAITING`. The end needs no room."""

    def __init__(self) -> None:
        self._sent: asyncio.Queue[Message | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(MOST_WAITING)

    async def send(self, message: Message) -> None:
        """Adds a message, once there is room for it."""
        await self._room.acquire()
        self._sent.put_nowait(message)

    def end(self) -> None:
        """There will be no more."""
        self._sent.put_nowait(None)

    async def get(self) -> Message | None:
        """The next one; None at the end."""
        message = await self._sent.get()
        self._room.release()
        return message

    async def next_part(self) -> tuple[bytes, bool]:
        """All of the body that is there, and whether that was the end of it."""
        parts: list[bytes] = []
        while True:
            message = await self.get()
            if message is None:
                raise ConnectionError("the application ended in the middle of its answer")
            parts.append(message.get("body", b""))
            is_last = not message.get("more_body", False)
            if is_last or self._sent.empty():
                return b"".join(parts), is_last


@dataclass(frozen=True)
class ReplicaPlan:
    """What a replica is made from. Ray sends it to the machine that starts the replica."""

    model: ModelSettings
    access: Access
    limits: Limits
    traces: str | None = None
    host: str | None = None  # where to publish events; None: at the address by which Ray knows the machine


class EngineReplica:
    """The replica that Ray Serve makes from a `ReplicaPlan`."""

    def __init__(self, plan: ReplicaPlan) -> None:
        import ray
        from ray import serve

        from kvpool.server.app import create_app
        from kvpool.server.served_model import ServedModel
        from kvpool.server.tracing import Tracing

        place = serve.get_replica_context().rank
        host = plan.host or ray.util.get_node_ip_address()
        model = placed(plan.model, host, place.local_rank)
        self._engine = model.make_engine()
        self._tracing = None if plan.traces is None else Tracing.to(plan.traces)
        served = ServedModel(model.name, self._engine, model.tool_parser, keeps_varying_lines=model.keep_varying_lines)
        self._app = create_app([served], plan.access, plan.limits, self._tracing)

    def record_replica_metadata(self) -> dict[str, Any]:
        """What Ray tells routers about this replica. A hook of Ray Serve."""
        publisher = self._engine.publishes
        assert publisher is not None
        return {
            "block_size": self._engine.config.block_size,
            "events": publisher.endpoint,
            "replay": publisher.replay_endpoint,
            "pid": os.getpid(),
        }

    async def check_health(self) -> None:
        """Raises if the engine has ended, and takes long if it hangs: then Ray starts another one. A hook of Ray Serve."""
        await asyncio.to_thread(self._engine.stats)  # an engine that has ended still answers this
        if self._engine.is_closed:
            raise self._engine.failure or SequenceStateError("the engine of this replica has ended")

    async def answer(self, scope: dict[str, Any], content: bytes, ticket: None = None) -> AsyncIterator[Head | bytes]:
        """Answers a request like the server on one machine. `ticket` is for the router only."""
        async for part in called(self._app, scope, content):
            yield part

    def __del__(self) -> None:
        if not hasattr(self, "_app"):  # it could not be made
            return
        self._app.state.server.gate.is_draining = True
        self._engine.close()
        if self._tracing is not None:
            self._tracing.close()


def placed(model: ModelSettings, address: str, number: int) -> ModelSettings:
    """The settings of a model for the replica with this number on its machine: it has its own events and disk."""
    host = f"[{address}]" if ":" in address else address
    return model.placed(f"tcp://{host}:0", f"replica-{number}")
