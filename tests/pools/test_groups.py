from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import DType, GroupKind, KVCacheConfig, LayerSpec, StatePart, StateSpec
from kvpool.core.kind import Group
from kvpool.kinds import kind_of
from managers import groups_of


def make_group(spec: LayerSpec, block_size: int) -> Group:
    layers = [spec] if not spec.cross_attention else [LayerSpec(1, 8), spec]
    groups = groups_of(KVCacheConfig(layers, block_size=block_size, gpu_blocks=8))
    return next(group for group in groups if group.spec.kind is spec.kind)


def visible_positions(group: Group, query: int) -> set[int]:
    """Positions before `query` that its attention reads, straight from the definition of the window."""
    if group.spec.kind is GroupKind.SLIDING:
        return {p for p in range(query) if p > query - group.spec.window or p < group.spec.sink_tokens}
    if group.spec.kind is GroupKind.CHUNKED:
        return {p for p in range(query) if p // group.spec.window == query // group.spec.window}
    return set(range(query))


def needed_blocks(group: Group, query: int, block_size: int) -> set[int]:
    return {position // block_size for position in visible_positions(group, query)}


sizes = st.integers(1, 5)
windows = st.integers(1, 17)
windowed_specs = st.one_of(
    st.builds(lambda w, s: LayerSpec(1, 8, window=w, sink_tokens=s), windows, st.integers(0, 9)),
    st.builds(lambda c: LayerSpec(1, 8, chunk=c), windows),
)
specs = st.one_of(windowed_specs, st.just(LayerSpec(1, 8)))


@pytest.mark.parametrize(
    ("spec", "cross", "windowed"),
    [
        (LayerSpec(1, 8), False, False),
        (LayerSpec(1, 8, window=4), False, True),
        (LayerSpec(1, 8, chunk=4), False, True),
        (LayerSpec(1, 8, cross_attention=True), True, False),
    ],
)
def test_a_group_is_full_windowed_or_cross(spec: LayerSpec, cross: bool, windowed: bool) -> None:
    group = make_group(spec, 4)
    assert (not group.grows, group.by_block, group.has_holes) == (cross, windowed, False)
    assert group.pick("sequence", "encoder") == ("encoder" if cross else "sequence")
    assert kind_of(group.spec) is type(group)


@given(specs, sizes, st.integers(0, 60))
def test_the_window_keeps_every_block_that_the_next_query_reads(spec: LayerSpec, size: int, num_tokens: int) -> None:
    group = make_group(spec, size)
    start, sinks = group.first_read(num_tokens), -(-group.spec.sink_tokens // group.block_size)
    assert all(block >= start or block < sinks for block in needed_blocks(group, num_tokens, size))


@given(specs, sizes, st.integers(0, 60))
def test_the_first_block_of_the_window_is_read_or_about_to_be_written(
    spec: LayerSpec, size: int, num_tokens: int
) -> None:
    group = make_group(spec, size)
    start, sinks = group.first_read(num_tokens), -(-group.spec.sink_tokens // group.block_size)
    needed = {block for block in needed_blocks(group, num_tokens, size) if block >= sinks}
    assert start == min(needed, default=max(num_tokens // size, sinks))


@given(windowed_specs, sizes, st.integers(1, 60))
def test_the_window_never_moves_back_while_a_sequence_grows(spec: LayerSpec, size: int, num_tokens: int) -> None:
    group = make_group(spec, size)
    assert group.first_read(num_tokens - 1) <= group.first_read(num_tokens)


@given(specs, sizes, st.integers(0, 40), st.data())
def test_the_longest_valid_prefix_equals_brute_force(
    spec: LayerSpec, size: int, num_tokens: int, data: st.DataObject
) -> None:
    group = make_group(spec, size)
    blocks = -(-num_tokens // size)
    present = np.array(data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)), np.bool_)

    def valid(length: int) -> bool:
        continued = {length // size} if length % size else set()  # copied as it is, and written further
        return all(present[block] for block in needed_blocks(group, length, size) | continued)

    candidates = [num_tokens, *(block * size for block in range((num_tokens - 1) // size, -1, -1))]
    expected = next(length for length in candidates if valid(length))
    found = group.longest_valid(present, num_tokens)
    assert valid(found)
    assert found == expected


def test_the_longest_valid_prefix_of_every_short_path_equals_brute_force() -> None:
    for spec in (LayerSpec(1, 8), LayerSpec(1, 8, window=2), LayerSpec(1, 8, window=3, sink_tokens=1)):
        for size in (1, 2):
            group = make_group(spec, size)
            for num_tokens in range(6):
                blocks = -(-num_tokens // size)
                lengths = [num_tokens, *(block * size for block in range((num_tokens - 1) // size, -1, -1))]
                for pattern in itertools.product((False, True), repeat=blocks):
                    valid = (
                        length
                        for length in lengths
                        if all(pattern[block] for block in needed_blocks(group, length, size))
                        and (length % size == 0 or pattern[length // size])
                    )
                    found = group.longest_valid(np.array(pattern, np.bool_), num_tokens)
                    assert found == next(valid), (spec, size, pattern)


def test_the_state_behind_some_tokens_stands_in_the_first_column_from_theirs_on_that_has_a_block() -> None:
    state = StateSpec((StatePart("state", (4,), DType.FLOAT32),))
    group = groups_of(KVCacheConfig([LayerSpec(1, 8), state], block_size=4, gpu_blocks=8))[1]
    assert (group.has_holes, group.by_block, group.grows) == (True, True, True)
    row = np.array([-1, 7, -1, 0, -1], np.int32)
    columns = {num_tokens: group.column_of(row, num_tokens) for num_tokens in (0, 1, 4, 5, 8, 9, 16, 17, 20)}
    assert columns == {0: -1, 1: 1, 4: 1, 5: 1, 8: 1, 9: 3, 16: 3, 17: -1, 20: -1}


def test_visible_ids_are_the_same_array_while_nothing_left_the_window() -> None:
    group = make_group(LayerSpec(1, 8, window=8, sink_tokens=4), 4)
    ids = np.arange(5, dtype=np.int32)
    assert group.visible(ids, 1) is ids
    assert group.visible(ids, 3).tolist() == [0, -1, -1, 3, 4]
    assert ids.tolist() == [0, 1, 2, 3, 4]


# --- private blocks --------------------------------------------------------------------------------------------------

KINDS = [LayerSpec(1, 8), LayerSpec(1, 8, window=4), LayerSpec(1, 8, chunk=4), LayerSpec(1, 8, cross_attention=True)]


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: spec.kind.value)
def test_given_any_kind_when_a_fork_shares_blocks_then_the_last_one_to_let_go_frees_them(spec: LayerSpec) -> None:
    group = make_group(spec, 4)
    before = group.gpu.num_free
    ids = group.take(3)
    group.ref(ids)
    group.unref(ids, shared=True)
    assert group.gpu.num_free == before - 3
    assert group.gpu.refs[ids].tolist() == [group.single_owner] * 3  # as when they were taken
    group.unref(ids, shared=True)
    assert group.gpu.num_free == before
    assert not group.gpu.refs.any()


@given(specs, sizes, st.integers(1, 40), st.integers(0, 40))
def test_what_a_request_holds_at_once_is_what_its_queries_read_or_write(
    spec: LayerSpec, size: int, num_tokens: int, reused: int
) -> None:
    group = make_group(spec, size)
    num_blocks, reused_blocks = -(-num_tokens // size), min(reused, num_tokens) // size
    given_up = ~group.reads(np.arange(reused_blocks), reused_blocks * size)
    held = group.held_at_once(num_blocks, 7, reused_blocks, reused_blocks * size)
    assert held == num_blocks - int(given_up.sum())


def test_layers_that_keep_a_state_hold_what_they_go_on_from_and_what_they_write() -> None:
    state = StateSpec((StatePart("state", (4,), DType.FLOAT32),))
    group = groups_of(KVCacheConfig([LayerSpec(1, 8), state], block_size=4, gpu_blocks=8))[1]
    held = {(blocks, reused): group.held_at_once(blocks, 0, reused, 4 * reused) for blocks, reused in [(3, 0), (1, 1)]}
    assert held == {(3, 0): 1, (1, 1): 1}
    assert [group.held_at_once(9, 0, reused, 4 * reused) for reused in (1, 2, 8)] == [2, 2, 2]


def test_a_cross_group_holds_what_its_encoder_needs() -> None:
    assert make_group(LayerSpec(1, 8, cross_attention=True), 4).held_at_once(9, 7, 0, 0) == 7
