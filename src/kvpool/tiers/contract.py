"""KeyedTier: the one contract of tiers that find blocks by key and outlive a process. Read this first.

A keyed tier finds values by key. A key stands for content (see `tiers/keys.py`), so a value never changes. A client can
always compute what a tier does not return. So the rule behind everything here is: **any error is a miss**. A call returns
one outcome per key before its deadline, and raises only for wrong arguments.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from kvpool.checks import show
from kvpool.config.layers import Tier
from kvpool.errors import InvalidArgumentError
from kvpool.quiet import QuietLog

if TYPE_CHECKING:
    from kvpool.tiers.keys import KeyPattern, KeySpace

KEY_BYTES = 32
CALL_TIMEOUT = 1.0
PURGE_TIMEOUT = 60.0

Buffer: TypeAlias = Any
"""Contiguous memory of the caller: any object with the buffer protocol."""


class Keeper(Protocol):
    """The owner of memory that values are loaded into. It keeps the memory until every writer has released it."""

    def share(self) -> None:
        """One more writer."""

    def release(self) -> None:
        """One writer less."""


_T = TypeVar("_T")
_log = logging.getLogger("kvpool")


class Outcome(IntEnum):
    """The result of a call for one key."""

    OK = 0
    """Loaded whole and verified, or stored, or removed."""
    MISS = 1
    """Not there."""
    FAILED = 2
    """The tier could not do it, or what it holds is not what was stored."""
    LATE = 3
    """Not done before the deadline."""
    REFUSED = 4
    """Not stored: no room that may be taken, too large, or too much waits already."""


class Worth(NamedTuple):
    """What a store says about a value, for tiers that choose what to evict by it."""

    priority: int = 35
    """Retention priority, 0 to 100, as `Retention` gives it to tokens."""
    depth: int = 0
    """Blocks before it in its prompt."""
    seconds: float | None = None
    """How long the priority holds; then it is the usual one. None: always."""


class Slots(NamedTuple):
    """Memory of a tier for values that a caller writes by itself. Nobody finds them before the caller has."""

    numbers: list[int]
    """Which of the values have a slot."""
    views: list[memoryview]
    """One for each of them."""
    memory: memoryview
    """All of the tier's memory that the views lie in."""
    part_bytes: int
    """No view lies across a multiple of so many bytes of the memory."""


class Source(Protocol):
    """Values that a caller writes into a tier's memory by itself."""

    def write(self, slots: Slots) -> None:
        """Writes values into their slots; returns when they are written."""

    def is_in(self, slots: Slots) -> bool:
        """Whether these very values are in their slots. A tier asks this after it took the checksums.

        Somebody who had a slot before, and was stopped for a while, may have written to it until then.
        """


class CountedKeeper(ABC):
    """A `Keeper` with several users. The last one that releases it ends it."""

    def __init__(self) -> None:
        self._users = 1
        self._lock = threading.Lock()

    def share(self) -> None:
        """One more user."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._end()

    @abstractmethod
    def _end(self) -> None:
        """Nobody uses the memory any more."""


class Loan(CountedKeeper):
    """Values where a tier keeps them, for a caller that copies them straight to its device. They stay until `release`.

    Each was `OK` when it was lent. Ask `is_held` after the copy: if it says no, what was copied may be wrong.
    """

    def __init__(self, memory: memoryview, part_bytes: int) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []
        self.views: list[memoryview] = []
        """One for each key, empty where the outcome is not `OK`."""
        self.memory = memory
        """All of the tier's memory that the views lie in."""
        self.part_bytes = part_bytes
        """No view lies across a multiple of so many bytes of the memory."""

    @abstractmethod
    def is_held(self) -> bool:
        """Whether the tier has kept the values unchanged until now."""


@dataclass(frozen=True)
class TierStats:
    """The state of a tier. Counts are values since it was opened, by this process."""

    name: str
    hits: int = 0
    misses: int = 0
    load_failures: int = 0
    late_loads: int = 0
    stored: int = 0
    refused: int = 0
    store_failures: int = 0
    late_stores: int = 0
    removed: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    seconds_loading: float = 0.0
    seconds_storing: float = 0.0
    num_values: int | None = None
    """Values that it holds; None where only the server knows."""
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    problem: str = ""
    """Why it answers nothing at the moment, in words; empty while it works."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """Bytes by the engine that stored them, where several share the tier and it tells them apart."""


@dataclass(frozen=True)
class Purged:
    """The result of a purge."""

    removed: int = 0
    is_complete: bool = False
    """Whether everything was looked at and nothing that was meant is left; else it may be called again."""


class Listing(NamedTuple):
    """What a tier holds: the number of bytes of each value. `problem` says why it may be only a part."""

    sizes: dict[bytes, int]
    problem: str


@dataclass(frozen=True)
class Room:
    """How full a tier is, as far as it knows."""

    num_values: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    problem: str = ""
    holders: Mapping[str, int] = field(default_factory=dict)


class _Moved:
    """Sums over the calls of one direction; several threads add to them."""

    def __init__(self) -> None:
        self.outcomes = [0] * len(Outcome)
        self.num_bytes = 0
        self.seconds = 0.0


class KeyedTier(ABC):
    """Values of blocks by key: on a disk, in a remote store, or wherever your derived class puts them.

    A derived class implements `_contains`, `_load`, `_store`, `_remove` and, if useful, `_look` and `_close`. They may raise
    any exception: this class checks the arguments, turns errors into outcomes, logs them (one line a minute) and counts.
    `deadline` is a time of `time.monotonic`; what is not done by then is `LATE`. Several threads may call all methods.
    `kvpool.testing.TierContract` tests a tier of your own against this contract.
    """

    medium: Tier = Tier.REMOTE
    """Where its values lie, for people and statistics: in memory of this machine, on its disk, or elsewhere."""
    has_slots = False
    """Whether callers can write to its memory: `store_straight`."""

    def __init__(self, name: str, *, timeout: float = CALL_TIMEOUT) -> None:
        self.name = name
        self.timeout = _checked_timeout(timeout)
        self._loads, self._stores = _Moved(), _Moved()
        self._removed = self._unfilled_bytes = 0
        self._counting = threading.Lock()
        self._quiet = QuietLog(_log)
        self._closed = False

    # --- calls -------------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes], *, timeout: float | None = None) -> list[bool]:
        """Whether each key is there, as far as the tier knows; after an error the answer is no."""
        _check_keys(keys)
        found = self._guarded(lambda deadline: self._contains(keys, deadline), timeout)
        return [False] * len(keys) if found is None else found

    def contains_prefix(self, keys: Sequence[bytes], *, timeout: float | None = None) -> int:
        """How many keys from the first on are there without a gap."""
        found = self.contains(keys, timeout=timeout)
        return found.index(False) if False in found else len(found)

    def load(
        self,
        keys: Sequence[bytes],
        out: Sequence[Buffer],
        *,
        timeout: float | None = None,
        keeper: Keeper | None = None,
    ) -> list[Outcome]:
        """Copies values into the caller's buffers. `OK` means: byte for byte what was stored under this key.

        A value shorter than its buffer fills the beginning of it; a longer one is `FAILED`. Without `OK` the content of a
        buffer is undefined. When the call returns, nobody writes to the buffers any more. With a `keeper`, a tier may read
        straight into the buffers, which saves a copy. Reads that are late then still write, until the tier has called
        `keeper.release` as often as `keeper.share`.
        """
        call = self._load if keeper is None else partial(self._load_kept, keeper=keeper)
        return self._move(self._loads, call, keys, _views(out, keys, writable=True), timeout)

    def lend(self, keys: Sequence[bytes], sizes: Sequence[int], *, timeout: float | None = None) -> Loan | None:
        """Lends values of exactly these sizes, verified where they lie, to a caller that copies them by itself.

        None: this tier has no memory that callers can read, lends too much already, or failed. Then `load` them.
        """
        _check_keys(keys)
        started = time.monotonic()
        loan = self._guarded(lambda deadline: self._lend(keys, sizes, deadline), timeout)
        if loan is not None:
            self._count(self._loads, loan.outcomes, sizes, started)
        return loan

    def store(
        self,
        keys: Sequence[bytes],
        data: Sequence[Buffer],
        *,
        timeout: float | None = None,
        worths: Sequence[Worth] | None = None,
    ) -> list[Outcome]:
        """Keeps values under their keys. A key that is there already is `OK` and costs nothing.

        When the call returns, the caller may change its buffers. `worths` are for tiers that evict by them.
        """
        call = self._store if worths is None else partial(self._store_rated, worths=worths)
        return self._move(self._stores, call, keys, _views(data, keys, writable=False), timeout)

    def store_straight(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        source: Source,
        *,
        timeout: float | None = None,
        worths: Sequence[Worth] | None = None,
    ) -> list[Outcome]:
        """Keeps values that `source` writes straight into the tier's memory: those that are not there and get a slot.

        It may be asked to write several times, each time others, or again the same if the tier must begin anew. Only a tier
        that `has_slots` can do this.
        """
        _check_keys(keys)
        started = time.monotonic()
        rated = [Worth()] * len(keys) if worths is None else worths
        outcomes = self._guarded(lambda deadline: self._store_straight(keys, sizes, source, deadline, rated), timeout)
        outcomes = [Outcome.FAILED] * len(keys) if outcomes is None else outcomes
        self._count(self._stores, outcomes, sizes, started)
        return outcomes

    def remove(self, keys: Sequence[bytes], *, timeout: float | None = None) -> list[Outcome]:
        """Forgets values: `OK` or `MISS` for each key; with `FAILED` or `LATE` a value may still be there."""
        _check_keys(keys)
        outcomes = self._guarded(lambda deadline: self._remove(keys, deadline), timeout)
        outcomes = [Outcome.FAILED] * len(keys) if outcomes is None else outcomes
        with self._counting:
            self._removed += outcomes.count(Outcome.OK)
        return outcomes

    def purge(self, pattern: KeyPattern, *, timeout: float = PURGE_TIMEOUT) -> Purged:
        """Removes all values whose keys match a pattern: those of a tenant, a scope or a model.

        It looks through the whole tier, which is slow with many values. A tier of your own that cannot do this returns a
        `Purged` that is not complete.
        """
        purged = self._guarded(lambda deadline: self._purge(pattern, deadline), timeout)
        purged = Purged() if purged is None else purged
        with self._counting:
            self._removed += purged.removed
        return purged

    def introduce(self, space: KeySpace) -> None:  # noqa: B027  # a tier may have no use for it
        """Tells the tier to which model the next keys belong. A disk tier keeps the fingerprint for people. Never raises."""

    def stats(self) -> TierStats:
        """Counters, and how full the tier is, if it knows that."""
        with self._counting:
            loads, stores = list(self._loads.outcomes), list(self._stores.outcomes)
            sums = dict(
                removed=self._removed,
                bytes_loaded=self._loads.num_bytes - self._unfilled_bytes,
                bytes_stored=self._stores.num_bytes,
                seconds_loading=self._loads.seconds,
                seconds_storing=self._stores.seconds,
            )
        room = Room() if self._closed else self._look()
        return TierStats(
            name=self.name,
            hits=loads[Outcome.OK],
            misses=loads[Outcome.MISS],
            load_failures=loads[Outcome.FAILED] + loads[Outcome.REFUSED],
            late_loads=loads[Outcome.LATE],
            stored=stores[Outcome.OK],
            refused=stores[Outcome.REFUSED],
            store_failures=stores[Outcome.FAILED] + stores[Outcome.MISS],
            late_stores=stores[Outcome.LATE],
            num_values=room.num_values,
            used_bytes=room.used_bytes,
            capacity_bytes=room.capacity_bytes,
            problem="closed" if self._closed else room.problem,
            holders=room.holders,
            **sums,  # type: ignore[arg-type]  # mypy joins the values of the dictionary
        )

    def close(self) -> None:
        """Closes files and connections; stored values stay. Every later call finds nothing. May be called twice."""
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> KeyedTier:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- what a tier writes ------------------------------------------------------------------------------------------

    @abstractmethod
    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]: ...

    @abstractmethod
    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]: ...

    def _load_kept(
        self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float, *, keeper: Keeper
    ) -> list[Outcome]:
        """`_load` into memory that `keeper` keeps until each `share` is released. By default it is the same as `_load`."""
        return self._load(keys, out, deadline)

    def _lend(self, keys: Sequence[bytes], sizes: Sequence[int], deadline: float) -> Loan | None:
        """By default a tier lends nothing."""
        return None

    @abstractmethod
    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]: ...

    def _store_rated(
        self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float, *, worths: Sequence[Worth]
    ) -> list[Outcome]:
        """`_store` with what is known of each value. By default it is the same as `_store`."""
        return self._store(keys, data, deadline)

    def _store_straight(
        self, keys: Sequence[bytes], sizes: Sequence[int], source: Source, deadline: float, worths: Sequence[Worth]
    ) -> list[Outcome]:
        """By default a tier has no memory that callers can write to."""
        return [Outcome.REFUSED] * len(keys)

    @abstractmethod
    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]: ...

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        self.report("it cannot look for the values of a tenant, a scope or a model")
        return Purged()

    def _look(self) -> Room:
        return Room()

    def left_unfilled(self, num_bytes: int) -> None:
        """A derived class calls this in `_load` if a value is `num_bytes` shorter than its buffer."""
        if num_bytes:
            with self._counting:
                self._unfilled_bytes += num_bytes

    def _close(self) -> None:  # noqa: B027  # a tier may have nothing to close
        """Closes files and connections."""

    def _move(
        self,
        moved: _Moved,
        call: Callable[[Sequence[bytes], list[memoryview], float], list[Outcome]],
        keys: Sequence[bytes],
        views: list[memoryview],
        timeout: float | None,
    ) -> list[Outcome]:
        """Loads or stores, and counts the outcomes."""
        started = time.monotonic()
        outcomes = self._guarded(lambda deadline: call(keys, views, deadline), timeout)
        outcomes = [Outcome.FAILED] * len(keys) if outcomes is None else outcomes
        self._count(moved, outcomes, [view.nbytes for view in views], started)
        return outcomes

    def _count(self, moved: _Moved, outcomes: Sequence[Outcome], sizes: Sequence[int], started: float) -> None:
        with self._counting:
            moved.seconds += time.monotonic() - started
            for outcome, size in zip(outcomes, sizes, strict=True):
                moved.outcomes[outcome] += 1
                if outcome == Outcome.OK:
                    moved.num_bytes += size

    # --- errors ------------------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[float], _T], timeout: float | None) -> _T | None:
        """What the call returns, or None if the tier is closed or the call raised."""
        if self._closed:
            return None
        seconds = self.timeout if timeout is None else _checked_timeout(timeout)
        try:
            return call(time.monotonic() + seconds)
        except Exception as error:
            self.report(f"{type(error).__name__}: {error}")
            return None

    def report(self, what: str) -> None:
        """Logs an error, at most one line a minute, because a store that is down would fill the log."""
        self._quiet.warning("tier %s: %s; what it cannot bring is computed again", self.name, what)


def _checked_timeout(seconds: object) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise InvalidArgumentError(f"a tier's timeout is a number of seconds above 0, got {show(seconds)}")
    return float(seconds)


def _check_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise InvalidArgumentError(f"a key is {KEY_BYTES} bytes, see KeySpace.keys; got {show(key)}")


def _views(buffers: Sequence[Buffer], keys: Sequence[bytes], *, writable: bool) -> list[memoryview]:
    """The caller's buffers as bytes, one for each key."""
    _check_keys(keys)
    if len(buffers) != len(keys):
        raise InvalidArgumentError(f"{len(keys)} keys need as many buffers, got {len(buffers)}")
    views = []
    for buffer in buffers:
        try:
            view = memoryview(buffer).cast("B")
        except TypeError:
            raise InvalidArgumentError(f"a buffer is contiguous memory, got {type(buffer).__name__}") from None
        if writable and view.readonly:
            raise InvalidArgumentError("values are loaded into a buffer, and this one is read-only")
        views.append(view)
    return views
