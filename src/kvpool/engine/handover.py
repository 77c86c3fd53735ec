"""What an engine stores in tiers, and how one engine computes a prompt for another that decodes.

    Collector   offers every block of a live request to tiers once it is full, before its windows move on. Decoding costs
                more only in steps in which a sequence fills a block.
    Prefill     computes a prompt for other engines: blocks go to the last tier as they become full, while the rest is
                computed. It says how much of the prompt has arrived there, which others need not compute.
    prefetch    loads what the tiers have of a prompt into the cache before its request comes

A prefill or a prefetch may bring only a part, or nothing. The engine that answers computes the rest, so a failure never
changes an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from kvpool.engine.generation import Generation
from kvpool.engine.thread import Inbox
from kvpool.errors import KVPoolError, SequenceStateError
from kvpool.manager import KVCacheManager
from kvpool.scheduling import BatchPlan, Request, ScheduledSequence, Scheduler
from kvpool.tiers.transport.block_keys import BlockKeys, PromptKeys
from kvpool.tiers.transport.cache_blocks import OfferProgress, Offers
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.prefix_options import HERE, NOWHERE, next_query, usable_blocks
from kvpool.tiers.transport.storing import Storer
from kvpool.tiers.transport.tier_transport import HandoverStats, TierTransport

log = logging.getLogger("kvpool")


class Collector:
    """Offers the full blocks of a scheduler's sequences to tiers, each once per request."""

    def __init__(self, scheduler: Scheduler, offers: Offers) -> None:
        self._scheduler = scheduler
        self._offers = offers
        self._progress: dict[Hashable, dict[int, OfferProgress]] = {}  # by request and sample
        self._demanded: set[Hashable] = set()
        self._left_out: set[Hashable] = set()

    def demand(self, request_id: Hashable) -> None:
        """All blocks of this request must go to tiers, also cached ones and those with fewer than `min_uses` uses."""
        self._demanded.add(request_id)

    def leave_out(self, request_id: Hashable) -> None:
        """No block of this request goes to tiers."""
        self._left_out.add(request_id)

    def collect(self, plan: BatchPlan) -> None:
        """A step has run and is about to be completed: offers the blocks that it filled."""
        size = self._offers.block_size
        counts = np.diff(plan.query_start)
        filled = plan.kv_lengths // size > (plan.kv_lengths - counts) // size
        if self._demanded:
            filled |= np.array([sequence.request.id in self._demanded for sequence in plan.sequences], bool)
        rows = np.flatnonzero(filled & self._scheduler.current_rows(plan)) if filled.any() else ()
        for row in rows:
            self._collect_sequence(plan.sequences[int(row)], int(plan.kv_lengths[int(row)]))

    def _collect_sequence(self, sequence: ScheduledSequence, num_written: int) -> None:
        handle = sequence.live_handle()
        request = sequence.request
        if not handle.publishes or sequence.group.is_finished or request.id in self._left_out:
            return
        tokens = self._scheduler.token_ids(sequence)[:num_written]  # without drafts, which may be rejected
        self._offers.offer(
            handle,
            tokens,
            self._progress_of(sequence),
            request.multimodal,
            request.session,
            is_demanded=request.id in self._demanded,
        )

    def _progress_of(self, sequence: ScheduledSequence) -> OfferProgress:
        of_request = self._progress.setdefault(sequence.request.id, {})
        found = of_request.get(sequence.index)
        if found is None:
            found = of_request[sequence.index] = self._offers.begin(sequence.request.scope)
        return found

    def forget(self, request_id: Hashable) -> None:
        """A request is over."""
        self._progress.pop(request_id, None)
        self._demanded.discard(request_id)
        self._left_out.discard(request_id)


class PrefillResult(NamedTuple):
    """What became of a prompt that was computed for others."""

    num_tokens: int
    num_stored_tokens: int  # so many from the first on are in the tier
    num_cached_tokens: int  # so many were cached here, and not computed


class Prefill:
    """A prompt that is computed for others. `num_stored_tokens` grows while it goes on; `result` waits for the end.

    It ends when everything is in the tier. It ends early when a store fails: others cannot use blocks behind the missing
    one, so they should compute the rest at once.
    """

    def __init__(
        self,
        num_tokens: int,
        prompt: PromptKeys,
        keys: BlockKeys,
        storer: Storer,
        count: Callable[[Prefill], None],
        on_progress: Callable[[int], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.num_stored_tokens = 0
        self._prompt = prompt  # the beginning whose keys other engines know
        self._keys = keys
        self._all = frozenset(key for of_group in prompt.keys for key in of_group)
        self._lacking = set(self._all)  # keys not seen in the tier yet; kept here because `known` may forget some
        self._storer = storer
        self._index = len(storer.tiers) - 1
        self._tier = storer.tiers[self._index]
        self._on_progress, self._on_end = on_progress, on_end
        self._generation: Generation | None = None
        self._lock = threading.Lock()
        self._is_listening = self._is_queued = self._is_computed = self._is_cancelled = self._is_ending = False
        self._num_telling = 0  # threads that tell of progress
        self._error: KVPoolError | None = None
        self._over = threading.Event()
        self._count = count

    # --- for its caller ----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def is_whole(self) -> bool:
        """Whether others find all whole blocks of the prompt."""
        size = self._keys.block_size
        return self.num_stored_tokens == self.num_tokens // size * size

    def cancel(self) -> None:
        """Ends it if it is not over; what is in the tier stays there."""
        with self._lock:
            self._is_cancelled = True
            queued = self._generation if self._is_queued else None
        if queued is not None:
            queued.cancel()

    def result(self, timeout: float | None = None) -> PrefillResult:
        """Waits for the end. Raises what ended it, if that was an error, and TimeoutError after `timeout` seconds."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"the prompt is not handed over after {timeout} seconds; it goes on")
        if self._error is not None:
            raise self._error
        cached = 0 if self._generation is None else self._generation.num_cached_tokens
        return PrefillResult(self.num_tokens, self.num_stored_tokens, cached if self._is_queued else self.num_tokens)

    # --- its life ----------------------------------------------------------------------------------------------------

    def begin(self, generation: Generation, queue: Callable[[], None]) -> None:
        """Asks the tier what it has, then has the rest computed: `queue` hands the request to the engine."""
        self._storer.listen(self._settled)
        self._is_listening = True
        keys = list(self._all)
        found = self._tier.contains(keys, self._tier.tier.timeout)
        self._advance(key for key, is_there in zip(keys, found, strict=True) if is_there)
        if all(found) or self._tier.tier.stats().problem:  # a tier that is down takes nothing
            self.computed()
            return
        with self._lock:
            self._generation = generation
            if not self._is_cancelled:
                self._is_queued = True
                try:
                    queue()
                except KVPoolError as error:
                    self._error = error
                    self._is_queued = False
        if not self._is_queued:
            self.computed()

    def drop(self, why: str = "the engine was closed before this prompt was computed") -> None:
        """Ends it before anything began."""
        self._error = SequenceStateError(why)
        self.computed()

    def computed(self) -> None:
        """The request is over, with or without success."""
        self._is_computed = True
        self._end_if_settled()

    def _settled(self, index: int, keys: Sequence[bytes]) -> None:
        """Blocks arrived in a tier, or failed to."""
        if index != self._index or self._all.isdisjoint(keys):
            return
        self._advance()
        if not self._lacking.isdisjoint(keys):
            self.cancel()
        self._end_if_settled()

    def _advance(self, found: Iterable[bytes] = ()) -> None:
        """Updates how many tokens others find: with the `found` keys, and those that the tier is known to have now."""
        known, size = self._tier.known, self._keys.block_size
        with self._lock:
            lacking = self._lacking
            lacking.difference_update(found)
            lacking.difference_update([key for key in lacking if key in known])
            sources = [
                np.array([NOWHERE if key in lacking else HERE for key in of_group], np.int16)
                for of_group in self._prompt.keys
            ]
        stored = usable_blocks(self._keys.groups, sources, self._prompt.num_tokens, size) * size
        with self._lock:
            is_news = stored > self.num_stored_tokens
            self.num_stored_tokens = max(stored, self.num_stored_tokens)
            self._num_telling += is_news
        if is_news:
            if self._on_progress is not None:
                _contained(partial(self._on_progress, stored))
            with self._lock:
                self._num_telling -= 1

    def _end_if_settled(self) -> None:
        if not self._is_computed or self._storer.is_storing(self._index, self._all):
            return
        self._advance()  # counts what has arrived since the last call
        with self._lock:
            if (
                self._is_ending or self._num_telling
            ):  # a thread that tells progress comes here again: `on_end` comes last
                return
            self._is_ending = True
        if self._is_listening:
            self._storer.leave(self._settled)
        if self._error is None and self._generation is not None and self._is_queued:
            try:
                self._generation.result(0)
            except KVPoolError as error:
                self._error = error
        self._count(self)
        self._over.set()
        if self._on_end is not None:
            _contained(self._on_end)


class Handovers:
    """Prefills for other engines and prefetches from tiers, of one engine, and their counters."""

    def __init__(self, transport: TierTransport, collector: Collector, manager: KVCacheManager, inbox: Inbox) -> None:
        self._inbox = inbox
        self._transport = transport
        self._collector = collector
        self._manager = manager
        self._lock = threading.Lock()
        self._stats = HandoverStats()

    def stats(self) -> HandoverStats:
        """A copy of the counters."""
        with self._lock:
            return replace(self._stats)

    # --- for others --------------------------------------------------------------------------------------------------

    def follow(
        self, request: Request, on_progress: Callable[[int], None] | None, on_end: Callable[[], None] | None
    ) -> Prefill:
        """A `Prefill` of a prompt. It ends where content was invalidated here: others do not know the new keys of that."""
        keys = self._transport.keys
        own = keys.of_prompt(request.prompt, request.scope, request.multimodal)
        plain = keys.plain(request.prompt, request.scope, request.multimodal)
        renamed = (at for at, (mine, common) in enumerate(zip(own.keys[0], plain[0], strict=True)) if mine != common)
        shared = next(renamed, own.num_blocks)
        num_tokens = min(own.num_tokens, shared * keys.block_size + 1)
        prompt = PromptKeys(num_tokens, tuple(of_group[:shared] for of_group in own.keys), own.version)
        count = partial(self._count_prefill, request)
        return Prefill(own.num_tokens, prompt, keys, self._transport.storer, count, on_progress, on_end)

    def start(self, prefill: Prefill, generation: Generation, request: Request, queue: Callable[[], None]) -> None:
        """Starts a prefill; `queue` hands its request to the engine."""
        self._collector.demand(request.id)
        threads = self._transport.fetch_threads
        if not threads.submit(partial(prefill.begin, generation, queue), prefill.drop):
            prefill.drop(
                f"{threads.num_waiting} others wait for the tiers of this engine, or it is closed; ask again later"
            )

    def _count_prefill(self, request: Request, prefill: Prefill) -> None:
        self._collector.forget(request.id)
        with self._lock:
            self._stats.prefills += 1
            self._stats.prefills_cut += not prefill.is_whole
            self._stats.prefill_blocks += prefill.num_stored_tokens // self._transport.keys.block_size

    # --- from others -------------------------------------------------------------------------------------------------

    def prefetch(self, request: Request, prompt: PromptKeys, done: Callable[[int], None]) -> None:
        """Loads what tiers have of a prompt, then calls `done` with how many of its tokens are cached.

        The engine's thread runs it.
        """
        match = self._manager.match_prefix(request.prompt, request.scope, request.items)
        size, now = self._transport.keys.block_size, time.monotonic()
        missing = next_query(prompt.num_blocks, prompt.num_tokens, size) - match.num_tokens
        fetch = Fetch(prompt, match.num_blocks, now, now + self._transport.timeout, is_asked_for=True)
        arrived = partial(self._tell_arrived, request, done)
        nothing = partial(done, match.num_tokens)
        if missing <= 0 or self._transport.fetch_threads.is_stuck or not self._transport.fetch(fetch, arrived, nothing):
            nothing()

    def _tell_arrived(self, request: Request, done: Callable[[int], None], fetch: Fetch) -> None:
        """Called in a thread that fetches: has `_arrived` called in the engine's thread."""

        def give_up(error: KVPoolError) -> None:
            fetch.release()
            done(0)

        self._inbox.put_or_fail(partial(self._arrived, request, done, fetch), give_up)

    def _arrived(self, request: Request, done: Callable[[int], None], fetch: Fetch) -> None:
        handle, waits = self._transport.import_prefix(request, fetch)
        num_blocks, is_part = fetch.num_blocks - fetch.first, fetch.is_part
        self._transport.give_back(fetch, waits)
        if handle is not None:
            self._manager.free(handle)  # cached, like anything else that was used just now
        with self._lock:
            self._stats.prefetches += handle is not None and not is_part
            self._stats.prefetched_blocks += num_blocks if handle is not None else 0
        if handle is not None and is_part:  # staging memory was too small to hold all at once
            self.prefetch(request, fetch.prompt, done)
        else:
            done(self._manager.match_prefix(request.prompt, request.scope, request.items).num_tokens)


def _contained(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        log.exception("a listener to a prefill raised")
