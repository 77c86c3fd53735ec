"""Symbols: what rows and the tree hold in place of the placeholder tokens of multimodal items.

The placeholders of two images are the same token id, and yet their keys and values differ. So each is replaced by a negative
number, which no token has, and everything that compares tokens compares the images too: matching, splitting, publishing.
Equal symbols mean equal placeholders, never only equal hashes. The first placeholder of an item has a symbol of its own, so
that two copies of an image, one behind the other, are not taken for a longer one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvpool.checks import as_count, show
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import BoolArray, Int32Array
from kvpool.scope import MultimodalItem

Key: TypeAlias = str | bytes | int

NUM_NUMBERS = 2**30  # two symbols for each: -1 - 2n begins an item, -2 - 2n goes on with one
MIN_LIMIT = 1024  # placeholders that are kept without asking who still uses them


class Placeholder(NamedTuple):
    """A token that stands for a part of an item: `key` and `length` are those of the item."""

    key: Key
    length: int
    token: int


Fresh: TypeAlias = dict[int, Placeholder]  # numbers that were chosen and not kept yet


class Symbols:
    """Placeholders by number. `encode` only looks; what it found new is noted with `keep` once an operation succeeds.

    A number is the hash of its placeholder, or one of the next if that is taken. So what was forgotten and comes back has,
    but for such collisions, the number it had: policies that remember evicted runs recognise it.
    """

    def __init__(self, num_numbers: int = NUM_NUMBERS, min_limit: int = MIN_LIMIT) -> None:
        self.placeholders: dict[int, Placeholder] = {}
        self._numbers: dict[Placeholder, int] = {}
        self._num_numbers = num_numbers
        self._min_limit = min_limit
        self._limit = min_limit  # of placeholders, before the unused ones are forgotten

    def encode(self, tokens: Int32Array, items: Iterable[MultimodalItem]) -> tuple[Int32Array, Fresh]:
        """The tokens of a prompt with symbols at the places of its items (a copy), and the numbers that are new."""
        encoded, fresh = tokens.copy(), Fresh()
        for position, length, key in items:
            part = slice(position, position + length)
            encoded[part] = self.inside(tokens[part], key, length, fresh)
            encoded[position] += 1
        return encoded, fresh

    def inside(self, tokens: Int32Array, key: Key, length: int, fresh: Fresh) -> Int32Array:
        """The symbols of placeholders that are not the first of their item."""
        distinct, places = np.unique(tokens, return_inverse=True)
        numbers = [self._number(Placeholder(key, length, token), fresh) for token in distinct.tolist()]
        symbols: Int32Array = -2 - 2 * np.array(numbers, np.int32)[places]
        return symbols

    def _number(self, placeholder: Placeholder, fresh: Fresh) -> int:
        number = self._numbers.get(placeholder)
        if number is None:
            number = hashed(placeholder) % self._num_numbers
            while number in self.placeholders or fresh.get(number, placeholder) != placeholder:
                number = (number + 1) % self._num_numbers
            fresh[number] = placeholder
        return number

    def keep(self, fresh: Fresh) -> bool:
        """Notes new numbers: they are in use now. Returns whether it is time to forget those that are not."""
        self.placeholders.update(fresh)
        self._numbers.update((placeholder, number) for number, placeholder in fresh.items())
        return len(self.placeholders) > self._limit

    def forget_all_but(self, used: set[int]) -> None:
        """Forgets numbers that no row and no cached block has; twice as many as are left may come before the next time."""
        self.placeholders = {number: self.placeholders[number] for number in used}
        self._numbers = {placeholder: number for number, placeholder in self.placeholders.items()}
        self._limit = max(self._min_limit, 2 * len(used))

    def placeholder(self, symbol: int) -> Placeholder:
        """What a symbol stands for."""
        return self.placeholders[(-1 - symbol) >> 1]

    def decode(self, ids: Int32Array) -> Int32Array:
        """The caller's own token ids; the same array where nothing stands for anything else."""
        if not self.placeholders:
            return ids
        encoded = ids < 0
        if not encoded.any():
            return ids
        distinct, places = np.unique(ids[encoded], return_inverse=True)
        decoded = ids.copy()
        decoded[encoded] = np.array([self.placeholder(symbol).token for symbol in distinct.tolist()], np.int32)[places]
        return decoded

    def items(self, ids: Int32Array, start: int = 0) -> list[MultimodalItem]:
        """The items that begin among `ids`, of which the first is at position `start`."""
        found = []
        for index in np.flatnonzero(is_first(ids)).tolist():
            placeholder = self.placeholder(int(ids[index]))
            found.append(MultimodalItem(start + index, placeholder.length, placeholder.key))
        return found

    def num_missing(self, ids: Int32Array) -> int:
        """How many placeholders the last item of `ids` still lacks; they end with one, and reach back to its first."""
        begins = np.flatnonzero(is_first(ids))
        return self.placeholder(int(ids[-1])).length - (len(ids) - int(begins[-1]))


def is_first(ids: Int32Array) -> BoolArray:
    """Where an item begins."""
    begins: BoolArray = (ids < 0) & (ids & 1 != 0)
    return begins


def numbers_in(ids: Int32Array) -> set[int]:
    """The numbers of all symbols among these ids."""
    return set(np.unique((-1 - ids[ids < 0]) >> 1).tolist())


def encoded_key(key: Key) -> bytes:
    """A key as bytes; keys of different types have different ones."""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")  # every Python string has an encoding, and no two share one
    if isinstance(key, bytes):
        return b"b" + key
    return b"i" + key.to_bytes(key.bit_length() // 8 + 1, "little", signed=True)


def hashed(placeholder: Placeholder) -> int:
    """A number for a placeholder, the same in every process."""
    message = b"%d %d " % (placeholder.length, placeholder.token) + encoded_key(placeholder.key)
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")


def as_items(multimodal: Any, tokens: Int32Array | None, may_be_cut: bool = False) -> tuple[MultimodalItem, ...]:
    """The multimodal items behind placeholders among `tokens`, checked and in order of their positions.

    With `may_be_cut` the tokens may end inside the last one.

    >>> as_items([(3, 4, "cat"), (0, 2, "dog")], np.arange(8, dtype=np.int32))
    (MultimodalItem(position=0, length=2, key='dog'), MultimodalItem(position=3, length=4, key='cat'))
    """
    if tokens is None:
        raise InvalidArgumentError("multimodal items need the ids of the tokens that stand for them")
    try:
        given = [tuple(item) for item in multimodal]
    except Exception:  # whatever the object raises when it is asked for its values
        message = f"multimodal takes (position, length, key) for every item, got {show(multimodal)}"
        raise InvalidArgumentError(message) from None
    items = sorted((_as_item(item, len(tokens), may_be_cut) for item in given), key=lambda item: item.position)
    for item, following in pairwise(items):
        if item.position + item.length > following.position:
            raise InvalidArgumentError(f"multimodal items overlap: {show(item)} and {show(following)}")
    return tuple(items)


def _as_item(item: tuple[Any, ...], num_tokens: int, may_be_cut: bool) -> MultimodalItem:
    if len(item) != 3:
        raise InvalidArgumentError(f"a multimodal item is (position, length, key), got {show(item)}")
    position = as_count(item[0], "the position of a multimodal item")
    length = as_count(item[1], "the length of a multimodal item", minimum=1)
    if position + (1 if may_be_cut else length) > num_tokens:
        raise InvalidArgumentError(
            f"a multimodal item takes tokens {position} to {position + length - 1}, but there are only {num_tokens}"
        )
    return MultimodalItem(position, length, _as_key(item[2]))


def _as_key(key: Any) -> Key:
    """A key of a plain type."""
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, (bytes, bytearray)):
        return bytes(key)
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return int(key)
    raise InvalidArgumentError(f"the key of a multimodal item must be a string, bytes or an int, got {show(key)}")
