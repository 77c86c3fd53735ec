"""What `Engine.stats` and `Engine.waiting` return, taken between two steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from kvpool.engine.loop import EngineLoop
from kvpool.engine.pictures import EncoderStats
from kvpool.engine.tier_link import TierLink
from kvpool.scheduling import SchedulerStats
from kvpool.stats import CacheStats
from kvpool.tiers.transport.tier_transport import TieringStats


class EngineStats(NamedTuple):
    """The state of an engine between two steps: its cache, its scheduler, and how many sequences wait and run."""

    cache: CacheStats
    scheduler: SchedulerStats
    num_waiting: int
    num_running: int
    num_swapped: int
    tiers: TieringStats | None = None
    encoder: EncoderStats | None = None  # of models that take images


class WaitingRequest(NamedTuple):
    """A request that waits without blocks: it was not admitted yet, or it was preempted."""

    request_id: Hashable
    tenant: str
    num_tokens: int
    seconds: float  # since it came


def engine_stats(loop: EngineLoop, tiers: TierLink | None) -> EngineStats:
    """Cache, scheduler and queues as they are now."""
    scheduler = loop.scheduler
    return EngineStats(
        scheduler.manager.stats(),
        replace(scheduler.stats),
        scheduler.num_waiting + loop.num_held,
        scheduler.num_running,
        scheduler.num_swapped,
        None if tiers is None else tiers.stats(),
        None if loop.pictures is None else loop.pictures.cache.stats(),
    )


def waiting_requests(loop: EngineLoop, limit: int) -> list[WaitingRequest]:
    """At most `limit` of the requests that wait for blocks."""
    now = loop.scheduler.clock()
    return [
        WaitingRequest(one.request.id, one.request.scope.tenant, len(one.tokens), now - one.group.arrival)
        for one in loop.scheduler.waiting(limit)
    ]
