"""Prompt lookup proposes what followed before, and nothing where nothing did."""

from __future__ import annotations

import numpy as np

from kvpool.engine.sampling import propose


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
