"""A load: requests at their times, or as fast as so many clients get answers; and the figures of what came."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvpool.clients.client import Endpoint, Outcome, ask
from kvpool.clients.mix import LoadRequest


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[LoadRequest],
    *,
    num_clients: int | None,
    timeout: float,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Sends all requests; outcomes in their order, and the seconds it took.

    `num_clients` each send one after the other; None sends each when it is due, whatever became of those before.
    """
    outcomes: list[Outcome | None] = [None] * len(requests)
    numbers = iter(range(len(requests)))
    start = time.perf_counter()

    async def send(number: int) -> None:
        outcomes[number] = outcome = await ask(endpoint, requests[number], timeout)
        on_done(outcome)

    async def client() -> None:
        for number in numbers:  # shared: each takes the next
            await send(number)

    async def at_its_time(number: int) -> None:
        await asyncio.sleep(max(0.0, start + requests[number].due - time.perf_counter()))
        await send(number)

    if num_clients is None:
        work = [at_its_time(number) for number in range(len(requests))]
    else:
        work = [client() for _ in range(min(num_clients, len(requests)))]
    await asyncio.gather(*work)
    return [outcome for outcome in outcomes if outcome is not None], time.perf_counter() - start


def figures(
    outcomes: Sequence[Outcome], seconds: float, *, first_ms: float | None = None, between_ms: float | None = None
) -> dict[str, Any]:
    """Percentiles and rates. Goodput counts requests whose first token and mean gap stayed within the given bounds."""
    done = [outcome for outcome in outcomes if not outcome.error]
    good = [
        outcome
        for outcome in done
        if (first_ms is None or 1e3 * (outcome.first or 0.0) <= first_ms)
        and (between_ms is None or not outcome.gaps or 1e3 * float(np.mean(outcome.gaps)) <= between_ms)
    ]
    prompts = sum(outcome.prompt_tokens for outcome in done)
    tokens = sum(outcome.tokens for outcome in done)
    return {
        "requests": len(outcomes),
        "completed": len(done),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common(8)),
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "goodput_per_second": len(good) / seconds,
        "goodput_share": len(good) / len(outcomes) if outcomes else 0.0,
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds,
        "prompt_tokens": prompts,
        "cached_prompt_share": sum(outcome.cached_tokens for outcome in done) / prompts if prompts else None,
        "first_token_ms": percentiles([outcome.first or 0.0 for outcome in done]),
        "between_tokens_ms": percentiles([gap for outcome in done for gap in outcome.gaps]),
        "request_ms": percentiles([outcome.total for outcome in done]),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds that half, 90 and 99 of 100 stay within; nothing for nothing.

    >>> percentiles([0.001, 0.003])["p50"]
    2.0
    """
    return {f"p{p}": float(1e3 * np.percentile(np.array(seconds), p)) for p in (50, 90, 99)} if seconds else {}
