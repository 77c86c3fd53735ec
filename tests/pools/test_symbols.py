"""Symbols: placeholders of items are told apart exactly, and those that nobody uses are forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import Int32Array
from kvpool.pools.symbols import Symbols, as_items, encoded_key, is_first, numbers_in


def ids(*tokens: int) -> Int32Array:
    return np.array(tokens, np.int32)


def kept(symbols: Symbols, tokens: Int32Array, *items: Any) -> Int32Array:
    encoded, fresh = symbols.encode(tokens, as_items(items, tokens))
    symbols.keep(fresh)
    return encoded


def test_text_stays_and_placeholders_become_negative() -> None:
    encoded = kept(Symbols(), ids(5, 9, 9, 9, 6), (1, 3, "cat"))
    assert encoded[[0, 4]].tolist() == [5, 6]
    assert (encoded[1:4] < 0).all()
    assert is_first(encoded).tolist() == [False, True, False, False, False]


def test_decoding_gives_the_callers_ids_back_also_of_items_with_several() -> None:
    symbols, tokens = Symbols(), ids(5, 9, 9, 8, 9, 9, 7, 3)
    encoded = kept(symbols, tokens, (1, 3, "cat"), (4, 3, b"dog"))
    assert symbols.decode(encoded).tolist() == tokens.tolist()
    assert symbols.decode(encoded[3:6]).tolist() == [8, 9, 9]
    assert symbols.items(encoded, start=10) == [(11, 3, "cat"), (14, 3, b"dog")]


@pytest.mark.parametrize(
    "other",
    [[(0, 4, "dog")], [(0, 4, b"cat")], [(0, 3, "cat")], [(0, 2, "cat"), (2, 2, "cat")], [(1, 3, "cat")], []],
)
def test_given_other_items_then_the_symbols_differ_from_where_they_do(other: list[Any]) -> None:
    symbols, tokens = Symbols(), ids(9, 9, 9, 9)
    cat, others = kept(symbols, tokens, (0, 4, "cat")), kept(symbols, tokens, *other)
    assert cat[0] != others[0]


@pytest.mark.parametrize("key", ["7", b"7", 7, -7, 2**70, "\udc80", ""])
def test_keys_of_different_types_are_different(key: Any) -> None:
    others = [
        other for other in ("7", b"7", 7, -7, 2**70, "\udc80", "") if type(other) is not type(key) or other != key
    ]
    assert encoded_key(key) not in [encoded_key(other) for other in others]
    symbols, tokens = Symbols(), ids(1)
    assert len({int(kept(symbols, tokens, (0, 1, each))[0]) for each in (key, *others)}) == len(others) + 1


def test_given_hashes_that_collide_then_different_items_still_have_different_symbols() -> None:
    symbols, tokens = Symbols(num_numbers=8), ids(1, 1)
    firsts = [int(kept(symbols, tokens, (0, 1, left), (1, 1, left + 1))[0]) for left in range(0, 8, 2)]
    assert len(set(firsts)) == 4
    assert sorted(symbols.placeholders) == list(range(8))
    assert [int(kept(symbols, tokens, (0, 1, left))[0]) for left in range(0, 8, 2)] == firsts


def test_asking_notes_nothing() -> None:
    symbols, tokens = Symbols(), ids(1, 2)
    first, _ = symbols.encode(tokens, as_items([(0, 2, "cat")], tokens))
    again, fresh = symbols.encode(tokens, as_items([(0, 2, "cat")], tokens))
    assert first.tolist() == again.tolist()
    assert len(fresh) == 2
    assert not symbols.placeholders


def test_what_is_forgotten_and_comes_back_has_its_old_symbols() -> None:
    symbols, tokens = Symbols(), ids(1, 1, 1)
    cat, dog = kept(symbols, tokens, (0, 3, "cat")), kept(symbols, tokens, (0, 3, "dog"))
    symbols.forget_all_but(numbers_in(dog))
    assert [placeholder.key for placeholder in symbols.placeholders.values()] == ["dog"]
    assert kept(symbols, tokens, (0, 3, "cat")).tolist() == cat.tolist()
    assert symbols.items(cat) == [(0, 3, "cat")]
    assert symbols.decode(dog).tolist() == [1, 1, 1]


def test_what_the_last_item_lacks_is_counted_from_its_own_beginning() -> None:
    symbols, tokens = Symbols(), ids(5, 1, 1, 1, 1, 1, 1)
    encoded = kept(symbols, tokens, (1, 2, "cat"), (3, 4, "dog"))
    assert [symbols.num_missing(encoded[:stop]) for stop in (2, 3, 4, 6, 7)] == [1, 0, 3, 1, 0]


def test_it_is_time_to_forget_when_there_are_twice_as_many_as_were_in_use() -> None:
    symbols, tokens = Symbols(min_limit=4), ids(1)
    times = [symbols.keep(symbols.encode(tokens, as_items([(0, 1, key)], tokens))[1]) for key in range(5)]
    assert times == [False] * 4 + [True]
    symbols.forget_all_but(set(symbols.placeholders))
    times = [symbols.keep(symbols.encode(tokens, as_items([(0, 1, key)], tokens))[1]) for key in range(5, 11)]
    assert times == [False] * 5 + [True]


def test_items_are_given_in_any_order_and_as_any_sequences() -> None:
    tokens = ids(*range(8))
    items = as_items(iter([[np.int64(4), 2, np.int32(7)], (0, 4, bytearray(b"dog"))]), tokens)
    assert items == ((0, 4, b"dog"), (4, 2, 7))
    assert [type(part) for item in items for part in item] == [int, int, bytes, int, int, int]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([(0, 3, "a"), (2, 1, "b")], "overlap"),
        ([(2, 2, "a"), (2, 2, "a")], "overlap"),
        ([(6, 3, "a")], "tokens 6 to 8, but there are only 8"),
        ([(8, 1, "a")], "only 8"),
        ([(-1, 1, "a")], "position"),
        ([(0, 0, "a")], "length"),
        ([(0, 1.0, "a")], "length"),
        ([(True, 1, "a")], "position"),
        ([(0, 1)], r"\(position, length, key\)"),
        ([5], r"\(position, length, key\)"),
        (5, r"\(position, length, key\)"),
        ([(0, 1, None)], "key"),
        ([(0, 1, 1.5)], "key"),
        ([(0, 1, True)], "key"),
        ([(0, 1, ["a"])], "key"),
        ([(0, 1, ("a",))], "key"),
    ],
)
def test_given_wrong_items_then_they_are_refused_by_name(wrong: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        as_items(wrong, ids(*range(8)))


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, b"\x00"), (127, b"\x7f"), (-128, b"\x80\xff"), (128, b"\x80\x00"), (2**15, b"\0\x80\0")],
)
def test_the_bytes_of_a_number_stay_the_same_for_they_are_part_of_keys_on_disks(number: int, expected: bytes) -> None:
    assert encoded_key(number) == b"i" + expected
