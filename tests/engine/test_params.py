"""SamplingParams refuses what means nothing, by name."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from kvpool.engine.params import SamplingParams, described
from kvpool.errors import InvalidArgumentError


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("I say nothing")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"stop": np.array(3)}, "stop"),
        ({"top_k": [10**5000]}, "top_k"),
        ({"max_new_tokens": Mute()}, "max_new_tokens must be an int, got a Mute that cannot be shown"),
        ({"stop_token_ids": np.array(3)}, "stop_token_ids"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -3}, "top_k"),
        ({"min_p": "x"}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"n": 0}, "n must"),
        ({"seed": -1}, "seed"),
        ({"logprobs": 101}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop": None}, "stop"),
        ({"stop_token_ids": 2}, "stop_token_ids"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"stop_token_ids": [-2]}, "stop_token_ids"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens=5 is more than max_new_tokens=4"),
    ],
)
def test_given_a_meaningless_value_then_the_error_names_it(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        SamplingParams(**fields)


BOUNDS: list[tuple[str, Any, Any]] = [
    ("max_new_tokens", 1, 2**31),
    ("top_k", 0, 2**31),
    ("n", 1, 2**16),
    ("seed", 0, 2**63 - 1),
    ("logprobs", 0, 100),
    ("prompt_logprobs", 0, 100),
    ("temperature", 0.0, 100.0),
    ("top_p", 5e-324, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 5e-324, 100.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
]


def next_after(value: Any, sign: int) -> Any:
    return value + sign if isinstance(value, int) else float(np.nextafter(value, sign * np.inf))


@pytest.mark.parametrize(("name", "lowest", "highest"), BOUNDS)
def test_given_a_bound_then_it_is_allowed_and_what_lies_beyond_it_is_not(name: str, lowest: Any, highest: Any) -> None:
    for bound, sign in ((lowest, -1), (highest, 1)):
        assert getattr(SamplingParams(**{name: bound}), name) == bound
        with pytest.raises(InvalidArgumentError, match=name):
            SamplingParams(**{name: next_after(bound, sign)})


def test_given_tokens_and_biases_at_their_bounds_then_they_are_allowed_and_what_lies_beyond_is_not() -> None:
    last = 2**31 - 1
    params = SamplingParams(stop_token_ids=[0, last], logit_bias={0: -1e4, last: 1e4})
    assert (params.stop_token_ids, params.logit_bias) == ({0, last}, {0: -1e4, last: 1e4})
    for fields in ({"stop_token_ids": [last + 1]}, {"logit_bias": {last + 1: 0.0}}, {"logit_bias": {-1: 0.0}}):
        with pytest.raises(InvalidArgumentError):
            SamplingParams(**fields)
    for sign in (-1, 1):
        with pytest.raises(InvalidArgumentError):
            SamplingParams(logit_bias={0: next_after(sign * 1e4, sign)})


def test_given_stop_strings_then_sixty_four_are_allowed_and_no_more() -> None:
    assert len(SamplingParams(stop=["."] * 64).stop) == 64  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="up to 64"):
        SamplingParams(stop=["."] * 65)


@pytest.mark.parametrize(
    ("fields", "filtered", "penalised"),
    [
        ({"top_k": 1}, True, False),
        ({"top_p": 0.5}, True, False),
        ({"min_p": 0.1}, True, False),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}, False, False),
        ({"repetition_penalty": 1.1}, False, True),
        ({"presence_penalty": -0.1}, False, True),
        ({"frequency_penalty": 0.1}, False, True),
    ],
)
def test_given_one_filter_or_penalty_then_the_params_say_so(
    fields: dict[str, Any], filtered: bool, penalised: bool
) -> None:
    params = SamplingParams(**fields)
    assert (params.is_filtered, params.has_penalties) == (filtered, penalised)


class AnyText:
    """A grammar that allows everything."""

    def start(self) -> Any: ...


def test_given_what_is_no_grammar_then_it_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="grammar"):
        SamplingParams(grammar="json")  # type: ignore[arg-type]


def test_given_a_grammar_then_it_alone_says_where_the_text_ends() -> None:
    with pytest.raises(InvalidArgumentError, match="leave min_new_tokens at 0"):
        SamplingParams(grammar=AnyText(), min_new_tokens=1)


def test_given_defaults_of_a_model_then_they_fill_what_was_left_open() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20)
    assert SamplingParams(top_k=0).with_defaults(defaults) == SamplingParams(temperature=0.6, top_k=0)


def test_given_params_then_their_description_names_what_is_set() -> None:
    assert described(SamplingParams()) == "greedy"
    assert described(SamplingParams(top_k=3, repetition_penalty=1.5)) == "top_k 3, repetition_penalty 1.5"


def test_given_one_stop_string_then_it_is_one_string_and_not_its_letters() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_given_defaults_then_decoding_is_greedy_and_unfiltered() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert not params.is_filtered
    assert not params.has_penalties


def test_given_params_then_they_travel_to_other_processes_and_serve_as_keys() -> None:
    params = SamplingParams(temperature=0.5, stop="end", stop_token_ids=[3], logit_bias={1: 2.0})
    for same in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), SamplingParams(**asdict(params))):
        assert same == params
        assert hash(same) == hash(params)
    assert {params: 1}[copy.copy(params)] == 1


def test_given_a_bias_that_its_owner_changes_later_then_the_params_keep_theirs() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 3.0
    assert params.logit_bias == {1: 2.0}
