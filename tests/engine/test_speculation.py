"""Prompt lookup proposes what followed before; how many tokens are drafted follows from what was measured."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("torch")

from kvpool.engine.speculation import MOST_PROBE_AFTER, PROBE_AFTER, PROBE_STEPS, DraftLength, propose


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


# --- how many ----------------------------------------------------------------------------------------------------------


def chosen_after(acceptance: float, draft: float, steps: int = 400, most: int = 5) -> list[int]:
    """What is chosen where a step takes 1 second and `draft` more for each draft, and such a share of drafts is right."""
    length, chance = DraftLength(most), random.Random(0)
    numbers = []
    for _ in range(steps):
        number = length.choose(4)
        numbers.append(number)
        length.observe(4, number, 1.0 + draft * number)
        right = next((at for at in range(number) if chance.random() >= acceptance), number)
        length.verified(right, min(right + 1, number))
    return numbers


def test_given_no_measurement_then_steps_with_none_and_with_most_come_first() -> None:
    assert chosen_after(0.9, 0.1, steps=4) == [0, 0, 5, 5]  # the first of each does not count


def test_given_cheap_drafts_that_are_often_right_then_many_are_chosen_and_steps_without_are_rare() -> None:
    numbers = chosen_after(0.9, 0.05)[100:]
    assert max(set(numbers), key=numbers.count) == 5
    assert 0 < numbers.count(0) <= PROBE_STEPS * (len(numbers) / PROBE_AFTER + 1)


def test_given_fewer_right_ones_then_fewer_are_chosen() -> None:
    numbers = chosen_after(0.6, 0.15)[100:]
    assert 1 <= max(set(numbers), key=numbers.count) <= 3


def test_given_a_first_draft_that_costs_more_then_the_best_number_is_found_between_others() -> None:
    """With 6 of 10 right, 2 drafts give 1.09 tokens a second, 3 give 1.12 and 4 give 1.10."""
    length, numbers = DraftLength(5), []
    for _ in range(100):
        numbers.append(length.choose(1))
        length.observe(1, numbers[-1], 1.5 + 0.15 * numbers[-1] if numbers[-1] else 1.0)
        length.verified(6, 10)
    assert numbers[-50:].count(3) >= 45


def test_given_drafts_that_do_not_pay_then_none_are_chosen_and_they_are_tried_again_now_and_then() -> None:
    numbers = chosen_after(0.1, 0.2, steps=1000)[100:]
    assert set(numbers) == {0, 1}
    tries = [at for at, number in enumerate(numbers) if number]
    tries = [at for at in tries if at - 1 not in tries]
    assert (
        PROBE_AFTER < tries[1] - tries[0] < tries[-1] - tries[-2] <= MOST_PROBE_AFTER + PROBE_STEPS
    )  # ever less often


def test_given_a_draft_that_first_has_to_catch_up_then_that_step_does_not_count() -> None:
    length, numbers = DraftLength(5), [0]
    for _ in range(300):
        number = length.choose(1)
        missing = 20.0 if number and not numbers[-1] else 0.0
        numbers.append(number)
        length.observe(1, number, 1.0 + 0.15 * number + missing)
        length.verified(8, 10)
    assert numbers[-250:].count(0) <= 8 * PROBE_STEPS


def measured() -> DraftLength:
    """A length that has seen steps without drafts and with five, which are cheap."""
    length = DraftLength(5)
    for number in (0, 0, 5, 5):
        length.observe(1, number, 1.0 + 0.1 * number)
    return length


def test_given_drafts_that_become_right_then_they_are_chosen_again() -> None:
    length = measured()
    for _ in range(200):
        length.verified(0, 1)
    assert length.choose(1) == 0
    for _ in range(1000):
        length.verified(1, 1)
    assert length.choose(1) == 5


def test_given_one_step_that_stalled_then_the_choice_stays() -> None:
    length = measured()
    for _ in range(200):
        length.verified(9, 10)
    length.observe(1, 5, 1000.0)
    assert length.choose(1) == 5


def test_given_batches_of_other_sizes_then_each_is_measured() -> None:
    length = DraftLength(5)
    for number in (0, 0, 5, 5):
        length.observe(1, number, 1.0)
    assert length.choose(1) == 5
    assert length.choose(64) == 0
