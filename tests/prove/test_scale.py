"""How answers are compared, how the limit follows from noise, and how often a right engine is called wrong."""

from __future__ import annotations

import random

import pytest

from kvpool.errors import EndpointError
from kvpool.prove.endpoint import Answer
from kvpool.prove.scale import FALSE_ALARMS, FLOOR, UNMEASURED, Scale, by_chance, distance


def answer(*places: dict[str, float]) -> Answer:
    """An answer of the likeliest token at each place."""
    tokens = tuple(max(place, key=lambda token: place[token]) for place in places)
    return Answer("".join(tokens), tokens, places)


def test_given_the_same_tokens_then_the_distance_is_the_largest_difference_of_any_of_them() -> None:
    one, other = answer({"a": -0.1, "b": -2.0}, {"c": -0.5}), answer({"a": -0.2, "b": -2.5}, {"c": -0.6})
    assert distance(one, other) == distance(other, one) == pytest.approx(0.5)


def test_given_answers_that_part_then_what_stands_behind_that_place_does_not_count() -> None:
    one = answer({"a": -0.70, "b": -0.71}, {"c": -0.1, "d": -9.0})
    other = answer({"a": -0.71, "b": -0.70}, {"d": -0.1, "c": -9.0})
    assert distance(one, other) == pytest.approx(0.01)


def test_given_a_token_that_the_other_does_not_list_then_it_is_at_most_as_likely_as_its_last() -> None:
    assert distance(answer({"a": -0.1, "b": -3.0}), answer({"a": -0.1, "c": -2.9})) == pytest.approx(0.1)
    assert distance(answer({"a": -0.1}), answer({"z": -2.0})) == pytest.approx(1.9)


def test_given_no_log_probabilities_then_texts_are_equal_or_not() -> None:
    assert (distance(Answer("a"), Answer("a")), distance(Answer("a"), Answer("b"))) == (0.0, 1.0)


def test_given_exponential_noise_then_no_more_runs_are_called_wrong_than_promised() -> None:
    rng, alarms, runs, judged = random.Random(1), 0, 3000, 150
    for _ in range(runs):
        scale = Scale.of([rng.expovariate(1.0) for _ in range(16)], [9.0], judged, has_logprobs=True)
        alarms += bool(scale.wrong([rng.expovariate(1.0) for _ in range(judged)], num_checks=12))
    assert alarms / runs <= 3 * FALSE_ALARMS


def test_given_little_or_no_noise_then_the_limit_is_the_least_or_the_one_for_what_was_not_measured() -> None:
    assert Scale.of([1e-6] * 16, [1.0], 150, has_logprobs=True).limit == FLOOR
    assert Scale.of([], [1.0], 150, has_logprobs=True).limit == UNMEASURED
    assert Scale.of([0.2] * 16, [1.0], 150, has_logprobs=True).is_blind


def test_given_texts_alone_then_one_that_differs_proves_nothing_and_most_of_them_do() -> None:
    scale = Scale.of([0.0] * 16, [1.0], 150, has_logprobs=False)
    assert scale.wrong([1.0, *[0.0] * 7], num_checks=12) == []
    assert scale.wrong([*[1.0] * 8, 0.0], num_checks=12) == list(range(8))
    assert by_chance(1, 8, 8, 16) > 0.5


def test_given_a_body_of_either_form_then_its_tokens_and_their_neighbours_are_read() -> None:
    usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
    logprobs = {"tokens": ["x"], "token_logprobs": [-0.1], "top_logprobs": [{"x": -0.1, "y": -3}]}
    told = {"choices": [{"text": "x", "logprobs": logprobs}], "usage": usage}
    place = {"token": "x", "logprob": -0.1, "top_logprobs": [{"token": "y", "logprob": -3}]}
    spoken = {"choices": [{"message": {"content": "x"}, "logprobs": {"content": [place]}}], "usage": usage}
    assert Answer.of(told) == Answer.of(spoken) == Answer("x", ("x",), ({"x": -0.1, "y": -3.0},), 7, 4)
    assert Answer.of({"choices": [{"text": "x"}], "usage": None}) == Answer("x")
    with pytest.raises(EndpointError, match="in no form"):
        Answer.of({"choices": []})
