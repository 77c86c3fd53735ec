"""What the address of a tier may say."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.tiers.options import TierURL, read_options
from kvpool.tiers.remote.redis_node import RedisOptions


def namespace_of(text: str) -> str:
    return str(read_options(RedisOptions, TierURL.parse(f"redis://host?namespace={quote(text)}"))["namespace"])


@pytest.mark.parametrize("text", ["a", "team-7_of.Them", "x" * 64])
def test_given_a_namespace_of_letters_digits_and_a_few_signs_then_it_is_taken(text: str) -> None:
    assert namespace_of(text) == text


@pytest.mark.parametrize("text", ["", "x" * 65, "a b", "a:b", "a/b", "*", "é"])
def test_given_a_namespace_that_could_reach_the_keys_of_others_then_it_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"of redis://host must be 1 to 64 letters, digits"):
        namespace_of(text)
