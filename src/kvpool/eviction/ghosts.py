"""What the adaptive policy remembers of runs that have left, so that it notices when their content is computed again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

from kvpool.eviction.experience import Experience
from kvpool.eviction.run import Run, Tokens, checksum

# A ghost is one number, made of its cohort, blocks, turn and uses: tuples would call the collector. For days it is small
# enough for the processor; of a longer run, which is rare, only so many blocks are followed.
_BLOCK_BITS: Final = 16
_TURN_BITS: Final = 2
_USE_BITS: Final = 3
_MOST_BLOCKS: Final = 2**_BLOCK_BITS - 1
_MOST_TURNS: Final = 2**_TURN_BITS - 1
_MOST_USES: Final = 2**_USE_BITS - 1


class Ghosts:
    """Runs that have left, by fingerprint, oldest first. They are followed in `learned` like those that are there.

    A fingerprint says what preceded a run and with which block it began. How far what comes begins like it, its tokens tell.
    """

    def __init__(self, learned: Experience) -> None:
        self.num_blocks = 0
        self._learned = learned
        self.by_fingerprint: OrderedDict[int, int] = OrderedDict()
        self._contents: dict[int, Tokens] = {}
        self._leaders: dict[int, int] = {}  # fingerprint of a ghost -> of the run before it, if there was one
        self._followers: dict[int, int] = {}  # fingerprint of a run -> of the ghost that followed it

    def bury(self, run: Run, tokens: Tokens, num_blocks: int, leader: int | None, cohort: int, now: int) -> None:
        """A run has left with so many blocks that had these tokens; `leader` is the run before it, if there is one."""
        if num_blocks > _MOST_BLOCKS:
            tokens = tokens[: len(tokens) // num_blocks * _MOST_BLOCKS]
            self._learned.follow(cohort, now, _MOST_BLOCKS - num_blocks)
            num_blocks = _MOST_BLOCKS
        turn, uses = run.turn, run.hits + 1
        turn, uses = turn if turn < _MOST_TURNS else _MOST_TURNS, uses if uses < _MOST_USES else _MOST_USES
        self._put(run.fingerprint, cohort, num_blocks, turn << _USE_BITS | uses, _alone(tokens), leader, now)

    def trim(self, max_blocks: int, now: int) -> None:
        """Forgets the oldest until at most so many blocks are followed."""
        while self.num_blocks > max_blocks:
            fingerprint, ghost = self.by_fingerprint.popitem(last=False)
            cohort, blocks, _ = self._leave(fingerprint, ghost)
            self._learned.follow(cohort, now, -blocks)

    def recognise(self, run: Run, now: int) -> tuple[int, int, int]:
        """Counts as reused what a new run begins with: a ghost, and those that followed it.

        Returns how many blocks that are, the turn of the last ghost, and how many requests went on from its end, as far as it
        was found. A ghost from which the run departs was gone on from by two at least, so it is no turn of a conversation;
        its rest remains a ghost.
        """
        num_blocks, content = run.num_blocks, run.tokens.tobytes()
        size = len(content) // num_blocks
        fingerprint, before = run.fingerprint, run.sum_before
        known = turn = num_uses = 0
        while fingerprint in self.by_fingerprint:
            had = self._contents[fingerprint].tobytes()
            shared = num_shared(content[known * size :], had, size)
            if not shared:
                break
            cohort, blocks, used = self._take(fingerprint)
            turn, num_uses = used >> _USE_BITS, used & _MOST_USES
            self._learned.count(cohort, now, shared)
            self._learned.follow(cohort, now, -shared)
            before = checksum(had[: shared * size], before)
            known += shared
            if shared < blocks:
                rest = np.frombuffer(had[shared * size :], np.int32)
                behind = run.fingerprint_of(run.start + known, before, had[shared * size : (shared + 1) * size])
                self._put(behind, cohort, blocks - shared, used, rest, fingerprint, now)
                if known < num_blocks:
                    turn, num_uses = 0, num_uses + 1
            if shared < blocks or known == num_blocks:
                break
            fingerprint = run.fingerprint_of(run.start + known, before, content[known * size : (known + 1) * size])
        return known, turn, num_uses

    def count_behind(self, fingerprint: int, num_blocks: int, now: int) -> None:
        """What followed a run is computed again, as far as so many blocks reach."""
        follower = self._followers.get(fingerprint)
        while num_blocks > 0 and follower is not None and follower in self.by_fingerprint:
            cohort, blocks = self._forget(follower, now)
            self._learned.count(cohort, now, min(blocks, num_blocks))
            num_blocks -= blocks
            follower = self._followers.get(follower)

    def _put(
        self, fingerprint: int, cohort: int, blocks: int, used: int, tokens: Tokens, leader: int | None, now: int
    ) -> None:
        """Adds a ghost as the youngest, instead of one that began alike."""
        if fingerprint in self.by_fingerprint:
            self._forget(fingerprint, now)
        self.by_fingerprint[fingerprint] = (cohort << _BLOCK_BITS | blocks) << (_TURN_BITS + _USE_BITS) | used
        self._contents[fingerprint] = tokens
        if leader is not None:
            self._leaders[fingerprint] = leader
            self._followers[leader] = fingerprint
        self.num_blocks += blocks

    def _take(self, fingerprint: int) -> tuple[int, int, int]:
        """Removes a ghost; returns its cohort, its blocks, and its turn and uses."""
        return self._leave(fingerprint, self.by_fingerprint.pop(fingerprint))

    def _leave(self, fingerprint: int, ghost: int) -> tuple[int, int, int]:
        del self._contents[fingerprint]
        leader = self._leaders.pop(fingerprint, None)
        if leader is not None and self._followers.get(leader) == fingerprint:
            del self._followers[leader]
        of_run = ghost >> (_TURN_BITS + _USE_BITS)
        blocks = of_run & _MOST_BLOCKS
        self.num_blocks -= blocks
        return of_run >> _BLOCK_BITS, blocks, ghost & (2 ** (_TURN_BITS + _USE_BITS) - 1)

    def _forget(self, fingerprint: int, now: int) -> tuple[int, int]:
        """Follows a ghost no longer; returns its cohort and blocks."""
        cohort, blocks, _ = self._take(fingerprint)
        self._learned.follow(cohort, now, -blocks)
        return cohort, blocks


def _alone(tokens: Tokens) -> Tokens:
    """Tokens that do not keep the memory of many others: those of a short rest of a run are copied."""
    base = tokens.base
    return tokens if base is None or len(base) <= 2 * len(tokens) else tokens.copy()


def num_shared(left: bytes, right: bytes, size: int) -> int:
    """How many leading blocks of so many bytes are the same."""
    low, high = 0, min(len(left), len(right)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * size : middle * size] == right[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low
