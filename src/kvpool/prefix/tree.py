"""The prefix tree: token runs, who reads them, and which of them may be evicted.

A node is a run of full blocks, or the unfilled last block of a sequence that ended (a remainder). Matching compares whole
runs of tokens, so a hit is exact and costs one vector operation per node. Sequences hold a path by its deepest node; `hold`
and `release` walk up only while a node changes between idle and active. The tree offers idle leaves to the eviction policy
and takes them back when they are used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvpool.config import LayerGroup, Tier
from kvpool.events import EventLog
from kvpool.eviction import EvictionPolicy
from kvpool.pools.arrays import Int32Array
from kvpool.pools.groups import is_cross, is_windowed
from kvpool.pools.pool import GPU, BlockPool
from kvpool.pools.rows import SequenceRows
from kvpool.prefix.calendar import NEVER, Calendar
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.prefix.node import Node, Root
from kvpool.prefix.quota import Quota
from kvpool.scope import ReuseScope
from kvpool.stats import Counters

SHORT_RUN = 8192  # tokens up to which comparing copies of the bytes beats an array of differences


INHERITED = (  # what both parts of a split run have in common
    *("tier", "detached", "last_access", "last_access_at", "hits", "priority", "priority_until"),
    *("ttl", "expires_at", "published_by"),
)


class Match(NamedTuple):
    """What a prompt shares with the tree. `num_blocks` full blocks along `path`, then `num_partial` tokens of `partial`."""

    root: Root | None
    path: list[Node]
    num_blocks: int
    partial: Node | None = None  # the node that holds the block whose first `num_partial` tokens match
    num_partial: int = 0
    next_key: bytes | None = None  # the tokens of the first block that is not cached, if the path ends where it begins
    num_recomputed: int = 0  # 1 if all is cached and the last token is computed again, only for its logits

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return self.num_blocks * block_size + self.num_partial - self.num_recomputed


class PrefixTree(ABC):
    """Structure and readers of the tree; what leaves it and when is decided in `PrefixCache`."""

    def __init__(
        self,
        block_size: int,
        groups: tuple[LayerGroup, ...],
        pools: list[list[BlockPool]],
        rows: SequenceRows[Node, Any],
        new_policy: Callable[[], EvictionPolicy],
        counters: Counters,
        clock: Callable[[], float],
        events: EventLog,
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        self.pools = pools
        self.rows = rows
        self.counters = counters
        self.events = events
        self.clock = clock
        self.now = clock()
        self.tick = 0
        self.num_runs = 0  # nodes in the tree, roots and detached ones apart
        self.roots: dict[ReuseScope, Root] = {}
        self.quotas: dict[str, Quota] = {}
        self.new_policy = new_policy
        self.num_tiers = max(len(tiers) for tiers in pools)
        self.policies = [new_policy() for _ in range(self.num_tiers)]
        self.sessions: dict[str, set[Node]] = {}
        self.calendar = Calendar()
        # Told which run (`created`) a partial block comes from; answers which one to take.
        self.choose_source: Callable[[int], int] | None = None
        # Groups whose blocks are published, those of them with a window, and blocks of full groups per pool and position.
        self.num_cached_groups = sum(not is_cross(group) for group in groups)
        self.windowed = [g.index for g in groups if is_windowed(g)]
        self.full = [g.index for g in groups if not is_windowed(g) and not is_cross(g)]
        self.full_per_pool = [
            (index, sum(groups[g].pool == index for g in self.full))
            for index in range(len(pools))
            if any(groups[g].pool == index for g in self.full)
        ]

        # The pool of each tier when there is one full group and nothing else: counting is then one addition.
        self.only_pools = pools[0] if self.full_per_pool == [(0, 1)] and not self.windowed and len(pools) == 1 else None

    # --- nodes -------------------------------------------------------------------------------------------------------

    def root_for(self, scope: ReuseScope) -> Root:
        root = self.roots.get(scope)
        if root is None:
            quota = self.quotas.get(scope.tenant)
            policies = self.policies if quota is None else quota.policies
            root = self.roots[scope] = Root(scope, policies, quota)
        return root

    def pool(self, group: int, tier: Tier) -> BlockPool:
        return self.pools[self.groups[group].pool][tier]

    def nodes(self) -> Iterator[Node]:
        """Every node that owns blocks: those in the tree, and detached ones that live sequences still hold."""
        seen: set[int] = set()
        for root in list(self.roots.values()):
            for node in root.subtree():
                if node is not root:
                    seen.add(id(node))
                    yield node
        for tip in self.rows.tips:
            held = tip
            while held is not None and held.detached and id(held) not in seen and not isinstance(held, Root):
                seen.add(id(held))
                yield held
                held = held.parent

    def sync(self, node: Node) -> None:
        """Brings an open node up to date with the row that still writes it."""
        row = node.open_row
        if row >= 0:
            rows = self.rows
            end = int(rows.committed[row]) // self.block_size
            node.num_blocks = end - node.start
            node.tokens = rows.ids_between(row, node.start * self.block_size, end * self.block_size)
            node.ids = [rows.tables[g][row, node.start : end] for g in range(self.num_cached_groups)]

    def digests(self, node: Node) -> list[bytes]:
        """The chained digests of a node's blocks, computed once and only when somebody asks."""
        self.sync(node)
        missing: list[Node] = []
        at = node
        while at is not at.root and len(at.digests or ()) < at.num_blocks:
            missing.append(at)
            at = at.parent
        for part in reversed(missing):
            known = part.digests if part.digests is not None else []
            if known:
                parent = known[-1]
            elif part.parent is part.root:
                parent = root_digest(part.root.scope)
            else:
                parent = self.digests_end(part.parent)
            known.extend(chain_digests(parent, part.tokens[len(known) * self.block_size :], self.block_size))
            part.digests = known
        return node.digests or []

    @staticmethod
    def digests_end(node: Node) -> bytes:
        """The digest of a node's last block, already computed."""
        assert node.digests
        return node.digests[node.num_blocks - 1]

    # --- matching ----------------------------------------------------------------------------------------------------

    def match(self, scope: ReuseScope, tokens: Int32Array, partial: bool, only_tier: Tier | None = None) -> Match:
        """The longest run of blocks, and then of tokens inside one block, that `tokens` shares with the tree."""
        root = self.roots.get(scope)
        path: list[Node] = []
        if root is None:
            return Match(None, path, 0, None, 0, tokens[: self.block_size].tobytes())
        size = self.block_size
        position, total = 0, len(tokens)
        node: Node = root
        key = tokens[:size].tobytes()
        while node.children is not None and total - position >= size:
            child = node.children.get(key)
            if child is None or (only_tier is not None and child.tier != only_tier):
                break
            if child.open_row >= 0:
                self.sync(child)
            equal = self.common_tokens(child, tokens[position:])
            blocks = equal // size
            path.append(child)
            position += blocks * size
            if blocks < child.num_blocks:
                extra = equal - blocks * size if partial else 0
                return Match(root, path, position // size, self._source(child) if extra else None, extra)
            node = child
            key = tokens[position : position + size].tobytes()
        next_key = key if len(key) == 4 * size else None
        if partial and node.children is not None and position < total:
            near, shared = node.children.nearest(key)
            if near is not None:
                if near.open_row >= 0:
                    self.sync(near)
                return Match(root, path, position // size, self._source(near), shared // 4, next_key)
        return Match(root, path, position // size, None, 0, next_key)

    def _source(self, node: Node) -> Node:
        """The node that a partial block is taken from: its siblings may share equally many tokens with the prompt."""
        if self.choose_source is None:
            return node
        chosen = self.choose_source(node.created)
        if chosen == node.created:
            return node
        assert node.parent.children is not None
        other = next((sibling for sibling in node.parent.children.values() if sibling.created == chosen), node)
        self.sync(other)
        return other

    def common_tokens(self, node: Node, tokens: Int32Array) -> int:
        """How many leading tokens a node and a prompt share; the first block is known to be equal."""
        length = min(node.num_blocks * self.block_size, len(tokens))
        if length <= self.block_size:
            return length
        if length <= SHORT_RUN and node.tokens[:length].tobytes() == tokens[:length].tobytes():
            return length
        differs = node.tokens[:length] != tokens[:length]
        first = int(differs.argmax())
        return first if differs[first] else length

    def path_ids(self, path: list[Node], num_blocks: int, group: int) -> Int32Array:
        """The block ids of a group along a path of synced nodes, cut to `num_blocks`."""
        if len(path) == 1:
            return path[0].ids[group][:num_blocks]
        if not path:
            return _NO_IDS
        return np.concatenate([node.ids[group] for node in path])[:num_blocks]

    # --- readers -----------------------------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """One more sequence (or one more active child) reads this node."""
        while True:
            node.active += 1
            if node.active > 1 or node is node.root:
                return
            if node.pins:
                self._count_pinned(node, -1)
            elif not node.same_tier_children:
                node.root.policies[node.tier].remove(node)
            self._count_idle(node, -1)
            node = node.parent

    def release(self, node: Node, used: bool = True) -> None:
        """A sequence lets go of its deepest node; nodes that nobody reads any more become cached, or free if detached.

        Unless it only held them (`used` is False), this was their last use.
        """
        tick, now = self.tick, self.now
        while True:
            node.active -= 1
            if node.active:
                return
            if node is node.root:
                if node.children is None:
                    self._forget_root(node.root)
                return
            parent = node.parent
            if used:
                node.last_access = tick
                node.last_access_at = now
            if node.detached:
                self._free_detached(node)
            else:
                self._count_idle(node, 1)
                if node.ttl is not None:
                    node.expires_at = now + node.ttl
                    self.watch(node)
                if node.pins:
                    self._count_pinned(node, 1)
                elif not node.same_tier_children:
                    node.root.policies[node.tier].add(node)
            node = parent

    def _forget_root(self, root: Root) -> None:
        if root.children is None and not root.active and self.roots.get(root.scope) is root:
            del self.roots[root.scope]

    def _free_detached(self, node: Node) -> None:
        """Frees the blocks of a detached node that lost its last reader."""
        for group in self.full:
            self.pool(group, node.tier).give(node.ids[group])
        for group in self.windowed:
            ids = node.ids[group]
            self.free_windowed(node, group, ids[ids >= 0])
        node.num_blocks = 0

    def free_windowed(self, node: Node, group: int, ids: Int32Array) -> None:
        """Frees published, unread blocks of a windowed group; pinned ones only below the GPU, where their run is pinned."""
        pool = self.pool(group, node.tier)
        pool.give(ids)
        self.add_cached(node.root, pool, -len(ids))
        if node.pins and node.tier != GPU:
            self.add_pinned(node.root, pool, -len(ids))

    # --- counting ----------------------------------------------------------------------------------------------------

    def add_cached(self, root: Root, pool: BlockPool, change: int) -> None:
        """The one place where the number of cached blocks changes."""
        pool.num_cached += change
        if root.quota is not None and pool.tier == GPU:
            root.quota.cached[pool.index] += change

    def count_cached(self, node: Node, change: int) -> None:
        """`change` positions of full groups became cached (or, if negative, stopped being so)."""
        if self.only_pools is not None and node.root.quota is None:
            self.only_pools[node.tier].num_cached += change
            return
        for index, per_position in self.full_per_pool:
            self.add_cached(node.root, self.pools[index][node.tier], change * per_position)

    def add_pinned(self, root: Root, pool: BlockPool, change: int) -> None:
        """The one place where the number of pinned cached blocks changes."""
        pool.num_pinned += change
        if root.quota is not None and pool.tier == GPU:
            root.quota.pinned[pool.index] += change

    def _count_idle(self, node: Node, change: int) -> None:
        """A run became idle (`change` 1) or stopped being so (-1): its blocks that count with it are cached, or not."""
        if self.only_pools is not None and node.root.quota is None:
            self.only_pools[node.tier].num_cached += change * node.num_blocks
            return
        self.count_cached(node, change * node.num_blocks)
        if self.windowed and node.tier != GPU:
            for pool, num_blocks in self._windowed_below(node):
                self.add_cached(node.root, pool, change * num_blocks)

    def _count_pinned(self, node: Node, change: int) -> None:
        """An idle run became pinned (`change` 1) or stopped being so (-1)."""
        for index, per_position in self.full_per_pool:
            self.add_pinned(node.root, self.pools[index][node.tier], change * node.num_blocks * per_position)
        if self.windowed and node.tier != GPU:
            for pool, num_blocks in self._windowed_below(node):
                self.add_pinned(node.root, pool, change * num_blocks)

    def _windowed_below(self, node: Node) -> Iterator[tuple[BlockPool, int]]:
        """(pool, blocks) of each windowed group of a run below the GPU.

        There they count with their run: nobody reads one of them alone, and they leave together. On the GPU each counts by
        itself, with the sequences whose window covers it.
        """
        for group in self.windowed:
            yield self.pool(group, node.tier), int((node.ids[group] >= 0).sum())

    # --- shape -------------------------------------------------------------------------------------------------------

    def is_candidate(self, node: Node) -> bool:
        """Whether the eviction policy has this node: an unread, unpinned leaf of its tier."""
        return not (node.active or node.pins or node.same_tier_children or node is node.root or node.detached)

    def new_child(self, parent: Node, key: bytes, published_by: int, ttl: float | None, session: str | None) -> Node:
        """An empty node below `parent` for what the sequence numbered `published_by` publishes, not yet counted anywhere."""
        self.counters.nodes_created += 1
        node = Node(parent, key, parent.start + parent.num_blocks, self.counters.nodes_created, self.now)
        node.last_access = self.tick
        node.ttl = ttl
        node.published_by = published_by
        if session is not None:
            self.tag_session(node, session)
        return node

    def tag_session(self, node: Node, session: str) -> None:
        node.session = session
        self.sessions.setdefault(session, set()).add(node)

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cuts a run in two and returns the upper part, a new node; readers and the open row stay with the lower part.

        The caller made sure that `0 < num_blocks < node.num_blocks` and that an open node is synced.
        """
        size = self.block_size
        candidate = self.is_candidate(node)
        policy = node.root.policies[node.tier]
        if candidate:
            policy.remove(node)
        upper = Node(node.parent, node.key, node.start, node.created, node.created_at)
        upper.num_blocks = num_blocks
        upper.tokens = node.tokens[: num_blocks * size]
        if node.open_row >= 0:
            upper.ids = [ids[:num_blocks].copy() for ids in node.ids]
        else:
            upper.ids = [ids[:num_blocks] for ids in node.ids]
        for name in INHERITED:
            setattr(upper, name, getattr(node, name))
        upper.active = int(node.active > 0)
        upper.pins = int(node.pins > 0)
        if node.session is not None:
            self.tag_session(upper, node.session)
        self._split_payload(node, upper, num_blocks)
        if not node.detached:
            node.parent.add_child(node.key, upper)  # takes the place of `node`
            node.parent.same_tier_children -= int(node.tier == node.parent.tier)
        node.parent = upper
        node.start += num_blocks
        node.num_blocks -= num_blocks
        node.tokens = node.tokens[num_blocks * size :]
        node.ids = [ids[num_blocks:] for ids in node.ids]
        node.key = node.tokens[:size].tobytes()
        node.fingerprint = hash((node.root.fingerprint, node.start, node.key))
        if not node.detached:
            upper.add_child(node.key, node)
            self.num_runs += 1
        self.watch(upper)
        if candidate:
            policy.add(node)
        return upper

    def _split_payload(self, node: Node, upper: Node, num_blocks: int) -> None:
        """Divides digests and stored logits between the two parts."""
        if node.digests is not None:
            upper.digests, node.digests = node.digests[:num_blocks], node.digests[num_blocks:]
        if node.logits is not None:
            end = node.start + num_blocks
            stored, size = node.logits, self.block_size
            upper.logits = {key: value for key, value in stored.items() if key[0] // size <= end}
            node.logits = {key: value for key, value in stored.items() if key[0] // size > end}

    def give_back_private(self, group: int, ids: Int32Array, shared: bool) -> None:
        """Private GPU blocks of a full group lose an owner; `shared` says whether forks may hold them too."""
        pool = self.pool(group, GPU)
        if shared:
            pool.unshare(ids)
        else:
            pool.give(ids)

    def watch(self, node: Node) -> None:
        """Notes when a node's time to live or priority ends, if it does."""
        for when in (node.expires_at, node.priority_until):
            if when != NEVER:
                self.calendar.schedule(node, when, partial(self.time_is_up, node))

    @abstractmethod
    def time_is_up(self, node: Node) -> int:
        """A deadline of a node has passed; returns the positions that left the tree."""

    def path_to(self, node: Node) -> list[Node]:
        """The nodes from just below the root down to `node`."""
        path: list[Node] = []
        while node is not node.root:
            path.append(node)
            node = node.parent
        path.reverse()
        return path


_NO_IDS: Int32Array = np.empty(0, np.int32)
