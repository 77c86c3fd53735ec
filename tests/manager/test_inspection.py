"""Single blocks and groups as people see them."""

from __future__ import annotations

import pytest

from kvpool import BlockState, KVCacheConfig, KVCacheManager, LayerSpec, Retention, Tier, TokenRange
from kvpool.errors import InvalidArgumentError
from kvpool.manager import snapshots
from managers import FULL, cached, make_manager

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=4)


def test_a_block_goes_from_free_to_referenced_to_cached_to_pinned() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4))
    assert manager.inspect.block(0).state is BlockState.FREE
    handle = manager.allocate("a", [1, 2, 3, 4])
    manager.mark_written(handle, 4)
    (child,) = manager.fork(handle, "b")
    block = manager.inspect.block(int(handle.block_ids()[1]))
    assert (block.state, block.request_ids, block.position) == (BlockState.REFERENCED, ("a", "b"), 2)
    assert (block.ref_count, block.is_published) == (2, False)
    manager.commit(handle)
    block_id = int(handle.block_ids()[1])
    assert manager.inspect.block(block_id).is_published
    manager.free_batch([handle, child])
    assert manager.inspect.block(block_id).state is BlockState.CACHED
    manager.cache.pin([1, 2, 3, 4])
    assert manager.inspect.block(block_id).state is BlockState.PINNED


def test_a_cached_block_has_the_priority_of_its_run() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4))
    handle = manager.allocate("a", [1, 2, 3, 4], retention=Retention([TokenRange(2, None, 80)]))
    first, second = handle.block_ids().tolist()
    assert manager.inspect.block(second).priority is None
    manager.commit(handle)
    manager.free(handle)
    assert (manager.inspect.block(first).priority, manager.inspect.block(second).priority) == (35, 80)


def test_a_swapped_request_holds_host_blocks() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4, host_blocks=4))
    handle = manager.allocate("a", [1, 2, 3])
    manager.mark_written(handle, 3)
    manager.swap_out(handle)
    assert manager.inspect.block(0, tier=Tier.HOST).request_ids == ("a",)


@pytest.mark.parametrize("block_id", [-1, 4, True, 1.0])
def test_a_block_that_does_not_exist_is_refused(block_id: int) -> None:
    manager = KVCacheManager(KVCacheConfig([FULL], block_size=2, gpu_blocks=4))
    with pytest.raises(InvalidArgumentError, match="block_id"):
        manager.inspect.block(block_id)


def test_groups_that_share_a_pool_are_counted_apart() -> None:
    manager = KVCacheManager(KVCacheConfig([FULL, SLIDING], block_size=2, gpu_blocks=16))
    first = _committed(manager, "a", 8)
    assert [group.referenced for group in manager.stats().groups] == [4, 2]  # the block with the number 0 among them
    manager.free(first)
    running = _committed(manager, "b", 4, first=100)
    full, sliding = manager.stats().groups
    assert (full.referenced, full.cached) == (2, 4)
    assert (sliding.referenced, sliding.cached) == (2, 4)
    pin = manager.cache.pin(list(range(8)))
    full, sliding = manager.stats().groups
    assert (full.pinned, sliding.pinned) == (4, 2)
    pool = manager.stats().pool()
    assert pool.referenced == full.referenced + sliding.referenced
    assert pool.cached == full.cached + sliding.cached
    assert pool.pinned == full.pinned + sliding.pinned
    manager.cache.unpin(pin)
    manager.free(running)


def _committed(manager: KVCacheManager, request_id: str, num_tokens: int, first: int = 0):  # type: ignore[no-untyped-def]
    handle = manager.allocate(request_id, list(range(first, first + num_tokens)))
    manager.commit(handle)
    return handle


def test_of_a_pinned_prefix_only_the_last_window_is_pinned_in_a_windowed_group() -> None:
    layers = [FULL, LayerSpec(kv_heads=2, head_dim=8, window=4)]
    manager = KVCacheManager(KVCacheConfig(layers, block_size=2, gpu_blocks=(8, 8)))
    manager.free(_committed(manager, "a", 8))
    manager.cache.pin(list(range(8)))
    states = [[manager.inspect.block(block, pool=pool).state.value for block in range(4)] for pool in range(2)]
    assert states == [["pinned"] * 4, ["cached"] * 2 + ["pinned"] * 2]


def test_runs_that_leave_while_others_are_read_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    for first in (0, 100):
        cached(manager, 8, first)
    monkeypatch.setattr(snapshots, "PIECE", 1)
    monkeypatch.setattr(snapshots.time, "sleep", lambda _: manager.cache.reset())
    found = manager.inspect.runs_snapshot()
    assert found.num_blocks.tolist() == [2]
    assert [ids.tolist() for ids in found.block_ids] == [[2, 3]]
    assert not len(manager.inspect.runs_snapshot().number)
