"""The sequences on the GPU: arrays with what every step reads of them, and the batch that decodes.

A running sequence has a lane: a small number that indexes these arrays and stays the same while the sequence runs.

Planned copies may still be bringing blocks from a lower tier (`Arrivals`). A sequence that reads such blocks would make the
whole step wait. It is held back instead: it has its memory and its lane, and joins the first step after the copies are done.
If no other sequence computes anything, it joins at once, and the device waits for the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvpool.config import Tier
from kvpool.core.handle import KVCacheHandle, SequenceBatch
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array
from kvpool.pools.pool import CopyOp
from kvpool.scheduling.request import NO_TOKENS, ScheduledSequence, SequenceState, joined


class _HeldBack(NamedTuple):
    """What a sequence waits for, and what it does then."""

    plans: frozenset[int]  # whose copies bring its blocks
    decodes: bool  # it decodes next; otherwise the rest of its prompt is computed


class Arrivals:
    """Blocks that are being copied to the GPU, by the number of the plan that copies them, and who waits for them."""

    def __init__(self) -> None:
        self._incoming: dict[int, list[tuple[int, Int32Array]]] = {}  # plan -> (layer group, blocks)
        self._held: dict[ScheduledSequence, _HeldBack] = {}

    def __len__(self) -> int:
        return len(self._held)

    def note(self, number: int, copies: Iterable[CopyOp]) -> None:
        """Remembers the blocks that the copies of a plan bring from a lower tier."""
        found = [(op.group, op.dst) for op in copies if op.dst_tier == Tier.GPU != op.src_tier]
        if found:
            self._incoming.setdefault(number, []).extend(found)

    def landed(self, number: int) -> None:
        """The copies of a plan are done."""
        self._incoming.pop(number, None)

    def hold_back(self, sequence: ScheduledSequence, *, decodes: bool) -> bool:
        """Holds a sequence back if one of its blocks is still being copied. Returns whether it does."""
        handle = sequence.live_handle()
        plans = frozenset(number for number, parts in self._incoming.items() if _reads(handle, parts))
        if plans:
            self._held[sequence] = _HeldBack(plans, decodes)
        return bool(plans)

    def take_landed(self) -> dict[ScheduledSequence, bool]:
        """Releases the sequences whose blocks have arrived, and says which of them decode."""
        return self._take(lambda held: held.plans.isdisjoint(self._incoming))

    def take_next(self) -> dict[ScheduledSequence, bool]:
        """Releases the sequences whose copies were planned first: their blocks should arrive first."""
        first = min((max(held.plans) for held in self._held.values()), default=0)
        return self._take(lambda held: max(held.plans) == first)

    def _take(self, chosen: Callable[[_HeldBack], bool]) -> dict[ScheduledSequence, bool]:
        taken = {sequence: held.decodes for sequence, held in self._held.items() if chosen(held)}
        for sequence in taken:
            del self._held[sequence]
        return taken

    def discard(self, sequence: ScheduledSequence) -> None:
        """A sequence leaves the GPU."""
        self._held.pop(sequence, None)


def _reads(handle: KVCacheHandle, parts: list[tuple[int, Int32Array]]) -> bool:
    return any(bool(np.isin(handle.block_ids(group), blocks).any()) for group, blocks in parts)


class Lanes:
    """Arrays with one entry per lane, so that a step of the whole batch is a few array operations."""

    def __init__(self, num_lanes: int) -> None:
        self.last_token: Int32Array = np.zeros(num_lanes, np.int32)  # the newest sample that came back: the next input
        self.generated: Int64Array = np.zeros(num_lanes, np.int64)  # samples that came back
        self.in_flight: Int64Array = np.zeros(num_lanes, np.int64)  # samples that plans in flight will bring
        self.limit: Int64Array = np.zeros(num_lanes, np.int64)  # max_new_tokens
        self.places: Int64Array = np.zeros(num_lanes, np.int64)  # tokens with a place, the next position to compute
        self.promised: Int64Array = np.zeros(num_lanes, np.int64)  # tokens it was promised places for
        self.spare_blocks: Int64Array = np.zeros(num_lanes, np.int64)  # promised on top: copies for samples to come
        self.samples: Int64Array = np.ones(num_lanes, np.int64)  # how many the next step that samples takes
        self.stops: Int64Array = np.full((num_lanes, 0), -1, np.int64)
        self._free = list(range(num_lanes - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: ScheduledSequence) -> int:
        """A lane for a sequence that enters the GPU."""
        lane = self._free.pop()
        request = sequence.request
        self.last_token[lane] = sequence.tokens[-1]
        self.generated[lane] = len(sequence.tokens) - len(request.prompt)
        self.in_flight[lane] = 0
        self.limit[lane] = request.max_new_tokens
        self.samples[lane] = 1 if sequence.group.branched else request.n
        stops = sorted(request.stop_ids)
        if len(stops) > self.stops.shape[1]:
            more = np.full((len(self.stops), len(stops) - self.stops.shape[1]), -1, np.int64)
            self.stops = np.concatenate([self.stops, more], axis=1)
        self.stops[lane] = -1
        self.stops[lane, : len(stops)] = stops
        return lane

    def give(self, lane: int) -> None:
        """A sequence left the GPU."""
        self.promised[lane] = self.places[lane] = self.spare_blocks[lane] = 0
        self._free.append(lane)

    def has_its_last_in_flight(self, lanes: Int64Array) -> BoolArray:
        """Which of these lanes need no further step."""
        last: BoolArray = self.generated[lanes] + self.in_flight[lanes] >= self.limit[lanes]
        return last

    def ended(self, lanes: Int64Array, tokens: Int32Array) -> BoolArray:
        """Which of these lanes are complete now that `tokens` are their newest samples."""
        done = self.generated[lanes] >= self.limit[lanes]
        if self.stops.shape[1]:
            done |= (self.stops[lanes] == tokens[:, None]).any(axis=1)
        return done


class DecodeSet:
    """Sequences that get one token in every step. Its batch is made anew only when a sequence joins or leaves."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._members: dict[ScheduledSequence, None] = {}
        self._rows: tuple[ScheduledSequence, ...] | None = None
        self._places: list[tuple[KVCacheHandle, int, int]] = []  # of the batch: handles, their rows, lanes
        self._lanes: Int64Array = np.empty(0, np.int64)
        self._batch: SequenceBatch | None = None

    def add(self, sequence: ScheduledSequence) -> None:
        self._members[sequence] = None
        self._rows = None

    def discard(self, sequence: ScheduledSequence) -> None:
        if sequence in self._members:
            del self._members[sequence]
            self._rows = None

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: ScheduledSequence) -> bool:
        return sequence in self._members

    def rows(self) -> tuple[tuple[ScheduledSequence, ...], Int64Array, SequenceBatch]:
        """The members in the order of the batch, their lanes, and the batch."""
        if self._rows is None or self._batch is None:
            # In the order of the manager's rows: neighbouring rows are addressed as slices.
            members = sorted(self._members, key=lambda sequence: sequence.live_handle().row)
            places = [(handle := each.live_handle(), handle.row, each.lane) for each in members]
            if self._batch is None or self._places != places:  # sequences with drafts leave for a step and come back
                _, self._lanes, self._batch = make_rows(self._manager, members)
            self._rows, self._places = tuple(members), places
        return self._rows, self._lanes, self._batch


def make_rows(
    manager: KVCacheManager, sequences: list[ScheduledSequence]
) -> tuple[tuple[ScheduledSequence, ...], Int64Array, SequenceBatch]:
    """Sequences, their lanes, and a batch of their handles."""
    lanes = np.array([sequence.lane for sequence in sequences], np.int64)
    return tuple(sequences), lanes, manager.batch([sequence.live_handle() for sequence in sequences])


class Running:
    """The sequences on the GPU. Some decode, some compute their prompt, some wait for a sample or for blocks."""

    def __init__(self, manager: KVCacheManager, max_sequences: int) -> None:
        self.arrivals: Arrivals | None = None  # None unless the engine reports when copies are done
        self.lanes = Lanes(max_sequences)
        self.members: dict[ScheduledSequence, None] = {}
        self.decoding = DecodeSet(manager)
        self.prefilling: dict[ScheduledSequence, None] = {}
        self.departures = 0  # grows whenever a sequence leaves: rows of plans made before may be stale
        self.lanes_kept = 0  # lanes promised to samples that are not forked yet
        self.proposals: set[ScheduledSequence] = set()  # those with drafts for the next step
        self.recomputing: set[ScheduledSequence] = set()  # those whose next step computes accepted drafts again

    def __len__(self) -> int:
        return len(self.members)

    @property
    def num_free_lanes(self) -> int:
        return self.lanes.num_free - self.lanes_kept

    def enter(self, sequence: ScheduledSequence, handle: KVCacheHandle, num_places: int) -> None:
        """A sequence has blocks on the GPU now."""
        sequence.handle = handle
        sequence.lane = lane = self.lanes.take(sequence)
        sequence.state = SequenceState.RUNNING
        self.lanes.places[lane] = num_places
        self.members[sequence] = None
        if not sequence.group.branched:
            self.lanes_kept += sequence.request.n - 1

    def leave(self, sequence: ScheduledSequence) -> None:
        """A sequence leaves the GPU; it remembers its tokens and what is still in flight."""
        lane = sequence.lane
        sequence.tokens = self.known_tokens(sequence)
        sequence.in_flight = int(self.lanes.in_flight[lane])
        sequence.lane = -1
        sequence.residence += 1
        sequence.drafts, sequence.accepted = None, NO_TOKENS
        self.proposals.discard(sequence)
        self.recomputing.discard(sequence)
        sequence.num_drafts_in_flight = 0
        del self.members[sequence]
        self.decoding.discard(sequence)
        self.prefilling.pop(sequence, None)
        if self.arrivals is not None:
            self.arrivals.discard(sequence)
        self.lanes.give(lane)
        self.departures += 1
        if not sequence.group.branched:
            self.lanes_kept -= sequence.request.n - 1

    def begin(self, sequence: ScheduledSequence, *, decodes: bool) -> None:
        """From here on, a sequence with blocks on the GPU decodes, or computes the rest of its prompt."""
        if decodes:
            self.decoding.add(sequence)
        else:
            self.prefilling[sequence] = None

    def branch(self, sequence: ScheduledSequence) -> None:
        """The samples of a running sequence go separate ways from here on."""
        sequence.group.branched = True
        self.lanes.samples[sequence.lane] = 1
        self.lanes_kept -= sequence.request.n - 1

    def known_tokens(self, sequence: ScheduledSequence) -> Int32Array:
        """Prompt and samples of a running sequence, without the samples in flight."""
        request, lane = sequence.request, sequence.lane
        total = len(request.prompt) + int(self.lanes.generated[lane])
        if total == len(sequence.tokens):
            return sequence.tokens
        stored = sequence.live_handle().token_ids  # all but the newest sample, and drafts that are computed again
        accepted = sequence.accepted
        return joined(stored[: total - 1 - len(accepted)], accepted, [self.lanes.last_token[lane]])

    def put_aside(self, sequence: ScheduledSequence, accepted: Int32Array) -> None:
        """Notes which accepted drafts of a running sequence its next step computes again."""
        sequence.accepted = accepted
        (self.recomputing.add if len(accepted) else self.recomputing.discard)(sequence)
