"""Scheduling policies: the order in which waiting sequences are served. Six come with kvpool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Any, Protocol

from kvpool.checks import check_int, check_number
from kvpool.errors import ConfigError
from kvpool.scheduling.request import ScheduledSequence

MAX_WINDOW = 2**16


class CachedTokens(Protocol):
    """What a policy may ask about a waiting sequence."""

    def __call__(self, sequence: ScheduledSequence, /) -> int:
        """How many of its tokens are cached now."""

    def first_token_seconds(self, sequence: ScheduledSequence) -> float:
        """Seconds to its first token if it were alone: load what lower tiers have, compute what is not cached."""

    def waited_seconds(self, sequence: ScheduledSequence) -> float:
        """Seconds since its request arrived."""


class OrderedQueue:
    """Sequences in the order of a key that does not change while they wait; equal keys in order of entry."""

    def __init__(self, key: Callable[[ScheduledSequence], Any]) -> None:
        self._key = key
        self._entries: list[tuple[Any, int, ScheduledSequence]] = []
        self._places: dict[ScheduledSequence, tuple[Any, int]] = {}
        self._next = 0

    def push(self, sequence: ScheduledSequence) -> None:
        place = (self._key(sequence), self._next)
        self._next += 1
        self._places[sequence] = place
        insort(self._entries, (*place, sequence))

    def remove(self, sequence: ScheduledSequence) -> None:
        place = self._places.pop(sequence)
        del self._entries[bisect_left(self._entries, place, key=lambda entry: entry[:2])]

    def __contains__(self, sequence: ScheduledSequence) -> bool:
        return sequence in self._places

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return (sequence for _, _, sequence in self._entries)


class SchedulingPolicy(ABC):
    """The waiting queue and its order. Subclass it, or `RankedPolicy`, for an order of your own."""

    def urgency(self, sequence: ScheduledSequence) -> int:
        """Smaller goes first, even before sequences that were preempted, and may preempt larger. Fixed for a sequence."""
        return 0

    @abstractmethod
    def push(self, sequence: ScheduledSequence) -> None:
        """A sequence begins to wait."""

    @abstractmethod
    def remove(self, sequence: ScheduledSequence) -> None:
        """A waiting sequence is admitted, or leaves."""

    @abstractmethod
    def candidates(self, limit: int, cached_tokens: CachedTokens) -> list[ScheduledSequence]:
        """At most `limit` waiting sequences, the next one first."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[ScheduledSequence]: ...

    def charge(self, sequence: ScheduledSequence, num_tokens: int) -> None:  # noqa: B027 - most do not count
        """A sequence was granted this many tokens of work; negative: it used so many less than were granted."""


class RankedPolicy(OrderedQueue, SchedulingPolicy):
    """An order by a key that does not change while a sequence waits: override `key`, smaller is served first."""

    def __init__(self) -> None:
        super().__init__(lambda sequence: (self.urgency(sequence), self.key(sequence)))

    @abstractmethod
    def key(self, sequence: ScheduledSequence) -> Any:
        """What to sort by."""

    def candidates(self, limit: int, cached_tokens: CachedTokens) -> list[ScheduledSequence]:
        return list(islice(self, limit))


class FirstComeFirstServed(RankedPolicy):
    """In order of arrival."""

    def key(self, sequence: ScheduledSequence) -> float:
        return sequence.group.arrival


class Priority(FirstComeFirstServed):
    """Larger `Request.priority` first, equal ones in order of arrival. An urgent request may preempt less urgent ones."""

    def urgency(self, sequence: ScheduledSequence) -> int:
        return -sequence.request.priority


class ShortestRemaining(RankedPolicy):
    """The request with the fewest tokens left goes first. Mean latency is best; long requests may wait long."""

    def key(self, sequence: ScheduledSequence) -> tuple[int, float]:
        return sequence.request.num_places - len(sequence.tokens), sequence.group.arrival


class LongestPrefixMatch(FirstComeFirstServed):
    """The request with the most cached tokens goes first, among the `window` requests that have waited longest.

    The others follow in order of arrival: looking at a whole long queue in every step would cost more than it gains.
    """

    def __init__(self, window: int = 64) -> None:
        super().__init__()
        self.window = window

    def candidates(self, limit: int, cached_tokens: CachedTokens) -> list[ScheduledSequence]:
        oldest = list(islice(self, max(limit, self.window)))
        looked_at = sorted(oldest[: self.window], key=lambda sequence: -cached_tokens(sequence))
        return [*looked_at, *oldest[self.window :]][:limit]


class SoonestFirstToken(FirstComeFirstServed):
    """The request that would have its first token soonest goes first, among the `window` that have waited longest.

    The cost model says how long loading from a lower tier and computing take. A request is overtaken until as many others
    were admitted as waited when it came, times `patience`, and `grace` more; then it goes in order of arrival. So at most
    `patience + 1` times as many go before it as in order of arrival, and `grace` more.
    """

    def __init__(self, patience: float = 3.0, grace: int = 8, window: int = 64) -> None:
        super().__init__()
        if check_number(patience, "patience", "0 or more") < 0:
            raise ConfigError(f"patience={patience} must be 0 or more")
        check_int(grace, "grace", 0, MAX_WINDOW)
        check_int(window, "window", 1, MAX_WINDOW)
        self.patience = patience
        self.grace = grace
        self.window = window
        self._num_admitted = 0
        self._due: dict[ScheduledSequence, float] = {}  # when so many were admitted it is not overtaken any more

    def push(self, sequence: ScheduledSequence) -> None:
        self._due[sequence] = self._num_admitted + self.patience * len(self) + self.grace
        super().push(sequence)

    def remove(self, sequence: ScheduledSequence) -> None:
        super().remove(sequence)
        del self._due[sequence]

    def charge(self, sequence: ScheduledSequence, num_tokens: int) -> None:
        # What it did not use is given back later. Samples that branch off overtake nobody.
        self._num_admitted += num_tokens > 0 and sequence.index == 0

    def candidates(self, limit: int, cached_tokens: CachedTokens) -> list[ScheduledSequence]:
        oldest = list(islice(self, max(limit, self.window)))
        if len(oldest) < 2:
            return oldest
        return [*self._in_turn(oldest[: self.window], cached_tokens), *oldest[self.window :]][:limit]

    def _in_turn(self, waiting: list[ScheduledSequence], cached_tokens: CachedTokens) -> list[ScheduledSequence]:
        """As if each one were admitted before the next is chosen."""
        by_due = sorted((self._due[sequence], place) for place, sequence in enumerate(waiting))
        num_due, due = 0, list[int]()  # places of those that are not overtaken any more, a heap
        chosen: dict[ScheduledSequence, None] = {}
        for soonest in sorted(waiting, key=cached_tokens.first_token_seconds):
            while soonest not in chosen:
                while num_due < len(by_due) and by_due[num_due][0] <= self._num_admitted + len(chosen):
                    heappush(due, by_due[num_due][1])
                    num_due += 1
                chosen[waiting[heappop(due)] if due else soonest] = None
        return list(chosen)


class FairShare(SchedulingPolicy):
    """The tenant that was granted the least work, relative to its weight, goes next; inside a tenant in order of arrival.

    Work is counted in tokens, granted at admission and corrected at the end. A tenant that comes back after a pause starts
    level with the least served tenant that waits, so it saves up no credit.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ConfigError(f"the weight of tenant {tenant!r} must be over 0, got {weight}")
        self.served: dict[str, float] = {}
        self._queues: dict[str, OrderedQueue] = {}
        self._level = 0.0  # what the least served waiting tenant had when a tenant last joined

    def _cost(self, sequence: ScheduledSequence, num_tokens: int) -> float:
        return num_tokens / self.weights.get(sequence.request.scope.tenant, 1.0)

    def push(self, sequence: ScheduledSequence) -> None:
        tenant = sequence.request.scope.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = OrderedQueue(lambda waiting: waiting.group.arrival)
            self._level = min((self.served[other] for other in self._queues if other != tenant), default=self._level)
            self.served[tenant] = max(self.served.get(tenant, 0.0), self._level)
        queue.push(sequence)

    def remove(self, sequence: ScheduledSequence) -> None:
        tenant = sequence.request.scope.tenant
        self._queues[tenant].remove(sequence)
        if not self._queues[tenant]:
            del self._queues[tenant]

    def candidates(self, limit: int, cached_tokens: CachedTokens) -> list[ScheduledSequence]:
        """As if each one were admitted and charged before the next is chosen."""
        heads = [(self.served[tenant], tenant) for tenant in self._queues]
        heapify(heads)
        waiting = {tenant: iter(queue) for tenant, queue in self._queues.items()}
        chosen: list[ScheduledSequence] = []
        while heads and len(chosen) < limit:
            served, tenant = heads[0]
            sequence = next(waiting[tenant], None)
            if sequence is None:
                heappop(heads)
                continue
            chosen.append(sequence)
            heapreplace(heads, (served + self._cost(sequence, sequence.request.num_places), tenant))
        return chosen

    def charge(self, sequence: ScheduledSequence, num_tokens: int) -> None:
        self.served[sequence.request.scope.tenant] += self._cost(sequence, num_tokens)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "longest_prefix_match": LongestPrefixMatch,
    "shortest_remaining": ShortestRemaining,
    "soonest_first_token": SoonestFirstToken,
    "fair_share": FairShare,
}


def make_scheduling_policy(policy: str | Callable[[], SchedulingPolicy]) -> SchedulingPolicy:
    """A policy by its name in `POLICIES`, or made by a class or function of your own."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ConfigError(f"no scheduling policy is called {policy!r}; there are {', '.join(sorted(POLICIES))}")
        return POLICIES[policy]()
    made = policy() if callable(policy) else None
    if not isinstance(made, SchedulingPolicy):
        raise ConfigError(f"policy takes a name, a class or a function that makes a SchedulingPolicy, got {policy!r}")
    return made
