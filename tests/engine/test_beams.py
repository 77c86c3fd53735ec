"""Which continuations a beam search goes on with, step by step, and what it has when it is cut short."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvpool.engine.beams import BeamSearch  # noqa: E402
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
