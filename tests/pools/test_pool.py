from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from kvpool.pools.pool import BlockPool


def ids_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_a_fresh_pool_is_all_free_and_hands_out_ascending_ids() -> None:
    pool = BlockPool(0, Tier.GPU, 4)
    assert (pool.num_free, pool.num_referenced, pool.num_cached, pool.num_pinned) == (4, 0, 0, 0)
    assert pool.take(4).tolist() == [0, 1, 2, 3]


def test_taking_no_block_takes_none() -> None:
    pool = BlockPool(0, Tier.GPU, 4)
    assert pool.take(0).tolist() == []
    assert pool.num_free == 4


def test_taking_more_than_is_free_raises_with_both_numbers_and_takes_nothing() -> None:
    pool = BlockPool(3, Tier.HOST, 2)
    with pytest.raises(OutOfBlocksError, match="pool 3 on HOST has 2 free blocks, 5 were"):
        pool.take(5)
    assert pool.num_free == 2


def test_what_was_given_back_last_is_handed_out_first_and_in_order() -> None:
    pool = BlockPool(0, Tier.GPU, 6)
    ids = pool.take(6)
    pool.give(ids[2:5])
    assert pool.take(2).tolist() == [2, 3]


def test_the_ids_handed_out_are_a_copy() -> None:
    pool = BlockPool(0, Tier.GPU, 3)
    ids = pool.take(2)
    ids[:] = 7
    assert pool.free_ids().tolist() == [2]
    pool.give(ids_of(0, 1))
    assert sorted(pool.free_ids().tolist()) == [0, 1, 2]


def test_counted_blocks_are_free_again_when_their_last_holder_lets_go() -> None:
    pool = BlockPool(0, Tier.GPU, 4)
    ids = pool.take(2, refs=1)
    pool.ref(ids[:1])
    pool.unref(ids)
    assert (pool.num_free, pool.refs.tolist()) == (3, [1, 0, 0, 0])
    pool.unref(ids[:1])
    assert pool.num_free == 4


def test_releasing_a_counted_block_without_holder_is_an_error_and_changes_nothing() -> None:
    pool = BlockPool(0, Tier.GPU, 4)
    ids = pool.take(1, refs=1)
    pool.unref(ids)
    with pytest.raises(InvalidArgumentError, match=r"blocks \[0\] of pool 0 on GPU"):
        pool.unref(ids)
    assert (pool.num_free, pool.refs.tolist()) == (4, [0, 0, 0, 0])
    held = pool.take(2, refs=1)
    with pytest.raises(InvalidArgumentError, match=r"blocks \[3\] of pool 0"):
        pool.unref(ids_of(*held, 3))
    assert (pool.num_free, pool.refs.tolist()) == (2, [1, 1, 0, 0])


def test_a_shared_block_is_free_again_when_the_last_of_its_sequences_lets_go() -> None:
    pool = BlockPool(0, Tier.GPU, 4)
    ids = pool.take(2)
    pool.ref(ids)
    pool.ref(ids[:1])
    assert pool.refs.tolist() == [3, 2, 0, 0]
    pool.unref(ids, single_owner=0)
    assert (pool.refs.tolist(), pool.num_free) == ([2, 0, 0, 0], 2)  # one owner needs no count
    pool.unref(ids, single_owner=0)
    assert (pool.refs.tolist(), pool.num_free) == ([0, 0, 0, 0], 3)
    pool.unref(ids[:1], single_owner=0)
    assert pool.num_free == 4


def test_the_peak_is_the_largest_number_ever_referenced() -> None:
    pool = BlockPool(0, Tier.GPU, 4)
    ids = pool.take(3)
    pool.note_peak()
    pool.give(ids)
    pool.note_peak()
    assert pool.peak_referenced == 3


def test_cached_blocks_are_neither_free_nor_referenced() -> None:
    pool = BlockPool(0, Tier.GPU, 4)
    pool.take(3)
    pool.num_cached += 2
    assert (pool.num_free, pool.num_referenced, pool.num_cached) == (1, 1, 2)


def test_a_grown_pool_hands_out_its_old_free_ids_first() -> None:
    pool = BlockPool(0, Tier.GPU, 2)
    pool.take(1)
    pool.resize(4)
    assert (pool.num_blocks, pool.num_free, len(pool.refs)) == (4, 3, 4)
    assert pool.take(3).tolist() == [1, 2, 3]


def test_a_cut_pool_forgets_the_ids_above_its_end() -> None:
    pool = BlockPool(0, Tier.GPU, 6)
    ids = pool.take(2, refs=1)
    pool.resize(3)
    assert (pool.num_blocks, pool.num_free, pool.refs.tolist()) == (3, 1, [1, 1, 0])
    pool.unref(ids)
    assert sorted(pool.free_ids().tolist()) == [0, 1, 2]


def test_a_pool_can_be_cut_to_nothing_and_grown_again() -> None:
    pool = BlockPool(0, Tier.HOST, 4)
    pool.resize(0)
    assert (pool.num_blocks, pool.num_free) == (0, 0)
    pool.resize(2)
    assert pool.take(2).tolist() == [0, 1]


@given(st.lists(st.integers(-6, 6), max_size=60))
def test_every_id_is_free_or_held_exactly_once_whatever_the_order_of_takes_and_gives(steps: list[int]) -> None:
    pool = BlockPool(0, Tier.GPU, 12)
    held: list[int] = []
    for step in steps:
        if 0 <= step <= pool.num_free:
            held.extend(pool.take(step).tolist())
        elif step < 0:
            back, held = held[:-step], held[-step:]
            pool.give(ids_of(*back))
        assert sorted([*held, *pool.free_ids().tolist()]) == list(range(12))
        assert pool.num_referenced == len(held)
