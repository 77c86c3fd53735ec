"""One step of a whole batch: places for new tokens, and tokens that became final.

These are the hot paths. They touch every sequence with array operations only; Python loops run over sequences that cross
a block boundary in a way that needs attention (a shared block to copy, a node to open, a window that moves).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array, largest
from kvpool.pools.groups import Group
from kvpool.pools.pool import GPU, CopyKind, CopyOp
from kvpool.pools.rows import RECENT_TOKENS
from kvpool.scope import MultimodalItem
from kvpool.sequences.batch import SequenceBatch, prepare_steps
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.state import CacheState, common_tenant
from kvpool.sequences.states import RowStates, StatePlaces
from kvpool.sequences.tokens import IncomingIds, Slots
from kvpool.sequences.windows import RowWindows

_any = np.logical_or.reduce  # array.any() without its wrapper


class Stepper:
    """extend, mark_written, commit and the slot mapping, for batches."""

    def __init__(self, state: CacheState, windows: RowWindows, states: RowStates | None) -> None:
        self.state = state
        self.states = states
        self.rows = state.rows
        self.cache = state.cache
        self.context = state.context
        self.windows = windows
        self.slots = Slots(state)
        self.in_flight = state.in_flight
        self.incoming = IncomingIds(state)

    # --- extend ------------------------------------------------------------------------------------------------------

    def extend(
        self, batch: SequenceBatch, num_tokens: int | Int64Array, lookahead: int, out: Int32Array | None
    ) -> Int32Array:
        """Reserves places for more tokens of every sequence; returns their slots, [group, token]."""
        batch.refresh()
        state, rows, size = self.state, self.rows, self.context.block_size
        if type(num_tokens) is int and num_tokens == 1 and not lookahead and state.is_simple and not rows.num_shared:
            return self._extend_by_one(batch, out)
        selection = batch.selection
        old = rows.reserved[selection]
        if isinstance(selection, slice):
            old = old.copy()
        new = old + num_tokens
        rows.moves += 1
        self._check_length(new, lookahead)
        if out is not None:
            self.slots.check_out(out, num_tokens * len(batch) if isinstance(num_tokens, int) else int(num_tokens.sum()))
        have = rows.num_blocks[selection]
        missing = (new + (lookahead + size - 1)) // size - have
        np.maximum(missing, 0, out=missing)
        num_new = int(missing.sum())
        copies = self._shared_blocks(batch) if rows.num_shared else []
        if num_new or copies:
            self._grow(batch, missing, num_new, copies)
        rows.reserved[selection] = new
        return self.slots.between(
            batch, old, new if isinstance(num_tokens, np.ndarray) or num_tokens != 1 else None, out
        )

    def _extend_by_one(self, batch: SequenceBatch, out: Int32Array | None) -> Int32Array:
        """`extend` for a decoding step of one full-attention group: the next slot follows the last one, or starts a block."""
        rows, size, selection = self.rows, self.context.block_size, batch.selection
        if not len(batch.ones):
            prepare_steps(batch, size)
        new = rows.reserved[selection] + batch.ones
        if self.state.max_seq_len is not None:
            self._check_length(new, 0)
        if out is not None:
            self.slots.check_out(out, len(batch))
        crossing = (new > rows.num_blocks[selection] * batch.sizes).nonzero()[0]
        ids = self._begin_blocks(batch, crossing) if len(crossing) else None
        rows.reserved[selection] = new
        slots = batch.last_slots
        if slots is None or batch.moves != rows.moves:
            slots = self._first_slots(batch, new)
        else:
            of_group = slots[0]
            np.add(of_group, batch.slot_steps, of_group)
            if ids is not None:
                of_group[crossing] = ids * size
        if out is None:
            return slots.copy()
        out[...] = slots
        return out

    def _begin_blocks(self, batch: SequenceBatch, crossing: Int64Array) -> Int32Array:
        """Gives one more block to each of these members of a batch; returns their ids."""
        rows = self.rows
        targets = batch.rows[crossing]
        columns = rows.num_blocks[targets]
        longest = largest(columns) + 1
        if longest > rows.num_columns:
            rows.ensure_columns(longest)
        ids = self._take(batch, crossing)
        rows.tables[0][targets, columns] = ids
        rows.num_blocks[targets] = columns + 1
        return ids

    def _first_slots(self, batch: SequenceBatch, new: Int64Array) -> Int32Array:
        """The slots before the lengths `new`, read from the tables; those of the next steps follow from them."""
        rows = self.rows
        slots = self.slots.between(batch, new - 1, None, None)
        rows.moves += 1  # other batches may hold the same sequences
        batch.moves = rows.moves
        # A spare block that lookahead left behind is entered by its table, not by counting on.
        has_spare_block = bool((rows.num_blocks[batch.selection] > (new - 1) // self.context.block_size + 1).any())
        batch.last_slots = None if has_spare_block else slots
        return slots

    def _take(self, batch: SequenceBatch, crossing: Int64Array) -> Int32Array:
        """A block of the only group for each of these members of a batch, evicting if need be."""
        state = self.state
        pool = state.gpu_pools[0]
        num_blocks = len(crossing)
        if num_blocks > pool.num_free:
            self._require(batch, [num_blocks], np.bincount(crossing, minlength=len(batch)), [])
        state.counters.blocks_allocated += num_blocks
        return pool.take(num_blocks)

    def _require(
        self, batch: SequenceBatch, needs: list[int], missing: Int64Array, copies: list[tuple[int, Group, int]]
    ) -> None:
        """Room for `needs` in all: columns that each member misses, and copies."""
        state, what = self.state, f"extending a batch of {len(batch)} sequences"
        tenant = common_tenant(batch.handles) if state.cache.orders.quotas else None
        try:
            if tenant is None and state.cache.orders.quotas:
                state.require_each(self._needs_of_tenants(batch, missing, copies), what)
            else:
                state.require(needs, tenant, what)
        except Exception:
            state.counters.extend_failures += 1
            raise

    def _needs_of_tenants(
        self, batch: SequenceBatch, missing: Int64Array, copies: list[tuple[int, Group, int]]
    ) -> dict[str, list[int]]:
        """Blocks per pool that the sequences of each tenant need."""
        state = self.state
        needs = {handle.scope.tenant: [0] * len(state.gpu_pools) for handle in batch.handles}
        grown = np.flatnonzero(missing)
        takes = self._takes_state(batch.rows[grown])
        for position, num_states in zip(grown.tolist(), takes.tolist(), strict=True):
            of_tenant = needs[batch.handles[position].scope.tenant]
            for pool, need in enumerate(state.needs(int(missing[position]), num_states)):
                of_tenant[pool] += need
        for row, group, _ in copies:
            handle = self.rows.handles[row]
            assert handle is not None
            needs[handle.scope.tenant][group.pool] += 1
        return needs

    def blocks_needed(self, row: int, num_tokens: int) -> tuple[int, ...]:
        """Blocks per pool that one sequence would take for `num_tokens` more tokens."""
        rows, size = self.rows, self.context.block_size
        missing = max(0, -(-(rows.reserved_of[row] + num_tokens) // size) - rows.num_blocks_of[row])
        needs = self.state.needs(missing, int(missing > 0 and self._takes_state(np.array([row])).item()))
        if rows.shared[row]:
            for group in self.state.growing:
                ids = rows.tables[group.index][row, self._first_private(row) : rows.num_blocks_of[row]]
                needs[group.pool] += int((group.gpu.refs[ids[ids >= 0]] > 1).sum())
        return tuple(needs)

    def _check_length(self, new: Int64Array, lookahead: int) -> None:
        limit = self.state.max_seq_len
        if limit is not None and len(new) and int(new.max()) + lookahead > limit:
            raise InvalidArgumentError(
                f"a sequence would have {int(new.max()) + lookahead} tokens, over max_seq_len={limit}; free it or raise that"
            )

    def _grow(
        self, batch: SequenceBatch, missing: Int64Array, num_new: int, copies: list[tuple[int, Group, int]]
    ) -> None:
        """Allocates the missing blocks and copies shared ones; all or nothing."""
        state, rows = self.state, self.rows
        grown = np.flatnonzero(missing)
        takes = self._takes_state(batch.rows[grown])
        needs = state.needs(num_new, int(takes.sum()))
        num_taken = sum(needs)
        for _, group, _ in copies:
            needs[group.pool] += 1
        self._require(batch, needs, missing, copies)
        state.counters.blocks_allocated += num_taken
        rows.moves += 1
        self._unshare(copies)
        if not num_new:
            return
        target_rows = grown_rows = batch.rows[grown]
        counts = missing[grown]
        columns = rows.num_blocks[target_rows]
        longest = int((columns + counts).max())
        if longest > rows.num_columns:
            rows.ensure_columns(longest)
        if num_new > len(grown):
            ends = np.cumsum(counts)
            offsets = np.arange(num_new) - np.repeat(ends - counts, counts)
            columns = np.repeat(columns, counts) + offsets
            target_rows = np.repeat(target_rows, counts)
        for group in state.growing:
            if not group.keeps_state:
                rows.tables[group.index][target_rows, columns] = group.take(num_new)
        old = rows.num_blocks[grown_rows]
        if self.states is not None:
            self.states.grow(grown_rows, old, old + counts, takes)
        rows.num_blocks[grown_rows] = old + counts

    def _takes_state(self, grown: Int64Array) -> BoolArray:
        """Which of these rows need a block for a state if their tables grow."""
        if self.states is None:
            return np.zeros(len(grown), np.bool_)
        return self.states.takes_block(grown)

    def _first_private(self, row: int) -> int:
        """The first block that a row may write: the last one of a fully cached prompt is published and not written again."""
        tip = self.rows.tips[row]
        assert tip is not None
        return max(self.rows.written_of[row] // self.context.block_size, tip.end)

    def _shared_blocks(self, batch: SequenceBatch) -> list[tuple[int, Group, int]]:
        """(row, group, column) of the blocks that flagged rows are about to write and that have another reader."""
        rows = self.rows
        found: list[tuple[int, Group, int]] = []
        flagged = batch.rows[rows.shared[batch.selection]].tolist()
        claimed: dict[tuple[int, int], int] = {}
        for row in flagged:
            first, last = self._first_private(row), rows.num_blocks_of[row]
            shared = False
            for group in self.state.growing:
                refs, pool = group.gpu.refs, group.pool
                for column in range(first, last):
                    block = int(rows.tables[group.index][row, column])
                    if block < 0 or refs[block] <= 1:
                        continue
                    # Also for the row that keeps a block which others of the batch copy: they may yet fail.
                    shared = True
                    if refs[block] - claimed.get((pool, block), 0) > 1:
                        claimed[pool, block] = claimed.get((pool, block), 0) + 1
                        found.append((row, group, column))
            if not shared:
                rows.set_shared(row, False)
        return found

    def _unshare(self, copies: list[tuple[int, Group, int]]) -> None:
        """Gives each row its own copy of a shared block that it is about to write."""
        state, rows, size = self.state, self.rows, self.context.block_size
        families: dict[int, set[int]] = {}
        for row, group, column in copies:
            table = rows.tables[group.index]
            src = table[row, column : column + 1].copy()
            dst = group.take(1)
            handle = rows.handles[row]
            assert handle is not None
            used: int | None = min(rows.written_of[row] - column * size, size)
            if group.keeps_state:
                assert self.states is not None
                used = None if column == self.states.live_column(row) else 0
            if used is None or used > 0:
                state.copies.append(CopyOp(CopyKind.COPY_ON_WRITE, group.index, GPU, GPU, src, dst, used))
                state.counters.copies_on_write += 1
                handle.stats.copies_on_write += 1
            group.give_back(src, handle.family is not None)
            table[row, column] = dst[0]
            rows.set_shared(row, False)
            if handle.family is not None:
                families[id(handle.family)] = handle.family
        for family in families.values():  # only now: the rows have let go of all blocks that they copied
            state.publisher.publish_postponed(family)

    def prepare_write(self, batch: SequenceBatch) -> None:
        """Copies shared blocks that the batch's unwritten places lie in."""
        batch.refresh()
        if self.rows.num_shared:
            copies = self._shared_blocks(batch)
            if copies:
                self._grow(batch, np.zeros(len(batch), np.int64), 0, copies)

    def slot_mapping(self, batch: SequenceBatch, start: Any, stop: Any, out: Int32Array | None) -> Int32Array:
        """Slots of the positions start..stop of every sequence."""
        batch.refresh()
        first, last = self.slots.asked(batch, start, stop)
        if out is not None:
            self.slots.check_out(out, int((last - first).sum()))
        if (last > self.rows.written[batch.selection]).any():
            self.prepare_write(batch)
        return self.slots.between(batch, first, last, out)

    def state_places(self, batch: SequenceBatch, start: Any, stop: Any) -> StatePlaces:
        """Where a step reads and writes states that writes the positions start..stop of every sequence."""
        batch.refresh()
        if self.states is None:
            raise InvalidArgumentError("no layer of this model keeps a state")
        first, last = self.slots.asked(batch, start, stop)
        step = self.states.of_step(batch, first, last)
        if not self.rows.num_shared:
            return step
        self.prepare_write(batch)
        return self.states.of_step(batch, first, last)

    # --- written and committed ---------------------------------------------------------------------------------------

    def mark_written(self, batch: SequenceBatch, num_tokens: int | Int64Array) -> None:
        """The keys and values of the next tokens are in their blocks, but the tokens are not final yet."""
        batch.refresh()
        rows = self.rows
        written = rows.written[batch.selection] + num_tokens
        if (written > rows.reserved[batch.selection]).any():
            self._refuse_over(batch, written, "written")
        if self.states is not None:
            for row, stop in zip(batch.rows.tolist(), written.tolist(), strict=True):
                self.states.write(row, rows.written_of[row], stop)
        rows.written[batch.selection] = written

    def _refuse_over(self, batch: SequenceBatch, wanted: Int64Array, verb: str) -> None:
        reserved = self.rows.reserved[batch.selection]
        i = int((wanted > reserved).argmax())
        raise _over(batch.handles[i], int(reserved[i]), int(wanted[i]), verb)

    def commit_step(self, batch: SequenceBatch, tokens: Int32Array) -> None:
        """One final token for every sequence of a batch that decodes."""
        batch.refresh()
        rows, selection = self.rows, batch.selection
        if len(tokens) != len(batch):
            raise InvalidArgumentError(f"got {len(tokens)} tokens for a batch of {len(batch)} sequences")
        before = rows.committed[selection]
        known = rows.known[selection]
        if (
            rows.following
            or _any(known != before)
            or (rows.symbols.placeholders and self.incoming.continue_items(batch))
        ):
            self.commit_rows(batch, tokens, np.ones(len(batch), np.int64))
            return
        committed = before + 1
        if _any(committed > rows.reserved[selection]):
            self._refuse_over(batch, committed, "committed")
        column = known - rows.num_history[selection]
        full = (column >= RECENT_TOKENS).nonzero()[0]
        if len(full):
            for row in batch.rows[full].tolist():
                rows.store_recent(row)
            column[full] = 0
        rows.recent[batch.rows, column] = tokens
        rows.known[selection] = committed
        rows.committed[selection] = committed
        rows.written[selection] = np.maximum(rows.written[selection], committed)
        self._complete(batch.rows[committed % self.context.block_size == 0])

    def _complete(self, rows_done: Int64Array) -> None:
        """Publishes blocks that were just filled. Rows that grow alone have nothing to do unless somebody listens."""
        if not len(rows_done):
            return
        if self.context.windowed or self.context.events.listening:
            attention = rows_done
        else:
            attention = rows_done[~self.rows.grows_alone[rows_done]]
        for row in attention.tolist():
            self.state.publisher.publish(row)
            if self.context.windowed:
                self.windows.slide(row, self.rows.committed_of[row])

    def commit_rows(
        self,
        batch: SequenceBatch,
        tokens: Int32Array | None,
        counts: Int64Array,
        items: tuple[MultimodalItem, ...] = (),
    ) -> None:
        """`counts[i]` final tokens for sequence i, their ids one after the other in `tokens` (None: the known prompt's).

        Some of them may be placeholders of `items`.
        """
        batch.refresh()
        rows = self.rows
        committed = rows.committed[batch.selection] + counts
        if (committed > rows.reserved[batch.selection]).any():
            self._refuse_over(batch, committed, "committed")
        if tokens is not None and len(tokens) != int(counts.sum()):
            raise InvalidArgumentError(f"got {len(tokens)} tokens, the counts add up to {int(counts.sum())}")
        pieces, fresh = self.incoming.divided(batch, tokens, counts, items)
        for row, _, ids in pieces:  # all ids first: forks that publish compare them
            if ids is not None and len(ids):
                rows.append_token_ids(row, ids)
        if fresh:
            self.state.keep_symbols(fresh)
        for row, count, _ in pieces:
            start = rows.committed_of[row]
            self._commit_row(row, start, start + count, rows.known_of[row])

    def commit_prompt(self, row: int, count: int | None) -> None:
        """Commits the next `count` tokens of a row, with ids as far as they are known (None: what is reserved and known)."""
        rows = self.rows
        start, known, reserved = rows.committed_of[row], rows.known_of[row], rows.reserved_of[row]
        end = start + count if count is not None else known if known < reserved else reserved
        if end > reserved:
            raise _over(rows.handles[row], reserved, end, "committed")
        self._commit_row(row, start, end, known)

    def _commit_row(self, row: int, start: int, end: int, known: int) -> None:
        """Tokens `start..end` of a row are final; the ids of `known` are known."""
        rows, size = self.rows, self.context.block_size
        handle = rows.handles[row]
        assert handle is not None
        if self.states is not None and end > rows.written_of[row]:
            self.states.write(row, rows.written_of[row], end)
        if end > known and handle.publishes:
            self._stop_publishing(row)
        rows.committed_of[row] = end
        if end > rows.written_of[row]:
            rows.written_of[row] = end
        if end // size > start // size:
            self.state.publisher.publish(row)
            if self.context.windowed:
                self.windows.slide(row, end)
        if row in rows.following:
            rows.follow(row, rows.following[row])
        if handle.inflight is not None:
            self.in_flight.untrack(handle)
        if known - end >= size and handle.publishes:
            self.in_flight.track(row)

    def _stop_publishing(self, row: int) -> None:
        """Before tokens without ids are committed: what precedes them is published, what follows cannot be found."""
        handle = self.rows.handles[row]
        assert handle is not None
        self.rows.committed_of[row] = self.rows.known_of[row]
        self.state.publisher.publish(row)
        if self.rows.has_open_tip(row):
            self.state.publisher.close(row)
        handle.publishes = False
        self.in_flight.untrack(handle)


def _over(handle: KVCacheHandle | None, reserved: int, wanted: int, verb: str) -> SequenceStateError:
    assert handle is not None
    return SequenceStateError(
        f"request {handle.request_id!r} has places for {reserved} tokens, {wanted} cannot be {verb}; call extend first"
    )
