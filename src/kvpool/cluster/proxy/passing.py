"""What a front does with answers of servers: which headers pass, when another one is asked, what clients are told."""

from __future__ import annotations

import json

from starlette.responses import JSONResponse, Response

NODE_HEADER = "x-kvpool-node"
ELSEWHERE = {502, 503, 504}  # this node cannot, another one may
_HOP_BY_HOP = {
    *(
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"transfer-encoding",
        b"te",
        b"trailer",
        b"upgrade",
        b"expect",
    ),
    *(b"host", b"content-length"),
}


def passed_on(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that are not about one connection, byte for byte, also those that come twice."""
    named = [value for name, value in headers if name.lower() == b"connection"]
    dropped = _HOP_BY_HOP.union(each.strip().lower() for value in named for each in value.split(b","))
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether an answer comes part by part."""
    return any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def lost(error: Exception) -> bytes:
    """The end of a stream whose node failed in the middle of it, for the client to read."""
    problem = {"message": f"the server of this stream failed: {type(error).__name__}", "type": "server_error"}
    return b"\n\ndata: " + json.dumps({"error": {**problem, "code": "node_lost"}}).encode() + b"\n\n"


def refusal(status: int, message: str, code: str = "no_node") -> Response:
    """The answer where no node can give one, or should be asked."""
    problem = {"message": message, "type": "server_error" if status >= 500 else "invalid_request_error", "code": code}
    headers = {"retry-after": "1"} if status in (502, 503) else None
    return JSONResponse({"error": problem}, status_code=status, headers=headers)
