"""SamplingParams refuses what means nothing, by name."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from kvpool.engine.params import SamplingParams
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
        ({"early_stopping": "never"}, "early_stopping"),
        ({"stop_token_ids": [-2]}, "stop_token_ids"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"num_beams": 4, "temperature": 1.0}, "num_beams"),
        ({"num_beams": 2, "n": 3}, "num_beams"),
    ],
)
def test_given_a_meaningless_value_then_the_error_names_it(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        SamplingParams(**fields)


def test_given_the_most_logprobs_then_they_are_allowed() -> None:
    assert SamplingParams(logprobs=100).logprobs == 100


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
