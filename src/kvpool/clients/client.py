"""A client of OpenAI's protocol that costs little: HTTP/1.1 on asyncio's streams, events parsed only where they matter.

A library for HTTP spends more on an event than a small server does; hundreds of streams in one process would measure it
instead of the server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvpool.clients.mix import LoadRequest
from kvpool.errors import InvalidArgumentError


class Endpoint(NamedTuple):
    """Where requests go, and what all of them have in common."""

    host: str
    port: int
    is_encrypted: bool
    base: str  # of paths
    key: str
    model: str
    is_chat: bool
    ignore_eos: bool

    @classmethod
    def at(cls, url: str, *, key: str = "", model: str = "", is_chat: bool = True, ignore_eos: bool = True) -> Endpoint:
        """The endpoint of an address such as http://127.0.0.1:8000/v1; `/v1` may be left out."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise InvalidArgumentError(f"--url is {url!r}; write an address such as http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, base, key, model, is_chat, ignore_eos)

    def body(self, request: LoadRequest) -> bytes:
        """A request as it is sent."""
        talk = [{"role": "user", "content": request.prompt}]
        asked: dict[str, Any] = {"messages": talk} if self.is_chat else {"prompt": request.prompt}
        asked |= {"model": self.model, "max_tokens": request.max_tokens, "stream": True, "temperature": 0}
        asked["stream_options"] = {"include_usage": True}
        if (
            self.ignore_eos
        ):  # not in OpenAI's own protocol; servers that know it answer with as many tokens as asked for
            asked["ignore_eos"] = True
        return json.dumps(asked).encode()


@dataclass
class Outcome:
    """What came of one request; times are seconds. `error` is empty where it was answered to the end."""

    began: float
    first: float | None = None  # from its start to its first token
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    error: str = ""


async def ask(endpoint: Endpoint, request: LoadRequest, timeout: float) -> Outcome:
    """Sends a request and follows its stream."""
    outcome = Outcome(time.perf_counter())
    try:
        await asyncio.wait_for(_follow(endpoint, request, outcome), timeout)
    except asyncio.TimeoutError:
        outcome.error = f"no end within {timeout:g} s"
    except (OSError, asyncio.IncompleteReadError, ValueError, ssl.SSLError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.total = time.perf_counter() - outcome.began
    return outcome


async def fetch_text(endpoint: Endpoint, path: str, timeout: float = 10.0) -> str:
    """The text at a path."""
    status, lines, writer = await asyncio.wait_for(_open(endpoint, "GET", path, b""), timeout)
    try:
        text = b"\n".join([line async for line in lines]).decode("utf-8", "replace")
    finally:
        writer.close()
    if status in (401, 403):
        raise InvalidArgumentError(f"{path} needs an admin's key: give --key ({_message(text)})")
    if status != 200:
        raise InvalidArgumentError(f"{path} answered with status {status}: {text[:200]}")
    return text


async def _follow(endpoint: Endpoint, request: LoadRequest, outcome: Outcome) -> None:
    path = "/v1/chat/completions" if endpoint.is_chat else "/v1/completions"
    status, lines, writer = await _open(endpoint, "POST", path, endpoint.body(request))
    try:
        if status != 200:
            text = b"".join([line async for line in lines]).decode("utf-8", "replace")
            outcome.error = f"status {status}: {_message(text)}"
            return
        async for line in lines:
            if line.startswith(b"data:"):
                _note(line[5:].strip(), outcome)
        if outcome.first is None and not outcome.error:
            outcome.error = "the stream ended without a token"
    finally:
        writer.close()
        with suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


def _note(data: bytes, outcome: Outcome) -> None:
    """One event. Those in the middle of a stream are tokens, whatever is in them: only the others are parsed."""
    now = time.perf_counter() - outcome.began
    is_plain = outcome.first is not None and b'"usage":{' not in data and b'"finish_reason":"' not in data
    if data == b"[DONE]":
        return
    if not (is_plain and data[:8] != b'{"error"'):
        event = json.loads(data)
        if event.get("error"):
            outcome.error = str(event["error"].get("message", event["error"]))
            return
        if usage := event.get("usage"):
            outcome.prompt_tokens = usage.get("prompt_tokens", 0)
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            outcome.tokens = usage.get("completion_tokens", 0)
        if not any(_has_text(choice) for choice in event.get("choices", ())):
            return
    if outcome.first is None:
        outcome.first = now
    else:
        outcome.gaps.append(now - outcome.total)
    outcome.total = now  # until the end: when the newest token came
    outcome.tokens = max(outcome.tokens, len(outcome.gaps) + 1)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    return bool(choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content"))


async def _open(
    endpoint: Endpoint, method: str, path: str, body: bytes
) -> tuple[int, AsyncIterator[bytes], asyncio.StreamWriter]:
    """Sends one request; its status, the lines of its body, and the connection."""
    secure = ssl.create_default_context() if endpoint.is_encrypted else None
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=secure, limit=2**20)
    try:
        key = f"Authorization: Bearer {endpoint.key}\r\n" if endpoint.key else ""
        head = (
            f"{method} {endpoint.base}{path} HTTP/1.1\r\nHost: {endpoint.host}:{endpoint.port}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = (await reader.readline()).split()
        if len(status) < 2 or not status[1].isdigit():
            raise ValueError("the answer is no HTTP")
        is_chunked = False
        while (line := (await reader.readline()).strip().lower()) != b"":
            is_chunked |= line.startswith(b"transfer-encoding:") and b"chunked" in line
    except BaseException:
        writer.close()
        raise
    return int(status[1]), _lines(reader, is_chunked), writer


async def _lines(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    """The body by lines; the connection ends with it where it is not sent in chunks."""
    rest = b""
    while True:
        if is_chunked:
            size = int((await reader.readline()).partition(b";")[0], 16)
            part = (await reader.readexactly(size + 2))[:-2]
        else:
            part = await reader.read(2**16)
        if not part:
            break
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
