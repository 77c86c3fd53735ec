"""What the manager counts, and snapshots of it. One unit per counter; rates are computed from counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, IntEnum
from typing import Any, ClassVar, NamedTuple

from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError


class MemoryPressure(IntEnum):
    """How much of the fullest GPU pool live sequences hold."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2
    CRITICAL = 3


class EvictionReason(str, Enum):
    """Why cached blocks left the index (or the tier)."""

    CAPACITY = "capacity"
    EXPIRED = "expired"
    EXPLICIT = "explicit"
    QUOTA = "quota"
    INVALIDATED = "invalidated"
    RESET = "reset"
    RESIZE = "resize"
    ENDED = "ended"  # all sessions that used it have ended, and room was needed
    CONTINUED = "continued"  # a request took the block over, or a longer one holds its tokens


class MissCause(str, Enum):
    """Why a token of a prompt was not served from the cache: docs/why.md."""

    FIRST_SEEN = "first_seen"
    DIVERGED = "diverged"  # an earlier prompt had it too, but something before it differs
    EVICTED = "evicted"
    EXPIRED = "expired"
    INVALIDATED = "invalidated"
    OTHER_SCOPE = "other_scope"  # cached for another tenant, adapter, version of the model, salt ...
    IN_FLIGHT = "in_flight"  # another request computes it
    ON_TIER = "on_tier"  # it lies there, but was not brought
    NO_STATE = "no_state"  # it is cached, but not what some layers need to go on behind it
    REST_OF_BLOCK = "rest_of_block"  # it does not fill a block, or it is the last token of all
    FORGOTTEN = "forgotten"  # it may have been cached once


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks of one pool on one tier: free + referenced + cached = total; pinned ones are part of cached."""

    pool: int
    tier: Tier
    groups: tuple[int, ...]
    total: int
    free: int
    referenced: int
    cached: int
    pinned: int
    peak_referenced: int
    block_bytes: int

    @property
    def usage(self) -> float:
        """The fraction that live sequences hold."""
        return self.referenced / self.total if self.total else 0.0

    @property
    def available(self) -> int:
        """Free blocks, and those that eviction could free: pinned ones are not among them."""
        return self.free + self.cached - self.pinned


class GroupStats(NamedTuple):
    """Blocks that one layer group uses on one tier. Free blocks are counted by pool."""

    group: int
    tier: Tier
    referenced: int
    cached: int
    pinned: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """One consistent snapshot of the manager.

    Hits and misses are counted at admission, once per request, in tokens and in full blocks. `hit_tokens` says from which
    tier they came; tokens of partially reused blocks are in `partial_hit_tokens` as well.
    """

    pools: tuple[PoolStats, ...]
    groups: tuple[GroupStats, ...]
    num_sequences: int
    num_swapped: int
    num_cached_runs: int
    requests: int
    allocation_failures: int
    extend_failures: int
    prompt_tokens: int
    prompt_blocks: int
    hit_tokens: Mapping[str, int]
    hit_blocks: Mapping[str, int]
    partial_hit_tokens: int
    full_hits_with_logits: int
    blocks_allocated: int
    blocks_merged: int
    copies_on_write: int
    forks: int
    rewinds: int
    swaps_out: int
    swaps_in: int
    swapped_blocks: int
    offloaded_blocks: int
    onboarded_blocks: int
    blocks_copied_ahead: int  # copied to the host before they were evicted
    defragmented_blocks: int
    evictions: Mapping[str, int]
    lifetime_seconds: Mapping[str, float]
    idle_before_eviction_seconds: Mapping[str, float]
    reuse_gap_seconds: Mapping[str, float]
    tenants: Mapping[str, tuple[int, ...]]
    pressure: MemoryPressure

    @property
    def miss_tokens(self) -> int:
        return self.prompt_tokens - sum(self.hit_tokens.values())

    @property
    def miss_blocks(self) -> int:
        return self.prompt_blocks - sum(self.hit_blocks.values())

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens that did not have to be computed, as a fraction of all prompt tokens."""
        return sum(self.hit_tokens.values()) / self.prompt_tokens if self.prompt_tokens else 0.0

    def pool(self, index: int = 0, tier: Tier = Tier.GPU) -> PoolStats:
        for pool in self.pools:
            if pool.pool == index and pool.tier == tier:
                return pool
        raise InvalidArgumentError(f"there is no pool {index!r} on {tier!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        data = asdict(self)
        for pool in data["pools"]:
            pool["tier"] = pool["tier"].name
        data["groups"] = [{**group._asdict(), "tier": group.tier.name} for group in self.groups]
        data["pressure"] = self.pressure.name
        data["token_hit_rate"] = self.token_hit_rate
        return data


@dataclass(slots=True)
class HandleStats:
    """What one request cost and what it got from the cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_from_lower_tiers: int = 0
    partial_tokens: int = 0
    copies_on_write: int = 0
    swaps: int = 0
    merged_blocks: int = 0


class Histogram:
    """Durations in powers of two of a millisecond: cheap to add to, good enough for percentiles."""

    __slots__ = ("buckets", "total")

    NUM_BUCKETS: ClassVar[int] = 40  # the last one takes everything above 8 years

    def __init__(self) -> None:
        self.buckets = [0] * self.NUM_BUCKETS
        self.total = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        bucket = int(seconds * 1000).bit_length()
        self.buckets[bucket if bucket < 40 else 39] += weight
        self.total += seconds * weight

    @property
    def count(self) -> int:
        """How many durations were added."""
        return sum(self.buckets)

    def quantile(self, fraction: float) -> float:
        """An upper bound in seconds below which `fraction` of the durations lie; 0.0 when nothing was recorded."""
        wanted = fraction * self.count
        seen = 0
        for index, number in enumerate(self.buckets):
            seen += number
            if number and seen >= wanted:
                return float(2**index) / 1000
        return 0.0

    def summary(self) -> dict[str, float]:
        count = self.count
        mean = self.total / count if count else 0.0
        return {"count": count, "mean": mean, "p50": self.quantile(0.5), "p99": self.quantile(0.99)}


@dataclass
class Counters:
    """Totals since the manager was made. Internal: read them through `CacheStats`."""

    requests: int = 0
    allocation_failures: int = 0
    extend_failures: int = 0
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    hit_tokens: list[int] = field(default_factory=lambda: [0] * len(Tier))
    hit_blocks: list[int] = field(default_factory=lambda: [0] * len(Tier))
    partial_hit_tokens: int = 0
    full_hits_with_logits: int = 0
    blocks_allocated: int = 0
    blocks_merged: int = 0
    copies_on_write: int = 0
    forks: int = 0
    rewinds: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    swapped_blocks: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    blocks_copied_ahead: int = 0
    defragmented_blocks: int = 0
    evictions: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in EvictionReason})
    lifetime: Histogram = field(default_factory=Histogram)
    idle_before_eviction: Histogram = field(default_factory=Histogram)
    reuse_gap: Histogram = field(default_factory=Histogram)
    nodes_created: int = 0
