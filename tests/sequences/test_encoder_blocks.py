"""Blocks of an encoder's tokens: requests with the same named input share one set of them."""

from __future__ import annotations

import pytest

from kvpool import KVCacheHandle, KVCacheManager, LayerSpec, ReuseScope
from managers import FULL, make_manager

CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)
HEARD = ReuseScope(encoder="a clip")
GROUP = 1  # of the encoder's tokens


@pytest.fixture
def manager() -> KVCacheManager:
    """With blocks of 4 tokens, of which the encoder's input takes 3."""
    return make_manager(FULL, CROSS, gpu_blocks=40, host_blocks=40)


def admit(manager: KVCacheManager, name: str, scope: ReuseScope = HEARD, cross_tokens: int = 10) -> KVCacheHandle:
    return manager.allocate(name, [1, 2, 3, 4, 5], scope=scope, cross_tokens=cross_tokens)


def blocks(handle: KVCacheHandle) -> list[int]:
    return list(handle.block_ids(GROUP))


def used(manager: KVCacheManager) -> int:
    return 40 - manager.inspect.num_free_blocks()


def test_given_the_same_input_then_its_blocks_are_shared_until_the_last_request_ends(manager: KVCacheManager) -> None:
    first = admit(manager, "a")
    assert (used(manager), first.num_cached_fixed_tokens) == (5, 0)
    assert manager.can_allocate([1, 2, 3, 4, 5], scope=HEARD, cross_tokens=10).blocks_needed == (2,)
    second = admit(manager, "b")
    assert (used(manager), second.num_cached_fixed_tokens) == (7, 10)
    assert blocks(second) == blocks(first)
    manager.check()

    manager.free(first)
    third = admit(manager, "c")
    assert blocks(third) == blocks(second)
    manager.free(second)
    manager.free(third)
    manager.check()
    assert used(manager) == 0
    assert admit(manager, "d").num_cached_fixed_tokens == 0  # nothing is kept for later


@pytest.mark.parametrize(
    ("scope", "num_tokens"),
    [
        (ReuseScope(encoder="another clip"), 10),
        (ReuseScope(encoder="a clip", tenant="other"), 10),
        (ReuseScope(encoder="a clip", salt="s"), 10),
        (HEARD, 9),
        (ReuseScope(), 10),
    ],
)
def test_given_another_input_scope_or_length_then_a_request_has_its_own_blocks(
    manager: KVCacheManager, scope: ReuseScope, num_tokens: int
) -> None:
    first, own = admit(manager, "a"), admit(manager, "b", scope, num_tokens)
    assert own.num_cached_fixed_tokens == 0
    assert not {*blocks(first)} & {*blocks(own)}
    unnamed = admit(manager, "c", ReuseScope())
    assert not {*blocks(unnamed)} & {*blocks(first), *blocks(own)}
    manager.check()


def test_given_no_prefix_cache_then_nothing_is_shared() -> None:
    manager = make_manager(FULL, CROSS, gpu_blocks=40, enable_prefix_caching=False)
    assert not {*blocks(admit(manager, "a"))} & {*blocks(admit(manager, "b"))}


def test_given_a_fork_then_its_blocks_serve_others_when_its_parent_ended(manager: KVCacheManager) -> None:
    parent = admit(manager, "a")
    [child] = manager.fork(parent, "b")
    manager.free(parent)
    assert blocks(admit(manager, "c")) == blocks(child)
    manager.check()


def test_given_swapped_requests_then_others_go_on_with_the_blocks_and_each_comes_back_alone(
    manager: KVCacheManager,
) -> None:
    first, second, third = (admit(manager, name) for name in "abc")
    manager.swap_out(first, second)
    assert blocks(admit(manager, "d")) == blocks(third)
    manager.swap_in(first, second)
    manager.check()
    assert blocks(first) == blocks(second) != blocks(third)
    assert first.family is None  # they share no block that one of them will write
    for name in "abcd":
        manager.free(manager.get(name))
    manager.check()
    assert used(manager) == 0


def test_given_content_that_is_forgotten_then_new_requests_do_not_share_it(manager: KVCacheManager) -> None:
    first = admit(manager, "a")
    manager.cache.reset()
    second = admit(manager, "b")
    assert second.num_cached_fixed_tokens == 0
    assert not {*blocks(first)} & {*blocks(second)}
    manager.free(first)
    assert blocks(admit(manager, "c")) == blocks(second)
    manager.check()


def test_given_a_pool_that_shrinks_then_shared_blocks_move_together(manager: KVCacheManager) -> None:
    other = manager.allocate("x", num_tokens=60)
    first, second = admit(manager, "a"), admit(manager, "b")
    manager.free(other)
    manager.cache.resize(10)
    assert max(blocks(first)) < 10
    assert blocks(admit(manager, "c")) == blocks(first) == blocks(second)
    manager.check()
