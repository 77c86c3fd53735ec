"""`check()`: recomputes everything from scratch, slowly, and names whatever does not agree."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvpool.config import Tier
from kvpool.config.layers import ceil_div
from kvpool.errors import InvariantError
from kvpool.manager.pins import Pins
from kvpool.pools.groups import Group
from kvpool.pools.pool import BlockPool
from kvpool.prefix.node import Node, path_ids
from kvpool.sequences.state import CacheState


class Checker:
    """One pass over the whole state. Owners of every block are collected here and compared with the pools' books."""

    def __init__(self, state: CacheState, pins: Pins) -> None:
        self.state = state
        self.cache = state.cache
        self.context = state.context
        self.tree = state.cache.tree
        self.readers = state.cache.readers
        self.windows = state.cache.windows
        self.rows = state.rows
        self.in_flight = state.in_flight
        self.pins = pins
        self.nodes = list(self.tree.nodes())
        for node in self.nodes:
            self.context.sync(node)
        # per (pool, tier): who holds a block privately, which blocks nodes own, how many of those nobody reads
        self.private: Counter[tuple[int, int, int]] = Counter()
        self.uncounted: set[tuple[int, int]] = set()  # private GPU blocks of full groups: a single owner is not counted
        self.published: dict[tuple[int, int, int], Node] = {}
        self.idle: Counter[tuple[int, int]] = Counter()
        self.pinned: Counter[tuple[int, int]] = Counter()
        self.host_copies: set[tuple[int, int]] = set()  # (pool, host block)
        self.window_readers: Counter[tuple[int, int, int]] = Counter()

    def run(self) -> None:
        self.check_rows()
        self.check_encoded()
        self.check_nodes()
        self.check_readers()
        self.check_windows()
        self.check_host_copies()
        for tiers in self.state.pools:
            for pool in tiers:
                self.check_pool(pool)
        self.check_policies()
        self.check_bookkeeping()

    def fail(self, message: str) -> None:
        raise InvariantError(message)

    def expect(self, condition: bool, message: str) -> None:
        if not condition:
            self.fail(message)

    # --- sequences ---------------------------------------------------------------------------------------------------

    def check_rows(self) -> None:
        rows = self.rows
        live = rows.live_rows()
        self.expect(len(live) == len(self.state.requests), f"{len(live)} rows for {len(self.state.requests)} requests")
        for row in live:
            handle = rows.handles[row]
            assert handle is not None
            name = f"request {handle.request_id!r}"
            self.expect(handle.row == row, f"{name}: its handle says row {handle.row}, it lies in {row}")
            self.expect(self.state.requests.get(handle.request_id) is handle, f"{name}: not in the request index")
            reserved, written, committed = (int(a[row]) for a in (rows.reserved, rows.written, rows.committed))
            self.expect(
                reserved >= written >= committed >= 0,
                f"{name}: reserved {reserved}, written {written}, committed {committed}",
            )
            self.expect(
                int(rows.num_blocks[row]) * self.context.block_size >= reserved,
                f"{name}: too few blocks for {reserved}",
            )
            if handle.swapped is not None:
                self.check_swapped(row, name)
            else:
                self.check_tables(row, name)

    def check_swapped(self, row: int, name: str) -> None:
        handle = self.rows.handles[row]
        assert handle is not None and handle.swapped is not None
        for group, table in enumerate(self.rows.tables):
            self.expect(bool((table[row] == -1).all()), f"{name}: is swapped out but has GPU blocks in group {group}")
        for group, ids in enumerate(handle.swapped.ids):
            self.expect(bool((ids >= -1).all()), f"{name}: {ids.min(initial=-1)} is no host block, and not -1 for none")
            for block in ids[ids >= 0].tolist():
                self.private[self.state.groups[group].pool, Tier.HOST, block] += 1

    def check_tables(self, row: int, name: str) -> None:
        rows = self.rows
        tip = rows.tips[row]
        assert tip is not None
        self.expect(tip.open_row == row or not rows.grows_alone[row], f"{name}: grows alone without an open node")
        used, cross = int(rows.num_blocks[row]), int(rows.num_cross_blocks[row])
        self.expect(tip.end <= used, f"{name}: {tip.end} published blocks, {used} in its table")
        path = tip.path()
        for group in self.state.groups:
            table = rows.tables[group.index]
            first, end = group.follows((tip.end, used), (0, cross))
            self.expect(
                bool((table[row, end:] == -1).all()), f"{name}: block ids behind its end in group {group.index}"
            )
            ids = table[row, :end]
            if group.slides:
                self.check_windowed_table(row, group, path, name)
                continue
            self.expect(bool((ids >= 0).all()), f"{name}: a hole in group {group.index}: {ids.tolist()}")
            if first:
                cached = path_ids(path, first, group.index)
                self.expect(
                    bool((ids[:first] == cached).all()), f"{name}: table differs from the tree in group {group.index}"
                )
            for block in ids[first:].tolist():
                self.private[group.pool, Tier.GPU, block] += 1
                if not group.single_owner:
                    self.uncounted.add((group.pool, block))
        final = min(int(rows.committed[row]), tip.end * self.context.block_size, int(rows.known[row]))
        if path:
            held = np.concatenate([node.tokens for node in path])[:final]
            self.expect(bool((held == rows.token_ids(row)[:final]).all()), f"{name}: its tokens differ from its path")

    def check_windowed_table(self, row: int, group: Group, path: list[Node], name: str) -> None:
        rows = self.rows
        start, used = int(rows.window_start[group.index, row]), int(rows.num_blocks[row])
        sinks = group.sinks
        published = path[-1].end if path else 0
        cached = path_ids(path, published, group.index)
        for column in (*range(min(sinks, used)), *range(max(start, sinks), used)):
            block = int(rows.tables[group.index][row, column])
            if block < 0 and group.keeps_state:
                continue
            self.expect(
                block >= 0, f"{name}: block {column} of windowed group {group.index} is missing inside its window"
            )
            if column < published:
                same = block == int(cached[column])
                self.expect(same, f"{name}: block {column} of group {group.index} differs from the tree")
                self.window_readers[group.pool, Tier.GPU, block] += 1
            else:
                self.private[group.pool, Tier.GPU, block] += 1

    # --- tree --------------------------------------------------------------------------------------------------------

    def check_nodes(self) -> None:
        size = self.context.block_size
        for node in self.nodes:
            name = f"node at block {node.start}"
            self.expect(node.num_blocks > 0, f"{name}: is empty")
            if node.is_remainder:
                self.check_remainder(node, name)
            else:
                self.expect(len(node.tokens) == node.num_blocks * size, f"{name}: {len(node.tokens)} tokens")
            self.expect(node.start == node.parent.end, f"{name}: its parent ends at {node.parent.end}")
            self.expect(
                node.tier >= node.parent.tier, f"{name}: lies on {node.tier.name} below {node.parent.tier.name}"
            )
            if not node.detached:
                self.expect(node.key == node.tokens[:size].tobytes(), f"{name}: key is not its first block")
                siblings = node.parent.children
                self.expect(
                    siblings is not None and siblings.get(node.key) is node, f"{name}: not among its parent's children"
                )
            same = sum(child.tier == node.tier for child in (node.children or {}).values())
            self.expect(
                same == node.same_tier_children, f"{name}: counts {node.same_tier_children} children of its tier"
            )
            remainders = sum(child.is_remainder for child in (node.children or {}).values())
            self.expect(remainders == node.num_remainders, f"{name}: counts {node.num_remainders} remainders")
            self.collect_blocks(node, name)

    def check_remainder(self, node: Node, name: str) -> None:
        size = self.context.block_size
        self.expect(node.num_blocks == 1, f"{name}: is a remainder of {node.num_blocks} blocks")
        self.expect(0 < len(node.tokens) < size, f"{name}: is a remainder of {len(node.tokens)} tokens")
        self.expect(
            node.children is None and not node.active and not node.pins, f"{name}: somebody builds on a remainder"
        )
        self.expect(node.parent.open_row < 0, f"{name}: its parent still grows over this remainder")
        self.expect(node.digests is None, f"{name}: an unfilled block has a digest")

    def collect_blocks(self, node: Node, name: str) -> None:
        for group in self.state.growing:
            pool, ids = group.pool, node.ids[group.index]
            self.expect(
                len(ids) == node.num_blocks,
                f"{name}: {len(ids)} ids in group {group.index} for {node.num_blocks} blocks",
            )
            least = -1 if group.slides else 0
            self.expect(bool((ids >= least).all()), f"{name}: a hole in group {group.index}: {ids.tolist()}")
            for block in ids[ids >= 0].tolist():
                key = (pool, int(node.tier), block)
                self.expect(key not in self.published, f"block {block} of pool {pool} belongs to two nodes")
                self.published[key] = node
                if not group.slides and not node.active:
                    self.idle[pool, node.tier] += 1
                    self.pinned[pool, node.tier] += int(node.pins > 0)

    def check_readers(self) -> None:
        """Recounts `active` and `pins` of every node."""
        active: Counter[Node] = Counter()
        pins: Counter[Node] = Counter()
        for row in self.rows.live_rows():
            tip = self.rows.tips[row]
            assert tip is not None
            active[tip] += 1
        for pin in self.pins.active.values():
            if not pin.node.detached:
                pins[pin.node] += 1
        for node in sorted(self.nodes, key=lambda n: -n.start):
            self.expect(
                node.active == active[node], f"node at block {node.start}: active {node.active}, counted {active[node]}"
            )
            self.expect(node.pins == pins[node], f"node at block {node.start}: pins {node.pins}, counted {pins[node]}")
            if node.detached:
                self.expect(node.active > 0, f"node at block {node.start} is detached and unread but not freed")
            active[node.parent] += int(node.active > 0)
            if node.parent is not node.root:
                pins[node.parent] += int(node.pins > 0)
        for root in self.tree.roots.values():
            self.expect(root.active == active[root], f"root {root.scope}: active {root.active}, counted {active[root]}")
            self.expect(bool(root.children or root.active), f"root {root.scope} is empty and unused but still there")

    def check_windows(self) -> None:
        for group in self.context.windowed:
            pool = group.gpu
            for (index, tier, block), node in self.published.items():
                if index == pool.index and tier == Tier.GPU and self._group_of(node, block, index) is group:
                    readers = self.window_readers[index, tier, block]
                    refs = int(pool.refs[block])
                    self.expect(
                        refs == readers,
                        f"block {block} of group {group.index} has {refs} references, {readers} readers",
                    )
                    if not refs:
                        self.idle[index, tier] += 1
                        self.pinned[index, tier] += int(block in self.windows.pinned[index])
            for tier in (Tier.HOST, Tier.DISK):
                for (index, at, block), node in self.published.items():
                    idle = index == pool.index and at == tier and not node.active
                    if idle and self._group_of(node, block, index) is group:
                        self.idle[index, at] += 1
                        self.pinned[index, at] += int(node.pins > 0)

    def check_host_copies(self) -> None:
        """A host copy holds all that its run has on the GPU of full groups, and nothing else of windowed ones."""
        with_host_copy = {node for node in self.nodes if node.host_copy is not None}
        self.expect(
            with_host_copy == set(self.context.host_copies.nodes),
            "host copies are kept of other runs than those that have one",
        )
        counted = [0] * len(self.state.pools)
        for node in with_host_copy:
            name = f"host copy of the node at block {node.start}"
            assert node.host_copy is not None
            kept = node.tier == Tier.GPU and not node.detached and node.open_row < 0
            self.expect(kept, f"{name}: its run is on {node.tier.name}, detached or still written")
            for group in self.state.growing:
                ids, there = node.ids[group.index], node.host_copy[group.index]
                self.expect(
                    len(ids) == len(there), f"{name}: {len(there)} ids in group {group.index} for {len(ids)} blocks"
                )
                agree = (ids >= 0) >= (there >= 0) if group.slides else (ids >= 0) == (there >= 0)
                self.expect(bool(agree.all()), f"{name}: group {group.index} has {there.tolist()} for {ids.tolist()}")
                for block in there[there >= 0].tolist():
                    self.expect(
                        (group.pool, block) not in self.host_copies, f"{name}: host block {block} is another's too"
                    )
                    self.host_copies.add((group.pool, block))
                    counted[group.pool] += 1
                    self.idle[group.pool, int(Tier.HOST)] += 1
        booked = self.context.host_copies.num_blocks
        self.expect(counted == booked, f"{booked} blocks of host copies booked, {counted} counted")

    def _group_of(self, node: Node, block: int, pool: int) -> Group:
        return next(g for g in self.state.growing if g.pool == pool and (node.ids[g.index] == block).any())

    # --- pools -------------------------------------------------------------------------------------------------------

    def check_pool(self, pool: BlockPool) -> None:
        name = f"pool {pool.index} on {pool.tier.name}"
        free = pool.free_ids().tolist()
        self.expect(len(set(free)) == len(free), f"{name}: an id is free twice")
        self.expect(
            pool.num_referenced >= 0,
            f"{name}: free {pool.num_free} + cached {pool.num_cached} exceeds {pool.num_blocks}",
        )
        owned = {b for (p, t, b) in self.private if p == pool.index and t == pool.tier}
        shared = {b for (p, t, b) in self.published if p == pool.index and t == pool.tier}
        host_copies = {b for (p, b) in self.host_copies if p == pool.index} if pool.tier == Tier.HOST else set()
        both = (owned | shared) & host_copies
        self.expect(not both, f"{name}: blocks {sorted(both)} are host copies and something else")
        self.expect(not owned & shared, f"{name}: blocks {sorted(owned & shared)} are private and published")
        self.expect(
            not set(free) & (owned | shared | host_copies),
            f"{name}: blocks {sorted(set(free) & (owned | shared | host_copies))} are free and in use",
        )
        lost = set(range(pool.num_blocks)) - set(free) - owned - shared - host_copies
        self.expect(not lost, f"{name}: blocks {sorted(lost)[:8]} belong to nobody (leaked)")
        for block in free:
            self.expect(pool.refs[block] == 0, f"{name}: free block {block} has {pool.refs[block]} references")
        for block in owned:
            held = self.private[pool.index, int(pool.tier), block]
            if (pool.index, block) in self.uncounted and pool.tier == Tier.GPU and held == 1:
                held = 0
            self.expect(
                pool.refs[block] == held, f"{name}: block {block} has {pool.refs[block]} references, {held} holders"
            )
        self.check_published(pool, shared, name)
        idle, pinned = self.idle[pool.index, int(pool.tier)], self.pinned[pool.index, int(pool.tier)]
        self.expect(pool.num_cached == idle, f"{name}: {pool.num_cached} cached blocks booked, {idle} counted")
        self.expect(pool.num_pinned == pinned, f"{name}: {pool.num_pinned} pinned blocks booked, {pinned} counted")

    def check_published(self, pool: BlockPool, shared: set[int], name: str) -> None:
        """Published blocks of full groups count no references: their readers are counted on nodes."""
        for block in shared:
            node = self.published[pool.index, int(pool.tier), block]
            if not self._group_of(node, block, pool.index).slides:
                self.expect(pool.refs[block] == 0, f"{name}: published block {block} has {pool.refs[block]} references")

    # --- the rest ----------------------------------------------------------------------------------------------------

    def check_policies(self) -> None:
        candidates: Counter[int] = Counter()
        for node in self.nodes:
            if node.is_candidate():
                candidates[id(node.root.policies[node.tier])] += 1
        policies = list(self.cache.orders.policies)
        for quota in self.cache.orders.quotas.values():
            policies.extend(quota.policies)
        for policy in policies:
            wanted = candidates[id(policy)]
            self.expect(len(policy) == wanted, f"policy {policy.name!r} has {len(policy)} candidates, {wanted} exist")

    def check_encoded(self) -> None:
        for (scope, num_tokens), holders in self.state.encoded.items():
            self.expect(bool(holders), f"nobody has the blocks for the encoder's input {scope.encoder!r}")
            for group in self.state.fixed:
                tables = [self.rows.visible_blocks(group.index, row).tolist() for row in sorted(holders)]
                needed = ceil_div(num_tokens, self.context.block_size)
                same = all(table == tables[0] and len(table) == needed for table in tables)
                self.expect(same, f"rows {sorted(holders)} have different blocks for the encoder's input: {tables}")

    def check_bookkeeping(self) -> None:
        unknown = self.state.numbers_in_use() - self.rows.symbols.placeholders.keys()
        self.expect(not unknown, f"symbols {sorted(unknown)[:8]} of multimodal items are in use, but forgotten")
        runs = sum(not node.detached for node in self.nodes)
        self.expect(runs == self.tree.num_runs, f"{runs} runs are in the tree, {self.tree.num_runs} are counted")
        shared = int(self.rows.shared.sum())  # of rows without a sequence, too: the next one would inherit the flag
        self.expect(shared == self.rows.num_shared, f"{self.rows.num_shared} shared rows booked, {shared} flagged")
        gone = sorted(row for row in self.rows.following if self.rows.handles[row] is None)
        self.expect(not gone, f"rows {gone} follow a fork, but hold no sequence")
        pinned = sum(node.num_blocks for node in self.nodes if node.pins)
        self.expect(
            pinned == self.readers.pinned_blocks,
            f"{self.readers.pinned_blocks} pinned positions booked, {pinned} counted",
        )
        for (tip, _), row in self.in_flight.rows_by_block.items():
            handle = self.rows.handles[row]
            self.expect(
                handle is not None and self.rows.tips[row] is tip, f"row {row} is tracked in flight at a node it left"
            )
        for quota in self.cache.orders.quotas.values():
            self.check_quota_counts(quota.tenant, quota.cached)

    def check_quota_counts(self, tenant: str, booked: list[int]) -> None:
        counted = [0] * len(booked)
        for (pool, tier, block), node in self.published.items():
            if tier == Tier.GPU and node.root.scope.tenant == tenant:
                windowed = self._group_of(node, block, pool).slides
                counted[pool] += int(not self.state.gpu_pools[pool].refs[block]) if windowed else int(not node.active)
        self.expect(counted == booked, f"tenant {tenant!r}: {booked} cached blocks booked, {counted} counted")
