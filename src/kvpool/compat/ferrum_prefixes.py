"""Prefixes that were stored by name, least recently used first: ferrum's limit on their number, and what they hold."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np

from kvpool.config.layers import check_int
from kvpool.errors import InvalidArgumentError
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array


class StoredPrefixes:
    """The tokens of stored prefixes. Their blocks belong to the manager's cache, which may evict them earlier."""

    def __init__(self, manager: KVCacheManager, max_prefixes: int | None, min_length: int) -> None:
        if max_prefixes is not None:
            check_int("max_prefixes", max_prefixes, 1, 2**31)
        check_int("min_prefix_length", min_length, 0, 2**31)
        self.manager = manager
        self.max_prefixes = max_prefixes
        self.min_length = min_length
        self._tokens: OrderedDict[bytes, Int32Array] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def add(self, tokens: Int32Array) -> None:
        """Notes a stored prefix as the one used last; the one not used for longest gives way."""
        key = tokens.tobytes()
        if key not in self._tokens:
            self._tokens[key] = tokens.copy()
            self._lengths[len(tokens)] += 1
        self._tokens.move_to_end(key)
        if self.max_prefixes is not None and len(self._tokens) > self.max_prefixes:
            self._forget_oldest()

    def touch(self, tokens: Int32Array) -> None:
        """A prompt was looked up: the stored prefixes that it starts with count as used now."""
        for length in sorted(self._lengths):
            key = tokens[:length].tobytes()
            if key in self._tokens:
                self._tokens.move_to_end(key)

    def evict(self, count: int) -> int:
        """Forgets the prefixes that were not used for longest, with the blocks that no other stored prefix starts with.

        Those that the cache had no room for any more do not count.
        """
        evicted = 0
        while evicted < count and self._tokens:
            evicted += self._forget_oldest()
        return evicted

    def _forget_oldest(self) -> bool:
        """Whether anything of it was still cached."""
        tokens = self._tokens.popitem(last=False)[1]
        self._lengths -= Counter([len(tokens)])
        was_cached = self._cached_length(tokens) > 0
        self._drop_blocks(tokens)
        return was_cached

    def _drop_blocks(self, tokens: Int32Array) -> None:
        size = self.manager.config.block_size
        shared = max((_common_blocks(tokens, other, size) for other in self._tokens.values()), default=0)
        if shared < len(tokens) // size:
            self.manager.invalidate(tokens[: (shared + 1) * size])

    def clear(self) -> None:
        self._tokens.clear()
        self._lengths.clear()

    def cached_lengths(self) -> list[int]:
        """How many tokens of every stored prefix are in the cache now, also while requests use them; none are left out."""
        return [self._cached_length(tokens) for tokens in self._tokens.values()]

    def _cached_length(self, tokens: Int32Array) -> int:
        longer = np.append(tokens, np.int32(0))  # of a prompt's own last token nothing is reused
        return min(len(tokens), self.manager.match_prefix(longer).num_tokens)


def _common_blocks(left: Int32Array, right: Int32Array, size: int) -> int:
    """Whole blocks that two token runs begin with alike."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return (int(differs.argmax()) if differs.any() else length) // size


def check_evict_count(count: int) -> int:
    return check_int("count", count, 0, 2**31, InvalidArgumentError)
