"""What `Engine.stats` and `Engine.waiting` return, taken between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple

from kvpool.config import Tier
from kvpool.engine.loop import EngineLoop
from kvpool.engine.pictures import EncoderStats, StepPictures
from kvpool.engine.tier_link import TierLink
from kvpool.scheduling import SchedulerStats
from kvpool.sequences.admit import PrefixMatch
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


def engine_stats(loop: EngineLoop, tiers: TierLink | None, pictures: StepPictures | None) -> EngineStats:
    """Cache, scheduler and queues as they are now."""
    scheduler = loop.scheduler
    return EngineStats(
        scheduler.manager.stats(),
        replace(scheduler.stats),
        scheduler.num_waiting + len(loop.held),
        scheduler.num_running,
        scheduler.num_swapped,
        None if tiers is None else tiers.stats(),
        None if pictures is None else pictures.cache.stats(),
    )


def tokens_by_tier(match: PrefixMatch, media: Mapping[int, Tier], num_tokens: int, block_size: int) -> dict[Tier, int]:
    """Tokens of a prompt by tier: those that a pool has, and the blocks behind them that keyed tiers have (`media`)."""
    found = Counter(match.tokens_by_tier)
    if media:  # blocks take the place of a partly reused one
        for tier in media.values():
            found[tier] += block_size
    else:
        found[Tier.GPU] += match.num_partial_tokens
    most = num_tokens - 1 if media else match.num_tokens  # the last token of a prompt is always computed
    found[max(found)] -= max(0, found.total() - most)
    return {tier: found[tier] for tier in sorted(found) if found[tier]}


def waiting_requests(loop: EngineLoop, limit: int) -> list[WaitingRequest]:
    """At most `limit` of the requests that wait for blocks."""
    now = loop.scheduler.clock()
    return [
        WaitingRequest(one.request.id, one.request.scope.tenant, len(one.tokens), now - one.group.arrival)
        for one in loop.scheduler.waiting(limit)
    ]
