"""ferrum's spellings: prefixes with logits and limits, bytes token by token, its own requests and handles."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import DType, KVCacheConfig, KVCacheManager, LayerSpec, MemoryPressure
from kvpool.compat import (
    AllocationRequest,
    FerrumKVCacheManager,
    PagedKvCacheConfig,
    PagedKvCacheHandle,
    PagedKvCacheManager,
    PrefixCacheStats,
    Priority,
)
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    NeverFitsError,
    OutOfBlocksError,
    SequenceStateError,
    SharedBlockError,
    UnknownRequestError,
)

torch = pytest.importorskip("torch")

PROMPT = list(range(16))


def make_cache(num_blocks: int = 16, num_cpu_blocks: int = 0) -> FerrumKVCacheManager:
    config = KVCacheConfig([LayerSpec(2, 8)] * 2, 4, gpu_blocks=num_blocks, host_blocks=num_cpu_blocks)
    return FerrumKVCacheManager(KVCacheManager(config))


@pytest.mark.parametrize("by_count", [True, False])
def test_given_a_stored_prefix_when_its_request_is_gone_then_it_is_found_with_its_logits(by_count: bool) -> None:
    cache = make_cache()
    handle = cache.allocate("a", 16) if by_count else cache.allocate("a", tokens=PROMPT)
    assert cache.find_prefix(PROMPT) is None
    assert cache.store_prefix(PROMPT, handle, last_logits="logits")
    cache.deallocate("a")
    found = cache.find_prefix(PROMPT)
    assert found is not None
    assert (found.matched_length, found.last_logits) == (16, "logits")
    shorter, longer = cache.find_prefix(PROMPT[:10]), cache.find_prefix([*PROMPT, 1])
    assert shorter is not None
    assert longer is not None
    assert (shorter.matched_length, shorter.last_logits) == (9, None)
    assert (longer.matched_length, longer.last_logits) == (16, None)
    assert longer.prefix_id == found.prefix_id
    assert cache.allocate("b", tokens=PROMPT).last_logits == "logits"


def test_given_an_event_reader_when_a_prefix_is_found_then_its_id_is_the_digest_of_the_events() -> None:
    cache = make_cache()
    with cache.manager.subscribe() as events:
        cache.store_prefix(PROMPT, cache.allocate("a", tokens=PROMPT))
        stored = events.poll().events[-1]
    found = cache.find_prefix(PROMPT + [1])  # noqa: RUF005
    assert found is not None
    assert found.prefix_id == stored.digests[-1]  # type: ignore[union-attr]


def test_given_other_tokens_when_storing_a_prefix_then_it_is_refused_and_nothing_is_committed() -> None:
    cache = make_cache()
    handle = cache.allocate("a", tokens=PROMPT)
    with pytest.raises(InvalidArgumentError, match="holds other tokens"):
        cache.store_prefix([9] * 16, handle)
    assert handle.num_committed == 0


@pytest.mark.parametrize(("num_tokens", "copied"), [(8, 0), (10, 1), (16, 0)])
def test_given_a_source_when_sharing_its_prefix_then_full_blocks_are_shared_and_a_cut_one_is_copied(
    num_tokens: int, copied: int
) -> None:
    cache = make_cache()
    cache.store_prefix(PROMPT, cache.allocate("a", tokens=PROMPT))
    child = cache.share_prefix("a", "b", num_tokens)
    cache.extend("b", 1)
    full = num_tokens // 4
    assert cache.table("b", 0)[:full] == cache.table("a", 0)[:full]
    assert len(cache.manager.take_copies()) == copied
    assert (child.num_committed, child.num_reserved) == (num_tokens, num_tokens + 1)
    cache.deallocate("a")
    cache.manager.check()


def test_given_an_impossible_share_then_the_target_does_not_exist_afterwards() -> None:
    cache = make_cache(num_blocks=4)
    cache.store_prefix(PROMPT, cache.allocate("a", tokens=PROMPT))
    with pytest.raises(OutOfBlocksError):
        cache.share_prefix("a", "b", 10)  # the cut block would need a copy, and the pool is full
    with pytest.raises(SequenceStateError, match="16 written tokens"):
        cache.share_prefix("a", "b", 17)
    with pytest.raises(InvalidArgumentError):
        cache.share_prefix("a", "b", 0)
    with pytest.raises(DuplicateRequestError):
        cache.share_prefix("a", "a", 8)
    assert cache.get_handle("b") is None
    assert [name for name, _ in cache.list_handles()] == ["a"]
    cache.manager.check()


def test_given_cached_prefixes_when_evicted_collected_or_cleared_then_blocks_become_free() -> None:
    now = [0.0]
    layers = [LayerSpec(2, 8)]
    manager = KVCacheManager(KVCacheConfig(layers, 4, gpu_blocks=16, default_ttl=10.0), clock=lambda: now[0])
    cache = FerrumKVCacheManager(manager)
    for name, first in (("a", 0), ("b", 100)):
        tokens = list(range(first, first + 16))
        cache.store_prefix(tokens, cache.allocate(name, tokens=tokens))
        cache.deallocate(name)
    assert stats_of(cache)[:5] == (0, 8, 0, 2, 32)
    assert cache.evict_prefixes(1) == 1  # the older one
    assert (cache.find_prefix(range(16)), manager.inspect.num_free_blocks()) == (None, 12)
    assert stats_of(cache)[2:5] == (4, 1, 16)
    now[0] = 11.0
    collected = cache.gc()
    assert (collected.caches_freed, collected.memory_freed) == (1, 4 * manager.config.block_bytes)
    assert cache.evict_prefixes(1) == 0  # nothing of it is left
    cache.clear_prefix_cache()
    assert manager.inspect.num_free_blocks() == 16


def test_given_a_second_pressure_callback_then_it_replaces_the_first() -> None:
    cache = make_cache()
    first: list[MemoryPressure] = []
    second: list[MemoryPressure] = []
    cache.set_pressure_callback(first.append)
    cache.set_pressure_callback(second.append)
    cache.allocate("a", 64)
    assert cache.check_pressure() is MemoryPressure.CRITICAL
    with pytest.raises(OutOfBlocksError):
        cache.allocate("b", 4)
    assert (first, second) == ([], [MemoryPressure.CRITICAL])


def test_given_a_swapped_request_when_deallocated_then_its_host_blocks_are_free_again() -> None:
    cache = make_cache(num_cpu_blocks=8)
    cache.manager.commit(cache.allocate("a", 16), 16)
    assert cache.swap_out("a") == 4
    assert cache.table("a", 0) == [None] * 4
    assert cache.manager.inspect.num_free_blocks() == 16
    assert cache.swap_in("a") == 4
    cache.swap_out("a")
    cache.deallocate("a")
    assert all(pool.free == pool.total for pool in cache.manager.stats().pools)


def test_given_a_handle_in_place_of_an_id_when_sharing_then_it_is_refused_and_no_request_is_made() -> None:
    cache = make_cache()
    cache.store_prefix(PROMPT, cache.allocate("a", tokens=PROMPT))
    target = cache.allocate("b", 16)
    with pytest.raises(InvalidArgumentError, match="got the handle of request 'b'; give an id"):
        cache.share_prefix_blocks("a", target, 2)
    assert [name for name, _ in cache.list_handles()] == ["a", "b"]


# --- stored prefixes --------------------------------------------------------------------------------------------------


def stats_of(cache: FerrumKVCacheManager) -> PrefixCacheStats:
    stats = cache.prefix_cache_stats()
    assert stats is not None
    return stats


def store(cache: FerrumKVCacheManager, name: str, tokens: list[int], *, keep_live: bool = False) -> None:
    cache.store_prefix(tokens, cache.allocate(name, tokens=tokens))
    if not keep_live:
        cache.deallocate(name)


def limited(**limits: Any) -> FerrumKVCacheManager:
    return FerrumKVCacheManager(KVCacheManager(KVCacheConfig([LayerSpec(2, 8)], 4, gpu_blocks=32)), **limits)


def test_given_no_prefixes_to_keep_then_none_is_stored() -> None:
    cache = limited(max_prefixes=0)
    handle = cache.allocate("a", tokens=PROMPT)
    assert not cache.store_prefix(PROMPT, handle)
    assert (handle.num_committed, stats_of(cache).active_prefixes) == (0, 0)


def test_given_prefixes_that_are_found_then_they_count_as_hits_and_what_is_not_as_misses() -> None:
    cache = limited(min_prefix_length=4)
    store(cache, "a", PROMPT)  # 4 blocks are looked for in vain
    assert cache.find_prefix([*PROMPT, 1, 2, 3, 4]) is not None  # 4 of 5 blocks
    assert cache.find_prefix([99] * 8) is None
    stats = stats_of(cache)
    assert (stats.hits, stats.misses, stats.hit_rate) == (4, 4 + 1 + 2, 4 / 11)
    assert cache.stats().cache_hit_rate == 4 / 11
    assert cache.find_prefix(PROMPT) is not None  # all 4 blocks
    assert stats_of(cache)[:2] == (8, 7)


@pytest.mark.parametrize("into_handle", [True, False])
def test_given_a_found_prefix_when_it_is_shared_then_that_is_one_allocation_and_no_lookup(into_handle: bool) -> None:
    manager = paged(min_prefix_length=4)
    source = manager.allocate(request("a", 8, tokens=list(range(8))))
    assert manager.store_prefix(list(range(8)), source)
    assert stats_of(manager)[:2] == (0, 2)
    found = manager.find_prefix([*range(8), 9])
    assert found is not None
    target = manager.allocate(request("b", 9)) if into_handle else "b"
    before = stats_of(manager)
    manager.share_prefix_blocks(found.kv_handle, target, 2)
    assert stats_of(manager)[:2] == before[:2] == (2, 2)
    assert (manager.stats().allocation_count, manager.stats().active_caches) == (2, 2)


def test_given_a_live_request_when_its_prefix_is_stored_then_the_statistics_count_its_tokens_at_once() -> None:
    cache = limited()
    store(cache, "a", PROMPT, keep_live=True)
    stats = stats_of(cache)
    assert (stats.active_prefixes, stats.total_cached_tokens) == (1, 16)
    cache.deallocate("a")
    assert stats_of(cache).total_cached_tokens == 16


def test_given_too_many_prefixes_then_the_one_not_used_for_longest_gives_way_with_its_blocks() -> None:
    cache = limited(max_prefixes=2)
    prompts = [[n] * 8 for n in range(3)]
    store(cache, "a", prompts[0])
    store(cache, "b", prompts[1])
    assert cache.find_prefix([*prompts[0], 9]) is not None  # used again
    store(cache, "c", prompts[2])
    assert [cache.find_prefix([*prompt, 9]) is not None for prompt in prompts] == [True, False, True]
    assert cache.manager.inspect.num_free_blocks() == 28
    store(cache, "c", prompts[2])  # known already: nothing gives way
    assert stats_of(cache).active_prefixes == 2
    cache.manager.check()


def test_given_prefixes_that_continue_each_other_when_one_goes_then_what_the_other_needs_stays() -> None:
    cache = limited()
    store(cache, "short", PROMPT[:8])
    store(cache, "long", PROMPT)
    assert cache.evict_prefixes(1) == 1  # the short one, whose blocks begin the long one
    found = cache.find_prefix([*PROMPT, 1])
    assert found is not None
    assert found.matched_length == 16
    store(cache, "short", PROMPT[:8])
    assert cache.evict_prefixes(1) == 1
    found = cache.find_prefix([*PROMPT, 1])
    assert found is not None
    assert found.matched_length == 8
    assert cache.evict_prefixes(5) == 1
    assert cache.manager.inspect.num_free_blocks() == 32


def test_given_a_live_reader_when_its_prefix_is_evicted_then_it_goes_on_with_its_blocks() -> None:
    cache = limited()
    store(cache, "a", PROMPT, keep_live=True)
    table = cache.table("a", 0)
    assert cache.evict_prefixes(1) == 1
    assert cache.table("a", 0) == table
    cache.extend("a", 4)
    cache.manager.commit(cache.handle("a"), [1, 2, 3, 4])
    assert cache.find_prefix(PROMPT) is None
    cache.manager.check()
    cache.deallocate("a")
    assert cache.manager.inspect.num_free_blocks() == 32


def test_given_a_short_prefix_then_it_is_neither_stored_nor_found() -> None:
    cache = limited(min_prefix_length=8)
    handle = cache.allocate("a", tokens=PROMPT)
    assert cache.store_prefix(PROMPT[:7], handle, last_logits="logits") is False
    assert handle.num_committed == 0
    assert cache.store_prefix(PROMPT, handle)
    assert cache.find_prefix(PROMPT[:8]) is None  # 7 of its tokens could be reused
    assert cache.find_prefix(PROMPT[:9]) is not None


def test_given_a_prefix_that_fills_no_block_then_it_is_not_kept_and_drives_no_other_out() -> None:
    cache = limited(max_prefixes=1)
    store(cache, "long", PROMPT)
    handle = cache.allocate("short", tokens=[7, 8, 9])
    assert cache.store_prefix([7, 8, 9], handle) is False
    assert cache.find_prefix([7, 8, 9, 1]) is None
    assert cache.find_prefix(PROMPT) is not None
    assert stats_of(cache).active_prefixes == 1


@pytest.mark.parametrize("limits", [dict(max_prefixes=-1), dict(max_prefixes=1.5), dict(min_prefix_length=-1)])
def test_given_limits_that_make_no_sense_then_the_error_names_them(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        limited(**limits)


# --- ferrum's own tests, in its own words -----------------------------------------------------------------------------


def paged(**settings: Any) -> PagedKvCacheManager:
    fields = dict(block_size=4, max_gpu_blocks=16, max_cpu_blocks=8, num_layers=2, num_heads=2, head_dim=4)
    return PagedKvCacheManager("cpu", PagedKvCacheConfig(**{**fields, **settings}))


def request(name: str = "r", initial_tokens: int = 6, **fields: Any) -> AllocationRequest:
    shape = dict(num_layers=2, num_heads=2, head_dim=4, device="cpu", dtype=DType.FLOAT16, max_sequence_length=32)
    return AllocationRequest(name, initial_tokens, **{**shape, **fields})


def test_given_ferrums_defaults_when_64_tokens_are_asked_for_then_a_valid_handle_holds_four_blocks() -> None:
    manager = PagedKvCacheManager.with_defaults("cpu", 16, 100)
    handle = manager.allocate(AllocationRequest("r", 64, 2048, 32, 32, 128, "cpu", "fp16", Priority.NORMAL))
    assert handle.is_valid()
    assert (handle.num_tokens(), handle.num_blocks(), handle.cache_id()) == (64, 4, "paged-r")
    assert (handle.num_layers(), handle.num_heads(), handle.head_dim(), handle.device()) == (32, 32, 128, "cpu")
    assert [handle.required_blocks(n) for n in (0, 16, 17, 32, 33)] == [0, 1, 2, 2, 3]
    stats = handle.stats()
    assert (stats.blocks_allocated, stats.tokens_stored, stats.utilization) == (4, 64, 1.0)
    assert stats.memory_bytes == 4 * 16 * 2 * 32 * 32 * 128 * 2
    assert (manager.total_blocks(), manager.free_block_count()) == (100, 96)
    manager.deallocate("r")
    assert not handle.is_valid()
    assert manager.get_handle("r") is None
    with pytest.raises(UnknownRequestError):
        handle.stats()


def test_given_tokens_across_two_blocks_when_written_one_by_one_then_they_are_read_in_order() -> None:
    manager = paged(enable_swapping=False, enable_cow=False, enable_prefix_cache=False)
    handle = manager.allocate(request())
    for position in range(6):
        key = [position * 100 + i for i in range(8)]
        manager.write_kv(handle, 0, position, key, [number + 50 for number in key])
    keys, values = manager.read_kv(handle, 0, 0, 6)
    assert (len(keys), len(values)) == (48, 48)
    assert (keys[0], keys[7], keys[4 * 8], values[5 * 8]) == (0.0, 7.0, 400.0, 550.0)
    assert (keys.dtype, keys.ndim) == (torch.float32, 1)
    assert not manager.read_kv(handle, 1, 0, 1)[0].any()
    assert torch.equal(handle.key_cache(0).reshape(-1).float(), keys)
    assert torch.equal(handle.value_cache(0).reshape(-1).float(), values)
    manager.deallocate(handle)


def test_given_four_more_blocks_then_the_handle_has_them_and_they_are_named() -> None:
    manager = paged()
    handle = manager.allocate(request(initial_tokens=6))
    assert manager.allocate_blocks(handle, 4) == [2, 3, 4, 5]
    assert (handle.num_blocks(), handle.num_tokens(), handle.get_physical_blocks()) == (6, 6, [0, 1, 2, 3, 4, 5])
    assert (handle.get_physical_block(0), handle.get_physical_block(6)) == (0, None)  # 0 is a block


def test_given_a_full_pool_then_can_allocate_says_no_and_failures_are_counted() -> None:
    manager = paged(max_gpu_blocks=4)
    assert manager.can_allocate(request(initial_tokens=16))
    manager.allocate(request("a", 12))
    assert not manager.can_allocate(request("b", 6))
    with pytest.raises(OutOfBlocksError):
        manager.allocate(request("b", 6))
    with pytest.raises(NeverFitsError):
        manager.allocate(request("b", 17))
    with pytest.raises(DuplicateRequestError):
        manager.allocate(request("a", 1))
    stats = manager.stats()
    assert (stats.active_caches, stats.allocation_count, stats.allocation_failures) == (1, 1, 2)
    assert (stats.total_blocks, stats.free_blocks, stats.eviction_count, stats.cache_hit_rate) == (4, 1, 0, 0.0)
    block_bytes = manager.manager.config.block_bytes
    assert (stats.total_memory_bytes, stats.used_memory_bytes) == (4 * block_bytes, 3 * block_bytes)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 3), ("num_heads", 4), ("head_dim", 8), ("device", "cuda"), ("dtype", "bf16")],
)
def test_given_a_request_for_another_model_then_it_is_refused_by_name(field: str, value: Any) -> None:
    manager = paged()
    for ask in (manager.allocate, manager.can_allocate):
        with pytest.raises(InvalidArgumentError, match=field):
            ask(request(**{field: value}))
    assert manager.list_handles() == []


def test_given_a_longest_length_then_a_request_can_neither_start_nor_grow_past_it() -> None:
    manager = paged()
    with pytest.raises(InvalidArgumentError, match="max_sequence_length=4"):
        manager.allocate(request(max_sequence_length=4))
    handle = manager.allocate(request(max_sequence_length=8))
    assert manager.extend(handle, 2) is handle
    with pytest.raises(SequenceStateError, match="max_sequence_length is 8"):
        manager.extend(handle, 1)
    assert handle.num_tokens() == 8
    assert (
        request(max_sequence_length=32).estimated_memory_bytes(block_size=4) == 8 * manager.manager.config.block_bytes
    )
    with pytest.raises(InvalidArgumentError, match="num_layers"):
        AllocationRequest("r", 4).estimated_memory_bytes()


def test_given_a_prompts_tokens_then_the_request_reuses_its_prefix_and_priority_says_how_long_it_stays() -> None:
    manager = paged(max_gpu_blocks=8)
    assert request().retention is None
    for name, first, priority in (("vip", 0, Priority.CRITICAL), ("other", 50, Priority.LOW)):
        tokens = list(range(first, first + 16))
        handle = manager.allocate(request(name, 16, tokens=tokens, priority=priority))
        assert manager.store_prefix(tokens, handle, last_logits=name)
        manager.deallocate(name)
    handle = manager.allocate(request("again", 16, tokens=list(range(16))))
    assert handle.handle.last_logits == "vip"
    with pytest.raises(InvalidArgumentError, match="has 16 tokens, initial_tokens=6"):
        manager.allocate(request("wrong", 6, tokens=list(range(16))))
    priorities = request(priority=Priority.HIGH).retention
    assert priorities is not None
    assert priorities.priority_at(0, 16) == (70, None)


def test_given_a_clone_when_it_writes_then_only_the_block_that_both_read_is_copied_with_its_bytes() -> None:
    manager = paged()
    handle = manager.allocate(request())
    for position in range(6):
        manager.write_kv(handle, 0, position, [position] * 8, [position] * 8)
    clone = handle.clone_handle()
    assert clone.request_id == "r-clone-1"
    with pytest.raises(SharedBlockError):
        manager.write_kv(clone, 0, 0, [9] * 8, [9] * 8)
    manager.extend(clone)
    manager.write_kv(clone, 0, 6, [60] * 8, [60] * 8)
    assert handle.get_physical_block(0) == clone.get_physical_block(0)
    assert handle.get_physical_block(1) != clone.get_physical_block(1)
    manager.deallocate(handle)
    assert manager.read_kv(clone, 0, 0, 7)[0][::8].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 60.0]
    assert [name for name, _ in manager.list_handles()] == ["r-clone-1"]
    manager.deallocate(clone)
    assert manager.free_block_count() == 16


def test_given_shared_blocks_when_other_tokens_follow_then_these_can_be_stored() -> None:
    manager = paged(min_prefix_length=4)
    source = manager.allocate(request(initial_tokens=8, tokens=list(range(8))))
    manager.write(source, 1, 0, torch.arange(64.0), torch.arange(64.0))
    target = manager.extend(manager.share_prefix_blocks(source, "s", 1), 4)
    manager.write(target, 1, 4, torch.arange(32.0), torch.arange(32.0))
    assert manager.store_prefix([0, 1, 2, 3, 9, 9, 9, 9], target)
    found = manager.find_prefix([0, 1, 2, 3, 9, 9, 9, 9])
    assert found is not None
    assert found.matched_length == 7


def test_given_shared_blocks_then_they_outlive_their_source() -> None:
    manager = paged()
    handle = manager.allocate(request(initial_tokens=10))
    manager.write(handle, 1, 0, torch.arange(80.0), torch.arange(80.0))
    shared = manager.share_prefix_blocks("r", "s", 5)  # two blocks are full
    assert isinstance(shared, PagedKvCacheHandle)
    assert (shared.num_tokens(), shared.get_physical_blocks()) == (8, handle.get_physical_blocks()[:2])
    manager.deallocate("r")
    assert manager.read_kv(shared, 1, 0, 8)[0].tolist() == list(range(64))
    with pytest.raises(ConfigError, match="enable_cow"):
        paged(enable_cow=False).allocate(request(initial_tokens=1)).clone_handle()


def test_given_no_swapping_then_there_are_no_host_blocks_and_swapping_is_refused() -> None:
    manager = paged(enable_swapping=False)
    manager.allocate(request())
    with pytest.raises(ConfigError, match="enable_swapping is False"):
        manager.swap_out("r")
    assert PagedKvCacheManager.with_defaults("cpu", 16, 1).total_blocks() == 1  # half of it is no host block


def test_given_a_swapped_request_when_read_then_its_bytes_come_from_the_host() -> None:
    manager = paged()
    handle = manager.allocate(request())
    manager.write(handle, 0, 0, torch.arange(48.0), torch.arange(48.0))
    manager.swap_out(handle)
    assert handle.get_physical_blocks() == []
    assert manager.read_kv(handle, 0, 0, 6)[0].tolist() == list(range(48))
    manager.swap_in(handle)
    assert manager.read_kv(handle, 0, 5, 1)[0].tolist() == list(range(40, 48))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(low_watermark=0.1, high_watermark=0.3), "high_watermark=0.3 <= low_watermark=0.1"),
        (dict(high_watermark=-0.1), "0 <= high_watermark=-0.1"),
        (dict(high_watermark="low"), "high_watermark='low'"),
        (dict(enable_cow=1), "enable_cow=1"),
        (dict(max_prefixs=3), "no setting 'max_prefixs'; the nearest: max_prefixes"),
        (dict(low_water_mark=0.2), "the nearest: low_watermark"),
    ],
)
def test_given_a_setting_that_cannot_work_then_the_error_names_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        paged(**settings)
    with pytest.raises(InvalidArgumentError, match="AllocationRequest"):
        paged().allocate("r")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="PagedKvCacheConfig"):
        PagedKvCacheManager("cpu", {"block_size": 4})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no setting 'initial_token'; the nearest: initial_tokens"):
        AllocationRequest("r", initial_token=4)  # type: ignore[call-arg]


def test_given_handle_statistics_of_any_spelling_then_they_count_what_the_request_holds() -> None:
    cache = make_cache()
    cache.allocate("a", 6)
    stats = cache.handle_stats("a")
    assert (stats.blocks_allocated, stats.tokens_stored, stats.utilization) == (2, 6, 0.75)
    assert stats.memory_bytes == 2 * cache.manager.config.block_bytes
