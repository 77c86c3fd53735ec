"""Requests that every server must answer, such as those to forget something."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from kvpool.cluster.proxy.passing import lacks_model, passed_on, refusal

ASK_SECONDS = 60.0  # for an answer of every server
log = logging.getLogger("kvpool")


async def ask(client: httpx.AsyncClient, node: str, request: Request, content: bytes) -> httpx.Response | None:
    """What one server answers to a request; None if it does not."""
    url = address_at(node, request.scope)
    if url is None:
        return None
    headers = passed_on(request.headers.raw)
    try:
        return await client.request(request.method, url, content=content, headers=headers, timeout=ASK_SECONDS)
    except httpx.RequestError as error:
        log.info("%s did not answer: %s", node, error)
        return None


def forgotten(answers: Mapping[str, httpx.Response | None]) -> Response:
    """The answer to a request to forget something, from those of all servers by name. One that lacks the model has nothing.

    A refusal of the request is passed on if no server did what it asks. Else it names those that may still have the content.
    """
    removed = {name: count for name, answer in answers.items() if (count := _removed(answer)) is not None}
    refusals = [one for one in answers.values() if one is not None and 400 <= one.status_code < 500]
    if refusals and not removed:
        return Response(refusals[0].content, refusals[0].status_code, media_type="application/json")
    missing = [
        f"{name} {'did not answer' if answer is None else f'answered {answer.status_code}'}"
        for name, answer in answers.items()
        if name not in removed and (answer is None or not lacks_model(answer.status_code, answer.content))
    ]
    if missing:
        others = f"{len(removed)} others have forgotten it ({sum(removed.values())} blocks)"
        return refusal(503, f"{', '.join(missing)}; {others}: ask again", "incomplete")
    return JSONResponse({"removed_blocks": sum(removed.values())})


def _removed(answer: httpx.Response | None) -> int | None:
    """How many blocks a server has forgotten; None if it does not say that it did as asked."""
    if answer is None or answer.status_code != 200:
        return None
    try:
        return int(answer.json()["removed_blocks"])
    except (ValueError, TypeError, KeyError):
        return None


def address_at(node: str, scope: Scope) -> httpx.URL | None:
    """The URL of a request at a node: the path as the client wrote it, with the host of the node."""
    url = httpx.URL(node)
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    try:
        return url.copy_with(raw_path=url.raw_path.rstrip(b"/") + scope["raw_path"] + query)
    except httpx.InvalidURL:
        return None
