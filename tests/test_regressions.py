"""Bugs that were found once, each named after the behaviour it broke and reduced to the few calls that showed it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.errors import InvalidArgumentError

FULL = LayerSpec(kv_heads=1, head_dim=8)


def manager_with(*layers: LayerSpec, **options: Any) -> KVCacheManager:
    chosen = {"block_size": 4, "gpu_blocks": 10, "watermark": 0.0, **options}
    return KVCacheManager(KVCacheConfig(list(layers or (FULL,)), **chosen))


def test_extend_into_an_array_of_the_wrong_shape_reserves_nothing() -> None:
    manager = manager_with()
    handle = manager.allocate("a", num_tokens=1)
    with pytest.raises(InvalidArgumentError):
        manager.extend_batch([handle], 2, out=np.zeros((1, 5), np.int32))
    assert handle.num_reserved == 1


def test_slot_mapping_of_an_empty_batch_is_empty() -> None:
    assert manager_with().slot_mapping([], [], []).shape == (1, 0)


def test_a_count_past_the_known_ids_publishes_what_is_known() -> None:
    manager = manager_with(block_size=1)
    handle = manager.allocate("a", [0])
    manager.commit(handle, 1)
    manager.extend(handle)
    manager.commit(handle, 1)  # its id is not known
    manager.check()
    assert manager.match_prefix([0, 0, 0]).num_tokens == 1


def test_a_fork_that_follows_what_its_sibling_published_is_no_longer_in_flight() -> None:
    manager = manager_with()
    parent = manager.allocate("parent", [0, 0, 0, 0])
    manager.mark_written(parent, 4)
    (child,) = manager.fork(parent, "child")
    manager.commit(child, 4)
    manager.check()


def test_a_fork_keeps_its_bytes_when_its_sibling_rewinds_and_writes_again() -> None:
    manager = manager_with(enable_prefix_caching=False)
    parent = manager.allocate("parent", [0] * 8)
    manager.commit(parent, 8)
    (child,) = manager.fork(parent, "child")
    manager.extend(parent)
    manager.rewind(parent, 4)
    slots = manager.extend(parent)
    assert int(slots[0, 0]) // 4 != child.block_table()[1]


def test_a_refused_extend_of_two_forks_leaves_both_careful() -> None:
    manager = manager_with(gpu_blocks=2, enable_prefix_caching=False)
    parent = manager.allocate("parent", [0, 0])
    manager.commit(parent, 2)
    (child,) = manager.fork(parent, "child")
    filler = manager.allocate("filler", [1])
    with pytest.raises(Exception, match="needs"):
        manager.extend_batch([parent, child])
    manager.free(filler)
    slots = manager.extend(child)
    assert int(slots[0, 0]) // 4 != parent.block_table()[0]
