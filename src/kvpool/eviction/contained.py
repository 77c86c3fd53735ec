"""A user's policy inside the cache: what it raises is kept for the log, and what it does not rank leaves by age."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvpool.checks import show
from kvpool.errors import InvalidArgumentError
from kvpool.eviction.policy import EvictionPolicy, Item, Run, RunQueue

_FAILED: Final = object()


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
        self._by_age = RunQueue()

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
        self._aged[run] = self._by_age.push(run.last_access, run)

    def _rejuvenate(self, run: Run) -> None:
        item = self._aged.pop(run, None)
        if item is not None:
            self._by_age.discard(item)
