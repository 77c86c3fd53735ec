"""The steps of live requests: places for new tokens, tokens that became final, the way back. `KVCacheManager` inherits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.compiling import mypyc_attr
from kvpool.errors import InvalidArgumentError, UnknownRequestError
from kvpool.manager.arguments import as_counts, check_counts
from kvpool.manager.maintenance import Maintenance
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array, as_count, as_token_array
from kvpool.pools.symbols import as_items
from kvpool.sequences.batch import SequenceBatch
from kvpool.sequences.handle import KVCacheHandle
from kvpool.sequences.prompt import Items
from kvpool.sequences.rewind import Rewinding
from kvpool.sequences.slots import writable_blocks
from kvpool.sequences.step import Stepping
from kvpool.sequences.windows import RowWindows

BatchLike = SequenceBatch | Sequence[KVCacheHandle]


@mypyc_attr(allow_interpreted_subclasses=True)
class Steps(Maintenance):
    """Verbs that an engine calls in every step, for the whole running batch at once."""

    _stepping: Stepping
    _rewinding: Rewinding
    _windows: RowWindows

    def batch(self, handles: Sequence[KVCacheHandle]) -> SequenceBatch:
        """A batch to use for many steps: rows are looked up once. Also exports tables for kernels."""
        if isinstance(handles, SequenceBatch):
            return handles
        with self._guard.lock:
            return SequenceBatch(self._state, handles)

    def extend(self, handle: KVCacheHandle, num_tokens: int = 1, lookahead: int = 0) -> Int32Array:
        """Reserves places for `num_tokens` more tokens; returns their slots, [layer group, token]."""
        if type(num_tokens) is not int:
            num_tokens = as_count(num_tokens, "num_tokens")
        return self.extend_batch([handle], num_tokens, lookahead)

    def extend_batch(
        self,
        batch: BatchLike,
        num_tokens: int | Sequence[int] | Int64Array = 1,
        lookahead: int = 0,
        out: Int32Array | None = None,
    ) -> Int32Array:
        """Reserves places for more tokens of every sequence; returns their slots, [layer group, token].

        A slot is `block id * block size + offset`. `lookahead` makes room for draft tokens behind them, which a later
        `extend` claims. A block with another reader that is about to be written is copied first (see `take_copies`).
        """
        counts = as_counts(num_tokens)
        if type(lookahead) is not int or lookahead:
            lookahead = as_count(lookahead, "lookahead")
        with self._guard:
            chosen = self._batch(batch)
            check_counts(counts, len(chosen))
            slots = self._stepping.extend(chosen, counts, lookahead, out)
            if self._observers:
                self._tell("extend_batch", slots, chosen, counts, lookahead)
            return slots

    def slot_mapping(self, batch: BatchLike, start: Any, stop: Any, out: Int32Array | None = None) -> Int32Array:
        """Slots of the positions `start..stop` (numbers or one per sequence), flat, [layer group, token].

        Asking for unwritten positions announces a write: shared blocks are copied first. -1 stands for places that need no
        write: outside a window, or the last token of a fully cached prompt, whose data is there already.
        """
        with self._guard:
            chosen = self._batch(batch)
            slots = self._stepping.slot_mapping(chosen, start, stop, out)
            if self._observers:
                self._tell("slot_mapping", slots, chosen, start, stop)
            return slots

    def writable_blocks(self, group: int = 0) -> BoolArray:
        """For every GPU block of a layer group's pool, whether some sequence may write it: it alone holds it, unpublished."""
        with self._guard.lock:
            return writable_blocks(self._state, group)

    def mark_written(self, batch: BatchLike | KVCacheHandle, num_tokens: int | Sequence[int] = 1) -> None:
        """The next tokens' keys and values are in their blocks, but not final (drafts): `commit` or `rewind` follows."""
        counts = as_counts(num_tokens)
        with self._guard:
            chosen = self._batch([batch] if isinstance(batch, KVCacheHandle) else batch)
            check_counts(counts, len(chosen))
            self._stepping.mark_written(chosen, counts)
            if self._observers:
                self._tell("mark_written", None, chosen, counts)

    def commit(self, handle: KVCacheHandle, tokens: Any = None, multimodal: Items | None = None) -> None:
        """The next tokens are written and final; blocks that are full become matchable.

        `tokens` are their ids, or a count: then they are the next tokens of the known prompt (None: the reserved rest of
        it). A count that goes past the known ids is allowed, but what follows cannot be cached. `multimodal` lists images
        that come only now, with positions in `tokens`; those of the prompt are known.
        """
        if multimodal is not None and (tokens is None or isinstance(tokens, (int, np.integer))):
            raise InvalidArgumentError("multimodal items need the ids of the tokens that stand for them")
        if tokens is None:
            with self._guard:
                self._stepping.commit_prompt(self._state.row_of(handle))
                if self._observers:
                    self._tell("commit", None, handle)
        elif isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool):
            self.commit_batch([handle], None, [as_count(tokens, "tokens")])
        else:
            ids = as_token_array(tokens)
            self.commit_batch([handle], ids, [len(ids)], multimodal)

    def commit_batch(
        self, batch: BatchLike, tokens: Any, counts: Sequence[int] | None = None, multimodal: Items | None = None
    ) -> None:
        """`commit` for a batch: one token each, or `counts[i]` tokens of sequence i one after the other in `tokens`."""
        ids = None if tokens is None else as_token_array(tokens)
        numbers = None if counts is None else as_counts(counts)
        items = None if multimodal is None else as_items(multimodal, ids)
        with self._guard:
            chosen = self._batch(batch)
            if numbers is None and items:
                numbers = np.ones(len(chosen), np.int64)
            if numbers is None:
                if ids is None:
                    raise InvalidArgumentError("commit_batch needs tokens, or counts for known prompts")
                self._stepping.commit_step(chosen, ids)
            else:
                check_counts(numbers, len(chosen))
                if not isinstance(numbers, np.ndarray):
                    raise InvalidArgumentError(f"counts must hold one count for every sequence, got {counts!r}")
                self._stepping.commit_rows(chosen, ids, numbers, items or ())
            if self._observers:
                begun = None if ids is None else self._stepping.incoming.items_begun(chosen, numbers)
                self._tell("commit_batch", None, chosen, ids, numbers, begun)

    def narrow(self, handle: KVCacheHandle, position: int) -> None:
        """Gives back the blocks of windowed groups that the query at `position`, and those behind it, do not read.

        Commits do this by themselves as the sequence grows. A sequence whose bytes come from elsewhere is narrowed before:
        what it gave back is not published, so only what it still holds must be written.
        """
        with self._guard:
            row = self._state.row_of(handle)
            longest = max(handle.num_prompt_tokens, int(self._state.rows.reserved[row]))
            position = as_count(position, "position", maximum=longest)
            self._windows.slide(row, position)
            if self._observers:
                self._tell("narrow", None, handle, position)

    def rewind(self, handle: KVCacheHandle, num_tokens: int) -> None:
        """Forgets the last `num_tokens` reserved tokens (rejected drafts) and gives back the blocks behind them.

        Committed tokens may be rewound too: what was published stays cached, and a block cut in two is copied.
        """
        with self._guard:
            row = self._state.row_of(handle)
            limit = int(self._state.rows.reserved[row])
            count = as_count(num_tokens, "num_tokens", maximum=limit)
            self._rewinding.rewind(handle, count)
            if self._observers:
                self._tell("rewind", None, handle, count)

    def blocks_needed(self, handle: KVCacheHandle, num_tokens: int = 1, lookahead: int = 0) -> tuple[int, ...]:
        """Blocks per pool that `extend(handle, num_tokens, lookahead)` would take, copies of shared blocks included.

        To completion: `blocks_needed(handle, remaining_tokens)`. Blocks that windows give up on the way are not counted.
        """
        total = as_count(num_tokens, "num_tokens") + as_count(lookahead, "lookahead")
        with self._guard.query:
            return self._stepping.blocks_needed(self._state.row_of(handle), total)

    def _batch(self, batch: BatchLike) -> SequenceBatch:
        if isinstance(batch, SequenceBatch):
            if batch._state is not self._state:
                raise UnknownRequestError("this batch was made by another manager")
            return batch
        return SequenceBatch(self._state, batch)
