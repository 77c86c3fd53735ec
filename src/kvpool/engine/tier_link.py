"""TierLink: an engine and its keyed tiers. Read this first.

What happens to a request, in the engine's thread (`Fetcher` and `Storer` call tiers in threads of their own):

    hold        its prefix is not all cached: the request waits outside the scheduler's queue while tiers are asked
    _arrived    `Importer` writes what came into blocks and holds them with a lease; the request goes to the scheduler
    before      the request was admitted: its lease ends
    done        after every step, `Collector` copies the blocks that are full now and has them stored

A request never waits longer than `timeout`, whatever tiers do. Once the engine knows how long computing the prefix would
take, the request does not wait longer than that either. Requests that miss the same block wait for one load.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

from kvpool.config import Tier
from kvpool.engine.generation import Generation
from kvpool.engine.handover import Collector, Handovers
from kvpool.engine.scheduled_requests import ScheduledRequests
from kvpool.engine.step_part import StepPart
from kvpool.engine.thread import Inbox
from kvpool.errors import KVPoolError
from kvpool.quiet import QuietErrors
from kvpool.scheduling import BatchPlan, Request, ScheduledSequence, Scheduler
from kvpool.scheduling.request import Finished
from kvpool.storage import DataPlane
from kvpool.tiers.model_tiers import OpenedTiers
from kvpool.tiers.transport.block_keys import PromptKeys
from kvpool.tiers.transport.cache_blocks import PrefixLeases
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.prefix_options import next_query
from kvpool.tiers.transport.threads import Pending
from kvpool.tiers.transport.tier_transport import FLUSH_SECONDS, TieringStats, TierInvalidator, TierTransport

_quiet = QuietErrors(logging.getLogger("kvpool"))


class _HeldRequest:
    """A request that waits for its prefix: for a fetch of its own, or for that of a request before it."""

    def __init__(self, generation: Generation, request: Request, prompt: PromptKeys, arrival: float) -> None:
        self.generation = generation
        self.request = request
        self.prompt = prompt
        self.arrival = arrival  # by the scheduler's clock
        self.pending: Pending[Fetch] = Pending(math.inf)  # replaced when it begins to wait
        self.missing: list[bytes] = []  # keys that it loads; requests that miss one of them wait for it
        self.followers: list[_HeldRequest] = []


class TierLink(StepPart):
    """Joins one engine to keyed tiers, fastest first."""

    def __init__(
        self,
        opened: OpenedTiers,
        scheduler: Scheduler,
        plane: DataPlane,
        requests: ScheduledRequests,
        inbox: Inbox,
    ) -> None:
        self.keys = opened.keys
        self._requests = requests
        self._inbox = inbox
        self._scheduler = scheduler
        self._manager = scheduler.manager
        self.transport = TierTransport(opened, self._manager, plane)
        self._collector = Collector(scheduler, self.transport.offers)
        self.handovers = Handovers(self.transport, self._collector, self._manager, inbox)
        self._leases = PrefixLeases(self._manager)
        self._held: dict[Hashable, _HeldRequest] = {}
        self._media: dict[Hashable, dict[int, Tier]] = {}  # by request that was not admitted yet: what came for it
        self._leaders: dict[bytes, _HeldRequest] = {}
        self._joined = self._timed_out = self._crowded = 0
        self._closed = False

    @property
    def invalidator(self) -> TierInvalidator:
        return self.transport.invalidator

    # --- requests ----------------------------------------------------------------------------------------------------

    def prompt_keys(self, request: Request) -> PromptKeys:
        """The keys of a prompt. Costs about 2 µs a block, so callers compute it in their own thread."""
        return self.keys.of_prompt(request.prompt, request.scope, request.multimodal)

    def holding(self, generation: Generation, request: Request) -> Callable[[], bool] | None:
        """`hold` for a request, with its keys; None if tiers cannot have anything of it. From any thread."""
        if generation.is_private:
            return None
        return partial(self.hold, generation, request, self.prompt_keys(request))

    def find(self, request: Request, first: int) -> dict[int, Tier]:
        """Where tiers have the blocks of a prompt from `first` on. Waits for them. From any thread."""
        return self.transport.find(self.prompt_keys(request), first)

    def hold(self, generation: Generation, request: Request, prompt: PromptKeys) -> bool:
        """Lets a request wait while its prefix is fetched; returns False if there is nothing to wait for."""
        return self._hold(_HeldRequest(generation, request, prompt, self._scheduler.clock()))

    def _hold(self, held: _HeldRequest) -> bool:
        if held.prompt.version != self.keys.forgotten.version:
            held.prompt = self.prompt_keys(held.request)
        prompt, size = held.prompt, self.keys.block_size
        match = self._manager.match_prefix(held.request.prompt, held.request.scope, held.request.items)
        first, missing = match.num_blocks, next_query(prompt.num_blocks, prompt.num_tokens, size) - match.num_tokens
        if missing <= 0 or self._closed or self.transport.fetch_threads.is_stuck:
            return False
        now = time.monotonic()
        due = held.pending.due if math.isfinite(held.pending.due) else now + self.transport.patience(missing)
        if due <= now:
            return False
        held.pending = Pending(due, Fetch.release)
        leader = self._leaders.get(prompt.keys[0][first])
        if leader is not None:
            self._joined += 1
            leader.followers.append(held)
            self._held[held.request.id] = held
            return True
        fetch = Fetch(prompt, first, now, due)
        if not self.transport.is_worth_waiting(missing, lambda: fetch):
            return False
        if not self.transport.fetch(fetch, partial(self._tell_arrived, held), fetch.release):
            self._crowded += 1
            return False
        held.missing = prompt.keys[0][first:]
        for key in held.missing:
            self._leaders.setdefault(key, held)
        self._held[held.request.id] = held
        return True

    def _tell_arrived(self, held: _HeldRequest, fetch: Fetch) -> None:
        """Called in a thread that fetches: has `_arrived` called in the engine's thread."""
        self._inbox.put_or_fail(partial(self._arrived, held, fetch), lambda error: fetch.release())

    def _arrived(self, held: _HeldRequest, fetch: Fetch) -> None:
        held.pending.end(fetch)
        if held.pending.is_given_up:
            return
        came = self._import(held.request, fetch)
        if came and fetch.is_part:  # fetches the rest as if it were a new request
            self._forget_keys(held)
            if self._hold(held):
                return
        self._let_go(held)

    def _import(self, request: Request, fetch: Fetch) -> bool:
        """Writes fetched blocks into the cache, and releases the memory of the fetch; returns whether that succeeded."""
        handle, waits = self.transport.import_prefix(request, fetch)
        if handle is not None:
            self._leases.keep(request.id, handle)
            self._media.setdefault(request.id, {}).update(fetch.media)
        self.transport.give_back(fetch, waits)
        return handle is not None

    def _let_go(self, held: _HeldRequest) -> None:
        """Hands the request to the scheduler. Requests that waited for its load look into the cache again."""
        followers = self._forget(held)
        try:
            self._requests.enqueue(held.generation, replace(held.request, arrival=held.arrival))
        except KVPoolError as error:  # the pools were made smaller meanwhile
            self._let_leave(held.request.id)
            held.generation.end(error)
        for follower in followers:
            if self._held.get(follower.request.id) is not follower:  # it stopped waiting before
                continue
            del self._held[follower.request.id]
            if not self._hold(follower):
                self._let_go(follower)

    def _forget_keys(self, held: _HeldRequest) -> None:
        for key in held.missing:
            if self._leaders.get(key) is held:
                del self._leaders[key]
        held.missing = []

    def _forget(self, held: _HeldRequest) -> list[_HeldRequest]:
        held.pending.give_up()
        self._held.pop(held.request.id, None)
        self._forget_keys(held)
        followers, held.followers = held.followers, []
        return followers

    def release(self, generation: Generation) -> None:
        """Hands a held request to the scheduler at once, because it is about to be cancelled."""
        held = self._held.get(generation.id)
        if held is not None and held.generation is generation:
            self._let_go(held)

    def held(self) -> list[Request]:
        """The requests that wait for their prefix."""
        return [held.request for held in self._held.values()]

    def patience(self) -> float | None:
        """Seconds until a held request stops waiting; None: none is held."""
        if not self._held:
            return None
        return min(held.pending.seconds_left for held in self._held.values())

    def tend(self) -> None:
        """Sends requests to the scheduler whose prefix did not come in time."""
        if not self._held:
            return
        for held in [held for held in self._held.values() if held.pending.is_overdue]:
            if self._held.get(held.request.id) is held:
                self._timed_out += 1
                self._let_go(held)

    # --- steps -------------------------------------------------------------------------------------------------------

    def before(self, plan: BatchPlan) -> None:
        """Ends the leases of admitted requests, and all leases if memory was short."""
        if self._media:
            for sequence in plan.admitted:
                if (media := self._media.pop(sequence.request.id, None)) is not None:
                    self._manager.cache.count_loaded(sequence.live_handle(), media)
        if not len(self._leases):
            return
        for sequence in plan.admitted:
            self._leases.end(sequence.request.id)
        if plan.is_empty or plan.preempted:
            self._leases.end_all()

    def entered(self, sequence: ScheduledSequence) -> None:
        """Nothing of a private request goes to tiers, because nobody else could use it."""
        generation = self._requests.generations.get(sequence.request.id)
        if generation is not None and generation.is_private:
            self._collector.leave_out(generation.id)

    def done(self, plan: BatchPlan, seconds: float | None) -> None:
        """Stores what a step filled. From the time for prompt tokens follows when loading is faster than computing."""
        num_tokens = plan.num_prefill_tokens
        if seconds is not None and num_tokens >= self.keys.block_size and 2 * num_tokens >= plan.num_tokens:
            self.transport.decider.observe_prompt(num_tokens, seconds)
        if self._closed:
            return
        try:
            self._collector.collect(plan)
        except Exception as error:
            _quiet.error(error, "blocks could not be copied for tiers; they are not stored")

    def ended(self, done: Finished) -> None:
        """A request is over."""
        self._let_leave(done.request.id)

    def _let_leave(self, request_id: Hashable) -> None:
        self._leases.end(request_id)
        self._media.pop(request_id, None)
        self._collector.forget(request_id)

    # --- looking at it, ending it ------------------------------------------------------------------------------------

    def stats(self) -> TieringStats:
        """Counters of everything here, and of each tier."""
        return self.transport.stats(
            held=len(self._held),
            joined=self._joined,
            timed_out=self._timed_out,
            crowded=self._crowded,
            leases=self._leases.view(),
            handovers=self.handovers.stats(),
        )

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Waits until no store is in flight, for `seconds` at most; returns whether that is so. From any thread."""
        return self.transport.storer.flush(seconds)

    def fail(self, error: KVPoolError) -> None:
        """Ends every request that waits, and closes."""
        for held in list(self._held.values()):
            held.pending.give_up()
            held.generation.end(error)
        self._held.clear()
        self._leaders.clear()
        self.close()

    def close(self) -> None:
        """Ends the stores in flight, within a few seconds, and closes threads and owned tiers. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._leases.end_all()
        self.transport.close()
