"""`check()`: recomputes everything from scratch, slowly, and names whatever does not agree."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvpool.config import Tier
from kvpool.core.cache import Cache
from kvpool.core.kind import Group
from kvpool.core.node import Node, path_ids
from kvpool.errors import InvariantError
from kvpool.eviction import LeaversFirst
from kvpool.pools.pool import BlockPool
from kvpool.prefix.tree import all_nodes, numbers_in_use


class Checker:
    """One pass over the whole state. Owners of every block are collected here and compared with the pools' books."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.rows = cache.rows
        self.nodes = list(all_nodes(cache))
        # per (pool, tier): who holds a block privately, which blocks nodes own, how many of those nobody reads
        self.private: Counter[tuple[int, int, int]] = Counter()
        self.uncounted: set[tuple[int, int]] = set()  # private GPU blocks of full groups: a single owner is not counted
        self.published: dict[tuple[int, int, int], tuple[Node, Group]] = {}
        self.idle: Counter[tuple[int, int]] = Counter()
        self.pinned: Counter[tuple[int, int]] = Counter()
        self.host_copies: set[tuple[int, int]] = set()  # (pool, host block)
        self.block_readers: Counter[tuple[int, int, int]] = Counter()

    def run(self) -> None:
        self.check_rows()
        for group in self.cache.groups:
            if (wrong := group.check(self.rows)) is not None:
                self.fail(wrong)
        self.check_nodes()
        self.check_readers()
        self.check_blocks_read()
        self.check_host_copies()
        for tiers in self.cache.pools:
            for pool in tiers:
                self.check_pool(pool)
        self.check_policies()
        self.check_bookkeeping()

    def fail(self, message: str) -> None:
        raise InvariantError(message)

    # --- sequences ---------------------------------------------------------------------------------------------------

    def check_rows(self) -> None:
        rows = self.rows
        live = rows.live_rows()
        if len(live) != len(self.cache.requests):
            self.fail(f"{len(live)} rows for {len(self.cache.requests)} requests")
        for row in live:
            handle = rows.handles[row]
            name = f"request {handle.request_id!r}"
            if handle.row != row:
                self.fail(f"{name}: its handle says row {handle.row}, it lies in {row}")
            if self.cache.requests.get(handle.request_id) is not handle:
                self.fail(f"{name}: not in the request index")
            reserved, written, committed = (int(a[row]) for a in (rows.reserved, rows.written, rows.committed))
            if not (reserved >= written >= committed >= 0):
                self.fail(f"{name}: reserved {reserved}, written {written}, committed {committed}")
            if int(rows.num_blocks[row]) * self.cache.block_size < reserved:
                self.fail(f"{name}: too few blocks for {reserved}")
            if handle.swapped is not None:
                self.check_swapped(row, name)
            else:
                self.check_tables(row, name)

    def check_swapped(self, row: int, name: str) -> None:
        handle = self.rows.handles[row]
        assert handle.swapped is not None
        for group, table in enumerate(self.rows.tables):
            if not (table[row] == -1).all():
                self.fail(f"{name}: is swapped out but has GPU blocks in group {group}")
        for group, ids in enumerate(handle.swapped):
            if not (ids >= -1).all():
                self.fail(f"{name}: {ids.min(initial=-1)} is no host block, and not -1 for none")
            for block in ids[ids >= 0].tolist():
                self.private[self.cache.groups[group].pool, Tier.HOST, block] += 1

    def check_tables(self, row: int, name: str) -> None:
        rows = self.rows
        tip = rows.tips[row]
        if not (tip.open_row == row or not rows.grows_alone[row]):
            self.fail(f"{name}: grows alone without an open node")
        used, fixed = int(rows.num_blocks[row]), int(rows.num_fixed[row])
        if tip.end > used:
            self.fail(f"{name}: {tip.end} published blocks, {used} in its table")
        self.check_following(row, tip, name)
        path = tip.path()
        for group in self.cache.groups:
            table = rows.tables[group.index]
            first, end = group.pick((tip.end, used), (0, fixed))
            if not (table[row, end:] == -1).all():
                self.fail(f"{name}: block ids behind its end in group {group.index}")
            ids = table[row, :end]
            if group.by_block:
                self.check_table_by_block(row, group, path, name)
                continue
            if not (ids >= 0).all():
                self.fail(f"{name}: a hole in group {group.index}: {ids.tolist()}")
            if first:
                cached = path_ids(path, first, group.index)
                if not (ids[:first] == cached).all():
                    self.fail(f"{name}: table differs from the tree in group {group.index}")
            for block in ids[first:].tolist():
                self.private[group.pool, Tier.GPU, block] += 1
                if not group.single_owner:
                    self.uncounted.add((group.pool, block))
        final = min(int(rows.committed[row]), tip.end * self.cache.block_size, int(rows.known[row]))
        if path:
            held = np.concatenate([node.tokens for node in path])[:final]
            if not (held == rows.token_ids(row)[:final]).all():
                self.fail(f"{name}: its tokens differ from its path")

    def check_following(self, row: int, tip: Node, name: str) -> None:
        """A row knows which tokens its path holds, committed them without ids, or follows its path to the end."""
        end = tip.end * self.cache.block_size
        known, committed = int(self.rows.known[row]), int(self.rows.committed[row])
        follows = self.rows.following.get(row)
        if follows is None and end > max(known, committed):
            self.fail(f"{name}: its path has {end} tokens, it knows {known} and follows nobody")
        if follows is not None and not committed < follows == end:
            self.fail(f"{name}: follows its path up to token {follows}, which ends at {end}; it committed {committed}")

    def check_table_by_block(self, row: int, group: Group, path: list[Node], name: str) -> None:
        rows = self.rows
        start, used = int(rows.first_held[group.index, row]), int(rows.num_blocks[row])
        published = path[-1].end if path else 0
        cached = path_ids(path, published, group.index)
        for column in np.flatnonzero(~group.hidden(np.arange(used), start)).tolist():
            block = int(rows.tables[group.index][row, column])
            if block < 0 and group.has_holes:
                continue
            if block < 0:
                self.fail(f"{name}: block {column} of group {group.index} is missing among those that it reads")
            if column < published:
                same = block == int(cached[column])
                if not same:
                    self.fail(f"{name}: block {column} of group {group.index} differs from the tree")
                self.block_readers[group.pool, Tier.GPU, block] += 1
            else:
                self.private[group.pool, Tier.GPU, block] += 1

    # --- tree --------------------------------------------------------------------------------------------------------

    def check_nodes(self) -> None:
        size = self.cache.block_size
        for node in self.nodes:
            name = f"node at block {node.start}"
            if node.num_blocks <= 0:
                self.fail(f"{name}: is empty")
            if node.is_remainder:
                self.check_remainder(node, name)
            else:
                if len(node.tokens) != node.num_blocks * size:
                    self.fail(f"{name}: {len(node.tokens)} tokens")
            if node.start != node.parent.end:
                self.fail(f"{name}: its parent ends at {node.parent.end}")
            if node.tier < node.parent.tier:
                self.fail(f"{name}: lies on {node.tier.name} below {node.parent.tier.name}")
            if not node.detached:
                if node.key != node.tokens[:size].tobytes():
                    self.fail(f"{name}: key is not its first block")
                siblings = node.parent.children
                if not (siblings is not None and siblings.get(node.key) is node):
                    self.fail(f"{name}: not among its parent's children")
            same = sum(child.tier == node.tier for child in (node.children or {}).values())
            if same != node.same_tier_children:
                self.fail(f"{name}: counts {node.same_tier_children} children of its tier")
            remainders = sum(child.is_remainder for child in (node.children or {}).values())
            if remainders != node.num_remainders:
                self.fail(f"{name}: counts {node.num_remainders} remainders")
            self.collect_blocks(node, name)

    def check_remainder(self, node: Node, name: str) -> None:
        size = self.cache.block_size
        if node.num_blocks != 1:
            self.fail(f"{name}: is a remainder of {node.num_blocks} blocks")
        if not (0 < len(node.tokens) < size):
            self.fail(f"{name}: is a remainder of {len(node.tokens)} tokens")
        if not (node.children is None and not node.active and not node.pins):
            self.fail(f"{name}: somebody builds on a remainder")
        if node.parent.open_row >= 0:
            self.fail(f"{name}: its parent still grows over this remainder")
        if node.digests is not None and not self.cache.events.tells_unfilled:
            self.fail(f"{name}: an unfilled block has a digest")

    def collect_blocks(self, node: Node, name: str) -> None:
        tier = int(node.tier)
        for group in self.cache.growing:
            pool, ids = group.pool, node.ids[group.index]
            if len(ids) != node.num_blocks:
                self.fail(f"{name}: {len(ids)} ids in group {group.index} for {node.num_blocks} blocks")
            least = -1 if group.by_block else 0
            if not (ids >= least).all():
                self.fail(f"{name}: a hole in group {group.index}: {ids.tolist()}")
            for block in ids[ids >= 0].tolist():
                key = (pool, tier, block)
                if key in self.published:
                    self.fail(f"block {block} of pool {pool} belongs to two nodes")
                self.published[key] = node, group
                if not group.by_block and not node.active:
                    self.idle[pool, tier] += 1
                    self.pinned[pool, tier] += int(node.pins > 0)

    def check_readers(self) -> None:
        """Recounts `active` and `pins` of every node."""
        active: Counter[Node] = Counter()
        pins: Counter[Node] = Counter()
        for row in self.rows.live_rows():
            tip = self.rows.tips[row]
            active[tip] += 1
        for pin in self.cache.pins.values():
            if not pin.node.detached:
                pins[pin.node] += 1
        for node in sorted(self.nodes, key=lambda n: -n.start):
            if node.active != active[node]:
                self.fail(f"node at block {node.start}: active {node.active}, counted {active[node]}")
            if node.pins != pins[node]:
                self.fail(f"node at block {node.start}: pins {node.pins}, counted {pins[node]}")
            if node.detached and node.active <= 0:
                self.fail(f"node at block {node.start} is detached and unread but not freed")
            active[node.parent] += int(node.active > 0)
            if node.parent is not node.root:
                pins[node.parent] += int(node.pins > 0)
        for root in self.cache.roots.values():
            if root.active != active[root]:
                self.fail(f"root {root.scope}: active {root.active}, counted {active[root]}")
            if not (root.children or root.active):
                self.fail(f"root {root.scope} is empty and unused but still there")

    def check_blocks_read(self) -> None:
        for (pool, tier, block), (node, group) in self.published.items():
            if not group.by_block:
                continue
            if tier == Tier.GPU:
                readers = self.block_readers[pool, tier, block]
                refs = int(group.gpu.refs[block])
                if refs != readers:
                    self.fail(f"block {block} of group {group.index} has {refs} references, {readers} readers")
                if not refs:
                    self.idle[pool, tier] += 1
                    self.pinned[pool, tier] += int(block in self.cache.pinned_blocks[pool])
            elif not node.active:
                self.idle[pool, tier] += 1
                self.pinned[pool, tier] += int(node.pins > 0)

    def check_host_copies(self) -> None:
        """A host copy holds all that its run has on the GPU of full groups, and nothing else of the others."""
        with_host_copy = {node for node in self.nodes if node.host_copy is not None}
        if with_host_copy != set(self.cache.host_copies.nodes):
            self.fail("host copies are kept of other runs than those that have one")
        counted = [0] * len(self.cache.pools)
        for node in with_host_copy:
            name = f"host copy of the node at block {node.start}"
            assert node.host_copy is not None
            kept = node.tier == Tier.GPU and not node.detached and node.open_row < 0
            if not kept:
                self.fail(f"{name}: its run is on {node.tier.name}, detached or still written")
            for group in self.cache.growing:
                ids, there = node.ids[group.index], node.host_copy[group.index]
                if len(ids) != len(there):
                    self.fail(f"{name}: {len(there)} ids in group {group.index} for {len(ids)} blocks")
                agree = (ids >= 0) >= (there >= 0) if group.by_block else (ids >= 0) == (there >= 0)
                if not agree.all():
                    self.fail(f"{name}: group {group.index} has {there.tolist()} for {ids.tolist()}")
                for block in there[there >= 0].tolist():
                    if (group.pool, block) in self.host_copies:
                        self.fail(f"{name}: host block {block} is another's too")
                    self.host_copies.add((group.pool, block))
                    counted[group.pool] += 1
                    self.idle[group.pool, int(Tier.HOST)] += 1
        booked = self.cache.host_copies.num_blocks
        if counted != booked:
            self.fail(f"{booked} blocks of host copies booked, {counted} counted")

    # --- pools -------------------------------------------------------------------------------------------------------

    def check_pool(self, pool: BlockPool) -> None:
        name = f"pool {pool.index} on {pool.tier.name}"
        free = pool.free_ids().tolist()
        if len(set(free)) != len(free):
            self.fail(f"{name}: an id is free twice")
        if pool.num_referenced < 0:
            self.fail(f"{name}: free {pool.num_free} + cached {pool.num_cached} exceeds {pool.num_blocks}")
        index, tier, refs = pool.index, int(pool.tier), pool.refs.tolist()
        owned = {b for (p, t, b) in self.private if p == index and t == tier}
        shared = {b for (p, t, b) in self.published if p == index and t == tier}
        host_copies = {b for (p, b) in self.host_copies if p == index} if tier == Tier.HOST else set()
        both = (owned | shared) & host_copies
        if both:
            self.fail(f"{name}: blocks {sorted(both)} are host copies and something else")
        if owned & shared:
            self.fail(f"{name}: blocks {sorted(owned & shared)} are private and published")
        used = owned | shared | host_copies
        if not used.isdisjoint(free):
            self.fail(f"{name}: blocks {sorted(used.intersection(free))} are free and in use")
        lost = set(range(pool.num_blocks)).difference(free, used)
        if lost:
            self.fail(f"{name}: blocks {sorted(lost)[:8]} belong to nobody (leaked)")
        for block in free:
            if refs[block] != 0:
                self.fail(f"{name}: free block {block} has {refs[block]} references")
        for block in owned:
            held = self.private[index, tier, block]
            if (index, block) in self.uncounted and tier == Tier.GPU and held == 1:
                held = 0
            if refs[block] != held:
                self.fail(f"{name}: block {block} has {refs[block]} references, {held} holders")
        for block in shared:  # their readers are counted on nodes
            if refs[block] and not self.published[index, tier, block][1].by_block:
                self.fail(f"{name}: published block {block} has {refs[block]} references")
        idle, pinned = self.idle[index, tier], self.pinned[index, tier]
        if pool.num_cached != idle:
            self.fail(f"{name}: {pool.num_cached} cached blocks booked, {idle} counted")
        if pool.num_pinned != pinned:
            self.fail(f"{name}: {pool.num_pinned} pinned blocks booked, {pinned} counted")

    # --- the rest ----------------------------------------------------------------------------------------------------

    def check_policies(self) -> None:
        candidates: Counter[int] = Counter()
        leavers: Counter[int] = Counter()
        for node in self.nodes:
            if node.is_candidate():
                candidates[id(node.root.policies[node.tier])] += 1
                leavers[id(node.root.policies[node.tier])] += node.leaves
        policies = list(self.cache.orders.policies)
        for quota in self.cache.orders.quotas.values():
            policies.extend(quota.policies)
        for policy in policies:
            wanted = candidates[id(policy)]
            if len(policy) != wanted:
                self.fail(f"policy {policy.name!r} has {len(policy)} candidates, {wanted} exist")
            first, wanted = policy.num_leavers if isinstance(policy, LeaversFirst) else 0, leavers[id(policy)]
            if first != wanted:
                self.fail(f"policy {policy.name!r} lets {first} runs of ended sessions go first, {wanted} exist")

    def check_bookkeeping(self) -> None:
        unknown = numbers_in_use(self.cache) - self.rows.symbols.placeholders.keys()
        if unknown:
            self.fail(f"symbols {sorted(unknown)[:8]} of multimodal items are in use, but forgotten")
        runs = sum(not node.detached for node in self.nodes)
        if runs != self.cache.num_runs:
            self.fail(f"{runs} runs are in the tree, {self.cache.num_runs} are counted")
        shared = int(self.rows.shared.sum())  # of rows without a sequence, too: the next one would inherit the flag
        if shared != self.rows.num_shared:
            self.fail(f"{self.rows.num_shared} shared rows booked, {shared} flagged")
        gone = sorted(row for row in self.rows.following if self.rows.handles[row] is None)
        if gone:
            self.fail(f"rows {gone} follow a fork, but hold no sequence")
        pinned = sum(node.num_blocks for node in self.nodes if node.pins)
        if pinned != self.cache.pinned_positions:
            self.fail(f"{self.cache.pinned_positions} pinned positions booked, {pinned} counted")
        for (tip, _), row in self.cache.producers.items():
            handle = self.rows.handles[row]
            if not (handle is not None and self.rows.tips[row] is tip):
                self.fail(f"row {row} is tracked in flight at a node it left")
        for quota in self.cache.orders.quotas.values():
            self.check_quota_counts(quota.tenant, quota.cached)

    def check_quota_counts(self, tenant: str, booked: list[int]) -> None:
        counted = [0] * len(booked)
        for (pool, tier, block), (node, group) in self.published.items():
            if tier == Tier.GPU and node.root.scope.tenant == tenant:
                counted[pool] += int(not (group.gpu.refs[block] if group.by_block else node.active))
        if counted != booked:
            self.fail(f"tenant {tenant!r}: {booked} cached blocks booked, {counted} counted")
