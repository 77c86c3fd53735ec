"""Sequences that begin with the same blocks: who they are, and that reading these once changes no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from paged_cases import BuiltCase, Case, spec

from kvpool.attention import PagedBatch, create_backend, torch_backend
from kvpool.attention.attention_batch import SharedPrefix, shared_prefixes
from kvpool.config.layers import DType
from kvpool.kernels.attention_reference import reference_attention


def batch_of(*lists: list[int], kv_lens: list[int] | None = None, query_lens: list[int] | None = None) -> PagedBatch:
    """Sequences with these blocks of 4 tokens, all full, the last token of each being its query."""
    indptr = np.cumsum([0, *map(len, lists)])
    keys = [4 * len(blocks) for blocks in lists] if kv_lens is None else kv_lens
    indices = np.concatenate([*lists]).astype(np.int32)
    return PagedBatch.build(indptr, indices, query_lens or [1] * len(lists), keys, block_size=4)


def found(batch: PagedBatch, fewest_saved: int = 1) -> list[tuple[list[int], int]]:
    prefixes = shared_prefixes(batch, np.arange(len(batch)), fewest_saved)
    return sorted((prefix.rows.tolist(), prefix.num_tokens) for prefix in prefixes)


def test_given_lists_that_begin_alike_then_they_are_a_group_up_to_the_first_difference() -> None:
    batch = batch_of([7, 3, 9, 1], [5, 6], [7, 3, 2, 4], [7, 3, 9, 8])

    assert found(batch) == [([0, 2, 3], 8)]


def test_given_nothing_in_common_then_there_is_no_group() -> None:
    assert found(batch_of([0, 1], [2, 3], [4])) == []


def test_given_a_short_common_beginning_when_some_share_much_more_then_these_are_groups_of_their_own() -> None:
    batch = batch_of([0, 1, 2, 3, 10], [0, 1, 2, 3, 11], [0, 5, 6, 7, 12], [0, 5, 6, 7, 13], [0, 20])

    assert found(batch) == [([0, 1], 16), ([2, 3], 16)]


def test_given_queries_inside_the_common_blocks_then_only_what_all_of_them_see_is_shared() -> None:
    batch = batch_of([0, 1, 2], [0, 1, 2], kv_lens=[12, 10], query_lens=[1, 5])

    assert found(batch) == [([0, 1], 4)]


def test_given_a_prefix_that_saves_too_little_then_it_is_left_where_it_is() -> None:
    batch = batch_of([0, 1, 2], [0, 1, 3], [0, 1, 4])

    assert found(batch, fewest_saved=16) == [([0, 1, 2], 8)]
    assert found(batch, fewest_saved=17) == []


def test_given_no_rows_then_nothing_is_found() -> None:
    assert shared_prefixes(batch_of([0, 1]), np.array([], np.int64), 1) == []


def sharing(built: BuiltCase, num_blocks: int, groups: list[list[int]]) -> BuiltCase:
    """The same case with the first blocks of each group's sequences being those of its first, and the answer to that."""
    batch, case = built.batch, built.case
    lists = [batch.indices[a:b].tolist() for a, b in zip(batch.indptr[:-1], batch.indptr[1:], strict=True)]
    for first, *others in groups:
        for row in others:
            lists[row][:num_blocks] = lists[first][:num_blocks]
    gaps = [0] * len(lists)
    expected = reference_attention(built.q, built.cache, case.spec, lists, case.query_lens, case.kv_lens, gaps)
    indices = np.concatenate(lists).astype(np.int32)
    return replace(built, batch=replace(batch, indices=indices), expected=expected)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("kv_dtype", [None, DType.INT8], ids=["stored as computed", "stored as int8"])
def test_given_two_shared_prefixes_among_other_sequences_then_the_answer_is_that_of_the_reference(
    dtype: DType, kv_dtype: DType | None
) -> None:
    queries, keys = (1, 1, 3, 1, 40, 1, 2, 1), (300, 290, 310, 70, 330, 260, 270, 257)
    kind = spec(6, 2, dtype=dtype, kv_dtype=kv_dtype or dtype)
    built = sharing(Case("two prefixes", kind, queries, keys).build(), 16, [[0, 2, 5], [1, 6, 7]])
    backend = create_backend("torch", "cpu")
    plan = backend.plan(kind, built.batch)

    assert sorted(len(keys.tokens) for keys in plan.shared) == [4, 5]
    built.check(built.run(backend))


def test_given_windowed_attention_then_no_prefix_is_read_apart() -> None:
    kind = spec(window=64)
    built = sharing(Case("window", kind, (1, 1, 1), (300, 290, 310), slide=False).build(), 16, [[0, 1, 2]])
    backend = create_backend("torch", "cpu")

    assert not backend.plan(kind, built.batch).shared
    built.check(built.run(backend))


def test_given_attention_computed_in_float32_for_narrow_types_then_results_have_the_type_of_the_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_backend, "computing_dtype", lambda dtype, device: torch.float32)
    built = Case("narrow", spec(dtype=DType.BFLOAT16, kv_dtype=DType.BFLOAT16)).build()

    out = built.run(create_backend("torch", "cpu"))

    assert out.dtype == torch.bfloat16
    built.check(out)


def test_given_a_shared_prefix_then_it_says_whose_it_is() -> None:
    (prefix,) = shared_prefixes(batch_of([3, 4, 5], [3, 4, 6]), np.array([1, 0]), 1)

    assert isinstance(prefix, SharedPrefix)
    assert (prefix.rows.tolist(), prefix.num_tokens) == ([0, 1], 8)
