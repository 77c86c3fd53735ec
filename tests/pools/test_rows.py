from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheConfig, KVCacheHandle, LayerSpec, ReuseScope
from kvpool.core.handle import chosen_group
from kvpool.core.node import Node, Root
from kvpool.core.rows import RECENT_TOKENS, SequenceRows
from kvpool.errors import InvalidArgumentError
from managers import FULL, groups_of, make_manager

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=4)
CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)


def make_rows(*layers: LayerSpec, **options: Any) -> SequenceRows:
    config = KVCacheConfig(list(layers) or [FULL], block_size=4, gpu_blocks=8)
    return SequenceRows(groups_of(config), 4, threading.RLock(), **options)


def add(rows: SequenceRows, num_blocks: int = 1) -> int:
    return rows.new_row(KVCacheHandle(rows, "a", ReuseScope()), num_blocks)


def tokens_of(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_rows_are_handed_out_from_0_and_reused() -> None:
    rows = make_rows(num_rows=4)
    assert [add(rows), add(rows)] == [0, 1]
    rows.drop_rows([0])
    assert add(rows) == 0
    assert rows.live_rows() == [0, 1]


def test_a_row_that_ended_leaves_nothing_behind_the_blocks_of_the_next_or_in_its_token_ids() -> None:
    rows = make_rows(FULL, CROSS, num_rows=2)
    for is_shared in (True, False):
        row = add(rows, 3)
        rows.num_blocks[row], rows.num_fixed[row] = 2, 3
        rows.tables[0][row, :2] = rows.tables[1][row, :2] = 7
        rows.tables[1][row, 2] = 7
        rows.set_token_ids(row, tokens_of(1, 2, 3), 2)
        rows.set_shared(row, is_shared)
        rows.known[row] = rows.num_history[row] = 0
        moves = rows.moves
        rows.drop_rows([row])
        assert rows.moves > moves  # batches with this row look at it again
        assert rows.serials[row] == -1
        again = add(rows, 1)
        assert again == row
        assert (rows.tables[0][row, 1:] == -1).all()
        assert (rows.tables[1][row] == -1).all()  # it has no encoder
        assert (rows.token_ids(row).tolist(), rows.history_start[row], rows.num_shared) == ([], 0, 0)
        assert not rows.shared.any()
        assert (rows.handles[row] is None, rows.tips[row]) == (False, None)
        rows.num_blocks[row] = 0
        rows.drop_rows([row])


def test_more_sequences_than_rows_make_the_arrays_grow_and_keep_their_contents() -> None:
    rows = make_rows(FULL, SLIDING, num_rows=2, num_columns=3)
    rows.reserved[add(rows)] = 11
    rows.tables[1][0, 2] = 9
    added = [add(rows) for _ in range(6)]
    assert added == [1, 2, 3, 4, 5, 6]
    assert rows.num_rows == 8
    assert (int(rows.reserved[0]), int(rows.tables[1][0, 2])) == (11, 9)
    assert rows.first_held.shape == (2, 8)
    assert (rows.tables[0][2:] == -1).all()
    assert rows.serials.tolist() == [-1] * 8


def test_longer_sequences_make_the_tables_wider_and_keep_their_contents() -> None:
    rows = make_rows(FULL, SLIDING, num_columns=2)
    row = add(rows, 2)
    rows.tables[1][row] = [3, 4]
    rows.ensure_columns(2)
    assert rows.tables[0].shape[1] == 2
    rows.ensure_columns(9)
    assert rows.tables[0].shape[1] == 9
    assert rows.tables[1][row].tolist() == [3, 4] + [-1] * 7
    rows.ensure_columns(10)
    assert rows.tables[0].shape[1] == 18  # at least twice as wide: growing costs little per block


def test_token_ids_that_arrive_one_by_one_are_read_in_order() -> None:
    rows = make_rows()
    row = add(rows)
    rows.set_token_ids(row, tokens_of(1, 2), 0)
    rows.recent[row, :3] = [3, 4, 5]
    rows.known[row] = 5
    assert rows.token_ids(row).tolist() == [1, 2, 3, 4, 5]
    rows.store_recent(row, tokens_of(6))
    assert rows.token_ids(row).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_history_has_room_to_grow_and_older_views_stay_valid() -> None:
    rows = make_rows()
    row = add(rows)
    rows.set_token_ids(row, tokens_of(1, 2), 0)
    rows.store_recent(row, tokens_of(3))
    view, memory = rows.token_ids(row), rows.history[row]
    for token in range(4, RECENT_TOKENS):
        rows.store_recent(row, tokens_of(token))
    assert rows.history[row] is memory
    assert view.tolist() == [1, 2, 3]


def test_token_ids_are_copied_from_the_caller() -> None:
    rows = make_rows()
    row = add(rows)
    mine = tokens_of(1, 2, 3)
    rows.set_token_ids(row, mine, 0)
    mine[:] = 9
    assert rows.token_ids(row).tolist() == [1, 2, 3]


def make_path(rows: SequenceRows, row: int, *tokens: int) -> None:
    """Puts the row on a path of one node that holds these tokens."""
    root = Root(ReuseScope(), [], None, None)
    node = Node(root, b"", 0, 1, 0.0)
    node.tokens, node.num_blocks = tokens_of(*tokens), len(tokens) // rows.block_size
    rows.tips[row] = node


def test_the_ids_of_a_cached_prefix_are_read_from_the_path_and_kept_when_the_row_leaves_it() -> None:
    rows = make_rows()
    row = add(rows)
    make_path(rows, row, 1, 2, 3, 4)
    rows.set_token_ids(row, tokens_of(1, 2, 3, 4, 5, 6), 4)
    rows.store_recent(row, tokens_of(7))
    assert rows.history[row][:3].tolist() == [5, 6, 7]
    assert rows.token_ids(row).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert rows.ids_between(row, 4, 6).tolist() == [5, 6]
    assert rows.ids_between(row, 2, 6).tolist() == [3, 4, 5, 6]
    rows.keep_token_ids(row)
    rows.tips[row] = None
    assert rows.token_ids(row).tolist() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("num_history", "room"), [(6, 6), (6, 100), (3, 100), (3, 3), (0, 0), (5, 5)])
def test_ids_for_a_node_are_the_same_wherever_they_lie_and_no_larger_than_they_must_be(
    num_history: int, room: int
) -> None:
    rows = make_rows()
    row = add(rows)
    ids = [10, 11, 12, 13, 14, 15]
    rows.history[row] = tokens_of(*ids[:num_history], *[0] * (room - num_history))
    rows.num_history[row], rows.known[row] = num_history, 6
    rows.recent[row, : 6 - num_history] = ids[num_history:]
    for start, stop in ((0, 6), (4, 6), (0, 4), (5, 6), (3, 6)):
        assert rows.final_token_ids(row, start, stop, rows.num_history.item(row)).tolist() == ids[start:stop]


@pytest.mark.parametrize(("num_history", "room"), [(6, 4), (6, 100), (4, 100), (4, 2), (5, 3), (2, 0)])
def test_given_a_row_whose_first_ids_stand_on_its_path_then_ids_for_a_node_are_the_same(
    num_history: int, room: int
) -> None:
    rows = make_rows()
    row = add(rows)
    ids = [10, 11, 12, 13, 14, 15]
    rows.history[row] = tokens_of(*ids[2:num_history], *[0] * (room - num_history + 2))
    rows.history_start[row] = 2
    rows.num_history[row], rows.known[row] = num_history, 6
    rows.recent[row, : 6 - num_history] = ids[num_history:]
    for start, stop in ((2, 6), (4, 6), (2, 4), (2, 5), (5, 6)):
        assert rows.final_token_ids(row, start, stop, num_history).tolist() == ids[start:stop]


def test_ids_for_a_node_do_not_keep_a_long_history_alive() -> None:
    rows = make_rows()
    row = add(rows)
    rows.set_token_ids(row, np.arange(2000, dtype=np.int32), 0)
    assert rows.final_token_ids(row, 0, 4, 2000).base is None
    assert rows.final_token_ids(row, 0, 1395, 2000).base is None
    assert rows.final_token_ids(row, 0, 1396, 2000).base is rows.history[row]  # a copy would save too little


def test_a_fork_shares_token_ids_until_one_of_the_two_appends() -> None:
    rows = make_rows()
    source = add(rows)
    rows.set_token_ids(source, tokens_of(1, 2), 0)
    rows.recent[source, 0] = 3
    rows.known[source] = 3
    target = rows.copy_row(source, KVCacheHandle(rows, "b", ReuseScope()))
    assert rows.token_ids(target).tolist() == [1, 2, 3]
    rows.store_recent(source, tokens_of(4))
    rows.store_recent(target, tokens_of(5))
    assert rows.token_ids(source).tolist() == [1, 2, 3, 4]
    assert rows.token_ids(target).tolist() == [1, 2, 3, 5]


def test_a_rewind_never_overwrites_ids_that_others_look_at() -> None:
    rows = make_rows()
    row = add(rows)
    rows.set_token_ids(row, tokens_of(1, 2, 3, 4), 0)
    seen = rows.token_ids(row)
    rows.forget_token_ids(row, 2)
    rows.store_recent(row, tokens_of(9, 9))
    assert seen.tolist() == [1, 2, 3, 4]
    assert rows.token_ids(row).tolist() == [1, 2, 9, 9]
    rows.forget_token_ids(row, 8)  # nothing to forget
    assert rows.token_ids(row).tolist() == [1, 2, 9, 9]


def test_shared_rows_are_counted_once_however_often_they_are_flagged() -> None:
    rows = make_rows()
    row = add(rows)
    rows.set_shared(row, True)
    rows.set_shared(row, True)
    assert rows.num_shared == 1
    rows.set_shared(row, False)
    assert rows.num_shared == 0


def test_visible_blocks_hide_what_left_the_window_but_not_the_sinks() -> None:
    rows = make_rows(FULL, SLIDING, CROSS)
    row = add(rows, 5)
    rows.num_blocks[row], rows.num_fixed[row] = 5, 2
    for table in rows.tables:
        table[row, :5] = [0, 1, 2, 3, 4]
    rows.first_held[1, row] = 3
    assert rows.visible_blocks(0, row).tolist() == [0, 1, 2, 3, 4]
    assert rows.visible_blocks(1, row).tolist() == [0, -1, -1, 3, 4]
    assert rows.visible_blocks(2, row).tolist() == [0, 1]
    assert rows.all_blocks(1, row).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("index", [-1, 1, True, "0", None, 2**70])
def test_a_group_that_does_not_exist_is_named(index: Any) -> None:
    manager = make_manager()
    with pytest.raises(InvalidArgumentError, match="group"):
        chosen_group(manager._cache.groups, index)
    with pytest.raises(InvalidArgumentError, match="group"):
        manager.allocate("a", [1]).block_ids(index)
