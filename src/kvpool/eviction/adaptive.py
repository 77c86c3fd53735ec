"""The adaptive policy: learns when runs like this one are reused, and evicts what earns the least for its place.

Reuse of a prompt depends on its age in a way that differs by kind: the next turn of a chat comes after a while or never, a
system prompt comes again and again. What tells kinds apart is the request, not the run: its turn, how many others had gone
on from the same place, how much it added, and what its caller said about it. For each kind the policy counts reuses and
exposure by age, also of runs that have left (ghosts), and derives from them the best rate of hits per block and time that
keeping a run can still achieve (its Gittins index, see `experience`). The candidate with the smallest index is the victim,
unless the oldest one is hardly worth more. Age is time on the manager's clock. How it was found, and what it gains and
loses, is in docs/decisions/0005-eviction-policy.md.
"""

from __future__ import annotations

from bisect import bisect_right
from math import log2
from typing import Any, ClassVar, Final

from kvpool.eviction.experience import LOWEST, NUM_KINDS, Experience, as_shared, kind_of
from kvpool.eviction.ghosts import Ghosts
from kvpool.eviction.kind_rows import WEIGHTS, Candidate, RowOrder
from kvpool.eviction.policy import EvictionPolicy, Run, Tokens, moment_of

EPOCHS_PER_CACHE: Final = 32  # the cache turns over once in so many epochs
ORDERS_PER_CACHE: Final = 24  # how often candidates are put in order by their ages while it does
GHOSTS_PER_CACHE: Final = 4  # blocks remembered of runs that have left, in caches
_MIN_CAPACITY: Final = 64
LEARN_RUNS: Final = 32  # inserted before values are worked out anew: they share the cost
LEARN_PART: Final = 16  # or so many of all that were inserted, if that is more: what is known from many changes slowly
LEARN_LATE: Final = 256  # are enough, however many there were
LEARN_LEAST: Final = 1024  # if none was reused, there is little to learn
_HISTORY: Final = 0.999  # weight of what was counted an epoch ago
MOST_NOTES: Final = 4096  # of what happened before it is digested, even if no victim is asked for
_MOST_EPOCHS: Final = 1024  # that are told apart at least; twice as many at most
_SLACK: Final = 64  # newcomers that have gone tolerated in their list beyond one for each that waits
MOST_NEWCOMERS: Final = 2048  # runs that are put in order together, at a few microseconds each


class AdaptivePolicy(EvictionPolicy):
    """Evicts the candidate whose kind and age promise the fewest hits per block and time; retention priorities come first.

    Kinds are told apart by the request that published a run or shared it last (`kind_of`). With little learned the order
    is near that of LRU; what was shared stays a little longer. Runs that are inserted while nobody asks for a victim only
    wait in a list, so a cache that fills costs nothing more than with LRU. If one is reused before anything had to leave,
    nothing is learned from that.
    """

    name: ClassVar[str] = "adaptive"
    by_priority: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def __init__(self) -> None:
        self._depth_cost = 0.0  # of a block, per block before it; 0: all cost the same
        self._begin()

    def clear(self) -> None:
        for run in self._newcomers:
            if run.entry is self:
                run.entry = None
        for run in self._order.clear():
            run.entry = None
        self._begin()

    def _begin(self) -> None:
        """Without candidates, and without having learned anything."""
        # Inserted runs that nobody has touched since; their entry is the policy itself. Among them are some that have gone.
        self._newcomers: list[Run] = []
        self._num_new = 0  # without those
        self._is_ordered = True
        self._len = self._num_blocks = 0  # of the candidates in order
        self._capacity = _MIN_CAPACITY
        self._base: int | None = None  # the first moment that was seen
        self._now = 0
        self._epochs = [0]  # when epochs began, the current one last
        self._num_digested = self._num_epochs = 0
        self._turnover = 0.0  # how long it lately took to fill the cache anew
        self._inserted = 0  # blocks since the epoch began
        self._num_met = 0  # runs inserted since values were worked out
        self._num_met_before = 0  # and before that
        self._learned = Experience()
        self._order = RowOrder(self._learned.worth(self._capacity, self._turnover))
        self._ghosts = Ghosts(self._learned)
        # of the run before the one that left last: its fingerprint, its tick, its kind when shared
        self._last_left = 0, -1, 0

    def weigh(self, depth_cost: float) -> None:
        self._depth_cost = depth_cost

    # --- candidates --------------------------------------------------------------------------------------------------

    def add(self, run: Run) -> None:
        if run.entry is None and not run.hits:
            run.entry = self
            self._newcomers.append(run)
            self._num_new += 1
            if len(self._newcomers) >= MOST_NEWCOMERS:
                self._settle()
            return
        if run.entry is self:
            return
        known: Candidate | None = run.entry
        if known is None or known.owner is not self:
            self._meet(run)
        else:
            self._come_back(run, known)
        if self._learned.num_noted >= MOST_NOTES:  # where nothing is inserted, no epoch ends
            self._learn()

    def _come_back(self, run: Run, known: Candidate) -> None:
        """A run that was a candidate before is one again: it was used since, trimmed, or neither."""
        if known.run is not None:
            self._take_out(known)
        if known.key != run.last_access:
            self._put_in(run, run.hits, self._cohort(run, run.hits, self._moment(run)), run.tokens, 0)
        else:
            tokens, lost = self._rest(run, known)
            self._put_in(run, run.hits, known.cohort, tokens, known.trimmed + lost)

    def remove(self, run: Run) -> None:
        if run.entry is self:
            run.entry = None
            self._num_new -= 1
            if len(self._newcomers) > 2 * self._num_new + _SLACK:
                self._newcomers = [other for other in self._newcomers if other.entry is self]
            return
        candidate = self._candidate(run)
        if candidate is None:
            return
        self._take_out(candidate)
        if run.hits > candidate.hits:
            self._learned.count(candidate.cohort, self._now, candidate.blocks + candidate.trimmed)
            if candidate.trimmed:
                self._ghosts.count_behind(run.fingerprint, candidate.trimmed, self._now)

    def trimmed(self, run: Run) -> None:
        candidate = self._candidate(run)
        if candidate is None:
            self.add(run)
            return
        num_blocks = run.num_blocks
        lost = candidate.blocks - num_blocks
        candidate.row.trim(candidate, num_blocks)  # what it lost is followed with it
        candidate.trimmed += lost
        self._num_blocks -= lost

    def evicted(self, run: Run) -> None:
        candidate = self._candidate(run)
        if candidate is None:
            return
        blocks = candidate.blocks
        candidate.row.discard(candidate)
        run.entry = None
        self._len -= 1
        self._num_blocks -= blocks
        above = run.above
        leader = None if above is None else above.fingerprint
        self._ghosts.bury(run, candidate.tokens, blocks + candidate.trimmed, leader, candidate.cohort, self._now)
        self._ghosts.trim(GHOSTS_PER_CACHE * self._capacity, self._now)
        kind = candidate.row.kind
        if above is not None and kind != LOWEST:
            self._last_left = above.fingerprint, run.last_access, as_shared(kind)

    def victim(self) -> Run:
        if self._newcomers:
            self._settle()
        if not self._is_ordered:
            self._is_ordered = True
            if self._num_met >= self._enough_to_learn():
                self._learn()
        order, now = self._order, self._now
        if now != order.ordered_at and (now - order.ordered_at) * ORDERS_PER_CACHE >= self._turnover:
            order.refresh(now)
        return order.first()

    @property
    def num_ghost_blocks(self) -> int:
        """Number of blocks of the evicted runs remembered."""
        return self._ghosts.num_blocks

    def __len__(self) -> int:
        return self._len + self._num_new

    def __contains__(self, run: object) -> bool:
        known: Any = getattr(run, "entry", None)
        if isinstance(known, Candidate):
            return known.owner is self and known.run is not None
        return known is self

    def _candidate(self, run: Run) -> Candidate | None:
        """What is known about a run that is a candidate, be it put in order only now; None if it is none."""
        if self._newcomers:
            self._settle()
        known: Candidate | None = run.entry
        return None if known is None or known.owner is not self or known.run is None else known

    def _settle(self) -> None:
        """Meets the newcomers that waited in a list."""
        newcomers, self._newcomers, self._num_new = self._newcomers, [], 0
        for run in newcomers:
            if run.entry is self:
                self._meet(run)

    def _moment(self, run: Run) -> int:
        """When a run was last used, in milliseconds since the first that was seen."""
        moment = moment_of(run.last_access_at)
        if self._base is None:
            self._base = moment
        moment = (moment - self._base) >> 10
        if moment > self._now:
            self._now = moment
        return moment if moment > 0 else 0

    def _cohort(self, run: Run, hits: int, moment: int, num_known: int = 0) -> int:
        """The epoch of a run's last use, and its kind: by the request that published it, or the last one that shared it."""
        epochs = self._epochs
        since = epochs[-1]
        if moment < since:  # the oldest epoch that is told apart, at least
            since = epochs[max(0, bisect_right(epochs, moment) - 1)]
        if not run.priority:
            kind = LOWEST
        elif not hits:
            kind = kind_of(run.start + num_known, run.fan_out, run.turn, run.num_blocks - num_known, run.hint)
        else:
            fingerprint, tick, kind = self._last_left
            if tick != run.last_access or fingerprint != run.fingerprint:
                turn = run.turn + 1 if hits <= 1 else 0
                kind = as_shared(kind_of(run.start + run.num_blocks, hits, turn, 0))
        return since * NUM_KINDS + kind

    def _put_in(self, run: Run, hits: int, cohort: int, tokens: Tokens, trimmed: int) -> None:
        since = cohort // NUM_KINDS
        kind = cohort - since * NUM_KINDS
        row = self._order.row(run.priority, kind, self._weight_class(run) if self._depth_cost else 0)
        run.entry = candidate = Candidate(run, row, since, cohort, hits, tokens, trimmed, self)
        self._order.push(candidate)
        blocks = candidate.blocks
        self._learned.follow(cohort, self._now, blocks + trimmed)
        self._len += 1
        self._num_blocks = num_blocks = self._num_blocks + blocks
        if num_blocks > self._capacity:
            self._capacity = num_blocks

    def _weight_class(self, run: Run) -> int:
        """How much more than a first block the last one of a run counts: the root of what attention makes it cost.

        What kinds say about reuse holds less for the longest prompts, and the whole cost would keep those that are over.
        """
        return min(round(2 * log2(1.0 + self._depth_cost * (run.start + run.num_blocks - 1))), WEIGHTS - 1)

    def _take_out(self, candidate: Candidate) -> None:
        blocks = candidate.blocks
        candidate.row.discard(candidate)
        self._learned.follow(candidate.cohort, self._now, -blocks - candidate.trimmed)
        self._len -= 1
        self._num_blocks -= blocks

    def _enough_to_learn(self) -> int:
        """How many runs must have been inserted before values are worked out anew."""
        if not self._learned.has_news:
            return LEARN_LEAST
        return min(max(LEARN_RUNS, self._num_met_before // LEARN_PART), LEARN_LATE)

    def _learn(self) -> None:
        """Works out values from what happened up to this epoch."""
        self._num_met_before += self._num_met
        self._num_met = 0
        self._learned.digest(self._now, _HISTORY ** (self._num_epochs - self._num_digested))
        self._num_digested = self._num_epochs
        self._order.learn(self._learned.worth(self._capacity, self._turnover), self._now)

    # --- what is learned from ----------------------------------------------------------------------------------------

    def _meet(self, run: Run) -> None:
        """A run that is new here: it was computed, perhaps not for the first time."""
        fingerprint, hits, moment, num_known = run.fingerprint, run.hits, self._moment(run), 0
        if fingerprint in self._ghosts.by_fingerprint:
            num_known, turn, num_uses = self._ghosts.recognise(run, self._now)
            if num_known:
                run.turn, run.fan_out = turn + 1 if num_uses <= 1 else 0, num_uses  # as if its beginning had stayed
        if not hits:
            self._num_met += 1
            self._inserted += run.num_blocks
            if self._inserted * EPOCHS_PER_CACHE >= self._capacity:
                self._next_epoch()
        self._put_in(run, hits, self._cohort(run, hits, moment, num_known), run.tokens, 0)

    def _next_epoch(self) -> None:
        """Time goes on. What follows from it is worked out for the next victim, or when much has come together."""
        self._turnover += ((self._now - self._epochs[-1]) * EPOCHS_PER_CACHE - self._turnover) / min(
            self._num_epochs + 1, EPOCHS_PER_CACHE
        )
        self._num_epochs += 1
        self._inserted = 0
        self._epochs.append(self._now)
        if len(self._epochs) >= 2 * _MOST_EPOCHS:
            del self._epochs[:-_MOST_EPOCHS]
        self._is_ordered = False
        if self._learned.num_noted >= MOST_NOTES:
            self._learn()

    def _rest(self, run: Run, known: Candidate) -> tuple[Tokens, int]:
        """Of a run that comes back unused: its tokens with those it has lost since its last use, and how many blocks it lost.

        If its head was reused and is another run now, that counts, and it begins behind it.
        """
        split_off = run.start - known.start
        if split_off > 0:
            self._learned.count(known.cohort, self._now, split_off)
            had = known.blocks + known.trimmed
            return known.tokens[len(known.tokens) // had * split_off :], 0
        return known.tokens, max(0, known.blocks - run.num_blocks)
