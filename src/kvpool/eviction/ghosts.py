"""What the adaptive policy remembers of runs that have left, so that it notices when their content is computed again."""

from __future__ import annotations

from typing import Final

from kvpool.eviction.experience import Experience
from kvpool.eviction.policy import Run, Tokens, checksum

_SLACK: Final = 64  # ghosts that are followed no longer tolerated beyond one for each that is


class Ghost:
    """A run that has left: what it was known by, and what is followed of it. Without blocks it is followed no longer."""

    __slots__ = ("blocks", "cohort", "fingerprint", "leader", "sums", "turn", "uses")

    def __init__(
        self, fingerprint: int, cohort: int, blocks: int, turn: int, uses: int, sums: bytes, leader: int | None
    ) -> None:
        self.fingerprint = fingerprint
        self.cohort = cohort
        self.blocks = blocks
        self.turn = turn
        self.uses = uses  # requests that had it, the one that computed it included
        self.sums = sums  # of each block, see `Run.sums_of`
        self.leader = leader  # fingerprint of the run before it, if there was one


class Ghosts:
    """Runs that have left, by fingerprint, and oldest first. They are followed in `learned` like those that are there.

    A fingerprint says what preceded a run and with which block it began. How far what comes begins like it, checksums
    of blocks tell: all tokens would be much memory, which is in no cache when a run leaves.
    """

    def __init__(self, learned: Experience) -> None:
        self.num_blocks = 0
        self._learned = learned
        self.by_fingerprint: dict[int, Ghost] = {}
        self._queue: list[Ghost | None] = []  # oldest first, with some that are followed no longer
        self._front = 0  # of the queue: those before it have left, and are None
        self._followers: dict[int, Ghost] = {}  # by the fingerprint of the run that they followed

    def bury(self, run: Run, tokens: Tokens, num_blocks: int, leader: int | None, cohort: int, now: int) -> None:
        """A run has left with so many blocks that had these tokens; `leader` is the run before it, if there is one.

        It is the youngest now, instead of one that began alike.
        """
        fingerprint = run.fingerprint
        if (alike := self.by_fingerprint.get(fingerprint)) is not None:
            self._forget(alike, now)
        sums = run.sums_of(tokens, num_blocks)
        ghost = Ghost(fingerprint, cohort, num_blocks, run.turn, run.hits + 1, sums, leader)
        self.by_fingerprint[fingerprint] = ghost
        if leader is not None:
            self._followers[leader] = ghost
        self.num_blocks += num_blocks
        self._queue.append(ghost)
        if len(self._queue) > 2 * len(self.by_fingerprint) + _SLACK:
            self._queue = [other for other in self._queue if other is not None and other.blocks]
            self._front = 0

    def trim(self, max_blocks: int, now: int) -> None:
        """Forgets the oldest until at most so many blocks are followed."""
        while self.num_blocks > max_blocks:
            oldest = self._queue[self._front]
            self._queue[self._front] = None
            self._front += 1
            if oldest is not None and oldest.blocks:
                self._forget(oldest, now)

    def recognise(self, run: Run, now: int) -> tuple[int, int, int]:
        """Counts as reused what a new run begins with: a ghost, and those that followed it.

        Returns how many blocks that are, the turn of the last ghost, and how many requests went on from its end, as far as it
        was found. A ghost from which the run departs was gone on from by two at least; its rest is forgotten.
        """
        num_blocks, tokens = run.num_blocks, run.tokens
        size, sums = len(tokens) // num_blocks, run.sums_of(tokens, num_blocks)
        fingerprint, before = run.fingerprint, run.sum_before
        known = turn = num_uses = 0
        while (ghost := self.by_fingerprint.get(fingerprint)) is not None:
            shared = num_shared(sums[4 * known :], ghost.sums)
            if not shared:
                break
            cohort, blocks, turn, num_uses = ghost.cohort, ghost.blocks, ghost.turn, ghost.uses
            self._take(ghost)
            self._learned.count(cohort, now, shared)
            self._learned.follow(cohort, now, -blocks)
            before = checksum(tokens[known * size : (known + shared) * size].data, before)
            known += shared
            if known == num_blocks:
                break
            if shared < blocks:
                num_uses += 1
                break
            key = tokens[known * size : (known + 1) * size].tobytes()
            fingerprint = run.fingerprint_of(run.start + known, before, key)
        return known, turn, num_uses

    def count_behind(self, fingerprint: int, num_blocks: int, now: int) -> None:
        """What followed a run is computed again, as far as so many blocks reach."""
        follower = self._followers.get(fingerprint)
        while num_blocks > 0 and follower is not None:
            cohort, blocks = follower.cohort, follower.blocks
            self._forget(follower, now)
            self._learned.count(cohort, now, min(blocks, num_blocks))
            num_blocks -= blocks
            follower = self._followers.get(follower.fingerprint)

    def _take(self, ghost: Ghost) -> None:
        """Removes a ghost, which has no blocks then."""
        del self.by_fingerprint[ghost.fingerprint]
        leader = ghost.leader
        if leader is not None and self._followers.get(leader) is ghost:
            del self._followers[leader]
        self.num_blocks -= ghost.blocks
        ghost.blocks, ghost.sums = 0, b""

    def _forget(self, ghost: Ghost, now: int) -> None:
        """Follows a ghost no longer."""
        self._learned.follow(ghost.cohort, now, -ghost.blocks)
        self._take(ghost)


def num_shared(left: bytes, right: bytes) -> int:
    """How many leading checksums are the same."""
    low, high = 0, min(len(left), len(right)) // 4
    middle = high  # mostly they all are
    while low < high:
        if left[4 * low : 4 * middle] == right[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
