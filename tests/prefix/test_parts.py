"""What happens to cached runs, one function at a time, on a small cache: no manager, no live sequences."""

from __future__ import annotations

import math

import pytest
from parts import SIZE, WINDOWED, add_run, make_cache, tokens_of

from kvpool.config import Tier
from kvpool.core.cache import Cache
from kvpool.core.node import DEFAULT_PRIORITY, NEVER, Node
from kvpool.core.orders import Quota
from kvpool.events import Removed, Stored, Updated
from kvpool.pools.pool import CopyKind
from kvpool.prefix.announcer import (
    announce_moved,
    announce_priority,
    announce_removed,
    announce_stored,
    stored_now,
)
from kvpool.prefix.blocks import (
    count_pin,
    evict_last_resort,
    evict_leftovers,
    is_usable,
    ref_blocks,
    unref_blocks,
)
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.prefix.evict import demote, detach, drop_tail, evict, promote
from kvpool.prefix.keeping import expire, set_priority
from kvpool.prefix.tree import (
    count_run,
    find_logits,
    forget_logits_inside,
    match_tokens,
    pin_path,
    ref,
    remove_node,
    root_for,
    split,
    store_logits,
    unpin_path,
    unref,
    watch,
)
from kvpool.scope import ReuseScope
from kvpool.stats import EvictionReason
from managers import FULL

CAPACITY = EvictionReason.CAPACITY


def gpu(cache: Cache, index: int = 0) -> tuple[int, int, int]:
    """(free, cached, pinned) blocks of a GPU pool."""
    pool = cache.pools[index][Tier.GPU]
    return pool.num_free, pool.num_cached, pool.num_pinned


# --- the tree of runs ------------------------------------------------------------------------------------------------


def test_given_a_run_when_a_prompt_leaves_it_inside_a_block_then_whole_blocks_and_the_rest_match() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4, 5, 6)
    match = match_tokens(cache, ReuseScope(), tokens_of(1, 2, 3, 4, 5, 9), partial=True)
    assert (match.path, match.num_blocks, match.partial, match.num_partial) == ([run], 2, run, 1)
    assert match_tokens(cache, ReuseScope(tenant="other"), tokens_of(1, 2), partial=True).path == []


def test_given_a_run_when_it_is_split_then_the_upper_part_has_its_deadline_and_both_are_found() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4, session="s")
    run.ttl, run.expires_at, run.digests = 5.0, 7.0, [b"one", b"two"]
    upper = split(cache, run, 1)
    assert cache.calendar.times == {upper: 7.0}
    assert match_tokens(cache, ReuseScope(), tokens_of(1, 2, 3, 4)).path == [upper, run]
    assert (upper.ttl, upper.digests, run.digests, cache.num_runs) == (5.0, [b"one"], [b"two"], 2)
    assert cache.sessions == {"s": {upper, run}}


def test_given_the_only_run_of_a_scope_when_it_is_removed_then_its_root_and_session_go_too() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, session="s")
    remove_node(cache, run)
    assert run.detached
    assert (cache.roots, cache.sessions, cache.num_runs) == ({}, {}, 0)


def test_given_a_run_that_is_cut_then_logits_go_with_the_last_full_block_of_their_prompts() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), *range(8))
    run.logits = {(length, b"t" * (length % 2)): (length, ()) for length in range(2, 9)}
    upper = split(cache, run, 2)
    assert upper.logits is not None
    assert run.logits is not None
    assert [length for length, _ in upper.logits.values()] == [2, 3, 4, 5]
    assert [length for length, _ in run.logits.values()] == [6, 7, 8]


def test_given_a_run_that_loses_its_tail_then_logits_of_prompts_that_end_in_the_rest_stay() -> None:
    cache = make_cache()
    run = cached_run(cache, *range(8))
    run.logits = {(length, b"t" * (length % 2)): (length, ()) for length in range(2, 9)}
    drop_tail(cache, run, 2, EvictionReason.CAPACITY)
    assert [length for length, _ in run.logits.values()] == [2, 3, 4, 5]


# --- what is idle ----------------------------------------------------------------------------------------------------


def test_given_a_plain_model_when_a_run_becomes_idle_then_its_blocks_are_cached() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4)
    count_run(cache, run, 1, 1)
    assert gpu(cache) == (14, 2, 2)
    count_run(cache, run, 0, -1)
    assert gpu(cache) == (14, 2, 0)


def test_given_a_quota_when_a_run_of_its_tenant_becomes_idle_then_the_quota_counts_it() -> None:
    cache = make_cache()
    root = root_for(cache, ReuseScope(tenant="t"))
    root.quota = Quota("t", [1], [None], root.policies)
    count_run(cache, add_run(cache, root, 1, 2, 3, 4), 1, 1)
    assert (root.quota.cached, root.quota.pinned, gpu(cache)) == ([2], [2], (14, 2, 2))


def test_given_windowed_blocks_then_they_count_with_their_run_only_below_the_gpu() -> None:
    cache = make_cache(FULL, WINDOWED, host_blocks=8)
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2)
    count_run(cache, run, 1, 0)
    assert gpu(cache)[1] == 1
    count_run(cache, run, -1, 0)
    run.tier = Tier.HOST
    count_run(cache, run, 1, 0)
    assert cache.pools[0][Tier.HOST].num_cached == 2


# --- who goes first --------------------------------------------------------------------------------------------------


def test_given_a_tenant_at_its_guarantee_then_others_cannot_have_its_runs_evicted() -> None:
    cache = make_cache()
    orders = cache.orders
    orders.quotas["t"] = quota = Quota("t", [2], [None], orders.new_policies())
    run = add_run(cache, root_for(cache, ReuseScope(tenant="t")), 1, 2)
    assert run.root.policies is quota.policies
    quota.policies[Tier.GPU].add(run)
    pool = cache.pools[0][Tier.GPU]
    pool.num_cached = quota.cached[0] = 1
    assert (orders.victim(pool, "other"), orders.available(pool, "other")) == (None, pool.num_free)
    assert (orders.victim(pool, "t"), orders.available(pool, "t")) == (run, pool.num_free + 1)


# --- what subscribers are told ---------------------------------------------------------------------------------------


def test_given_a_listener_when_a_run_is_stored_changed_moved_and_removed_then_its_digests_say_so() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4)
    subscription = cache.events.subscribe(snapshot=False)
    announce_stored(cache, run)
    run.priority = 90
    announce_priority(cache, run, 35)
    announce_moved(cache, run, Tier.GPU, Tier.HOST)
    announce_removed(cache, run, 1, 2, CAPACITY)
    stored, changed, moved, removed = subscription.poll().events
    digests = tuple(chain_digests(root_digest(ReuseScope()), run.tokens, SIZE))
    assert isinstance(stored, Stored)
    assert isinstance(removed, Removed)
    assert (stored.digests, stored.parent, removed.digests) == (digests, None, digests[1:])
    assert isinstance(changed, Updated)
    assert isinstance(moved, Updated)
    assert (changed.new_priority, moved.new_tier) == (90, Tier.HOST)


def test_given_a_windowed_group_with_a_hole_then_only_what_is_there_is_announced() -> None:
    cache = make_cache(FULL, WINDOWED)
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4, 5, 6)
    run.ids[1][1] = -1
    events = stored_now(cache, cache.roots.values(), as_of=0)
    assert [(event.group, len(event.digests)) for event in events] == [(0, 3), (1, 1), (1, 1)]


# --- time ------------------------------------------------------------------------------------------------------------


def test_given_a_time_to_live_when_it_is_over_then_idle_leaves_are_dropped_from_the_end() -> None:
    cache = make_cache()
    parent = add_run(cache, root_for(cache, ReuseScope()), 1, 2)
    child = add_run(cache, parent, 3, 4)
    for node in (child, parent):
        count_run(cache, node, 1, 0)
        node.expires_at = 5.0
        watch(cache, node)
    cache.now = 4.0
    assert (expire(cache), cache.num_runs) == (0, 2)
    cache.now = 5.0
    assert (expire(cache), child.detached, parent.detached, gpu(cache)) == (2, True, True, (16, 0, 0))


def test_given_a_priority_for_some_time_when_that_is_over_then_the_default_holds_again() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2)
    set_priority(cache, run, 90, until=5.0)
    assert run in run.root.policies[Tier.GPU]
    cache.now = 5.0
    assert (expire(cache), run.priority, run.priority_until) == (0, DEFAULT_PRIORITY, NEVER)


# --- readers of windows ----------------------------------------------------------------------------------------------


def windowed_run(cache: Cache) -> Node:
    """Six blocks that the sequence which wrote them still reads."""
    run = add_run(cache, root_for(cache, ReuseScope()), *range(12))
    cache.pools[0][Tier.GPU].refs[run.ids[0]] = 1
    return run


def test_given_a_windowed_block_when_its_last_reader_leaves_then_it_is_left_over_until_its_pool_needs_it() -> None:
    cache = make_cache(WINDOWED)
    run = windowed_run(cache)
    ref_blocks(cache, run.root, cache.groups[0], run.ids[0][:1])
    unref_blocks(cache, run, cache.groups[0], 0, 5, run.ids[0])
    assert gpu(cache) == (10, 5, 0)
    pool = cache.pools[0][Tier.GPU]
    # Not the one still read, nor the last window
    assert evict_leftovers(cache, pool, 16, math.inf, None, CAPACITY) == 3
    assert run.ids[0].tolist()[1:4] == [-1, -1, -1]
    assert evict_last_resort(cache, pool, 16, None, CAPACITY) == 2


def test_given_a_pinned_windowed_block_then_it_is_no_leftover_that_goes() -> None:
    cache = make_cache(WINDOWED)
    run = windowed_run(cache)
    count_pin(cache, run.root, cache.groups[0], int(run.ids[0][0]), 1)
    unref_blocks(cache, run, cache.groups[0], 0, 5, run.ids[0])
    assert gpu(cache)[2] == 1
    pool = cache.pools[0][Tier.GPU]
    assert evict_leftovers(cache, pool, 16, math.inf, None, CAPACITY) == 3
    count_pin(cache, run.root, cache.groups[0], int(run.ids[0][0]), -1)
    assert gpu(cache)[2] == 0
    assert evict_leftovers(cache, pool, 16, math.inf, None, CAPACITY) == 1


def test_given_the_end_of_a_run_then_its_last_window_is_needed_and_what_lies_before_is_not() -> None:
    cache = make_cache(WINDOWED)
    run = add_run(cache, root_for(cache, ReuseScope()), *range(12))
    assert cache.by_block[0].needed(cache, run).tolist() == [False, False, False, False, True, True]
    assert is_usable(cache, run, 0, run.num_blocks)
    run.ids[0][-1] = -1
    assert not is_usable(cache, run, 5, run.num_blocks)


# --- readers of paths ------------------------------------------------------------------------------------------------


def test_given_a_path_when_it_is_held_and_released_then_its_leaf_alone_is_a_candidate() -> None:
    cache = make_cache()
    parent = add_run(cache, root_for(cache, ReuseScope()), 1, 2)
    leaf = add_run(cache, parent, 3, 4)
    leaf.active = parent.active = parent.root.active = 1
    unref(cache, leaf)
    assert gpu(cache) == (14, 2, 0)
    policy = leaf.root.policies[Tier.GPU]
    assert (leaf in policy, parent in policy) == (True, False)
    ref(cache, leaf)
    assert (gpu(cache), len(policy), parent.active) == ((14, 0, 0), 0, 1)


def test_given_an_idle_path_when_it_is_pinned_then_no_policy_has_it_until_it_is_unpinned() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4)
    run.active = run.root.active = 1
    unref(cache, run)
    pin_path(cache, run)
    assert (gpu(cache), cache.pinned_positions, run in run.root.policies[Tier.GPU]) == ((14, 2, 2), 2, False)
    unpin_path(cache, run)
    assert (gpu(cache), cache.pinned_positions, run in run.root.policies[Tier.GPU]) == ((14, 2, 0), 0, True)


def test_given_a_detached_run_when_its_last_reader_leaves_then_its_blocks_are_free() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4)
    run.active = run.root.active = 1
    remove_node(cache, run)
    unref(cache, run)
    assert gpu(cache) == (16, 0, 0)


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_given_an_idle_leaf_when_its_tail_is_dropped_then_the_rest_stays_a_candidate() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4, 5, 6)
    count_run(cache, run, 1, 0)
    drop_tail(cache, run, 2, CAPACITY)
    assert (gpu(cache), run.tokens.tolist(), run in run.root.policies[Tier.GPU]) == ((15, 1, 0), [1, 2], True)
    assert cache.counters.evictions[CAPACITY.value] == 2


def test_given_a_parent_when_its_only_child_is_dropped_then_it_becomes_a_candidate() -> None:
    cache = make_cache()
    parent = add_run(cache, root_for(cache, ReuseScope()), 1, 2)
    child = add_run(cache, parent, 3, 4)
    drop_tail(cache, child, 1, CAPACITY)
    assert (cache.num_runs, parent in parent.root.policies[Tier.GPU]) == (1, True)


def test_given_a_subtree_under_a_reader_when_it_is_detached_then_only_idle_blocks_become_free() -> None:
    cache = make_cache()
    read = add_run(cache, root_for(cache, ReuseScope()), 1, 2)
    idle = add_run(cache, read, 3, 4)
    read.active = read.root.active = 1
    count_run(cache, idle, 1, 0)
    assert detach(cache, read, EvictionReason.INVALIDATED) == 2
    assert (gpu(cache), read.detached, cache.num_runs) == ((15, 0, 0), True, 0)


# --- stored logits ---------------------------------------------------------------------------------------------------


def test_given_stored_logits_when_their_run_is_cut_then_they_stay_with_the_last_full_block_of_their_prompt() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4)
    assert not cache.has_logits
    assert store_logits(cache, run, tokens_of(1, 2, 3), "of three", ())
    assert store_logits(cache, run, tokens_of(1, 2, 3, 4), "of four", ())
    upper = split(cache, run, 1)
    assert (list(upper.logits.values()), list(run.logits.values())) == ([("of three", ())], [("of four", ())])
    assert find_logits(cache, run.root, [upper, run], tokens_of(1, 2, 3, 4)) == "of four"
    assert find_logits(cache, run.root, [upper], tokens_of(1, 2, 9)) is None


def test_given_a_prompt_longer_than_what_is_cached_then_its_logits_are_not_stored() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2)
    assert not store_logits(cache, run, tokens_of(1, 2, 3, 4), "of four", ())
    assert (cache.has_logits, run.logits) == (False, None)


def test_given_stored_logits_when_the_block_that_their_prompt_ends_in_is_invalid_then_they_are_forgotten() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2)
    store_logits(cache, run, tokens_of(1, 2, 3), "of three", ())
    forget_logits_inside(cache, run, 1, tokens_of(4, 4).tobytes())
    assert find_logits(cache, run.root, [run], tokens_of(1, 2, 3)) == "of three"
    forget_logits_inside(cache, run, 1, tokens_of(3, 4).tobytes())
    assert find_logits(cache, run.root, [run], tokens_of(1, 2, 3)) is None


# --- tiers, and the whole --------------------------------------------------------------------------------------------


def cached_run(cache: Cache, *tokens: int) -> Node:
    run = add_run(cache, root_for(cache, ReuseScope()), *tokens)
    run.active, run.root.active = 1, run.root.active + 1
    cache.tick += 1
    unref(cache, run)
    return run


def test_given_a_lower_tier_when_a_run_moves_down_and_up_then_copies_are_planned_and_books_follow() -> None:
    cache = make_cache(host_blocks=4)
    run = cached_run(cache, 1, 2, 3, 4)
    moved = demote(cache, run, 1)
    assert moved is not None
    host = cache.pools[0][Tier.HOST]
    assert (moved.tier, moved.num_blocks, moved.parent, run.tier) == (Tier.HOST, 1, run, Tier.GPU)
    assert (host.num_cached, gpu(cache)) == (1, (15, 1, 0))
    ref(cache, moved)
    promote(cache, moved)
    assert (moved.tier, host.num_free, gpu(cache)) == (Tier.GPU, 4, (14, 0, 0))
    assert [op.kind for op in cache.copies] == [CopyKind.OFFLOAD, CopyKind.ONBOARD]


def test_given_a_full_lower_tier_when_a_run_moves_down_then_the_stalest_there_gives_way() -> None:
    cache = make_cache(host_blocks=1)
    stale, fresh = cached_run(cache, 1, 2), cached_run(cache, 3, 4)
    assert demote(cache, stale, 1)
    assert demote(cache, fresh, 1)
    assert (stale.detached, fresh.tier) == (True, Tier.HOST)


@pytest.mark.parametrize(("offload", "tier"), [(True, Tier.HOST), (False, None)])
def test_given_a_full_gpu_when_room_is_made_then_the_stalest_run_moves_down_or_leaves(
    offload: bool, tier: Tier | None
) -> None:
    cache = make_cache(gpu_blocks=2, host_blocks=2, offload_on_evict=offload)
    stale, fresh = cached_run(cache, 1, 2), cached_run(cache, 3, 4)
    evict(cache, cache.pools[0][Tier.GPU], 1, None)
    assert (None if stale.detached else stale.tier) == tier
    assert (fresh.tier, fresh.detached) == (Tier.GPU, False)


def test_given_a_time_to_live_in_a_whole_cache_when_it_is_over_then_the_run_is_dropped() -> None:
    cache = make_cache()
    run = cached_run(cache, 1, 2)
    run.expires_at = 5.0
    watch(cache, run)
    cache.now = 5.0
    assert (expire(cache), run.detached, gpu(cache)) == (1, True, (16, 0, 0))
