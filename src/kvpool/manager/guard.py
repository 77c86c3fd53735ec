"""The manager's lock, and what happens when it is given back: pressure is measured, callbacks run outside.

Locking rule: one re-entrant lock per manager. Every public method holds it from its first look at the state to its last
change, so each call is atomic and callers need no lock of their own. Callbacks run after the lock was released, in the
thread whose call caused them; they may call the manager, and their exceptions are logged and contained.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvpool.core.cache import Cache
from kvpool.errors import KVPoolError
from kvpool.prefix.evict import copy_ahead
from kvpool.prefix.keeping import expire
from kvpool.quiet import QuietErrors
from kvpool.stats import MemoryPressure

log = logging.getLogger("kvpool")


class PressureChange(NamedTuple):
    """Handed to callbacks when the pressure level changes, in either direction."""

    level: MemoryPressure
    previous: MemoryPressure
    usage: float  # fraction of the fullest GPU pool that live sequences hold
    pool: int
    reason: str


class Guard:
    """`with guard:` around every public operation that may change something, `with guard.query:` around the others."""

    def __init__(self, cache: Cache, levels: Sequence[float]) -> None:
        self.lock = cache.rows.lock
        self.query = Query(self)
        self.cache = cache
        self.calendar = cache.calendar
        self.host_copies = cache.host_copies
        self.failures = cache.failures
        self.first_pool = cache.gpu_pools[0]
        self.levels = tuple(levels)
        # While the only pool's referenced blocks lie there, the level cannot change
        self.calm_from = self.calm_until = 0
        self.level = MemoryPressure.LOW
        # Who listens: a tuple of its own for each registration
        self.pressure_callbacks: tuple[tuple[Callable[[PressureChange], None]], ...] = ()
        self.capacity_callbacks: tuple[tuple[Callable[[], None]], ...] = ()
        self.observers: tuple[tuple[Observer], ...] = ()
        self.num_expired = 0  # positions whose time was over when the present operation began
        self._depth = 0  # operations under way, one inside the other
        self._changes: deque[PressureChange] = deque()
        self._delivery = threading.Lock()
        self._errors = QuietErrors(log)

    def __enter__(self) -> None:
        """Takes the lock; the outermost operation first does what is due."""
        self.lock.acquire()
        cache = self.cache
        self._depth += 1
        if self._depth > 1:  # an operation inside another one happens at the same moment
            return
        try:
            cache.now = now = cache.clock()
            self.num_expired = 0
            if self.calendar.next <= now:
                cache.tick += 1
                self.num_expired = expire(cache)
        except BaseException:
            self._depth = 0
            self.lock.release()
            raise

    def __exit__(self, raised: type[BaseException] | None = None, *_: object) -> None:
        """Gives the lock back. What was found in the cache before holds no longer, unless the operation was refused."""
        cache = self.cache
        if raised is None or not issubclass(raised, KVPoolError):
            cache.tick += 1
        if self._depth > 1:
            self._depth -= 1
            self.lock.release()
            return
        try:
            if self.host_copies.waiting:
                cache.tick += 1
                copy_ahead(cache)
            pool = self.first_pool
            used = pool.num_blocks - pool.num_free - pool.num_cached
            if used > pool.peak_referenced:
                pool.peak_referenced = used
            if not self.calm_from <= used < self.calm_until:
                self._measure()
        finally:
            self._depth = 0
            self.lock.release()
        if self._changes:
            self._deliver()
        for (callback,) in self.capacity_callbacks:
            contain(callback)
        if self.failures:
            self._log_failures()

    # --- who listens -------------------------------------------------------------------------------------------------

    def listen(self, name: str, listener: Any) -> Callable[[], None]:
        """Adds to those that listen, once more; the function that it returns takes off this registration and no other."""
        registration = (listener,)

        def stop() -> None:
            with self.lock:  # a new tuple: another thread may be walking along the old one
                setattr(self, name, tuple([each for each in getattr(self, name) if each is not registration]))

        with self.lock:
            setattr(self, name, (*getattr(self, name), registration))
        return stop

    def tell(self, verb: str, result: Any, *arguments: Any) -> None:
        """Tells observers what was done. Called inside the lock, so they hear of operations in their order."""
        for (observer,) in self.observers:
            try:
                observer.done(verb, self.cache.now, result, arguments)
            except Exception as error:
                self.failures.append(("an observer raised; the manager is not affected", error))

    def _deliver(self) -> None:
        """Runs pressure callbacks in the order of the changes: one thread at a time, and no change inside another's."""
        while self._changes and self._delivery.acquire(blocking=False):
            try:
                while self._changes:
                    change = self._changes.popleft()
                    for (callback,) in self.pressure_callbacks:
                        contain(lambda call=callback, now=change: call(now))  # type: ignore[misc]
            finally:
                self._delivery.release()

    def _log_failures(self) -> None:
        """Logs what a user's policy and observers raised under the lock. Another thread may log some of it."""
        while True:
            try:
                message, error = self.failures.popleft()
            except IndexError:
                return
            self._errors.error(error, message)

    def _measure(self) -> None:
        """Notes a change of the pressure level for delivery, and peaks on the way."""
        fullest, at = 0.0, 0
        for pool in self.cache.gpu_pools:
            pool.note_peak()
            used = pool.num_referenced / pool.num_blocks if pool.num_blocks else 0.0
            if used > fullest:
                fullest, at = used, pool.index
        level = MemoryPressure(sum(fullest >= limit for limit in self.levels))
        if len(self.cache.gpu_pools) == 1:
            edges = [0]  # the fewest blocks in use at each level, by the comparison that finds the level
            for limit in self.levels:
                rounded = math.floor(limit * pool.num_blocks)  # it may be one off, either way
                edges.append(
                    next(n for n in range(max(0, rounded - 1), pool.num_blocks + 2) if n / pool.num_blocks >= limit)
                )
            edges.append(pool.num_blocks + 1)
            self.calm_from, self.calm_until = edges[level], edges[level + 1]
        if level == self.level:
            return
        previous, self.level = self.level, level
        pool = self.cache.gpu_pools[at]
        direction = "rose" if level > previous else "fell"
        reason = (
            f"pool {at}: {pool.num_referenced} of {pool.num_blocks} blocks in use, {pool.num_cached} cached, "
            f"{pool.num_free} free; pressure {direction} from {previous.name} to {level.name}"
        )
        self._changes.append(PressureChange(level, previous, fullest, at, reason))


class Query:
    """An operation that changes nothing: what it finds in the cache holds for the next one."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def __enter__(self) -> None:
        guard = self.guard
        guard.__enter__()
        if guard._depth > 1:  # in the middle of another operation: what was found before it may be gone
            guard.cache.tick += 1

    def __exit__(self, *exc_info: object) -> None:
        self.guard.__exit__(KVPoolError)  # as an operation that was refused: nothing changed


class Observer(Protocol):
    """Is told of every operation that succeeded; one that raised has changed nothing. The recorder is one.

    `done` is called inside the manager's lock, in the order of the operations and in the thread of the caller, so it must
    be quick and must not call the manager. What it raises is logged and goes no further. A manager that nobody observes
    calls nothing.
    """

    def done(self, verb: str, now: float, result: Any, arguments: tuple[Any, ...]) -> None:
        """The manager's method `verb` returned `result` at `now`, by its clock.

        `arguments` stand in the order of the method's signature, defaults included, with token lists and counts as the
        manager converted them. The multimodal items of a commit are those that begin among its tokens, also where they came
        with the prompt. `allocate` gives its keyword arguments as one dictionary behind the tokens.
        `extend` is told as `extend_batch`; `allocate_batch` as one `allocate` for each request; `commit` as `commit_batch`,
        or as `commit` without tokens; `cache.reset` as `reset_prefix_cache`. What `sessions` does is told as `session`,
        with the verb first, then tenant, session, expected seconds and child.
        """


def contain(callback: Callable[[], None]) -> None:
    """Calls back; what it raises is logged and goes no further."""
    try:
        callback()
    except Exception:
        log.exception("a callback raised; the manager is not affected")
