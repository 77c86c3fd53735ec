"""Beam search over requests of one token: the results of transformers, and which beams go on step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, beam_search  # noqa: E402
from kvpool.engine.beams import Beam, BeamSearch  # noqa: E402
from kvpool.errors import InvalidArgumentError  # noqa: E402

STOP = 0


def searching(
    width: int = 2, stops: Any = (STOP,), most: int = 9, penalty: float = 0.0, early: bool = False
) -> BeamSearch:
    return BeamSearch(width, frozenset(stops), most, penalty, early)


def step(search: BeamSearch, *probabilities: list[float]) -> list[tuple[int, ...]]:
    """One step: the probability of each token behind each running beam; returns what the beams are then."""
    ranked = [sorted(enumerate(map(math.log, of_beam)), key=lambda pair: -pair[1]) for of_beam in probabilities]
    search.advance([likeliest[: search.num_ranked] for likeliest in ranked])
    return [beam.tokens for beam in search.running]


def test_given_several_beams_then_the_best_continuations_of_all_go_on() -> None:
    search = searching()
    assert step(search, [0.1, 0.2, 0.7]) == [(2,), (1,)]
    assert step(search, [0.1, 0.6, 0.3], [0.1, 0.1, 0.8]) == [(2, 1), (2, 2)]
    assert [beam.score for beam in search.running] == pytest.approx([math.log(0.7 * 0.6), math.log(0.7 * 0.3)])


def test_given_results_that_no_beam_can_beat_then_nobody_goes_on() -> None:
    search = searching()
    assert step(search, [0.5, 0.1, 0.4]) == [(2,), (1,)]
    assert step(search, [0.9, 0.05, 0.05], [0.2, 0.4, 0.4]) == []
    assert [beam.token_ids for beam in search.results] == [(STOP,), (2, STOP)]


@pytest.mark.parametrize(("probabilities", "results"), [([0.1, 0.5, 0.4], []), ([0.3, 0.5, 0.2], [(STOP,)])])
def test_given_a_stop_then_it_is_a_result_if_it_is_among_the_best_continuations(
    probabilities: list[float], results: list[tuple[int, ...]]
) -> None:
    search = searching()
    assert step(search, probabilities) == [(1,), (2,)]
    assert [beam.token_ids for beam in search.results] == results


def test_given_the_last_token_then_the_best_are_results_by_length_and_nobody_goes_on() -> None:
    search = searching(most=1)
    assert step(search, [0.1, 0.2, 0.7]) == []
    assert [(beam.token_ids, beam.finish_reason) for beam in search.results] == [((2,), "length"), ((1,), "length")]


@pytest.mark.parametrize(("early", "goes_on"), [(True, []), (False, [(2, 2)])])
def test_given_as_many_results_as_beams_then_only_early_stopping_ends_a_search_that_could_improve(
    early: bool, goes_on: list[tuple[int, ...]]
) -> None:
    search = searching(stops=(STOP, 1), early=early)
    assert step(search, [0.3, 0.3, 0.4])[0] == (2,)
    # one result of 0.3 so far; a second one of 0.02 is worse than the beam that goes on with 0.36
    assert step(search, [0.05, 0.04, 0.91]) == goes_on


def test_given_a_beam_that_can_still_beat_the_worst_result_then_it_goes_on() -> None:
    search = searching()
    assert step(search, [0.6, 0.1, 0.3]) == [(2,), (1,)]  # a result of 0.6
    search.running = search.running[:1]
    assert step(search, [0.4, 0.1, 0.5]) == [(2, 2), (2, 1)]  # one of 0.12 and a beam of 0.15
    search.running = search.running[:1]
    assert step(search, [0.1, 0.5, 0.4]) == []  # the beams have 0.075 and 0.06


@pytest.mark.parametrize(("penalty", "score"), [(0.0, -2.0), (1.0, -1.0), (2.0, -0.5), (-1.0, -4.0)])
def test_given_a_length_penalty_then_a_result_scores_its_sum_over_a_power_of_its_length(
    penalty: float, score: float
) -> None:
    search = searching(width=1, most=2, penalty=penalty)
    step(search, [0.1, math.exp(-1.0)])
    step(search, [0.1, math.exp(-1.0)])
    assert search.results[0].score == pytest.approx(score)


def test_given_results_then_the_worst_give_way_and_no_more_are_kept_than_there_are_beams() -> None:
    search = searching()
    for score, token in ((-3.0, 5), (-1.0, 6), (-2.0, 7), (-9.0, 8)):
        search._keep(Beam(score, (token,), "stop"))
    assert [beam.score for beam in search.results] == [-1.0, -2.0]


def test_given_more_stop_tokens_than_one_then_enough_continuations_are_ranked_to_fill_all_beams() -> None:
    search = searching(stops=(0, 1, 2))
    assert search.num_ranked == 8
    assert step(search, [0.2, 0.15, 0.12, 0.4, 0.1, 0.03]) == [(3,), (4,)]


@pytest.mark.quick("2-1.0-False", "4-0.0-True", "4-2.0-False")
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("width", [2, 4])
def test_given_a_model_then_the_results_are_those_of_transformers(
    width: int, length_penalty: float, early_stopping: bool
) -> None:
    model = tiny_model("llama", spread=3.0)
    for seed in range(4):
        prompt = random_prompt(11, seed=seed).tolist()
        ids = torch.tensor([prompt])
        options: dict[str, Any] = dict(length_penalty=length_penalty, early_stopping=early_stopping, max_new_tokens=12)
        # a token that is likely, so that beams end
        eos = int(model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)[0, -1])
        want = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=2,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        with Engine(tiny_model("llama", spread=3.0), kv_blocks=64, block_size=4) as engine:
            best = beam_search(engine, prompt, width, stop_token_ids=[eos], ignore_eos=True, **options)
            engine.manager.check()
            assert engine.stats().cache.num_sequences == 0
        assert len(best) == width
        for beam, sequence, score in zip(best, want.sequences, want.sequences_scores, strict=False):
            text = sequence[len(prompt) :].tolist()
            assert list(beam.token_ids) == (text[: text.index(eos) + 1] if eos in text else text)[: len(beam.token_ids)]
            assert beam.score == pytest.approx(float(score), abs=1e-4)
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] == eos else "length")


def test_each_beam_finds_the_full_blocks_of_its_prompt() -> None:
    with Engine(tiny_model("llama"), kv_blocks=64, block_size=4) as engine:
        beam_search(engine, random_prompt(40).tolist(), 3, max_new_tokens=8, ignore_eos=True)
        computed = engine.stats().scheduler.prefill_tokens
    assert computed <= 40 + 7 * 3 * 4  # at most a block for each beam and step


def test_sampling_defaults_of_the_model_change_nothing() -> None:
    prompt = random_prompt(9).tolist()
    lively = tiny_model("llama")
    lively.generation_config.update(do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.5)
    found = []
    for model in (tiny_model("llama"), lively):
        with Engine(model, kv_blocks=64) as engine:
            found.append(beam_search(engine, prompt, 2, max_new_tokens=6, ignore_eos=True))
    assert found[0] == found[1]


def test_a_search_ends_where_the_context_does() -> None:
    with Engine(tiny_model("llama"), kv_blocks=128) as engine:
        best = beam_search(engine, random_prompt(510).tolist(), 2, max_new_tokens=99, ignore_eos=True)
    assert [len(beam.token_ids) for beam in best] == [3, 3]


@pytest.mark.parametrize(
    ("width", "options", "error"),
    [
        (0, {}, "width"),
        (51, {"stop_token_ids": [7]}, "width"),
        (2, {"max_new_tokens": 0}, "max_new_tokens"),
        (2, {"length_penalty": "long"}, "length_penalty"),
        (2, {"early_stopping": "never"}, "early_stopping"),
    ],
)
def test_a_wrong_argument_is_named(width: int, options: dict[str, Any], error: str) -> None:
    with Engine(tiny_model("llama"), kv_blocks=32) as engine, pytest.raises(InvalidArgumentError, match=error):
        beam_search(engine, [5, 6], width, ignore_eos=True, **options)


def test_beams_of_a_request_are_refused_with_the_remedy() -> None:
    with Engine(tiny_model("llama"), kv_blocks=32) as engine, pytest.raises(InvalidArgumentError, match="beam_search"):
        engine.submit([5, 6], num_beams=4)
