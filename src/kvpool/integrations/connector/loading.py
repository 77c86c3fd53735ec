"""Loads: how much of a prompt the host and the tiers below it have, and the orders that load it into pages.

All loads run outside of steps: the others go on meanwhile, and only there every version of vLLM computes the right thing
after one failed. Background threads ask the tiers. A block counts as found if every worker finds its part of it. If layers
keep states, only lengths count behind which there is a checkpoint.

Blocks that a tier has are computed nevertheless where that was faster so far, from the order of a load to its report and from
the first step of a prompt to its first token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvpool.core.handle import KVCacheHandle
from kvpool.errors import OutOfBlocksError
from kvpool.integrations.connector.orders import Checkpoint, Introduction, Load, Orders
from kvpool.integrations.connector.reports import BlockEvents
from kvpool.integrations.connector.requests import TrackedRequest
from kvpool.integrations.connector.saving import CHECKPOINTS, take_rows
from kvpool.integrations.connector.settings import ConnectorSettings, open_worker_tiers
from kvpool.manager import KVCacheManager
from kvpool.tiers import KeyedTier, KeySpace
from kvpool.tiers.transport.chain import GRACE_SECONDS, TierChain
from kvpool.tiers.transport.deciding import Decider
from kvpool.tiers.transport.prefix_options import NOWHERE, Option
from kvpool.tiers.transport.threads import Pending, ThreadPool


@dataclass
class LoadStats:
    """Counts since the connector was made: requests first, then blocks."""

    requests: int = 0  # requests that were looked up
    hits: int = 0  # requests for which something was loaded
    from_host: int = 0
    from_tiers: int = 0
    failed: int = 0  # blocks that were promised and could not be loaded; the engine computes them again
    slower: int = 0  # requests that computed what a tier had, because that was faster so far
    # Blocks of prompts that the engine lacked and that were not brought, at the first look-up of each request
    missed_absent: int = 0  # neither the host nor a tier had them
    missed_late: int = 0  # no tier said in time whether it had them
    missed_slower: int = 0  # a tier had them, and computing was faster so far
    missed_crowded: int = 0  # a tier had them, and the host had no room


@dataclass
class _LoadJob:
    tracked: TrackedRequest
    handle: KVCacheHandle | None
    first: int
    num_present: int
    last: int
    digests: list[bytes]  # of the blocks from tiers
    holders: list[int]  # the tier of each of them
    began: float


_PROBE_BLOCKS = 16  # are loaded now and then from a tier that was slower than computing, to measure it again


class Loader:
    """Loads from the host's rows and the tiers below it into the engine's pages."""

    def __init__(
        self,
        manager: KVCacheManager,
        block_size: int,
        lookups: TierLookups | None,
        make_room: Callable[[], bool],
        *,
        has_states: bool,
        events: BlockEvents | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = LoadStats()
        self.decider = Decider(0 if lookups is None else lookups.num_tiers, clock)
        self._clock = clock
        self._has_states = has_states
        self._make_room = make_room  # frees rows that are held and not needed; False if there were none
        self._manager = manager
        self._block_size = block_size
        self._lookups = lookups
        self._events = events
        self._jobs: dict[int, _LoadJob] = {}
        self._in_flight: dict[bytes, float] = {}  # blocks in flight from tiers, and until when others wait for them

    def look_up(self, tracked: TrackedRequest, num_computed: int) -> int | None:
        """How many tokens after the engine's own can be loaded. None: ask again."""
        if tracked.num_loading:  # the engine went on without a load, so a tier may hang: do not ask it again
            tracked.has_lost = True
        first = tracked.num_local = num_computed // self._block_size
        tracked.uses_tiers = False
        tokens = tracked.tokens()
        last = (len(tokens) - 1) // self._block_size  # one token must be computed
        if last <= first:
            return 0
        found = self._manager.match_prefix(tokens, tracked.scope, tracked.items or None)
        num_blocks = num_there = min(found.num_blocks, last)
        is_late = self._lookups is not None and tracked.has_lost
        num_worth = num_there
        if self._lookups is not None and num_blocks < last and not tracked.has_lost:
            here = max(first, num_blocks)
            num_below = self._lookups.num_blocks(tracked, here, last)
            if num_below is None or (num_below > here and self._arrives(tracked, here)):
                return None
            is_late = tracked.lookup is None or tracked.lookup.value is None
            if self._events is not None and not tracked.was_looked_up:
                self._tell(tracked, here, num_below, last)
            num_there = num_worth = max(num_blocks, num_below)
            if num_below > here:
                num_below = num_worth = self._worth(tracked, here, num_below)
            if num_below > here:
                num_below = self._with_room(tracked, num_blocks, num_below)
                num_blocks, tracked.uses_tiers = max(num_blocks, num_below), num_below > num_blocks
        if not tracked.was_looked_up:
            missing = last - max(first, num_there)
            self.stats.missed_late += missing if is_late else 0
            self.stats.missed_absent += 0 if is_late else missing
            self.stats.missed_slower += num_there - max(num_worth, num_blocks)
            self.stats.missed_crowded += max(0, num_worth - max(first, num_blocks))
        return max(0, num_blocks - first) * self._block_size

    def _worth(self, tracked: TrackedRequest, here: int, below: int) -> int:
        """Up to which of the blocks here..below, which tiers have, a load is expected to save time."""
        if tracked.worth is None or tracked.worth[:2] != (here, below):
            tracked.worth = here, below, self._decided(_holders(tracked, here, below), here)
        return tracked.worth[2]

    def _decided(self, holders: list[int], here: int) -> int:
        num_tiers, options = len(self.decider.speeds), list[Option]()
        for last in range(max(holders) if self._has_states else 0, num_tiers):
            some = holders[: next((number for number, tier in enumerate(holders) if tier > last), None)]
            if some and (not options or here + len(some) > options[-1].num_blocks):
                options.append(Option(here + len(some), tuple(some.count(tier) for tier in range(num_tiers))))
        decision = self.decider.decide(options, here, self._block_size)
        if decision.option is not None:
            return decision.option.num_blocks
        self.stats.slower += 1
        return here + (min(len(holders), _PROBE_BLOCKS) if decision.probe and not self._has_states else 0)

    def _arrives(self, tracked: TrackedRequest, block: int) -> bool:
        """Whether a load for another request brings this block to the host, so that it is not loaded twice."""
        if not self._in_flight:
            return False
        due = self._in_flight.get(tracked.tier_digests(block, block + 1)[0])
        return due is not None and time.monotonic() < due

    def _tell(self, tracked: TrackedRequest, first: int, found: int, last: int) -> None:
        """Reports that tiers were asked for the blocks first..last and have those below `found`."""
        assert self._events is not None
        if found > first:
            self._events.stored_in_tiers(tracked, first, found)
        if found < last:
            self._events.missing_in_tiers(tracked, max(first, found), last)

    def _with_room(self, tracked: TrackedRequest, num_present: int, wanted: int) -> int:
        """How many of the wanted blocks the host has room for now."""
        tokens = tracked.tokens()[: wanted * self._block_size]
        answer = self._manager.can_allocate(tokens, scope=tracked.scope)
        if not answer and self._make_room():
            answer = self._manager.can_allocate(tokens, scope=tracked.scope)
        if answer:
            return wanted
        if self._has_states:  # a part of it would end where there is no checkpoint
            return num_present
        return min(wanted, num_present + answer.blocks_available[0])

    def order(
        self,
        tracked: TrackedRequest,
        pages: Sequence[list[int]],
        num_tokens: int,
        job: int,
        orders: Orders,
        state_pages: Sequence[list[int]],
    ) -> None:
        """The engine has pages for what was looked up: orders the load for the next step."""
        size, first = self._block_size, tracked.num_local
        last = first + num_tokens // size
        handle, num_present = self._take(tracked, last), first
        if handle is not None:
            num_present = min(max(handle.num_cached_blocks, first), last)
        rows = [] if handle is None else handle.block_ids()[first:last].tolist()
        digests = tracked.tier_digests(num_present, last) if tracked.uses_tiers and handle is not None else []
        tracked.num_loading += 1
        holders = _holders(tracked, num_present, last) if digests else []
        self._jobs[job] = _LoadJob(tracked, handle, first, num_present, last, digests, holders, self._clock())
        if digests and self._lookups is not None:
            self._in_flight.update(dict.fromkeys(digests, time.monotonic() + self._lookups.patience))
        in_first = holders.count(0)
        tracked.hits = num_present - first, in_first, last - num_present - in_first
        request_id, present = tracked.request.request_id, num_present - first
        wanted = [of_group[first:last] for of_group in pages]
        load = Load(job, request_id, rows, wanted, present, digests)
        if self._has_states and handle is not None:
            row = handle.block_ids(CHECKPOINTS).item(last - 1)
            load.checkpoint = Checkpoint(row, [of_group[last - 1] for of_group in state_pages])
        orders.loads.append(load)

    def _take(self, tracked: TrackedRequest, last: int) -> KVCacheHandle | None:
        """Holds the rows of a prefix, new ones for what the host lacks. None if there is no room after all."""
        # One more token than is loaded, if there is one, because the last token of a lease counts as not computed.
        tokens = tracked.tokens()[: last * self._block_size + 1]
        try:
            return take_rows(self._manager, tracked, tokens, last * self._block_size, self._make_room)
        except OutOfBlocksError:
            return None

    def confirm(self, job: int, num_blocks: int) -> bool:
        """All workers are done: publishes what tiers brought. False if this was no load."""
        done = self._jobs.pop(job, None)
        if done is None:
            return False
        done.tracked.num_loading -= 1
        for digest in done.digests:
            self._in_flight.pop(digest, None)
        wanted = done.last - done.first
        came = min(num_blocks, wanted)
        present = done.num_present - done.first
        self.stats.hits += came > 0
        self.stats.from_host += min(came, present)
        self.stats.from_tiers += max(0, came - present)
        self.stats.failed += wanted - came
        handle = done.handle
        if handle is not None:
            # Rows between what the host had and what was loaded are empty, because the engine had these blocks itself.
            if came > present and handle.num_cached_blocks >= done.first:
                if self._events is not None:
                    self._events.name(done.tracked, handle.num_committed // self._block_size, done.first + came)
                self._manager.commit(handle, (done.first + came) * self._block_size - handle.num_committed)
            self._manager.free(handle)
        if came < wanted:
            done.tracked.has_lost = True
            done.tracked.lookup = None
        elif len({*done.holders}) == 1:  # what several tiers brought says nothing of one of them
            self.decider.observe_load(done.holders[0], len(done.holders), self._clock() - done.began)
        return True

    @property
    def num_jobs(self) -> int:
        """Loads in flight."""
        return len(self._jobs)


def _holders(tracked: TrackedRequest, first: int, last: int) -> list[int]:
    """The tier that has each of these blocks, as the look-up said."""
    found = (tracked.lookup.value if tracked.lookup is not None else None) or []
    return found[first - tracked.asked_from : last - tracked.asked_from]


# --- looking ---------------------------------------------------------------------------------------------------------


_THREADS = 2


class TierLookups:
    """Asks tiers by key. The scheduler never waits: `num_blocks` returns None until the answer is there or overdue."""

    def __init__(self, settings: ConnectorSettings, workers: Sequence[Introduction]) -> None:
        self._timeout = settings.timeout
        self.patience = settings.timeout + GRACE_SECONDS  # seconds after which a tier counts as hanging
        self._has_states = any(worker.num_checkpoints for worker in workers)
        self._spaces = [KeySpace(worker.fingerprint) for worker in workers]
        self._chains = [TierChain(open_worker_tiers(settings, worker, is_reader=True)) for worker in workers]
        watched = [each for chain in self._chains for each in chain.watched]
        self._threads = ThreadPool("look-up", _THREADS, 1024, watched)

    def num_blocks(self, tracked: TrackedRequest, first: int, last: int) -> int | None:
        """How many of the first blocks of a prompt tiers have, if the host has `first` of them; None: ask again later."""
        lookup = tracked.lookup
        if lookup is None or (lookup.has_ended and first < tracked.asked_from):
            lookup = tracked.lookup = Pending(time.monotonic() + self._timeout)
            tracked.asked_from = first
            ask = partial(self._ask, lookup, tracked.tier_digests(first, last))
            if self._threads.is_stuck or not self._threads.submit(ask, lookup.end):
                lookup.end()
        elif not lookup.has_ended and lookup.is_overdue:  # a tier hangs and ignores its deadline
            return first
        return tracked.asked_from + len(lookup.value or ()) if lookup.has_ended else None

    def _ask(self, lookup: Pending[list[int]], digests: list[bytes]) -> None:
        """Asks the tiers. Runs in a thread of the pool."""
        holders: list[int] = []
        try:
            due, common = time.monotonic() + self._timeout, [0] * len(digests)
            kept = [True] * len(digests)  # the blocks behind which every worker has a checkpoint
            for space, chain in zip(self._spaces, self._chains, strict=True):
                found = chain.find_prefix(space.keys(digests[: len(common)]), due)
                common = [max(pair) for pair in zip(common, found, strict=False)]  # the slowest tier of all workers
                if self._has_states:
                    found = chain.find(space.keys(digests[: len(common)], CHECKPOINTS), due)
                    kept = [there and holder != NOWHERE for there, holder in zip(kept, found, strict=False)]
            while common and not kept[len(common) - 1]:
                common.pop()
            holders = common
        finally:
            lookup.end(holders)

    @property
    def num_tiers(self) -> int:
        """Tiers of each worker."""
        return len(self._chains[0])

    def tiers(self) -> list[KeyedTier]:
        """The tiers of the first worker."""
        return [watched.tier for watched in self._chains[0].watched]

    def close(self) -> None:
        """Closes the tiers."""
        self._threads.stop(1.0)
        for chain in self._chains:
            chain.close()
