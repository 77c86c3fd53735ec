"""Tokens of a step: the ids that come with a commit, and the slots where keys and values of positions lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.checks import show
from kvpool.core.batch import SequenceBatch
from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array, as_array
from kvpool.pools.symbols import Fresh
from kvpool.scope import MultimodalItem

Piece = tuple[int, int, "Int32Array | None"]  # row, how many tokens, those of their ids that are new


def continue_items(cache: Cache, batch: SequenceBatch) -> bool:
    """Whether the ids of some sequence end with a placeholder. Those that came in single steps are none."""
    rows = cache.rows
    settled = batch.rows[rows.known[batch.selection] == rows.num_history[batch.selection]]
    return any(_last_id(cache, row) < 0 for row in settled.tolist())


def _last_id(cache: Cache, row: int) -> int:
    known = cache.rows.known_of[row]
    return int(cache.rows.ids_between(row, known - 1, known)[0]) if known else 0


def items_begun(cache: Cache, batch: SequenceBatch, counts: Int64Array | None) -> tuple[MultimodalItem, ...]:
    """The items that begin among tokens just committed, `counts[i]` (None: one) of sequence i one after the other."""
    rows = cache.rows
    if not rows.symbols.placeholders:
        return ()
    found: list[MultimodalItem] = []
    offset = 0
    for row, count in zip(batch.rows.tolist(), [1] * len(batch) if counts is None else counts.tolist(), strict=True):
        end = rows.committed_of[row]
        found.extend(rows.symbols.items(rows.ids_between(row, end - count, end), offset))
        offset += count
    return tuple(found)


def divide_ids(
    cache: Cache, batch: SequenceBatch, tokens: Int32Array | None, counts: Int64Array, items: tuple[MultimodalItem, ...]
) -> tuple[list[Piece], Fresh]:
    """The pieces of all sequences, checked, and the numbers that symbols among their new ids take."""
    if not items or tokens is None:
        fresh: Fresh = {}
        return _pieces(cache, batch, tokens, tokens, counts, fresh), fresh
    _check_division(items, counts)
    encoded, fresh = cache.rows.symbols.encode(tokens, items)
    return _pieces(cache, batch, tokens, encoded, counts, fresh), fresh


def _pieces(
    cache: Cache,
    batch: SequenceBatch,
    tokens: Int32Array | None,
    encoded: Int32Array | None,
    counts: Int64Array,
    fresh: Fresh,
) -> list[Piece]:
    """Splits the ids by sequence and checks them against those known already. Returns (row, count, new ids).

    `encoded` are the tokens with the symbols of the items that came with them. New ids that go on with an earlier item
    become symbols too; their numbers are in `fresh` if they are new.
    """
    rows = cache.rows
    pieces: list[Piece] = []
    offset = 0
    for handle, row, count in zip(batch.handles, batch.rows.tolist(), counts.tolist(), strict=True):
        ids = None
        if tokens is not None and encoded is not None:
            given, coded = tokens[offset : offset + count], encoded[offset : offset + count]
            offset += count
            committed, known = rows.committed_of[row], rows.known_of[row]
            if committed > known:
                raise SequenceStateError(
                    f"request {handle.request_id!r} committed {committed - known} tokens without ids; "
                    f"later ids cannot be placed: pass a count to commit"
                )
            overlap = min(known - committed, count)
            announced = rows.ids_between(row, committed, committed + overlap)
            # Whose placeholders they are need not be said again; what is said must be true.
            said = announced if encoded is tokens else np.where(coded[:overlap] < 0, coded[:overlap], announced)
            _check_same(cache, handle, committed, given, said, announced)
            ids = coded[overlap:]
            if rows.symbols.placeholders and len(ids):
                ids = _continued(cache, handle, row, ids, fresh)
            if row in rows.following:
                shared = rows.path_ids(row, rows.following[row])[committed : committed + count]
                _check_same(cache, handle, committed, given, np.concatenate((announced, ids))[: len(shared)], shared)
        pieces.append((row, count, ids))
    return pieces


def _check_same(
    cache: Cache, handle: KVCacheHandle, start: int, tokens: Int32Array, given: Int32Array, known: Int32Array
) -> None:
    """Token ids cannot change once they were announced, or once a fork published the blocks that hold their data.

    `given` are the first of `tokens` as rows hold them. Also their placeholders must be those of the same items.
    """
    before = cache.rows.symbols.decode(known)
    tokens = tokens[: len(known)]
    if not np.array_equal(tokens, before):
        at = int((tokens != before).argmax())
        raise InvalidArgumentError(
            f"request {handle.request_id!r}: token {start + at} was announced as {int(before[at])} "
            f"and is committed as {int(tokens[at])}; rewind before changing it"
        )
    if given is not known and not np.array_equal(given, known):
        raise InvalidArgumentError(
            f"request {handle.request_id!r}: token {start + int((given != known).argmax())} was announced for another "
            f"multimodal item, or for none; rewind before changing it"
        )


def _continued(cache: Cache, handle: KVCacheHandle, row: int, ids: Int32Array, fresh: Fresh) -> Int32Array:
    """New ids of a row that may end inside an item: the first of them are its placeholders then."""
    symbols, known, last = cache.rows.symbols, cache.rows.known_of[row], _last_id(cache, row)
    if last >= 0:
        return ids
    key, length, _ = symbols.placeholder(last)
    missing = symbols.num_missing(cache.rows.ids_between(row, max(0, known - length), known))
    if (ids[:missing] < 0).any():
        raise InvalidArgumentError(
            f"request {handle.request_id!r}: its multimodal item {show(key)} goes on for {missing} tokens; "
            f"another one cannot begin before"
        )
    if not missing:
        return ids
    return np.concatenate((symbols.inside(ids[:missing], key, length, fresh), ids[missing:]))


def _check_division(items: tuple[MultimodalItem, ...], counts: Int64Array) -> None:
    """The tokens of an item belong to one sequence."""
    ends = np.cumsum(counts)
    for item in items:
        end = int(ends[np.searchsorted(ends, item.position, side="right")])
        if item.position + item.length > end:
            raise InvalidArgumentError(f"{show(item)} reaches over the end of its sequence's tokens, at {end}")


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
    kind = cache.group(group)
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


def _positions(value: Any, name: str, batch_size: int) -> Int64Array:
    """One position for all sequences, or one for each, as an array."""
    array = as_array(value, name)
    wrong_type = array.size and array.dtype.kind not in "iu"  # an empty list has no type of its own
    if wrong_type or array.shape not in ((), (batch_size,)) or int(array.max(initial=0)) > 2**40:
        raise InvalidArgumentError(f"{name} must be one position or one per sequence ({batch_size}), got {value!r}")
    return np.broadcast_to(array.astype(np.int64), (batch_size,))
