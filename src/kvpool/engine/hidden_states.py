"""What the model's last layer computed for the newest tokens of each sequence. MTP layers read it beside the next token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvpool.pools.arrays import Int64Array, within
from kvpool.scheduling import BatchPlan, ScheduledSequence
from kvpool.storage.moving import upload


class HiddenStates:
    """Hidden states of the last `length` tokens of each lane, and of all tokens of the newest step.

    They are kept on the device, in one tensor: a ring for each lane, zeros, then the step. They are not part of the cache:
    those of a prefix that was found there, swapped in or forked are unknown, and count as zeros.
    """

    def __init__(self, num_lanes: int, length: int, num_tokens: int, size: int, like: Tensor) -> None:
        self._length = length
        self._zeros = num_lanes * length
        self._memory = torch.zeros(self._zeros + 1 + num_tokens, size, dtype=like.dtype, device=like.device)
        self.step = self._memory[self._zeros + 1 :]  # the runner of the model writes those of a step here
        self._owners: list[tuple[ScheduledSequence, int] | None] = [None] * num_lanes  # and their residence
        self._first = np.zeros(num_lanes, np.int64)  # the first token of each owner that a step computed
        self._stop = np.zeros(num_lanes, np.int64)  # behind the last one
        self._plan: BatchPlan | None = None  # the newest step, while only `step` has its states

    def begin(self, plan: BatchPlan) -> None:
        """A step was launched: its states are in `step`."""
        self._plan = plan
        starts = self._starts(plan)
        for row, (sequence, lane) in enumerate(zip(plan.sequences, plan.lanes.tolist(), strict=True)):
            if self._owners[lane] != (owner := (sequence, sequence.residence)):
                self._owners[lane] = owner
                self._first[lane] = self._stop[lane] = starts[row]

    def end(self) -> None:
        """Keeps the newest states of the step, before the next one overwrites it."""
        plan, length = self._plan, self._length
        assert plan is not None
        counts = np.diff(plan.query_start)
        tokens = np.flatnonzero(np.repeat(counts, counts) - within(counts) <= length)
        places = np.repeat(plan.lanes, counts)[tokens] * length + plan.positions[tokens] % length
        chosen, to = upload(np.stack([tokens, places]), self._memory.device)
        self._memory.index_copy_(0, to, self.step.index_select(0, chosen))
        self._stop[plan.lanes] = plan.kv_lengths
        self._plan = None

    def first(self, sequence: ScheduledSequence, position: int) -> int:
        """The first token of a sequence whose predecessor's state can be given, or that nobody has computed before.

        `position` is the next token to compute.
        """
        lane = sequence.lane
        if self._owners[lane] != (sequence, sequence.residence):
            return position
        return int(max(self._first[lane], self._stop[lane] - self._length + 1))

    def before(self, sequence: ScheduledSequence, first: int, stop: int, row: int | None = None) -> Int64Array:
        """Where `read` finds the state of the predecessor of each token `first..stop` of a sequence.

        `row` is that of the sequence in the newest step.
        """
        lane, positions = sequence.lane, np.arange(first - 1, stop - 1)
        found = lane * self._length + positions % self._length
        if self._owners[lane] != (sequence, sequence.residence):
            return np.full_like(found, self._zeros)
        if row is not None and self._plan is not None:
            offset = self._zeros + 1 + self._plan.query_start[row] - self._starts(self._plan)[row]
            found = np.where(positions >= self._starts(self._plan)[row], positions + offset, found)
        return np.where(positions < self._first[lane], self._zeros, found)

    def read(self, places: Int64Array, into: Tensor) -> None:
        """Copies states from where `before` found them."""
        torch.index_select(self._memory, 0, upload(places, self._memory.device), out=into[: len(places)])

    @staticmethod
    def _starts(plan: BatchPlan) -> Int64Array:
        starts: Int64Array = plan.kv_lengths - np.diff(plan.query_start)
        return starts
