"""RemoteTier: what all tiers over a network share. A failed node costs one deadline; then its keys are misses.

The keys of a call are divided into shares, each for one node and of bounded size. The shares of a call run at the same time.
After a node did not answer, nobody asks it until a probe in the background succeeds (`breaker.py`), so that callers never
wait for it a second time.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvpool.tiers.contract import CALL_TIMEOUT, PURGE_TIMEOUT, KeyedTier, Listing, Outcome, Purged, Room
from kvpool.tiers.envelope import checksum
from kvpool.tiers.keys import KeyPattern
from kvpool.tiers.remote.breaker import Breaker

SHARE_BYTES = 16 << 20
SHARE_KEYS = 512
MAX_STALE = 4096
STALE_SECONDS = 10.0
FULL_SECONDS = 1.0


class NodeError(Exception):
    """A node cannot serve at the moment; the message says why."""


class StoreNode:
    """One server of a tier: its name, its breaker, its threads, and whether it has room."""

    def __init__(self, name: str, num_threads: int, breaker: Breaker) -> None:
        self.name = name
        self.breaker = breaker
        self.full_until = -float("inf")
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"kvpool {name}")

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Wraps every request to the node: tells the breaker whether it succeeded."""
        asked_at = time.monotonic()
        try:
            yield
        except TimeoutError:
            waited = time.monotonic() - asked_at
            self.breaker.failed(f"no answer in {waited:.2f} s", asked_at=asked_at)
            raise
        except NodeError as error:
            self.breaker.failed(str(error))
            raise
        self.breaker.succeeded()

    def is_full(self) -> bool:
        """Whether it has lately refused a value for lack of room."""
        return time.monotonic() < self.full_until

    def refused(self) -> None:
        """It had no room: for a short time, nobody sends it values."""
        self.full_until = time.monotonic() + FULL_SECONDS

    def close(self) -> None:
        """Closes threads and connections."""
        self.threads.shutdown(wait=False, cancel_futures=True)


_Node = TypeVar("_Node", bound=StoreNode)


@dataclass
class Share(Generic[_Node]):
    """Keys of one call that go to one node together. The node fills in `outcomes`; keys that it does not reach stay late."""

    node: _Node
    places: list[int]
    keys: list[bytes]
    views: list[memoryview]
    deadline: float
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outcomes = [Outcome.LATE] * len(self.keys)

    def seconds_left(self) -> float:
        """Time until the deadline; raises TimeoutError when it is over."""
        return seconds_left(self.deadline)


@dataclass
class Purging(Generic[_Node]):
    """A purge of one node: how many values were removed, and how many could not be."""

    node: _Node
    pattern: KeyPattern
    deadline: float
    removed: int = 0
    num_left: int = 0

    def seconds_left(self) -> float:
        """Time until the deadline; raises TimeoutError when it is over."""
        return seconds_left(self.deadline)


class StaleKeys:
    """Keys that the store said it has, but whose values were missing or damaged. They count as absent for a short time."""

    def __init__(self, seconds: float = STALE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: bytes) -> None:
        """Remembers a key; the oldest of too many is forgotten."""
        with self._lock:
            self._until[key] = self._clock() + self._seconds
            self._until.move_to_end(key)
            if len(self._until) > MAX_STALE:
                self._until.popitem(last=False)

    def discard(self, key: bytes) -> None:
        """Forgets a key: it was stored anew, or removed."""
        with self._lock:
            self._until.pop(key, None)

    def __contains__(self, key: bytes) -> bool:
        if not self._until:
            return False
        with self._lock:
            until = self._until.get(key)
            if until is not None and until <= self._clock():
                del self._until[key]
                return False
            return until is not None

    def __len__(self) -> int:
        return len(self._until)


class RemoteTier(KeyedTier, Generic[_Node]):
    """Values on servers. A derived class says which node has a key, and implements calls for one share of keys.

    These may raise `TimeoutError` and `NodeError`. `stale` are keys whose values turned out to be missing or damaged.
    """

    can_list = True
    """Whether the store can say what it holds."""

    def __init__(self, name: str, *, timeout: float = CALL_TIMEOUT, max_value_bytes: int) -> None:
        super().__init__(name, timeout=timeout)
        checksum(bytes(32), memoryview(b""))  # raises now if the package is missing, not with the first value
        self.max_value_bytes = max_value_bytes
        self.stale = StaleKeys()

    # --- what a remote tier writes -----------------------------------------------------------------------------------

    @abstractmethod
    def _nodes(self) -> list[_Node]:
        """The nodes that are known."""

    def _holders(self) -> list[_Node]:
        """The nodes that hold values."""
        return self._nodes()

    @abstractmethod
    def _node_of(self, key: bytes) -> _Node: ...

    @abstractmethod
    def _probe(self, node: _Node) -> None:
        """Asks a node something small; raises if it does not answer. Runs in a thread of the node."""

    @abstractmethod
    def _find_share(self, share: Share[_Node]) -> None: ...

    @abstractmethod
    def _load_share(self, share: Share[_Node]) -> None: ...

    @abstractmethod
    def _store_share(self, share: Share[_Node]) -> None: ...

    @abstractmethod
    def _remove_share(self, share: Share[_Node]) -> None: ...

    @abstractmethod
    def _purge_share(self, purging: Purging[_Node]) -> None: ...

    @abstractmethod
    def _list_node(self, node: _Node, deadline: float) -> Iterator[dict[bytes, int]]:
        """The keys of all values of a node and their sizes, in parts."""

    # --- the contract ------------------------------------------------------------------------------------------------

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        outcomes = self._serve(keys, None, self._find_share, deadline)
        return [outcome == Outcome.OK and key not in self.stale for key, outcome in zip(keys, outcomes, strict=True)]

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        decided = [Outcome.MISS if key in self.stale else None for key in keys]
        return self._serve(keys, out, self._load_share, deadline, decided)

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        decided: list[Outcome | None] = []
        first: dict[bytes, int] = {}
        for place, (key, view) in enumerate(zip(keys, data, strict=True)):
            again = first.setdefault(key, place) != place
            too_large = view.nbytes > self.max_value_bytes
            decided.append(Outcome.REFUSED if too_large else Outcome.OK if again else None)
        outcomes = self._serve(keys, data, self._store_share, deadline, decided)
        return [
            outcomes[first[key]] if outcome == Outcome.OK else outcome
            for key, outcome in zip(keys, outcomes, strict=True)
        ]

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        return self._serve(keys, None, self._remove_share, deadline)

    def listed(self, *, timeout: float = PURGE_TIMEOUT) -> Listing:
        """Lists all values of the store. Slow with many values; values that are written meanwhile may be missing."""
        deadline = time.monotonic() + timeout
        sizes: dict[bytes, int] = {}
        problems = []
        for node in self._holders():
            asked_until = time.monotonic() + self.timeout  # the first probe may still be in flight
            while not self._is_up(node) and time.monotonic() < asked_until:
                time.sleep(0.01)
            try:
                if not self._is_up(node):
                    raise NodeError(node.breaker.problem)
                for part in self._list_node(node, deadline):
                    sizes.update(part)
            except (TimeoutError, NodeError) as problem:
                problems.append(self._told(node, str(problem) or "no answer in time"))
        return Listing(sizes, "; ".join(problems))

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        found = [self._purge_node(node, pattern, deadline) for node in self._holders()]
        return Purged(sum(each.removed for each in found), all(each.is_complete for each in found))

    def _purge_node(self, node: _Node, pattern: KeyPattern, deadline: float) -> Purged:
        """Purges one node. Nodes are purged one after another, because no request waits for a purge."""
        if not self._is_up(node):
            return Purged()
        found = Purging(node, pattern, deadline)
        try:
            self._purge_share(found)
        except (TimeoutError, NodeError) as problem:
            self.report(self._told(node, str(problem) or "late"))
            return Purged(found.removed)
        return Purged(found.removed, not found.num_left)

    def _look(self) -> Room:
        problems = [(node, node.breaker.problem) for node in self._nodes()]
        return Room(problem="; ".join(self._told(node, problem) for node, problem in problems if problem))

    def _close(self) -> None:
        for node in self._nodes():
            node.close()

    # --- shares ------------------------------------------------------------------------------------------------------

    def _serve(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview] | None,
        serve: Callable[[Share[_Node]], None],
        deadline: float,
        decided: Sequence[Outcome | None] | None = None,
    ) -> list[Outcome]:
        """One outcome per key: one that was decided before, or that of the node that has the key."""
        outcomes = [Outcome.FAILED if outcome is None else outcome for outcome in decided or [None] * len(keys)]
        places = [place for place in range(len(keys)) if decided is None or decided[place] is None]
        shares = self._shares(keys, views, places, deadline)
        if len(shares) == 1:
            self._serve_share(serve, shares[0])
        else:
            waiting = [share.node.threads.submit(self._serve_share, serve, share) for share in shares]
            self._await(waiting, deadline)
        for share in shares:
            for place, outcome in zip(share.places, share.outcomes, strict=True):
                outcomes[place] = outcome
        return outcomes

    def _shares(
        self, keys: Sequence[bytes], views: Sequence[memoryview] | None, places: Sequence[int], deadline: float
    ) -> list[Share[_Node]]:
        """The keys by node, in shares of bounded size; nodes that are down get none."""
        by_node: dict[_Node, list[list[int]]] = {}
        sizes: dict[_Node, int] = {}
        for place in places:
            node = self._node_of(keys[place])
            size = views[place].nbytes if views is not None else 0
            parts = by_node.setdefault(node, [])
            if not parts or len(parts[-1]) == SHARE_KEYS or sizes[node] + size > SHARE_BYTES:
                parts.append([])
                sizes[node] = 0
            parts[-1].append(place)
            sizes[node] += size
        return [
            Share(node, part, [keys[p] for p in part], [] if views is None else [views[p] for p in part], deadline)
            for node, parts in by_node.items()
            if self._is_up(node)
            for part in parts
        ]

    def _serve_share(self, serve: Callable[[Share[_Node]], None], share: Share[_Node]) -> None:
        """Serves a share. If an error ends it, the outcomes so far stay."""
        try:
            share.seconds_left()
            serve(share)
        except TimeoutError:
            error = "late"
        except NodeError as problem:
            error = str(problem)
            share.outcomes = [Outcome.FAILED if found == Outcome.LATE else found for found in share.outcomes]
        else:
            return
        if not share.node.breaker.allows():
            self.report(self._told(share.node, share.node.breaker.problem or error))

    @staticmethod
    def _await(waiting: list[Future[None]], deadline: float) -> None:
        """Waits for all shares. Running ones end by the deadline; shares that are still queued then do not begin."""
        for future in waiting:  # `futures.wait` would not hear of those that a node drops when it is closed
            with suppress(Exception):
                future.result(max(0.0, deadline - time.monotonic()))
        for future in waiting:
            if not future.cancel():
                future.result()

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _is_up(self, node: _Node) -> bool:
        """Whether the node may be asked. If a probe is due, starts it in the background."""
        if node.breaker.allows():
            return True
        self._probe_in_background(node)
        return False

    def _told(self, node: _Node, problem: str) -> str:
        """A problem, with the name of its node if there are several nodes."""
        return problem if len(self._nodes()) == 1 else f"{node.name}: {problem}"

    def _probe_in_background(self, node: _Node) -> Future[None] | None:
        return node.threads.submit(self._run_probe, node) if node.breaker.claim_probe() else None

    def _run_probe(self, node: _Node) -> None:
        try:
            self._probe(node)
        except Exception as error:  # any error of the client means that the node is not back
            node.breaker.failed(str(error) or "no answer")
            self.report(self._told(node, node.breaker.problem))
        else:
            node.breaker.succeeded()


def seconds_left(deadline: float) -> float:
    """Time until a deadline; raises TimeoutError when it is over."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds
