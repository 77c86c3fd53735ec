from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import managers
from kvpool import KVCacheHandle, KVCacheManager, LayerSpec, SequenceBatch
from kvpool.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError, UnknownRequestError
from managers import FULL

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=4)
CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)


make_manager = partial(managers.make_manager, gpu_blocks=64)


def admit(manager: KVCacheManager, *lengths: int) -> list[KVCacheHandle]:
    """One committed sequence for each length, none sharing anything with another."""
    handles = []
    for number, length in enumerate(lengths):
        handle = manager.allocate(number, [1000 * number + i for i in range(length)])
        manager.commit(handle, length)
        handles.append(handle)
    return handles


def int32(*shape: int) -> np.ndarray:
    return np.full(shape, 99, np.int32)


# --- exports ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), max_size=6), st.randoms(use_true_random=False), st.sampled_from([0, 1]))
def test_padded_and_csr_exports_equal_the_handles_own_tables(lengths: list[int], random: Any, group: int) -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=256)
    handles = admit(manager, *lengths)
    random.shuffle(handles)
    chosen = handles[: max(1, len(handles) - 1)] if handles else []
    batch = manager.batch(chosen)
    padded, csr = batch.padded_table(group), batch.csr(group)
    columns = max((h.num_blocks for h in chosen), default=0)
    assert padded.shape == (len(chosen), columns)
    assert csr.indptr[0] == 0
    for i, handle in enumerate(chosen):
        table = handle.block_ids(group).tolist()
        assert padded[i].tolist() == table + [-1] * (columns - len(table))
        assert csr.indices[csr.indptr[i] : csr.indptr[i + 1]].tolist() == [block for block in table if block >= 0]
        assert csr.last_page_len[i] == (handle.num_reserved - 1) % 4 + 1
        held_after_sinks = next((c for c in range(1, len(table)) if table[c] >= 0), 1)
        assert csr.first_position[i] == (held_after_sinks * 4 if group == 1 else 0)
    assert batch.lengths().tolist() == [handle.num_reserved for handle in chosen]


def test_arrays_of_the_caller_are_filled_and_returned() -> None:
    manager = make_manager()
    batch = manager.batch(admit(manager, 9, 2))
    table = int32(2, 5)
    assert batch.padded_table(out=table) is table
    assert table.tolist() == [[0, 1, 2, -1, -1], [3, -1, -1, -1, -1]]
    indptr, indices, last = int32(3), int32(10), int32(2)
    csr = batch.csr(indptr=indptr, indices=indices, last_page_len=last)
    assert csr.indptr is indptr
    assert csr.indices is indices
    assert csr.last_page_len is last
    assert (indptr.tolist(), indices[:4].tolist(), last.tolist()) == ([0, 3, 4], [0, 1, 2, 3], [1, 2])
    assert indices[4] == 99  # what lies behind is not touched


def test_a_windowed_table_goes_into_the_callers_array_too() -> None:
    manager = make_manager(FULL, SLIDING)
    (handle,) = admit(manager, 24)
    table = int32(1, 6)
    manager.batch([handle]).padded_table(1, out=table)
    assert table[0].tolist() == handle.block_ids(1).tolist()


def test_consecutive_rows_give_a_read_only_view_without_a_copy() -> None:
    manager = make_manager()
    first, second, third = admit(manager, 5, 5, 5)
    table = manager.batch([first, second, third]).padded_table()
    assert np.shares_memory(table, manager._cache.rows.tables[0])
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0] = 1
    scattered = manager.batch([third, first]).padded_table()
    assert scattered[:, 0].tolist() == [third.block_ids()[0], first.block_ids()[0]]


def test_cross_attention_lists_the_encoders_blocks_and_its_last_one_in_part() -> None:
    manager = make_manager(FULL, CROSS)
    handles = [manager.allocate(n, [n], cross_tokens=n) for n in (5, 0, 8)]
    csr = manager.batch(handles).csr(1)
    assert csr.indptr.tolist() == [0, 2, 2, 4]
    assert csr.last_page_len.tolist() == [1, 0, 4]
    assert manager.batch(handles).padded_table(1).shape == (3, 2)


def test_an_empty_batch_exports_empty_arrays() -> None:
    manager = make_manager()
    batch = manager.batch([])
    assert batch.padded_table().shape == (0, 0)
    assert batch.csr().indptr.tolist() == [0]
    assert manager.extend_batch(batch).shape == (1, 0)
    manager.commit_batch(batch, [])
    assert (len(batch), list(batch)) == (0, [])


@pytest.mark.parametrize(
    "out",
    [int32(2, 1), int32(1, 9), int32(2), np.zeros((2, 9), np.int64), [[0] * 9] * 2, None],
    ids=["too narrow", "too few rows", "flat", "int64", "a list", "fits"],
)
def test_an_array_that_does_not_fit_is_named(out: Any) -> None:
    manager = make_manager()
    batch = manager.batch(admit(manager, 9, 2))
    if out is None:
        batch.padded_table(out=int32(2, 3))
        return
    with pytest.raises(InvalidArgumentError, match="padded table"):
        batch.padded_table(out=out)


@pytest.mark.parametrize(
    ("name", "array"),
    [("indptr", int32(2)), ("indices", int32(3)), ("last_page_len", int32(3)), ("indices", np.zeros(9, np.float32))],
)
def test_a_csr_array_that_does_not_fit_is_named(name: str, array: np.ndarray) -> None:
    manager = make_manager()
    batch = manager.batch(admit(manager, 9, 2))
    with pytest.raises(InvalidArgumentError, match=name):
        batch.csr(**{name: array})


@pytest.mark.parametrize("group", [-1, 2, True, "0", 1.0])
def test_a_group_that_does_not_exist_is_refused_by_both_exports(group: Any) -> None:
    manager = make_manager(FULL, SLIDING)
    batch = manager.batch(admit(manager, 2))
    for export in (batch.padded_table, batch.csr):
        with pytest.raises(InvalidArgumentError, match="group"):
            export(group)


# --- membership ------------------------------------------------------------------------------------------------------


def test_a_batch_holds_a_sequence_once() -> None:
    manager = make_manager()
    (handle,) = admit(manager, 3)
    with pytest.raises(InvalidArgumentError, match="twice"):
        manager.batch([handle, handle])


def test_a_batch_of_a_batch_is_itself() -> None:
    manager = make_manager()
    batch = manager.batch(admit(manager, 3, 4))
    assert manager.batch(batch) is batch
    assert [handle.request_id for handle in batch] == [0, 1]


def test_a_batch_stays_usable_while_other_sequences_come_and_go() -> None:
    manager = make_manager()
    handles = admit(manager, 3, 4, 5)
    batch = manager.batch(handles[:2])
    manager.free(handles[2])
    manager.allocate("new", [1])
    assert manager.extend_batch(batch).shape == (1, 2)


@pytest.mark.parametrize("end", ["free", "swap_out"])
def test_a_batch_is_refused_once_one_of_its_sequences_ended_or_moved(end: str) -> None:
    manager = make_manager(host_blocks=8)
    handles = admit(manager, 3, 4)
    batch = manager.batch(handles)
    getattr(manager, end)(handles[1])
    for use in (batch.lengths, batch.padded_table, batch.csr, lambda: manager.extend_batch(batch)):
        with pytest.raises((UnknownRequestError, SequenceStateError), match="1"):
            use()


def test_a_batch_of_another_manager_is_refused() -> None:
    manager, other = make_manager(), make_manager()
    batch = other.batch(admit(other, 3))
    with pytest.raises(UnknownRequestError, match="another manager"):
        manager.extend_batch(batch)


def test_a_single_handle_is_no_batch() -> None:
    manager = make_manager()
    (handle,) = admit(manager, 3)
    for use in (manager.batch, manager.extend_batch, manager.free_batch):
        with pytest.raises(InvalidArgumentError, match="list"):
            use(handle)


def test_a_generator_of_handles_is_read_once() -> None:
    manager = make_manager()
    admit(manager, 3, 4)
    manager.free_batch(handle for handle in manager.handles)
    assert manager.handles == []


# --- slots -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_extend_returns_the_slot_of_every_new_position(shapes: list[tuple[int, int]]) -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=256)
    handles = admit(manager, *(length for length, _ in shapes))
    counts = [count for _, count in shapes]
    slots = manager.extend_batch(handles, counts)
    for group in (0, 1):
        expected = []
        for handle, (length, count) in zip(handles, shapes, strict=True):
            table = handle.block_ids(group)
            expected += [int(table[p // 4]) * 4 + p % 4 for p in range(length, length + count)]
        assert slots[group].tolist() == expected


def test_one_more_token_each_is_the_default_step() -> None:
    manager = make_manager()
    handles = admit(manager, 3, 4)
    out = int32(1, 2)
    assert manager.extend_batch(handles, out=out) is out
    assert out.tolist() == [[0 * 4 + 3, 2 * 4]]


def test_slots_of_positions_outside_a_window_and_of_cross_attention_are_minus_one() -> None:
    manager = make_manager(FULL, SLIDING, CROSS)
    handle = manager.allocate("a", list(range(16)), cross_tokens=3)
    manager.commit(handle, 16)
    slots = manager.slot_mapping([handle], 0, 16)
    assert (slots[0] >= 0).all()
    assert [int(slots[1, p]) >= 0 for p in (0, 4, 8, 12)] == [True, False, True, True]
    assert (slots[2] == -1).all()


def test_slot_mappings_take_one_range_or_one_per_sequence() -> None:
    manager = make_manager()
    handles = admit(manager, 5, 6)
    assert manager.slot_mapping(handles, 1, 3).tolist() == [[1, 2, 9, 10]]
    assert manager.slot_mapping(handles, [0, 4], np.array([1, 6])).tolist() == [[0, 12, 13]]
    out = int32(1, 2)
    assert manager.slot_mapping(handles, 0, 1, out) is out


@pytest.mark.parametrize(
    ("start", "stop"),
    [(-1, 2), (2, 1), (0, 99), (0.5, 2), ("a", 2), ([0, 0, 0], 2), (0, [[1, 2]]), (True, 2), (0, 2**70), (None, 1)],
)
def test_a_slot_range_that_cannot_be_is_refused(start: Any, stop: Any) -> None:
    manager = make_manager()
    handles = admit(manager, 5, 6)
    with pytest.raises(InvalidArgumentError):
        manager.slot_mapping(handles, start, stop)


@pytest.mark.parametrize(
    "out", [int32(1, 3), int32(2, 2), np.zeros((1, 2), np.int64), [[0, 0]]], ids=["wide", "groups", "int64", "list"]
)
def test_a_slot_array_that_does_not_fit_is_refused_before_anything_changes(out: Any) -> None:
    manager = make_manager()
    handles = admit(manager, 3, 4)
    for use in (lambda: manager.extend_batch(handles, out=out), lambda: manager.slot_mapping(handles, 0, 1, out)):
        with pytest.raises(InvalidArgumentError, match="out must be"):
            use()
    assert [handle.num_reserved for handle in handles] == [3, 4]


def test_a_read_only_slot_array_is_refused() -> None:
    manager = make_manager()
    handles = admit(manager, 3, 4)
    out = int32(1, 2)
    out.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="writeable"):
        manager.extend_batch(handles, out=out)


# --- commit ----------------------------------------------------------------------------------------------------------


def test_a_whole_batch_commits_one_token_each_for_hundreds_of_steps() -> None:
    manager = make_manager(gpu_blocks=256)
    batch = manager.batch(admit(manager, 1, 2, 3))
    for step in range(300):
        manager.extend_batch(batch)
        manager.commit_batch(batch, [step, step + 1, step + 2])
    for number, handle in enumerate(batch):
        assert handle.token_ids[-300:].tolist() == [step + number for step in range(300)]
        assert manager.match_prefix([*handle.token_ids, 1]).num_tokens == len(handle.token_ids) // 4 * 4
    manager.check()


def test_counts_divide_the_tokens_among_the_sequences() -> None:
    manager = make_manager()
    handles = admit(manager, 1, 1)
    manager.extend_batch(handles, [3, 1])
    manager.commit_batch(handles, [7, 8, 9, 5], [3, 1])
    assert [handle.token_ids.tolist() for handle in handles] == [[0, 7, 8, 9], [1000, 5]]


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [([1, 2, 3], None), ([1], None), ([1, 2], [1]), ([1, 2], [2, 1]), (None, None), ([1, 2], 2), ([1, 2], [1.0, 1.0])],
)
def test_tokens_that_do_not_fit_the_batch_are_refused(tokens: Any, counts: Any) -> None:
    manager = make_manager()
    handles = admit(manager, 1, 1)
    manager.extend_batch(handles, 4)
    with pytest.raises(InvalidArgumentError):
        manager.commit_batch(handles, tokens, counts)
    assert [handle.num_committed for handle in handles] == [1, 1]


def test_tokens_without_a_place_are_refused_by_name() -> None:
    manager = make_manager()
    handles = admit(manager, 1, 1)
    manager.extend(handles[0])
    for use in (
        lambda: manager.commit_batch(handles, [5, 5]),
        lambda: manager.commit_batch(handles, None, [1, 1]),
        lambda: manager.mark_written(handles, [1, 1]),
    ):
        with pytest.raises(SequenceStateError, match="request 1 has places for 1 tokens"):
            use()
    assert [handle.num_written for handle in handles] == [1, 1]


def test_the_prompt_is_committed_as_it_was_announced_or_not_at_all() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2, 3, 4, 5])
    with pytest.raises(InvalidArgumentError, match="token 1 was announced as 2 and is committed as 9"):
        manager.commit(handle, [1, 9])
    manager.commit(handle, [1, 2])
    manager.commit_batch([handle], [3])  # one token of the prompt, not a sampled one
    manager.commit(handle, [4, 5])
    assert handle.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_ids_cannot_follow_tokens_that_were_committed_without_ids() -> None:
    manager = make_manager()
    handle = manager.allocate("a", num_tokens=4)
    manager.commit(handle, 2)
    with pytest.raises(SequenceStateError, match="2 tokens without ids"):
        manager.commit(handle, [1])
    manager.commit(handle, 2)
    assert handle.num_committed == 4


def test_a_count_past_the_prompt_publishes_the_prompt_and_nothing_behind_it() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(10)))
    manager.commit(handle, 4)
    manager.extend(handle, 6)
    manager.commit(handle, 12)
    assert manager.match_prefix(list(range(12))).num_tokens == 8
    manager.check()
    manager.free(handle)
    assert manager.stats().pool().cached == 2


def test_none_commits_the_reserved_rest_of_the_prompt() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(10)), reserve=6)
    manager.commit(handle, None)
    assert handle.num_committed == 6


def test_a_shared_block_is_copied_once_per_writer_of_a_batch_and_the_last_writes_in_place() -> None:
    manager = make_manager()
    (handle,) = admit(manager, 6)
    forks = manager.fork(handle, "b", "c")
    manager.extend_batch([handle, *forks])
    assert len(manager.take_copies()) == 2
    assert len({int(h.block_ids()[1]) for h in (handle, *forks)}) == 3
    manager.check()


def test_blocks_needed_says_what_extend_will_take() -> None:
    manager = make_manager()
    (handle,) = admit(manager, 6)
    assert manager.blocks_needed(handle, 2) == (0,)
    assert manager.blocks_needed(handle, 3, lookahead=4) == (2,)
    manager.fork(handle, "b")
    assert manager.blocks_needed(handle, 3) == (2,)  # one of them for the copy of the shared block
    free = manager.inspect.num_free_blocks()
    manager.extend(handle, 3)
    assert manager.inspect.num_free_blocks() == free - 2


def test_a_batch_that_does_not_fit_counts_as_one_failed_extension() -> None:
    manager = make_manager(gpu_blocks=2)
    handles = admit(manager, 4, 4)
    with pytest.raises(OutOfBlocksError, match="batch of 2 sequences"):
        manager.extend_batch(handles)
    assert manager.stats().extend_failures == 1


def test_no_sequence_grows_over_max_seq_len() -> None:
    manager = make_manager(max_seq_len=6)
    (handle,) = admit(manager, 5)
    with pytest.raises(InvalidArgumentError, match="max_seq_len=6"):
        manager.extend(handle, 2)
    manager.extend(handle)
    with pytest.raises(InvalidArgumentError, match="max_seq_len=6"):
        manager.extend(handle, 0, lookahead=1)


def test_lookahead_places_are_claimed_by_a_later_extend() -> None:
    manager = make_manager()
    (handle,) = admit(manager, 4)
    manager.extend(handle, 1, lookahead=7)
    assert (handle.num_reserved, handle.num_blocks) == (5, 3)
    free = manager.inspect.num_free_blocks()
    manager.extend(handle, 7)
    assert manager.inspect.num_free_blocks() == free


def test_batches_can_be_made_of_the_public_class() -> None:
    manager = make_manager()
    assert isinstance(manager.batch([]), SequenceBatch)


def test_a_batch_whose_sequence_was_rewound_between_two_steps_goes_on_where_it_is_now() -> None:
    manager = make_manager()
    handles = admit(manager, 5, 9)
    batch = manager.batch(handles)
    for _ in range(2):
        manager.extend_batch(batch)
        manager.commit_batch(batch, [7, 8])
    last = manager.extend_batch(batch)
    manager.rewind(handles[0], 1)
    again = manager.extend_batch(batch)
    assert again[0].tolist() == [last[0, 0], last[0, 1] + 1]
    manager.check()
