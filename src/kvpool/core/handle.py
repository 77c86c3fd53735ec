"""Live sequences as their users see them: handles and block tables, batches, and what kernels are handed for these."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvpool.checks import as_count, show
from kvpool.core.rows import SequenceRows
from kvpool.core.sessions import Session
from kvpool.errors import InvalidArgumentError, SequenceStateError, UnknownRequestError
from kvpool.pools.arrays import Int32Array, Int64Array, largest
from kvpool.scope import Retention, ReuseScope
from kvpool.stats import HandleStats, MissCause


class BlockTable(Sequence["int | None"]):
    """Logical block to block id for one sequence and layer group; None where a block was given up.

    >>> table = BlockTable([4, 7, -1])
    >>> list(table), len(table)
    ([4, 7, None], 3)
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = [None if block_id < 0 else block_id for block_id in ids]

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[int | None]: ...
    def __getitem__(self, index: int | slice) -> int | list[int | None] | None:
        return self._ids[index]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return f"BlockTable({self._ids})"


Rows: TypeAlias = SequenceRows["KVCacheHandle"]
GroupT = TypeVar("GroupT")


class KVCacheHandle:
    """One live sequence: made by `allocate` or `fork`, used with the manager's verbs, ended by `free`.

    Lengths, in tokens: `num_reserved` have a place, `num_written` of them have their keys and values written, and
    `num_committed` of these are final: their full blocks can be found by other requests.
    """

    __slots__ = (
        *("_missed", "_rows", "_stats", "copied_sessions", "departed", "num_fixed_tokens", "family", "hint"),
        *("inflight", "is_lease"),
        *("last_logits", "num_cached_blocks", "num_cached_fixed_tokens", "num_cached_tokens", "num_partial_tokens"),
        *("num_prompt_tokens", "num_matched_tokens", "publishes", "request_id", "retention", "row", "scope"),
        *("serial", "session", "swapped", "ttl", "user"),
    )

    def __init__(self, rows: Rows, request_id: Hashable, scope: ReuseScope) -> None:
        self._rows = rows
        self.request_id = request_id
        self.scope = scope
        self.row = -1
        self.retention: Retention | None = None
        self.ttl: float | None = None
        self.session: str | None = None
        self.user: Session | None = None  # that session, once the request was admitted
        self.copied_sessions: tuple[str, ...] = ()  # those that computed private blocks of it, or their beginnings
        self.publishes = True
        self.hint = 0  # `ReuseHint.code` of what was said about its continuation
        self.is_lease = False  # it holds blocks for somebody else and is no request
        self.num_fixed_tokens = 0  # whose places were taken at admission and do not grow
        self.num_cached_fixed_tokens = 0  # of them, those whose blocks an earlier request with the same named input has
        self.num_prompt_tokens = 0
        self.num_matched_tokens = 0  # how many of its tokens were cached by others when it came, reusable or not
        self.num_cached_tokens = 0  # that need not be computed
        self.num_partial_tokens = 0  # of the cached ones, those of a block that was found in part
        self.num_cached_blocks = 0  # whole blocks that were found, also one whose last token is computed again
        rows.serial += 1
        self.serial = rows.serial  # a number that no other sequence has had
        self.last_logits: Any = None
        self.family: set[int] | None = None  # rows that may share private blocks with this one
        self.inflight: Any = None
        # Where a swapped-out sequence keeps its data: host block ids per group and column, -1 where there is none
        self.swapped: list[Int32Array] | None = None
        self._stats: HandleStats | None = None
        self.departed = 0  # how many pieces had left the tree when it came: `core/departed.py`
        self._missed: dict[MissCause, int] | None = None

    @property
    def stats(self) -> HandleStats:
        """What this request cost and what it got from the cache."""
        if self._stats is None:
            self._stats = HandleStats(
                self.num_prompt_tokens, self.num_cached_tokens, partial_tokens=self.num_partial_tokens
            )
        return self._stats

    @property
    def missed_tokens(self) -> dict[MissCause, int]:
        """Tokens of its prompt that were not served from the cache, by cause: `manager.inspect.explain` in short.

        Found when it is first asked for, which is best done soon after the admission. Empty where nothing is remembered.
        """
        if self._missed is None:
            with self._rows.lock:
                self._live_row()
                self._missed = self._rows.missed_tokens(self)
        return self._missed

    @property
    def is_live(self) -> bool:
        return self.row >= 0

    @property
    def is_swapped(self) -> bool:
        """Its blocks are on the host; `swap_in` brings them back."""
        return self.swapped is not None

    @property
    def sessions(self) -> tuple[str, ...]:
        """Every session of which something is in its private blocks, its own first."""
        return self.copied_sessions if self.session is None else (self.session, *self.copied_sessions)

    def _live_row(self) -> int:
        if self.row < 0:
            raise UnknownRequestError(f"request {self.request_id!r} was freed; its handle cannot be used any more")
        return self.row

    @property
    def num_reserved(self) -> int:
        return self._rows.reserved_of[self._live_row()]

    @property
    def num_written(self) -> int:
        return self._rows.written_of[self._live_row()]

    @property
    def num_committed(self) -> int:
        return self._rows.committed_of[self._live_row()]

    @property
    def num_blocks(self) -> int:
        """Blocks per layer group that the sequence spans, dropped ones included."""
        return self._rows.num_blocks_of[self._live_row()]

    @property
    def token_ids(self) -> Int32Array:
        """The token ids known so far (a copy)."""
        with self._rows.lock:
            return self._rows.symbols.decode(self._rows.token_ids(self._live_row()).copy())

    def block_ids(self, group: int = 0) -> Int32Array:
        """The sequence's row of the block table: a read-only view, −1 where a block was given up.

        Views are for immediate use: the next operation on the manager may change them.
        """
        rows = self._rows
        if type(group) is not int or group:  # 0 always exists
            group = as_count(group, "group", maximum=len(rows.groups) - 1)
        row = self.row if self.row >= 0 else self._live_row()
        return rows.visible_blocks(group, row)

    def block_table(self, group: int = 0) -> BlockTable:
        """The block table as plain Python values."""
        return BlockTable(self.block_ids(group).tolist())

    def __repr__(self) -> str:
        if self.row < 0:
            return f"<KVCacheHandle {self.request_id!r} freed>"
        state = " swapped" if self.swapped is not None else ""
        return (
            f"<KVCacheHandle {self.request_id!r} reserved={self.num_reserved} written={self.num_written} "
            f"committed={self.num_committed} blocks={self.num_blocks}{state}>"
        )


def note_sessions(handle: KVCacheHandle, sessions: tuple[str, ...]) -> None:
    """A sequence gets copies of what these sessions computed: when one of them is invalidated, it is concerned."""
    new = [name for name in sessions if name != handle.session and name not in handle.copied_sessions]
    if new:
        handle.copied_sessions = (*handle.copied_sessions, *new)


def is_among(request_id: Hashable, request_ids: Container[Hashable]) -> bool:
    """Whether an id is there; handles, and ids that cannot be compared or do not equal themselves, are refused."""
    if isinstance(request_id, KVCacheHandle):
        raise InvalidArgumentError(
            f"a request id was asked for, got the handle of request {show(request_id.request_id)}; give an id"
        )
    try:
        if request_id == request_id:  # not-a-number does not: nobody could name that request again
            return request_id in request_ids
        error = "it does not equal itself"
    except Exception as raised:
        error = str(raised)
    raise InvalidArgumentError(f"a request id must be hashable and comparable, got {show(request_id)}: {error}")


def row_of(rows: Rows, handle: KVCacheHandle) -> int:
    """The row of a handle: a live one, on the GPU, and of the manager whose rows these are."""
    if type(handle) is KVCacheHandle and handle.row >= 0 and handle.swapped is None and handle._rows is rows:
        return handle.row
    any_row_of(rows, handle)
    raise SequenceStateError(f"request {handle.request_id!r} is swapped out; call swap_in first")


def any_row_of(rows: Rows, handle: KVCacheHandle) -> int:
    """`row_of` for a handle that may be swapped out."""
    if not isinstance(handle, KVCacheHandle):
        raise UnknownRequestError(f"expected a KVCacheHandle from allocate() or fork(), got {handle!r}")
    row = handle.row
    if row < 0:
        raise UnknownRequestError(f"request {handle.request_id!r} was freed; its handle cannot be used any more")
    if handle._rows is not rows:
        raise UnknownRequestError(f"the handle of request {handle.request_id!r} belongs to another manager")
    return row


# --- batches ---------------------------------------------------------------------------------------------------------

_NOT_PREPARED: Int64Array = np.empty(0, np.int64)


class CSRTable(NamedTuple):
    """The blocks of a batch in FlashInfer's form: sequence i has `indices[indptr[i]:indptr[i + 1]]`.

    `last_page_len` is the number of tokens in each sequence's last block. Only blocks that a sequence still holds are
    listed; `first_position` is the position of the first token behind those that it gave up.
    """

    indptr: Int32Array
    indices: Int32Array
    last_page_len: Int32Array
    first_position: Int32Array


def as_handles(handles: Sequence[KVCacheHandle]) -> tuple[KVCacheHandle, ...]:
    """The members of a batch; whether they are live handles is checked where they are used."""
    try:
        return tuple(handles)
    except Exception:
        message = f"a batch is a sequence of handles, got {handles!r}; put a single one in a list"
        raise InvalidArgumentError(message) from None


class SequenceBatch:
    """Handles whose rows are looked up once and used for many steps. Make it with `manager.batch(handles)`.

    A batch stays usable while all of its sequences live; after one of them is freed or swapped out, every use raises
    until a new batch is made.
    """

    __slots__ = (
        *("_checked", "_serials", "_all_rows", "handles", "last_slots", "moves", "ones", "rows", "selection"),
        *("sizes", "slot_steps"),
    )

    def __init__(self, rows: Rows, handles: Sequence[KVCacheHandle]) -> None:
        self._all_rows = rows
        self.handles = as_handles(handles)
        self.rows: Int64Array = np.array([row_of(rows, handle) for handle in self.handles], np.int64)
        if len(set(self.rows.tolist())) != len(self.rows):
            raise InvalidArgumentError("a batch must not hold the same sequence twice; fork it instead")
        # Consecutive rows are addressed by a slice: array operations then work on views instead of copies.
        self.selection: Any = self.rows
        if len(self.rows) and (np.diff(self.rows) == 1).all():
            self.selection = slice(int(self.rows[0]), int(self.rows[-1]) + 1)
        self._serials = rows.serials[self.rows]
        self._checked = rows.moves  # when these were looked at last
        # The slots of the step before, and `SequenceRows.moves` at that time: while it stands, the next slots follow them.
        self.last_slots: Int32Array | None = None
        self.moves = -1
        self.ones = self.sizes = _NOT_PREPARED  # set with the first step, as the next one
        self.slot_steps: Int32Array

    @property
    def num_committed(self) -> Int64Array:
        """The committed tokens of each sequence."""
        return self._all_rows.committed[self.rows]

    def __len__(self) -> int:
        return len(self.handles)

    def __iter__(self) -> Iterator[KVCacheHandle]:
        return iter(self.handles)

    def refresh(self) -> None:
        """Checks that all sequences still live on the GPU (only after something ended or moved)."""
        rows = self._all_rows
        if rows.moves != self._checked:
            if (rows.serials[self.rows] != self._serials).any():
                for handle in self.handles:
                    row_of(rows, handle)  # raises for the one that ended
            self._checked = rows.moves

    def lengths(self) -> Int64Array:
        """Reserved tokens of each sequence (a copy)."""
        with self._all_rows.lock:
            self.refresh()
            lengths: Int64Array = self._all_rows.reserved[self.selection].copy()
            return lengths

    def padded_table(self, group: int = 0, out: Int32Array | None = None) -> Int32Array:
        """Block ids, one row per sequence, -1 behind the last block and where a block was given up.

        Without `out`, a full-attention group with consecutive rows gives a read-only view of the manager's own table:
        valid until the next operation. `out` receives a copy and must have enough columns.
        """
        with self._all_rows.lock:
            self.refresh()
            rows = self._all_rows
            kind = chosen_group(rows.groups, group)
            counts = kind.pick(rows.num_blocks, rows.num_fixed)
            columns = largest(counts[self.selection]) if len(self.rows) else 0
            table = rows.tables[group]
            if out is not None:
                _check_out(out, (len(self.rows), columns), "a padded table", exact=False)
                out[:, columns:] = -1
                target = out[:, :columns]
                target[...] = table[self.selection, :columns]
            else:
                target = table[self.selection, :columns]  # an array of its own, whose memory may be the table's
            if kind.by_block:
                target = target if out is not None else target.copy()
                starts = rows.first_held[group][self.selection][:, None]
                target[kind.hidden(np.arange(columns), starts)] = -1
            elif out is None:
                target.setflags(write=False)
            return out if out is not None else target

    def csr(
        self,
        group: int = 0,
        *,
        indptr: Int32Array | None = None,
        indices: Int32Array | None = None,
        last_page_len: Int32Array | None = None,
    ) -> CSRTable:
        """The batch's blocks in CSR form, into the given arrays where there are any (`indices` may be longer)."""
        with self._all_rows.lock:
            self.refresh()
            rows = self._all_rows
            size = rows.block_size
            kind = chosen_group(rows.groups, group)
            count = len(self.rows)
            lengths = kind.lengths(rows, self.selection, self.handles)
            ends = (lengths + (size - 1)) // size
            table = rows.tables[group]
            columns = int(ends.max()) if count else 0
            column = np.arange(columns)
            held = column < ends[:, None]
            first = np.zeros(count, np.int32)
            sizes = ends
            if kind.by_block:
                starts = rows.first_held[group][self.selection]
                held &= ~kind.hidden(column, starts[:, None])
                sizes = held.sum(axis=1)
                first = (np.maximum(starts, kind.sinks) * size).astype(np.int32)
            indptr = _array(indptr, count + 1, "indptr")
            indptr[0] = 0
            np.cumsum(sizes, out=indptr[1:])
            total = int(indptr[-1])
            picked = table[self.selection, :columns][held]
            if indices is None:
                indices = picked
            else:
                _check_out(indices, (total,), "indices", exact=False)
                indices[:total] = picked
            last_page_len = _array(last_page_len, count, "last_page_len")
            np.subtract(lengths, (ends - 1) * size, out=last_page_len, casting="unsafe")
            last_page_len[lengths == 0] = 0
            return CSRTable(indptr, indices, last_page_len, first)


def _array(out: Int32Array | None, length: int, name: str) -> Int32Array:
    if out is None:
        return np.empty(length, np.int32)
    _check_out(out, (length,), name, exact=True)
    return out


def _check_out(out: npt.NDArray[Any], shape: tuple[int, ...], name: str, exact: bool) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != np.int32:
        raise InvalidArgumentError(
            f"the array for {name} must be int32, got {getattr(out, 'dtype', type(out).__name__)}"
        )
    fits = (
        out.shape == shape
        if exact
        else len(out.shape) == len(shape) and out.shape[:-1] == shape[:-1] and out.shape[-1] >= shape[-1]
    )
    if not fits:
        raise InvalidArgumentError(f"the array for {name} has shape {out.shape}, needed is {shape}")


def chosen_group(groups: Sequence[GroupT], index: Any) -> GroupT:
    """The layer group of a user's choice."""
    return groups[as_count(index, "group", maximum=len(groups) - 1)]
