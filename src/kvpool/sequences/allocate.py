"""How a sequence begins: admitted, or forked off another. `step.py` has its steps, `release.py` its end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from kvpool.config import Tier
from kvpool.pools.arrays import copied, put
from kvpool.pools.pool import GPU, CopyKind, CopyOp
from kvpool.prefix.node import Node, path_ids
from kvpool.prefix.tree import Match
from kvpool.scope import ReuseScope
from kvpool.sequences.admission import AdmissionPlan, AdmissionPlanner
from kvpool.sequences.handle import GivenHandle, KVCacheHandle, note_sessions
from kvpool.sequences.prompt import Prompt
from kvpool.sequences.state import CacheState
from kvpool.sequences.windows import Held, RowWindows

INHERITED = (  # what a fork has in common with its parent
    "retention",
    "ttl",
    "session",
    "copied_sessions",
    "publishes",
    "is_lease",
    "encoder_tokens",
    "num_cached_encoder_tokens",
    "num_prompt_tokens",
    "num_matched_tokens",
    "family",
)

PARTIAL_REUSE: Final = CopyKind.PARTIAL_REUSE  # a global is several times cheaper than a member of an enum
_NOTHING: Held = []


class Allocator:
    """Operations that make sequences. Each checks everything first and then cannot fail."""

    def __init__(self, state: CacheState, admissions: AdmissionPlanner, windows: RowWindows) -> None:
        self.state = state
        self.rows = state.rows
        self.cache = state.cache
        self.context = state.context
        self.tree = state.cache.tree
        self.readers = state.cache.readers
        self.windows = windows
        self.admissions = admissions
        self.in_flight = state.in_flight

    # --- admission ---------------------------------------------------------------------------------------------------

    def allocate(self, handle: KVCacheHandle, prompt: Prompt, num_tokens: int, lookahead: int) -> Match:
        """Gives a new handle its row and blocks, reusing the longest cached prefix; returns what was found of it."""
        state, rows, size = self.state, self.rows, self.context.block_size
        found = self.admissions.find(prompt)
        plan = self.admissions.plan(prompt, found, num_tokens, lookahead)
        if not plan.fits:
            state.counters.allocation_failures += 1
            state.refuse_shortage(plan.needs, plan.supply, f"request {handle.request_id!r}")
        match, hit_tokens, partial = plan.match, plan.num_hit_tokens, plan.match.partial
        tip = self.enter(match, handle.scope)
        taken = None
        if partial is not None and not state.config.copy_on_partial_reuse:
            taken = self.cache.take_over(partial)
        held = self._make_room(plan, tip, taken is None, handle.scope.tenant) if plan.evicts else _NOTHING
        promoted = self._promote_path(tip) if match.path and match.path[-1].tier != GPU else None
        row = handle.row = rows.new_row(handle, plan.num_blocks, plan.num_cross_blocks)
        rows.tips[row] = tip
        self._fill_tables(row, tip, plan, taken)
        if held:
            self.windows.let_go(tip, held)
        if partial is not None:
            if taken is None:
                self._copy_partial(row, match)
                if plan.evicts:
                    self.windows.hold_source(match, False)
                    self.cache.spare_no_more(partial)
            note_sessions(handle, partial.sessions)
        present = hit_tokens + match.num_recomputed
        rows.reserved_of[row] = num_tokens if num_tokens > present else present
        rows.written_of[row] = rows.committed_of[row] = hit_tokens
        rows.present_of[row] = present
        tokens = found.tokens
        if tokens is None:
            rows.known_of[row] = rows.num_history_of[row] = 0
        else:
            rows.set_token_ids(row, tokens, match.num_blocks * size)
            handle.num_matched_tokens = match.num_matched_blocks * size
            handle.num_prompt_tokens = len(tokens)
            handle.num_cached_tokens, handle.num_cached_blocks = hit_tokens, match.num_blocks
            if not handle.is_lease:
                self._count_request(handle, promoted, match)
            if handle.publishes:
                if match.next_key is not None:
                    self.in_flight.track_block(handle, tip, match.next_key)
                elif len(tokens) >= (match.num_blocks + 1) * size:
                    self.in_flight.track(row)
            if found.fresh:
                state.keep_symbols(found.fresh)
        state.counters.requests += not handle.is_lease
        state.requests[handle.request_id] = handle
        self.admissions.forget()
        return found

    def _make_room(self, plan: AdmissionPlan, tip: Node, copies: bool, tenant: str) -> Held:
        """Evicts what a plan needs, but nothing that it reuses. Windowed blocks are held for that until `let_go`."""
        source, state = plan.match.partial, self.state
        held = self.windows.hold(tip, plan.num_hit_tokens) if self.context.windowed else _NOTHING
        if copies and source is not None:
            self.cache.spare(source)
            self.windows.hold_source(plan.match, True)
        for pool in state.gpu_pools:
            self.cache.make_room(pool, plan.needs[pool.index], tenant)
        return held

    def enter(self, match: Match, scope: ReuseScope) -> Node:
        """Splits the tree where the match ends and holds the matched path."""
        if not match.path:
            root = match.root if match.root is not None else self.tree.root_for(scope)
            root.active += 1
            return root
        last = match.path[-1]
        if last.end > match.num_blocks:
            last = match.path[-1] = self.tree.split(last, match.num_blocks - last.start)
        elif last.open_row >= 0:
            self.state.publisher.close(last.open_row)
        for node in match.path:
            node.hits += 1
            if not node.active:
                self.context.counters.reuse_gap.add(self.context.now - node.last_access_at, node.num_blocks)
        self.readers.hold(last)
        return last

    def _promote_path(self, tip: Node) -> dict[Tier, int]:
        """Brings matched nodes of lower tiers to the GPU, top down; returns how many blocks came from each tier."""
        promoted: dict[Tier, int] = {}
        for node in tip.path():
            if node.tier != GPU:
                promoted[node.tier] = promoted.get(node.tier, 0) + node.num_blocks
                self.cache.mover.promote(node)
        return promoted

    def _fill_tables(self, row: int, tip: Node, plan: AdmissionPlan, taken: list[int] | None) -> None:
        """Matched ids, then that of the block taken over from the tree, if any, then new ones."""
        state, rows = self.state, self.rows
        hit_blocks, num_blocks = plan.match.num_blocks, plan.num_blocks
        rows.num_blocks_of[row] = num_blocks
        path = plan.match.path
        first = hit_blocks
        if taken is not None:
            first += 1
            for table, block in zip(rows.tables, taken, strict=False):  # encoder tables come last and lose nothing
                table[row, hit_blocks] = block
        new = num_blocks - first
        if state.is_simple:
            table, place = rows.first_table, row * rows.num_columns
            if hit_blocks:
                put(table, place, path_ids(path, hit_blocks, 0), 0, hit_blocks)
            if new:
                state.gpu_pools[0].take_into(table, place + first, new)
            state.counters.blocks_allocated += new
            return
        for group in state.growing:
            table = rows.tables[group.index]
            if hit_blocks:
                table[row, :hit_blocks] = path_ids(path, hit_blocks, group.index)
            if new and not group.keeps_state:
                table[row, first:num_blocks] = group.take(new)
        if new and state.stateful is not None:
            table = rows.tables[state.stateful.index]
            table[row, first:num_blocks] = -1
            table[row, num_blocks - 1] = state.stateful.take(1)[0]
        state.counters.blocks_allocated += sum(state.needs(new, int(new > 0)))
        self.windows.begin(row, tip, hit_blocks, plan.num_hit_tokens)
        if plan.num_cross_blocks:
            rows.num_cross_blocks[row] = plan.num_cross_blocks
            self._fill_cross_tables(row, plan)

    def _fill_cross_tables(self, row: int, plan: AdmissionPlan) -> None:
        """Gives a row the blocks of its encoder's tokens: those of others with the same input, or its own."""
        state, handle, end = self.state, self.rows.handles[row], plan.num_cross_blocks
        assert handle is not None
        for group in state.fixed:
            table = self.rows.tables[group.index]
            if plan.encoded < 0:
                table[row, :end] = group.take(end)
            else:
                table[row, :end] = table[plan.encoded, :end]
                group.share(table[row, :end])
        if plan.encoded >= 0:
            handle.num_cached_encoder_tokens = handle.encoder_tokens
        if handle.publishes:
            state.encoded.setdefault((handle.scope, handle.encoder_tokens), set()).add(row)

    def _copy_partial(self, row: int, match: Match) -> None:
        source, rows = match.partial, self.rows
        assert source is not None
        at, first = row * rows.num_columns + match.num_blocks, match.num_blocks - source.start
        for group in self.state.growing:
            src = copied(source.ids[group.index], first, first + 1)
            if src.item(0) >= 0:
                dst = copied(rows.flat_tables[group.index], at, at + 1)
                op = CopyOp(PARTIAL_REUSE, group.index, source.tier, GPU, src, dst, match.num_partial)
                self.state.copies.append(op)

    def _count_request(self, handle: KVCacheHandle, promoted: dict[Tier, int] | None, match: Match) -> None:
        counters, size = self.state.counters, self.context.block_size
        counters.prompt_tokens += handle.num_prompt_tokens
        counters.prompt_blocks += handle.num_prompt_tokens // size
        if not match.num_blocks and match.partial is None:
            return
        if not promoted:
            counters.hit_tokens[0] += match.num_blocks * size - match.num_recomputed  # GPU, whose name costs more
            counters.hit_blocks[0] += match.num_blocks
        else:
            self._count_promoted(handle, promoted, match)
        if match.partial is not None:
            counters.hit_tokens[match.partial.tier] += match.num_partial
            counters.partial_hit_tokens += match.num_partial
            handle.num_partial_tokens = match.num_partial
            if match.partial.tier != GPU:
                handle.stats.cached_tokens_from_lower_tiers += match.num_partial
        if match.logits is not None:
            handle.last_logits = match.logits
            counters.full_hits_with_logits += 1

    def _count_promoted(self, handle: KVCacheHandle, promoted: dict[Tier, int], match: Match) -> None:
        """Hits of a request some of whose blocks were brought up from lower tiers."""
        counters, size = self.state.counters, self.context.block_size
        resident = match.num_blocks - sum(promoted.values())
        counters.hit_tokens[GPU] += resident * size
        counters.hit_blocks[GPU] += resident
        for tier, num_blocks in promoted.items():
            counters.hit_tokens[tier] += num_blocks * size
            counters.hit_blocks[tier] += num_blocks
            handle.stats.cached_tokens_from_lower_tiers += num_blocks * size
        counters.hit_tokens[max(promoted)] -= match.num_recomputed

    # --- fork --------------------------------------------------------------------------------------------------------

    def fork(self, parent: GivenHandle, request_ids: Sequence[Hashable]) -> list[KVCacheHandle]:
        """Children that share every block of the parent; whoever writes into a shared block gets a copy first."""
        source = self.state.row_of(parent)
        if self.rows.has_open_tip(source):
            self.state.publisher.close(source)
        if parent.family is None:
            parent.family = {source}
        children = []
        for request_id in request_ids:
            child = KVCacheHandle(self.rows, request_id, parent.scope)
            for name in INHERITED:
                setattr(child, name, getattr(parent, name))
            child.num_cached_tokens = parent.num_written
            child.num_cached_blocks = parent.num_written // self.context.block_size
            self._share_row(source, child)
            self.state.requests[request_id] = child
            children.append(child)
        self.state.counters.forks += len(children)
        return children

    def _share_row(self, source: int, child: KVCacheHandle) -> None:
        rows = self.rows
        num_blocks, cross = rows.num_blocks_of[source], int(rows.num_cross_blocks[source])
        row = child.row = rows.new_row(child, num_blocks, cross)
        for name in ("reserved", "written", "committed", "num_blocks", "num_cross_blocks", "present"):
            array = getattr(rows, name)
            array[row] = array[source]
        rows.window_start[:, row] = rows.window_start[:, source]
        rows.share_token_ids(source, row)
        tip = rows.tips[row] = rows.tips[source]
        assert tip is not None and child.family is not None
        self.readers.hold(tip)
        if source in rows.following:
            rows.follow(row, rows.following[source])
        for group in self.state.groups:
            table = rows.tables[group.index]
            first, used = group.pick((tip.end, num_blocks), (0, cross))
            table[row, :used] = table[source, :used]
            group.share(table[row, first:used])
        self.windows.enter(row, tip, tip.end)
        holders = self.state.encoded.get((child.scope, child.encoder_tokens)) if cross else None
        if holders is not None and source in holders:
            holders.add(row)
        child.family.add(row)
        rows.set_shared(source, True)
        rows.set_shared(row, True)
