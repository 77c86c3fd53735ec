"""The front of a Ray Serve application: the same API as on one machine. The replica with the least cost answers.

Like `kvpool route`, it sends a request again only while its client has received nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvpool.cluster.proxy.passing import (
    ELSEWHERE,
    NODE_HEADER,
    ElsewhereError,
    are_tokens,
    credentials,
    is_event_stream,
    lost,
    passed_on,
    read_routing_request,
    refusal,
)
from kvpool.quiet import QuietErrors, QuietLog
from kvpool.server.on_ray.engine_replica import Head, scope_for
from kvpool.server.on_ray.replica_table import Ticket

_DEAD = (ActorDiedError, ActorUnavailableError)
_MOST_LOST = 3  # replicas that may fail with one request; a machine that dies takes several
log = logging.getLogger("kvpool")


class Front:
    """The ingress deployment in front of the `engines`. A request waits `patience` seconds for one; None: without limit."""

    def __init__(self, engines: Any, patience: float | None, body_bytes: int) -> None:
        self._engines = engines.options(stream=True)
        self._patience = patience
        self._body_bytes = body_bytes
        self._quiet, self._quiet_errors = QuietLog(log), QuietErrors(log)

    async def __call__(self, request: Request) -> Response:
        """Answers one request."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "").rstrip("/")) or "/"
        if path == "/route/stats":
            return await self._stats(credentials(request.headers))
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > self._body_bytes:
                return refusal(413, f"the body is over this server's limit of {self._body_bytes} bytes", "too_large")
        scope = scope_for(request.method, path, request.scope["query_string"], passed_on(request.headers.raw))
        ticket = Ticket(await read_routing_request(path, request.headers, content, self._tokenized))
        try:
            return await self._answered(scope, content, ticket)
        except BaseException as error:
            ticket.end()
            if isinstance(error, _NobodyError):
                return refusal(503, f"no replica took the request in {self._patience:g} seconds; is one of them alive?")
            if isinstance(error, (RayError, RayServeException)):
                self._quiet_errors.error(error, "a replica failed")
                return refusal(500, f"a replica failed: {type(error).__name__}", "failed")
            raise

    async def _answered(self, scope: dict[str, Any], content: bytes, ticket: Ticket) -> Response:
        """The answer of the best replica, or of the next one if that fails."""
        num_lost = num_refused = 0
        while True:
            try:
                return await self._forward(scope, content, ticket)
            except (*_DEAD, ElsewhereError) as error:
                log.info("%s did not answer (%s): elsewhere", ticket.route and ticket.route.node, error)
                num_replicas = ticket.num_replicas
                ticket.fail()
                num_refused += isinstance(error, ElsewhereError)
                num_lost += not isinstance(error, ElsewhereError)
            if num_lost == _MOST_LOST:
                return refusal(502, f"{num_lost} replicas failed while they had this request", "node_lost")
            if num_refused >= max(num_replicas, 1):
                return refusal(503, f"no replica could answer; {num_refused} refused")

    async def _forward(self, scope: dict[str, Any], content: bytes, ticket: Ticket) -> Response:
        """The answer of one replica, from its first bytes on. Raises if another one may still be asked."""
        parts = self._engines.answer.remote(scope, content, ticket)
        head = await self._first(parts, ticket)
        if head.status in ELSEWHERE:
            raise ElsewhereError(f"status {head.status}")
        ticket.first_token()
        node = str(ticket.route.node) if ticket.route else ""
        answer: Response
        if is_event_stream(head.headers):
            answer = _ReplicaStream(head, parts, ticket)
        else:
            ticket.end()
            answer = Response(head.body, status_code=head.status)
        own = [header for header in answer.raw_headers if header[0] == b"content-length"]
        theirs = [header for header in passed_on(head.headers) if header[0] != b"x-request-id"]  # Ray adds the same one
        answer.raw_headers = [*theirs, *own, (NODE_HEADER.encode(), node.encode())]
        return answer

    async def _first(self, parts: Any, ticket: Ticket) -> Head:
        """The beginning of an answer. Only waiting for a replica has a time limit, not the answer itself."""
        first = asyncio.ensure_future(parts.__anext__())
        try:
            await asyncio.wait([first], timeout=self._patience)
            if not first.done() and not ticket.num_replicas:
                raise _NobodyError
            return await first  # type: ignore[no-any-return]
        except BaseException:
            first.cancel()
            parts.cancel()
            raise

    async def _tokenized(self, question: dict[str, Any], caller: dict[str, str]) -> dict[str, Any]:
        """The token ids of a prompt, from any replica; empty if none answers."""
        head = await self._asked("POST", "/tokenize", caller, json.dumps(question).encode())
        said = json.loads(head.body) if head is not None and head.status == 200 else None
        return said if isinstance(said, dict) and are_tokens(said.get("tokens")) else {}

    async def _stats(self, caller: dict[str, str]) -> Response:
        """Replicas, decisions and the index, for callers who may also list models."""
        ticket = Ticket()
        head = await self._asked("GET", "/v1/models", caller, b"", ticket)
        if head is None or ticket.describe is None:
            return JSONResponse({"nodes": {}, "router": None, "index": None})
        if head.status != 200:
            return Response(head.body, head.status, media_type="application/json")
        return JSONResponse(ticket.describe())

    async def _asked(
        self, method: str, path: str, caller: dict[str, str], content: bytes, ticket: Ticket | None = None
    ) -> Head | None:
        """The answer of any replica to a request that the front makes for a caller; None if none answers."""
        ticket = ticket or Ticket()
        headers = [(b"content-type", b"application/json")] if content else []
        headers += [(name.encode(), value.encode("latin-1")) for name, value in caller.items()]
        scope = scope_for(method, path, b"", headers)
        try:
            return await self._first(self._engines.answer.remote(scope, content, ticket), ticket)
        except (RayError, RayServeException, _NobodyError) as error:
            self._quiet.warning("no replica answers %s: %s", path, error)
            return None
        finally:
            ticket.end()


class _ReplicaStream(StreamingResponse):
    """A stream. When it ends for any reason, the route and the work of the replica end, too."""

    def __init__(self, head: Head, parts: Any, ticket: Ticket) -> None:
        super().__init__(self._all(head, parts), status_code=head.status)
        self._parts, self._ticket = parts, ticket

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            self._ticket.end()
            self._parts.cancel()

    @staticmethod
    async def _all(head: Head, parts: Any) -> AsyncIterator[bytes]:
        """All parts. If the replica dies, no other one can go on, because the client has received something: it is told."""
        yield head.body
        try:
            async for part in parts:
                yield part
        except (RayError, RayServeException) as error:
            yield lost(error)


class _NobodyError(Exception):
    """No replica took a request."""
