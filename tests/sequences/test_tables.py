"""Tables, slots and lengths of a request while it grows, shrinks and steps."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvpool import CopyKind, KVCacheHandle, KVCacheManager, LayerSpec
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from managers import FULL, commit_all, computed, make_manager, manager_of_pairs, manager_with, running

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)


def slots_of_step(manager: KVCacheManager, handle: KVCacheHandle, slots: Any) -> None:
    """The slot of the last reserved position must be the one that the table names."""
    column, offset = divmod(handle.num_reserved - 1, manager.config.block_size)
    assert slots.tolist() == [[int(handle.block_ids()[column]) * manager.config.block_size + offset]]


def test_given_tokens_one_by_one_and_then_several_then_all_of_them_are_known() -> None:
    manager = manager_of_pairs(block_size=8)  # so that nothing is published in between
    handle = computed(manager, "a", range(3))
    batch = manager.batch([handle])
    for token in (30, 31):
        manager.extend_batch(batch)
        manager.commit_batch(batch, [token])
    rows = manager._cache.rows
    rows.store_recent(handle.row, np.array([40, 41, 42], np.int32))
    assert rows.token_ids(handle.row).tolist() == [0, 1, 2, 30, 31, 40, 41, 42]


def test_given_one_huge_count_among_small_ones_then_it_is_refused() -> None:
    manager = manager_of_pairs()
    handles = [computed(manager, name, range(3)) for name in ("a", "b")]
    for counts in ([1, 2**40 + 1], [2**40 + 1, 1], [1, -1]):
        with pytest.raises(InvalidArgumentError, match="must not be negative or huge"):
            manager.extend_batch(handles, counts)
    manager.extend_batch(handles, [1, 0])
    assert [handle.num_reserved for handle in handles] == [4, 3]


def test_extend_grows_when_the_last_block_is_full() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2, 3, 4])
    manager.extend(handle)
    assert handle.num_blocks == 2


def test_extend_uses_the_free_slots_of_the_last_block_first() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2])
    manager.extend(handle, 2)
    assert handle.num_blocks == 1
    manager.extend(handle, 5)
    assert handle.num_blocks == 3


def test_a_table_lists_each_logical_block_once_however_many_layers_there_are() -> None:
    manager = make_manager(*[FULL] * 12)
    handle = manager.allocate("a", list(range(9)))
    assert (handle.num_blocks, len(handle.block_table())) == (3, 3)


def test_threads_never_share_a_block_by_accident() -> None:
    manager = make_manager(gpu_blocks=64)
    owners: list[list[int]] = []

    def work(name: int) -> None:
        for turn in range(50):
            handle = manager.allocate((name, turn), num_tokens=8)
            manager.extend(handle)
            manager.free(handle)
        owners.append(manager.allocate((name, "last"), num_tokens=8).block_ids().tolist())

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flat = [block for blocks in owners for block in blocks]
    assert len(flat) == len(set(flat)) == 8
    manager.check()


def test_the_table_that_is_handed_out_cannot_be_written() -> None:
    handle = make_manager().allocate("a", [1])
    with pytest.raises(ValueError, match="read-only"):
        handle.block_ids()[0] = 5
    table = handle.block_table()
    assert table == handle.block_table()
    assert table is not handle.block_table()


def test_defragmentation_really_moves_blocks() -> None:
    manager = make_manager(gpu_blocks=8)
    first, second = manager.allocate("a", num_tokens=8), manager.allocate("b", num_tokens=8)
    manager.free(first)
    assert manager.cache.defragment() == 2
    assert second.block_ids().tolist() == [0, 1]
    assert [op.kind for op in manager.take_copies()] == [CopyKind.DEFRAGMENT]


def test_a_table_longer_than_its_row_grows_and_loses_nothing() -> None:
    manager = make_manager(block_size=1, gpu_blocks=600)
    handle = manager.allocate("a", [1])
    for _ in range(500):
        manager.extend(handle)
    assert len(set(handle.block_ids().tolist())) == handle.num_blocks == 501


def test_given_a_batch_of_which_one_grows_past_the_columns_of_two_tables_then_both_hold_it_whole() -> None:
    manager = make_manager(FULL, SLIDING, block_size=1, gpu_blocks=700)
    long, short = running(manager, "long", 126), running(manager, "short", 3, first=900)
    for count in (1, 9, 30):  # up to 166 blocks; there are 128 columns at first
        slots = manager.extend_batch([long, short], [count, 1])
        assert slots.shape == (2, count + 1)
        assert (slots >= 0).all()
        manager.commit_batch([long, short], range(500, 501 + count), [count, 1])
        manager.check()
    assert (long.num_blocks, short.num_blocks) == (166, 6)
    assert len(set(long.block_ids(0).tolist()) | set(short.block_ids(0).tolist())) == 172
    assert long.block_ids(1).tolist()[-8:] == manager.slot_mapping([long], 158, 166)[1].tolist()


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9])
def test_a_sequence_has_exactly_ceil_tokens_over_block_size_blocks(num_tokens: int) -> None:
    assert make_manager().allocate("a", num_tokens=num_tokens).num_blocks == -(-num_tokens // 4)


def test_extend_into_an_array_of_the_wrong_shape_reserves_nothing() -> None:
    manager = manager_with()
    handle = manager.allocate("a", num_tokens=1)
    with pytest.raises(InvalidArgumentError):
        manager.extend_batch([handle], 2, out=np.zeros((1, 5), np.int32))
    assert handle.num_reserved == 1


def test_slot_mapping_of_an_empty_batch_is_empty() -> None:
    assert manager_with().slot_mapping([], [], []).shape == (1, 0)


def test_decoding_enters_blocks_that_lookahead_reserved() -> None:
    manager = manager_with(block_size=2)
    other = manager.allocate("other", [9])
    handle = commit_all(manager, manager.allocate("a", [0]))
    manager.free(other)
    manager.extend_batch([handle], 0, lookahead=4)  # its next blocks do not follow its first one
    batch = manager.batch([handle])
    for _ in range(4):
        slots_of_step(manager, handle, manager.extend_batch(batch))


def test_two_batches_may_step_the_same_sequence_in_turn() -> None:
    manager = manager_with()
    handle = commit_all(manager, manager.allocate("a", [0]))
    batch = manager.batch([handle])
    slots_of_step(manager, handle, manager.extend_batch(batch))
    slots_of_step(manager, handle, manager.extend(handle))
    slots_of_step(manager, handle, manager.extend_batch(batch))


def test_a_rewind_of_nothing_in_a_full_pool_changes_nothing() -> None:
    manager = manager_with(gpu_blocks=3)
    parent = commit_all(manager, manager.allocate("p", [1, 2, 3, 4]))
    manager.extend(parent, 4)
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "c")
    manager.commit(parent, [5, 6, 7, 8])
    manager.allocate("other", [9])
    manager.rewind(child, 0)
    manager.check()
    with pytest.raises(OutOfBlocksError):
        manager.rewind(child, 1)
    manager.check()


def test_token_ids_can_be_read_while_another_thread_decodes() -> None:
    manager = manager_with(gpu_blocks=400)
    handle = commit_all(manager, manager.allocate("a", [1] * 4))
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                ids = handle.token_ids
                assert (ids[4:] == np.arange(4, len(ids))).all()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    batch = manager.batch([handle])
    for token in range(4, 1200):
        manager.extend_batch(batch)
        manager.commit_batch(batch, [token])
    done.set()
    reader.join(timeout=10)
    assert failures == []


@pytest.mark.parametrize("keep", [np.array([True, False]), np.array([]), None, 1, "no"])
def test_a_request_is_not_freed_with_a_flag_that_is_none(keep: Any) -> None:
    manager = manager_with()
    handle = commit_all(manager, manager.allocate("a", [1] * 5))
    for free in (lambda: manager.free(handle, keep=keep), lambda: manager.free_batch([handle], keep=keep)):
        with pytest.raises(InvalidArgumentError, match="keep must be True or False"):
            free()
        manager.check()
    manager.free(handle, keep=np.bool_(False))
    assert manager.stats().num_cached_runs == 0
