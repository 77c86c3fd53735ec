"""What an admission may count on: the answer of `can_allocate`, the watermark, and every pool."""

from __future__ import annotations

import pytest

from kvpool import AllocStatus, KVCacheConfig, KVCacheManager, LayerSpec, Tier
from kvpool.errors import (
    DuplicateRequestError,
    InvalidArgumentError,
    KVPoolError,
    OutOfBlocksError,
    UnknownRequestError,
)
from managers import FULL, cached, commit_all, make_manager, manager_with


@pytest.mark.parametrize("name", ["p3_allocate", "p4_extend", "v3_allocate_midway", "f30_partial_allocation"])
def test_what_does_not_fit_raises_and_takes_nothing(name: str) -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=2, head_dim=8), gpu_blocks=(4, 2))
    handle = manager.allocate("a", [1, 2, 3, 4])
    free = [pool.free for pool in manager.stats().pools]
    with pytest.raises(OutOfBlocksError):
        manager.extend(handle, 6) if "extend" in name else manager.allocate("b", num_tokens=8)
    assert [pool.free for pool in manager.stats().pools] == free
    assert [len(handle.block_ids(group)) for group in (0, 1)] == [1, 1]  # all groups stay equally long


def test_a_live_id_cannot_be_allocated_again() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1])
    with pytest.raises(DuplicateRequestError):
        manager.allocate("a", [2])
    assert manager.handles == [handle]


def test_a_double_free_is_an_error_and_gives_no_block_two_owners() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1])
    manager.free(handle)
    with pytest.raises(UnknownRequestError):
        manager.free(handle)
    handles = [manager.allocate(i, [100 + i]) for i in range(16)]
    assert len({int(h.block_ids()[0]) for h in handles}) == 16


def test_a_new_owner_sees_no_metadata_of_the_old_one() -> None:
    manager = make_manager(gpu_blocks=2)
    cached(manager, 8)
    handle = manager.allocate("b", num_tokens=8)
    assert (handle.num_written, handle.num_committed, handle.token_ids.tolist()) == (0, 0, [])
    assert handle.stats.cached_tokens == 0


def test_can_allocate_says_ok_later_or_never() -> None:
    manager = make_manager(gpu_blocks=4)
    assert manager.can_allocate(num_tokens=16).status is AllocStatus.OK
    manager.allocate("a", [1])
    assert manager.can_allocate(num_tokens=16).status is AllocStatus.LATER
    assert manager.can_allocate(num_tokens=17).status is AllocStatus.NEVER


def test_unknown_requests_are_errors_everywhere() -> None:
    manager, other = make_manager(), make_manager()
    stranger = other.allocate("a", [1])
    for operation in (manager.free, manager.fork, manager.swap_out, lambda h: manager.extend(h, 1)):
        with pytest.raises(KVPoolError):
            operation(stranger)
    with pytest.raises(UnknownRequestError):
        manager.fork(stranger, "b")


@pytest.mark.parametrize("num_tokens", [0, -1, -(2**70)])
def test_a_request_needs_a_positive_number_of_tokens(num_tokens: int) -> None:
    with pytest.raises(InvalidArgumentError):
        make_manager().allocate("a", num_tokens=num_tokens)


def test_asking_for_no_blocks_takes_none() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1])
    assert manager.extend(handle, 0).shape == (1, 0)
    assert manager.cache.evict(0) == 0
    assert manager._cache.gpu_pools[0].take(0).tolist() == []
    assert manager.inspect.num_free_blocks() == 15


def test_the_watermark_of_a_small_pool_is_one_block() -> None:
    manager = make_manager(gpu_blocks=4, watermark=0.01)
    assert manager.can_allocate(num_tokens=12).status is AllocStatus.OK
    assert manager.can_allocate(num_tokens=13).status is AllocStatus.NEVER


def test_a_prompt_over_the_limit_is_refused_even_if_less_is_reserved() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=8, max_seq_len=6))
    assert manager.can_allocate([0] * 8, reserve=2).status is AllocStatus.NEVER
    with pytest.raises(InvalidArgumentError, match="max_seq_len=6"):
        manager.allocate("a", [0] * 8, reserve=2)


@pytest.mark.parametrize("lookahead", [0, 3])
def test_can_allocate_says_what_allocate_reuses_also_below_the_watermark(lookahead: int) -> None:
    manager = manager_with(block_size=2, gpu_blocks=12, watermark=0.1)
    commit_all(manager, manager.allocate("a", [1, 1, *[0] * 15]))
    answer = manager.can_allocate([1, 0], lookahead=lookahead)
    assert manager.allocate("b", [1, 0], lookahead=lookahead).num_cached_tokens == answer.num_cached_tokens == 1


def test_given_a_cached_prefix_that_a_request_reuses_then_it_is_no_room_for_the_rest_of_it() -> None:
    manager = make_manager(gpu_blocks=6)
    live = manager.allocate("live", num_tokens=8)
    prompt = cached(manager, 8, first=50)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("longer", [*prompt, *range(100, 112)])  # three more blocks, and two are free
    manager.check()
    assert manager.match_prefix([*prompt, 1]).num_blocks == 2
    manager.free(live)
    assert manager.allocate("longer", [*prompt, *range(100, 112)]).num_cached_tokens == 8


def test_given_a_prompt_that_shares_part_of_a_block_then_it_goes_without_where_that_block_is_the_room_it_needs() -> (
    None
):
    manager = make_manager(gpu_blocks=6)
    manager.allocate("live", num_tokens=8)
    prompt = cached(manager, 8, first=50)
    tokens = [*prompt[:3], *range(100, 109)]
    assert manager.match_prefix(tokens).num_tokens == 3
    handle = manager.allocate("other", tokens)  # three blocks: two are free, one must be evicted
    assert handle.num_cached_tokens == 0
    manager.check()
    assert manager.stats().evictions["capacity"] == 1


def test_given_exactly_as_many_free_blocks_as_a_request_needs_then_nothing_is_evicted() -> None:
    manager = make_manager(gpu_blocks=6)
    cached(manager, 8, first=50)
    manager.allocate("all", num_tokens=16)
    assert sum(manager.stats().evictions.values()) == 0


def test_given_a_prompt_that_ends_with_a_cached_block_then_its_last_token_counts_on_no_tier() -> None:
    manager = make_manager(host_blocks=8)
    prompt = cached(manager, 8)
    assert manager.match_prefix(prompt).tokens_by_tier == {Tier.GPU: 7}
    assert manager.match_prefix(prompt[:7]).tokens_by_tier == {Tier.GPU: 4}  # three more are part of a block
    assert manager.match_prefix([*prompt, 1]).tokens_by_tier == {Tier.GPU: 8}
    manager.cache.offload(1)
    assert manager.match_prefix(prompt).tokens_by_tier == {Tier.GPU: 4, Tier.HOST: 3}
