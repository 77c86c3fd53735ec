"""What the manager counts while it works. One unit per counter; `stats` has the snapshots that it hands out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvpool.config import Tier
from kvpool.stats import EvictionReason


class Histogram:
    """Durations in powers of two of a millisecond: cheap to add to, good enough for percentiles."""

    __slots__ = ("buckets", "count", "total")

    NUM_BUCKETS: ClassVar[int] = 40  # the last one takes everything above 8 years

    def __init__(self) -> None:
        self.buckets = [0] * self.NUM_BUCKETS
        self.count = 0
        self.total = 0.0

    def add(self, seconds: float, weight: int = 1) -> None:
        bucket = int(seconds * 1000).bit_length()
        self.buckets[bucket if bucket < 40 else 39] += weight
        self.count += weight
        self.total += seconds * weight

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
        mean = self.total / self.count if self.count else 0.0
        return {"count": self.count, "mean": mean, "p50": self.quantile(0.5), "p99": self.quantile(0.99)}


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
    shadowed_blocks: int = 0
    defragmented_blocks: int = 0
    evictions: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in EvictionReason})
    lifetime: Histogram = field(default_factory=Histogram)
    idle_before_eviction: Histogram = field(default_factory=Histogram)
    reuse_gap: Histogram = field(default_factory=Histogram)
    nodes_created: int = 0
