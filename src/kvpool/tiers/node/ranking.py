"""Ranking: which value of a node goes next. Held values do not; values of one size and owner are ranked by one policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from kvpool.errors import ConfigError
from kvpool.eviction import EvictionPolicy, make_policy, policy_names
from kvpool.tiers.contract import Worth
from kvpool.tiers.node.leases import Leases
from kvpool.tiers.node.region import Region
from kvpool.tiers.node.values import Quotas, Value, tenant_of

_FEW_TERMS = 1024


class Ranking:
    """All values of a node, on shelves by slot size and, as far as quotas tell them apart, by engine and tenant."""

    def __init__(self, policy: str, quotas: Quotas, region: Region, leases: Leases, clock: Callable[[], float]) -> None:
        if policy not in policy_names():
            raise ConfigError(f"policy={policy!r} must be one of {', '.join(policy_names())}")
        self._policy = policy
        self.by_priority = make_policy(policy).by_priority
        self._quotas, self._region, self._leases, self._clock = quotas, region, leases, clock
        self._shelves: dict[int, dict[tuple[int, bytes], EvictionPolicy]] = defaultdict(dict)
        self._parked: list[Value] = []  # would have gone, but somebody held them
        self._terms = Terms()

    def add(self, value: Value, slot_bytes: int, seconds: float | None) -> None:
        """A new value; its priority ends in so many seconds."""
        shelves = self._shelves[slot_bytes]
        name = self._quotas.shelf(value.owner, tenant_of(value.key))
        if name not in shelves:
            shelves[name] = make_policy(self._policy)
        value.shelf = shelves[name]
        value.read_uses()
        value.shelf.add(value)
        if seconds is not None:
            self._terms.add(self._clock() + seconds, value)

    def remove_size(self, slot_bytes: int) -> None:
        """There are no slots of this size any more."""
        self._shelves.pop(slot_bytes, None)

    def next_victim(self, slot_bytes: int, owner: int | None = None, tenant: bytes | None = None) -> Value | None:
        """The value of this size that goes next, of one engine and one tenant if they are named.

        Of several shelves', it is the one used longest ago. A policy that goes by priority comes first.
        """
        self._bring_back_parked()
        self._end_terms()
        shelves = self._shelves[slot_bytes].items()
        chosen = [shelf for (o, t), shelf in shelves if owner in (None, o) and tenant in (None, t)]
        found = [victim for shelf in chosen if (victim := self._victim_of(shelf)) is not None]
        return min(found, key=lambda v: (v.priority if self.by_priority else 0, v.last_access), default=None)

    def _bring_back_parked(self) -> None:
        parked, self._parked = self._parked, []
        for value in parked:
            if value in self._leases.held:
                self._parked.append(value)
            elif not value.is_gone:
                assert value.shelf is not None
                value.read_uses()
                value.shelf.add(value)

    def _end_terms(self) -> None:
        for value in self._terms.ended(self._clock()):
            value.priority = Worth().priority
            self._region.rate(value.slab, value.slot, value.length, Worth(depth=value.start))
            if value not in self._parked:
                assert value.shelf is not None
                value.read_uses()
                value.shelf.remove(value)
                value.shelf.add(value)

    def _victim_of(self, shelf: EvictionPolicy) -> Value | None:
        """What a policy chooses. Uses since it ranked a value count now: a use itself costs no change of its order."""
        held = self._leases.held
        while len(shelf):
            value = shelf.victim()
            assert isinstance(value, Value)
            if value in held:
                value.read_uses()
                shelf.remove(value)
                self._parked.append(value)
            elif value.num_uses > value.hits:
                value.read_uses()
                shelf.remove(value)
                shelf.add(value)
            else:
                return value
        return None


class Terms:
    """When the priorities of values end. What is gone is forgotten as soon as it is the larger part."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, Value]] = []
        self._room = _FEW_TERMS

    def add(self, end: float, value: Value) -> None:
        """The priority of a value ends then."""
        heappush(self._ends, (end, value.created, value))
        if len(self._ends) > self._room:
            self._ends = [each for each in self._ends if not each[2].is_gone]
            heapify(self._ends)
            self._room = 2 * len(self._ends) + _FEW_TERMS

    def ended(self, now: float) -> list[Value]:
        """Takes out values whose priorities have ended."""
        found = []
        while self._ends and self._ends[0][0] <= now:
            value = heappop(self._ends)[2]
            if not value.is_gone:
                found.append(value)
        return found
