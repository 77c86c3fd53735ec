"""`check()` finds what it promises to find: each test breaks one invariant by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, ReuseScope, Tier
from kvpool.core.node import Node
from kvpool.errors import InvariantError
from kvpool.prefix.tree import all_nodes, root_for
from managers import FULL, cached, make_manager

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)


def busy_manager() -> KVCacheManager:
    """A live request, its fork, a swapped one, a pinned run, an offloaded run and a tenant with a quota."""
    config = KVCacheConfig([FULL, SLIDING], block_size=4, gpu_blocks=64, host_blocks=64, watermark=0.0)
    manager = KVCacheManager(config)
    manager.cache.set_quota("t", guaranteed=4)
    for number, scope in enumerate((ReuseScope(), ReuseScope(tenant="t"))):
        handle = manager.allocate(("old", number), list(range(100 * number, 100 * number + 16)), scope=scope)
        manager.commit(handle, 16)
        manager.free(handle)
    manager.cache.pin(list(range(8)))
    manager.cache.offload(2)
    live = manager.allocate("live", list(range(500, 518)))
    manager.commit(live, 18)
    manager.fork(live, "fork")
    swapped = manager.allocate("swapped", list(range(700, 706)))
    manager.commit(swapped, 6)
    manager.swap_out(swapped)
    manager.check()
    return manager


def live_row(manager: KVCacheManager) -> int:
    return manager.get("live").row


def tip(manager: KVCacheManager) -> Node:
    node = manager._cache.rows.tips[live_row(manager)]
    assert node is not None
    return node


def cached_nodes(manager: KVCacheManager, tier: Tier = Tier.GPU) -> list[Node]:
    return [node for node in all_nodes(manager._cache) if node.tier == tier and not node.active]


def set_attribute(find: Callable[[KVCacheManager], Any], name: str, change: int) -> Callable[[KVCacheManager], None]:
    def damage(manager: KVCacheManager) -> None:
        target = find(manager)
        setattr(target, name, getattr(target, name) + change)

    return damage


def mark_a_place_behind_the_end_otherwise(manager: KVCacheManager) -> None:
    manager._cache.rows.tables[0][live_row(manager), -1] = -2


def mark_a_lost_block_of_a_window_otherwise(manager: KVCacheManager) -> None:
    cached_nodes(manager)[0].ids[1][0] = -2


def mark_a_lost_block_of_a_swapped_request_otherwise(manager: KVCacheManager) -> None:
    swapped = manager.get("swapped").swapped
    assert swapped is not None
    swapped[0][-1] = -2


def lose_a_free_block(manager: KVCacheManager) -> None:
    manager._cache.gpu_pools[0].take(1)


def free_a_block_twice(manager: KVCacheManager) -> None:
    pool = manager._cache.gpu_pools[0]
    pool._free[-1] = pool._free[-2]


def free_a_block_in_use(manager: KVCacheManager) -> None:
    pool = manager._cache.gpu_pools[0]
    pool._free[-1] = manager.get("live").block_ids()[-1]


def reference_a_free_block(manager: KVCacheManager) -> None:
    pool = manager._cache.gpu_pools[0]
    pool.refs[pool.free_ids()[0]] = 1


def forget_a_reader(manager: KVCacheManager) -> None:
    manager._cache.gpu_pools[0].refs[manager.get("live").block_ids()[-1]] = 1


def leave_a_hole(manager: KVCacheManager) -> None:
    manager._cache.rows.tables[0][live_row(manager), -1 + manager.get("live").num_blocks] = -1


def point_elsewhere(manager: KVCacheManager) -> None:
    manager._cache.rows.tables[0][live_row(manager), 0] += 1


def write_behind_the_end(manager: KVCacheManager) -> None:
    manager._cache.rows.tables[0][live_row(manager), manager.get("live").num_blocks] = 3


def commit_more_than_is_written(manager: KVCacheManager) -> None:
    manager._cache.rows.committed[live_row(manager)] = 99


def give_a_swapped_request_a_gpu_block(manager: KVCacheManager) -> None:
    manager._cache.rows.tables[0][manager.get("swapped").row, 0] = 0


def forget_a_request(manager: KVCacheManager) -> None:
    del manager._cache.requests["live"]


def rename_a_request(manager: KVCacheManager) -> None:
    manager._cache.requests["other"] = manager._cache.requests.pop("live")


def change_the_key_of_a_run(manager: KVCacheManager) -> None:
    tip(manager).key = b"another"


def lose_a_child(manager: KVCacheManager) -> None:
    node = cached_nodes(manager)[-1]
    node.parent.children.remove(node.key)


def lift_a_child_above_its_parent(manager: KVCacheManager) -> None:
    cached_nodes(manager, Tier.HOST)[0].parent.tier = Tier.DISK


def drop_a_candidate(manager: KVCacheManager) -> None:
    cache = manager._cache
    node = next(n for n in all_nodes(cache) if n.is_candidate())
    node.root.policies[node.tier].remove(node)


def flag_nobody(manager: KVCacheManager) -> None:
    manager._cache.rows.num_shared += 1


def move_a_handle(manager: KVCacheManager) -> None:
    manager._cache.rows.handles[live_row(manager)].row += 1  # type: ignore[union-attr]


def reserve_behind_the_last_block(manager: KVCacheManager) -> None:
    manager._cache.rows.reserved[live_row(manager)] = 4 * manager.get("live").num_blocks + 1


def grow_without_an_open_node(manager: KVCacheManager) -> None:
    tip(manager).open_row = -1
    manager._cache.rows.grows_alone[live_row(manager)] = True


def open_a_window(manager: KVCacheManager) -> None:
    rows = manager._cache.rows
    rows.tables[1][live_row(manager), rows.first_held[1, live_row(manager)]] = -1


def read_another_block_in_a_window(manager: KVCacheManager) -> None:
    rows = manager._cache.rows
    rows.tables[1][live_row(manager), rows.first_held[1, live_row(manager)]] += 1


def lose_a_token_of_a_run(manager: KVCacheManager) -> None:
    node = cached_nodes(manager)[0]
    node.tokens = node.tokens[:-1]


def lose_an_id_of_a_run(manager: KVCacheManager) -> None:
    node = cached_nodes(manager)[0]
    node.set_ids(0, node.ids[0][:-1])


def make_a_hole_in_a_run(manager: KVCacheManager) -> None:
    cached_nodes(manager)[0].ids[0][0] = -1


def publish_a_block_twice(manager: KVCacheManager) -> None:
    first, second = cached_nodes(manager)[:2]
    first.ids[0][0] = second.ids[0][0]


def read_a_published_block(manager: KVCacheManager) -> None:
    manager._cache.gpu_pools[0].refs[cached_nodes(manager)[0].ids[0][0]] += 1


def miscount_readers_in_a_window(manager: KVCacheManager) -> None:
    ids = cached_nodes(manager)[0].ids[1]
    manager._cache.groups[1].gpu.refs[ids[ids >= 0][0]] += 1


def publish_a_private_block(manager: KVCacheManager) -> None:
    cached_nodes(manager)[0].ids[0][0] = manager.get("live").block_ids()[-1]


def root_of(manager: KVCacheManager) -> Any:
    return tip(manager).root


def publish_more_than_its_table_has(manager: KVCacheManager) -> None:
    rows, row = manager._cache.rows, live_row(manager)
    rows.num_blocks[row] = rows.reserved[row] = rows.written[row] = rows.committed[row] = tip(manager).end - 1


def empty_a_run(manager: KVCacheManager) -> None:
    cached_nodes(manager)[0].num_blocks = 0


def hang_a_child_elsewhere(manager: KVCacheManager) -> None:
    node = cached_nodes(manager)[-1]
    node.parent.children.remove(node.key)
    node.parent.children.put(b"elsewhere", node)


def detach_an_unread_run(manager: KVCacheManager) -> None:
    next(node for node in cached_nodes(manager) if not node.pins).detached = True


def keep_an_empty_root(manager: KVCacheManager) -> None:
    root_for(manager._cache, ReuseScope(tenant="nobody"))


def free_a_published_block(manager: KVCacheManager) -> None:
    manager._cache.gpu_pools[0]._free[-1] = cached_nodes(manager)[0].ids[0][0]


def free_a_swapped_block(manager: KVCacheManager) -> None:
    swapped = manager.get("swapped").swapped
    assert swapped is not None
    manager._cache.pool(0, Tier.HOST)._free[-1] = swapped[0][0]


def track_a_row_without_a_request(manager: KVCacheManager) -> None:
    manager._cache.producers[tip(manager), b"nobody"] = len(manager._cache.rows.handles) - 1


def follow_up_to(num_tokens: int) -> Callable[[KVCacheManager], None]:
    def damage(manager: KVCacheManager) -> None:
        manager._cache.rows.following[live_row(manager)] = num_tokens

    return damage


def forget_ids_of_a_path(manager: KVCacheManager) -> None:
    rows, row = manager._cache.rows, live_row(manager)
    rows.committed[row] = rows.known[row] = 3


DAMAGES: list[tuple[Callable[[KVCacheManager], None], str]] = [
    (lose_a_free_block, "belong to nobody"),
    (free_a_block_twice, "free twice"),
    (free_a_block_in_use, "free and in use|free twice"),
    (reference_a_free_block, "free block"),
    (forget_a_reader, "references"),
    (leave_a_hole, "a hole in group 0"),
    (point_elsewhere, "differs from the tree"),
    (write_behind_the_end, "behind its end"),
    (mark_a_place_behind_the_end_otherwise, "behind its end"),
    (mark_a_lost_block_of_a_window_otherwise, "a hole in group 1"),
    (mark_a_lost_block_of_a_swapped_request_otherwise, "-2 is no host block"),
    (commit_more_than_is_written, "committed 99"),
    (give_a_swapped_request_a_gpu_block, "is swapped out but has GPU blocks"),
    (forget_a_request, "rows for"),
    (rename_a_request, "not in the request index"),
    (change_the_key_of_a_run, "key is not its first block"),
    (lose_a_child, "belong to nobody|is empty and unused"),
    (lift_a_child_above_its_parent, "lies on HOST below DISK|children of its tier"),
    (drop_a_candidate, "candidates"),
    (flag_nobody, "shared rows booked"),
    (set_attribute(lambda m: m._cache.gpu_pools[0], "num_cached", 1), "cached"),
    (set_attribute(lambda m: m._cache.gpu_pools[0], "num_pinned", 1), "pinned blocks booked"),
    (set_attribute(lambda m: m._cache, "pinned_positions", 1), "pinned positions booked"),
    (set_attribute(tip, "active", 1), "active"),
    (set_attribute(tip, "pins", 1), "pins"),
    (set_attribute(lambda m: cached_nodes(m)[0], "start", 1), "its parent ends at"),
    (set_attribute(lambda m: cached_nodes(m)[0], "same_tier_children", 1), "children of its tier"),
    (set_attribute(lambda m: cached_nodes(m)[0], "num_remainders", 1), "counts 1 remainders"),
    (set_attribute(root_of, "active", 1), "root .*: active"),
    (set_attribute(lambda m: m._cache, "num_runs", 1), "runs are in the tree"),
    (set_attribute(lambda m: m._cache.gpu_pools[0], "num_cached", 99), "exceeds"),
    (move_a_handle, "its handle says row"),
    (reserve_behind_the_last_block, "too few blocks for"),
    (grow_without_an_open_node, "grows alone without an open node"),
    (open_a_window, "is missing among those that it reads"),
    (read_another_block_in_a_window, "of group 1 differs from the tree"),
    (lose_a_token_of_a_run, "3 tokens"),
    (lose_an_id_of_a_run, "ids in group 0 for"),
    (make_a_hole_in_a_run, "a hole in group 0"),
    (publish_a_block_twice, "belongs to two nodes"),
    (read_a_published_block, "published block .* has 1 references"),
    (miscount_readers_in_a_window, "of group 1 has 1 references, 0 readers"),
    (publish_a_private_block, "are private and published"),
    (publish_more_than_its_table_has, "4 published blocks, 3 in its table"),
    (empty_a_run, "is empty"),
    (hang_a_child_elsewhere, "not among its parent's children"),
    (detach_an_unread_run, "detached and unread but not freed"),
    (keep_an_empty_root, "is empty and unused"),
    (free_a_published_block, "free and in use"),
    (free_a_swapped_block, "pool 0 on HOST: blocks .* are free and in use"),
    (track_a_row_without_a_request, "in flight"),
    (set_attribute(lambda m: m._cache.pool(0, Tier.HOST), "num_cached", 1), "pool 0 on HOST: .* cached"),
    (set_attribute(lambda m: m._cache.pool(0, Tier.HOST), "num_pinned", 1), "pool 0 on HOST: .* pinned"),
    (set_attribute(lambda m: m._cache.gpu_pools[0], "num_cached", -1), "cached"),
    (set_attribute(lambda m: m._cache, "num_runs", -1), "runs are in the tree"),
    (follow_up_to(20), "follows its path up to token 20, which ends at 16"),
    (follow_up_to(16), "ends at 16; it committed 18"),
    (forget_ids_of_a_path, "its path has 16 tokens, it knows 3 and follows nobody"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_a_broken_invariant_is_found_and_named(damage: Callable[[KVCacheManager], None], named: str) -> None:
    manager = busy_manager()
    damage(manager)
    with pytest.raises(InvariantError, match=named):
        manager.check()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_quota_that_was_miscounted_is_found(change: int) -> None:
    manager = busy_manager()
    manager._cache.orders.quotas["t"].cached[0] += change
    with pytest.raises(InvariantError, match="tenant 't'"):
        manager.check()


def test_a_request_tracked_at_a_place_it_left_is_found() -> None:
    manager = busy_manager()
    producer = manager.allocate("producer", list(range(900, 912)))
    manager._cache.producers[tip(manager), b"elsewhere"] = producer.row
    with pytest.raises(InvariantError, match="in flight"):
        manager.check()


def remainder(manager: KVCacheManager) -> Node:
    return next(node for node in all_nodes(manager._cache) if node.is_remainder)


def lengthen_a_remainder(manager: KVCacheManager) -> None:
    remainder(manager).num_blocks = 2


def fill_a_remainder(manager: KVCacheManager) -> None:
    remainder(manager).tokens = np.arange(4, dtype=np.int32)


def give_a_remainder_a_digest(manager: KVCacheManager) -> None:
    remainder(manager).digests = [b"digest"]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lengthen_a_remainder, "is a remainder of 2 blocks"),
        (fill_a_remainder, "is a remainder of 4 tokens"),
        (set_attribute(remainder, "active", 1), "somebody builds on a remainder"),
        (set_attribute(remainder, "pins", 1), "somebody builds on a remainder"),
        (give_a_remainder_a_digest, "an unfilled block has a digest"),
    ],
)
def test_a_broken_remainder_is_found_and_named(damage: Callable[[KVCacheManager], None], named: str) -> None:
    manager = make_manager(cache_unfilled_blocks=True)
    cached(manager, 6)
    manager.check()
    damage(manager)
    with pytest.raises(InvariantError, match=named):
        manager.check()


def copying_manager() -> KVCacheManager:
    """Two cached runs, each with a copy on the host."""
    config = KVCacheConfig(
        [FULL, SLIDING], block_size=4, gpu_blocks=64, host_blocks=64, watermark=0.0, host_write="through"
    )
    manager = KVCacheManager(config)
    for number in range(2):
        handle = manager.allocate(number, list(range(100 * number, 100 * number + 8)))
        manager.commit(handle, 8)
        manager.free(handle)
    manager.check()
    return manager


def host_copies_of(manager: KVCacheManager) -> list[list[Any]]:
    return [node.host_copy for node in manager._cache.host_copies.nodes if node.host_copy is not None]


def lose_sight_of_a_host_copy(manager: KVCacheManager) -> None:
    manager._cache.host_copies.nodes.popitem()


def write_behind_a_host_copy(manager: KVCacheManager) -> None:
    next(iter(manager._cache.host_copies.nodes)).tier = Tier.HOST


def give_a_run_that_is_written_a_host_copy(manager: KVCacheManager) -> None:
    writer = manager.allocate("writer", [7] * 8)
    manager.commit(writer)
    assert writer.row == 0
    written, copies = manager._cache.rows.tips[0], manager._cache.host_copies
    assert written is not None
    assert written.open_row == 0
    copied = next(iter(copies.nodes))
    written.host_copy, copied.host_copy = copied.host_copy, None
    copies.nodes[written] = copies.nodes.pop(copied)


def shorten_a_host_copy(manager: KVCacheManager) -> None:
    host_copies_of(manager)[0][0] = host_copies_of(manager)[0][0][:1]


def leave_a_hole_in_a_host_copy(manager: KVCacheManager) -> None:
    host_copies_of(manager)[0][0][1] = -1


def share_a_host_copy(manager: KVCacheManager) -> None:
    first, second = host_copies_of(manager)
    first[0][0] = second[0][0]


def swap_to_a_host_copy(manager: KVCacheManager) -> None:
    swapped = manager.allocate("swapped", [7] * 4)
    manager.commit(swapped)
    manager.swap_out(swapped)
    assert swapped.swapped is not None
    swapped.swapped[0][0] = host_copies_of(manager)[0][0][0]


def free_a_host_copy(manager: KVCacheManager) -> None:
    manager._cache.pool(0, Tier.HOST)._free[-1] = host_copies_of(manager)[0][0][0]


def miscount_host_copies(manager: KVCacheManager) -> None:
    manager._cache.host_copies.num_blocks[0] += 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lose_sight_of_a_host_copy, "other runs than those that have one"),
        (write_behind_a_host_copy, "its run is on HOST"),
        (give_a_run_that_is_written_a_host_copy, "detached or still written"),
        (shorten_a_host_copy, "1 ids in group 0 for 2 blocks"),
        (leave_a_hole_in_a_host_copy, "host copy of the node at block 0: group 0 has"),
        (share_a_host_copy, "is another's too"),
        (swap_to_a_host_copy, "are host copies and something else"),
        (free_a_host_copy, "are free and in use"),
        (miscount_host_copies, "blocks of host copies booked"),
    ],
)
def test_a_broken_host_copy_is_found_and_named(damage: Callable[[KVCacheManager], None], named: str) -> None:
    manager = copying_manager()
    damage(manager)
    with pytest.raises(InvariantError, match=named):
        manager.check()
