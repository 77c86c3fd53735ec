from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import as_array, as_token_array, largest, smallest, within


@pytest.mark.parametrize(
    "tokens",
    [
        [0],
        [2**31 - 1, 0],
        (3, 1, 2),
        np.array([0, 2**31 - 1], np.int32),
        np.array([0, 2**31 - 1], np.int64),
        np.array([0, 2**31 - 1], np.uint32),
        np.array([0, 2**31 - 1], np.uint64),
        np.array([0, 127], np.int8),
        np.array([0, 255], np.uint8),
        np.arange(8, dtype=np.int32)[::2],
        np.arange(8, dtype=np.int64)[::-1],
        [],
        np.empty(0, np.float64),
        np.empty(0, np.int32),
    ],
)
def test_every_row_of_token_ids_becomes_contiguous_int32(tokens: Any) -> None:
    array = as_token_array(tokens)
    assert (array.dtype, array.tolist()) == (np.int32, list(tokens))
    assert array.flags.c_contiguous


def test_an_int32_row_is_not_copied() -> None:
    row = np.array([3, 0, 5], np.int32)
    assert as_token_array(row) is row


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([2**31], "ids holds 2147483648; token ids must be below"),
        (np.array([1, 2**31], np.uint32), "holds 2147483648"),
        (np.array([2**63], np.uint64), "holds 9223372036854775808"),
        ([5, -1], "ids holds -1; token ids cannot be negative"),
        (np.array([0, -1], np.int32), "holds -1"),
        (np.array([0, -128], np.int8), "holds -128"),
        (np.ones((2, 2), np.int32), "one-dimensional"),
        (np.ones((2, 0), np.int32), "one-dimensional"),
        (np.int32(3), "one-dimensional"),
        ([[1], [2, 3]], "not a rectangular array"),
        ([1.0], "must hold integers"),
        ([True], "must hold integers"),
        (["a"], "must hold integers"),
    ],
)
def test_what_is_no_row_of_token_ids_is_refused_by_name(tokens: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        as_token_array(tokens, "ids")


def test_what_numpy_refuses_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"lengths=.* is not a rectangular array"):
        as_array([[1], [2, 3]], "lengths")


@pytest.mark.parametrize(
    ("counts", "expected"), [([], []), ([0], []), ([3], [0, 1, 2]), ([2, 0, 1, 3], [0, 1, 0, 0, 1, 2])]
)
def test_places_are_counted_inside_each_run(counts: list[int], expected: list[int]) -> None:
    assert within(np.array(counts, np.int64)).tolist() == expected


def test_the_least_and_the_greatest_of_an_array() -> None:
    array = np.array([4, -2, 9, 0])
    assert (smallest(array), largest(array)) == (-2, 9)
