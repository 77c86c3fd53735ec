"""What is invalidated is found no more and comes back by no way."""

from __future__ import annotations

import pytest

from kvpool import LayerSpec, Retention, ReuseScope, TokenRange
from kvpool.errors import InvalidArgumentError
from kvpool.prefix.tree import MAX_LOGITS
from managers import FULL, HOW, cached, commit_all, forget, make_manager, manager_with

WINDOW_OF_8 = LayerSpec(kv_heads=1, head_dim=8, window=8)


def test_reset_under_a_live_request_keeps_its_blocks_and_publishes_nothing_below() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(16)))
    manager.commit(handle, 8)
    before = handle.block_ids().tolist()
    assert manager.cache.reset() == 2
    manager.commit(handle, 8)
    assert handle.block_ids().tolist() == before
    assert manager.match_prefix([*range(16), 1]).num_tokens == 0
    manager.free(handle)
    assert manager.inspect.num_free_blocks() == 16
    manager.check()


def test_no_block_is_lost_to_a_placeholder_and_reset_always_works() -> None:
    manager = make_manager(FULL, WINDOW_OF_8, gpu_blocks=8)
    cached(manager, 16)
    assert manager.cache.reset() == 4
    assert manager.stats().pool().free == 8


def test_invalidating_a_pinned_prefix_unpins_its_windowed_blocks() -> None:
    manager = manager_with(LayerSpec(kv_heads=1, head_dim=8, window=4), block_size=2)
    retention = Retention([TokenRange(0, 2, priority=5)])
    handle = commit_all(manager, manager.allocate("a", [0] * 4, retention=retention))
    manager.cache.pin(handle)
    manager.free(handle)  # retention cuts the pinned run in two
    manager.cache.invalidate([0] * 4)  # only the lower half goes
    manager.check()
    manager.cache.reset()
    manager.check()
    assert manager.stats().pool().pinned == 0


@pytest.mark.parametrize("swapped_first", [True, False])
@HOW
def test_what_was_invalidated_does_not_come_back_with_a_swapped_request(swapped_first: bool, how: str) -> None:
    manager = manager_with(block_size=2, host_blocks=8)
    handle = commit_all(manager, manager.allocate("a", [0] * 5, session="s"))
    if swapped_first:
        manager.swap_out(handle)
    forget(manager, how, [0, 0])
    if not swapped_first:
        manager.swap_out(handle)
    manager.swap_in(handle)
    assert manager.match_prefix([0] * 5).num_tokens == 0
    manager.check()


@HOW
@pytest.mark.parametrize("layers", [(FULL,), (FULL, LayerSpec(kv_heads=1, head_dim=8, window=8))])
def test_what_a_request_copied_before_an_invalidation_is_not_published(layers: tuple[LayerSpec, ...], how: str) -> None:
    manager = manager_with(*layers, gpu_blocks=40)
    commit_all(manager, manager.allocate("a", [1, 2, 3, 4], session="s"))
    handle = manager.allocate("b", [1, 2, 3, 9])
    assert handle.num_cached_tokens == 3
    (child,) = manager.fork(handle, "c")
    forget(manager, how, [1, 2, 3, 4])
    for live in (handle, child):
        manager.commit(live)
        manager.check()
        assert manager.match_prefix([1, 2, 3, 9, 5]).num_tokens == 0
        manager.extend(live, 5)
        manager.commit(live, [5, 6, 7, 8, 9])
        manager.free(live)
        manager.check()
    assert manager.match_prefix([1, 2, 3, 9, 5]).num_tokens == 0


@HOW
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("written", [0, 3])
def test_what_a_request_wrote_or_computes_during_an_invalidation_is_not_published(
    how: str, swapped: bool, written: int
) -> None:
    manager = manager_with(host_blocks=8)
    handle = manager.allocate("a", [1, 2, 3, 4, 5], session="s")  # nothing is cached, so nothing can be detached
    manager.commit(handle, written)
    if swapped:
        manager.swap_out(handle)
    forget(manager, how, [1, 2, 3, 4])
    assert not manager.match_prefix([1, 2, 3, 4]).in_flight
    if swapped:
        manager.swap_in(handle)
    manager.commit(handle)
    manager.free(handle)
    manager.check()
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 0


def test_an_invalidation_leaves_requests_alone_that_hold_nothing_of_it() -> None:
    manager = manager_with(gpu_blocks=40)
    others = [
        manager.allocate("another prefix", [9, 2, 3, 4], session="t"),
        manager.allocate("not yet there", [1, 2, 3, 4], session="t"),
        manager.allocate("another scope", [1, 2, 3, 4, 5, 6, 7, 8], scope=ReuseScope(tenant="t"), session="t"),
    ]
    manager.cache.invalidate([1, 2, 3, 4, 5, 6, 7, 8])
    manager.cache.invalidate(session="s")
    manager.cache.invalidate(scope=ReuseScope(tenant="s"))
    for handle in others:
        commit_all(manager, handle)
        assert manager.match_prefix([*handle.token_ids.tolist(), 0], handle.scope).num_tokens == len(handle.token_ids)


def test_logits_behind_a_shared_prefix_go_with_the_block_that_they_lie_in() -> None:
    manager = make_manager(cache_unfilled_blocks=True)
    prompt = list(range(1, 11))
    for name, tokens in (("a", prompt), ("b", [*prompt[:4], 50, 51, 52, 53])):  # they part behind one block
        handle = manager.allocate(name, tokens)
        manager.commit(handle, len(tokens) - handle.num_cached_tokens)
        manager.store_last_logits(handle, name)
        manager.free(handle)
    assert manager.match_prefix(prompt).has_last_logits
    manager.cache.invalidate([*prompt, 11, 12])
    assert not manager.match_prefix(prompt).has_last_logits


def test_a_run_keeps_the_logits_of_so_many_prompts_and_the_oldest_give_way() -> None:
    manager, prompt = make_manager(gpu_blocks=32), list(range(100))
    handle = commit_all(manager, manager.allocate("a", prompt))
    for length in range(10, 10 + MAX_LOGITS + 2):
        assert manager.store_last_logits(handle, f"behind {length}", length)
    found = [manager.match_prefix(prompt[:length]).last_logits for length in (10, 11, 12, 11 + MAX_LOGITS)]
    assert found == [None, None, "behind 12", f"behind {11 + MAX_LOGITS}"]


def test_images_without_a_prefix_name_nothing_to_invalidate() -> None:
    manager = make_manager()
    tokens = cached(manager, 16)
    with pytest.raises(InvalidArgumentError, match="give a prefix"):
        manager.cache.invalidate(scope=ReuseScope(), multimodal=[(0, 4, "cat")])
    assert manager.match_prefix([*tokens, 1]).num_tokens == 16


@pytest.mark.parametrize("how", ["reset", "scope", "tenant"])
def test_logits_of_a_prompt_shorter_than_a_block_go_with_all_of_its_scope(how: str) -> None:
    manager, scope, prompt = make_manager(cache_unfilled_blocks=True), ReuseScope(tenant="t", salt="s"), [1, 2, 3]
    for name, in_scope in (("a", scope), ("b", ReuseScope(tenant="other"))):
        handle = commit_all(manager, manager.allocate(name, prompt, scope=in_scope))
        manager.store_last_logits(handle, name)
        manager.free(handle)
        assert manager.match_prefix(prompt, in_scope).last_logits == name
    manager.allocate("live", [7], scope=scope)  # keeps the scope in use
    if how == "reset":
        manager.cache.reset()
    elif how == "scope":
        manager.cache.invalidate(scope=scope)
    else:
        manager.cache.invalidate(tenant="t")
    manager.free(commit_all(manager, manager.allocate("again", prompt, scope=scope)))
    assert manager.match_prefix(prompt, scope).last_logits is None
    assert manager.match_prefix(prompt, ReuseScope(tenant="other")).last_logits == (None if how == "reset" else "b")


def test_logits_of_a_short_prompt_stay_when_the_end_of_a_longer_one_is_evicted() -> None:
    manager = make_manager()
    short, long = list(range(8)), list(range(16))
    for name, tokens in (("long", long), ("short", short)):
        handle = manager.allocate(name, tokens)
        manager.commit(handle)
        manager.store_last_logits(handle, name)
        manager.free(handle)
    assert manager.cache.evict(1) == 1
    assert manager.match_prefix(short).has_last_logits
    assert not manager.match_prefix(long).has_last_logits
