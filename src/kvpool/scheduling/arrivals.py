"""What is on its way to the GPU: blocks that planned copies bring from a lower tier, until the engine says they are there.

A sequence that reads such blocks would make the whole step wait for them, and everybody in it. It is held back instead: it
has its memory and its lane, and joins the first step behind the landing. Where nothing else is left to compute, it joins at
once, and the device waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvpool.config import Tier
from kvpool.pools.arrays import Int32Array
from kvpool.pools.pool import CopyOp
from kvpool.scheduling.request import ScheduledSequence
from kvpool.sequences.handle import KVCacheHandle


class _Held(NamedTuple):
    """A sequence that waits."""

    plans: frozenset[int]  # that bring its blocks
    decodes: bool  # how it goes on: it decodes, or its prompt does


class Arrivals:
    """Blocks on their way, by the number of the plan whose copies bring them, and the sequences that wait for them."""

    def __init__(self) -> None:
        self._incoming: dict[int, list[tuple[int, Int32Array]]] = {}  # plan -> (layer group, blocks)
        self._held: dict[ScheduledSequence, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def note(self, number: int, copies: Iterable[CopyOp]) -> None:
        """The copies of a plan: some may bring blocks from a lower tier."""
        found = [(op.group, op.dst) for op in copies if op.dst_tier == Tier.GPU != op.src_tier]
        if found:
            self._incoming.setdefault(number, []).extend(found)

    def landed(self, number: int) -> None:
        """The copies of a plan are done."""
        self._incoming.pop(number, None)

    def hold_back(self, sequence: ScheduledSequence, *, decodes: bool) -> bool:
        """Holds a sequence back if one of its blocks is on its way; whether it is."""
        handle = sequence.live_handle()
        plans = frozenset(number for number, parts in self._incoming.items() if _reads(handle, parts))
        if plans:
            self._held[sequence] = _Held(plans, decodes)
        return bool(plans)

    def take_landed(self) -> dict[ScheduledSequence, bool]:
        """Lets go of the sequences whose blocks are there now, and says which of them decode."""
        return self._take(lambda held: held.plans.isdisjoint(self._incoming))

    def take_next(self) -> dict[ScheduledSequence, bool]:
        """Lets go of the sequences whose blocks were planned first: they should be there first."""
        first = min((max(held.plans) for held in self._held.values()), default=0)
        return self._take(lambda held: max(held.plans) == first)

    def _take(self, chosen: Callable[[_Held], bool]) -> dict[ScheduledSequence, bool]:
        taken = {sequence: held.decodes for sequence, held in self._held.items() if chosen(held)}
        for sequence in taken:
            del self._held[sequence]
        return taken

    def discard(self, sequence: ScheduledSequence) -> None:
        """A sequence leaves the GPU."""
        self._held.pop(sequence, None)


def _reads(handle: KVCacheHandle, parts: list[tuple[int, Int32Array]]) -> bool:
    return any(bool(np.isin(handle.block_ids(group), blocks).any()) for group, blocks in parts)
