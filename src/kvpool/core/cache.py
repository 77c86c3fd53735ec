"""The one object that the control plane works on, and the few questions that all operations ask it.

`Cache` owns what is known: pools, rows of live sequences, the tree of cached runs, the orders of eviction, counters. What
happens to it is functions over it: `prefix/` has those of cached content, `sequences/` those of live sequences.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, NamedTuple

from kvpool.checks import as_count
from kvpool.config import KVCacheConfig, Tier
from kvpool.config.layers import ceil_div
from kvpool.core.departed import Departed
from kvpool.core.handle import KVCacheHandle, Rows
from kvpool.core.kind import ByBlock, Group
from kvpool.core.node import Node, Root
from kvpool.core.orders import Calendar, EvictionOrders
from kvpool.core.rows import SequenceRows
from kvpool.core.sessions import FEW_SESSIONS, Session
from kvpool.errors import (
    InvalidArgumentError,
    NeverFitsError,
    OutOfBlocksError,
)
from kvpool.events import EventLog, PoolSize
from kvpool.eviction import EvictionPolicy
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import GPU, BlockPool, CopyOp
from kvpool.scope import ReuseScope
from kvpool.stats import Counters

LOCAL_TIERS = (GPU, Tier.HOST, Tier.DISK)


class AllocStatus(str, Enum):
    """Whether a request fits."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Admission(NamedTuple):
    """The answer of `can_allocate` and its relatives. True in a condition exactly when the status is OK."""

    status: AllocStatus
    reason: str
    blocks_needed: tuple[int, ...]  # per pool
    blocks_available: tuple[int, ...]  # per pool, free or evictable for this request
    num_cached_tokens: int = 0

    def __bool__(self) -> bool:
        return self.status is AllocStatus.OK


class Pin:
    """A pinned prefix; give it to `unpin`. It is void once its prefix was invalidated."""

    __slots__ = ("expires_at", "node", "num_tokens", "pin_id", "blocks")

    def __init__(self, pin_id: int, num_tokens: int, expires_at: float, node: Node) -> None:
        self.pin_id = pin_id
        self.num_tokens = num_tokens
        self.expires_at = expires_at
        self.node = node
        # (group, depth) of blocks kept one by one; below the GPU their run is
        self.blocks: list[tuple[ByBlock, int]] = []

    def __repr__(self) -> str:
        return f"Pin(pin_id={self.pin_id}, num_tokens={self.num_tokens})"


class Leftover(NamedTuple):
    """Blocks `first..last` (depths) of one group on the path to `node`, unread since `tick`."""

    tick: int
    node: Node
    first: int
    last: int


class HostCopies:
    """Blocks on the host that hold the same as a run on the GPU, copied ahead of its eviction.

    Evicting the run takes its host copy over and moves nothing. Dropping a host copy loses nothing, so host copies count
    as cached blocks of the host that anybody may have: swapped requests and smaller pools take them first, and a run that
    must be copied to the host takes them only where no other run gives way. Nobody finds a run by its host copy, and no
    event tells of one. The host copy of a full group is whole; that of another has some of its blocks.

    `waiting` collects the runs whose last reader leaves, for whoever makes host copies at the end of an operation; it is None
    where runs are copied on eviction only.
    """

    __slots__ = ("groups", "nodes", "num_blocks", "waiting")

    def __init__(self, groups: list[Group], num_pools: int) -> None:
        self.groups = groups
        self.nodes: dict[Node, None] = {}  # that have a host copy, oldest first
        self.num_blocks = [0] * num_pools
        self.waiting: list[Node] | None = None

    def keep(self, node: Node, ids: list[Int32Array]) -> None:
        """These host blocks (-1: none) are the host copy of a run from now on."""
        node.host_copy = ids
        self.nodes[node] = None
        self._count(ids, 1)

    def take(self, node: Node) -> list[Int32Array] | None:
        """Takes the host copy away from a run and gives its blocks to the caller. None if the run has no copy."""
        ids = node.host_copy
        if ids is not None:
            node.host_copy = None
            del self.nodes[node]
            self._count(ids, -1)
        return ids

    def drop(self, node: Node) -> None:
        """Frees the host copy of a run, if it has one."""
        ids = self.take(node)
        if ids is not None:
            self._give(ids)

    def trim(self, node: Node, num_blocks: int) -> None:
        """A run is cut to its first `num_blocks`, and its host copy with it."""
        ids = self.take(node)
        if ids is not None:
            self._give([of_group[num_blocks:] for of_group in ids])
            if num_blocks:
                self.keep(node, [of_group[:num_blocks] for of_group in ids])

    def drop_block(self, node: Node, group: Group, index: int) -> None:
        """A group lost a block of a run: its host copy has no use for it either."""
        assert node.host_copy is not None
        ids = node.host_copy[group.index]
        gone = ids[index : index + 1].copy()
        if gone[0] >= 0:
            ids[index] = -1
            pool = group.on(Tier.HOST)
            pool.give(gone)
            pool.num_cached -= 1
            self.num_blocks[pool.index] -= 1

    def divide(self, ids: list[Int32Array], upper: Node, lower: Node) -> None:
        """A run with this host copy was cut in two."""
        for part, begin, end in ((upper, 0, upper.num_blocks), (lower, upper.num_blocks, None)):
            part.host_copy = [of_group[begin:end] for of_group in ids]
            self.nodes[part] = None

    def give_way(self, pool: BlockPool, num_free: int, for_run: Node | None = None) -> None:
        """Frees host copies until so many blocks of a host pool are free, the youngest first: their runs stay longest.

        It ends at the host copy of a run that is more important than `for_run`.
        """
        while self.nodes and pool.num_free < num_free:
            youngest = next(reversed(self.nodes))
            if for_run is not None and youngest.outranks(for_run):
                return
            self.drop(youngest)

    def _count(self, ids: list[Int32Array], change: int) -> None:
        for group in self.groups:
            pool = group.on(Tier.HOST)
            num_blocks = change * int((ids[group.index] >= 0).sum())
            pool.num_cached += num_blocks
            self.num_blocks[pool.index] += num_blocks

    def _give(self, ids: list[Int32Array]) -> None:
        for group in self.groups:
            of_group = ids[group.index]
            group.on(Tier.HOST).give(of_group[of_group >= 0])


def make_pools(config: KVCacheConfig) -> list[list[BlockPool]]:
    """The pools of a model, each with one for each tier."""
    return [
        [BlockPool(spec.index, tier, spec.num_blocks.get(tier, 0)) for tier in LOCAL_TIERS] for spec in config.pools
    ]


class Cache:
    """Everything that is known. Whoever reads or changes it holds the manager's lock.

    Whoever begins an operation reads the clock into `now`, which stands still until its end. `tick` grows at the end of every
    operation that may have changed something (see `Guard`): what was found in the cache holds while it stays the same.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        pools: list[list[BlockPool]],
        groups: tuple[Group, ...],
        new_policy: Callable[[], EvictionPolicy],
        clock: Callable[[], float],
        events: EventLog,
        lock: threading.RLock,
    ) -> None:
        self.config = config
        self.max_seq_len = config.max_seq_len  # these are asked for in every operation
        self.default_ttl = config.default_ttl
        self.block_size = config.block_size
        self.caches_prefixes = config.enable_prefix_caching
        self.clock = clock
        self.now = clock()
        self.tick = 0
        self.counters = Counters()
        self.events = events
        self.failures: deque[tuple[str, Exception]] = deque(maxlen=64)  # of a user's code, for the log after the lock
        self.copies: list[CopyOp] = []
        # Blocks
        self.pools = pools
        self.gpu_pools = [tiers[GPU] for tiers in self.pools]
        self.num_tiers = len(LOCAL_TIERS)
        # Layer groups: those whose blocks are published, of them those read along paths and those read block by block
        self.groups = groups
        self.growing = [group for group in self.groups if group.grows]
        self.full = [group for group in self.growing if not group.by_block]
        self.by_block = [group for group in self.growing if isinstance(group, ByBlock)]
        self.fixed = [group for group in self.groups if not group.grows]
        self.sees_writes = [group for group in self.groups if group.sees_writes]
        self.is_simple = len(self.groups) == 1 and len(self.full) == 1
        # How many blocks one more column of the tables costs in each pool, and one position of a run
        self.per_position = [0] * len(self.pools)
        for group in self.growing:
            self.per_position[group.pool] += not group.has_holes
        self.blocks_per_position = [
            max(1, sum(group.pool == i for group in self.growing)) for i in range(len(self.pools))
        ]
        counts = [(index, sum(group.pool == index for group in self.full)) for index in range(len(self.pools))]
        self.full_per_pool = [(index, count) for index, count in counts if count]  # (pool, blocks of full groups)
        self.has_full = [bool(count) for _, count in counts]
        # The pool of each tier when there is one full group and nothing else: counting is then one addition.
        plain = self.full_per_pool == [(0, 1)] and not self.by_block and len(self.pools) == 1
        self.only_pools = self.pools[0] if plain else None
        # Live sequences
        columns = 128 if config.max_seq_len is None else min(1024, ceil_div(config.max_seq_len, config.block_size))
        self.rows: Rows = SequenceRows(self.groups, config.block_size, lock, num_columns=max(columns, 1))
        self.requests: dict[Hashable, KVCacheHandle] = {}
        self.producers: dict[tuple[Node, bytes], int] = {}  # (tip, next block) -> the row that computes it
        # The tree
        self.roots: dict[ReuseScope, Root] = {}
        self.last_root: Root | None = None  # most requests have the scope of the one before, which takes long to hash
        self.sessions: dict[str, set[Node]] = {}
        self.known_sessions: dict[tuple[str, str], Session] = {}  # by tenant and name
        self.sessions_limit = FEW_SESSIONS  # known ones, before those of which nothing is left are forgotten
        self.num_runs = 0  # nodes in the tree, roots and detached ones apart
        self.has_logits = False  # whether any ever were stored: until then nobody looks for them
        # What was found last for a prompt, and when: the next question is often about the same one
        self.last_prompt: Any = None
        self.last_match: Any = None
        self.last_tick = -1
        # Who goes, when, and where to
        first_lost = max(self._usable_tiers(), default=0) if config.offload_on_evict else 0
        self.orders = EvictionOrders(new_policy, self.num_tiers, self.failures, config.block_depth_cost, first_lost)
        self.calendar = Calendar()
        self.lower_tier: list[Tier | None] = []
        self.watermarks: list[int] = []  # blocks of each GPU pool that admission leaves free
        self.note_sizes()
        self.host_copies = HostCopies(self.growing, len(self.pools))
        if config.host_write != "back":
            self.host_copies.waiting = []
        remembered = config.remembered_blocks_limit
        self.departed = Departed(remembered, config.block_size) if remembered else None
        self.spared: Node | None = None  # what `evict` must hold before it could leave
        # Pins
        self.pins: dict[int, Pin] = {}  # by number, those that hold
        self.pin_ids = itertools.count(1)
        self.pinned_positions = 0  # on pinned paths
        self.pinned_blocks: list[dict[int, int]] = [{} for _ in self.pools]  # per pool: how many pins keep a block
        # Unread blocks of groups read block by block; those of which the end of a run needed some when looked at
        self.leftovers: list[deque[Leftover]] = [deque() for _ in self.groups]
        self.lasting: list[deque[Leftover]] = [deque() for _ in self.groups]

    def _usable_tiers(self) -> list[Tier]:
        """Those that have blocks in every pool."""
        return [tier for tier in LOCAL_TIERS if all(tiers[tier].num_blocks for tiers in self.pools)]

    def note_sizes(self) -> None:
        """What follows from the sizes of pools, now and after a resize: watermarks, and where evicted runs go.

        They go from each tier to the next one that has blocks in every pool.
        """
        self.watermarks = [self.config.watermark_blocks(pool.index, pool.num_blocks) for pool in self.gpu_pools]
        usable = self._usable_tiers()
        self.lower_tier = [next((below for below in usable if below > tier), None) for tier in LOCAL_TIERS]

    def blocks_per_pool(self, nodes: list[Node]) -> list[int]:
        """Blocks of these runs in each pool."""
        counts = [0] * len(self.pools)
        for node in nodes:
            for group in self.growing:
                counts[group.pool] += int((node.ids[group.index] >= 0).sum()) if group.by_block else node.num_blocks
        return counts

    def num_present(self, node: Node, first: int) -> int:
        """Blocks of all groups in a run from position `first` on."""
        count = (node.num_blocks - first) * len(self.full)
        for group in self.by_block:
            count += int((node.ids[group.index][first:] >= 0).sum())
        return count

    def pool(self, index: Any, tier: Any) -> BlockPool:
        """The pool of a user's choice."""
        if not isinstance(tier, Tier) or tier == Tier.REMOTE:
            raise InvalidArgumentError(f"pools exist on GPU, HOST and DISK, not on {tier!r}")
        return self.pools[as_count(index, "pool", maximum=len(self.pools) - 1)][tier]

    def pool_sizes(self) -> tuple[PoolSize, ...]:
        """How many blocks each layer group has on each tier, for subscribers."""
        return tuple(
            PoolSize(group.index, tier, self.pools[group.pool][tier].num_blocks)
            for group in self.groups
            for tier in LOCAL_TIERS
        )

    def supply(self, tenant: str | None) -> list[int]:
        """Blocks per GPU pool that are free or that a request of `tenant` may have evicted."""
        return [self.orders.available(pool, tenant) for pool in self.gpu_pools]

    def refuse_shortage(self, needs: list[int], supply: list[int], what: str) -> None:
        """Raises for the first GPU pool that cannot serve what an operation needs."""
        for pool, need, have in zip(self.gpu_pools, needs, supply, strict=True):
            if need > have:
                raise self.shortage(pool, need, have, what)

    def shortage(self, pool: BlockPool, need: int, available: int, what: str) -> OutOfBlocksError:
        """The error for a pool that cannot serve `need` blocks."""
        if need > pool.num_blocks:
            return NeverFitsError(
                f"{what} needs {need} blocks of pool {pool.index} on {pool.tier.name}, which has {pool.num_blocks} in all "
                f"({pool.num_blocks * self.block_size} tokens); use a larger pool or a shorter sequence"
            )
        return OutOfBlocksError(
            f"{what} needs {need} blocks of pool {pool.index} on {pool.tier.name}; {available} of {pool.num_blocks} are free "
            f"or evictable ({pool.num_referenced} are in use, {pool.num_pinned} pinned); free or swap out requests first"
        )
