"""A disk tier against a dictionary: whatever is called in whatever order, a value that comes back is the one stored.

What is in the dictionary may be missing on the disk only because room was short; what is not in it must never be found.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.testing import Kept, key, value
from kvpool.tiers import DiskTier, Outcome
from kvpool.tiers.disk import slab as rows
from kvpool.tiers.disk.buffers import BUFFERS_PER_THREAD
from kvpool.tiers.transport.staging import page_aligned

NUMBERS = st.lists(st.integers(0, 60), min_size=1, max_size=12)
SIZES = (100, 5_000, 5_500, 8_192, 30_000, 33_000, 120_000)


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


class DiskTierMachine(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([2**20, 2**21, 2**24]), threads=st.integers(1, 3))
    def begin(self, capacity: int, threads: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.capacity, self.threads = capacity, threads
        self.stored: set[int] = set()
        self.open()

    def open(self) -> None:
        self.tier = DiskTier(self.folder, self.capacity, io_threads=self.threads, timeout=60)
        assert self.tier.notes == []

    @rule(numbers=NUMBERS)
    def store(self, numbers: list[int]) -> None:
        outcomes = self.tier.store([key(i) for i in numbers], [value(i, size_of(i)) for i in numbers])
        assert set(outcomes) <= {Outcome.OK, Outcome.REFUSED}
        if self.capacity == 2**24:
            assert set(outcomes) == {Outcome.OK}
        self.stored |= {number for number, outcome in zip(numbers, outcomes, strict=True) if outcome == Outcome.OK}

    @rule(numbers=NUMBERS, is_kept=st.booleans())
    def load(self, numbers: list[int], is_kept: bool) -> None:
        out = [page_aligned(size_of(number)) for number in numbers]
        found = self.tier.contains([key(number) for number in numbers])
        kept = Kept()
        outcomes = self.tier.load([key(number) for number in numbers], out, keeper=kept if is_kept else None)
        assert kept.users == 0
        assert [outcome == Outcome.OK for outcome in outcomes] == found
        for number, outcome, content in zip(numbers, outcomes, out, strict=True):
            assert outcome == (Outcome.OK if outcome == Outcome.OK else Outcome.MISS)
            if outcome == Outcome.OK:
                assert number in self.stored
                assert content.tobytes() == value(number, size_of(number))
            else:
                assert self.capacity < 2**24 or number not in self.stored

    @rule(numbers=NUMBERS)
    def remove(self, numbers: list[int]) -> None:
        found = self.tier.contains([key(number) for number in set(numbers)])
        outcomes = self.tier.remove([key(number) for number in numbers])
        assert outcomes.count(Outcome.OK) == sum(found)
        self.stored -= set(numbers)

    @rule()
    def reopen(self) -> None:
        before = self.tier.stats()
        self.tier.close()
        self.open()
        after = self.tier.stats()
        assert (after.num_values, after.used_bytes) == (before.num_values, before.used_bytes)

    @rule()
    def reopen_without_the_index(self) -> None:
        before = self.tier.contains([key(number) for number in range(61)])
        self.tier.close()
        for path in self.folder.glob("*.kvindex"):
            path.unlink()
        self.tier = DiskTier(self.folder, self.capacity, io_threads=self.threads, timeout=60)
        after = self.tier.contains([key(number) for number in range(61)])
        assert all(now for was, now in zip(before, after, strict=True) if was)
        self.stored |= {number for number, now in enumerate(after) if now}

    @invariant()
    def the_files_stay_below_the_capacity(self) -> None:
        if hasattr(self, "folder"):
            assert sum(path.stat().st_size for path in self.folder.iterdir()) <= self.capacity + 64

    @invariant()
    def slots_are_free_or_found_and_never_both(self) -> None:
        if hasattr(self, "tier"):
            catalog = self.tier._state.catalog
            held = sum(int(rows.is_held(slab.records).sum()) for slab in catalog.slabs.values())
            free = sum(len(size.free) for size in catalog.classes.values())
            assert held == len(catalog)
            assert held + free == sum(slab.num_slots for slab in catalog.slabs.values())
            used = sum(int(rows.is_held(slab.records).sum()) * slab.slot_bytes for slab in catalog.slabs.values())
            assert used == catalog.used_bytes
            assert all(not slab.num_writing and not slab.num_jobs for slab in catalog.slabs.values())
            assert self.tier._workers._buffers.qsize() == BUFFERS_PER_THREAD * self.threads
            assert self.tier._storing._waiting == {}
            assert np.unique([place for size in catalog.classes.values() for place in size.free]).size == free

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
            shutil.rmtree(self.folder)


TestDiskTier = DiskTierMachine.TestCase
TestDiskTier.settings = settings(
    max_examples=max(5, settings().max_examples // 8), stateful_step_count=25, deadline=None
)
