"""Chooses the node with the least cost for a request: for the rest of its prompt, the queue, and the other requests there.

    router = Router(index)
    route = router.route(tokens, session="alice")
    ...                                    # send it to route.node
    route.first_token(); route.end()

The index knows what nodes hold. The router itself counts what they do: every route is open until `end`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from kvpool.checks import check_int, check_number, show
from kvpool.cluster.index import MAX_NODES, ClusterIndex, Hit
from kvpool.errors import ConfigError, InvalidArgumentError, NoNodeError

_K = TypeVar("_K", bound=Hashable)
_NO_HIT = Hit(0, 0, 0)
_MOST_DECISIONS = 100
_MOST_REMEMBERED = 1 << 17  # sessions, assumed blocks and hot prefixes each


@dataclass(frozen=True)
class RoutingConfig:
    """Weights and limits of a `Router`. Costs are in tokens of a prompt that a node computes.

    A cached token costs nothing on the GPU, `cpu_cost` if it comes from host memory, `storage_cost` if it comes from storage.
    A running request slows down every other one on its node: `decode_cost`, plus `context_cost` for each token that it reads.
    """

    cpu_cost: float = 0.1
    storage_cost: float = 0.3
    decode_cost: float = 32.0
    context_cost: float = 0.005
    placed_cost: float = 0.05  # for each token that a node computed lately, because new blocks evict others there
    placed_seconds: float = 300.0  # after so long, half of these tokens are forgotten
    session_tokens: int = 256  # how much cheaper its last node is for the next request of a session
    session_seconds: float = 600.0
    assumed_seconds: float = 5.0  # so long, a prompt counts as cached on its node although no event says so yet
    hot_requests: int = 32  # a cached prefix with so many requests within `hot_seconds` gets one more node
    hot_seconds: float = 10.0
    max_node_requests: int = 256  # a node with so many gets no more while another has room
    max_node_tokens: int = 131_072  # the same for prompt tokens that it still has to compute

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int":
                check_int(value, each.name, 0 if each.name == "session_tokens" else 1, 1 << 40)
            elif not check_number(value, each.name, "a number, 0 or more") >= 0:
                raise ConfigError(f"{each.name}={value} must be a number, 0 or more")


class NodeLoad(NamedTuple):
    """What a node does, as the router counts it."""

    num_requests: int
    num_waiting_tokens: int  # of prompts that it still has to compute
    num_context_tokens: int  # read by its running requests
    is_ready: bool
    num_routes: int = 0  # since it was added, like the next two
    num_hit_tokens: int = 0  # tokens of its prompts that it had cached when they came
    num_prompt_tokens: int = 0


class Decision(NamedTuple):
    """One of the last decisions: the time by the router's clock, the node, the reason, and cached and all tokens."""

    number: int
    at: float
    node: Hashable
    reason: str
    num_tokens: int
    hit: Hit


class RouterStats(NamedTuple):
    """How often the router decided, and why: it was the cheapest node, it has the session, it becomes one more node for a hot
    prefix, or the cheapest node was full.
    """

    num_routes: int
    num_cheapest: int
    num_session: int
    num_replicated: int
    num_spilled: int
    num_hit_tokens: int
    num_prompt_tokens: int


class _NodeCounts:
    """The work of one node."""

    __slots__ = (
        *("context_tokens", "hit_tokens", "is_ready", "last_chosen", "placed_at", "placed_tokens", "prompt_tokens"),
        *("requests", "routes", "waiting_tokens"),
    )

    def __init__(self) -> None:
        self.requests = self.waiting_tokens = self.context_tokens = self.last_chosen = 0
        self.routes = self.hit_tokens = self.prompt_tokens = 0
        self.placed_tokens = self.placed_at = 0.0  # computed lately, as of then
        self.is_ready = True

    def fade(self, now: float, half_life: float) -> None:
        """Forgets a part of the computed tokens, by the time that has passed."""
        self.placed_tokens *= 0.5 ** ((now - self.placed_at) / half_life)
        self.placed_at = now


class Route:
    """A decision: the node, what it holds of the prompt, and why it was chosen. Call `first_token` and `end`."""

    __slots__ = ("_books", "_num_context", "_num_waiting", "_router", "hit", "node", "reason")

    def __init__(
        self, router: Router, node: Hashable, hit: Hit, reason: str, books: _NodeCounts, prompt: int, left: int
    ) -> None:
        self.node = node
        self.hit = hit
        self.reason = reason
        self._router = router
        self._books: _NodeCounts | None = books
        self._num_waiting, self._num_context = left, prompt

    def first_token(self) -> None:
        """The prompt is computed."""
        with self._router._lock:
            if self._books is not None:
                self._books.waiting_tokens -= self._num_waiting
                self._num_waiting = 0

    def end(self) -> None:
        """The request is over, with or without success. A second call changes nothing."""
        with self._router._lock:
            if self._books is not None:
                self._books.waiting_tokens -= self._num_waiting
                self._books.context_tokens -= self._num_context
                self._books.requests -= 1
                self._books = None


class Router:
    """Decides for up to 64 nodes of an index; any thread may ask."""

    def __init__(
        self, index: ClusterIndex, config: RoutingConfig | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._index = index
        self._config = config or RoutingConfig()
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[Hashable, _NodeCounts] = {}
        self._sessions: OrderedDict[Hashable, tuple[Hashable, float]] = OrderedDict()
        self._assumed: OrderedDict[int, tuple[Hashable, float]] = OrderedDict()  # blocks by content, newest last
        # When prompts came that were cached up to this block
        self._heat: OrderedDict[int, deque[float]] = OrderedDict()
        self._num_decided = 0
        self._decisions: deque[Decision] = deque(maxlen=_MOST_DECISIONS)
        self._reasons: Counter[str] = Counter()
        self._num_hit_tokens = self._num_prompt_tokens = 0

    # --- nodes -------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> dict[Hashable, NodeLoad]:
        """All nodes and what they do."""
        with self._lock:
            return {
                node: NodeLoad(
                    books.requests,
                    books.waiting_tokens,
                    books.context_tokens,
                    books.is_ready,
                    books.routes,
                    books.hit_tokens,
                    books.prompt_tokens,
                )
                for node, books in self._nodes.items()
            }

    @property
    def decisions(self) -> list[Decision]:
        """The last ones, newest first, and at most 100."""
        with self._lock:
            return list(reversed(self._decisions))

    def add_node(self, node: Hashable) -> None:
        """Adds a node for requests; the index may know it already."""
        self._index.add_node(node)
        with self._lock:
            self._nodes.setdefault(node, _NodeCounts())

    def remove_node(self, node: Hashable) -> None:
        """Removes a node with its blocks, sessions and load."""
        self.set_ready(node, False)
        with self._lock:
            del self._nodes[node]
        self._index.remove_node(node)

    def set_ready(self, node: Hashable, is_ready: bool) -> None:
        """Sets whether requests may go to a node. If not, its blocks are forgotten, because it may come back empty."""
        with self._lock:
            books = self._nodes.get(node)
            if books is None:
                raise InvalidArgumentError(f"{show(node)} is no node of this router; add_node() first")
            books.is_ready = is_ready
            if not is_ready:
                self._sessions = _without(self._sessions, node)
                self._assumed = _without(self._assumed, node)
        if not is_ready:
            self._index.clear_node(node)

    # --- decisions ---------------------------------------------------------------------------------------------------

    def route(
        self,
        tokens: Any,
        *,
        session: Hashable = None,
        lora_name: str | None = None,
        extra_keys: Sequence[Any] | None = None,
        exclude: Collection[Hashable] = (),
    ) -> Route:
        """The node for a prompt. `exclude` are nodes that were already tried. Raises `NoNodeError` if none is left."""
        keys, hits = self._index.match_keys(tokens, lora_name=lora_name, extra_keys=extra_keys)
        num_tokens = len(tokens)
        with self._lock:
            now = self._clock()
            candidates = {name: books for name, books in self._nodes.items() if books.is_ready and name not in exclude}
            if not candidates:
                raise NoNodeError(
                    f"no node is ready: {len(self._nodes)} are known, {len(exclude)} were tried; is one of them alive?"
                )
            self._add_assumed(keys, hits, now)
            home = self._session_node(session, now)
            for books in candidates.values():
                books.fade(now, self._config.placed_seconds)
            costs = {
                name: self._cost(num_tokens, hits.get(name, _NO_HIT), books, is_home=name == home)
                for name, books in candidates.items()
            }
            node, reason = self._choose(candidates, costs, hits, keys, home, now)
            hit = hits.get(node, _NO_HIT)
            self._note(node, keys, hit, session, now)
            return self._opened(node, hit, reason, num_tokens, now)

    def _cost(self, num_tokens: int, hit: Hit, books: _NodeCounts, *, is_home: bool) -> float:
        """The cost of a request on a node: computing the rest of its prompt, loading from lower media, the queue, the other
        requests there, and the blocks that it evicts.
        """
        config = self._config
        return (
            self._left(num_tokens, hit)
            + config.cpu_cost * (hit.cpu - hit.gpu)
            + config.storage_cost * (hit.storage - hit.cpu)
            + books.waiting_tokens
            + config.decode_cost * books.requests
            + config.context_cost * books.context_tokens
            + config.placed_cost * books.placed_tokens
            - config.session_tokens * is_home
        )

    @staticmethod
    def _left(num_tokens: int, hit: Hit) -> int:
        """Tokens to compute. The last one of a prompt is always computed."""
        return max(num_tokens - hit.storage, min(1, num_tokens))

    def _choose(
        self,
        candidates: dict[Hashable, _NodeCounts],
        costs: dict[Hashable, float],
        hits: dict[Hashable, Hit],
        keys: list[int],
        home: Hashable,
        now: float,
    ) -> tuple[Hashable, str]:
        roomy = [name for name, books in candidates.items() if not self._is_full(books)] or list(candidates)

        def order(name: Hashable) -> tuple[float, int]:
            return costs[name], candidates[name].last_chosen  # of equals, the one that was chosen longest ago

        cheapest = min(candidates, key=order)
        best = min(roomy, key=order)
        if best != cheapest:
            return best, "spilled"
        if hits and (colder := self._replica(roomy, hits, keys, now)):
            return min(colder, key=order), "replicated"
        return best, "session" if best == home else "cheapest"

    def _is_full(self, books: _NodeCounts) -> bool:
        return books.requests >= self._config.max_node_requests or books.waiting_tokens >= self._config.max_node_tokens

    def _replica(self, roomy: list[Hashable], hits: dict[Hashable, Hit], keys: list[int], now: float) -> list[Hashable]:
        """Nodes of which one should get a hot prefix, too; empty if enough nodes have it.

        Requests are counted by their longest cached prefix, which differs between the turns of a conversation.
        """
        longest = max(hit.storage for hit in hits.values())
        key = keys[longest // self._index.block_size - 1]
        times = self._heat.get(key)
        if times is None:
            times = deque(maxlen=self._config.hot_requests * MAX_NODES)
        while times and times[0] <= now - self._config.hot_seconds:
            times.popleft()
        wanted = 1 + len(times) // self._config.hot_requests
        times.append(now)
        _remember(self._heat, key, times)
        holders = {name for name, hit in hits.items() if hit.storage == longest}
        return [name for name in roomy if name not in holders] if len(holders) < wanted else []

    # --- memory ------------------------------------------------------------------------------------------------------

    def _session_node(self, session: Hashable, now: float) -> Hashable:
        if session is None or (known := self._sessions.get(session)) is None:
            return None
        return known[0] if now - known[1] <= self._config.session_seconds else None

    def _add_assumed(self, keys: list[int], hits: dict[Hashable, Hit], now: float) -> None:
        """Counts a prompt as cached on the node to which it was just sent, because its events have not arrived yet."""
        size, since = self._index.block_size, now - self._config.assumed_seconds
        while self._assumed and next(iter(self._assumed.values()))[1] < since:
            self._assumed.popitem(last=False)
        if not self._assumed:
            return
        for at, key in enumerate(keys):
            if (known := self._assumed.get(key)) is None:
                continue
            hit = hits.get(known[0], _NO_HIT)
            if hit.storage == at * size:  # the block follows the last one that the node has
                hits[known[0]] = Hit(hit.gpu + size, hit.cpu + size, hit.storage + size)

    def _note(self, node: Hashable, keys: list[int], hit: Hit, session: Hashable, now: float) -> None:
        if session is not None:
            _remember(self._sessions, session, (node, now))
        for key in keys[hit.storage // self._index.block_size :]:
            _remember(self._assumed, key, (node, now))

    def _opened(self, node: Hashable, hit: Hit, reason: str, num_tokens: int, now: float) -> Route:
        books = self._nodes[node]
        left = self._left(num_tokens, hit)
        self._num_decided += 1
        books.last_chosen = self._num_decided
        books.requests += 1
        books.waiting_tokens += left
        books.context_tokens += num_tokens
        books.placed_tokens += left
        books.routes += 1
        books.hit_tokens += num_tokens - left
        books.prompt_tokens += num_tokens
        self._decisions.append(Decision(self._num_decided, now, node, reason, num_tokens, hit))
        self._reasons[reason] += 1
        self._num_hit_tokens += num_tokens - left
        self._num_prompt_tokens += num_tokens
        return Route(self, node, hit, reason, books, num_tokens, left)

    def stats(self) -> RouterStats:
        """What it decided so far."""
        with self._lock:
            reasons = self._reasons
            return RouterStats(
                self._num_decided,
                reasons["cheapest"],
                reasons["session"],
                reasons["replicated"],
                reasons["spilled"],
                self._num_hit_tokens,
                self._num_prompt_tokens,
            )


def _without(
    memory: OrderedDict[_K, tuple[Hashable, float]], node: Hashable
) -> OrderedDict[_K, tuple[Hashable, float]]:
    """The entries of other nodes."""
    return OrderedDict((key, value) for key, value in memory.items() if value[0] != node)


def _remember(memory: OrderedDict[Any, Any], key: Hashable, value: Any) -> None:
    """Adds an entry and drops the oldest ones."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _MOST_REMEMBERED:
        memory.popitem(last=False)
