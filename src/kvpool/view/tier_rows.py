"""What the page shows of a keyed tier."""

from __future__ import annotations

from typing import Any

from kvpool.tiers.contract import TierStats

_MOST_HOLDERS = 16


def tier_row(stats: TierStats) -> dict[str, Any]:
    """One tier as the page gets it; of those who hold something in it, the ones with most."""
    holders = sorted(stats.holders.items(), key=lambda each: -each[1])
    return {
        "name": stats.name,
        "values": stats.num_values,
        "used": stats.used_bytes,
        "capacity": stats.capacity_bytes,
        "hits": stats.hits,
        "misses": stats.misses,
        "stored": stats.stored,
        "problem": stats.problem,
        "holders": holders[:_MOST_HOLDERS],
        "others": sum(used for _, used in holders[_MOST_HOLDERS:]),
    }
