"""Clients: they stream, leave in the middle, send nonsense and too much. In another process, without torch."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

from load import Endpoint, ask, fetch_text, figures, run_load, synthetic

PATIENCE = 600.0  # seconds: what matters is that an answer comes, however busy the machine is


def drive(url: str, streams: int, prompt_words: int, new_tokens: int) -> dict[str, Any]:
    """The figures of streams that are asked for at once, each once; their prompts have a common half."""
    asked = synthetic(
        streams, prompt_tokens=prompt_words, shared_tokens=prompt_words // 2, num_prefixes=1, max_tokens=new_tokens
    )
    load = run_load(Endpoint.at(url, "bench"), asked, num_clients=streams, timeout=PATIENCE)
    return figures(*asyncio.run(load))


def misbehave(url: str, num_clients: int, seconds: float, body_limit: int) -> Counter[str]:
    """How often what came of a request."""
    seen: Counter[str] = Counter()
    endpoint = Endpoint.at(url, model="bench")

    async def run() -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(_client(endpoint, number, end, seen, body_limit) for number in range(num_clients)))

    asyncio.run(run())
    return seen


def look(url: str, seconds: float) -> list[float]:
    """How long calls of /health took, in order of length. In a process of its own: clients would make it wait for them."""
    endpoint = Endpoint.at(url)
    waits: list[float] = []

    async def run() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            began = time.perf_counter()
            await fetch_text(endpoint, "/health", timeout=60)
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)

    asyncio.run(run())
    return sorted(waits)


async def _client(endpoint: Endpoint, number: int, end: float, seen: Counter[str], body_limit: int) -> None:
    draw = random.Random(number)
    while time.perf_counter() < end:
        (request,) = synthetic(
            1,
            prompt_tokens=40,
            shared_tokens=20,
            num_prefixes=1,
            max_tokens=draw.randint(1, 24),
            seed=draw.randrange(9),
        )
        kind = draw.random()
        if kind < 0.15:  # leaves in the middle
            outcome = await ask(endpoint, request._replace(max_tokens=400), timeout=draw.uniform(0.05, 1.0))
            seen["left" if not outcome.error or "no end within" in outcome.error else outcome.error] += 1
        elif kind < 0.3:  # nonsense, or too much of it
            bad = request._replace(max_tokens=-1) if kind < 0.2 else request._replace(prompt="x" * 2 * body_limit)
            outcome = await ask(endpoint, bad, timeout=PATIENCE)
            is_refused = outcome.error.startswith(("status 400", "status 413")) or "Connection" in outcome.error
            seen["refused" if is_refused else outcome.error or "a bad request was answered"] += 1
        else:
            outcome = await ask(endpoint, request, timeout=PATIENCE)
            seen[outcome.error or "answered"] += 1
