"""Unfilled last blocks of freed sequences (remainders): found in part, copied or taken over, never written or built upon."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import CopyKind, KVCacheConfig, KVCacheManager, LayerSpec, Retention, Tier, TokenRange

FULL = LayerSpec(kv_heads=1, head_dim=8)
SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=6)


def make_manager(*layers: LayerSpec, **overrides: Any) -> KVCacheManager:
    options: dict[str, Any] = {"gpu_blocks": 32, "watermark": 0.0, "cache_unfilled_blocks": True} | overrides
    return KVCacheManager(KVCacheConfig(list(layers) or [FULL], 8, **options))


def serve(manager: KVCacheManager, name: str, tokens: Any, **options: Any) -> None:
    handle = manager.allocate(name, tokens, **options)
    manager.commit(handle)
    manager.free(handle)
    manager.check()


def cached_blocks(manager: KVCacheManager, tier: Tier = Tier.GPU) -> int:
    return manager.stats().pool(0, tier).cached


@pytest.mark.parametrize("layers", [(FULL,), (FULL, SLIDING)])
@pytest.mark.parametrize("in_batch", [False, True])
def test_tokens_behind_the_last_full_block_of_a_freed_sequence_are_found(
    layers: tuple[LayerSpec, ...], in_batch: bool
) -> None:
    manager = make_manager(*layers)
    handles = [manager.allocate(name, [first, *range(1, 11)]) for name, first in (("a", 0), ("b", 50))]
    for handle in handles:
        manager.commit(handle)
    blocks = [handles[0].block_ids(group).tolist() for group in range(len(layers))]
    assert manager.match_prefix([*range(10), 99]).num_tokens == 8  # its block is still written
    if in_batch:
        manager.free_batch(handles)
    else:
        for handle in handles:
            manager.free(handle)
    manager.check()
    assert cached_blocks(manager) == 4 * len(layers)
    assert manager.match_prefix([*range(10), 99]).num_tokens == 10
    reader = manager.allocate("reader", [*range(10), 99])
    copies = manager.take_copies()
    assert [(op.kind, op.group, op.src.tolist(), op.num_tokens) for op in copies] == [
        (CopyKind.PARTIAL_REUSE, group, blocks[group][1:], 2) for group in range(len(layers))
    ]
    manager.commit(reader)
    manager.free(reader)
    manager.check()


def test_a_prompt_shorter_than_a_block_is_found() -> None:
    manager = make_manager()
    serve(manager, "a", range(5))
    assert manager.match_prefix([*range(5), 9]).num_tokens == 5
    assert manager.match_prefix(range(5)).num_tokens == 4  # its last token must be computed, for the logits
    manager.cache.reset()
    assert manager.inspect.num_free_blocks() == 32


def test_logits_of_a_prompt_that_ends_inside_a_block_are_found_once_its_request_is_freed() -> None:
    manager = make_manager()
    handle = manager.allocate("a", range(10))
    manager.commit(handle)
    assert not manager.store_last_logits(handle, "logits")
    manager.extend(handle, 3)
    manager.commit(handle, [10, 11, 12])  # what was generated shares the prompt's last block
    manager.free(handle)
    again = manager.allocate("b", range(10))
    assert (again.num_cached_tokens, again.last_logits) == (10, "logits")
    assert [op.num_tokens for op in manager.take_copies()] == [2]
    manager.extend(again)
    manager.check()


def test_the_best_of_whole_and_unfilled_blocks_is_found() -> None:
    manager = make_manager()
    serve(manager, "whole", [*range(8), 8, 9, 90, 91, 92, 93, 94, 95])
    serve(manager, "unfilled", [*range(8), 8, 9, 10, 11])
    assert manager.match_prefix([*range(13)]).num_tokens == 12
    assert manager.match_prefix([*range(8), 8, 9, 90, 91, 5]).num_tokens == 12


def test_equal_and_shorter_remainders_are_not_kept_twice() -> None:
    manager = make_manager()
    serve(manager, "a", range(10))
    serve(manager, "again", range(10))
    assert cached_blocks(manager) == 2
    serve(manager, "shorter", range(9))
    assert cached_blocks(manager) == 2
    serve(manager, "longer", range(12))
    assert cached_blocks(manager) == 2
    assert manager.match_prefix(range(13)).num_tokens == 12
    assert manager.stats().evictions["continued"] == 1


def test_a_remainder_gives_way_to_the_whole_block_that_begins_with_it() -> None:
    manager = make_manager()
    serve(manager, "first turn", range(10))
    serve(manager, "second turn", range(24))
    assert cached_blocks(manager) == 3
    assert manager.match_prefix([*range(10), 99]).num_tokens == 10


def test_without_copies_a_conversation_goes_on_in_its_own_block() -> None:
    manager = make_manager(copy_on_partial_reuse=False)
    handle = manager.allocate("first turn", range(10))
    manager.commit(handle)
    blocks = handle.block_table()
    manager.free(handle)
    handle = manager.allocate("second turn", range(14))
    assert (handle.num_cached_tokens, handle.block_table()) == (10, blocks)
    assert manager.take_copies() == []
    manager.check()


def test_a_remainder_leaves_before_the_run_that_it_follows() -> None:
    manager = make_manager(eviction_policy="lru")
    serve(manager, "a", range(10))
    assert manager.cache.evict(1) == 1
    assert manager.match_prefix([*range(10), 99]).num_tokens == 8
    assert manager.cache.evict(5) == 1
    manager.check()


def test_a_remainder_moves_to_the_host_and_is_copied_from_there() -> None:
    manager = make_manager(host_blocks=8, eviction_policy="lru")
    serve(manager, "a", range(10))
    manager.cache.offload(1)
    assert (cached_blocks(manager), cached_blocks(manager, Tier.HOST)) == (1, 1)
    manager.take_copies()
    handle = manager.allocate("b", [*range(10), 99])
    assert handle.num_cached_tokens == 10
    assert [(op.src_tier, op.num_tokens) for op in manager.take_copies()] == [(Tier.HOST, 2)]
    manager.free(handle, keep=False)
    manager.cache.evict(8)
    manager.cache.evict(8, tier=Tier.HOST)
    assert not manager.match_prefix([*range(10), 99]).num_tokens
    manager.check()


def test_a_block_that_a_fork_still_holds_does_not_become_a_tail() -> None:
    manager = make_manager()
    handle = manager.allocate("a", range(10))
    manager.commit(handle)
    (fork,) = manager.fork(handle, "fork")
    manager.free(handle)
    assert manager.match_prefix([*range(10), 99]).num_tokens == 8
    manager.check()
    manager.free(fork)
    assert manager.match_prefix([*range(10), 99]).num_tokens == 10
    manager.check()


def test_what_is_not_kept_not_committed_or_swapped_out_leaves_no_tail() -> None:
    manager = make_manager(host_blocks=8)
    dropped = manager.allocate("dropped", range(10))
    manager.commit(dropped)
    manager.free(dropped, keep=False)
    draft = manager.allocate("draft", [50, *range(9)])
    manager.commit(draft, 8)
    manager.mark_written(draft, 2)
    manager.free(draft)
    swapped = manager.allocate("swapped", [60, *range(9)])
    manager.commit(swapped)
    manager.swap_out(swapped)
    manager.free(swapped)
    assert cached_blocks(manager) == 2
    manager.check()


def test_invalidated_sessions_take_their_remainders_along() -> None:
    manager = make_manager()
    serve(manager, "shared", range(8))
    serve(manager, "a", range(10), session="s")
    assert manager.match_prefix([*range(10), 99]).num_tokens == 10
    assert manager.cache.invalidate(session="s") == 1
    assert manager.match_prefix([*range(10), 99]).num_tokens == 8
    silenced = manager.allocate("b", range(10))
    manager.commit(silenced)
    manager.cache.invalidate(range(8))
    manager.free(silenced)
    assert manager.inspect.num_free_blocks() == 32
    manager.check()


def test_retention_time_to_live_and_quota_hold_for_remainders() -> None:
    clock = [0.0]
    config = KVCacheConfig([FULL], 8, gpu_blocks=32, watermark=0.0, cache_unfilled_blocks=True)
    manager = KVCacheManager(config, clock=lambda: clock[0])
    serve(manager, "a", range(10), retention=Retention([TokenRange(8, None, priority=80)]), ttl=5.0)
    assert [(run.start, run.num_blocks, run.priority) for run in manager.inspect.runs()] == [(0, 1, 35), (1, 1, 80)]
    clock[0] = 6.0
    assert manager.cache.gc() == 2
    serve(manager, "b", range(10))
    manager.cache.set_quota("", guaranteed=0, maximum=1)
    assert cached_blocks(manager) == 1
    manager.check()


def test_events_tell_of_whole_blocks_only() -> None:
    manager = make_manager()
    early = manager.subscribe()
    serve(manager, "a", range(10))
    manager.cache.evict(2)
    kinds = [(type(event).__name__, len(event.digests)) for event in early.poll().events if hasattr(event, "digests")]
    assert kinds == [("Stored", 1), ("Removed", 1)]
    serve(manager, "b", range(10))
    late = manager.subscribe().poll().events
    assert sum(len(event.digests) for event in late if type(event).__name__ == "Stored") == 1


def test_a_remainder_moves_with_its_pool() -> None:
    manager = make_manager(gpu_blocks=8)
    first = manager.allocate("first", [70] * 24)
    serve(manager, "a", range(10))
    manager.free(first, keep=False)
    assert manager.cache.defragment() == 2
    manager.cache.resize(2)
    manager.check()
    assert manager.match_prefix([*range(10), 99]).num_tokens == 10


@pytest.mark.parametrize("look", ["pin", "onboard"])
def test_given_a_prompt_that_ends_with_a_remainder_then_its_whole_blocks_are_found_and_the_remainder_stays_whole(
    look: str,
) -> None:
    manager = make_manager(host_blocks=32)
    prompt = list(range(20))
    serve(manager, "a", prompt)
    if look == "pin":
        pin = manager.cache.pin(prompt)
        assert pin.num_tokens == 16
        manager.check()
        manager.cache.unpin(pin)
    else:
        manager.cache.offload(3)
        assert manager.cache.onboard(prompt) == 2
    manager.check()
    assert manager.match_prefix([*prompt, 0]).num_tokens == 20
    assert manager.cache.evict(32) == (3 if look == "pin" else 2)  # the remainder was left on the host
    manager.check()
