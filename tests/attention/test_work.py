"""Work items cover what every query sees, exactly once, and are as many as asked for."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st

from kvpool.attention import AttentionSpec, PagedBatch
from kvpool.attention.work import divide_work, max_items, max_partials

SPECS = [
    AttentionSpec(4, 2, 16),
    AttentionSpec(4, 2, 16, window=20),
    AttentionSpec(4, 2, 16, window=20, sink_tokens=5),
    AttentionSpec(4, 2, 16, chunk=24),
    AttentionSpec(4, 2, 16, causal=False),
]


@given(
    st.sampled_from(SPECS),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=8),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 40),
)
def test_given_any_batch_then_every_query_meets_each_key_it_sees_exactly_once(
    spec: AttentionSpec, lengths: list[tuple[int, int]], tile_tokens: int, target_items: int
) -> None:
    query_lens = np.array([queries for queries, _ in lengths])
    kv_lens = np.array([queries + prefix for queries, prefix in lengths])
    blocks = -(-kv_lens // 16)
    indptr = np.concatenate(([0], np.cumsum(blocks)))
    batch = PagedBatch.build(indptr, np.arange(indptr[-1]), query_lens, kv_lens, block_size=16)

    work = divide_work(
        spec, batch, np.arange(len(lengths)), tile_tokens=tile_tokens, tile_keys=8, target_items=target_items
    )

    starts = np.cumsum(query_lens) - query_lens
    meetings = [np.zeros((queries, keys), int) for queries, keys in zip(query_lens, kv_lens, strict=True)]
    for token, count, position, table, gap, first, last, _ in work.items.tolist():
        sequence = int(np.searchsorted(indptr, table, side="right")) - 1
        while query_lens[sequence] == 0 or not starts[sequence] <= token < starts[sequence] + query_lens[sequence]:
            sequence -= 1  # sequences without blocks share the start of their list
        assert gap == 0
        assert position == kv_lens[sequence] - query_lens[sequence] + token - starts[sequence]
        row = token - starts[sequence]
        meetings[sequence][row : row + count, first:last] += 1
    for met, queries, keys in zip(meetings, query_lens, kv_lens, strict=True):
        positions = np.arange(keys)
        seen = spec.visible(positions[keys - queries :, None] if queries else positions[:0, None], positions[None, :])
        assert (met[seen] == 1).all()
    num_tiles = int((-(-query_lens // tile_tokens)).sum())
    assert len(work.items) <= max_items(num_tiles, target_items)
    partials = work.items[work.items[:, 7] >= 0, 7]
    assert sorted(partials.tolist()) == list(range(work.num_partials))
    assert work.tiles[:, 3].sum() == work.num_partials


def test_given_few_tiles_then_their_keys_fill_one_wave_and_no_more() -> None:
    batch = PagedBatch.build(np.arange(9) * 2048, np.arange(16384), np.ones(8, int), np.full(8, 32768), block_size=16)

    work = divide_work(SPECS[0], batch, np.arange(8), tile_tokens=1, tile_keys=32, target_items=66)

    lengths = work.items[:, 6] - work.items[:, 5]
    assert len(work.items) == 64
    assert lengths.min() == lengths.max() == 4096


def test_given_many_tiles_then_none_is_divided() -> None:
    batch = PagedBatch.build(
        np.arange(257) * 64, np.arange(16384), np.ones(256, int), np.full(256, 1024), block_size=16
    )

    work = divide_work(SPECS[0], batch, np.arange(256), tile_tokens=1, tile_keys=32, target_items=64)

    assert len(work.items) == 256
    assert work.num_partials == 0


@pytest.mark.parametrize(("count", "keys"), [(100, 2000), (72, 4096), (140, 1024), (340, 1024), (67, 3000)])
def test_given_tiles_that_do_not_fill_whole_waves_then_small_items_at_the_end_do(count: int, keys: int) -> None:
    blocks = -(-keys // 16)
    batch = PagedBatch.build(
        np.arange(count + 1) * blocks,
        np.arange(count * blocks),
        np.ones(count, int),
        np.full(count, keys),
        block_size=16,
    )

    work = divide_work(SPECS[0], batch, np.arange(count), tile_tokens=1, tile_keys=64, target_items=66)

    busy_until = [0] * 66  # programs take the next item when they are done
    for length in (work.items[:, 6] - work.items[:, 5]).tolist():
        heapq.heapreplace(busy_until, busy_until[0] + length)
    assert max(busy_until) <= 1.12 * count * keys / 66


@pytest.mark.parametrize("count", [15, 16, 17])
@pytest.mark.parametrize("spec", [SPECS[0], AttentionSpec(4, 2, 16, window=20000, sink_tokens=5)])
def test_given_as_many_tiles_as_run_at_once_when_some_are_longer_then_their_items_fit_the_buffers(
    spec: AttentionSpec, count: int
) -> None:
    keys = np.where(np.arange(count) % 2, 24576, 8192)
    indptr = np.concatenate(([0], np.cumsum(keys // 16)))
    batch = PagedBatch.build(indptr, np.arange(indptr[-1]), np.ones(count, int), keys, block_size=16)

    work = divide_work(spec, batch, np.arange(count), tile_tokens=1, tile_keys=64, target_items=16)

    assert len(work.items) <= max_items(count, 16)


@given(
    st.sampled_from(SPECS),
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 3000)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from([1, 4]),
)
def test_given_room_for_some_partial_results_then_no_batch_leaves_more(
    spec: AttentionSpec, lengths: list[tuple[int, int]], target_items: int, waves: int
) -> None:
    query_lens = np.array([queries for queries, _ in lengths])
    kv_lens = np.array([queries + prefix for queries, prefix in lengths])
    indptr = np.concatenate(([0], np.cumsum(-(-kv_lens // 16))))
    batch = PagedBatch.build(indptr, np.arange(indptr[-1]), query_lens, kv_lens, block_size=16)
    num_tiles = int((-(-query_lens // 4)).sum())
    room = max_partials(spec, num_tiles, target_items, waves)
    options = {"tile_tokens": 4, "tile_keys": 8, "target_items": target_items, "waves": waves, "most_partials": room}

    work = divide_work(spec, batch, np.arange(len(lengths)), **options)

    assert work.num_partials <= room
    assert len(work.items) <= num_tiles + room


def test_given_padding_then_the_keys_of_others_are_divided_as_without_it() -> None:
    batch = PagedBatch.build(np.arange(61) * 64, np.arange(3840), np.ones(60, int), np.full(60, 1024), block_size=16)
    padded = batch.padded(96)
    options = {"tile_tokens": 1, "tile_keys": 32, "target_items": 66}

    alone = divide_work(SPECS[0], batch, np.arange(60), **options)
    beside = divide_work(SPECS[0], padded, np.arange(61), **options)

    assert padded.num_query_tokens == 96
    assert np.array_equal(beside.items[: len(alone.items)], alone.items)
    assert (beside.items[len(alone.items) :, 5:] == [0, 0, -1]).all()
    assert beside.items[len(alone.items) :, 1].sum() == 36


def test_given_tiles_that_fill_a_gpu_when_merging_is_dear_then_only_the_longest_are_divided() -> None:
    batch = PagedBatch.build([0, 120], np.arange(120), [1900], [1900], block_size=16)
    options = {"tile_tokens": 32, "tile_keys": 32, "target_items": 33}

    even, once = (divide_work(SPECS[0], batch, np.arange(1), waves=waves, **options) for waves in (4, 1))

    assert even.num_partials > 60
    assert once.num_partials == 8
    assert once.tiles[:, 3].tolist() == [2] * 4


def test_given_few_tiles_when_merging_is_dear_then_their_keys_fill_one_wave_all_the_same() -> None:
    batch = PagedBatch.build([0, 256], np.arange(256), [128], [4096], block_size=16)

    work = divide_work(SPECS[0], batch, np.arange(1), tile_tokens=32, tile_keys=32, target_items=33, waves=1)

    assert len(work.items) == work.num_partials == 32
