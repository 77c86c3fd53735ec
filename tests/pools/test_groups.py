from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import GroupKind, KVCacheConfig, LayerGroup, LayerSpec
from kvpool.pools.groups import is_cross, is_windowed, longest_valid, sink_blocks, visible, window_start


def make_group(spec: LayerSpec, block_size: int) -> LayerGroup:
    layers = [spec] if not spec.cross_attention else [LayerSpec(1, 8), spec]
    groups = KVCacheConfig(layers, block_size=block_size, gpu_blocks=8).groups
    return next(group for group in groups if group.kind is spec.kind)


def visible_positions(group: LayerGroup, query: int) -> set[int]:
    """Positions before `query` that its attention reads, straight from the definition of the window."""
    if group.kind is GroupKind.SLIDING:
        return {p for p in range(query) if p > query - group.window or p < group.sink_tokens}
    if group.kind is GroupKind.CHUNKED:
        return {p for p in range(query) if p // group.window == query // group.window}
    return set(range(query))


def needed_blocks(group: LayerGroup, query: int, block_size: int) -> set[int]:
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
    assert (is_cross(group), is_windowed(group)) == (cross, windowed)


@given(specs, sizes, st.integers(0, 60))
def test_the_window_keeps_every_block_that_the_next_query_reads(spec: LayerSpec, size: int, num_tokens: int) -> None:
    group = make_group(spec, size)
    start, sinks = window_start(group, num_tokens, size), sink_blocks(group, size)
    assert all(block >= start or block < sinks for block in needed_blocks(group, num_tokens, size))


@given(specs, sizes, st.integers(0, 60))
def test_the_first_block_of_the_window_is_read_or_about_to_be_written(
    spec: LayerSpec, size: int, num_tokens: int
) -> None:
    group = make_group(spec, size)
    start, sinks = window_start(group, num_tokens, size), sink_blocks(group, size)
    needed = {block for block in needed_blocks(group, num_tokens, size) if block >= sinks}
    assert start == min(needed, default=max(num_tokens // size, sinks))


@given(windowed_specs, sizes, st.integers(1, 60))
def test_the_window_never_moves_back_while_a_sequence_grows(spec: LayerSpec, size: int, num_tokens: int) -> None:
    group = make_group(spec, size)
    assert window_start(group, num_tokens - 1, size) <= window_start(group, num_tokens, size)


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
    found = longest_valid(group, present, num_tokens, size)
    assert valid(found)
    assert found == expected


def test_visible_ids_are_the_same_array_while_nothing_left_the_window() -> None:
    group = make_group(LayerSpec(1, 8, window=8, sink_tokens=4), 4)
    ids = np.arange(5, dtype=np.int32)
    assert visible(group, ids, 1, 4) is ids
    assert visible(group, ids, 3, 4).tolist() == [0, -1, -1, 3, 4]
    assert ids.tolist() == [0, 1, 2, 3, 4]
