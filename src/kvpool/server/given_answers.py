"""The token ids of answers that were given, so that the next turn of a conversation finds all of them in the cache.

A text that a model wrote may be other tokens than its tokenizer makes of that text, and a chat template may write a call with
other white space than the model did. What follows the first such place would then be computed again.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvpool.pools.arrays import Int32Array

MAX_BYTES = 64 << 20
_OVERHEAD = 512  # bytes of an entry besides its tokens and its text
_DIGEST_BYTES = 16

Same = Callable[[str, str, str], bool]
"""Whether two texts behind a prompt, which is the third argument, are the same answer."""


class AnswerScope(NamedTuple):
    """Whose answers are found: nobody else's."""

    tenant: str
    salt: str
    adapter: str | None


class _Given(NamedTuple):
    """A prompt with its answer, both as token ids, and the answer's text without the mark of its end."""

    tokens: Int32Array
    text: str

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + 4 * len(self.text) + _OVERHEAD


class _Key(NamedTuple):
    """A prompt: the number of its characters, and a hash of them."""

    scope: AnswerScope
    length: int
    digest: bytes


class GivenAnswers:
    """Keeps the newest answers of one model, `max_bytes` of them. Any thread may use it."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[_Key, list[_Given]] = OrderedDict()  # the one that was used last at the end
        self._lengths: dict[AnswerScope, Counter[int]] = {}  # of the prompts that are kept
        self._lock = threading.Lock()

    def keep(self, scope: AnswerScope, prompt: str, tokens: Int32Array, answer: str, written: Sequence[int]) -> None:
        """Keeps what a model wrote behind a prompt, instead of an equal text. Both are given as text and as token ids."""
        given = _Given(np.concatenate([tokens, np.asarray(written, np.int32)]), answer)
        key = _Key(scope, len(prompt), hashlib.blake2b(prompt.encode(), digest_size=_DIGEST_BYTES).digest())
        with self._lock:
            if key not in self._kept:
                self._lengths.setdefault(scope, Counter())[key.length] += 1
            older = self._kept.get(key, [])
            self._kept[key] = [*(each for each in older if each.text != answer), given]
            self._kept.move_to_end(key)
            self._num_bytes += _num_bytes(self._kept[key]) - _num_bytes(older)
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def recall(self, scope: AnswerScope, prompt: str, ends: Sequence[str], same: Same) -> tuple[Int32Array, int] | None:
        """The token ids of the longest beginning of a prompt that ends with an answer, and its number of characters.

        An answer ends where one of `ends` begins. None: no answer in this prompt is known.
        """
        for key, given in self._candidates(scope, prompt):
            begins = [at for end in ends if (at := prompt.find(end, key.length)) >= 0]
            if not begins:
                continue
            end = min(begins)
            if same(given.text, prompt[key.length : end], prompt[: key.length]):
                with self._lock:
                    if key in self._kept:
                        self._kept.move_to_end(key)
                return given.tokens, end
        return None

    def forget(self, tenant: str) -> None:
        """Forgets all answers to a tenant."""
        with self._lock:
            for key in [key for key in self._kept if key.scope.tenant == tenant]:
                self._drop(key)

    def _candidates(self, scope: AnswerScope, prompt: str) -> list[tuple[_Key, _Given]]:
        """The answers to beginnings of a prompt, that of the longest and the newest first."""
        found: list[tuple[_Key, _Given]] = []
        with self._lock:
            hashed, at = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0
            for length in sorted(self._lengths.get(scope, ())):
                if length >= len(prompt):
                    break
                hashed.update(prompt[at:length].encode())
                at, key = length, _Key(scope, length, hashed.digest())
                found += [(key, given) for given in self._kept.get(key, ())]
        return found[::-1]

    def _drop(self, key: _Key) -> None:
        self._num_bytes -= _num_bytes(self._kept.pop(key))
        lengths = self._lengths[key.scope]
        lengths[key.length] -= 1
        if not lengths[key.length]:
            del lengths[key.length]
        if not lengths:
            del self._lengths[key.scope]


def _num_bytes(answers: Sequence[_Given]) -> int:
    return sum(given.num_bytes for given in answers)
