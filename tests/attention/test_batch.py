"""PagedBatch refuses what would make a kernel read memory that nobody wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvpool.attention import AttentionSpec, PagedBatch
from kvpool.errors import InvalidArgumentError

PLAIN = AttentionSpec(1, 1, 16)
GOOD: dict[str, Any] = dict(indptr=[0, 2, 3], indices=[4, 5, 6], query_lens=[1, 3], kv_lens=[20, 16], block_size=16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_lens": [33, 16]}, "sequence 0.*2 blocks of 16"),
        ({"kv_lens": [20, -1]}, "sequence 1"),
        ({"query_lens": [1, -3]}, "sequence 1"),
        ({"kv_lens": [20]}, "kv_lens has 1 entries"),
        ({"indptr": [0, 2]}, "indptr has 2 entries"),
        ({"indptr": [0, 2, 4]}, r"len\(indices\)=3"),
        ({"indptr": [1, 2, 3]}, "rise from 0"),
        ({"indptr": [0, 3, 2]}, "rise from 0"),
        ({"query_lens": [1.0, 3.0]}, "query_lens must be a list of integers"),
        ({"indices": [[4, 5, 6]]}, "indices must be a list of integers"),
        ({"gaps": [32, 0]}, "32 of them not held"),
        ({"gaps": [-16, 0]}, "sequence 0"),
        ({"block_size": 0}, "block_size=0"),
    ],
)
def test_given_arrays_that_do_not_fit_then_the_first_wrong_sequence_is_named(
    change: dict[str, Any], named: str
) -> None:
    PagedBatch.build(**GOOD)
    with pytest.raises(InvalidArgumentError, match=named):
        PagedBatch.build(**{**GOOD, **change})


def test_given_more_queries_than_tokens_then_a_causal_plan_is_refused_and_a_cross_attention_one_is_not() -> None:
    batch = PagedBatch.build([0, 1], [0], [5], [4], block_size=16)

    with pytest.raises(InvalidArgumentError, match="5 queries but kv_lens=4"):
        batch.check_for(PLAIN)
    batch.check_for(AttentionSpec(1, 1, 16, causal=False))


def test_given_a_block_that_left_its_window_too_early_then_the_query_that_needs_it_is_named() -> None:
    spec = AttentionSpec(1, 1, 16, window=8)
    in_time = PagedBatch.build([0, 1], [0], [1], [25], block_size=16, gaps=[16])  # sees 17 to 24
    too_early = PagedBatch.build([0, 1], [0], [3], [25], block_size=16, gaps=[16])  # the first sees 15 to 22

    in_time.check_for(spec)
    with pytest.raises(InvalidArgumentError, match="position 22 sees tokens before 16"):
        too_early.check_for(spec)


def test_given_an_empty_batch_then_it_is_a_batch_without_queries() -> None:
    batch = PagedBatch.build([0], [], [], [], block_size=16)

    batch.check_for(PLAIN)
    assert len(batch) == batch.num_query_tokens == 0


def test_given_a_window_then_the_ranges_are_what_the_queries_see_in_listed_tokens() -> None:
    spec = AttentionSpec(1, 1, 16, window=20, sink_tokens=3)
    batch = PagedBatch.build([0, 4], [0, 1, 2, 3], [1], [100], block_size=16, gaps=[64])  # 16 sinks, then 80 to 99

    sinks, start, end = batch.key_ranges(spec, slice(None), np.array([99]), np.array([99]))

    assert (sinks[0], start[0], end[0]) == (3, 16, 36)
