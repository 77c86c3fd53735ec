"""Rows of the host that running requests hold: those that their pages were copied to, and a few for their next blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.errors import OutOfBlocksError
from kvpool.integrations.connector.tracked_request import Saving, TrackedRequest
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array
from kvpool.sequences.handle import KVCacheHandle

_SHARE = 4  # rows that are held are at most the host's divided by this, unless something is on its way to them
_AHEAD = 8  # blocks that a request has rows for before it fills them


class HeldRows:
    """Takes rows, many at a time, and lets go of them."""

    def __init__(self, manager: KVCacheManager, block_size: int, num_rows: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._most = num_rows // _SHARE
        self._all: dict[int, Saving] = {}  # by id
        self._num_rows = 0  # of all of them

    def take(self, tracked: TrackedRequest, tokens: Int32Array) -> KVCacheHandle:
        """Holds what the host has of a prefix, and rows for the rest; `OutOfBlocksError` if that cannot be."""
        return take_rows(self._manager, tracked, tokens, len(tokens), self.make_room)

    def keep(self, tracked: TrackedRequest, handle: KVCacheHandle) -> Saving:
        """The rows of a request that goes on."""
        found = handle.num_cached_blocks
        saving = Saving(tracked, handle, found, found, handle.block_ids().tolist())
        self._all[id(saving)] = saving
        self._num_rows += len(saving.rows)
        tracked.saving = saving
        return saving

    def grow(self, growing: Sequence[tuple[Saving, int]]) -> None:
        """Rows for so many blocks; a request that cannot have them stays as it is."""
        short = {id(saving): last for saving, last in growing if last > len(saving.rows)}
        if not short:
            return
        ahead = min(_AHEAD, self._most // (2 * len(self._all)))
        wanted = {key: last + ahead for key, last in short.items()}
        for key, saving in self._all.items():  # others that will soon be short get theirs in the same call
            if key not in wanted and not saving.is_spoiled and len(saving.rows) < saving.num_ordered + ahead // 2:
                wanted[key] = saving.num_ordered + ahead
        try:
            self._extend(wanted)
        except OutOfBlocksError:
            self._grow_each(short)

    def _grow_each(self, short: dict[int, int]) -> None:
        """Only what is needed now, one by one: a request that cannot have its rows must not stop the others."""
        self.make_room({*short})
        for key, last in short.items():
            try:
                self._extend({key: last})
            except OutOfBlocksError:
                continue

    def _extend(self, wanted: dict[int, int]) -> None:
        chosen = [(self._all[key], last) for key, last in wanted.items()]
        counts = [(last - len(saving.rows)) * self._block_size for saving, last in chosen]
        self._manager.extend_batch([saving.handle for saving, _ in chosen], counts)
        for saving, last in chosen:
            have = len(saving.rows)
            saving.rows += saving.handle.block_ids()[have:last].tolist()
            self._num_rows += last - have

    def rest(self, saving: Saving) -> None:
        """If nothing is on its way any more, the rows are kept for the request's next block, or let go."""
        if saving.num_jobs:
            return
        if saving.owner.is_over or saving.is_spoiled:
            self._free(saving)
            if saving.is_spoiled:
                saving.owner.num_seen = 0  # the pages are looked at again, and computed again where they were wrong
        elif self._num_rows > self._most:
            self.make_room()

    def make_room(self, spared: frozenset[int] | set[int] = frozenset()) -> bool:
        """Lets go of all rows that nothing is on its way to; whether there were any."""
        idle = [saving for key, saving in self._all.items() if not saving.num_jobs and key not in spared]
        for saving in idle:
            self._free(saving)
        return bool(idle)

    def _free(self, saving: Saving) -> None:
        del self._all[id(saving)]
        self._num_rows -= len(saving.rows)
        self._manager.free(saving.handle)
        saving.owner.saving = None


def take_rows(
    manager: KVCacheManager,
    tracked: TrackedRequest,
    tokens: Int32Array,
    num_reserved: int,
    make_room: Callable[[], bool],
) -> KVCacheHandle:
    """Holds what the host has of a request's first tokens, and rows up to `num_reserved` tokens.

    As long as there are too few rows and `make_room` gives some back it tries again; then it raises `OutOfBlocksError`.
    """
    while True:
        try:
            return manager.allocate(
                object(),
                tokens,
                scope=tracked.scope,
                reserve=num_reserved,
                lease=True,
                multimodal=tracked.items_within(len(tokens)),
                retention=tracked.wishes.retention(),
                ttl=tracked.wishes.ttl,
            )
        except OutOfBlocksError:
            if not make_room():
                raise
