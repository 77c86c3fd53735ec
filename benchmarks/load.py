"""A load on an OpenAI endpoint: the requests, a client that sends them, and the figures of what came back.

The requests are a made-up mix with shared beginnings. They are texts, because servers differ in their tokens. The client is
HTTP/1.1 on asyncio's streams, and parses only the events that matter. An HTTP library spends more time on an event than a
small server does, so hundreds of streams in one process would measure the library.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

# Short common words: nearly every tokenizer has one token for each of them with its space.
_WORDS = str.split(
    "the of and to in is was for on that with as by at from his it an are were which this also be has had or not but "
    "one first two their its after new who they her she been other when time all no more may some only over such into "
    "year during between state city used can many known where part about would three between under these made out up"
)


class LoadRequest(NamedTuple):
    """One request."""

    prompt: str
    max_tokens: int


def synthetic(
    num_requests: int,
    *,
    prompt_tokens: int,
    shared_tokens: int,
    num_prefixes: int,
    max_tokens: int,
    seed: int = 0,
) -> list[LoadRequest]:
    """Prompts that begin with one of `num_prefixes` texts and go on differently."""
    random = np.random.default_rng(seed)
    prefixes = [_text(random, shared_tokens) for _ in range(num_prefixes)]
    chosen = [prefixes[at] for at in random.integers(num_prefixes, size=num_requests).tolist()]
    prompts = [f"{prefix} {_text(random, prompt_tokens - shared_tokens)}".strip() for prefix in chosen]
    return [LoadRequest(prompt, max_tokens) for prompt in prompts]


def _text(random: np.random.Generator, num_words: int) -> str:
    return " ".join(_WORDS[at] for at in random.integers(len(_WORDS), size=num_words).tolist())


class Endpoint(NamedTuple):
    """Where requests go, and what all of them have in common."""

    host: str
    port: int
    model: str

    @classmethod
    def at(cls, url: str, model: str = "") -> Endpoint:
        """The endpoint of an address such as http://127.0.0.1:8000."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(parts.hostname, parts.port, model)

    def body(self, request: LoadRequest) -> bytes:
        """A request as it is sent."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]}
        asked |= {"model": self.model, "max_tokens": request.max_tokens, "stream": True, "temperature": 0}
        asked["stream_options"] = {"include_usage": True}
        # Not in OpenAI's own protocol; servers that know it answer with as many tokens as asked for
        asked["ignore_eos"] = True
        return json.dumps(asked).encode()


@dataclass
class RequestResult:
    """The result of one request; times are seconds. `error` is empty if the answer is complete."""

    began: float
    first: float | None = None  # from its start to its first token
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    error: str = ""


async def ask(endpoint: Endpoint, request: LoadRequest, timeout: float) -> RequestResult:
    """Sends a request and follows its stream."""
    outcome = RequestResult(time.perf_counter())
    try:
        await asyncio.wait_for(_follow(endpoint, request, outcome), timeout)
    except asyncio.TimeoutError:
        outcome.error = f"no end within {timeout:g} s"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
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
    if status != 200:
        raise ValueError(f"{path} answered with status {status}: {text[:200]}")
    return text


async def _follow(endpoint: Endpoint, request: LoadRequest, outcome: RequestResult) -> None:
    status, lines, writer = await _open(endpoint, "POST", "/v1/chat/completions", endpoint.body(request))
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
        with suppress(OSError):
            await writer.wait_closed()


def _note(data: bytes, outcome: RequestResult) -> None:
    """Records one event. Events in the middle of a stream count as tokens; only the others are parsed."""
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
    delta = choice["delta"]
    return bool(delta.get("content") or delta.get("reasoning_content"))


async def _open(
    endpoint: Endpoint, method: str, path: str, body: bytes
) -> tuple[int, AsyncIterator[bytes], asyncio.StreamWriter]:
    """Sends one request; its status, the lines of its body, and the connection."""
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=2**20)
    try:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {endpoint.host}:{endpoint.port}\r\n"
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
    """The lines of the body. If it is not sent in chunks, the connection ends with it."""
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


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[LoadRequest],
    *,
    num_clients: int,
    timeout: float,
) -> tuple[list[RequestResult], float]:
    """Sends all requests; returns their results in order, and the seconds it took.

    `num_clients` clients send one request after the other.
    """
    outcomes: list[RequestResult | None] = [None] * len(requests)
    numbers = iter(range(len(requests)))
    start = time.perf_counter()

    async def client() -> None:
        for number in numbers:  # shared: each takes the next
            outcomes[number] = await ask(endpoint, requests[number], timeout)

    await asyncio.gather(*(client() for _ in range(min(num_clients, len(requests)))))
    return [outcome for outcome in outcomes if outcome is not None], time.perf_counter() - start


def figures(outcomes: Sequence[RequestResult], seconds: float) -> dict[str, Any]:
    """Percentiles and rates."""
    done = [outcome for outcome in outcomes if not outcome.error]
    prompts = sum(outcome.prompt_tokens for outcome in done)
    tokens = sum(outcome.tokens for outcome in done)
    return {
        "requests": len(outcomes),
        "completed": len(done),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common(8)),
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds,
        "prompt_tokens": prompts,
        "cached_prompt_share": sum(outcome.cached_tokens for outcome in done) / prompts if prompts else None,
        "first_token_ms": percentiles([outcome.first or 0.0 for outcome in done]),
        "between_tokens_ms": percentiles([gap for outcome in done for gap in outcome.gaps]),
        "request_ms": percentiles([outcome.total for outcome in done]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The 50th, 90th and 99th percentile in milliseconds; empty without values.

    >>> percentiles([0.001, 0.003])["p50"]
    2.0
    """
    return {f"p{p}": float(1e3 * np.percentile(np.array(seconds), p)) for p in (50, 90, 99)} if seconds else {}
