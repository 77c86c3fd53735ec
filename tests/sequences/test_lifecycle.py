from __future__ import annotations

from typing import Any

import pytest

from kvpool import CopyKind, KVCacheHandle, LayerSpec, ReuseScope, Tier
from kvpool.errors import (
    DuplicateRequestError,
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownRequestError,
)
from managers import FULL, make_manager, running

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)
SINKS = LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=8)
CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)


def lengths(handle: KVCacheHandle) -> tuple[int, int, int]:
    return handle.num_reserved, handle.num_written, handle.num_committed


def test_a_request_of_unknown_tokens_begins_with_nothing() -> None:
    handle = make_manager().allocate("a", num_tokens=5)
    numbers = ["num_cached_blocks", "num_cached_fixed_tokens", "num_cached_tokens", "num_partial_tokens"]
    numbers += ["num_prompt_tokens", "num_matched_tokens", "num_fixed_tokens", "hint", "row"]
    nothing = ["family", "inflight", "last_logits", "retention", "session", "swapped", "ttl"]
    expected = {
        **{"request_id": "a", "scope": ReuseScope(), "serial": 1, "copied_sessions": ()},
        **{"publishes": True, "is_lease": False, **dict.fromkeys(numbers, 0), **dict.fromkeys(nothing)},
    }
    assert {name: getattr(handle, name) for name in expected} == expected
    assert lengths(handle) == (5, 0, 0)


# --- fork ------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_every_block_and_starts_with_the_parents_lengths_and_tokens() -> None:
    manager = make_manager()
    parent = running(manager, "parent", 6, session="s", ttl=9.0)
    manager.extend(parent, 3)
    manager.mark_written(parent, 1)
    free = manager.inspect.num_free_blocks()
    first, second = manager.fork(parent, "first", "second")
    assert manager.inspect.num_free_blocks() == free
    for child in (first, second):
        assert child.block_ids().tolist() == parent.block_ids().tolist()
        assert lengths(child) == lengths(parent) == (9, 7, 6)
        assert child.token_ids.tolist() == parent.token_ids.tolist()
        assert (child.session, child.ttl, child.scope) == (parent.session, parent.ttl, parent.scope)
    assert manager.stats().forks == 2
    manager.check()


def test_forks_of_forks_diverge_one_by_one() -> None:
    manager = make_manager()
    handles = [running(manager, 0, 6)]
    for name in range(1, 4):
        handles += manager.fork(handles[-1], name)
    for step, handle in enumerate(handles):
        manager.extend(handle)
        manager.commit(handle, [100 + step])
    assert len({int(handle.block_ids()[1]) for handle in handles}) == 4
    assert len({int(handle.block_ids()[0]) for handle in handles}) == 1
    assert manager.stats().copies_on_write == 3
    manager.check()


def test_what_forks_wrote_together_is_published_once_for_all_of_them() -> None:
    manager = make_manager()
    parent = running(manager, "parent", 4)
    manager.extend(parent, 8)
    manager.mark_written(parent, 8)
    children = manager.fork(parent, "b", "c")
    free = manager.inspect.num_free_blocks()
    for handle in (parent, *children):
        manager.commit(handle, [4, 5, 6, 7, 8, 9, 10, 11])
        manager.check()
    assert manager.inspect.num_free_blocks() == free
    assert manager.match_prefix([*range(12), 1]).num_blocks == 3
    for handle in (parent, *children):
        manager.free(handle)
    assert manager.stats().pool().cached == 3
    manager.check()


def test_what_forks_wrote_together_follows_when_one_finds_it_cached_already() -> None:
    manager = make_manager()
    manager.free(running(manager, "old", 12))
    parent = manager.allocate("parent", num_tokens=1)
    manager.free(parent)
    parent = manager.allocate("parent", list(range(13)), scope=ReuseScope())
    manager.rewind(parent, 13)
    manager.extend(parent, 12)
    manager.mark_written(parent, 12)
    (child,) = manager.fork(parent, "child")
    manager.commit(child, list(range(12)))
    assert child.block_ids().tolist() == parent.block_ids().tolist()
    manager.check()
    manager.commit(parent, list(range(12)))
    manager.check()


def test_a_fork_that_commits_without_ids_keeps_sharing_with_one_that_publishes() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    parent = running(manager, "parent", 4)
    manager.extend(parent, 16)
    manager.mark_written(parent, 16)
    (child,) = manager.fork(parent, "child")
    manager.commit(child, 16)  # no ids: it slides its window and publishes nothing
    manager.commit(parent, list(range(50, 66)))
    manager.check()
    manager.free(parent)
    manager.check()
    manager.free(child)
    manager.check()


def test_the_encoders_blocks_are_shared_by_forks_and_never_copied() -> None:
    manager = make_manager(FULL, CROSS)
    parent = running(manager, "parent", 2, cross_tokens=6)
    (child,) = manager.fork(parent, "child")
    manager.extend_batch([parent, child])
    assert child.block_ids(1).tolist() == parent.block_ids(1).tolist()
    manager.free(parent)
    manager.check()
    manager.free(child)
    assert manager.inspect.num_free_blocks() == 16


def test_a_fork_with_a_window_reads_what_its_window_covers() -> None:
    manager = make_manager(FULL, SINKS, gpu_blocks=64)
    parent = running(manager, "parent", 30)
    (child,) = manager.fork(parent, "child")
    manager.free(parent)
    assert child.block_table(1) == [0 + 8, 1 + 8, None, None, None, 13, 14, 15]
    manager.cache.evict(100)
    manager.check()
    manager.extend(child, 6)
    manager.commit(child, list(range(6)))
    manager.check()


def test_new_ids_must_be_new() -> None:
    manager = make_manager()
    parent = running(manager, "parent", 4)
    for names in (("parent",), ("a", "a"), ("a", "parent")):
        with pytest.raises(DuplicateRequestError):
            manager.fork(parent, *names)
    with pytest.raises(InvalidArgumentError, match="at least one"):
        manager.fork(parent)
    assert manager.handles == [parent]


# --- rewind ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", [0, 4])
def test_a_fork_that_was_rewound_commits_what_is_left_of_published_blocks_as_it_is(back: int) -> None:
    manager = make_manager()
    parent = running(manager, "parent", 4)
    manager.extend(parent, 12)
    manager.mark_written(parent, 8)
    (child,) = manager.fork(parent, "child")
    manager.commit(parent, range(4, 12))  # published for both
    manager.rewind(child, 4 + back)  # places that nobody wrote, and then some of what was published
    with pytest.raises(InvalidArgumentError, match="token 4 was announced as 4 and is committed as 90"):
        manager.commit(child, [90, 91, 92, 93])
    manager.check()
    manager.commit(child, range(4, 8))
    manager.check()
    manager.rewind(child, child.num_reserved - 8)
    manager.extend(child, 4)
    manager.commit(child, [80, 81, 82, 83])  # from here on it goes its own way
    manager.check()
    assert manager.match_prefix([*range(8), 80, 81, 82, 83, 1]).num_tokens == 12
    assert manager.match_prefix([*range(12), 1]).num_tokens == 12


def test_rejected_drafts_give_back_their_blocks() -> None:
    manager = make_manager()
    handle = running(manager, "a", 4)
    manager.extend(handle, 9)
    manager.mark_written(handle, 9)
    manager.rewind(handle, 8)
    assert lengths(handle) == (5, 5, 4)
    assert handle.num_blocks == 2
    assert manager.stats().rewinds == 1
    manager.check()


def test_rewinding_nothing_changes_nothing() -> None:
    manager = make_manager()
    handle = running(manager, "a", 6)
    manager.rewind(handle, 0)
    assert lengths(handle) == (6, 6, 6)


def test_committed_tokens_can_be_rewound_and_replaced() -> None:
    manager = make_manager()
    handle = running(manager, "a", 10)
    manager.rewind(handle, 6)
    assert lengths(handle) == (4, 4, 4)
    assert handle.token_ids.tolist() == [0, 1, 2, 3]
    manager.extend(handle, 4)
    manager.commit(handle, [7, 7, 7, 7])
    assert manager.match_prefix([0, 1, 2, 3, 7, 7, 7, 7, 1]).num_blocks == 2
    assert manager.match_prefix([*range(8), 1]).num_blocks == 2  # what was published stays
    manager.check()


def test_a_block_cut_in_two_is_copied_and_the_copy_is_counted() -> None:
    manager = make_manager()
    handle = running(manager, "a", 8)
    published = handle.block_ids().tolist()
    manager.rewind(handle, 1)
    (op,) = manager.take_copies()
    assert (op.kind, op.src.tolist(), op.num_tokens) == (CopyKind.COPY_ON_WRITE, [published[1]], 3)
    assert op.dst.tolist() == handle.block_ids()[1:].tolist()
    assert manager.stats().copies_on_write == handle.stats.copies_on_write == 1
    manager.check()


def test_a_rewind_to_the_start_leaves_an_empty_sequence_that_can_go_on() -> None:
    manager = make_manager()
    handle = running(manager, "a", 9)
    manager.rewind(handle, 9)
    assert (lengths(handle), handle.num_blocks, handle.token_ids.tolist()) == ((0, 0, 0), 0, [])
    manager.extend(handle, 4)
    manager.commit(handle, [5, 6, 7, 8])
    assert manager.match_prefix([5, 6, 7, 8, 1]).num_blocks == 1
    manager.check()


def test_a_rewind_of_a_reserved_prompt_keeps_its_known_tokens() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(12)))
    manager.commit(handle, 5)
    manager.rewind(handle, 6)
    assert lengths(handle) == (6, 5, 5)
    assert len(handle.token_ids) == 12
    manager.extend(handle, 6)
    manager.commit(handle, 7)
    assert manager.match_prefix([*range(12), 1]).num_blocks == 3
    manager.check()


def test_a_fork_of_a_written_prompt_that_is_rewound_goes_on_with_other_tokens() -> None:
    manager = make_manager(block_size=4)
    parent = manager.allocate("parent", list(range(12)))
    manager.mark_written(parent, 12)
    [child] = manager.fork(parent, "child")
    manager.rewind(child, 8)
    assert child.token_ids.tolist() == [0, 1, 2, 3]
    manager.extend(child, 4)
    manager.commit(child, [0, 1, 2, 3, 50, 51, 52, 53])
    assert manager.match_prefix([0, 1, 2, 3, 50, 51, 52, 53, 0]).num_tokens == 8
    assert parent.token_ids.tolist() == list(range(12))
    manager.check()


def test_a_rewind_without_a_block_for_the_copy_changes_nothing() -> None:
    manager = make_manager(gpu_blocks=2)
    handle = running(manager, "a", 8)
    with pytest.raises(OutOfBlocksError, match="rewinding 'a'"):
        manager.rewind(handle, 1)
    assert lengths(handle) == (8, 8, 8)
    manager.rewind(handle, 4)  # no copy is needed at a block's edge
    manager.check()


@pytest.mark.parametrize("back", range(0, 33))
def test_a_window_reopens_over_blocks_that_are_still_there(back: int) -> None:
    for spec in (SLIDING, SINKS):
        manager = make_manager(FULL, spec, gpu_blocks=64)
        handle = running(manager, "a", 32)
        other = manager.allocate("b", [*range(32), 1])
        manager.rewind(handle, back)
        manager.check()
        manager.extend(handle, 5)
        manager.commit(handle, [90, 91, 92, 93, 94])
        manager.check()
        manager.free(handle)
        manager.free(other)
        manager.check()


def test_a_window_does_not_reopen_over_blocks_that_are_gone() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = running(manager, "a", 40)
    manager.free(manager.allocate("b", [*range(40), 1]))  # closes the run
    assert manager.cache.evict(3) == 3  # sliding blocks 5 to 7
    manager.allocate("c", num_tokens=8)  # somebody else has them now
    with pytest.raises(SequenceStateError, match="cannot be rewound to 32 tokens"):
        manager.rewind(handle, 8)
    manager.check()
    manager.rewind(handle, 24)  # what this window covers is still there
    manager.check()


def test_given_a_sequence_narrowed_ahead_of_its_commits_when_rewound_then_its_windows_have_the_blocks_they_cover() -> (
    None
):
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = manager.allocate("a", list(range(40)))
    manager.narrow(handle, 40)
    before = handle.block_table(1)
    manager.rewind(handle, 0)
    manager.check()
    assert handle.block_table(1) == before
    with pytest.raises(SequenceStateError, match="cannot be rewound to 20 tokens"):
        manager.rewind(handle, 20)  # what the query there would read was given back
    manager.check()


def test_a_window_that_reopens_is_protected_from_the_eviction_that_the_rewind_needs() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=20)
    handle = running(manager, "a", 40)
    assert manager.inspect.num_free_blocks() == 0
    manager.rewind(handle, 9)  # 31 tokens: two blocks are needed for copies, and only unread sliding blocks can go
    manager.check()
    assert list(handle.block_table(1))[6:] != [None, None]


def test_a_rewind_that_reopens_a_window_without_room_for_the_copy_changes_nothing() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=12)
    handle = manager.allocate("a", list(range(20)))
    manager.commit(handle, 16)
    manager.commit(handle, 4)
    # Sliding blocks 0 and 1; block 2, which the shorter sequence reads, is still there
    assert manager.cache.evict(2) == 2
    for number in range(2):
        manager.allocate(number, num_tokens=4)
    assert manager.inspect.num_free_blocks() == 0
    table, before = handle.block_ids(1).tolist(), manager.stats()
    with pytest.raises(OutOfBlocksError, match="rewinding"):
        manager.rewind(handle, 2)
    assert handle.block_ids(1).tolist() == table
    assert lengths(handle) == (20, 20, 20)
    assert manager.stats().pools == before.pools
    manager.check()


@pytest.mark.parametrize("num_tokens", [-1, 7, True, 1.0, None, 2**70])
def test_only_reserved_tokens_can_be_rewound(num_tokens: Any) -> None:
    manager = make_manager()
    handle = running(manager, "a", 6)
    with pytest.raises(InvalidArgumentError, match="num_tokens"):
        manager.rewind(handle, num_tokens)


# --- partial blocks --------------------------------------------------------------------------------------------------


def test_part_of_a_block_is_reused_by_copying_it() -> None:
    manager = make_manager()
    source = running(manager, "source", 8)
    handle = manager.allocate("a", [0, 1, 2, 3, 4, 5, 99])
    assert handle.num_cached_tokens == 6
    (op,) = manager.take_copies()
    assert (op.kind, op.num_tokens) == (CopyKind.PARTIAL_REUSE, 2)
    assert (op.src.tolist(), op.dst.tolist()) == ([source.block_ids()[1]], [handle.block_ids()[1]])
    assert handle.stats.partial_tokens == 2
    assert manager.stats().partial_hit_tokens == 2
    manager.check()


def test_a_partial_match_inside_a_run_that_is_still_written_does_not_disturb_it() -> None:
    manager = make_manager()
    writer = running(manager, "writer", 12)
    manager.allocate("a", [0, 1, 2, 3, 4, 5, 99])
    manager.extend(writer, 4)
    manager.commit(writer, [12, 13, 14, 15])
    assert manager.match_prefix([*range(16), 1]).num_blocks == 4
    manager.check()


def test_a_partial_match_in_a_block_that_was_just_decoded_copies_that_block() -> None:
    manager = make_manager()
    writer = running(manager, "writer", 5)
    for token in range(5, 12):
        manager.extend(writer)
        manager.commit(writer, [token])
    reader = manager.allocate("reader", [*range(10), 90, 91])
    assert reader.num_cached_tokens == 10
    (copy,) = manager.take_copies()
    assert (copy.src.tolist(), copy.dst.tolist(), copy.num_tokens) == (
        [writer.block_ids()[2]],
        [reader.block_ids()[2]],
        2,
    )
    manager.check()


def test_a_prompt_shorter_than_a_block_reuses_what_it_shares() -> None:
    manager = make_manager()
    running(manager, "source", 4)
    assert manager.allocate("a", [0, 1, 9]).num_cached_tokens == 2
    manager.check()


# --- merging ---------------------------------------------------------------------------------------------------------


def test_a_prompt_shorter_than_a_block_that_is_committed_with_what_follows_is_found_by_the_whole_block() -> None:
    manager = make_manager()
    handle = manager.allocate("first of its scope", [1, 2, 3])
    manager.extend(handle, 1)
    manager.commit(handle, [1, 2, 3, 4])
    manager.check()
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 4


def test_equal_blocks_computed_twice_become_one() -> None:
    manager = make_manager()
    first, second = (manager.allocate(name, list(range(10))) for name in "ab")
    manager.commit(first, 10)
    manager.commit(second, 10)
    assert second.block_ids()[:2].tolist() == first.block_ids()[:2].tolist()
    assert second.block_ids()[2] != first.block_ids()[2]  # the last blocks are not full
    assert manager.stats().blocks_merged == second.stats.merged_blocks == 2
    assert manager.stats().pool().referenced == 4
    manager.check()


def test_a_longer_run_is_cut_where_the_shorter_one_ends() -> None:
    manager = make_manager()
    long = manager.allocate("long", list(range(16)))
    short = manager.allocate("short", [*range(8), 50, 51, 52, 53])
    manager.commit(long, 16)
    manager.commit(short, 12)
    assert short.block_ids()[:2].tolist() == long.block_ids()[:2].tolist()
    assert manager.match_prefix([*range(8), 50, 51, 52, 53, 1]).num_blocks == 3
    manager.check()


def test_a_merge_gives_a_window_back_what_the_tree_had_lost() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    first = running(manager, "first", 32)
    manager.cache.evict(6)
    second = manager.allocate("second", [*range(16), 99])
    assert second.num_cached_tokens == 0  # what token 16 would read is gone
    manager.commit(second, 17)
    assert manager.match_prefix([*range(16), 1]).num_blocks == 4
    manager.check()
    manager.free(first)
    manager.free(second)
    manager.check()


def test_what_is_decoded_is_matchable_block_by_block_while_the_request_runs() -> None:
    manager = make_manager()
    handle = running(manager, "a", 4)
    for token in range(4, 16):
        manager.extend(handle)
        manager.commit_batch([handle], [token])
        assert manager.match_prefix([*range(16), 1]).num_blocks == (token + 1) // 4
    follower = manager.allocate("b", [*range(16), 1])
    manager.extend(handle)
    manager.commit_batch([handle], [16])
    assert follower.num_cached_tokens == 16
    manager.check()


# --- last logits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [2, 4, 6, 8])
def test_a_prompt_whose_logits_are_stored_needs_no_forward_pass(num_tokens: int) -> None:
    manager = make_manager()
    handle = running(manager, "a", num_tokens)
    ends_with_a_block = num_tokens % 4 == 0
    # The others once decoding fills their block
    assert manager.store_last_logits(handle, "logits") is ends_with_a_block
    manager.extend(handle, 8)
    manager.commit(handle, list(range(num_tokens, num_tokens + 8)))
    manager.free(handle)
    again = manager.allocate("b", list(range(num_tokens)))
    assert (again.num_cached_tokens, again.last_logits) == (num_tokens, "logits")
    assert lengths(again) == (num_tokens, num_tokens, num_tokens)
    assert manager.stats().full_hits_with_logits == 1
    manager.check()


def test_logits_are_stored_behind_a_block_that_decoding_has_just_filled() -> None:
    manager = make_manager()
    handle = running(manager, "a", 4)
    manager.extend(handle, 4)
    for token in range(4, 8):
        manager.commit(handle, [token])
    assert manager.store_last_logits(handle, "logits", num_tokens=8)
    assert manager.match_prefix(list(range(8))).last_logits == "logits"


def test_logits_survive_a_split_and_leave_with_their_block() -> None:
    manager = make_manager()
    handle = running(manager, "a", 8)
    manager.store_last_logits(handle, "of 8")
    manager.store_last_logits(handle, "of 4", num_tokens=4)
    manager.free(handle)
    manager.free(manager.allocate("b", [0, 1, 2, 3, 99]))  # splits behind the first block
    assert manager.match_prefix(list(range(8))).last_logits == "of 8"
    assert manager.match_prefix(list(range(4))).last_logits == "of 4"
    manager.cache.evict(1)
    manager.free(running(manager, "c", 8))
    assert not manager.match_prefix(list(range(8))).has_last_logits
    assert manager.match_prefix(list(range(4))).has_last_logits
    manager.check()


def test_logits_of_a_run_whose_tail_was_evicted_are_gone() -> None:
    manager = make_manager()
    handle = running(manager, "a", 8)
    manager.store_last_logits(handle, "of 8")
    manager.free(handle)
    manager.cache.evict(1)
    handle = running(manager, "b", 8)
    assert not manager.match_prefix(list(range(8))).has_last_logits


def test_logits_need_a_committed_prompt_that_can_be_found() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 7)
    with pytest.raises(SequenceStateError, match="commit the whole prompt"):
        manager.store_last_logits(handle, 1)
    manager.commit(handle, 1)
    manager.cache.invalidate(list(range(8)))
    assert manager.store_last_logits(handle, 1) is False
    unnamed = manager.allocate("b", num_tokens=4)
    manager.commit(unnamed, 4)
    with pytest.raises(SequenceStateError):
        manager.store_last_logits(unnamed, 1)
    silent = make_manager(enable_prefix_caching=False)
    assert silent.store_last_logits(running(silent, "a", 4), 1) is False


def test_a_reset_forgets_logits_also_of_the_shortest_prompts() -> None:
    manager = make_manager()
    handle = running(manager, "a", 2)
    manager.store_last_logits(handle, "logits")
    manager.cache.reset()
    manager.extend(handle, 2)
    manager.commit(handle, [2, 3])
    assert not manager.match_prefix([0, 1]).has_last_logits


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_freed_as_a_whole_or_not_at_all() -> None:
    manager = make_manager()
    handles = [running(manager, i, 6, first=100 * i) for i in range(3)]
    with pytest.raises(SequenceStateError, match="twice"):
        manager.free_batch([*handles, handles[0]])
    freed = manager.allocate("freed", [1])
    manager.free(freed)
    with pytest.raises(UnknownRequestError):
        manager.free_batch([*handles, freed])
    assert manager.handles == handles
    manager.free_batch(manager.batch(handles))
    assert manager.handles == []
    assert manager.stats().pool().cached == 3
    manager.check()


class ChangingId:
    """An id that can be made to raise, or to look like another one, after its request was admitted."""

    def __init__(self, number: int) -> None:
        self.number: int | None = number

    def __hash__(self) -> int:
        if self.number is None:
            raise RuntimeError("no hash today")
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChangingId) and self.number == other.number


@pytest.mark.parametrize("layers", [[FULL], [FULL, SLIDING]], ids=["simple", "windowed"])
@pytest.mark.parametrize("changed", [None, 3, 7], ids=["raises", "is_like_another", "is_unknown"])
@pytest.mark.parametrize("together", [False, True])
def test_a_request_whose_id_changed_is_not_freed_halfway(
    layers: list[LayerSpec], changed: int | None, together: bool
) -> None:
    manager = make_manager(*layers, gpu_blocks=24)
    handles = [running(manager, ChangingId(number), 9, first=20 * number) for number in range(1, 4)]
    odd = handles[1].request_id
    odd.number = changed
    before = manager.stats()
    with pytest.raises(InvalidArgumentError, match="its id"):
        manager.free_batch(handles) if together else manager.free(handles[1])
    odd.number = 2
    manager.check()
    assert manager.stats() == before
    assert manager.handles == handles
    manager.free_batch(handles)
    assert manager.stats().num_sequences == 0
    manager.check()


@pytest.mark.parametrize("keep", [True, False])
def test_requests_of_every_kind_can_be_freed_together(keep: bool) -> None:
    manager = make_manager(host_blocks=8)
    plain, second, parent, swapped = (running(manager, i, 6, first=100 * i) for i in range(4))
    (child,) = manager.fork(parent, "child")
    manager.swap_out(swapped)
    unwritten = manager.allocate("unwritten", list(range(900, 909)))
    manager.free_batch([plain, child, second, swapped, unwritten, parent], keep=keep)
    assert manager.handles == []
    pool = manager.stats().pool()
    assert pool.referenced == 0
    assert pool.cached == (4 if keep else 0)
    assert manager.stats().pool(tier=Tier.HOST).free == 8
    manager.check()


def test_a_freed_handle_says_so() -> None:
    manager = make_manager()
    handle = running(manager, "a", 6)
    assert repr(handle) == "<KVCacheHandle 'a' reserved=6 written=6 committed=6 blocks=2>"
    assert handle.is_live
    manager.free(handle)
    assert repr(handle) == "<KVCacheHandle 'a' freed>"
    assert not handle.is_live
    for read in ("num_reserved", "num_written", "num_committed", "num_blocks", "token_ids"):
        with pytest.raises(UnknownRequestError, match="'a' was freed"):
            getattr(handle, read)
    with pytest.raises(UnknownRequestError):
        handle.block_ids()


def test_a_swapped_handle_says_so() -> None:
    manager = make_manager(host_blocks=4)
    handle = running(manager, "a", 6)
    manager.swap_out(handle)
    assert repr(handle).endswith(" swapped>")


def test_a_block_table_is_a_sequence_of_plain_values() -> None:
    manager = make_manager()
    table = running(manager, "a", 6).block_table()
    assert table == [0, 1]
    assert table[0] == 0
    assert table[:] == [0, 1]
    assert table != [0]
    assert (table == 5) is False
    assert repr(table) == "BlockTable([0, 1])"
    assert 1 in table


# --- invalidation ----------------------------------------------------------------------------------------------------


def test_a_prefix_is_invalidated_with_all_that_follows_it() -> None:
    manager = make_manager()
    manager.free(running(manager, "a", 16))
    manager.free(manager.allocate("b", [*range(8), 50, 51, 52, 53, 54]))
    assert manager.cache.invalidate(list(range(8))) == 3
    assert manager.match_prefix([*range(16), 1]).num_blocks == 1
    assert manager.cache.invalidate([7, 7, 7, 7]) == 0
    assert manager.cache.invalidate([1]) == 0
    assert manager.stats().evictions["invalidated"] == 3
    manager.check()


def test_a_scope_is_invalidated_without_touching_another() -> None:
    manager = make_manager()
    mine, yours = ReuseScope(tenant="mine"), ReuseScope(tenant="yours")
    for scope in (mine, yours):
        manager.free(running(manager, scope, 8, scope=scope))
    assert manager.cache.invalidate(scope=mine) == 2
    assert manager.cache.invalidate(scope=mine) == 0
    assert manager.match_prefix([*range(8), 1], yours).num_blocks == 2
    assert manager.cache.invalidate(list(range(8)), scope=yours) == 1
    manager.check()


def test_a_session_is_invalidated_with_what_others_built_on_it() -> None:
    manager = make_manager()
    manager.free(running(manager, "before", 4))
    manager.free(running(manager, "a", 8, session="s"))
    manager.free(running(manager, "b", 12))
    assert manager.cache.invalidate(session="unknown") == 0
    assert manager.cache.invalidate(session="s") == 2
    assert manager.match_prefix([*range(12), 1]).num_blocks == 1
    assert manager.cache.invalidate(session="s") == 0
    manager.check()


@pytest.mark.parametrize("copy", [True, False], ids=["copied", "taken_over"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "live"])
def test_a_session_is_invalidated_with_a_block_whose_beginning_another_took_from_it(copy: bool, ended: bool) -> None:
    manager = make_manager(copy_on_partial_reuse=copy)
    manager.free(running(manager, "common", 4))
    manager.free(running(manager, "a", 8, session="s"))
    borrower = manager.allocate("b", [*range(6), *range(20, 26)], session="t")
    assert borrower.num_cached_tokens == 6
    manager.commit(borrower)
    if ended:
        manager.free(borrower)
    assert manager.cache.invalidate(session="s") == (3 if copy else 2)
    assert manager.match_prefix([*range(6), *range(20, 26), 1]).num_tokens == 4
    assert manager.cache.invalidate(session="t") == 0
    manager.check()


def test_a_session_is_invalidated_with_all_that_goes_back_to_its_tokens() -> None:
    manager = make_manager()
    manager.free(running(manager, "a", 4, session="s"))
    for name, fourth in (("b", 20), ("c", 30)):
        borrower = manager.allocate(name, [0, 1, 2, fourth, *range(8)], session=name)
        assert borrower.num_cached_tokens == 3
        manager.commit(borrower)
        manager.free(borrower)
        manager.cache.evict(1)  # the block that it copied from
    assert manager.match_prefix([*range(4), 1]).num_blocks == 0
    manager.allocate("d", [0, 1, 2, 30, *range(4), *range(50, 54)])  # divides the run of "c"
    assert manager.cache.invalidate(session="s") > 0
    assert manager.match_prefix([0, 1, 2, 30, *range(8)]).num_tokens == 0
    manager.check()


def test_a_session_is_invalidated_with_what_a_rewound_request_copied_from_it() -> None:
    manager = make_manager()
    manager.free(running(manager, "a", 4, session="s"))
    reader = manager.allocate("b", [*range(4), 9], session="t")
    manager.commit(reader)
    manager.rewind(reader, 3)
    manager.extend(reader, 2)
    manager.commit(reader, [20, 21])
    manager.free(reader)
    assert manager.match_prefix([0, 1, 20, 21, 1]).num_tokens == 4
    manager.cache.invalidate(session="s")
    assert manager.match_prefix([0, 1, 20, 21, 1]).num_tokens == 0
    manager.check()


@pytest.mark.parametrize("evicted", [True, False])
def test_a_request_on_the_host_does_not_bring_back_what_a_session_computed(evicted: bool) -> None:
    manager = make_manager(host_blocks=16)
    manager.free(running(manager, "a", 8, session="s"))
    reader, other = running(manager, "b", 13), running(manager, "c", 13, first=50)
    manager.swap_out(reader, other)
    if evicted:
        manager.cache.evict(16)
    manager.cache.invalidate(session="s")
    manager.swap_in(reader, other)
    for handle in (reader, other):
        manager.extend(handle, 4)
        manager.commit(handle, [1, 2, 3, 4])
        manager.free(handle)
    assert manager.match_prefix([*range(13), 1, 2, 3, 4]).num_tokens == 0
    assert manager.match_prefix([*range(50, 63), 1, 2, 3, 4]).num_tokens == 16
    manager.check()


def test_a_live_request_survives_the_invalidation_of_its_blocks() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = running(manager, "a", 20, session="s")
    (child,) = manager.fork(handle, "b")
    assert manager.cache.invalidate(session="s") == 5
    for live in (handle, child):
        manager.extend(live, 8)
        manager.commit(live, list(range(50, 58)))
        manager.check()
    assert manager.match_prefix([*range(20), 50, 51, 1]).num_tokens == 0
    manager.rewind(handle, 10)
    manager.check()
    manager.free(handle)
    manager.free(child)
    assert manager.stats().pool().free == 64
    manager.check()


@pytest.mark.parametrize(
    "arguments",
    [{}, {"prefix": [1], "session": "s"}, {"scope": ReuseScope(), "session": "s"}, {"session": 5}, {"scope": "x"}],
)
def test_an_invalidation_names_one_thing(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        make_manager().cache.invalidate(**arguments)


def test_a_rewind_to_the_start_gives_every_block_of_the_pool_back() -> None:
    manager = make_manager(gpu_blocks=4)
    handle = manager.allocate("a", num_tokens=16)
    manager.rewind(handle, 16)
    assert manager.stats().pool().free == 4
    manager.check()


def test_more_requests_than_there_were_rows_at_first_get_rows() -> None:
    manager = make_manager(gpu_blocks=100)
    handles = [manager.allocate(number, [number, 1]) for number in range(70)]
    for number, handle in enumerate(handles):
        manager.commit(handle, [number, 1])
    assert [handle.num_committed for handle in handles] == [2] * 70
    manager.check()
