"""Which blocks may be written: those of one sequence alone, from its first uncommitted token on."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvpool import KVCacheManager, LayerSpec
from kvpool.errors import InvalidArgumentError
from managers import FULL, make_manager

manager = partial(make_manager, host_blocks=16)


def writable(kv: KVCacheManager, group: int = 0) -> list[int]:
    return np.flatnonzero(kv.writable_blocks(group)).tolist()


def test_given_a_prompt_then_its_blocks_are_writable_until_they_are_published() -> None:
    kv = manager()
    handle = kv.allocate("a", list(range(10)))
    assert writable(kv) == sorted(handle.block_ids().tolist())
    kv.commit(handle)
    assert writable(kv) == [int(handle.block_ids()[2])]
    kv.free(handle)
    assert writable(kv) == []


def test_given_drafts_that_are_written_but_not_final_then_they_may_be_written_again() -> None:
    kv = manager()
    handle = kv.allocate("a", list(range(4)))
    kv.commit(handle)
    kv.extend(handle, 6)
    kv.mark_written(handle, 6)
    assert writable(kv) == sorted(handle.block_ids()[1:].tolist())


def test_given_forks_then_only_the_copy_of_the_one_that_writes_is_writable() -> None:
    kv = manager()
    handle = kv.allocate("a", list(range(6)))
    kv.commit(handle)
    (fork,) = kv.fork(handle, "b")
    assert writable(kv) == []
    kv.extend(fork)
    assert writable(kv) == sorted([int(handle.block_ids()[1]), int(fork.block_ids()[1])])


def test_given_forks_when_one_commits_then_what_it_published_is_not_writable_for_the_other_either() -> None:
    kv = make_manager()
    parent = kv.allocate("a", list(range(10)))
    kv.mark_written(parent, 10)
    [child] = kv.fork(parent, "b")
    kv.commit(parent, 10)
    assert child.num_committed == 0
    assert child.block_ids().tolist() == [0, 1, 2]
    assert writable(kv) == []
    kv.free(parent)
    assert writable(kv) == [2]


def test_given_a_fully_cached_prompt_then_its_last_block_is_not_writable_though_its_last_token_is_uncommitted() -> None:
    kv = manager()
    kv.commit(kv.allocate("a", list(range(8))))
    again = kv.allocate("b", list(range(8)))
    assert again.num_committed == 7
    assert writable(kv) == []
    kv.commit(again)
    kv.extend(again)
    assert writable(kv) == [int(again.block_ids()[2])]


def test_given_a_fully_cached_prompt_whose_last_token_is_marked_written_then_its_block_is_still_not_written() -> None:
    kv = manager()
    kv.commit(kv.allocate("a", list(range(8))))
    again = kv.allocate("b", list(range(8)))
    kv.mark_written(again, 1)
    assert writable(kv) == []
    assert kv.slot_mapping([again], 7, 8).tolist() == [[-1]]
    kv.commit(again, 1)
    assert kv.slot_mapping([again], 7, 8).tolist() == [[int(again.block_ids()[1]) * 4 + 3]]


def test_given_a_swapped_request_then_none_of_its_old_blocks_is_writable() -> None:
    kv = manager()
    handle = kv.allocate("a", list(range(6)))
    kv.swap_out(handle)
    assert writable(kv) == []


def test_given_several_groups_then_each_has_its_own_answer() -> None:
    cross = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)
    kv = manager(FULL, LayerSpec(kv_heads=1, head_dim=8, window=4), cross)
    handle = kv.allocate("a", list(range(6)), cross_tokens=5)
    kv.commit(handle)
    assert [writable(kv, group) for group in range(3)] == [
        [int(handle.block_ids(0)[1])],
        [int(handle.block_ids(1)[1])],
        sorted(handle.block_ids(2).tolist()),
    ]


def test_given_a_group_that_is_not_there_then_it_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="group"):
        manager().writable_blocks(1)
