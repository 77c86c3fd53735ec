"""Token ids that come with a commit: checked against those known already, with the items they stand for."""

from __future__ import annotations

import numpy as np

from kvpool.checks import show
from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle, SequenceBatch
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.pools.arrays import Int32Array, Int64Array
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
    """The ids split by sequence and checked against those known already, and the numbers that symbols among new ones take.

    New ids that are placeholders of items that came with them, or that go on with an earlier item, become symbols.
    """
    rows = cache.rows
    encoded, fresh = tokens, Fresh()
    if items and tokens is not None:
        ends = np.cumsum(counts)
        for item in items:  # the tokens of each belong to one sequence
            end = int(ends[np.searchsorted(ends, item.position, side="right")])
            if item.position + item.length > end:
                raise InvalidArgumentError(f"{show(item)} reaches over the end of its sequence's tokens, at {end}")
        encoded, fresh = rows.symbols.encode(tokens, items)
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
    return pieces, fresh


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
