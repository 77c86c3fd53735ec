"""The seventeen rules that always hold (docs/rules.md): one test, or a small group, for each."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
from typing import Any

import numpy as np
import pytest

from kvpool import (
    AllocStatus,
    CopyKind,
    DType,
    KVCacheConfig,
    KVCacheHandle,
    KVCacheManager,
    LayerSpec,
    MemoryPressure,
    PressureChange,
    Retention,
    ReuseScope,
    StatePart,
    StateSpec,
    Tier,
    TokenRange,
)
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    KVPoolError,
    OutOfBlocksError,
    UnknownRequestError,
)
from kvpool.events import Removed, Stored
from kvpool.events.mirror import CacheMirror
from kvpool.pools.pool import BlockPool
from kvpool.prefix.tree import all_nodes
from managers import FULL, cached, make_manager

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)
CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)


def everything(manager: KVCacheManager) -> dict[str, Any]:
    """All that an outsider can see, failures aside: they are counted."""
    seen = manager.stats().to_dict()
    seen.pop("allocation_failures")
    seen.pop("extend_failures")
    for handle in manager.handles:
        lengths = (handle.num_reserved, handle.num_written, handle.num_committed, handle.is_swapped)
        tables = [handle.block_ids(g).tolist() for g in range(len(manager.config.groups))]
        seen[f"handle {handle.request_id!r}"] = (lengths, tables, handle.token_ids.tolist())
    return seen


# --- 1 ---------------------------------------------------------------------------------------------------------------


def full_pool() -> tuple[KVCacheManager, KVCacheHandle]:
    """Four GPU blocks and one host block, all GPU blocks in use by one request of 14 tokens."""
    manager = make_manager(gpu_blocks=4, host_blocks=1)
    handle = manager.allocate("live", list(range(14)))
    manager.commit(handle, 14)
    return manager, handle


@pytest.mark.parametrize(
    "operation",
    [
        lambda manager, live: manager.allocate("new", [1, 2, 3]),
        lambda manager, live: manager.allocate("new", num_tokens=400),
        lambda manager, live: manager.allocate("new", [*range(8), 99], lookahead=30),
        lambda manager, live: manager.extend(live, 3),
        lambda manager, live: manager.extend(live, 1, lookahead=2),
        lambda manager, live: manager.commit(live, [1, 2, 3]),
        lambda manager, live: manager.commit_batch([live], [1], [2]),
        lambda manager, live: manager.mark_written(live, 3),
        lambda manager, live: manager.rewind(live, 15),
        lambda manager, live: manager.rewind(live, 5),
        lambda manager, live: manager.fork(live, "a", "live"),
        lambda manager, live: manager.swap_out(live),
        lambda manager, live: manager.swap_in(live),
        lambda manager, live: manager.cache.resize(2),
        lambda manager, live: manager.cache.pin(list(range(100, 120))),
        lambda manager, live: manager.free_batch([live, live]),
        lambda manager, live: manager.cache.set_quota("t", guaranteed=17),
    ],
)
def test_rule_01_an_operation_that_fails_changes_nothing(operation: Any) -> None:
    manager, live = full_pool()
    manager.take_copies()
    with manager.subscribe() as subscription:
        subscription.poll()
        before = everything(manager)
        with pytest.raises(KVPoolError):
            operation(manager, live)
        assert everything(manager) == before
        assert manager.take_copies() == []
        assert subscription.poll().events == []
    manager.check()


def test_rule_01_a_batch_that_does_not_fit_extends_none_of_its_sequences() -> None:
    manager = make_manager(gpu_blocks=3)
    handles = [manager.allocate(i, [i] * 4) for i in range(2)]
    with pytest.raises(OutOfBlocksError):
        manager.extend_batch(handles)
    assert [handle.num_reserved for handle in handles] == [4, 4]
    assert manager.inspect.num_free_blocks() == 1


# --- 2 ---------------------------------------------------------------------------------------------------------------


def test_rule_02_block_0_is_an_ordinary_block() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2, 3, 4])
    assert list(handle.block_table()) == [0]
    assert manager.extend_batch([handle]).tolist() == [[4]]
    manager.commit(handle, 4)
    manager.free(handle)
    again = manager.allocate("b", [1, 2, 3, 4, 5])
    assert again.num_cached_tokens == 4
    assert again.block_table()[0] == 0


def test_rule_02_a_block_that_left_its_window_is_none_in_tables_and_minus_one_in_arrays() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=32)
    handle = manager.allocate("a", list(range(16)))
    manager.commit(handle, 16)
    assert handle.block_table(1)[:2] == [None, None]
    assert handle.block_ids(1)[:2].tolist() == [-1, -1]
    assert None not in list(handle.block_table(1))[2:]


# --- 3 ---------------------------------------------------------------------------------------------------------------


def test_rule_03_a_fresh_pool_is_all_free() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=8, host_blocks=4, disk_blocks=2)
    for pool in manager.stats().pools:
        assert (pool.free, pool.referenced, pool.cached) == (pool.total, 0, 0)
    manager.check()


def test_rule_03_free_and_referenced_and_cached_add_up_on_every_tier_at_every_moment() -> None:
    manager = make_manager(gpu_blocks=8, host_blocks=8)

    def counts(tier: Tier) -> tuple[int, int, int]:
        manager.check()
        pool = manager.stats().pool(tier=tier)
        assert pool.free + pool.referenced + pool.cached == pool.total
        return pool.free, pool.referenced, pool.cached

    handle = manager.allocate("a", list(range(10)))
    assert counts(Tier.GPU) == (5, 3, 0)
    manager.commit(handle, 10)
    assert counts(Tier.GPU) == (5, 3, 0)
    manager.swap_out(handle)
    assert counts(Tier.GPU) == (6, 0, 2)
    assert counts(Tier.HOST) == (5, 3, 0)
    manager.free(handle)
    assert counts(Tier.HOST) == (8, 0, 0)
    manager.cache.offload(2)
    assert counts(Tier.GPU) == (8, 0, 0)
    assert counts(Tier.HOST) == (6, 0, 2)


# --- 4 ---------------------------------------------------------------------------------------------------------------


def test_rule_04_caller_errors_are_typed_and_never_silent() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2, 3])
    with pytest.raises(DuplicateRequestError, match="'a'"):
        manager.allocate("a", [1])
    with pytest.raises(UnknownRequestError, match="'b'"):
        manager.get("b")
    with pytest.raises(InvalidArgumentError, match="-1"):
        manager.extend(handle, -1)
    manager.free(handle)
    with pytest.raises(UnknownRequestError, match="'a'"):
        manager.free(handle)
    assert manager.inspect.num_free_blocks() == 16


# --- 5 ---------------------------------------------------------------------------------------------------------------


def test_rule_05_no_write_reaches_a_block_that_a_fork_reads_as_well() -> None:
    manager = make_manager()
    parent = manager.allocate("parent", list(range(6)))
    manager.commit(parent, 6)
    (child,) = manager.fork(parent, "child")
    shared = parent.block_ids().tolist()
    manager.extend(child)
    assert parent.block_ids().tolist() == shared
    assert child.block_ids()[0] == shared[0]  # only the block that is written is copied
    assert child.block_ids()[1] != shared[1]
    (copy,) = manager.take_copies()
    assert (copy.kind, copy.src.tolist(), copy.num_tokens) == (CopyKind.COPY_ON_WRITE, shared[1:], 2)
    assert copy.dst.tolist() == child.block_ids()[1:].tolist()
    manager.extend(parent)
    assert manager.take_copies() == []  # the last reader writes in place


def test_rule_05_lookahead_places_and_slot_mappings_announce_a_write_too() -> None:
    for write in (lambda m, h: m.extend(h, 0, lookahead=1), lambda m, h: m.slot_mapping([h], 6, 7)):
        manager = make_manager()
        parent = manager.allocate("parent", list(range(6)), lookahead=2)
        manager.commit(parent, 6)
        (child,) = manager.fork(parent, "child")
        write(manager, child)
        assert child.block_ids()[1] != parent.block_ids()[1]
        manager.check()


def test_rule_05_a_rewind_back_into_shared_blocks_copies_again_before_the_next_write() -> None:
    manager = make_manager(enable_prefix_caching=False)
    parent = manager.allocate("parent", list(range(10)))
    manager.commit(parent, 10)
    (child,) = manager.fork(parent, "child")
    manager.extend(child)
    manager.rewind(child, 6)  # 5 tokens are left: they end inside block 1, which the parent still reads
    manager.extend(child)
    assert child.block_ids()[1] != parent.block_ids()[1]


def test_rule_05_no_write_reaches_a_published_block() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    published = handle.block_ids().tolist()
    manager.rewind(handle, 2)
    slot = int(manager.extend(handle)[0, 0])
    assert slot // 4 not in published
    (copy,) = manager.take_copies()
    assert (copy.src.tolist(), copy.num_tokens) == ([published[1]], 2)
    assert manager.match_prefix([*range(8), 9]).num_blocks == 2  # what was published is still there


# --- 6 ---------------------------------------------------------------------------------------------------------------


def test_rule_06_matched_blocks_are_referenced_before_anything_is_evicted_for_the_same_request() -> None:
    manager = make_manager(gpu_blocks=4)
    old = cached(manager, 8)  # the oldest: first in line for eviction
    cached(manager, 8, first=100)
    handle = manager.allocate("a", [*old, 50, 51])
    assert handle.num_cached_tokens == 8
    assert len(set(handle.block_ids().tolist())) == 3
    manager.check()


def test_rule_06_matched_host_blocks_are_not_chosen_as_targets_of_the_offload_they_cause() -> None:
    manager = make_manager(gpu_blocks=2, host_blocks=2)
    old = cached(manager, 8)
    manager.cache.offload(2)
    cached(manager, 8, first=100)
    handle = manager.allocate("a", old)  # needs the GPU blocks of the second prompt, and both host blocks are matched
    assert handle.num_cached_tokens == 7
    manager.check()


# --- 7 ---------------------------------------------------------------------------------------------------------------


def test_rule_07_eviction_never_touches_a_referenced_or_pinned_block() -> None:
    manager = make_manager(gpu_blocks=8)
    read, pinned, idle = cached(manager, 8), cached(manager, 8, 100), cached(manager, 8, 200)
    reader = manager.allocate("reader", [*read, 1])
    manager.cache.pin(pinned)
    assert manager.cache.evict(100) == 2
    assert reader.num_written == 8
    assert manager.match_prefix([*pinned, 1]).num_blocks == 2
    assert manager.match_prefix([*idle, 1]).num_blocks == 0
    manager.check()


def test_rule_07_a_parent_never_leaves_before_its_cached_children() -> None:
    manager = make_manager(gpu_blocks=8)
    tokens = cached(manager, 32)
    for expected in range(7, -1, -1):
        assert manager.cache.evict(1) == 1
        assert manager.match_prefix([*tokens, 1]).num_blocks == expected


# --- 8 ---------------------------------------------------------------------------------------------------------------


def test_rule_08_only_written_blocks_are_matchable() -> None:
    manager = make_manager()
    tokens = list(range(12))
    handle = manager.allocate("a", tokens)
    assert manager.match_prefix([*tokens, 1]).num_tokens == 0
    manager.mark_written(handle, 12)
    assert manager.match_prefix([*tokens, 1]).num_tokens == 0  # written, but not final
    manager.commit(handle, 7)
    assert manager.match_prefix([*tokens, 1]).num_blocks == 1  # the second block is not full of final tokens
    manager.commit(handle, 1)
    assert manager.match_prefix([*tokens, 1]).num_blocks == 2


@pytest.mark.parametrize("num_tokens", [4, 5, 7, 8, 12])
def test_rule_08_at_most_all_but_the_last_token_comes_from_the_cache(num_tokens: int) -> None:
    manager = make_manager()
    tokens = cached(manager, 12)[:num_tokens]
    assert manager.allocate("a", tokens).num_cached_tokens == num_tokens - 1


def test_rule_08_with_stored_logits_the_whole_prompt_comes_from_the_cache() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    assert manager.store_last_logits(handle, "logits")
    again = manager.allocate("b", list(range(8)))
    assert (again.num_cached_tokens, again.last_logits) == (8, "logits")


# --- 9 ---------------------------------------------------------------------------------------------------------------


def test_rule_09_a_hit_compares_tokens_whatever_hashes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    cached(manager, 8)
    for node in all_nodes(manager._cache):  # all content identities collide
        monkeypatch.setattr(node, "known_fingerprint", 7)
    assert manager.match_prefix([0, 1, 2, 3, 4, 5, 6, 99, 1]).num_tokens == 7
    assert manager.match_prefix([99, 1, 2, 3, 4]).num_tokens == 0
    assert manager.match_prefix([4, 5, 6, 7, 4]).num_tokens == 0  # equal tokens at another place are no hit


# --- 10 --------------------------------------------------------------------------------------------------------------


def test_rule_10_swapping_moves_data_table_and_references_together() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=8, offload_on_evict=False)
    handle = manager.allocate("a", list(range(10)))
    manager.commit(handle, 10)
    on_gpu = handle.block_ids().tolist()
    assert manager.swap_out(handle) == 3
    (out,) = manager.take_copies()
    assert (out.src_tier, out.dst_tier, out.src.tolist()) == (Tier.GPU, Tier.HOST, on_gpu)
    assert (handle.block_ids() == -1).all()  # no host id in a table that a kernel could read
    manager.allocate("b", num_tokens=16)  # takes every GPU block
    manager.free(manager.get("b"))
    assert manager.swap_in(handle) == 3
    (back,) = manager.take_copies()
    assert (back.src.tolist(), back.dst.tolist()) == (out.dst.tolist(), handle.block_ids().tolist())
    manager.check()


def test_rule_10_shared_blocks_are_swapped_once_and_stay_shared() -> None:
    manager = make_manager(gpu_blocks=8, host_blocks=8)
    parent = manager.allocate("parent", list(range(10)))
    manager.commit(parent, 10)
    (child,) = manager.fork(parent, "child")
    assert manager.swap_out(parent, child) == 3
    assert manager.stats().pool(tier=Tier.HOST).referenced == 3
    manager.cache.reset()
    assert manager.swap_in(parent, child) == 3
    assert parent.block_ids().tolist() == child.block_ids().tolist()
    manager.check()


# --- 11 --------------------------------------------------------------------------------------------------------------


def test_rule_11_reserved_written_and_committed_are_three_lengths() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [1, 2, 3])
    manager.commit(handle, 3)
    manager.extend(handle, 4)
    manager.mark_written(handle, 2)
    assert (handle.num_reserved, handle.num_written, handle.num_committed) == (7, 5, 3)
    manager.commit(handle, [9])
    assert (handle.num_reserved, handle.num_written, handle.num_committed) == (7, 5, 4)
    manager.commit(handle, [8, 8, 8])
    assert (handle.num_reserved, handle.num_written, handle.num_committed) == (7, 7, 7)
    manager.rewind(handle, 2)
    assert (handle.num_reserved, handle.num_written, handle.num_committed) == (5, 5, 5)


# --- 12 --------------------------------------------------------------------------------------------------------------


def test_rule_12_blocks_shared_with_live_requests_reduce_the_need() -> None:
    manager = make_manager(gpu_blocks=4)
    live = manager.allocate("live", list(range(12)))
    manager.commit(live, 12)
    answer = manager.can_allocate([*range(12), 1])
    assert (answer.status, answer.blocks_needed, answer.blocks_available) == (AllocStatus.OK, (1,), (1,))


def test_rule_12_idle_cached_blocks_are_supply_but_not_when_they_are_matched() -> None:
    manager = make_manager(gpu_blocks=4)
    tokens = cached(manager, 12)
    assert manager.can_allocate([99] * 16).blocks_available == (4,)
    matched = manager.can_allocate([*tokens, 1])
    assert (matched.blocks_needed, matched.blocks_available) == ((1,), (1,))
    assert manager.can_allocate([*tokens, 1, 2, 3, 4, 5]).status is AllocStatus.NEVER


def test_rule_12_every_group_must_fit() -> None:
    wide = LayerSpec(kv_heads=2, head_dim=8)
    manager = make_manager(FULL, wide, gpu_blocks=(16, 2))
    assert manager.can_allocate(num_tokens=12).status is AllocStatus.NEVER
    with pytest.raises(OutOfBlocksError, match="pool 1"):
        manager.allocate("a", num_tokens=12)
    assert [pool.free for pool in manager.stats().pools] == [16, 2]


# --- 13 --------------------------------------------------------------------------------------------------------------


def test_rule_13_every_block_that_leaves_is_removed_exactly_once_whatever_the_path() -> None:
    clock = [0.0]
    manager = make_manager(gpu_blocks=16, host_blocks=2, clock=lambda: clock[0])
    subscription = manager.subscribe()
    for number, leave in enumerate(
        (
            lambda tokens: manager.cache.evict(100),
            lambda tokens: manager.cache.evict(100, tier=Tier.HOST),
            lambda tokens: manager.cache.invalidate(tokens[:4]),
            lambda tokens: manager.cache.invalidate(scope=ReuseScope()),
            lambda tokens: manager.cache.reset(),
            lambda tokens: manager.cache.resize(1),
        )
    ):
        leave(cached(manager, 12, first=100 * number))
    manager.cache.resize(16)
    handle = manager.allocate("short-lived", list(range(8)), ttl=5.0)
    clock[0] = 10.0
    manager.free(handle)
    manager.cache.gc()
    manager.cache.resize(1, tier=Tier.HOST)
    manager.cache.resize(0, tier=Tier.HOST)
    manager.cache.reset()
    events = subscription.poll().events
    stored = [digest for event in events if isinstance(event, Stored) for digest in event.digests]
    removed = [digest for event in events if isinstance(event, Removed) for digest in event.digests]
    assert len(stored) >= 18
    assert sorted(removed) == sorted(stored)


def test_rule_13_stored_names_a_known_parent_and_a_late_subscriber_gets_a_snapshot() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=32, host_blocks=8)
    early = manager.subscribe()
    cached(manager, 24)
    live = manager.allocate("live", [*range(12), 50, 51, 52, 53, 54])
    manager.commit(live, 5)
    manager.cache.offload(4)
    late = manager.subscribe()
    mirrors = []
    for subscription in (early, late):
        mirror = CacheMirror(windows={1: 2})
        mirror.apply(subscription.poll().events)  # raises when an event contradicts the ones before it
        mirrors.append(mirror.blocks)
    assert mirrors[0] == mirrors[1]


def test_rule_13_a_gap_is_detectable_and_resync_mends_it() -> None:
    manager = make_manager(event_buffer_size=4)
    subscription = manager.subscribe()
    for first in range(0, 800, 100):
        cached(manager, 8, first)
    assert subscription.poll().missed > 0
    mirror = CacheMirror()
    mirror.apply(subscription.resync().events)
    assert len(mirror.blocks[0]) == 16


# --- 14 --------------------------------------------------------------------------------------------------------------


def test_rule_14_rates_come_from_counts_and_bytes_from_what_is_allocated() -> None:
    manager = make_manager()
    tokens = cached(manager, 8)
    manager.allocate("a", [*tokens, 1, 2])
    stats = manager.stats()
    assert (stats.prompt_tokens, sum(stats.hit_tokens.values()), stats.miss_tokens) == (18, 8, 10)
    assert (stats.prompt_blocks, sum(stats.hit_blocks.values()), stats.miss_blocks) == (4, 2, 2)
    assert stats.token_hit_rate == 8 / 18
    assert stats.pool().block_bytes == 4 * 1 * 8 * 2 * 2  # tokens, heads, dimension, K and V, bytes of bfloat16
    assert manager.config.pool_bytes(Tier.GPU) == 16 * stats.pool().block_bytes


# --- 15 --------------------------------------------------------------------------------------------------------------


def test_rule_15_callbacks_run_outside_the_lock_edge_triggered_and_contained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = make_manager(gpu_blocks=10)
    seen: list[tuple[MemoryPressure, bool]] = []

    def notice(change: PressureChange) -> None:
        seen.append((change.level, manager._guard._depth > 0))
        raise RuntimeError("a callback of the user")

    manager.on_memory_pressure(notice)
    with caplog.at_level(logging.ERROR, logger="kvpool"):
        handle = manager.allocate("a", num_tokens=24)
        manager.extend(handle)
        manager.free(handle)
    assert seen == [(MemoryPressure.MEDIUM, False), (MemoryPressure.LOW, False)]
    assert "callback" in caplog.text


# --- 16 --------------------------------------------------------------------------------------------------------------

EFFECTS: dict[str, Any] = {
    "layers": [FULL, FULL],
    "block_size": 8,
    "gpu_blocks": 17,
    "gpu_bytes": 1024,
    "gpu_fraction": 0.5,
    "free_gpu_bytes": 4096,
    "host_blocks": 4,
    "host_bytes": 2048,
    "disk_blocks": 4,
    "disk_bytes": 2048,
    "plan_tokens": 8,
    "pool_shares": (1.0,),
    "max_gpu_tokens": 8,
    "plan_cross_tokens": 8,
    "max_seq_len": 8,
    "enable_prefix_caching": False,
    "partial_match": False,
    "copy_on_partial_reuse": False,
    "cache_unfilled_blocks": True,
    "offload_on_evict": False,
    "offload_min_priority": 36,
    "host_write": "through",
    "watermark": 0.5,
    "eviction_policy": "lfu",
    "objective": "seconds",
    "depth_cost": 1e-3,
    "checkpoint_every": 4,
    "default_ttl": 1.0,
    "max_pinned_tokens": 0,
    "pressure_levels": (0.01, 0.02, 0.03),
    "event_buffer_size": 0,
    "remembered_blocks": 64,
}


def behaviour(**overrides: Any) -> Any:
    """What a short session with a manager of this configuration shows."""
    options: dict[str, Any] = {
        "layers": [FULL],
        "block_size": 4,
        "gpu_blocks": 16,
        "watermark": 0.0,
        "host_blocks": 8,
        "disk_blocks": 8,
    }
    if any(name in overrides for name in ("gpu_bytes", "gpu_fraction", "free_gpu_bytes")):
        options.pop("gpu_blocks")
    options = {k: v for k, v in options.items() if k.replace("blocks", "bytes") not in overrides} | overrides
    if "gpu_fraction" in overrides or "free_gpu_bytes" in overrides:
        options = {"gpu_fraction": 1.0, "free_gpu_bytes": 2048} | options
    clock = [0.0]
    config = KVCacheConfig(**options)
    manager = KVCacheManager(config, clock=lambda: clock[0])
    seen: list[Any] = [config.explain(), config.planned_tokens, config.planned_cross_tokens, manager.config.block_bytes]
    subscription = manager.subscribe()
    if manager.can_allocate(list(range(9))):
        handle = manager.allocate("a", list(range(9)))
        manager.commit(handle, 9)
        seen += [manager.inspect.pressure, handle.missed_tokens]
        seen.append(manager.step_end(handle, 0, 9))
        manager.free(handle)
    orders = manager._cache.orders
    seen += [type(orders.policies[0]).name, orders.depth_cost]
    seen.append(manager.match_prefix(list(range(7))))
    seen.append(manager.match_prefix(list(range(3))))
    seen.append(config.pinned_tokens_limit)
    seen.append(subscription.poll().missed)
    clock[0] = 2.0
    seen.append(manager.cache.gc())
    seen.append(manager.cache.evict(1))
    seen.append([(pool.tier, pool.total, pool.cached) for pool in manager.stats().pools])
    return seen


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KVCacheConfig) if field.init])
def test_rule_16_every_configuration_field_has_an_effect_or_raises(name: str) -> None:
    base = {"layers": [FULL, CROSS]} if name == "plan_cross_tokens" else {}
    if name in ("gpu_fraction", "free_gpu_bytes"):
        base = {"gpu_fraction": 1.0, "free_gpu_bytes": 2048}
    if name == "depth_cost":
        base = {"objective": "seconds"}
    if name == "checkpoint_every":
        base = {"layers": [FULL, StateSpec((StatePart("conv", (3, 4), DType.FLOAT32),))]}
    try:
        changed = behaviour(**(base | {name: EFFECTS[name]}))
    except (ConfigError, InvalidArgumentError):
        return
    assert changed != behaviour(**base)


# --- 17 --------------------------------------------------------------------------------------------------------------


def test_rule_17_nothing_recurses_over_a_sequence() -> None:
    num_blocks = 2 * sys.getrecursionlimit()  # deeper than the interpreter's stack
    manager = make_manager(block_size=1, gpu_blocks=2 * num_blocks, host_blocks=num_blocks)
    tokens = np.arange(num_blocks, dtype=np.int32)
    handle = manager.allocate("a", tokens)
    for _ in range(num_blocks):  # a chain of nodes of one block each: forks close them all
        manager.commit(handle, 1)
        (fork,) = manager.fork(handle, "fork")
        manager.free(fork)
    assert sum(1 for _ in all_nodes(manager._cache)) == num_blocks
    subscription = manager.subscribe()
    assert manager.match_prefix([*tokens, 1]).num_blocks == num_blocks
    manager.free(handle)
    assert manager.cache.offload(num_blocks) == num_blocks
    assert manager.cache.onboard(tokens) == num_blocks
    pin = manager.cache.pin(tokens[:100])
    manager.cache.unpin(pin)
    assert manager.cache.reset() == num_blocks
    assert subscription.poll().missed == 0
    manager.check()


def test_rule_17_free_list_work_is_proportional_to_the_blocks_touched() -> None:
    if inspect.isfunction(BlockPool.take):  # and not compiled
        assert "for " not in inspect.getsource(BlockPool.take)  # a slice of an array, however long the list is
    manager = make_manager(gpu_blocks=1_000_000)
    handle = manager.allocate("a", [1])
    free_list = manager._cache.gpu_pools[0]._free
    manager.free(handle)
    manager.allocate("b", [1])
    assert manager._cache.gpu_pools[0]._free is free_list  # never copied


def test_rules_hold_together_under_retention_and_quota() -> None:
    manager = make_manager(eviction_policy="priority", gpu_blocks=8)
    manager.cache.set_quota("t", guaranteed=2)
    keep = Retention([TokenRange(0, None, priority=90)])
    handle = manager.allocate("a", list(range(8)), retention=keep, scope=ReuseScope("t"))
    manager.commit(handle, 8)
    manager.free(handle)
    cached(manager, 16, first=100)
    manager.allocate("b", num_tokens=24)
    assert manager.match_prefix([*range(8), 1], ReuseScope("t")).num_blocks == 2
    manager.check()
