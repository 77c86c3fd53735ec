"""Counters of a connector, as an engine collects them: what was added since it asked last."""

from __future__ import annotations

from collections.abc import Mapping

COUNTS = {
    "requests": "requests that were looked up",
    "hits": "requests for which something was loaded",
    "stored": "blocks that were stored on the host",
    "no_room": "blocks that were not stored because everything on the host was in use",
    "spoiled": "blocks that were stored and not kept, because a load before them had failed",
    "from_host": "blocks that were loaded from the host",
    "from_tiers": "blocks that were loaded from the tiers below the host",
    "failed": "blocks that were promised and could not be loaded; the engine computed them again",
    "tier_load_failures": "values that a tier could not bring, was late with, or that were damaged",
    "tier_store_failures": "values that a tier could not store, or not in time",
}
"""Every counter, and what it counts."""


class Increments:
    """Differences between totals."""

    def __init__(self) -> None:
        self._before: Mapping[str, int] = {}

    def since(self, totals: Mapping[str, int]) -> dict[str, int]:
        """What each total has grown by since the last call; those that stand still are left out."""
        if totals == self._before:
            return {}
        before, self._before = self._before, dict(totals)
        return {name: grown for name, total in totals.items() if (grown := total - before.get(name, 0))}
