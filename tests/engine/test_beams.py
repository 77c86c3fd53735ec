"""Which continuations a beam search goes on with, step by step, and what it has when it is cut short."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvpool.engine.beams import BeamSearch, _Hypothesis  # noqa: E402
from kvpool.engine.params import SamplingParams  # noqa: E402
from kvpool.scheduling import Request  # noqa: E402

STOP = 0


def searching(**options: Any) -> BeamSearch:
    params = SamplingParams(num_beams=2, n=2, length_penalty=0.0, max_new_tokens=9, **options)
    return BeamSearch(params, Request("r", [1], 9, stop_token_ids=[STOP]))


def step(search: BeamSearch, probabilities: dict[str, list[float]]) -> dict[str, list[int]]:
    """One step: the probability of each token behind each beam; returns what each goes on with."""
    names: list[Any] = list(probabilities)
    logits = torch.tensor([probabilities[name] for name in names]).log()
    search.advance(search.rank(names, logits).to_host())
    return {name: search.continuations(name).tolist() for name in names}


def test_given_a_search_that_is_cut_short_then_its_beams_are_the_results_best_first() -> None:
    search = searching()
    assert step(search, {"a": [0.1, 0.2, 0.7]}) == {"a": [2, 1]}
    search.forked("a", ["b"])  # type: ignore[arg-type, list-item]
    assert step(search, {"a": [0.1, 0.6, 0.3], "b": [0.1, 0.1, 0.8]}) == {"a": [1, 2], "b": []}
    best, other = search.results("cancelled")
    assert (best.token_ids, other.token_ids) == ([2, 1], [2, 2])
    assert (best.finish_reason, other.finish_reason) == ("cancelled", "cancelled")
    assert (best.score, other.score) == pytest.approx((math.log(0.7 * 0.6), math.log(0.7 * 0.3)))


def test_given_results_then_they_stand_before_what_was_cut_short() -> None:
    search = searching()
    assert step(search, {"a": [0.5, 0.1, 0.4]}) == {"a": [2, 1]}
    stopped, cut = search.results("cancelled")
    assert (stopped.token_ids, stopped.finish_reason) == ([STOP], "stop")
    assert (cut.token_ids, cut.finish_reason) == ([2], "cancelled")


def test_given_nothing_was_computed_then_there_is_an_empty_result() -> None:
    (empty,) = searching().results("cancelled")
    assert (empty.token_ids, empty.score, empty.finish_reason) == ([], 0.0, "cancelled")


def test_given_results_that_no_beam_can_beat_then_nobody_goes_on() -> None:
    search = searching()
    assert step(search, {"a": [0.5, 0.1, 0.4]}) == {"a": [2, 1]}
    search.forked("a", ["b"])  # type: ignore[arg-type, list-item]
    assert step(search, {"a": [0.9, 0.05, 0.05], "b": [0.2, 0.4, 0.4]}) == {"a": [], "b": []}
    assert [sample.token_ids for sample in search.results("stop")] == [[STOP], [2, STOP]]


def lone(num_beams: int = 2, n: int = 1, max_new_tokens: int = 9, **options: Any) -> BeamSearch:
    params = SamplingParams(num_beams=num_beams, n=n, max_new_tokens=max_new_tokens, **options)
    return BeamSearch(params, Request("r", [1], max_new_tokens, stop_token_ids=[STOP]))


def test_given_a_stop_below_the_best_continuations_then_it_is_no_result() -> None:
    search = searching()
    assert step(search, {"a": [0.1, 0.5, 0.4]}) == {"a": [1, 2]}
    assert [sample.finish_reason for sample in search.results("cancelled")] == ["cancelled", "cancelled"]


def test_given_a_stop_just_among_the_best_continuations_then_it_is_a_result() -> None:
    search = searching()
    assert step(search, {"a": [0.3, 0.5, 0.2]}) == {"a": [1, 2]}
    assert [sample.finish_reason for sample in search.results("cancelled")] == ["stop", "cancelled"]


def test_given_the_last_token_then_the_best_are_results_by_length_and_nobody_goes_on() -> None:
    search = lone(n=2, max_new_tokens=1, length_penalty=0.0)
    assert step(search, {"a": [0.1, 0.2, 0.7]}) == {"a": []}
    best, other = search.results("length")
    assert ([best.token_ids, other.token_ids], best.finish_reason, other.finish_reason) == (
        [[2], [1]],
        "length",
        "length",
    )
    assert (best.index, other.index) == (0, 1)


@pytest.mark.parametrize(("early_stopping", "goes_on"), [(True, []), (False, [2])])
def test_given_as_many_results_as_beams_then_only_early_stopping_ends_a_search_that_could_improve(
    early_stopping: bool, goes_on: list[int]
) -> None:
    search = BeamSearch(
        SamplingParams(num_beams=2, length_penalty=0.0, early_stopping=early_stopping),
        Request("r", [1], 9, stop_token_ids=[STOP, 1]),
    )
    assert step(search, {"a": [0.3, 0.3, 0.4]})["a"][:1] == [2]
    search.forked("a", [])  # type: ignore[arg-type]
    # one result of 0.3 so far; a second one of 0.02 is worse than the beam that goes on with 0.36
    assert step(search, {"a": [0.05, 0.04, 0.91]})["a"] == goes_on


def test_given_a_beam_that_can_still_beat_the_worst_result_then_it_goes_on() -> None:
    search = lone(n=2, length_penalty=0.0)
    assert step(search, {"a": [0.6, 0.1, 0.3]})["a"] == [2, 1]  # a result of 0.6
    search.forked("a", [])  # type: ignore[arg-type]
    assert step(search, {"a": [0.4, 0.1, 0.5]})["a"] == [2, 1]  # one of 0.12 and a beam of 0.15
    search.forked("a", [])  # type: ignore[arg-type]
    assert step(search, {"a": [0.1, 0.5, 0.4]})["a"] == []  # the beams have 0.075 and 0.06


@pytest.mark.parametrize(("length_penalty", "score"), [(0.0, -2.0), (1.0, -1.0), (2.0, -0.5), (-1.0, -4.0)])
def test_given_a_length_penalty_then_a_result_scores_its_sum_over_a_power_of_its_length(
    length_penalty: float, score: float
) -> None:
    search = lone(length_penalty=length_penalty)
    assert search._penalised(-2.0, 2) == pytest.approx(score)
    assert search._penalised(-2.0, 0) == search._penalised(-2.0, 1) == -2.0


def test_given_results_then_the_worst_give_way_and_no_more_are_kept_than_there_are_beams() -> None:
    search = lone(n=2, length_penalty=0.0)
    for score, token in ((-3.0, 5), (-1.0, 6), (-2.0, 7), (-9.0, 8)):
        search._keep(_Hypothesis(score, (token,), "stop"))
    assert [(sample.token_ids, sample.score) for sample in search.results("stop")] == [([6], -1.0), ([7], -2.0)]


def test_given_more_stop_tokens_than_one_then_enough_continuations_are_ranked_to_fill_all_beams() -> None:
    stops = [0, 1, 2]
    search = BeamSearch(SamplingParams(num_beams=2), Request("r", [1], 9, stop_token_ids=stops))
    logits = torch.tensor([[0.2, 0.15, 0.12, 0.4, 0.1, 0.03]]).log()
    ranking = search.rank(["a"], logits)  # type: ignore[list-item]
    assert len(ranking.tokens) == 6  # (1 + 3) * 2, but the vocabulary has 6
    search.advance(ranking)
    assert search.continuations("a").tolist() == [3, 4]  # type: ignore[arg-type]
    for stops, ranked in (([], [3, 0]), ([0], [3, 0, 1, 2]), ([0, 1], [3, 0, 1, 2, 4, 5])):
        search = BeamSearch(SamplingParams(num_beams=2), Request("r", [1], 9, stop_token_ids=stops))
        assert search.rank(["a"], logits).tokens.tolist() == ranked  # type: ignore[list-item]
