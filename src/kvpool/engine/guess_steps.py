"""The steps in which a draft guesses, one token after another: which tokens they compute, and which keys these see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpool.attention import PagedBatch
from kvpool.engine.step_message import GuessSteps
from kvpool.pools.arrays import Int32Array, Int64Array, within
from kvpool.scheduling import BatchPlan
from kvpool.sequences.batch import CSRTable, SequenceBatch


class Older(NamedTuple):
    """Tokens before the newest ones that the steps which guess compute, too."""

    firsts: Int64Array  # of each sequence
    rows: Int64Array  # [token]: of which sequence
    positions: Int64Array
    # Where the token behind each stands in a step: the newest tokens of all sequences come first, then these
    next_rows: Int64Array

    @classmethod
    def of(cls, firsts: Int64Array, newest: Int64Array) -> Older:
        """Those from `firsts` up to the newest tokens."""
        counts = newest - firsts
        rows = np.repeat(np.arange(len(firsts)), counts)
        next_rows = len(firsts) + 1 + np.arange(len(rows))
        is_last = within(counts) == counts[rows] - 1
        return cls(firsts, rows, firsts[rows] + within(counts), np.where(is_last, rows, next_rows))


def guess_steps(
    plan: BatchPlan,
    batch: SequenceBatch,
    older: Older,
    positions: Int64Array,
    slots: Int32Array,
    drafts: Int64Array,
    num_models: int,
) -> GuessSteps:
    """The steps that guess, from the newest tokens' `positions` and `slots`: [step, row] and [layer group, step, row].

    `num_models` guess one after another. The first step of each has the older tokens of some rows, too.
    """
    assert plan.manager is not None
    pieces, columns = list(positions), list(slots.swapaxes(0, 1))
    if len(older.rows):
        ends = positions[0] + drafts
        found = plan.manager.slot_mapping(batch, older.firsts, ends)
        before = np.cumsum(ends - older.firsts) - (ends - older.firsts) - older.firsts
        for turn in range(min(num_models, len(pieces))):
            where = older.positions + turn
            held = np.minimum(where, ends[older.rows] - 1)  # behind its last draft, a row writes nothing
            to = np.where(where == held, found[:, before[older.rows] + held], -1)
            pieces[turn] = np.append(pieces[turn], held)
            columns[turn] = np.concatenate([columns[turn], to], axis=1)
    return GuessSteps(pieces, np.concatenate(columns, axis=1, dtype=np.int32), older.rows, batch)


def paged(table: CSRTable, again: Int64Array, lengths: Int64Array, block_size: int) -> PagedBatch:
    """A row with one query for each sequence of a table, and one more for some of them, as attention sees them."""
    indptr, indices = table.indptr, table.indices
    if len(lengths) >= len(indptr):
        lists = [indices[indptr[at] : indptr[at + 1]] for at in again.tolist()]
        indptr = np.append(indptr, indptr[-1] + np.cumsum([len(each) for each in lists]))
        indices = np.concatenate([indices, *lists])
    return PagedBatch.build(indptr, indices, np.ones(len(lengths), np.int64), lengths, block_size=block_size)
