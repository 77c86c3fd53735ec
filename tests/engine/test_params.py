"""SamplingParams refuses what means nothing, by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.engine.params import SamplingParams
from kvpool.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -3}, "top_k"),
        ({"min_p": "x"}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"n": 0}, "n must"),
        ({"seed": -1}, "seed"),
        ({"logprobs": 1000}, "logprobs"),
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


def test_given_one_stop_string_then_it_is_one_string_and_not_its_letters() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


def test_given_defaults_then_decoding_is_greedy_and_unfiltered() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert not params.is_filtered
    assert not params.has_penalties
