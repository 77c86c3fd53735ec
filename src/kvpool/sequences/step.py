"""One step of a whole batch: places for new tokens, and tokens that became final.

These are the hot paths. They touch every sequence with array operations only; Python loops run over sequences that cross
a block boundary in a way that needs attention (a shared block to copy, a node to open, a block that nobody reads any more).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle, SequenceBatch, chosen_group
from kvpool.core.kind import Group, StatePlaces
from kvpool.core.rows import RECENT_TOKENS
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.kinds.by_block import slide
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array, as_array, largest
from kvpool.pools.pool import GPU, CopyKind, CopyOp
from kvpool.prefix.evict import require
from kvpool.prefix.tree import close, keep_symbols, tip_of
from kvpool.scope import MultimodalItem
from kvpool.sequences.publish import publish, publish_postponed, track, untrack
from kvpool.sequences.tokens import continue_items, divide_ids

_any = np.logical_or.reduce  # array.any() without its wrapper


# --- extend ----------------------------------------------------------------------------------------------------------


def extend(
    cache: Cache, batch: SequenceBatch, num_tokens: int | Int64Array, lookahead: int, out: Int32Array | None
) -> Int32Array:
    """Reserves places for more tokens of every sequence; returns their slots, [group, token]."""
    batch.refresh()
    rows, size = cache.rows, cache.block_size
    if type(num_tokens) is int and num_tokens == 1 and not lookahead and cache.is_simple and not rows.num_shared:
        return _extend_by_one(cache, batch, out)
    selection = batch.selection
    old = rows.reserved[selection]
    if isinstance(selection, slice):
        old = old.copy()
    new = old + num_tokens
    rows.moves += 1
    if cache.max_seq_len is not None:
        _check_length(cache, new, lookahead)
    if out is not None:
        check_slots_out(cache, out, num_tokens * len(batch) if isinstance(num_tokens, int) else int(num_tokens.sum()))
    have = rows.num_blocks[selection]
    missing = (new + (lookahead + size - 1)) // size - have
    np.maximum(missing, 0, out=missing)
    copies = _shared_blocks(cache, batch) if rows.num_shared else []
    if copies or missing.any():
        _grow(cache, batch, missing, copies)
    rows.reserved[selection] = new
    return slots_between(cache, batch, old, new if isinstance(num_tokens, np.ndarray) or num_tokens != 1 else None, out)


def _extend_by_one(cache: Cache, batch: SequenceBatch, out: Int32Array | None) -> Int32Array:
    """`extend` for a decoding step of one full-attention group: the next slot follows the last one, or starts a block."""
    rows, size, selection = cache.rows, cache.block_size, batch.selection
    if not len(batch.ones):  # what every step adds or multiplies: arrays take numpy half as long as a number does
        batch.ones = np.ones(len(batch), np.int64)
        batch.sizes = batch.ones * size
        batch.slot_steps = np.ones(len(batch), np.int32)
    new = rows.reserved[selection] + batch.ones
    if cache.max_seq_len is not None:
        _check_length(cache, new, 0)
    if out is not None:
        check_slots_out(cache, out, len(batch))
    crossing = (new > rows.num_blocks[selection] * batch.sizes).nonzero()[0]
    num_crossing = len(crossing)
    if num_crossing:
        pool = cache.gpu_pools[0]
        if num_crossing > pool.num_free:
            _make_room(cache, batch, np.bincount(crossing, minlength=len(batch)), [])
        targets = batch.rows[crossing]
        columns = rows.num_blocks[targets]
        longest = largest(columns) + 1
        if longest > rows.num_columns:
            rows.ensure_columns(longest)
        ids = rows.tables[0][targets, columns] = pool.take(num_crossing)
        rows.num_blocks[targets] = columns + 1
        cache.counters.blocks_allocated += num_crossing
    rows.reserved[selection] = new
    slots = batch.last_slots
    if slots is None or batch.moves != rows.moves:
        slots = slots_between(cache, batch, new - 1, None, None)
        rows.moves += 1  # other batches may hold the same sequences
        batch.moves = rows.moves
        # A spare block that lookahead left behind is entered by its table, not by counting on.
        has_spare_block = bool((rows.num_blocks[selection] > (new - 1) // size + 1).any())
        batch.last_slots = None if has_spare_block else slots
    else:
        of_group = slots[0]
        np.add(of_group, batch.slot_steps, of_group)
        if num_crossing:
            of_group[crossing] = ids * size
    if out is None:
        return slots.copy()
    out[...] = slots
    return out


def _make_room(cache: Cache, batch: SequenceBatch, missing: Int64Array, copies: list[tuple[int, Group, int]]) -> None:
    """Room for the columns that each member misses, and for copies. Where there are quotas, tenants are told apart."""
    quotas = cache.orders.quotas
    tenants = [handle.scope.tenant if quotas else None for handle in batch.handles]
    needs: dict[str | None, list[int]] = {}
    for tenant in dict.fromkeys(tenants):
        own = np.flatnonzero(missing * np.array([each == tenant for each in tenants]) if quotas else missing)
        needs[tenant] = _growth(cache, batch.rows[own], missing[own])
    for row, group, _ in copies:
        needs[cache.rows.handles[row].scope.tenant if quotas else None][group.pool] += 1
    try:
        require(cache, needs, f"extending a batch of {len(batch)} sequences")
    except Exception:
        cache.counters.extend_failures += 1
        raise


def blocks_needed(cache: Cache, row: int, num_tokens: int) -> tuple[int, ...]:
    """Blocks per pool that one sequence would take for `num_tokens` more tokens."""
    rows, size = cache.rows, cache.block_size
    missing = max(0, -(-(rows.reserved_of[row] + num_tokens) // size) - rows.num_blocks_of[row])
    needs = _growth(cache, np.array([row][: missing > 0]), np.array([missing]))
    if rows.shared[row]:
        for group in cache.growing:
            ids = rows.tables[group.index][row, _first_private(cache, row) : rows.num_blocks_of[row]]
            needs[group.pool] += int((group.gpu.refs[ids[ids >= 0]] > 1).sum())
    return tuple(needs)


def _check_length(cache: Cache, new: Int64Array, lookahead: int) -> None:
    longest, limit = int(new.max(initial=0)) + lookahead, cache.max_seq_len
    if limit is not None and len(new) and longest > limit:
        raise InvalidArgumentError(
            f"a sequence would have {longest} tokens, over max_seq_len={limit}; free it or raise that"
        )


def _grow(cache: Cache, batch: SequenceBatch, missing: Int64Array, copies: list[tuple[int, Group, int]]) -> None:
    """Gives rows the blocks that they miss, and their own copies of shared ones that they will write; all or nothing."""
    rows = cache.rows
    grown = np.flatnonzero(missing)
    grown_rows, counts = batch.rows[grown], missing[grown]
    _make_room(cache, batch, missing, copies)
    cache.counters.blocks_allocated += sum(_growth(cache, grown_rows, counts))
    rows.moves += 1
    families: dict[int, set[int]] = {}
    for row, group, column in copies:
        table, handle = rows.tables[group.index], rows.handles[row]
        src, dst = table[row, column : column + 1].copy(), group.take(1)
        used = group.num_used(rows, row, column)
        if used is None or used > 0:
            cache.copies.append(CopyOp(CopyKind.COPY_ON_WRITE, group.index, GPU, GPU, src, dst, used))
            cache.counters.copies_on_write += 1
            handle.stats.copies_on_write += 1
        group.unref(src, handle.family is not None)
        table[row, column] = dst[0]
        rows.set_shared(row, False)
        if handle.family is not None:
            families[id(handle.family)] = handle.family
    for family in families.values():  # only now: the rows have let go of all blocks that they copied
        publish_postponed(cache, family)
    if not len(grown):
        return
    owners, columns = grown_rows, rows.num_blocks[grown_rows]
    longest, num_new = int((columns + counts).max()), int(counts.sum())
    if longest > rows.num_columns:
        rows.ensure_columns(longest)
    if num_new > len(grown):
        ends = np.cumsum(counts)
        columns = np.repeat(columns, counts) + np.arange(num_new) - np.repeat(ends - counts, counts)
        owners = np.repeat(owners, counts)
    for group in cache.growing:
        group.grow(rows, grown_rows, counts, owners, columns)
    rows.num_blocks[grown_rows] += counts


def _growth(cache: Cache, grown: Int64Array, counts: Int64Array) -> list[int]:
    """Blocks per pool that these rows take for so many more columns each."""
    needs = [0] * len(cache.gpu_pools)
    for group in cache.growing if len(grown) else ():
        needs[group.pool] += group.num_grown(cache.rows, grown, counts)
    return needs


def _first_private(cache: Cache, row: int) -> int:
    """The first block that a row may write: the last one of a fully cached prompt is published and not written again."""
    tip = cache.rows.tips[row]
    return max(cache.rows.written_of[row] // cache.block_size, tip.end)


def _shared_blocks(cache: Cache, batch: SequenceBatch) -> list[tuple[int, Group, int]]:
    """(row, group, column) of the blocks that flagged rows are about to write and that have another reader."""
    rows = cache.rows
    found: list[tuple[int, Group, int]] = []
    flagged = batch.rows[rows.shared[batch.selection]].tolist()
    claimed: dict[tuple[int, int], int] = {}
    for row in flagged:
        first, last = _first_private(cache, row), rows.num_blocks_of[row]
        shared = False
        for group in cache.growing:
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


def prepare_write(cache: Cache, batch: SequenceBatch) -> None:
    """Copies shared blocks that the batch's unwritten places lie in."""
    batch.refresh()
    if cache.rows.num_shared:
        copies = _shared_blocks(cache, batch)
        if copies:
            _grow(cache, batch, np.zeros(len(batch), np.int64), copies)


# --- slots -----------------------------------------------------------------------------------------------------------


def slot_mapping(cache: Cache, batch: SequenceBatch, start: Any, stop: Any, out: Int32Array | None) -> Int32Array:
    """Slots of the positions start..stop of every sequence."""
    batch.refresh()
    first, last = asked_positions(cache, batch, start, stop)
    if out is not None:
        check_slots_out(cache, out, int((last - first).sum()))
    if (last > cache.rows.written[batch.selection]).any():
        prepare_write(cache, batch)
    return slots_between(cache, batch, first, last, out)


def state_places(cache: Cache, batch: SequenceBatch, start: Any, stop: Any) -> StatePlaces:
    """Where a step reads and writes states that writes the positions start..stop of every sequence."""
    batch.refresh()
    first, last = asked_positions(cache, batch, start, stop)
    for group in cache.growing:
        places = group.places(batch, first, last)
        if places is not None and cache.rows.num_shared:
            prepare_write(cache, batch)
            places = group.places(batch, first, last)
        if places is not None:
            return places
    raise InvalidArgumentError("no layer of this model keeps a state")


def slots_between(
    cache: Cache, batch: SequenceBatch, start: Int64Array, stop: Int64Array | None, out: Int32Array | None
) -> Int32Array:
    """Slots (block id x block size + offset) of positions start..stop of every sequence; `stop` None means one each."""
    rows, size = cache.rows, cache.block_size
    if stop is None:
        positions, owners = start, batch.rows
    else:
        counts = stop - start
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        positions = np.arange(total) - np.repeat(ends - counts - start, counts)
        owners = np.repeat(batch.rows, counts)
    slots = out if out is not None else np.empty((len(cache.groups), len(positions)), np.int32)
    column = positions // size
    offset = positions - column * size
    for group in cache.growing:
        of_group = slots[group.index]
        if not group.has_slots:
            of_group[...] = -1
            continue
        blocks = rows.tables[group.index][owners, column]
        np.multiply(blocks, size, out=of_group)
        of_group += offset.astype(np.int32)
        if group.by_block:
            hidden = group.hidden(column, rows.first_held[group.index][owners])
            of_group[hidden | (blocks < 0)] = -1
    slots[len(cache.growing) :] = -1
    present = (positions < rows.present[owners]) & (positions >= rows.committed[owners])
    if present.any():
        # The last token of a fully cached prompt: computed for its logits, not written again.
        slots[:, present] = -1
    return slots


def asked_positions(cache: Cache, batch: SequenceBatch, start: Any, stop: Any) -> tuple[Int64Array, Int64Array]:
    """The positions that a caller asks slots for, checked against the places that the sequences have."""
    first, last = _positions(start, "start", len(batch)), _positions(stop, "stop", len(batch))
    capacity = cache.rows.num_blocks[batch.selection] * cache.block_size
    if len(batch) and (int(first.min()) < 0 or (last < first).any() or (last > capacity).any()):
        raise InvalidArgumentError(
            f"slots were asked for positions {first.tolist()[:8]}..{last.tolist()[:8]}, "
            f"but the sequences have places for {capacity.tolist()[:8]} tokens; call extend first"
        )
    return first, last


def _positions(value: Any, name: str, batch_size: int) -> Int64Array:
    """One position for all sequences, or one for each, as an array."""
    array = as_array(value, name)
    wrong_type = array.size and array.dtype.kind not in "iu"  # an empty list has no type of its own
    if wrong_type or array.shape not in ((), (batch_size,)) or int(array.max(initial=0)) > 2**40:
        raise InvalidArgumentError(f"{name} must be one position or one per sequence ({batch_size}), got {value!r}")
    return np.broadcast_to(array.astype(np.int64), (batch_size,))


def check_slots_out(cache: Cache, out: Int32Array, num_slots: int) -> None:
    """Refuses an array that slots cannot be written into."""
    shape = (len(cache.groups), num_slots)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != np.int32 or not out.flags.writeable:
        given = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else repr(out)
        raise InvalidArgumentError(f"out must be a writeable int32 array of shape {shape}, got {given}")


def writable_blocks(cache: Cache, group: Any) -> BoolArray:
    """For every GPU block of the group's pool, whether a sequence may write it now.

    A sequence writes from its first uncommitted position on, and behind all that is published of it: a fork may have
    published what it has not committed itself, and of a fully cached prompt the last token is computed again.
    """
    rows, size = cache.rows, cache.block_size
    kind = chosen_group(cache.groups, group)
    pool = kind.gpu
    mask = np.zeros(pool.num_blocks, np.bool_)
    live = np.array([r for r in rows.live_rows() if (h := rows.handles[r]) is not None and h.swapped is None], np.int64)
    if not len(live):
        return mask
    if kind.grows:
        published = np.array([tip.end for row in live.tolist() if (tip := rows.tips[row]) is not None], np.int64)
        first, last = np.maximum(rows.committed[live] // size, published), rows.num_blocks[live]
    else:
        first, last = np.zeros(len(live), np.int64), rows.num_fixed[live]
    counts = np.maximum(last - first, 0)
    owners = np.repeat(live, counts)
    columns = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    ids = rows.tables[kind.index][owners, columns]
    mask[ids[ids >= 0]] = True
    writable: BoolArray = mask & (pool.refs <= 1)
    return writable


# --- written and committed -------------------------------------------------------------------------------------------


def mark_written(cache: Cache, batch: SequenceBatch, num_tokens: int | Int64Array) -> None:
    """The keys and values of the next tokens are in their blocks, but the tokens are not final yet."""
    batch.refresh()
    rows = cache.rows
    written = rows.written[batch.selection] + num_tokens
    if (written > rows.reserved[batch.selection]).any():
        _refuse_over(cache, batch, written, "written")
    for group in cache.sees_writes:
        for row, stop in zip(batch.rows.tolist(), written.tolist(), strict=True):
            group.write(rows, row, rows.written_of[row], stop)
    rows.written[batch.selection] = written


def _refuse_over(cache: Cache, batch: SequenceBatch, wanted: Int64Array, verb: str) -> None:
    reserved = cache.rows.reserved[batch.selection]
    i = int((wanted > reserved).argmax())
    raise _over(batch.handles[i], int(reserved[i]), int(wanted[i]), verb)


def commit_step(cache: Cache, batch: SequenceBatch, tokens: Int32Array) -> None:
    """One final token for every sequence of a batch that decodes."""
    batch.refresh()
    rows, selection = cache.rows, batch.selection
    if len(tokens) != len(batch):
        raise InvalidArgumentError(f"got {len(tokens)} tokens for a batch of {len(batch)} sequences")
    before = rows.committed[selection]
    known = rows.known[selection]
    if rows.following or _any(known != before) or (rows.symbols.placeholders and continue_items(cache, batch)):
        commit_rows(cache, batch, tokens, np.ones(len(batch), np.int64))
        return
    committed = before + 1
    if _any(committed > rows.reserved[selection]):
        _refuse_over(cache, batch, committed, "committed")
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
    filled = batch.rows[committed % cache.block_size == 0]
    if len(filled) and not cache.by_block and not cache.events.listening:
        filled = filled[~rows.grows_alone[filled]]  # those that grow alone have nothing to do
    for row in filled.tolist():
        publish(cache, row)
        if cache.by_block:
            slide(cache, row, rows.committed_of[row])


def commit_rows(
    cache: Cache,
    batch: SequenceBatch,
    tokens: Int32Array | None,
    counts: Int64Array,
    items: tuple[MultimodalItem, ...] = (),
) -> None:
    """`counts[i]` final tokens for sequence i, their ids one after the other in `tokens` (None: the known prompt's).

    Some of them may be placeholders of `items`.
    """
    batch.refresh()
    rows = cache.rows
    committed = rows.committed[batch.selection] + counts
    if (committed > rows.reserved[batch.selection]).any():
        _refuse_over(cache, batch, committed, "committed")
    if tokens is not None and len(tokens) != int(counts.sum()):
        raise InvalidArgumentError(f"got {len(tokens)} tokens, the counts add up to {int(counts.sum())}")
    pieces, fresh = divide_ids(cache, batch, tokens, counts, items)
    for row, _, ids in pieces:  # all ids first: forks that publish compare them
        if ids is not None and len(ids):
            rows.store_recent(row, ids)
    if fresh:
        keep_symbols(cache, fresh)
    for row, count, _ in pieces:
        start = rows.committed_of[row]
        _commit_row(cache, row, start, start + count, rows.known_of[row])


def commit_prompt(cache: Cache, row: int, count: int | None) -> None:
    """Commits the next `count` tokens of a row, with ids as far as they are known (None: what is reserved and known)."""
    rows = cache.rows
    start, known, reserved = rows.committed_of[row], rows.known_of[row], rows.reserved_of[row]
    end = start + count if count is not None else known if known < reserved else reserved
    if end > reserved:
        raise _over(rows.handles[row], reserved, end, "committed")
    _commit_row(cache, row, start, end, known)


def _commit_row(cache: Cache, row: int, start: int, end: int, known: int) -> None:
    """Tokens `start..end` of a row are final; the ids of `known` are known."""
    rows, size = cache.rows, cache.block_size
    handle = rows.handles[row]
    if end > rows.written_of[row]:
        for group in cache.sees_writes:
            group.write(rows, row, rows.written_of[row], end)
    if end > known and handle.publishes:
        _stop_publishing(cache, row)
    rows.committed_of[row] = end
    if end > rows.written_of[row]:
        rows.written_of[row] = end
    if end // size > start // size:
        publish(cache, row)
        if cache.by_block:
            slide(cache, row, end)
    if row in rows.following:
        rows.follow(row, rows.following[row])
    if handle.inflight is not None:
        untrack(cache, handle)
    if known - end >= size and handle.publishes:
        track(cache, row)


def _stop_publishing(cache: Cache, row: int) -> None:
    """Before tokens without ids are committed: what precedes them is published, what follows cannot be found."""
    handle = cache.rows.handles[row]
    cache.rows.committed_of[row] = cache.rows.known_of[row]
    publish(cache, row)
    close(cache, tip_of(cache, row))
    handle.publishes = False
    untrack(cache, handle)


def _over(handle: KVCacheHandle, reserved: int, wanted: int, verb: str) -> SequenceStateError:
    return SequenceStateError(
        f"request {handle.request_id!r} has places for {reserved} tokens, {wanted} cannot be {verb}; call extend first"
    )
