from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from parts import add_run, make_cache

from kvpool.config import Tier
from kvpool.core.node import DEFAULT_PRIORITY, NEVER, Node, Root
from kvpool.eviction.policy import checksum
from kvpool.prefix.tree import root_for, split
from kvpool.scope import ReuseScope


def nearest_child(parent: Node, query: bytes) -> tuple[Node | None, int]:
    return (None, 0) if parent.children is None else parent.children.nearest(query)


def key_of(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def make_root() -> Root:
    return Root(ReuseScope(), [], None, None)


def make_node(parent: Node, *tokens: int) -> Node:
    return Node(parent, key_of(*tokens), parent.end, 1, 0.0)


def make_run(parent: Node, *tokens: int) -> Node:
    """A closed run of blocks of two tokens, not in the tree."""
    node = make_node(parent, *tokens[:2])
    node.num_blocks, node.tokens = len(tokens) // 2, np.array(tokens, np.int32)
    return node


def parent_of(*keys: bytes) -> Node:
    root = make_root()
    for key in keys:
        root.add_child(key, Node(root, key, 0, 1, 0.0))
    return root


def child_of(parent: Node, key: bytes) -> Node:
    assert parent.children is not None
    child = parent.children.get(key)
    assert child is not None
    return child


def keys_of(parent: Node) -> list[bytes]:
    return [child.key for child in parent.children.values()] if parent.children is not None else []


def shared_tokens(left: bytes, right: bytes) -> int:
    pairs = zip(np.frombuffer(left, np.int32).tolist(), np.frombuffer(right, np.int32).tolist(), strict=False)
    count = 0
    for a, b in pairs:
        if a != b:
            break
        count += 1
    return count


# --- nodes -----------------------------------------------------------------------------------------------------------


def test_a_new_node_is_idle_unpinned_on_the_gpu_and_lives_for_ever() -> None:
    node = make_node(make_root(), 1, 2)
    assert (node.active, node.pins, node.tier, node.open_row) == (0, 0, Tier.GPU, -1)
    assert (node.priority, node.expires_at, node.priority_until) == (DEFAULT_PRIORITY, NEVER, NEVER)


def test_a_node_below_a_detached_one_is_detached() -> None:
    parent = make_node(make_root(), 1, 2)
    parent.detached = True
    assert make_node(parent, 3, 4).detached


def test_children_of_the_own_tier_are_counted() -> None:
    root = make_root()
    parent = make_node(root, 1, 2)
    on_gpu, on_host = make_node(parent, 3, 4), make_node(parent, 5, 6)
    on_host.tier = Tier.HOST
    parent.add_child(on_gpu.key, on_gpu)
    parent.add_child(on_host.key, on_host)
    assert parent.same_tier_children == 1
    parent.remove_child(on_gpu)
    parent.remove_child(on_host)
    assert parent.same_tier_children == 0
    assert parent.children is None


def test_a_subtree_lists_parents_before_children_without_recursion() -> None:
    root = make_root()
    node: Node = root
    for token in range(5000):
        child = make_node(node, token)
        node.add_child(child.key, child)
        node = child
    listed = list(root.subtree())
    assert len(listed) == 5001
    assert all(child.parent is parent for parent, child in itertools.pairwise(listed))


def test_the_fingerprint_depends_on_the_scope_the_place_and_the_tokens() -> None:
    root, other = make_root(), Root(ReuseScope(tenant="t"), [], None, None)
    first = make_run(root, 1, 2)
    prints = {n.fingerprint for n in (first, make_run(root, 1, 3), make_run(first, 1, 2), make_run(other, 1, 2))}
    assert len(prints) == 4
    assert make_run(root, 1, 2).fingerprint == first.fingerprint  # the same content after eviction and re-insertion


def test_the_fingerprint_depends_on_all_that_precedes_a_run_and_not_on_how_that_is_divided() -> None:
    root = make_root()
    at_once = make_run(make_run(root, 1, 2, 3, 4), 5, 6)
    in_two = make_run(make_run(make_run(root, 1, 2), 3, 4), 5, 6)
    elsewhere = make_run(make_run(root, 1, 9, 3, 4), 5, 6)
    assert at_once.fingerprint == in_two.fingerprint != elsewhere.fingerprint
    assert root.fingerprint_of(2, checksum(key_of(1, 2, 3, 4), 0), key_of(5, 6)) == at_once.fingerprint


def test_the_fingerprint_goes_with_the_beginning_of_a_run() -> None:
    cache = make_cache()
    run = add_run(cache, root_for(cache, ReuseScope()), 1, 2, 3, 4, 5, 6)
    whole, behind = run.fingerprint, run.fingerprint_of(1, checksum(key_of(1, 2), 0), key_of(3, 4))
    child = make_run(run, 7, 8).fingerprint
    upper = split(cache, run, 1)
    assert (upper.fingerprint, run.fingerprint) == (whole, behind)
    assert make_run(run, 7, 8).fingerprint == child


def test_what_follows_a_run_that_lost_its_end_is_known_by_what_is_left() -> None:
    root = make_root()
    run = make_run(root, 1, 2, 3, 4)
    assert make_run(run, 5, 6).fingerprint
    run.num_blocks, run.tokens = 1, run.tokens[:2]
    run.end_sum = -1
    assert make_run(run, 5, 6).fingerprint == make_run(make_run(root, 1, 2), 5, 6).fingerprint


# --- children --------------------------------------------------------------------------------------------------------


def test_children_are_found_by_their_first_block() -> None:
    parent = parent_of(key_of(1, 2), key_of(3, 4))
    assert child_of(parent, key_of(3, 4)).key == key_of(3, 4)
    assert parent.children is not None
    assert parent.children.get(key_of(3, 5)) is None


def test_adding_a_known_key_replaces_the_child_and_keeps_the_order() -> None:
    parent = parent_of(*(key_of(i, i) for i in range(20)))
    replacement = Node(make_root(), key_of(7, 7), 0, 2, 0.0)
    parent.add_child(key_of(7, 7), replacement)
    assert len(parent.children.values()) == 20
    assert nearest_child(parent, key_of(7, 9))[0] is replacement


def test_a_node_without_children_has_no_nearest_child() -> None:
    assert make_root().children is None


def test_the_nearest_child_shares_at_least_one_whole_token() -> None:
    parent = parent_of(key_of(1, 2))
    assert nearest_child(parent, key_of(1 + 256, 2)) == (None, 0)  # one byte in common is no token
    assert nearest_child(parent, key_of(1, 3))[1] // 4 == 1


def test_a_query_shorter_than_a_block_finds_its_continuation() -> None:
    parent = parent_of(key_of(1, 2, 3, 4), key_of(1, 5, 6, 7))
    node, shared = nearest_child(parent, key_of(1, 5))
    assert node is child_of(parent, key_of(1, 5, 6, 7))
    assert shared // 4 == 2


def test_children_that_start_alike_are_found_among_thousands() -> None:
    parent = parent_of(*(key_of(7, token) for token in range(2000)))
    node, shared = nearest_child(parent, key_of(7, 1500, 1))
    assert node is child_of(parent, key_of(7, 1500))
    assert shared == 8
    for token in range(2000):
        parent.remove_child(child_of(parent, key_of(7, token)))
    assert parent.children is None


def test_a_node_that_lost_all_children_can_have_others() -> None:
    keys = [key_of(i, 0) for i in range(20)]
    parent = parent_of(*keys)
    for key in keys:
        parent.remove_child(child_of(parent, key))
    parent.add_child(keys[3], Node(make_root(), keys[3], 0, 1, 0.0))
    assert nearest_child(parent, key_of(3, 9))[0] is child_of(parent, keys[3])


def test_the_nearest_child_equals_brute_force_while_few_children_come_and_go() -> None:
    rng = np.random.default_rng(0)
    parent, keys = make_root(), [key_of(first, second) for first in (1, 2) for second in (1, 2)]
    numbers = set()
    for _ in range(500):
        key = keys[int(rng.integers(4))]
        if key in keys_of(parent):
            parent.remove_child(child_of(parent, key))
        else:
            parent.add_child(key, Node(parent, key, 0, 1, 0.0))
        there = keys_of(parent)
        numbers.add(len(there))
        for query in (key_of(1, 1), key_of(1, 3), key_of(2, 2, 2), key_of(3)):
            best = max((shared_tokens(key, query) for key in there), default=0)
            node, shared = nearest_child(parent, query)
            assert (shared // 4, node is None) == (best, best == 0)
            assert node is None or shared_tokens(node.key, query) == best
    assert numbers == {0, 1, 2, 3, 4}


def test_a_key_that_begins_another_is_a_child_of_its_own() -> None:
    keys = [key_of(1, 2, 3), key_of(1, 2), key_of(1), key_of(1, 2, 4)]
    parent = parent_of(*keys)
    for key in keys:
        node, shared = nearest_child(parent, key)
        assert (child_of(parent, key).key, shared) == (key, len(key))
        assert node is not None
        assert node.key[:shared] == key
    for key in keys[:3]:
        parent.remove_child(child_of(parent, key))
    assert keys_of(parent) == [keys[3]]
    assert nearest_child(parent, key_of(1, 2)) == (child_of(parent, keys[3]), 8)


def test_of_children_that_share_as_much_the_last_one_of_the_last_branch_is_the_nearest() -> None:
    parent = parent_of(key_of(1, 5, 5), key_of(1, 5, 9), key_of(1, 2, 2), key_of(1, 5, 1))
    assert nearest_child(parent, key_of(1, 3, 3))[0] is child_of(parent, key_of(1, 2, 2))
    assert nearest_child(parent, key_of(1, 5, 3))[0] is child_of(parent, key_of(1, 5, 1))
    parent.remove_child(child_of(parent, key_of(1, 2, 2)))
    assert nearest_child(parent, key_of(1, 3, 3))[0] is child_of(parent, key_of(1, 5, 1))


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=40),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=10),
    st.permutations(range(4)),
)
def test_the_nearest_child_does_not_depend_on_the_order_of_tokens(
    come_and_go: list[list[int]], queries: list[list[int]], names: list[int]
) -> None:
    """A recording names tokens by other numbers: its playback must take the same child where several share as much."""

    def renamed(row: list[int]) -> bytes:
        return key_of(*(names[token] for token in row))

    parent, other = make_root(), make_root()
    for row in come_and_go:
        for root, key in ((parent, key_of(*row)), (other, renamed(row))):
            child = None if root.children is None else root.children.get(key)
            if child is None:
                root.add_child(key, Node(root, key, 0, 1, 0.0))
            else:
                root.remove_child(child)
    for query in queries:
        node, shared = nearest_child(parent, key_of(*query))
        twin, shared_by_twin = nearest_child(other, renamed(query))
        assert shared // 4 == shared_by_twin // 4
        assert (node is None) == (twin is None)
        if node is not None and twin is not None:
            assert twin.key == renamed(np.frombuffer(node.key, np.int32).tolist())


def test_children_are_listed_by_age_whatever_they_begin_with() -> None:
    parent, runs = make_root(), [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2)]
    for created, run in enumerate(runs):
        parent.add_child(key_of(*run), Node(parent, key_of(*run), 0, created, 0.0))
    assert keys_of(parent) == [key_of(*run) for run in runs]
    parent.remove_child(child_of(parent, key_of(1, 1)))
    assert keys_of(parent) == [key_of(*run) for run in runs[1:]]


# Tokens that share bytes, so that byte order and token order differ.
tokens = st.sampled_from([0, 1, 2, 255, 256, 257, 65536, 2**24, 2**31 - 1])
blocks = st.lists(tokens, min_size=3, max_size=3).map(lambda row: key_of(*row))


@given(
    st.lists(blocks, max_size=60, unique=True), st.lists(blocks, max_size=20), st.lists(tokens, min_size=1, max_size=3)
)
def test_the_nearest_child_equals_brute_force_after_any_additions_and_removals(
    keys: list[bytes], removed: list[bytes], query_tokens: list[int]
) -> None:
    parent = parent_of(*keys)
    for key in set(removed) & set(keys):
        parent.remove_child(child_of(parent, key))
    query = key_of(*query_tokens)
    best = max((shared_tokens(key, query) for key in keys_of(parent)), default=0)
    node, shared = nearest_child(parent, query)
    assert shared // 4 == best
    assert (node is None) == (best == 0)
    if node is not None:
        assert shared_tokens(node.key, query) == best
