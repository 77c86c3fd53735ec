"""Programs as somebody writes them who knows ferrum's source and nothing else, and the tests that stand there."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from kvpool.compat import ferrum
from kvpool.compat.ferrum import (
    AllocationRequest,
    DataType,
    Device,
    FerrumError,
    KvCacheManager,
    MemoryPressure,
    PagedKvCacheConfig,
    PagedKvCacheHandle,
    PagedKvCacheManager,
    PhysicalBlockId,
    Priority,
    RequestId,
)
from kvpool.errors import (
    ConfigError,
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    SharedBlockError,
    UnknownRequestError,
)

torch = pytest.importorskip("torch")


def default_request(initial_tokens: int = 64) -> AllocationRequest:
    return AllocationRequest(
        request_id=RequestId(),
        initial_tokens=initial_tokens,
        max_sequence_length=2048,
        num_layers=32,
        num_heads=32,
        head_dim=128,
        device=Device.CPU,
        dtype=DataType.FP16,
        priority=Priority.NORMAL,
    )


def small(**settings: Any) -> PagedKvCacheManager:
    fields = dict(block_size=4, max_gpu_blocks=16, max_cpu_blocks=16, num_layers=2, num_heads=2, head_dim=4)
    config = PagedKvCacheConfig(**{**fields, "min_prefix_length": 4, **settings})
    return PagedKvCacheManager(Device.CPU, config)


def small_request(name: Any = None, initial_tokens: int = 6, **fields: Any) -> AllocationRequest:
    shape = dict(max_sequence_length=32, num_layers=2, num_heads=2, head_dim=4, device=Device.CPU)
    return AllocationRequest(RequestId() if name is None else name, initial_tokens, **{**shape, **fields})


def alone(name: str = "alone", block_size: int = 4, **shape: Any) -> PagedKvCacheHandle:
    return PagedKvCacheHandle(name, Device.CPU, block_size, **{**dict(num_layers=2, num_heads=2, head_dim=4), **shape})


def write(manager: PagedKvCacheManager, handle: PagedKvCacheHandle, start: int, stop: int, number: float = 0.0) -> None:
    for position in range(start, stop):
        for layer in range(2):
            manager.write_kv(handle, layer, position, [number + position] * 8, [-number - position] * 8)


def keys(manager: PagedKvCacheManager, handle: Any, num_tokens: int, layer: int = 0) -> list[float]:
    numbers: list[float] = manager.read_kv(handle, layer, 0, num_tokens)[0][::8].tolist()
    return numbers


# --- the document's own tests -----------------------------------------------------------------------------------------


def test_a_manager_is_made_from_defaults() -> None:
    assert isinstance(PagedKvCacheManager.with_defaults(Device.CPU, 16, 100), KvCacheManager)


def test_a_request_is_allocated_and_deallocated() -> None:
    async def main() -> None:
        manager = PagedKvCacheManager.with_defaults(Device.CPU, 16, 100)
        request = default_request()
        handle = await manager.allocate(request)
        assert handle.is_valid()
        assert handle.num_tokens() == 64
        assert (handle.stats().blocks_allocated, handle.stats().tokens_stored) == (4, 64)
        await manager.deallocate(request.request_id)
        assert not handle.is_valid()

    asyncio.run(main())


def test_a_request_gets_more_blocks_and_no_more_tokens() -> None:
    async def main() -> None:
        manager = PagedKvCacheManager.with_defaults(Device.CPU, 16, 100)
        request = default_request()
        handle = await manager.allocate(request)
        before = handle.stats().blocks_allocated
        found = manager.get_handle(request.request_id)
        assert found is not None
        paged = found.as_any().downcast_ref(PagedKvCacheHandle)
        assert paged is handle
        manager.allocate_blocks(paged, 4)
        assert handle.stats().blocks_allocated == before + 4
        assert handle.num_tokens() == 64
        await manager.deallocate(request.request_id)

    asyncio.run(main())


def test_a_pool_that_is_allocated_from_has_fewer_free_blocks() -> None:
    async def main() -> None:
        manager = PagedKvCacheManager.with_defaults(Device.CPU, 16, 10)
        assert manager.can_allocate(default_request())
        for _ in range(8):
            try:
                await manager.allocate(default_request())
            except FerrumError:
                continue
        stats = manager.stats()
        assert stats.free_blocks < stats.total_blocks
        assert not manager.can_allocate(default_request())

    asyncio.run(main())


def test_a_collection_frees_no_live_cache() -> None:
    async def main() -> None:
        manager = PagedKvCacheManager.with_defaults(Device.CPU, 16, 100)
        request = default_request()
        await manager.allocate(request)
        await manager.deallocate(request.request_id)
        assert (await manager.gc()).caches_freed == 0

    asyncio.run(main())


def test_a_handle_by_itself_has_a_table() -> None:
    handle = PagedKvCacheHandle(RequestId(), Device.CPU, 16, 32, 32, 128)
    assert (handle.num_tokens(), handle.num_blocks()) == (0, 0)
    handle.add_block(0, 5)
    handle.add_block(1, 10)
    assert handle.num_blocks() == 2
    assert (handle.get_physical_block(0), handle.get_physical_block(1), handle.get_physical_block(2)) == (5, 10, None)


def test_tokens_are_written_and_read_across_blocks() -> None:
    async def main() -> None:
        config = PagedKvCacheConfig(
            block_size=4,
            max_gpu_blocks=16,
            max_cpu_blocks=0,
            enable_cow=False,
            enable_swapping=False,
            num_layers=2,
            num_heads=2,
            head_dim=4,
            enable_prefix_cache=False,
        )
        manager = PagedKvCacheManager(Device.CPU, config)
        request = small_request(dtype=DataType.FP16, priority=Priority.NORMAL)
        handle = await manager.allocate(request)
        for position in range(6):
            key = [float(position * 100 + i) for i in range(8)]
            manager.write_kv(handle, 0, position, key, [number + 50 for number in key])
        found_keys, found_values = manager.read_kv(handle, 0, 0, 6)
        assert (len(found_keys), len(found_values)) == (48, 48)
        assert (found_keys[0], found_keys[7], found_keys[4 * 8], found_values[5 * 8]) == (0.0, 7.0, 400.0, 550.0)
        assert all(number == 0.0 for number in manager.read_kv(handle, 1, 0, 1)[0])
        await manager.deallocate(request.request_id)

    asyncio.run(main())


def test_blocks_for_tokens_are_rounded_up() -> None:
    handle = PagedKvCacheHandle(RequestId(), Device.CPU, 16, 32, 32, 128)
    assert [handle.required_blocks(n) for n in (0, 16, 17, 32, 33)] == [0, 1, 2, 2, 3]


# --- sharing into a handle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_tokens", [0, 3, 8, 14])
def test_a_target_handle_starts_with_the_shared_blocks_and_keeps_its_own_behind_them(own_tokens: int) -> None:
    manager = small(max_gpu_blocks=9)
    source, target = manager.allocate(small_request("s", 12)), manager.allocate(small_request("t", own_tokens))
    write(manager, source, 0, 12)
    assert manager.share_prefix_blocks(source, target, 2) is target
    assert [name for name, _ in manager.list_handles()] == ["s", "t"]
    assert target.get_physical_blocks()[:2] == source.get_physical_blocks()[:2]
    assert target.num_tokens() == max(own_tokens, 8)
    assert (source.ref_count(), target.ref_count(), source.is_cow()) == (2, 2, True)
    assert manager.stats().active_caches == 2
    manager.deallocate(source)
    assert keys(manager, "t", 8) == list(range(8))
    manager.extend(target, 12 - target.num_tokens()) if own_tokens < 12 else None
    write(manager, target, 8, 12, 500.0)
    assert keys(manager, target, 12, layer=1) == [*range(8), 508.0, 509.0, 510.0, 511.0]
    manager.deallocate("t")
    assert manager.free_block_count() == 9
    manager.manager.check()


def test_a_target_without_blocks_needs_none_to_share_into_and_one_with_blocks_keeps_them_until_it_can() -> None:
    manager = small(max_gpu_blocks=6)
    source, target = manager.allocate(small_request("s", 12)), manager.allocate(small_request("t", 12))
    write(manager, source, 0, 12)
    before = target.get_physical_blocks()
    with pytest.raises(OutOfBlocksError):
        manager.share_prefix_blocks(source, target, 1)
    assert (target.get_physical_blocks(), target.num_tokens(), manager.free_block_count()) == (before, 12, 0)
    empty = manager.allocate(small_request("e", 0))
    manager.share_prefix_blocks(source, empty, 2)
    assert empty.get_physical_blocks() == source.get_physical_blocks()[:2]
    manager.manager.check()


def test_a_share_that_cannot_be_leaves_both_as_they_were() -> None:
    manager = small()
    source, target = manager.allocate(small_request("s", 12)), manager.allocate(small_request("t", 8))
    with pytest.raises(SequenceStateError, match="not one whole block of 4"):
        manager.share_prefix_blocks(source, target, 2)
    write(manager, source, 0, 12)
    write(manager, target, 0, 1)
    with pytest.raises(SequenceStateError, match="'t' has 1 written tokens"):
        manager.share_prefix_blocks(source, target, 2)
    with pytest.raises(SequenceStateError, match="'s' has 12 written tokens"):
        manager.share_prefix_blocks(source, source, 2)
    with pytest.raises(SequenceStateError, match="max_sequence_length is 4"):
        manager.share_prefix_blocks(source, manager.allocate(small_request("u", 1, max_sequence_length=4)), 2)
    with pytest.raises(InvalidArgumentError, match="the handle of request 't'"):
        manager.share_prefix_blocks(source, target.handle, 2)
    other = alone()
    with pytest.raises(SequenceStateError):
        manager.share_prefix_blocks(manager.allocate(small_request("empty", 0)), other, 2)
    assert not other.is_attached
    assert [handle.num_blocks() for _, handle in manager.list_handles()] == [3, 2, 1, 0]
    manager.manager.check()


def test_a_handle_by_itself_becomes_a_request_with_its_first_blocks() -> None:
    manager = small()
    source = manager.allocate(small_request("s", 8))
    write(manager, source, 0, 8)
    first, second, third = alone("first"), alone("second"), alone("third")
    manager.share_prefix_blocks(source, first, 1)
    assert manager.allocate_blocks(second, 2) == second.get_physical_blocks()
    manager.extend(third, 5)
    assert [(h.num_blocks(), h.num_tokens()) for h in (first, second, third)] == [(1, 4), (2, 0), (2, 5)]
    assert [name for name, _ in manager.list_handles()] == ["s", "first", "second", "third"]
    assert manager.get_handle("second") is second
    with pytest.raises(OutOfBlocksError):
        manager.allocate_blocks(fourth := alone("fourth"), 100)
    assert not fourth.is_attached
    assert manager.get_handle("fourth") is None


@pytest.mark.parametrize("shape", [{"num_layers": 3}, {"num_heads": 1}, {"head_dim": 8}, {"block_size": 8}])
def test_a_handle_of_another_shape_gets_no_blocks(shape: dict[str, int]) -> None:
    manager, handle = small(), alone(**shape)
    with pytest.raises(InvalidArgumentError, match=next(iter(shape))):
        manager.allocate_blocks(handle, 1)
    assert not handle.is_attached


def test_a_handle_with_a_table_of_its_own_gets_no_blocks() -> None:
    manager, handle = small(), alone()
    handle.add_block(0, 0)
    for call in (lambda: manager.extend(handle, 1), lambda: manager.allocate_blocks(handle, 1)):
        with pytest.raises(SequenceStateError, match="filled in by hand"):
            call()
    with pytest.raises(SequenceStateError, match="no blocks in a manager"):
        manager.write_kv(handle, 0, 0, [0.0] * 8, [0.0] * 8)
    for read in (handle.clone_handle, lambda: handle.key_cache(0), lambda: handle.value_cache(0)):
        with pytest.raises(SequenceStateError, match="no blocks in a manager"):
            read()


def test_a_found_prefix_is_shared_into_the_request_that_asked_for_it() -> None:
    manager = small()
    system = list(range(12))
    first = manager.allocate(small_request("first", 12))
    write(manager, first, 0, 12)
    manager.store_prefix(system, first, [0.1, 0.9])
    manager.deallocate("first")
    tokens = [*system, 50, 51]
    found = manager.find_prefix(tokens)
    assert found is not None
    prefix_id, kv_handle, last_logits, matched = found
    assert (len(prefix_id or b""), last_logits, matched, kv_handle.num_tokens()) == (32, None, 12, 12)
    handle = manager.allocate(small_request("second", len(tokens)))
    manager.share_prefix_blocks(kv_handle, handle, matched // 4)
    assert (handle.num_tokens(), handle.num_blocks(), manager.stats().active_caches) == (14, 4, 1)
    assert keys(manager, handle, 12) == list(range(12))
    write(manager, handle, 12, 14)
    assert kv_handle.is_valid()
    with pytest.raises(InvalidArgumentError, match="holds no blocks: share_prefix_blocks"):
        manager.read_kv(kv_handle, 0, 0, 1)
    manager.deallocate(handle)
    manager.clear_prefix_cache()
    assert not kv_handle.is_valid()
    with pytest.raises(SequenceStateError, match="not one whole block"):
        manager.share_prefix_blocks(kv_handle, manager.allocate(small_request("third", 0)), 1)
    manager.manager.check()


# --- pressure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "low", "high"),
    [(8, 0.5, 0.25), (10, 0.3, 0.1), (10, 0.9, 0.7), (7, 1.0, 0.01), (3, 0.5, 0.5), (4, 0.5, 0.0), (4, 0.0, 0.0)],
)
def test_pressure_has_the_borders_of_the_document(blocks: int, low: float, high: float) -> None:
    manager = small(max_gpu_blocks=blocks, low_watermark=low, high_watermark=high)
    for used in range(blocks + 1):
        free = (blocks - used) / blocks
        expected = MemoryPressure.CRITICAL if free < high else MemoryPressure.HIGH if free < low else MemoryPressure.LOW
        assert manager.check_pressure() is expected, f"{used} of {blocks} used"
        if used < blocks:
            manager.allocate(small_request(used, 4))


def test_the_callback_hears_of_every_allocation_that_begins_under_critical_pressure() -> None:
    manager = small(max_gpu_blocks=8, high_watermark=0.25, low_watermark=0.5)
    heard: list[MemoryPressure] = []
    manager.set_pressure_callback(heard.append)
    for name in range(7):
        manager.allocate(small_request(name, 4))
    assert heard == []  # 1 of 8 is free: the next one begins under critical pressure
    manager.allocate(small_request("a", 4))
    with pytest.raises(OutOfBlocksError):
        manager.allocate(small_request("b", 4))
    assert heard == [MemoryPressure.CRITICAL] * 2
    manager.deallocate("a")
    with pytest.raises(InvalidArgumentError):
        manager.allocate(small_request("c", 4, num_heads=3))
    assert len(heard) == 2


def test_a_callback_may_make_room_for_the_allocation_that_called_it() -> None:
    manager = small(max_gpu_blocks=4, high_watermark=0.25, low_watermark=0.5)
    manager.allocate(small_request("old", 16))
    manager.set_pressure_callback(lambda pressure: manager.deallocate("old") and None)
    assert manager.allocate(small_request("new", 16)).is_valid()


@pytest.mark.parametrize("callback", [3, None, "print", lambda: None, lambda level, usage: None])
def test_what_cannot_be_called_with_a_pressure_is_refused_and_replaces_nothing(callback: Any) -> None:
    manager = small(max_gpu_blocks=1)
    heard: list[MemoryPressure] = []
    manager.set_pressure_callback(heard.append)
    with pytest.raises(InvalidArgumentError, match="a function of one argument"):
        manager.set_pressure_callback(callback)
    manager.allocate(small_request(0, 4))
    with pytest.raises(OutOfBlocksError):
        manager.allocate(small_request(1, 4))
    assert heard == [MemoryPressure.CRITICAL]


# --- blocks, tokens, bytes --------------------------------------------------------------------------------------------


def test_blocks_are_no_tokens_but_can_be_written_and_counted() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 4))
    assert len(manager.allocate_blocks(handle, 2)) == 2
    assert (handle.num_tokens(), handle.num_blocks(), handle.stats().tokens_stored) == (4, 3, 4)
    write(manager, handle, 0, 6)
    assert handle.num_tokens() == 4
    handle.set_num_tokens(5)
    assert handle.num_tokens() == 5
    manager.extend(handle, 1)  # the sixth token, which is written already
    assert (handle.num_tokens(), handle.block_table().sequence_length) == (6, 6)
    manager.extend(handle, 2)
    assert (handle.num_tokens(), handle.num_blocks()) == (8, 3)
    handle.set_num_tokens(2)
    assert (handle.num_tokens(), handle.num_blocks(), keys(manager, handle, 6)) == (2, 3, list(range(6)))
    with pytest.raises(SequenceStateError, match="blocks for 12 tokens, not for 13"):
        handle.set_num_tokens(13)
    with pytest.raises(SequenceStateError, match="places for 8 tokens; extend it before position 12"):
        manager.write(handle, 0, 6, [0.0] * 8 * 7, [0.0] * 8 * 7)
    manager.manager.check()


def test_a_write_for_whose_copy_there_is_no_block_changes_nothing() -> None:
    manager = small(max_gpu_blocks=2)
    handle = manager.allocate(small_request("r", 5))
    write(manager, handle, 0, 5)
    clone = handle.clone_handle()
    with pytest.raises(OutOfBlocksError):
        write(manager, clone, 5, 6)
    assert (clone.num_tokens(), clone.handle.num_reserved, keys(manager, clone, 5)) == (5, 5, [0.0, 1.0, 2.0, 3.0, 4.0])


def test_the_longest_length_bounds_blocks_tokens_and_writes() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 4, max_sequence_length=6))
    with pytest.raises(SequenceStateError, match="max_sequence_length is 6"):
        manager.allocate_blocks(handle, 2)
    manager.allocate_blocks(handle, 1)
    write(manager, handle, 0, 6)
    for grow in (
        lambda: handle.set_num_tokens(7),
        lambda: manager.extend(handle, 3),
        lambda: write(manager, handle, 6, 7),
    ):
        with pytest.raises(SequenceStateError, match="max_sequence_length is 6"):
            grow()
    assert (handle.num_tokens(), handle.num_blocks()) == (4, 2)


def test_a_request_may_start_without_tokens() -> None:
    manager = small(max_gpu_blocks=2)
    manager.allocate(small_request("full", 8))
    assert manager.can_allocate(small_request("r", 0))
    handle = manager.allocate(small_request("r", 0))
    assert (handle.num_tokens(), handle.num_blocks(), handle.stats().utilization) == (0, 0, 0.0)
    assert manager.stats().active_caches == 2
    manager.deallocate("full")
    manager.extend(handle, 3)
    write(manager, handle, 0, 3)
    assert keys(manager, handle, 3) == [0.0, 1.0, 2.0]


def test_a_gap_in_writes_is_refused_and_what_is_not_written_cannot_be_read() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 6))
    write(manager, handle, 0, 2)
    with pytest.raises(SequenceStateError, match="write position 2 before 4"):
        write(manager, handle, 4, 5)
    for start, count, stop in ((0, 3, 3), (2, 1, 3), (4, 0, 4)):
        with pytest.raises(
            InvalidArgumentError, match=f"has 2 written tokens; those up to {stop} cannot be read before"
        ):
            manager.read_kv(handle, 0, start, count)
    assert keys(manager, handle, 2) == [0.0, 1.0]


@pytest.mark.parametrize("device", [Device.CPU, "cpu", torch.device("cpu"), None])
def test_a_device_may_be_spelled_in_every_way(device: Any) -> None:
    assert small().allocate(small_request("r", 4, device=device)).device() == Device.CPU


def test_one_gpu_of_several_is_told_apart() -> None:
    manager = PagedKvCacheManager("cuda:1", PagedKvCacheConfig(4, 16, 16, num_layers=2, num_heads=2, head_dim=4))
    assert manager.can_allocate(small_request("r", 4, device="cuda"))
    for other in ("cuda:0", "cpu"):
        with pytest.raises(InvalidArgumentError, match=f"asks for device={other}; the cache has cuda:1"):
            manager.can_allocate(small_request("r", 4, device=other))
    for wrong in ("metal", "gpu", 0, object()):
        with pytest.raises(InvalidArgumentError, match="device="):
            small_request("r", 4, device=wrong)
        with pytest.raises(InvalidArgumentError, match="device="):
            PagedKvCacheManager(wrong)


# --- the rest of the names --------------------------------------------------------------------------------------------


def test_a_table_has_the_documents_fields_and_is_a_copy() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 6))
    table = handle.block_table()
    ids = handle.get_physical_blocks()
    assert table.logical_to_physical == table.physical_blocks == ids
    assert (table.sequence_length, table.block_size) == (6, 4)
    table.logical_to_physical.clear()
    assert handle.get_physical_blocks() == ids
    by_hand = alone()
    by_hand.add_block(1, 7)
    by_hand.set_num_tokens(9)
    assert by_hand.block_table().logical_to_physical == [None, 7]
    assert (by_hand.block_table().sequence_length, by_hand.num_blocks(), by_hand.ref_count()) == (9, 1, 1)
    assert by_hand.stats()[:4] == (4 * 2 * 2 * 4 * 2 * 2, 1, 9, 9 / 4)
    assert (by_hand.is_valid(), by_hand.is_cow(), by_hand.cache_id()) == (True, False, "paged-alone")


def test_references_are_counted_by_requests() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 6))
    write(manager, handle, 0, 6)
    clone = handle.clone_handle()
    assert [h.ref_count() for h in (handle, clone)] == [2, 2]
    manager.swap_out(handle, clone)
    assert [h.ref_count() for h in (handle, clone)] == [2, 2]
    manager.swap_in(handle, clone)
    manager.deallocate(handle)
    assert [h.ref_count() for h in (handle, clone)] == [0, 1]
    assert not clone.is_cow()


def test_a_shared_block_is_not_written_and_the_error_says_so() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 6))
    write(manager, handle, 0, 6)
    clone = handle.clone_handle()
    with pytest.raises(SharedBlockError):
        write(manager, clone, 5, 6)
    manager.extend(clone, 1)
    write(manager, clone, 4, 7, 500.0)
    assert (keys(manager, handle, 6), keys(manager, clone, 7)[4:]) == (list(range(6)), [504.0, 505.0, 506.0])


def test_the_pool_tells_who_holds_a_block_and_what_is_in_it() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 6))
    pool = manager.gpu_pool()
    assert pool.stats() == (16, 14, 2, 16)
    write(manager, handle, 0, 5)
    [first, second] = handle.get_physical_blocks()
    pool.write_kv_slot(PhysicalBlockId(second), 0, 1, [5.0] * 8, [6.0] * 8)
    assert pool.read_kv_slot(second, 0, 1)[1].tolist() == [6.0] * 8  # type: ignore[union-attr]
    assert keys(manager, handle, 6) == list(range(6))
    clone = handle.clone_handle()
    block = pool.get_block(first)
    assert block is not None
    assert (block.ref_count, set(block.request_ids)) == (2, {"r", clone.request_id})
    assert pool.get_block(99) is None
    with pytest.raises(SequenceStateError, match="no live request holds block 9"):
        pool.read_kv_slot(9, 0, 0)
    with pytest.raises(InvalidArgumentError, match="slot"):
        pool.read_kv_slot(first, 0, 4)
    assert pool.evict_blocks(3) == 0


def test_what_is_not_offered_says_what_is() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 6))
    ids = handle.get_physical_blocks()
    pool = manager.gpu_pool()
    for call, way in (
        (lambda: manager.free_blocks(ids), r"deallocate\(request\)"),
        (lambda: manager.cow_copy(handle, ids), r"extend\(handle, n\)"),
        (lambda: manager.swap_out(ids), r"swap_out\(handle\)"),
        (lambda: manager.swap_in(ids), r"swap_in\(handle\)"),
        (handle.add_ref, r"clone_handle\(\)"),
        (handle.remove_ref, r"deallocate\(handle\)"),
        (handle.block_table_mut, "allocate_blocks"),
        (lambda: handle.add_block(2, 3), r"allocate_blocks\(handle, n\)"),
        (pool.allocate, r"allocate_blocks\(handle, n\)"),
        (lambda: pool.deallocate(ids[0]), r"deallocate\(request\)"),
    ):
        with pytest.raises(InvalidArgumentError, match=way):
            call()
    assert (handle.num_blocks(), handle.get_physical_blocks()) == (2, ids)
    with pytest.raises(ConfigError, match="enable_swapping"):
        small(enable_swapping=False).swap_in("r")


def test_the_prefix_cache_is_there_unless_it_is_off() -> None:
    manager = small()
    cache = manager.prefix_cache()
    assert cache is not None
    handle = manager.allocate(small_request("r", 8))
    write(manager, handle, 0, 8)
    assert cache.store_prefix(list(range(8)), handle, [1.0])
    assert cache.find_prefix([*range(8), 9]) is not None
    assert cache.stats().active_prefixes == 1
    assert cache.evict_n(5) == 1
    cache.clear()
    off = small(enable_prefix_cache=False)
    handle = off.allocate(small_request("r", 8))
    assert (off.prefix_cache(), off.prefix_cache_stats(), off.find_prefix([1] * 8)) == (None, None, None)
    assert off.store_prefix([1] * 8, handle, [1.0]) is False
    assert off.evict_prefixes(1) == 0


def test_a_collection_frees_idle_blocks() -> None:
    manager = small()
    for name, first in (("a", 0), ("b", 100)):
        handle = manager.allocate(small_request(name, 24))
        write(manager, handle, 0, 24)
        manager.store_prefix(range(first, first + 24), handle)
        manager.deallocate(name)
    pool = manager.manager.stats().pool()
    assert (pool.free, pool.cached) == (4, 12)
    collected = manager.gc()
    assert (collected.memory_freed, collected.caches_freed) == (10 * manager.manager.config.block_bytes, 1)
    assert manager.gc().memory_freed == 2 * manager.manager.config.block_bytes
    assert manager.gc()[:2] == (0, 0)


def test_forks_that_the_manager_made_have_handles_too() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 6))
    write(manager, handle, 0, 6)
    manager.manager.fork(handle.handle, "kid")
    manager.extend("kid", 1)
    kid = manager.get_handle("kid")
    assert kid is not None
    assert (kid.num_tokens(), manager.handle_stats("kid").tokens_stored) == (7, 7)
    assert manager.get_handle("kid") is kid
    assert manager.share_prefix_blocks("kid", "grandkid", 1).num_tokens() == 4
    manager.manager.free(kid.handle)
    assert manager.get_handle("kid") is None
    again = manager.allocate(small_request("kid", 3))
    assert manager.get_handle("kid") is again
    with pytest.raises(UnknownRequestError):
        manager.extend(kid, 1)


def test_a_handle_of_another_manager_is_refused() -> None:
    manager, other = small(), small()
    mine, theirs = manager.allocate(small_request("r", 6)), other.allocate(small_request("r", 6))
    write(manager, mine, 0, 6)
    write(other, theirs, 0, 6)
    for handle in (theirs, theirs.handle):
        for call in (manager.read_kv, manager.write_kv):
            with pytest.raises(UnknownRequestError, match="another manager"):
                call(handle, 0, 0, 1) if call == manager.read_kv else call(handle, 0, 0, [0.0] * 8, [0.0] * 8)
        for ask in (manager.extend, manager.deallocate, manager.handle_stats, manager.swap_out):
            with pytest.raises(UnknownRequestError, match="another manager"):
                ask(handle)
    assert len(other.list_handles()) == 1


def test_requests_with_tokens_can_be_compared_and_kept_in_sets() -> None:
    requests = [small_request("a", 2, tokens=[1, 2]), small_request("a", 2, tokens=[1, 2]), small_request("b", 2)]
    assert requests[0] == requests[1] != requests[2]
    assert len(set(requests)) == 2


def test_a_manager_and_its_handles_can_be_printed() -> None:
    manager = small()
    handle = manager.allocate(small_request("r", 6))
    assert repr(manager) == "<PagedKvCacheManager block_size=4 total_gpu_blocks=16 free_gpu_blocks=14 active_handles=1>"
    assert (repr(handle), repr(alone())) == ("<PagedKvCacheHandle 'r' live>", "<PagedKvCacheHandle 'alone' by itself>")
    assert repr(manager.deallocate(handle)) == "<PagedKvCacheHandle 'r' ended>"
    assert RequestId() != RequestId()
    assert RequestId("a") == "a"


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compat-ferrum.md"
NAMES = {
    "PagedKvCacheConfig": """block_size max_gpu_blocks max_cpu_blocks enable_cow enable_swapping low_watermark high_watermark
        num_layers num_heads head_dim enable_prefix_cache max_prefixes min_prefix_length""",
    "AllocationRequest": """request_id initial_tokens max_sequence_length num_layers num_heads head_dim device dtype
        priority""",
    "BlockTable": "logical_to_physical physical_blocks sequence_length block_size",
    "PagedKvCacheHandle": """add_block get_physical_block get_physical_blocks num_blocks set_num_tokens required_blocks
        add_ref remove_ref ref_count is_cow block_table block_table_mut as_any downcast_ref device num_tokens num_layers
        num_heads head_dim key_cache value_cache clone_handle stats is_valid cache_id""",
    "PagedKvCacheManager": """with_defaults allocate_blocks free_blocks write_kv read_kv gpu_pool prefix_cache
        share_prefix_blocks swap_out swap_in check_pressure free_block_count total_blocks cow_copy find_prefix store_prefix
        prefix_cache_stats evict_prefixes clear_prefix_cache allocate extend deallocate can_allocate stats gc
        set_pressure_callback get_handle list_handles""",
    "PrefixCache": "find_prefix store_prefix stats evict_n clear",
    "BlockPool": "allocate deallocate get_block write_kv_slot read_kv_slot stats evict_blocks",
    "CacheHandleStats": "memory_bytes blocks_allocated tokens_stored utilization last_access",
    "CacheManagerStats": """total_memory_bytes used_memory_bytes active_caches total_blocks free_blocks cache_hit_rate
        eviction_count allocation_count allocation_failures""",
    "CacheGcStats": "memory_freed caches_freed gc_time_ms",
    **dict.fromkeys(
        (
            "RequestId",
            "PhysicalBlockId",
            "TokenId",
            "PrefixId",
            "PrefixCacheStats",
            "Device",
            "DataType",
            "Priority",
            "MemoryPressure",
            "FerrumError",
            "KvCacheHandle",
            "KvCacheManager",
        ),
        "",
    ),
}
PARAMETERS = {
    "PagedKvCacheHandle": "request_id device block_size num_layers num_heads head_dim",
    "PagedKvCacheHandle.add_block": "self logical_id physical_id",
    "PagedKvCacheManager": "device config",
    "PagedKvCacheManager.with_defaults": "device block_size max_blocks",
    "PagedKvCacheManager.allocate_blocks": "self handle num_blocks",
    "PagedKvCacheManager.write_kv": "self handle layer token_position key value",
    "PagedKvCacheManager.read_kv": "self handle layer start_token num_tokens",
    "PagedKvCacheManager.share_prefix_blocks": "self source target num_prefix_blocks",
    "PagedKvCacheManager.cow_copy": "self handle block_ids",
    "PagedKvCacheManager.store_prefix": "self tokens kv_handle last_logits",
    "PagedKvCacheManager.evict_prefixes": "self count",
    "PagedKvCacheManager.extend": "self handle additional_tokens",
    "PagedKvCacheManager.deallocate": "self request_id",
}


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_of_the_document_is_here_and_on_the_page(kind: str) -> None:
    found = getattr(ferrum, kind)
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    assert [name for name in NAMES[kind].split() if name not in fields and not hasattr(found, name)] == []
    words = set(re.findall(r"\w+", PAGE.read_text(encoding="utf-8")))
    if kind.endswith("Stats"):  # their fields are the same
        assert kind in words
    else:
        assert [name for name in (kind, *NAMES[kind].split()) if name not in words] == []


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_have_the_documents_names_and_order(name: str) -> None:
    found: Any = ferrum
    for part in name.split("."):
        found = getattr(found, part)
    assert list(inspect.signature(found).parameters) == PARAMETERS[name].split()
