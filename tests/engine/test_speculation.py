"""Prompt lookup proposes what followed before."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from kvpool.engine.speculation import propose


def guess(tokens: list[int], num_draft: int = 4) -> list[int]:
    return propose(np.array(tokens, np.int32), num_draft).tolist()


def test_given_a_repeated_ending_then_what_followed_it_last_time_is_proposed() -> None:
    assert guess([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]


def test_given_two_lengths_of_ending_then_the_longer_one_decides() -> None:
    assert guess([1, 2, 3, 7, 2, 3, 5, 1, 2, 3], 1) == [7]


def test_given_no_earlier_occurrence_then_nothing_is_proposed() -> None:
    assert guess([1, 2, 3]) == []
    assert guess([1]) == []


def test_given_a_short_rest_then_no_more_than_it_is_proposed() -> None:
    assert guess([4, 4]) == [4]


@pytest.mark.parametrize(
    ("tokens", "num_draft", "expected"),
    [
        ([5, 6, 7, 8, 1, 5, 6], 2, [7, 8]),
        ([5, 6, 7, 8, 1, 5, 6], 9, [7, 8, 1, 5, 6]),
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),  # the latest earlier place
        ([3, 1, 2, 9, 2, 8, 1, 2], 1, [9]),  # the longer ending counts more than the later place
        ([1, 2, 3, 4, 0, 9, 2, 3, 4, 7, 1, 2, 3, 4], 1, [7]),  # three tokens are compared, not four
        ([1, 2, 3, 9, 3], 1, [9]),
        ([4, 4], 3, [4]),
        ([4], 3, []),
        ([], 3, []),
    ],
)
def test_given_tokens_then_what_followed_their_ending_before_is_proposed(
    tokens: list[int], num_draft: int, expected: list[int]
) -> None:
    assert guess(tokens, num_draft) == expected
