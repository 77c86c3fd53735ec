"""What a front does with answers of servers: which headers pass, when another one is asked, what clients are told."""

from __future__ import annotations

import json
from typing import Any

NODE_HEADER = "x-kvpool-node"
ELSEWHERE = {502, 503, 504}  # this node cannot, another one may
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}


def passed_on(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that are not about one connection, byte for byte, also those that come twice."""
    return [(name, value) for name, value in headers if name.lower().decode("latin-1") not in _HOP_BY_HOP]


def is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether an answer comes part by part."""
    return any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def lost(error: Exception) -> bytes:
    """The end of a stream whose node failed in the middle of it, for the client to read."""
    problem = {"message": f"the server of this stream failed: {type(error).__name__}", "type": "server_error"}
    return b"\n\ndata: " + json.dumps({"error": {**problem, "code": "node_lost"}}).encode() + b"\n\n"


def refusal(status: int, message: str) -> Any:
    """The answer where no node can give one."""
    from starlette.responses import JSONResponse

    problem = {"message": message, "type": "server_error", "code": "no_node"}
    return JSONResponse({"error": problem}, status_code=status, headers={"retry-after": "1"})
