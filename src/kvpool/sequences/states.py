"""The states of live sequences: where each step reads one and where it leaves the next, and which of them are kept.

`StateGroup` says what the columns of its table mean. A row has at most two blocks that nobody else knows: its live state, and
the place where the step goes that was reserved last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpool.core.cache import Cache
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array
from kvpool.pools.groups import StateGroup
from kvpool.sequences.batch import SequenceBatch


class StatePlaces(NamedTuple):
    """Where one step of a batch reads states and where it leaves them: blocks of the group whose layers keep states."""

    sources: Int32Array  # -1 for a sequence that begins
    targets: Int32Array


# --- steps -----------------------------------------------------------------------------------------------------------


def takes_block(cache: Cache, group: StateGroup, row_list: Int64Array) -> BoolArray:
    """Which rows need a block if they get more columns. The others take the one of their last column along.

    What a step leaves at the end of a block is a checkpoint, and stays there.
    """
    rows = cache.rows
    num_blocks = rows.num_blocks[row_list]
    takes: BoolArray = rows.reserved[row_list] == num_blocks * group.block_size
    takes |= rows.tables[group.index][row_list, num_blocks - 1] < 0  # it was narrowed
    return takes


def grow_states(
    cache: Cache,
    group: StateGroup,
    grown: Int64Array,
    old_columns: Int64Array,
    new_columns: Int64Array,
    takes: BoolArray,
) -> None:
    """These rows have so many columns now, and had so many: the last one gets a block."""
    table = cache.rows.tables[group.index]
    last = np.where(takes, 0, old_columns - 1)
    moved = table[grown, last]
    table[grown[~takes], last[~takes]] = -1
    moved[takes] = group.take(int(takes.sum()))
    table[grown, new_columns - 1] = moved


def write_states(cache: Cache, group: StateGroup, row: int, start: int, stop: int) -> None:
    """One step wrote tokens `start..stop` of a row: what stands at places where it did not end is no checkpoint."""
    first, last = start // group.block_size, (stop - 1) // group.block_size
    if first < last:
        _give_back(cache, group, row, first, last)


def _give_back(cache: Cache, group: StateGroup, row: int, first: int, end: int) -> None:
    columns = cache.rows.tables[group.index][row, first:end]
    group.gpu.release(columns[columns >= 0])
    columns[...] = -1


def live_column(cache: Cache, group: StateGroup, row: int) -> int:
    """The column that has the state behind all tokens written so far; -1 if none are, or if it was given up."""
    return group.column_of(_columns(cache, group, row), cache.rows.written_of[row])


def _columns(cache: Cache, group: StateGroup, row: int) -> Int32Array:
    columns: Int32Array = cache.rows.tables[group.index][row, : cache.rows.num_blocks_of[row]]
    return columns


def state_places_of(
    cache: Cache, group: StateGroup, batch: SequenceBatch, start: Int64Array, stop: Int64Array
) -> StatePlaces:
    """Where a step reads and writes that writes the tokens `start..stop` of each sequence."""
    size, table = group.block_size, cache.rows.tables[group.index]
    if (start >= stop).any():
        raise InvalidArgumentError(
            f"a step writes at least one token of each sequence; asked for {start.tolist()[:8]}..{stop.tolist()[:8]}"
        )
    columns = np.maximum(start - 1, 0) // size
    passed = (columns < cache.rows.window_start[group.index][batch.rows]) & (start > 0)
    sources = table[batch.rows, columns]
    targets = table[batch.rows, (stop - 1) // size]
    sources[start == 0] = -1
    for index in np.flatnonzero((targets < 0) | passed | ((sources < 0) & (start > 0))).tolist():
        row = _columns(cache, group, batch.rows.item(index))
        target = group.column_of(row, stop.item(index))
        source = group.column_of(row, start.item(index))
        if target < 0 or passed[index] or (source < 0 < start[index]):
            raise SequenceStateError(
                f"request {batch.handles[index].request_id!r} has no state at position {start[index]}; "
                "start at num_written"
            )
        targets[index] = row[target]
        sources[index] = row[source] if source >= 0 else -1
    return StatePlaces(sources, targets)


# --- backwards -------------------------------------------------------------------------------------------------------


def check_state_rewind(cache: Cache, group: StateGroup, handle: KVCacheHandle, row: int, length: int) -> None:
    """Refuses to go back to where no state was kept."""
    written, column = cache.rows.written_of[row], (length - 1) // group.block_size
    if not 0 < length < written:
        return
    is_kept = _columns(cache, group, row)[column] >= 0 or column < cache.rows.window_start[group.index, row]
    if length % group.block_size or not is_kept:
        kept = [(c + 1) * group.block_size for c in np.flatnonzero(_columns(cache, group, row) >= 0).tolist()]
        at = ", ".join(str(end) for end in kept if end < written) or "none"
        raise SequenceStateError(
            f"request {handle.request_id!r} cannot be rewound to {length} tokens: its layers keep a state, and states "
            f"were kept behind these numbers of its {written} tokens: {at}"
        )


def shrink_states(cache: Cache, group: StateGroup, row: int, num_blocks: int) -> int:
    """Before a row gives up all columns from `num_blocks` on: the last one left takes over the state that it needs.

    Returns how many columns are left. It is one more where the last one is published: the state stays private.
    """
    table, tip = cache.rows.tables[group.index], cache.rows.tips[row]
    assert tip is not None
    used = cache.rows.num_blocks_of[row]
    if num_blocks < 1 or table[row, num_blocks - 1] >= 0:
        return num_blocks
    behind = num_blocks + np.flatnonzero(table[row, num_blocks:used] >= 0)
    if len(behind):
        num_blocks += num_blocks <= tip.end
        moved = table[row, behind[0]]
        table[row, behind[0]] = -1
        table[row, num_blocks - 1] = moved
    return num_blocks


# --- checkpoints -----------------------------------------------------------------------------------------------------


def next_stop(cache: Cache, group: StateGroup, handle: KVCacheHandle, start: int) -> int | None:
    """Where the step should end that begins behind `start` tokens, so that it leaves a checkpoint; None: anywhere.

    States are kept where prompts parted so far, behind the last full block of a prompt but its last token, and at
    multiples of `checkpoint_every`.
    """
    every, size = cache.config.checkpoint_every, group.block_size
    stops = [handle.num_matched_tokens, (handle.num_prompt_tokens - 1) // size * size]
    if every is not None:
        following = (start // every + 1) * every
        if following < handle.num_prompt_tokens:
            stops.append(following)
    return min((stop for stop in stops if stop > start), default=None)
