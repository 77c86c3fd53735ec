"""What the address of a tier may say."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.tiers.options import MAX_BYTES, TierURL, read_options, size
from kvpool.tiers.remote.redis_node import RedisOptions, _milliseconds


def namespace_of(text: str) -> str:
    return str(read_options(RedisOptions, TierURL.parse(f"redis://host?namespace={quote(text)}"))["namespace"])


def test_given_limits_then_the_rule_of_a_size_names_those_that_are_not_obvious() -> None:
    rules = [size(0).rule, size(1).rule, size(2).rule, size(0, 9).rule, size(1, 5000).rule]
    assert rules == [
        'must be a size, as 0 or "8GB"',
        'must be a size above 0, as 1048576 or "50GB"',
        f"must be 2 to {MAX_BYTES:,} bytes",
        "must be 0 to 9 bytes",
        "must be 1 to 5,000 bytes",
    ]


@pytest.mark.parametrize("text", ["a", "team-7_of.Them", "x" * 64])
def test_given_a_namespace_of_letters_digits_and_a_few_signs_then_it_is_taken(text: str) -> None:
    assert namespace_of(text) == text


@pytest.mark.parametrize("text", ["", "x" * 65, "a b", "a:b", "a/b", "*", "é"])
def test_given_a_namespace_that_could_reach_the_keys_of_others_then_it_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"of redis://host must be 1 to 64 letters, digits"):
        namespace_of(text)


def test_given_a_number_of_connections_then_it_is_from_one_to_sixteen() -> None:
    def read(number: int) -> object:
        return read_options(RedisOptions, TierURL.parse(f"redis://host?connections={number}"))["connections"]

    assert [read(1), read(16)] == [1, 16]
    for wrong in (0, 17):
        with pytest.raises(InvalidArgumentError, match="from 1 to 16"):
            read(wrong)


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0, 1), (0.0001, 1), (1.5, 1500), (3600.0, 3_600_000), (1e12, 2**31 - 1)]
)
def test_given_a_time_for_redis_then_it_is_told_in_milliseconds_within_what_it_takes(seconds: float, told: int) -> None:
    assert _milliseconds(seconds) == told
