"""Forks: what they share, copy, publish and leave behind."""

from __future__ import annotations

import pytest

from kvpool import CopyKind, KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from managers import FULL, commit_all, make_manager, manager_with

CHUNK = LayerSpec(kv_heads=1, head_dim=8, chunk=4096)
WINDOW = LayerSpec(kv_heads=1, head_dim=8, window=4096)
WINDOW_OF_8 = LayerSpec(kv_heads=1, head_dim=8, window=8)


def test_two_equal_blocks_become_one_and_freeing_either_keeps_it() -> None:
    manager = make_manager()
    twins = [manager.allocate(name, list(range(8))) for name in "ab"]
    for twin in twins:
        manager.commit(twin, 8)
    assert twins[0].block_ids().tolist() == twins[1].block_ids().tolist()
    manager.free(twins[0])
    assert manager.match_prefix([*range(8), 1]).num_blocks == 2
    manager.check()


def test_forks_that_wrote_the_same_apart_from_each_other_publish_one_block_and_give_the_other_back() -> None:
    manager = make_manager()
    first = manager.allocate("a", list(range(8)))
    manager.mark_written(first, 6)
    (second,) = manager.fork(first, "b")
    for fork in (first, second):
        manager.slot_mapping([fork], 6, 8)  # copies the block that both hold
        manager.mark_written(fork, 2)
    apart = first.block_ids().tolist(), second.block_ids().tolist()
    assert apart[0][0] == apart[1][0]
    assert apart[0][1] != apart[1][1]
    manager.commit(first, 8)
    manager.check()
    assert second.block_ids().tolist() == apart[1]
    manager.commit(second, 8)
    manager.check()
    assert second.block_ids().tolist() == apart[0]


def test_lookahead_on_a_shared_tail_copies_it() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2])
    manager.commit(handle, 2)
    (child,) = manager.fork(handle, "b")
    manager.extend(child, 0, lookahead=1)
    assert child.block_ids()[0] != handle.block_ids()[0]


def test_a_copy_on_write_without_a_free_block_keeps_the_table() -> None:
    manager = make_manager(gpu_blocks=1)
    handle = manager.allocate("a", [1, 2])
    manager.commit(handle, 2)
    (child,) = manager.fork(handle, "b")
    with pytest.raises(OutOfBlocksError):
        manager.extend(child)
    assert child.block_ids().tolist() == handle.block_ids().tolist() == [0]
    manager.check()


def test_copies_are_handed_out_in_the_order_in_which_they_must_run() -> None:
    manager = make_manager(gpu_blocks=2, host_blocks=4, offload_on_evict=False)
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    manager.swap_out(handle)
    other = manager.allocate("b", list(range(50, 58)))
    manager.commit(other, 8)
    manager.swap_out(other)
    manager.swap_in(handle)
    kinds = [op.kind for op in manager.take_copies()]
    assert kinds == [CopyKind.SWAP_OUT, CopyKind.SWAP_OUT, CopyKind.SWAP_IN]
    assert manager.take_copies() == []


def test_copy_on_write_copies_one_block_with_its_data_for_whoever_writes() -> None:
    manager = make_manager()
    original = manager.allocate("a", list(range(10)))
    manager.commit(original, 10)
    (clone,) = manager.fork(original, "b")
    free = manager.inspect.num_free_blocks()
    manager.extend(clone)  # room in the last block: no new block, but a copy
    assert manager.inspect.num_free_blocks() == free - 1
    assert (clone.block_ids() != original.block_ids()).tolist() == [False, False, True]
    (op,) = manager.take_copies()
    assert (op.num_blocks, op.num_tokens) == (1, 2)
    assert manager.stats().copies_on_write == 1


def test_a_fork_outlives_its_parent() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2])
    (child,) = manager.fork(handle, "b")
    manager.free(handle)
    assert manager.get("b") is child
    assert manager.inspect.num_free_blocks() == 15
    manager.free(child)
    assert manager.inspect.num_free_blocks() == 16


def test_forks_publish_slide_and_rewind_like_any_sequence() -> None:
    manager = make_manager(FULL, WINDOW_OF_8, gpu_blocks=64)
    handle = manager.allocate("a", list(range(12)))
    manager.commit(handle, 12)
    (child,) = manager.fork(handle, "b")
    manager.extend(child, 12)
    manager.commit(child, list(range(50, 62)))
    assert manager.match_prefix([*range(12), *range(50, 62), 1]).num_blocks == 6
    assert list(child.block_table(1)).count(None) == 4
    manager.rewind(child, 2)
    assert child.num_committed == 22
    manager.check()


def test_a_fork_that_follows_what_its_sibling_published_is_no_longer_in_flight() -> None:
    manager = manager_with()
    parent = manager.allocate("parent", [0, 0, 0, 0])
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "child")
    manager.commit(child, 4)
    manager.check()


def test_a_fork_keeps_its_bytes_when_its_sibling_rewinds_and_writes_again() -> None:
    manager = manager_with(enable_prefix_caching=False)
    parent = manager.allocate("parent", [0] * 8)
    manager.commit(parent, 8)
    (child,) = manager.fork(parent, "child")
    manager.extend(parent)
    manager.rewind(parent, 4)
    slots = manager.extend(parent)
    assert int(slots[0, 0]) // 4 != child.block_table()[1]


def test_a_refused_extend_of_two_forks_leaves_both_careful() -> None:
    manager = manager_with(gpu_blocks=2, enable_prefix_caching=False)
    parent = manager.allocate("parent", [0, 0])
    manager.commit(parent, 2)
    (child,) = manager.fork(parent, "child")
    filler = manager.allocate("filler", [1])
    with pytest.raises(Exception, match="needs"):
        manager.extend_batch([parent, child])
    manager.free(filler)
    slots = manager.extend(child)
    assert int(slots[0, 0]) // 4 != parent.block_table()[0]


def test_forks_that_share_written_blocks_cannot_commit_different_tokens() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=8))
    parent = manager.allocate("a", num_tokens=4)
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "b")
    manager.commit(parent, [0, 1, 2, 3])
    with pytest.raises(InvalidArgumentError, match="token 2"):
        manager.commit(child, [0, 1, 9, 3])
    manager.check()
    manager.commit(child, [0, 1, 2, 3])
    manager.check()


def test_a_fork_that_was_rewound_keeps_its_share_of_a_block_that_its_sibling_commits() -> None:
    manager = manager_with()
    parent = commit_all(manager, manager.allocate("p", [1, 2, 3, 4]))
    manager.extend(parent, 4)
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "c")
    manager.rewind(parent, 3)
    manager.commit(child, [5, 6, 7, 8])
    shared = int(child.block_ids()[1])
    slots = manager.extend(parent)
    (copy,) = manager.take_copies()
    assert (int(copy.src[0]), int(copy.dst[0]), copy.num_tokens) == (shared, int(slots[0, 0]) // 4, 1)
    assert manager.match_prefix([*range(1, 9), 0]).num_tokens == 8  # published as soon as the parent let go
    manager.check()


def test_forks_that_commit_different_tokens_in_one_batch_share_nothing_they_disagree_about() -> None:
    manager = manager_with()
    parent = manager.allocate("p", num_tokens=4)
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "c")
    manager.commit_batch([parent, child], [5, 6, 7, 8, 9, 10, 11, 12], [4, 4])
    manager.check()
    manager.free_batch([parent, child])
    manager.check()


def test_a_fork_that_went_another_way_does_not_follow_into_a_block_it_has_passed() -> None:
    manager = manager_with(LayerSpec(kv_heads=1, head_dim=8, window=2), block_size=2)
    slow = commit_all(manager, manager.allocate("slow", [0, 0]))
    (fast,) = manager.fork(slow, "fast")
    manager.extend(fast, 4)
    manager.commit(fast, [1, 1, 1, 1])
    manager.fork(fast, "closes its run")
    assert manager.cache.evict(10) == 1  # the second block of "fast", which has left its window; its table is not told
    manager.extend(slow, 2)  # takes the same block, at the same place
    manager.commit(slow, [0, 0])
    manager.check()
    assert manager.match_prefix([0, 0, 1, 1, 1, 1, 2]).num_tokens == 6


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("layers", [(FULL, WINDOW), (WINDOW,), (FULL, CHUNK), (WINDOW, CHUNK, FULL)])
def test_a_fork_of_a_fully_cached_prompt_copies_no_published_block(
    layers: tuple[LayerSpec, ...], block_size: int
) -> None:
    manager = manager_with(*layers, block_size=block_size, gpu_blocks=200)
    manager.free(commit_all(manager, manager.allocate("a", range(16))))
    parent = manager.allocate("b", range(16))
    assert parent.num_cached_tokens == 15
    (child,) = manager.fork(parent, "c")
    needed = manager.blocks_needed(child, 1)
    free = [manager.inspect.num_free_blocks(pool) for pool in range(len(needed))]
    manager.extend(child)
    assert [f - manager.inspect.num_free_blocks(pool) for pool, f in enumerate(free)] == list(needed)
    manager.check()
    assert manager.take_copies() == []
    for handle in (parent, child):
        if handle is parent:
            manager.extend(handle)
        manager.commit(handle, [15, 16])
        manager.check()
    for group in range(len(manager.config.groups)):
        shared = 16 // block_size
        assert (parent.block_ids(group)[:shared] == child.block_ids(group)[:shared]).all()
        assert (manager.slot_mapping([child], 0, 16)[group] >= 0).all()


def test_a_request_that_publishes_because_its_fork_ended_is_in_flight_where_it_goes_on() -> None:
    manager = manager_with(block_size=1, gpu_blocks=12)
    handle = manager.allocate("a", [0, 0, 0, 0, 1, 0])
    manager.commit(handle, 2)
    (fork,) = manager.fork(handle, "b")
    manager.commit(handle, 3)  # not published while the fork, which has not written them, holds the same blocks
    manager.free(fork)
    manager.check()
    assert manager.match_prefix([0, 0, 0, 0, 1, 1]).num_tokens == 5
    assert "'a'" in manager.can_allocate([0, 0, 0, 0, 1, 0], wait_for_prefix=True).reason


def test_a_request_whose_fork_shares_blocks_further_on_does_not_grow_into_them() -> None:
    manager = manager_with(LayerSpec(kv_heads=1, head_dim=8, window=1), block_size=1, gpu_blocks=16)
    first = manager.allocate("a", [0] * 9)
    second, third = manager.fork(first, "b", "c")
    manager.commit(second, 5)  # its window has left these blocks, the forks have not written them
    manager.free(third)
    manager.check()
    manager.commit(second, 4)
    manager.check()
    manager.commit(first)
    manager.check()
    for handle in (first, second):
        manager.free(handle)
        manager.check()


def test_forks_publish_shared_blocks_only_after_another_has_copied_all_of_them() -> None:
    manager = manager_with(block_size=2, gpu_blocks=12)
    first = manager.allocate("a", [0] * 9)
    manager.commit(first, 5)
    second, third = manager.fork(first, "b", "c")
    manager.commit(first, 4)  # not published: the others hold the same blocks and have not written them
    manager.commit(third, 3)
    manager.extend(second, 0)  # copies three blocks
    manager.check()
    assert not set(second.block_ids()[2:].tolist()) & set(first.block_ids().tolist())
    assert manager.match_prefix([0] * 9).num_tokens == 8


def test_forks_in_rows_that_forks_had_before_copy_what_they_write() -> None:
    manager = make_manager()
    for name in ("first", "second"):
        parent = manager.allocate(name, list(range(6)))
        manager.commit(parent)
        pair = [parent, *manager.fork(parent, f"fork of {name}")]
        slots = manager.extend_batch(pair)[0].tolist()
        assert len(set(slots)) == 2
        assert len(manager.take_copies()) == 1
        manager.check()
        manager.rewind(pair[0], 1)  # flagged again when they leave
        manager.free_batch(pair)
        manager.check()


def test_a_request_in_the_row_of_a_fork_that_followed_another_commits_what_it_likes() -> None:
    manager = make_manager()
    parent = manager.allocate("parent", list(range(4)))
    manager.commit(parent)
    manager.extend(parent, 8)
    manager.mark_written(parent, 8)
    (fork,) = manager.fork(parent, "fork")
    row = fork.row
    manager.commit(parent, list(range(10, 18)))  # publishes what the fork shares
    manager.free(fork)
    manager.check()
    other = manager.allocate("other", num_tokens=9)
    assert other.row == row
    for tokens in ([50, 51, 52], [53, 54], [55, 56, 57, 58]):
        manager.commit(other, tokens)
    assert manager.match_prefix(list(range(50, 60))).num_tokens == 8
    manager.check()


def a_follower(manager: KVCacheManager) -> KVCacheHandle:
    """A fork of written blocks that it has not committed, and that its parent has published."""
    parent = manager.allocate("parent", num_tokens=16)
    manager.mark_written(parent, 16)
    (fork,) = manager.fork(parent, "fork")
    manager.commit(parent, list(range(16)))
    return fork


@pytest.mark.parametrize("length", [0, 6, 8, 11])
def test_a_follower_that_is_rewound_follows_no_further_than_its_path(length: int) -> None:
    manager = make_manager()
    fork = a_follower(manager)
    manager.commit(fork, range(4))
    manager.rewind(fork, 16 - length)
    manager.check()
    manager.extend(fork, 16)
    for position in range(min(length, 4), length + 16):  # in single steps, as an engine decodes
        token = position if position < length // 4 * 4 else 90 + position
        manager.commit_batch([fork], [token])
    manager.check()


def test_a_fork_of_a_follower_follows_too() -> None:
    manager = make_manager()
    (second,) = manager.fork(a_follower(manager), "second")
    manager.check()
    with pytest.raises(InvalidArgumentError, match="token 2"):
        manager.commit(second, [0, 1, 9, 3])
    manager.commit(second, range(4))
    manager.check()
