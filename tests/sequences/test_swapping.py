from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import managers
from kvpool import AllocStatus, CopyKind, LayerSpec, Retention, ReuseScope, Tier
from kvpool.errors import InvalidArgumentError, NeverFitsError, OutOfBlocksError, SequenceStateError
from managers import FULL, running

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)
CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)


make_manager = partial(managers.make_manager, host_blocks=16)


def test_a_swapped_request_keeps_its_lengths_and_tokens_and_nothing_on_the_gpu() -> None:
    manager = make_manager(enable_prefix_caching=False)
    handle = running(manager, "a", 10)
    manager.extend(handle, 3)
    assert manager.swap_out(handle) == 3  # the place for tokens that were never written is not copied
    assert (handle.num_reserved, handle.num_written, handle.num_committed) == (13, 10, 10)
    assert (handle.is_swapped, handle.token_ids.tolist()) == (True, list(range(10)))
    assert manager.inspect.num_free_blocks() == 16
    assert manager.stats().num_swapped == 1
    manager.check()


def test_a_request_that_comes_back_goes_on_where_it_was() -> None:
    manager = make_manager()
    handle = running(manager, "a", 10)
    manager.extend(handle, 3)
    manager.swap_out(handle)
    manager.cache.evict(16)
    assert manager.swap_in(handle) == 3
    assert (handle.block_ids() >= 0).all()
    assert handle.num_blocks == 4
    manager.extend(handle)
    manager.commit(handle, [50, 51, 52, 53])
    assert manager.match_prefix([*range(10), 50, 51, 1]).num_blocks == 3
    assert manager.stats().pool(tier=Tier.HOST).free == 16
    manager.check()


def test_what_is_still_cached_on_the_gpu_is_not_copied_back() -> None:
    manager = make_manager()
    handle = running(manager, "a", 10)
    published = handle.block_ids()[:2].tolist()
    manager.swap_out(handle)
    manager.take_copies()
    assert manager.swap_in(handle) == 1
    assert handle.block_ids()[:2].tolist() == published
    (op,) = manager.take_copies()
    assert (op.kind, op.num_blocks) == (CopyKind.SWAP_IN, 1)
    manager.check()


def test_part_of_a_cached_run_is_enough() -> None:
    manager = make_manager()
    handle = running(manager, "a", 18)
    manager.swap_out(handle)
    manager.cache.evict(2)
    assert manager.swap_in(handle) == 3
    other = running(manager, "b", 8)  # the run can be shared again
    assert other.num_cached_tokens == 7
    manager.check()


def test_requests_swapped_in_together_share_what_one_of_them_had_to_cut() -> None:
    manager = make_manager()
    long, short = running(manager, "long", 16), running(manager, "short", 9)
    manager.swap_out(long, short)
    manager.swap_in(short, long)
    assert short.block_ids()[:2].tolist() == long.block_ids()[:2].tolist()
    manager.check()


def test_one_of_two_forks_may_leave_alone() -> None:
    manager = make_manager()
    parent = running(manager, "parent", 10)
    (child,) = manager.fork(parent, "child")
    assert manager.swap_out(child) == 3
    manager.extend(parent)
    assert manager.take_copies()[-1].kind is not CopyKind.COPY_ON_WRITE  # the parent is alone on the GPU
    manager.swap_in(child)
    manager.extend(child)
    assert child.block_ids()[2] != parent.block_ids()[2]
    manager.check()


def test_forks_come_back_shared_and_still_copy_before_they_write() -> None:
    manager = make_manager()
    parent = running(manager, "parent", 10)
    (child,) = manager.fork(parent, "child")
    manager.swap_out(parent, child)
    manager.cache.reset()
    assert manager.swap_in(parent, child) == 3
    manager.take_copies()
    manager.extend(child)
    assert [op.kind for op in manager.take_copies()] == [CopyKind.COPY_ON_WRITE]
    assert child.block_ids()[2] != parent.block_ids()[2]
    manager.check()


def test_windows_move_only_what_they_cover() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=32, host_blocks=32)
    handle = running(manager, "a", 24)
    assert manager.swap_out(handle) == 6 + 2
    assert manager.swap_in(handle) == 6 + 2
    assert list(handle.block_table(1))[:4] == [None] * 4
    manager.extend(handle, 4)
    manager.commit(handle, [9, 9, 9, 9])
    manager.check()


def test_forks_with_windows_come_back_shared() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=32, host_blocks=32, offload_on_evict=False)
    parent = running(manager, "parent", 24)
    forks = manager.fork(parent, "b", "c")
    manager.swap_out(parent, *forks)
    manager.cache.reset()
    assert manager.swap_in(parent, *forks) == 8
    manager.check()
    for handle in (parent, *forks):
        manager.free(handle)
    manager.check()


def test_a_run_that_went_to_the_host_meanwhile_adopts_the_blocks_that_come_back() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=32, host_blocks=32)
    handle = running(manager, "a", 24)
    manager.swap_out(handle)
    manager.cache.offload(100)
    manager.swap_in(handle)
    assert manager.match_prefix([*range(24), 1]).tokens_by_tier == {Tier.GPU: 24}
    manager.check()
    manager.free(handle)
    manager.check()


def test_the_encoders_blocks_travel_too() -> None:
    manager = make_manager(FULL, CROSS)
    handle = running(manager, "a", 5, cross_tokens=6)
    assert manager.swap_out(handle) == 2 + 2
    manager.cache.reset()
    assert manager.swap_in(handle) == 4
    assert (handle.block_ids(1) >= 0).all()
    manager.check()


def test_an_empty_list_moves_nothing() -> None:
    manager = make_manager()
    assert (manager.swap_out(), manager.swap_in()) == (0, 0)
    assert manager.can_swap_out().status is AllocStatus.OK
    assert manager.can_swap_in().status is AllocStatus.OK


# --- what fits -------------------------------------------------------------------------------------------------------


def test_can_swap_out_says_ok_later_or_never() -> None:
    manager = make_manager(host_blocks=4, enable_prefix_caching=False)
    small, large = running(manager, "small", 12), running(manager, "large", 20)
    assert manager.can_swap_out(small).status is AllocStatus.OK
    never = manager.can_swap_out(large)
    assert (never.status, never.blocks_needed, never.blocks_available) == (AllocStatus.NEVER, (5,), (4,))
    manager.swap_out(small)
    third = running(manager, "third", 8)
    assert manager.can_swap_out(third).status is AllocStatus.LATER
    with pytest.raises(OutOfBlocksError, match="HOST"):
        manager.swap_out(third)
    with pytest.raises(NeverFitsError):
        manager.swap_out(large)
    assert not third.is_swapped


def test_cached_host_blocks_make_room_for_a_swapped_request() -> None:
    manager = make_manager(host_blocks=4)
    manager.free(running(manager, "old", 16, first=500))
    manager.cache.offload(4)
    handle = running(manager, "a", 12)
    assert manager.can_swap_out(handle)
    manager.swap_out(handle)
    assert manager.stats().pool(tier=Tier.HOST).referenced == 3
    manager.check()


def test_can_swap_in_keeps_the_watermark_and_says_ok_later_or_never() -> None:
    manager = make_manager(gpu_blocks=8, watermark=0.25, enable_prefix_caching=False)
    handle = running(manager, "a", 20)
    manager.swap_out(handle)
    assert manager.can_swap_in(handle).status is AllocStatus.OK
    manager.allocate("b", num_tokens=8)
    assert manager.can_swap_in(handle).status is AllocStatus.LATER
    manager.cache.resize(6)
    assert manager.can_swap_in(handle).status is AllocStatus.LATER
    manager.free(manager.get("b"))
    manager.cache.resize(4)
    assert manager.can_swap_in(handle).status is AllocStatus.NEVER


def test_a_request_that_cannot_come_back_stays_out_unchanged() -> None:
    manager = make_manager(gpu_blocks=4, enable_prefix_caching=False)
    handle = running(manager, "a", 12)
    manager.swap_out(handle)
    manager.allocate("b", num_tokens=8)
    with pytest.raises(OutOfBlocksError, match="swapping in 1 requests"):
        manager.swap_in(handle)
    assert handle.is_swapped
    assert manager.inspect.num_free_blocks() == 2
    manager.check()


def test_idle_cache_that_will_be_reused_is_not_counted_as_supply() -> None:
    manager = make_manager(gpu_blocks=4)
    handle = running(manager, "a", 16)
    manager.swap_out(handle)
    answer = manager.can_swap_in(handle)
    assert (answer.blocks_needed, answer.blocks_available) == ((0,), (0,))
    assert answer
    assert manager.swap_in(handle) == 0


def test_quotas_of_others_hold_when_a_request_comes_back() -> None:
    manager = make_manager(gpu_blocks=4)
    manager.cache.set_quota("t", guaranteed=2)
    manager.free(running(manager, "old", 8, first=500, scope=ReuseScope(tenant="t")))
    handle = manager.allocate("a", num_tokens=8)
    manager.commit(handle, 8)
    manager.swap_out(handle)
    manager.allocate("b", num_tokens=4)
    assert manager.can_swap_in(handle).status is AllocStatus.LATER


def test_a_pin_on_what_a_request_finds_when_it_comes_back_protects_no_other_run_of_its_tenant_any_more() -> None:
    """Then the rest of what is guaranteed to the tenant is no room for others."""
    manager = make_manager(gpu_blocks=8)
    ours = ReuseScope(tenant="t")
    found, other = running(manager, "found", 16, scope=ours), running(manager, "other", 8, first=700)
    manager.swap_out(found, other)
    manager.cache.evict(8)
    manager.swap_in(found)
    manager.cache.pin(list(range(16)), scope=ours)
    manager.swap_out(found)
    manager.free(running(manager, "old", 12, first=500, scope=ours))
    manager.cache.set_quota("t", guaranteed=4)
    answer = manager.can_swap_in(found, other)
    assert (answer.blocks_needed, answer.blocks_available) == ((2,), (1,))
    with pytest.raises(OutOfBlocksError, match="swapping in 2 requests"):
        manager.swap_in(found, other)
    assert found.is_swapped
    assert other.is_swapped
    manager.check()
    manager.cache.set_quota("t", guaranteed=2)
    manager.swap_in(found, other)
    manager.check()


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda manager, handle: manager.extend(handle),
        lambda manager, handle: manager.commit(handle, [1]),
        lambda manager, handle: manager.fork(handle, "b"),
        lambda manager, handle: manager.rewind(handle, 1),
        lambda manager, handle: manager.batch([handle]),
        lambda manager, handle: manager.swap_out(handle),
        lambda manager, handle: manager.blocks_needed(handle),
        lambda manager, handle: manager.store_last_logits(handle, 1),
    ],
)
def test_a_swapped_request_must_come_back_first(use: Any) -> None:
    manager = make_manager()
    handle = running(manager, "a", 8)
    manager.swap_out(handle)
    with pytest.raises(SequenceStateError, match="'a' is swapped out; call swap_in first"):
        use(manager, handle)
    manager.check()


def test_a_request_cannot_be_named_twice() -> None:
    manager = make_manager()
    handle = running(manager, "a", 8)
    for use in (manager.can_swap_out, manager.swap_out, manager.can_swap_in, manager.swap_in):
        with pytest.raises(InvalidArgumentError, match="twice"):
            use(handle, handle)


def test_a_request_that_is_here_cannot_be_swapped_in() -> None:
    manager = make_manager()
    handle = running(manager, "a", 8)
    for use in (manager.can_swap_in, manager.swap_in):
        with pytest.raises(SequenceStateError, match="'a' is not swapped out"):
            use(handle)


def test_swapped_requests_can_be_freed_alone_and_in_a_batch() -> None:
    manager = make_manager()
    first, second, third = (running(manager, name, 8, first=100 * i) for i, name in enumerate("abc"))
    manager.swap_out(first, second)
    manager.free(first)
    manager.free_batch([second, third])
    assert manager.stats().pool(tier=Tier.HOST).free == 16
    assert manager.handles == []
    manager.check()


def test_swaps_are_counted_in_requests_and_in_blocks() -> None:
    manager = make_manager()
    handle = running(manager, "a", 10)
    manager.swap_out(handle)
    manager.swap_in(handle)
    stats = manager.stats()
    assert (stats.swaps_out, stats.swaps_in, stats.swapped_blocks) == (1, 1, 3 + 1)
    assert handle.stats.swaps == 1


@pytest.mark.parametrize("sink_tokens", [0, 5])
def test_given_a_narrowed_request_when_it_comes_back_then_it_has_its_sinks_and_no_other_blocks_before_its_windows(
    sink_tokens: int,
) -> None:
    sliding = LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=sink_tokens)
    manager = make_manager(FULL, sliding, gpu_blocks=64, host_blocks=32)
    handle = manager.allocate("a", list(range(40)))
    manager.narrow(handle, 40)
    before = [block is None for block in handle.block_table(1)]
    assert sum(before) == 8 - -(-sink_tokens // 4)
    manager.swap_out(handle)
    manager.swap_in(handle)
    manager.check()
    assert [block is None for block in handle.block_table(1)] == before


@pytest.mark.parametrize("layers", [(FULL,), (FULL, SLIDING), (FULL, CROSS)])
@pytest.mark.parametrize("swapped", [False, True])
def test_requests_that_are_freed_together_leave_what_they_leave_one_by_one(
    layers: tuple[LayerSpec, ...], swapped: bool
) -> None:
    left = []
    for together in (True, False):
        manager = make_manager(*layers, gpu_blocks=64, host_blocks=64)
        cross: dict[str, Any] = {"cross_tokens": 5} if CROSS in layers else {}
        handles = [
            running(manager, "plain", 10, **cross),
            running(manager, "kept", 10, first=50, retention=Retention(decode_priority=90), **cross),
            running(manager, "last", 21, first=100, **cross),
        ]
        if swapped:
            manager.swap_out(handles[2])
        if together:
            manager.free_batch(handles)
        else:
            for handle in handles:
                manager.free(handle)
        manager.check()
        found = [manager.match_prefix(range(first, first + 22)).num_tokens for first in (0, 50, 100)]
        left.append((found, [pool.free for pool in manager.stats().pools]))
    assert left[0] == left[1]


def test_given_forks_and_a_stranger_that_were_swapped_out_together_then_only_the_forks_share_when_they_are_back() -> (
    None
):
    manager = make_manager(gpu_blocks=16, host_blocks=16)
    one = manager.allocate("one", list(range(6)))
    manager.commit(one)
    (fork,) = manager.fork(one, "fork")
    stranger = manager.allocate("stranger", list(range(100, 106)))
    manager.commit(stranger)
    manager.swap_out(one, stranger, fork)
    manager.swap_in(one, stranger, fork)
    assert one.family == fork.family == {one.row, fork.row}
    assert stranger.family is None
    assert one.block_ids().tolist() == fork.block_ids().tolist()
    manager.extend_batch([one, fork])
    manager.commit_batch([one, fork], [7, 8])
    assert one.block_ids()[-1] != fork.block_ids()[-1]
    manager.check()
