"""What the address of a tier may say."""

from __future__ import annotations

import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.tiers.url import TierURL, check_namespace


@pytest.mark.parametrize("text", ["a", "team-7_of.Them", "x" * 64])
def test_given_a_namespace_of_letters_digits_and_a_few_signs_then_it_is_taken(text: str) -> None:
    assert check_namespace(text, TierURL.parse("redis://host")) == text


@pytest.mark.parametrize("text", ["", "x" * 65, "a b", "a:b", "a/b", "*", "é"])
def test_given_a_namespace_that_could_reach_the_keys_of_others_then_it_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"of redis://host must be 1 to 64 letters, digits"):
        check_namespace(text, TierURL.parse("redis://host"))
