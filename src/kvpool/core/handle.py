"""A live sequence as its user sees it: its handle and its block table."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

from kvpool.checks import as_count, show
from kvpool.core.node import Node
from kvpool.core.retention import Retention
from kvpool.core.rows import SequenceRows
from kvpool.errors import InvalidArgumentError, UnknownRequestError
from kvpool.pools.arrays import Int32Array
from kvpool.scope import ReuseScope
from kvpool.stats import HandleStats


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


@dataclass(slots=True)
class SwappedBlocks:
    """Where a swapped-out sequence keeps its data: host block ids per group and column, -1 where there is none."""

    ids: list[Int32Array]


Rows: TypeAlias = SequenceRows[Node, "KVCacheHandle"]
GivenHandle: TypeAlias = "KVCacheHandle"  # as a caller gave it: `Cache` refuses what is no live handle of its own


_INHERITED = (  # what a fork has in common with its parent
    *("retention", "ttl", "session", "copied_sessions", "publishes", "is_lease", "family"),
    *("num_fixed_tokens", "num_cached_fixed_tokens", "num_prompt_tokens", "num_matched_tokens"),
)


class KVCacheHandle:
    """One live sequence: made by `allocate` or `fork`, used with the manager's verbs, ended by `free`.

    Lengths, in tokens: `num_reserved` have a place, `num_written` of them have their keys and values written, and
    `num_committed` of these are final: their full blocks can be found by other requests.
    """

    __slots__ = (
        "_rows",
        "_stats",
        "copied_sessions",
        "num_fixed_tokens",
        "family",
        "hint",
        "inflight",
        "is_lease",
        "last_logits",
        "num_cached_blocks",
        "num_cached_fixed_tokens",
        "num_cached_tokens",
        "num_partial_tokens",
        "num_prompt_tokens",
        "num_matched_tokens",
        "publishes",
        "request_id",
        "retention",
        "row",
        "scope",
        "serial",
        "session",
        "swapped",
        "ttl",
    )

    def __init__(self, rows: Rows, request_id: Hashable, scope: ReuseScope) -> None:
        self._rows = rows
        self.request_id = request_id
        self.scope = scope
        self.row = -1
        self.retention: Retention | None = None
        self.ttl: float | None = None
        self.session: str | None = None
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
        self.swapped: SwappedBlocks | None = None
        self._stats: HandleStats | None = None

    @property
    def stats(self) -> HandleStats:
        """What this request cost and what it got from the cache."""
        if self._stats is None:
            self._stats = HandleStats(
                self.num_prompt_tokens, self.num_cached_tokens, partial_tokens=self.num_partial_tokens
            )
        return self._stats

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

    def begin_fork(self, request_id: Hashable) -> KVCacheHandle:
        """The handle of a fork, which has no row yet: all that is written was computed for its parent."""
        child = KVCacheHandle(self._rows, request_id, self.scope)
        for name in _INHERITED:
            setattr(child, name, getattr(self, name))
        child.num_cached_tokens = self._rows.written_of[self.row]
        child.num_cached_blocks = child.num_cached_tokens // self._rows.block_size
        return child

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
