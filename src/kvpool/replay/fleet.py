"""Replays a workload on a whole cluster: real managers, their events, the real index and router; only time is simulated.

Nodes form cells of up to 64, each with an index and a router. A hash sends conversations to cells, so some cells get more
than others. Up to `MOST_CELLS` are simulated, from the one with the least to the one with the most to do. Their hits are
compared with those of one infinite cache that sees everything.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from kvpool.checks import check_int, check_number
from kvpool.cluster.index import MAX_NODES, ClusterIndex
from kvpool.cluster.router import Route, Router, RoutingConfig
from kvpool.cluster.translator import WireTranslator, group_names
from kvpool.cluster.wire_events import BlockRemoved, BlockStored, WireEvent
from kvpool.config import KVCacheConfig, LayerSpec
from kvpool.config.layers import ceil_div
from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array
from kvpool.replay.trace import Trace, TraceRequest, to_blocks

ROUTINGS = ("prefix", "session", "round-robin")
_HASH_BYTES, _TOKEN_BYTES = 9, 5  # of a number on the wire, at most
MOST_CELLS = 8  # that are simulated
_LEADING = 3  # first ids, which tell conversations apart if the trace does not name them


@dataclass(frozen=True)
class FleetConfig:
    """A cluster: how many nodes with how many blocks each, how requests are routed, and how fast a node is."""

    nodes: int
    capacity: int
    routing: str = "prefix"
    cell: int = MAX_NODES
    policy: str = "lru"
    prefill_tokens_per_second: float = 10_000.0
    decode_tokens_per_second: float = 40.0
    event_seconds: float = 0.05  # until the router knows of a change in a node

    def __post_init__(self) -> None:
        check_int(self.nodes, "nodes", 1, 1 << 20, InvalidArgumentError)
        check_int(self.capacity, "capacity", 1, 1 << 31, InvalidArgumentError)
        check_int(self.cell, "cell", 1, MAX_NODES, InvalidArgumentError)
        for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "event_seconds"):
            value = check_number(getattr(self, name), name, "a number", InvalidArgumentError)
            if value < 0 or (value == 0 and name != "event_seconds"):
                raise InvalidArgumentError(f"{name}={value} must be above 0")
        if self.routing not in ROUTINGS:
            raise InvalidArgumentError(f"routing {self.routing!r} is unknown; use one of {', '.join(ROUTINGS)}")

    @property
    def num_cells(self) -> int:
        """Cells of the cluster."""
        return ceil_div(self.nodes, self.cell)

    def nodes_of(self, cell: int) -> int:
        """Nodes of a cell: all cells have as many, or one more."""
        return self.nodes // self.num_cells + (cell < self.nodes % self.num_cells)


@dataclass
class FleetResult:
    """What cells of a cluster reused, compared with one infinite cache for the cluster, and the work of their routers."""

    trace: str
    routing: str
    nodes: int
    cells: int
    capacity: int
    simulated_cells: int
    requests: int  # of these cells
    requested_blocks: int
    hit_blocks: int
    ideal_blocks: int  # hits of one infinite cache for the whole cluster
    share_of_ideal: float
    index_blocks: int  # of one cell, on average
    index_bytes: int
    event_bytes_per_second: float  # of one node, at most
    busiest_over_mean: float  # requests of the busiest simulated node over those of the mean
    busiest_cell_over_mean: float  # blocks that the busiest of all cells is asked for, over those of the mean
    mean_seconds_to_first_token: float  # if a node computes one prompt after the other
    p95_seconds_to_first_token: float
    decisions_per_second: float | None  # of CPU time; None where no router decides

    def row(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def simulate_fleet(trace: Trace, config: FleetConfig, progress: Callable[[int], None] | None = None) -> FleetResult:
    """Runs the requests of some cells. Those of other cells count only for the ideal.

    >>> from kvpool.replay.trace import TraceBuilder
    >>> trace = TraceBuilder("tiny", unit=16).add(0, [1, 2], 32, 0).add(9e3, [1, 2, 3], 48, 0).build()
    >>> simulate_fleet(trace, FleetConfig(nodes=4, capacity=8)).share_of_ideal
    1.0
    """
    if not trace.reuse_known:
        raise TraceError(f"{trace.name} has lengths only: what its prompts share is not known")
    return _Fleet(to_blocks(trace), to_blocks(trace, keep_ends=False), config).run(progress)


class _FleetNode:
    """One machine: its cache, and events that the router has not received yet."""

    def __init__(self, config: FleetConfig, clock: Callable[[], float]) -> None:
        cache = KVCacheConfig([LayerSpec(1, 1)], 1, gpu_blocks=config.capacity, watermark=0.0, partial_match=False)
        self.capacity = config.capacity
        self.manager = KVCacheManager(cache, policy=config.policy, clock=clock)
        self.subscription = self.manager.subscribe()
        self.translator = WireTranslator(group_names(cache))
        self.num_requests = self.num_stored = self.num_removed = 0
        self.free_at = 0.0  # when its queue is empty

    def serve(self, name: int, ids: Int32Array) -> tuple[int, list[WireEvent]]:
        """Serves one request with these whole blocks: how many of them were cached, and the events to publish."""
        self.num_requests += 1
        if not len(ids):
            return 0, []
        ids = ids[: self.capacity]  # of a prompt that is longer than the cache only the beginning
        handle = self.manager.allocate(name, ids)
        self.manager.commit(handle)
        self.manager.free(handle)
        events = self.translator.translate(self.subscription.poll().events)
        for event in events:
            self.num_stored += len(event.hashes) if isinstance(event, BlockStored) else 0
            self.num_removed += len(event.hashes) if isinstance(event, BlockRemoved) else 0
        return handle.num_cached_blocks, events


def _weights(unit: int) -> RoutingConfig:
    """The weights of the router if an id stands for so many tokens."""
    usual = RoutingConfig()
    return replace(
        usual,
        decode_cost=usual.decode_cost / unit,
        session_tokens=ceil_div(usual.session_tokens, unit),
        max_node_tokens=ceil_div(usual.max_node_tokens, unit),
    )


class _Cell:
    """Some nodes with their index and their router."""

    def __init__(self, trace: Trace, config: FleetConfig, cell: int) -> None:
        self.trace, self.config = trace, config
        self.now = 0.0
        self.index = ClusterIndex(1, seed=1)
        self.router = Router(self.index, _weights(trace.unit), clock=lambda: self.now)
        self.nodes = [_FleetNode(config, lambda: self.now) for _ in range(config.nodes_of(cell))]
        self.places: dict[Hashable, int] = {number: number for number in range(len(self.nodes))}
        for name in self.places:
            self.router.add_node(name)
        self.due: list[tuple[float, int, Callable[[], object]]] = []
        self.serials = count()
        self.decision_seconds = 0.0
        self.waits: list[float] = []

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        heappush(self.due, (self.now + seconds, next(self.serials), call))

    def goes_on(self, now: float) -> None:
        """Time passes: what is due happens."""
        self.now = max(self.now, now)
        while self.due and self.due[0][0] <= self.now:
            heappop(self.due)[2]()

    def serve(self, number: int, request: TraceRequest, whole: Int32Array) -> int:
        """Serves a request with these `whole` blocks; returns how many of them were cached."""
        config, route = self.config, None
        if config.routing == "prefix":
            started = time.thread_time()
            route = self.router.route(whole, session=request.session)
            self.decision_seconds += time.thread_time() - started
            at = self.places[route.node]
        elif config.routing == "session":
            at = _hash(request) // config.num_cells % len(self.nodes)
        else:
            at = number % len(self.nodes)
        hits, events = self.nodes[at].serve(number, whole)
        self.later(config.event_seconds, lambda: self.index.apply(at, events))
        self._time(self.nodes[at], route, len(request.ids) - hits, request.output_length)
        return hits

    def _time(self, node: _FleetNode, route: Route | None, num_computed: int, num_output: int) -> None:
        """When the prompt is computed, after those before it, and when the answer is over."""
        config = self.config
        node.free_at = max(self.now, node.free_at) + num_computed * self.trace.unit / config.prefill_tokens_per_second
        first = node.free_at - self.now
        self.waits.append(first)
        if route is not None:
            self.later(first, route.first_token)
            self.later(first + num_output / config.decode_tokens_per_second, route.end)


class _Fleet:
    """The simulated cells of a cluster, and all blocks that it was asked for.

    `whole` is the trace without blocks that a prompt does not fill, because no cache finds these again.
    """

    def __init__(self, trace: Trace, whole: Trace, config: FleetConfig) -> None:
        self.trace, self.whole, self.config = trace, whole, config
        self.loads = np.zeros(config.num_cells, np.int64)
        for request in trace:
            self.loads[_hash(request) % config.num_cells] += len(request.ids)
        places = np.linspace(0, config.num_cells - 1, min(MOST_CELLS, config.num_cells)).round().astype(int)
        chosen = np.argsort(self.loads, kind="stable")[places].tolist()
        self.cells = {cell: _Cell(trace, config, cell) for cell in chosen}
        self.seen: set[int] = set()

    def run(self, progress: Callable[[int], None] | None) -> FleetResult:
        """Serves all requests of the simulated cells, in the order of their arrival."""
        hit = ideal = requested = 0
        for number, request in enumerate(self.trace):
            whole = self.whole.ids_of(number)
            known = self._num_seen(whole)
            cell = self.cells.get(_hash(request) % self.config.num_cells)
            if cell is not None and len(request.ids):
                cell.goes_on(request.timestamp / 1000)
                requested += len(request.ids)
                ideal += known
                hit += cell.serve(number, request, whole)
            if progress is not None:
                progress(1)
        for cell in self.cells.values():
            cell.goes_on(float("inf"))
        return self._result(hit, ideal, requested)

    def _num_seen(self, ids: Int32Array) -> int:
        """How many of the first blocks were in an earlier prompt."""
        known = 0
        for block in ids.tolist():
            if block not in self.seen:
                break
            known += 1
        self.seen.update(ids.tolist())
        return known

    def _result(self, hit: int, ideal: int, requested: int) -> FleetResult:
        config, cells = self.config, list(self.cells.values())
        nodes = [node for cell in cells for node in cell.nodes]
        waits = np.array([wait for cell in cells for wait in cell.waits])
        sizes = [cell.index.stats() for cell in cells]
        stored = sum(node.num_stored for node in nodes) * (_HASH_BYTES + _TOKEN_BYTES * self.trace.unit)
        removed = sum(node.num_removed for node in nodes) * _HASH_BYTES
        deciding = sum(cell.decision_seconds for cell in cells)
        return FleetResult(
            self.trace.name,
            config.routing,
            config.nodes,
            config.num_cells,
            config.capacity,
            len(cells),
            len(waits),
            requested,
            hit,
            ideal,
            hit / ideal if ideal else 1.0,
            round(float(np.mean([size.num_blocks for size in sizes]))),
            round(float(np.mean([size.num_bytes for size in sizes]))),
            (stored + removed) / self.trace.duration / len(nodes) if self.trace.duration else 0.0,
            max(node.num_requests for node in nodes) * len(nodes) / max(len(waits), 1),
            float(self.loads.max() / max(self.loads.mean(), 1e-9)) if self.loads.any() else 1.0,
            float(waits.mean()) if len(waits) else 0.0,
            float(np.percentile(waits, 95)) if len(waits) else 0.0,
            len(waits) / deciding if deciding else None,
        )


def _hash(request: TraceRequest) -> int:
    """What sends a conversation to a cell, and to a node if it is routed by session."""
    name = request.session.encode() if request.session else request.ids[:_LEADING].tobytes()
    return zlib.crc32(name)
