"""The contract of key-addressed tiers as tests: derive `TierContract` in a pytest file and make your tier in `make_tier`.

class TestMyTier(TierContract):
    def make_tier(self, tmp_path):
        return MyTier(tmp_path)
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.scope import ReuseScope
from kvpool.tiers import KeyedTier, KeyPattern, Outcome, Slots
from kvpool.tiers.keys import scope_tag
from kvpool.tiers.transport.staging import page_aligned

VALUE_BYTES = 5000  # no power of two, no multiple of a sector


def key(number: int) -> bytes:
    """A key like those of a model: 32 bytes that look random."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def value(number: int, size: int = VALUE_BYTES) -> bytes:
    """A value that no other number has."""
    return np.random.default_rng(number).bytes(size)


def load(tier: KeyedTier, numbers: list[int], size: int = VALUE_BYTES) -> tuple[list[Outcome], list[bytes]]:
    """Outcomes and contents of the buffers."""
    out = [bytearray(size) for _ in numbers]
    return tier.load([key(number) for number in numbers], out), [bytes(buffer) for buffer in out]


def store(tier: KeyedTier, numbers: list[int], size: int = VALUE_BYTES) -> list[Outcome]:
    """Stores the values of numbers."""
    return tier.store([key(number) for number in numbers], [value(number, size) for number in numbers])


class Written:
    """A `Source` of the values of numbers."""

    def __init__(self, numbers: list[int], size: int = VALUE_BYTES) -> None:
        self.written: list[int] = []
        self._numbers, self._size = numbers, size

    def write(self, slots: Slots) -> None:
        """Copies values into slots."""
        for at, view in zip(slots.numbers, slots.views, strict=True):
            view[:] = value(self._numbers[at], self._size)
            self.written.append(self._numbers[at])

    def is_in(self, slots: Slots) -> bool:
        """Compares slots with the values."""
        pairs = zip(slots.numbers, slots.views, strict=True)
        return all(view == value(self._numbers[at], self._size) for at, view in pairs)


class Kept:
    """A `Keeper` that counts the writers that may still use its memory."""

    def __init__(self) -> None:
        self.users = 0
        self._changed = threading.Condition()

    def share(self) -> None:
        """One more writer."""
        with self._changed:
            self.users += 1

    def release(self) -> None:
        """One writer less."""
        with self._changed:
            self.users -= 1
            self._changed.notify_all()

    def wait_until_unused(self, seconds: float) -> bool:
        """Waits until nobody writes any more, at most so many seconds; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.users, seconds)


class TierContract:
    """What every key-addressed tier must do. The tier must have room for at least 200 values of 5,000 bytes."""

    def make_tier(self, tmp_path: Path) -> KeyedTier:
        """A new, empty tier."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path):  # type: ignore[no-untyped-def]  # a generator fixture
        made = self.make_tier(tmp_path)
        yield made
        made.close()

    def test_given_an_empty_tier_then_nothing_is_there(self, tier: KeyedTier) -> None:
        assert tier.contains([key(1), key(2)]) == [False, False]
        assert tier.contains_prefix([key(1)]) == 0
        assert load(tier, [1])[0] == [Outcome.MISS]
        assert tier.remove([key(1)]) == [Outcome.MISS]

    def test_given_stored_values_then_they_come_back_byte_for_byte(self, tier: KeyedTier) -> None:
        numbers = list(range(20))
        assert store(tier, numbers) == [Outcome.OK] * 20
        outcomes, found = load(tier, numbers)
        assert outcomes == [Outcome.OK] * 20
        assert found == [value(number) for number in numbers]

    def test_given_a_loan_then_its_views_are_what_was_stored_and_misses_are_empty(self, tier: KeyedTier) -> None:
        store(tier, [1, 3])
        loan = tier.lend([key(number) for number in (1, 2, 3)], [VALUE_BYTES] * 3)
        if loan is None:  # it has no memory that callers can read
            return
        assert loan.outcomes == [Outcome.OK, Outcome.MISS, Outcome.OK]
        assert [bytes(view) for view in loan.views] == [value(1), b"", value(3)]
        assert loan.is_held()
        loan.release()

    def test_given_values_that_the_caller_writes_then_they_come_back_and_those_that_are_there_are_not_written(
        self, tier: KeyedTier
    ) -> None:
        store(tier, [2])
        numbers = [1, 2, 3, 1]
        source = Written(numbers)
        outcomes = tier.store_straight([key(number) for number in numbers], [VALUE_BYTES] * 4, source)
        if not tier.has_slots:
            assert outcomes == [Outcome.REFUSED] * 4
            return
        assert outcomes == [Outcome.OK] * 4
        assert source.written == [1, 3]
        assert load(tier, [1, 2, 3]) == ([Outcome.OK] * 3, [value(number) for number in (1, 2, 3)])

    def test_given_a_caller_that_fails_to_write_then_nothing_is_stored(self, tier: KeyedTier) -> None:
        class Broken(Written):
            def write(self, slots: Slots) -> None:
                raise OSError("a device that is gone")

        assert Outcome.OK not in tier.store_straight([key(1)], [VALUE_BYTES], Broken([1]))
        assert tier.contains([key(1)]) == [False]
        assert store(tier, [1]) == [Outcome.OK]

    def test_given_a_mixed_batch_then_each_key_has_its_own_outcome(self, tier: KeyedTier) -> None:
        store(tier, [1, 3])
        outcomes, found = load(tier, [1, 2, 3, 2])
        assert outcomes == [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.MISS]
        assert (found[0], found[2]) == (value(1), value(3))
        assert tier.contains([key(1), key(2), key(3)]) == [True, False, True]
        assert tier.contains_prefix([key(1), key(3), key(2), key(3)]) == 2

    def test_given_values_of_many_sizes_then_they_come_back(self, tier: KeyedTier) -> None:
        sizes = [1, 64, 4095, 4096, 4097, 100_000]
        for number, size in enumerate(sizes):
            assert store(tier, [number], size) == [Outcome.OK]
        for number, size in enumerate(sizes):
            assert load(tier, [number], size) == ([Outcome.OK], [value(number, size)])

    def test_given_a_larger_buffer_then_the_value_fills_its_beginning(self, tier: KeyedTier) -> None:
        store(tier, [1], 100)
        outcomes, found = load(tier, [1], 300)
        assert outcomes == [Outcome.OK]
        assert found[0][:100] == value(1, 100)

    def test_given_a_smaller_buffer_then_nothing_is_returned_as_whole(self, tier: KeyedTier) -> None:
        store(tier, [1], 300)
        assert load(tier, [1], 100)[0] == [Outcome.FAILED]

    def test_given_a_key_that_is_there_when_it_is_stored_again_then_it_stays_as_it_was(self, tier: KeyedTier) -> None:
        store(tier, [1])
        assert tier.store([key(1)], [value(1)]) == [Outcome.OK]
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])

    def test_given_one_key_twice_in_a_batch_then_it_is_there_once(self, tier: KeyedTier) -> None:
        assert store(tier, [1, 1]) == [Outcome.OK, Outcome.OK]
        assert load(tier, [1, 1]) == ([Outcome.OK] * 2, [value(1)] * 2)

    def test_given_a_stored_value_when_the_buffer_changes_then_the_value_does_not(self, tier: KeyedTier) -> None:
        buffer = bytearray(value(1))
        tier.store([key(1)], [buffer])
        buffer[:] = bytes(len(buffer))
        assert load(tier, [1]) == ([Outcome.OK], [value(1)])

    def test_given_a_removed_value_then_it_is_gone_and_others_stay(self, tier: KeyedTier) -> None:
        store(tier, [1, 2])
        assert tier.remove([key(1), key(3)]) == [Outcome.OK, Outcome.MISS]
        assert tier.contains([key(1), key(2)]) == [False, True]

    def test_given_a_purge_then_all_that_it_means_is_gone_and_nothing_else(self, tier: KeyedTier) -> None:
        scopes = [ReuseScope("acme"), ReuseScope("acme", salt="s"), ReuseScope("other"), ReuseScope("acme")]
        keys = [bytes([place // 3]) * 8 + scope_tag(scope) + bytes(20) for place, scope in enumerate(scopes)]
        assert tier.store(keys, [value(number) for number in range(4)]) == [Outcome.OK] * 4
        for pattern, left in (
            (KeyPattern.of_tenant("nobody"), [True, True, True, True]),
            (KeyPattern.of_scope(scopes[1]), [True, False, True, True]),
            (KeyPattern.of_tenant("acme", bytes([1]) * 8), [True, False, True, False]),
            (KeyPattern.of_tenant("acme"), [False, False, True, False]),
            (KeyPattern(bytes(8)), [False, False, False, False]),
        ):
            purged = tier.purge(pattern)
            assert purged.is_complete
            assert tier.contains(keys) == left
        assert purged.removed == 1
        assert tier.stats().removed == 4

    def test_given_buffers_that_are_parts_of_one_array_then_only_those_are_touched(self, tier: KeyedTier) -> None:
        rows = np.frombuffer(value(1) + value(2) + value(3), np.uint8).reshape(3, -1).copy()
        assert tier.store([key(1), key(2)], [rows[0], rows[1]]) == [Outcome.OK] * 2
        found = np.zeros_like(rows)
        assert tier.load([key(2)], [found[1]]) == [Outcome.OK]
        assert found[1].tobytes() == value(2)
        assert not found[0].any()
        assert not found[2].any()

    def test_given_memory_that_is_kept_then_values_come_and_in_the_end_nobody_writes_there(
        self, tier: KeyedTier
    ) -> None:
        sizes = [4096, 3 * 4096, 5000]
        for number, size in enumerate(sizes):
            assert store(tier, [number], size) == [Outcome.OK]
        out, kept = [page_aligned(size) for size in sizes], Kept()
        keys = [key(number) for number in (*range(3), 9)]
        outcomes = tier.load(keys, [*out, bytearray(8)], keeper=kept)
        assert outcomes == [Outcome.OK, Outcome.OK, Outcome.OK, Outcome.MISS]
        assert [each.tobytes() for each in out] == [value(number, size) for number, size in enumerate(sizes)]
        assert kept.wait_until_unused(10.0)

    def test_given_an_empty_batch_then_nothing_happens(self, tier: KeyedTier) -> None:
        assert (tier.contains([]), tier.load([], []), tier.store([], []), tier.remove([])) == ([], [], [], [])
        assert tier.contains_prefix([]) == 0

    @pytest.mark.parametrize("wrong", [b"", b"short", bytes(33), "text" * 8, None, 7])
    def test_given_a_wrong_key_then_it_is_refused_by_name(self, tier: KeyedTier, wrong: bytes) -> None:
        with pytest.raises(InvalidArgumentError, match="a key is 32 bytes"):
            tier.load([wrong], [bytearray(8)])

    def test_given_wrong_buffers_then_they_are_refused_before_anything_happens(self, tier: KeyedTier) -> None:
        with pytest.raises(InvalidArgumentError, match="as many buffers"):
            tier.store([key(1)], [])
        with pytest.raises(InvalidArgumentError, match="read-only"):
            tier.load([key(1)], [b"constant"])
        with pytest.raises(InvalidArgumentError, match="contiguous"):
            tier.load([key(1)], [np.zeros((4, 4), np.uint8)[:, 1]])
        assert tier.contains([key(1)]) == [False]

    @pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "1", True])
    def test_given_a_wrong_timeout_then_it_is_refused(self, tier: KeyedTier, wrong: float) -> None:
        with pytest.raises(InvalidArgumentError, match="timeout"):
            tier.contains([key(1)], timeout=wrong)

    def test_given_calls_then_the_statistics_balance(self, tier: KeyedTier) -> None:
        store(tier, [1, 2])
        load(tier, [1, 2, 3])
        tier.remove([key(2)])
        stats = tier.stats()
        assert (stats.stored, stats.hits, stats.misses, stats.removed) == (2, 2, 1, 1)
        assert (stats.bytes_stored, stats.bytes_loaded) == (2 * VALUE_BYTES, 2 * VALUE_BYTES)
        assert tier.load([key(1)], [bytearray(VALUE_BYTES + 1000)]) == [Outcome.OK]
        assert tier.stats().bytes_loaded == 3 * VALUE_BYTES, "of the value, not of its buffer: see left_unfilled"
        assert stats.num_values in (None, 1)
        assert stats.problem == ""

    def test_given_a_closed_tier_then_it_finds_nothing_and_raises_nothing(self, tier: KeyedTier) -> None:
        store(tier, [1])
        tier.close()
        tier.close()
        assert tier.contains([key(1)]) == [False]
        assert load(tier, [1])[0] == [Outcome.FAILED]
        assert store(tier, [2]) == [Outcome.FAILED]
        assert tier.stats().problem == "closed"

    def test_given_many_threads_then_every_value_stays_itself(self, tier: KeyedTier) -> None:
        wrong: list[int] = []

        def work(seed: int) -> None:
            numbers = np.random.default_rng(seed).integers(0, 40, 60).tolist()
            for number in numbers:
                store(tier, [number])
                outcomes, found = load(tier, [number])
                if outcomes == [Outcome.OK] and found != [value(number)]:
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
