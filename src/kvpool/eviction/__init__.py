"""Eviction policies by name. `make_policy("lru")` builds one; `register_policy("mine")` adds yours to the names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from kvpool.checks import show
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.eviction.adaptive import AdaptivePolicy
from kvpool.eviction.policy import EvictionPolicy, Item, Key, KeyedPolicy, LRUPolicy, PriorityPolicy, Queue, Run

__all__ = [
    "AdaptivePolicy",
    "EvictionPolicy",
    "Key",
    "KeyedPolicy",
    "LeaversFirst",
    "LRUPolicy",
    "PriorityPolicy",
    "Run",
    "contained",
    "make_policy",
    "policy_factory",
    "policy_names",
    "register_policy",
]

PolicyLike = str | type[EvictionPolicy] | EvictionPolicy
PolicyClass = TypeVar("PolicyClass", bound=type[EvictionPolicy])

_FAILED: Final = object()
_POLICIES: dict[str, type[EvictionPolicy]] = {}
# What only replays compare, by name: importing `kvpool.replay` registers them.
_OF_REPLAYS = {
    "2q": "TwoQueuePolicy",
    "arc": "ARCPolicy",
    "clock": "ClockPolicy",
    "cost": "CostAwarePolicy",
    "fifo": "FIFOPolicy",
    "lfu": "LFUPolicy",
    "s3fifo": "S3FIFOPolicy",
    "sieve": "SievePolicy",
}


def register_policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator: make a policy known under `name` (case-insensitive), for `KVCacheConfig(eviction_policy=name)`.

    Registering a class again under its name replaces it (a notebook cell run twice); taking another's name is an error.
    """
    key = _normalised(name)
    if not key:
        raise InvalidArgumentError(f'{name!r} is not a policy name; write @register_policy("name") above the class')

    def register(policy: PolicyClass) -> PolicyClass:
        if not issubclass(policy, EvictionPolicy):
            raise InvalidArgumentError(f"{policy!r} is not a subclass of EvictionPolicy; derive it from KeyedPolicy")
        holder = _POLICIES.get(key)
        if holder is not None and (holder.__module__, holder.__qualname__) != (policy.__module__, policy.__qualname__):
            raise InvalidArgumentError(f"the policy name {key!r} is taken by {holder.__qualname__}; choose another")
        policy.name = key
        _POLICIES[key] = policy
        return policy

    return register


def policy_names() -> tuple[str, ...]:
    """The registered names, sorted."""
    return tuple(sorted(_POLICIES))


def make_policy(policy: PolicyLike) -> EvictionPolicy:
    """A policy from its name, its class, or an instance that serves no cache yet (to set its parameters).

    >>> make_policy("LRU").name
    'lru'
    >>> make_policy(LRUPolicy()).name
    'lru'
    """
    if isinstance(policy, EvictionPolicy):
        if len(policy) > 0:
            raise InvalidArgumentError(
                f"this {type(policy).__name__} orders {len(policy)} runs already; make another, each serves one cache"
            )
        return policy
    if isinstance(policy, type) and issubclass(policy, EvictionPolicy):
        return policy()
    found = _POLICIES.get(_normalised(policy))
    if found is None:
        if (name := _OF_REPLAYS.get(_normalised(policy))) is not None:
            raise InvalidArgumentError(
                f"the policy {policy!r} is one that replays compare; to serve with it, give its class: "
                f"KVCacheManager(config, policy=kvpool.replay.{name})"
            )
        known = ", ".join(policy_names())
        raise InvalidArgumentError(f"unknown eviction policy {policy!r}; known: {known}; add yours by register_policy")
    return found()


def policy_factory(chosen: str | Callable[[], EvictionPolicy]) -> Callable[[], EvictionPolicy]:
    """What makes the eviction policies: a registered name, a class, or a function."""
    if isinstance(chosen, EvictionPolicy):
        raise ConfigError(
            "policy takes a name, a class or a factory: each tier and tenant needs an instance of its own"
        )
    new_policy = chosen if callable(chosen) else partial(make_policy, chosen)
    try:
        made = new_policy()  # an unknown name is refused here, before anything is built
    except TypeError as error:
        raise ConfigError(f"policy {show(chosen)} cannot be called without arguments: {error}") from None
    if not isinstance(made, EvictionPolicy):
        raise ConfigError(f"policy {show(chosen)} does not make an EvictionPolicy")
    return new_policy


def contained(policy: EvictionPolicy, failures: deque[tuple[str, Exception]]) -> EvictionPolicy:
    """The policy as a cache may ask it: one of a user's cannot fail there, and what it raises is added to `failures`."""
    is_own = type(policy).__module__.partition(".")[0] == "kvpool"
    return policy if is_own else ContainedPolicy(policy, failures)


class ContainedPolicy(EvictionPolicy):
    """Asks a policy that may raise or name a run that is no candidate: then runs leave in the order of their last use.

    It keeps the list of candidates itself: those that the policy ranks, and those that it failed for. Of a victim from each
    the one that was not used for longer goes. A policy that cannot name a victim loses all that it ranked to the others.
    """

    def __init__(self, policy: EvictionPolicy, failures: deque[tuple[str, Exception]]) -> None:
        self.policy = policy
        self.name = policy.name  # type: ignore[misc]
        self.by_priority = policy.by_priority  # type: ignore[misc]
        self._failures = failures
        self._ranked: dict[Run, None] = {}
        self._aged: dict[Run, Item] = {}
        self._by_age: Queue[Item] = Queue()

    def add(self, run: Run) -> None:
        self._rejuvenate(run)
        if self._ask(self.policy.add, run) is _FAILED:
            self._give_up(run)
        else:
            self._ranked[run] = None

    def remove(self, run: Run) -> None:
        self._rejuvenate(run)
        if run in self._ranked:
            del self._ranked[run]
            self._ask(self.policy.remove, run)

    def victim(self) -> Run:
        oldest = self._by_age.first()
        if self._ranked:
            chosen = self._ask(self.policy.victim)
            if isinstance(chosen, Run) and chosen in self._ranked:
                if oldest is None or (chosen.last_access, -chosen.start, chosen.created) <= oldest.order[:3]:
                    return chosen
                assert oldest.run is not None
                return oldest.run
            if chosen is not _FAILED:
                problem = f"victim() returned {show(chosen)}, which is no candidate; return a run that was added last"
                self._note(InvalidArgumentError(problem))
            for run in self._ranked:
                self._age(run)
            self._ranked.clear()
            self._ask(self.policy.clear)
        return self._by_age.head()

    def trimmed(self, run: Run) -> None:
        if run in self._ranked and self._ask(self.policy.trimmed, run) is _FAILED:
            self._give_up(run)

    def evicted(self, run: Run) -> None:
        if run in self._ranked:
            self._ask(self.policy.evicted, run)

    def clear(self) -> None:
        self._ranked.clear()
        self._aged.clear()
        self._by_age.clear()
        self._ask(self.policy.clear)

    def __len__(self) -> int:
        return len(self._ranked) + len(self._aged)

    def __contains__(self, run: object) -> bool:
        return run in self._ranked or run in self._aged

    def _ask(self, method: Callable[..., Any], *arguments: Run) -> Any:
        """What a method of the policy returns; `_FAILED` if it raises."""
        try:
            return method(*arguments)
        except Exception as error:
            self._note(error)
            return _FAILED

    def _note(self, error: Exception) -> None:
        policy = f"eviction policy {self.name!r} ({type(self.policy).__name__})"
        self._failures.append(
            (f"{policy} failed; the runs that it failed for leave in the order of their last use", error)
        )

    def _give_up(self, run: Run) -> None:
        """The policy failed for a run. It may have taken it in halfway."""
        self._ranked.pop(run, None)
        self._ask(self.policy.remove, run)
        self._age(run)

    def _age(self, run: Run) -> None:
        self._aged[run] = self._by_age.insert(Item(run.last_access, run))

    def _rejuvenate(self, run: Run) -> None:
        item = self._aged.pop(run, None)
        if item is not None:
            self._by_age.discard(item)


class LeaversFirst(EvictionPolicy):
    """Another policy, except that runs of ended sessions go before all others, the deepest first."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.name = policy.name  # type: ignore[misc]
        self.by_priority = policy.by_priority  # type: ignore[misc]
        self._leavers: dict[Run, Item] = {}
        self._order: Queue[Item] = Queue()

    @property
    def num_leavers(self) -> int:
        """Candidates that go before all others."""
        return len(self._leavers)

    def add(self, run: Run) -> None:
        if run in self._leavers:
            self.remove(run)
        if run.leaves:
            self._leavers[run] = self._order.insert(Item(0, run))
        else:
            self.policy.add(run)

    def remove(self, run: Run) -> None:
        item = self._leavers.pop(run, None)
        if item is None:
            self.policy.remove(run)
        else:
            self._order.discard(item)

    def victim(self) -> Run:
        return self._order.head() if self._leavers else self.policy.victim()

    def trimmed(self, run: Run) -> None:
        if run in self._leavers:
            self.add(run)
        else:
            self.policy.trimmed(run)

    def evicted(self, run: Run) -> None:
        if run not in self._leavers:
            self.policy.evicted(run)

    def clear(self) -> None:
        self._leavers.clear()
        self._order.clear()
        self.policy.clear()

    def __len__(self) -> int:
        return len(self._leavers) + len(self.policy)

    def __contains__(self, run: object) -> bool:
        return run in self._leavers or run in self.policy


def _normalised(name: object) -> str:
    return name.strip().lower() if isinstance(name, str) else ""


for _policy in (LRUPolicy, PriorityPolicy, AdaptivePolicy):
    register_policy(_policy.name)(_policy)
