"""Each part of the prefix cache alone, on a small context: no manager, no other part than those it is built from."""

from __future__ import annotations

import math

import pytest
from parts import SIZE, WINDOWED, add_run, make_context, make_root, make_tree, tokens_of

from kvpool.config import Tier
from kvpool.events import Removed, Stored, Updated
from kvpool.eviction import LRUPolicy
from kvpool.pools.pool import CopyKind
from kvpool.prefix.announcer import Announcer
from kvpool.prefix.cache import PrefixCache
from kvpool.prefix.context import CacheContext
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.prefix.node import DEFAULT_PRIORITY, NEVER, Node
from kvpool.prefix.orders import EvictionOrders, Expiry, IdleLedger, Quota
from kvpool.prefix.readers import PathReaders, WindowReaders
from kvpool.prefix.tree import RunTree, StoredLogits
from kvpool.scope import ReuseScope
from kvpool.stats import EvictionReason
from managers import FULL

CAPACITY = EvictionReason.CAPACITY


def gpu(context: CacheContext, index: int = 0) -> tuple[int, int, int]:
    """(free, cached, pinned) blocks of a GPU pool."""
    pool = context.pools[index][Tier.GPU]
    return pool.num_free, pool.num_cached, pool.num_pinned


# --- the tree of runs ------------------------------------------------------------------------------------------------


def test_given_a_run_when_a_prompt_leaves_it_inside_a_block_then_whole_blocks_and_the_rest_match() -> None:
    context = make_context()
    tree = make_tree(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, 3, 4, 5, 6)
    match = tree.match(ReuseScope(), tokens_of(1, 2, 3, 4, 5, 9), partial=True)
    assert (match.path, match.num_blocks, match.partial, match.num_partial) == ([run], 2, run, 1)
    assert tree.match(ReuseScope(tenant="other"), tokens_of(1, 2), partial=True).path == []


def test_given_a_run_when_it_is_split_then_the_upper_part_is_told_and_both_are_found() -> None:
    context = make_context()
    told: list[Node] = []
    tree = RunTree(context, make_root, told.append)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, 3, 4, session="s")
    run.ttl, run.digests = 5.0, [b"one", b"two"]
    upper = tree.split(run, 1)
    assert told == [upper]
    assert tree.match(ReuseScope(), tokens_of(1, 2, 3, 4)).path == [upper, run]
    assert (upper.ttl, upper.digests, run.digests, tree.num_runs) == (5.0, [b"one"], [b"two"], 2)
    assert tree.sessions == {"s": {upper, run}}


def test_given_the_only_run_of_a_scope_when_it_is_removed_then_its_root_and_session_go_too() -> None:
    context = make_context()
    tree = make_tree(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, session="s")
    tree.remove(run)
    assert run.detached
    assert (tree.roots, tree.sessions, tree.num_runs) == ({}, {}, 0)


# --- what is idle ----------------------------------------------------------------------------------------------------


def test_given_a_plain_model_when_a_run_becomes_idle_then_its_blocks_are_cached() -> None:
    context = make_context()
    tree, ledger = make_tree(context), IdleLedger(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, 3, 4)
    ledger.count_run(run, 1)
    ledger.count_pinned_run(run, 1)
    assert gpu(context) == (14, 2, 2)
    ledger.count_positions(run, -1)
    assert gpu(context) == (14, 1, 2)


def test_given_a_quota_when_a_run_of_its_tenant_becomes_idle_then_the_quota_counts_it() -> None:
    context = make_context()
    tree, ledger = make_tree(context), IdleLedger(context)
    root = tree.root_for(ReuseScope(tenant="t"))
    root.quota = Quota("t", [1], [None], root.policies)
    ledger.count_run(add_run(context, tree, root, 1, 2, 3, 4), 1)
    assert (root.quota.cached, gpu(context)[1]) == ([2], 2)


def test_given_windowed_blocks_then_they_count_with_their_run_only_below_the_gpu() -> None:
    context = make_context(FULL, WINDOWED, host_blocks=8)
    tree, ledger = make_tree(context), IdleLedger(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2)
    ledger.count_run(run, 1)
    assert gpu(context)[1] == 1
    ledger.count_run(run, -1)
    run.tier = Tier.HOST
    ledger.count_run(run, 1)
    assert context.pools[0][Tier.HOST].num_cached == 2


# --- who goes first --------------------------------------------------------------------------------------------------


def test_given_a_tenant_at_its_guarantee_then_others_cannot_have_its_runs_evicted() -> None:
    context = make_context()
    orders = EvictionOrders(LRUPolicy, context.num_tiers, context.failures)
    orders.quotas["t"] = quota = Quota("t", [2], [None], orders.new_policies())
    tree = RunTree(context, orders.new_root, lambda upper: None)
    run = add_run(context, tree, tree.root_for(ReuseScope(tenant="t")), 1, 2)
    assert run.root.policies is quota.policies
    quota.policies[Tier.GPU].add(run)
    pool = context.pools[0][Tier.GPU]
    pool.num_cached = quota.cached[0] = 1
    assert (orders.victim(pool, "other"), orders.evictable(pool, "other")) == (None, 0)
    assert (orders.victim(pool, "t"), orders.evictable(pool, "t")) == (run, 1)


# --- what subscribers are told ---------------------------------------------------------------------------------------


def test_given_a_listener_when_a_run_is_stored_changed_moved_and_removed_then_its_digests_say_so() -> None:
    context = make_context()
    tree, announcer = make_tree(context), Announcer(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, 3, 4)
    subscription = context.events.subscribe(snapshot=False)
    announcer.stored(run)
    run.priority = 90
    announcer.priority_changed(run, 35)
    announcer.moved(run, Tier.GPU, Tier.HOST)
    announcer.removed(run, 1, 2, CAPACITY)
    stored, changed, moved, removed = subscription.poll().events
    digests = tuple(chain_digests(root_digest(ReuseScope()), run.tokens, SIZE))
    assert isinstance(stored, Stored)
    assert isinstance(removed, Removed)
    assert (stored.digests, stored.parent, removed.digests) == (digests, None, digests[1:])
    assert isinstance(changed, Updated)
    assert isinstance(moved, Updated)
    assert (changed.new_priority, moved.new_tier) == (90, Tier.HOST)


def test_given_a_windowed_group_with_a_hole_then_only_what_is_there_is_announced() -> None:
    context = make_context(FULL, WINDOWED)
    tree, announcer = make_tree(context), Announcer(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, 3, 4, 5, 6)
    run.ids[1][1] = -1
    events = announcer.snapshot(tree.roots.values(), as_of=0)
    assert [(event.group, len(event.digests)) for event in events] == [(0, 3), (1, 1), (1, 1)]


# --- time ------------------------------------------------------------------------------------------------------------


def test_given_a_time_to_live_when_it_is_over_then_idle_leaves_are_dropped_from_the_end() -> None:
    context = make_context()
    tree, dropped = make_tree(context), []

    def drop(node: Node) -> None:
        dropped.append(node)
        tree.remove(node)

    expiry = Expiry(context, Announcer(context), drop)
    parent = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2)
    child = add_run(context, tree, parent, 3, 4)
    for node in (child, parent):
        node.expires_at = 5.0
        expiry.watch(node)
    context.now = 4.0
    assert (expiry.run(), dropped) == (0, [])
    context.now = 5.0
    assert (expiry.run(), dropped) == (2, [child, parent])


def test_given_a_priority_for_some_time_when_that_is_over_then_the_default_holds_again() -> None:
    context = make_context()
    tree = make_tree(context)
    expiry = Expiry(context, Announcer(context), lambda node: None)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2)
    expiry.set_priority(run, 90, until=5.0)
    assert run in run.root.policies[Tier.GPU]
    context.now = 5.0
    assert (expiry.run(), run.priority, run.priority_until) == (0, DEFAULT_PRIORITY, NEVER)


# --- readers of windows ----------------------------------------------------------------------------------------------


def windows_of(context: CacheContext) -> WindowReaders:
    return WindowReaders(context, IdleLedger(context), Announcer(context))


def windowed_run(context: CacheContext, tree: RunTree) -> Node:
    """Six blocks that the sequence which wrote them still reads."""
    run = add_run(context, tree, tree.root_for(ReuseScope()), *range(12))
    context.pools[0][Tier.GPU].refs[run.ids[0]] = 1
    return run


def test_given_a_windowed_block_when_its_last_reader_leaves_then_it_is_left_over_until_its_pool_needs_it() -> None:
    context = make_context(WINDOWED)
    tree, windows = make_tree(context), windows_of(context)
    run = windowed_run(context, tree)
    windows.enter(run.root, context.groups[0], run.ids[0][:1])
    windows.leave(run, context.groups[0], 0, 5, run.ids[0])
    assert gpu(context) == (10, 5, 0)
    pool = context.pools[0][Tier.GPU]
    # Not the one still read, nor the last window
    assert windows.evict_leftovers(pool, 16, math.inf, None, CAPACITY) == 3
    assert run.ids[0].tolist()[1:4] == [-1, -1, -1]
    assert windows.evict_last_resort(pool, 16, None, CAPACITY) == 2


def test_given_a_pinned_windowed_block_then_it_is_no_leftover_that_goes() -> None:
    context = make_context(WINDOWED)
    tree, windows = make_tree(context), windows_of(context)
    run = windowed_run(context, tree)
    windows.pin(run.root, context.groups[0], int(run.ids[0][0]))
    windows.leave(run, context.groups[0], 0, 5, run.ids[0])
    assert gpu(context)[2] == 1
    pool = context.pools[0][Tier.GPU]
    assert windows.evict_leftovers(pool, 16, math.inf, None, CAPACITY) == 3
    windows.unpin(run.root, context.groups[0], int(run.ids[0][0]))
    assert gpu(context)[2] == 0
    assert windows.evict_leftovers(pool, 16, math.inf, None, CAPACITY) == 1


def test_given_the_end_of_a_run_then_its_last_window_is_needed_and_what_lies_before_is_not() -> None:
    context = make_context(WINDOWED)
    tree, windows = make_tree(context), windows_of(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), *range(12))
    assert windows.needed(run, context.groups[0]).tolist() == [False, False, False, False, True, True]
    assert windows.is_usable(run, 0, run.num_blocks)
    run.ids[0][-1] = -1
    assert not windows.is_usable(run, 5, run.num_blocks)


# --- readers of paths ------------------------------------------------------------------------------------------------


def readers_of(context: CacheContext, tree: RunTree) -> PathReaders:
    expiry = Expiry(context, Announcer(context), lambda node: None)
    return PathReaders(context, tree, IdleLedger(context), expiry, windows_of(context))


def test_given_a_path_when_it_is_held_and_released_then_its_leaf_alone_is_a_candidate() -> None:
    context = make_context()
    tree = make_tree(context)
    readers = readers_of(context, tree)
    parent = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2)
    leaf = add_run(context, tree, parent, 3, 4)
    leaf.active = parent.active = parent.root.active = 1
    readers.release(leaf)
    assert gpu(context) == (14, 2, 0)
    policy = leaf.root.policies[Tier.GPU]
    assert (leaf in policy, parent in policy) == (True, False)
    readers.hold(leaf)
    assert (gpu(context), len(policy), parent.active) == ((14, 0, 0), 0, 1)


def test_given_an_idle_path_when_it_is_pinned_then_no_policy_has_it_until_it_is_unpinned() -> None:
    context = make_context()
    tree = make_tree(context)
    readers = readers_of(context, tree)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, 3, 4)
    run.active = run.root.active = 1
    readers.release(run)
    readers.pin(run)
    assert (gpu(context), readers.pinned_blocks, run in run.root.policies[Tier.GPU]) == ((14, 2, 2), 2, False)
    readers.unpin(run)
    assert (gpu(context), readers.pinned_blocks, run in run.root.policies[Tier.GPU]) == ((14, 2, 0), 0, True)


def test_given_a_detached_run_when_its_last_reader_leaves_then_its_blocks_are_free() -> None:
    context = make_context()
    tree = make_tree(context)
    readers = readers_of(context, tree)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, 3, 4)
    run.active = run.root.active = 1
    tree.remove(run)
    readers.release(run)
    assert gpu(context) == (16, 0, 0)


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_given_an_idle_leaf_when_its_tail_is_dropped_then_the_rest_stays_a_candidate() -> None:
    context = make_context()
    cache = PrefixCache(context, LRUPolicy, offload_on_evict=False, offload_min_priority=0)
    tree = cache.tree
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, 3, 4, 5, 6)
    cache.ledger.count_run(run, 1)
    cache.drop_tail(run, 2, CAPACITY)
    assert (gpu(context), run.tokens.tolist(), run in run.root.policies[Tier.GPU]) == ((15, 1, 0), [1, 2], True)
    assert context.counters.evictions[CAPACITY.value] == 2


def test_given_a_parent_when_its_only_child_is_dropped_then_it_becomes_a_candidate() -> None:
    context = make_context()
    cache = PrefixCache(context, LRUPolicy, offload_on_evict=False, offload_min_priority=0)
    tree = cache.tree
    parent = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2)
    child = add_run(context, tree, parent, 3, 4)
    cache.drop_tail(child, 1, CAPACITY)
    assert (tree.num_runs, parent in parent.root.policies[Tier.GPU]) == (1, True)


def test_given_a_subtree_under_a_reader_when_it_is_detached_then_only_idle_blocks_become_free() -> None:
    context = make_context()
    cache = PrefixCache(context, LRUPolicy, offload_on_evict=False, offload_min_priority=0)
    tree = cache.tree
    read = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2)
    idle = add_run(context, tree, read, 3, 4)
    read.active = read.root.active = 1
    cache.ledger.count_run(idle, 1)
    assert cache.detach(read, EvictionReason.INVALIDATED) == 2
    assert (gpu(context), read.detached, tree.num_runs) == ((15, 0, 0), True, 0)


# --- stored logits ---------------------------------------------------------------------------------------------------


def test_given_stored_logits_when_their_run_is_cut_then_they_stay_with_the_last_full_block_of_their_prompt() -> None:
    context = make_context()
    tree, logits = make_tree(context), StoredLogits(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2, 3, 4)
    assert not logits.are_stored
    assert logits.store(run, tokens_of(1, 2, 3), "of three", ())
    assert logits.store(run, tokens_of(1, 2, 3, 4), "of four", ())
    upper = tree.split(run, 1)
    assert (list(upper.logits.values()), list(run.logits.values())) == ([("of three", ())], [("of four", ())])
    assert logits.find(run.root, [upper, run], tokens_of(1, 2, 3, 4)) == "of four"
    assert logits.find(run.root, [upper], tokens_of(1, 2, 9)) is None


def test_given_a_prompt_longer_than_what_is_cached_then_its_logits_are_not_stored() -> None:
    context = make_context()
    tree, logits = make_tree(context), StoredLogits(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2)
    assert not logits.store(run, tokens_of(1, 2, 3, 4), "of four", ())
    assert (logits.are_stored, run.logits) == (False, None)


def test_given_stored_logits_when_the_block_that_their_prompt_ends_in_is_invalid_then_they_are_forgotten() -> None:
    context = make_context()
    tree, logits = make_tree(context), StoredLogits(context)
    run = add_run(context, tree, tree.root_for(ReuseScope()), 1, 2)
    logits.store(run, tokens_of(1, 2, 3), "of three", ())
    logits.forget_inside(run, 1, tokens_of(4, 4).tobytes())
    assert logits.find(run.root, [run], tokens_of(1, 2, 3)) == "of three"
    logits.forget_inside(run, 1, tokens_of(3, 4).tobytes())
    assert logits.find(run.root, [run], tokens_of(1, 2, 3)) is None


# --- tiers, and the whole --------------------------------------------------------------------------------------------


def make_cache(context: CacheContext, **options: bool) -> PrefixCache:
    return PrefixCache(context, LRUPolicy, options.get("offload", True), 0)


def cached_run(cache: PrefixCache, *tokens: int) -> Node:
    run = add_run(cache.context, cache.tree, cache.tree.root_for(ReuseScope()), *tokens)
    run.active, run.root.active = 1, run.root.active + 1
    cache.context.tick += 1
    cache.readers.release(run)
    return run


def test_given_a_lower_tier_when_a_run_moves_down_and_up_then_copies_are_planned_and_books_follow() -> None:
    context = make_context(host_blocks=4)
    cache = make_cache(context)
    run = cached_run(cache, 1, 2, 3, 4)
    moved = cache.mover.demote(run, 1)
    assert moved is not None
    host = context.pools[0][Tier.HOST]
    assert (moved.tier, moved.num_blocks, moved.parent, run.tier) == (Tier.HOST, 1, run, Tier.GPU)
    assert (host.num_cached, gpu(context)) == (1, (15, 1, 0))
    cache.readers.hold(moved)
    cache.mover.promote(moved)
    assert (moved.tier, host.num_free, gpu(context)) == (Tier.GPU, 4, (14, 0, 0))
    assert [op.kind for op in context.copies] == [CopyKind.OFFLOAD, CopyKind.ONBOARD]


def test_given_a_full_lower_tier_when_a_run_moves_down_then_the_stalest_there_gives_way() -> None:
    context = make_context(host_blocks=1)
    cache = make_cache(context)
    stale, fresh = cached_run(cache, 1, 2), cached_run(cache, 3, 4)
    assert cache.mover.demote(stale, 1)
    assert cache.mover.demote(fresh, 1)
    assert (stale.detached, fresh.tier) == (True, Tier.HOST)


@pytest.mark.parametrize(("offload", "tier"), [(True, Tier.HOST), (False, None)])
def test_given_a_full_gpu_when_room_is_made_then_the_stalest_run_moves_down_or_leaves(
    offload: bool, tier: Tier | None
) -> None:
    context = make_context(gpu_blocks=2, host_blocks=2)
    cache = make_cache(context, offload=offload)
    stale, fresh = cached_run(cache, 1, 2), cached_run(cache, 3, 4)
    cache.make_room(context.pools[0][Tier.GPU], 1, None)
    assert (None if stale.detached else stale.tier) == tier
    assert (fresh.tier, fresh.detached) == (Tier.GPU, False)


def test_given_a_time_to_live_in_a_whole_cache_when_it_is_over_then_the_run_is_dropped() -> None:
    context = make_context()
    cache = make_cache(context)
    run = cached_run(cache, 1, 2)
    run.expires_at = 5.0
    cache.expiry.watch(run)
    context.now = 5.0
    assert (cache.expiry.run(), run.detached, gpu(context)) == (1, True, (16, 0, 0))
