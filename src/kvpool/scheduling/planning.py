"""Plans one step: memory for running sequences, chunks of prompts, admissions. The result is a `BatchPlan`.

`Planner` goes on with what runs, `Admissions` brings waiting and preempted sequences onto the GPU, and offloaded prefixes up
ahead of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from kvpool.config import Tier
from kvpool.core.cache import Admission
from kvpool.core.handle import KVCacheHandle, SequenceBatch
from kvpool.core.prompt import Prompt
from kvpool.errors import OutOfBlocksError
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scheduling.batch_plan import BatchPlan, DecodeRows, PlanBuilder, PromptChunk, plan_of
from kvpool.scheduling.capacity import Capacity
from kvpool.scheduling.queues import Queues
from kvpool.scheduling.request import ScheduledSequence, SequenceState
from kvpool.scheduling.running import make_rows

SPARE_CANDIDATES = 16  # tried beyond the free lanes, because some only wait for a prefix and let others pass
LOOK_UP_EVERY = 8  # questions of a policy about a waiting sequence: the cache is asked only then
RETRY_STEPS = 8  # a full pool is tried again so often even if no sequence came or left: windows free blocks, too


class Planner:
    """Makes plans: sequences that decode come first, then prompts that have begun, then waiting requests."""

    def __init__(self, queues: Queues, capacity: Capacity) -> None:
        self.queues = queues
        self.manager = queues.manager
        self.running = queues.running
        self.capacity = capacity
        self.admissions = Admissions(queues, capacity)

    def plan(self, number: int, num_in_flight: int) -> tuple[BatchPlan, PlanBuilder]:
        """The next step."""
        builder = PlanBuilder(self.queues, number)
        arrivals = self.running.arrivals
        if arrivals:
            self._begin(arrivals.take_landed())
        departures = self.running.departures
        self._go_on(builder)
        self.admissions.run(builder)
        if arrivals and builder.computes_nothing:  # the device may wait: it has nothing else to do
            self._begin(arrivals.take_next())
            self._go_on(builder)
        if builder.decode is not None and departures != self.running.departures:
            builder.decode = self._still_running(builder.decode)
        if not num_in_flight and builder.is_idle:
            self._refuse_what_never_fits(builder)
        return plan_of(builder), builder

    def _begin(self, arrived: dict[ScheduledSequence, bool]) -> None:
        for sequence, decodes in arrived.items():
            self.running.begin(sequence, decodes=decodes)

    def _go_on(self, builder: PlanBuilder) -> None:
        """Plans the running sequences: one token for each that decodes, then the next chunks of prompts."""
        if len(self.running.decoding):
            self._decode(builder)
            builder.limit_prompts()
        if self.running.prefilling:
            self._continue_prompts(builder)

    def _still_running(self, rows: DecodeRows) -> DecodeRows | None:
        """The rows without preempted sequences."""
        kept = {sequence for sequence in rows.sequences if sequence.is_running}
        return rows.only(self.manager, kept) if kept else None

    def _refuse_what_never_fits(self, builder: PlanBuilder) -> None:
        """Nobody can go on: refuses running requests that fitted before the pool shrank."""
        for group in {sequence.group: None for sequence in self.running.members}:
            reason = self.capacity.why_never(group.request)
            if reason is not None:
                builder.refuse(group, reason)

    # --- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, builder: PlanBuilder) -> None:
        """Reserves a place for the next token of every sequence that decodes, and for its drafts while there is room."""
        sequences, lanes, batch = self.running.decoding.rows()
        counts, drafts = self._counts(sequences), None
        if self.running.proposals:
            num_tokens = len(sequences) if counts is None else int(counts.sum())
            drafts = self._draft_counts(sequences, lanes, builder.budget - num_tokens)
            counts = counts if drafts is None else drafts + (1 if counts is None else counts)
        rows: DecodeRows | None
        try:
            slots = self.manager.extend_batch(batch, 1 if counts is None else counts)
            rows = DecodeRows(sequences, lanes, batch, counts, drafts, slots)
        except OutOfBlocksError:
            rows = self._decode_under_pressure(sequences, builder)
        if rows is not None:
            self.running.lanes.places[rows.lanes] += 1 if rows.counts is None else rows.counts
            builder.budget -= rows.slots.shape[1]
            builder.decode = rows

    def _counts(self, sequences: Sequence[ScheduledSequence]) -> Int64Array | None:
        """Tokens of each row without drafts: its newest one, and those that it computes again; None: one each."""
        if not self.running.recomputing:
            return None
        return np.array([1 + len(sequence.accepted) for sequence in sequences], np.int64)

    def _draft_counts(
        self, sequences: tuple[ScheduledSequence, ...], lanes: Int64Array, spare: int
    ) -> Int64Array | None:
        """The proposed drafts of each row, as far as `spare` tokens of the step and `max_new_tokens` allow."""
        counts = np.zeros(len(sequences), np.int64)
        left = self.running.lanes.limit[lanes] - self.running.lanes.generated[lanes] - 1
        for row, sequence in enumerate(sequences):
            if sequence.drafts is not None:
                counts[row] = max(0, min(len(sequence.drafts), int(left[row]), spare))
                spare -= int(counts[row])
        return counts if counts.any() else None

    def _decode_under_pressure(
        self, sequences: tuple[ScheduledSequence, ...], builder: PlanBuilder
    ) -> DecodeRows | None:
        """Memory is short: drops drafts and serves the highest ranks; others are preempted or sit out this step."""
        left = sorted(sequences, key=lambda sequence: sequence.rank)
        while left:
            rows, counts = make_rows(self.manager, left), self._counts(left)
            try:
                slots = self.manager.extend_batch(rows[2], 1 if counts is None else counts)
                return DecodeRows(*rows, counts, None, slots)
            except OutOfBlocksError:
                needy = self._needy(rows[2], left) or left
                requester = needy[self._num_served(needy)]
                victim = self.queues.victim(requester)
                if victim is not None:
                    builder.preempt(victim)
                    left = [sequence for sequence in left if sequence.is_running]
                else:  # lower ranks would find no victim either
                    stalled = {sequence for sequence in needy if sequence.rank >= requester.rank}
                    self.queues.stats.stalls += len(stalled)
                    left = [sequence for sequence in left if sequence not in stalled]
        return None

    def _needy(self, batch: SequenceBatch, sequences: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """The sequences whose next tokens need a new block: their last block is full, or a fork shares it."""
        at_the_end = batch.lengths() % self.manager.config.block_size == 0
        return [
            sequence
            for sequence, ends in zip(sequences, at_the_end.tolist(), strict=True)
            if (ends or sequence.group.next_index > 1 or len(sequence.accepted)) and any(self._needs(sequence))
        ]

    def _needs(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        """Blocks per pool that the next step of a sequence takes, without drafts."""
        return self.manager.blocks_needed(sequence.live_handle(), 1 + len(sequence.accepted))

    def _num_served(self, needy: list[ScheduledSequence]) -> int:
        """How many of these sequences, in order of rank, the available blocks suffice for; at most all but one."""
        needs = [(s.request.scope.tenant, self._needs(s)) for s in needy[:-1]]
        return self.capacity.supply.num_served(needs)

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _continue_prompts(self, builder: PlanBuilder) -> None:
        """Plans the next chunk of every prompt that has begun, the highest rank first."""
        for sequence in sorted(self.running.prefilling, key=lambda sequence: sequence.rank):
            if builder.is_full:
                return
            if not sequence.is_running:  # preempted for one before it
                continue
            start, handle = int(self.running.lanes.places[sequence.lane]), sequence.live_handle()
            slots: Int32Array | None
            if handle.num_reserved > start:  # it was held back with a place for its only token
                slots = self.manager.slot_mapping([handle], start, handle.num_reserved)
            else:
                stop = builder.chunk_stop(sequence.request, start, sequence.prefill_target)
                stop = self.manager.step_end(handle, start, stop)
                if stop == start:  # what it must compute at once does not fit into this step
                    continue
                slots = self._extend_chunk(sequence, start, stop, builder)
            if slots is None:
                self.queues.stats.stalls += 1
                continue
            stop = start + slots.shape[1]
            self.running.lanes.places[sequence.lane] = stop
            builder.plan_chunk(sequence, PromptChunk(start, stop, slots))

    def _extend_chunk(
        self, sequence: ScheduledSequence, start: int, stop: int, builder: PlanBuilder
    ) -> Int32Array | None:
        """Reserves a chunk. Preempts lower ranks, then makes the chunk smaller; None if not even one token fits."""
        while stop > start:
            try:
                return self.manager.extend(sequence.live_handle(), stop - start)
            except OutOfBlocksError:
                victim = self.queues.victim(sequence)
                if victim is not None:
                    builder.preempt(victim)
                else:
                    stop = start + (stop - start) // 2
                    stop = sequence.request.step_stop(start, stop, stop)
        return None


class Stop(Enum):
    """Why nobody behind a candidate may go first."""

    OUT_OF_TOKENS = auto()  # this step is full
    BLOCKED = auto()  # no memory or lane


class Estimates:
    """Answers what a scheduling policy asks about a waiting sequence (`CachedTokens`).

    A policy asks about dozens of sequences to admit one or two. What is cached of a sequence is looked up when it is asked
    about first, and at every `LOOK_UP_EVERY`th question after that; `Admissions` looks at the one that it admits.
    """

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self.manager = queues.manager

    def __call__(self, sequence: ScheduledSequence) -> int:
        return self._cached(sequence)[0]

    def first_token_seconds(self, sequence: ScheduledSequence) -> float:
        """Seconds to its first token if it were alone: load what lower tiers have, compute what is not cached."""
        (num_cached, num_below), costs = self._cached(sequence), self.queues.costs
        loaded = costs.transfer_seconds(num_below * self.manager.config.bytes_per_token)
        return loaded + costs.prefill_seconds(len(sequence.tokens) - num_cached, num_cached)

    def waited_seconds(self, sequence: ScheduledSequence) -> float:
        """Seconds since its request arrived."""
        return self.queues.clock() - sequence.group.arrival

    def _cached(self, sequence: ScheduledSequence) -> tuple[int, int]:
        """How many of its tokens are cached, and how many of those on lower tiers."""
        if sequence.num_asked % LOOK_UP_EVERY == 0:
            match = self.manager.match_prefix(sequence.prompt)
            below = sum(count for tier, count in match.tokens_by_tier.items() if tier != Tier.GPU)
            sequence.cached = match.num_tokens, below
        sequence.num_asked += 1
        return sequence.cached


class Admissions:
    """Brings sequences onto the GPU, in the order of the policy."""

    def __init__(self, queues: Queues, capacity: Capacity) -> None:
        self.queues = queues
        self.capacity = capacity
        self.manager = queues.manager
        self.config = queues.config
        self._estimates = Estimates(queues)
        self.num_arrivals = 0  # raised by the scheduler whenever a request is added
        self._blocked_at = (-1, -1)  # departures and arrivals when a candidate was last blocked
        self._retry_in = 0

    def run(self, builder: PlanBuilder) -> None:
        """Admits and resumes for one step."""
        queues, running = self.queues, self.queues.running
        if builder.preempted or not (len(queues.resuming) or len(queues.policy)):
            return  # a step that had to preempt has no room for others
        self._retry_in -= 1
        if running.members and self._retry_in > 0 and self._blocked_at == (running.departures, self.num_arrivals):
            return
        self._blocked_at = (-1, -1)
        candidates = self._candidates()
        for position, sequence in enumerate(candidates):
            stop = self._try(sequence, builder)
            if stop is Stop.BLOCKED:
                self._blocked_at, self._retry_in = (running.departures, self.num_arrivals), RETRY_STEPS
            if stop is not None:
                self._prefetch(candidates[position : position + self.config.prefetch_requests])
                return

    def _candidates(self) -> list[ScheduledSequence]:
        """The sequences to try, in order: more urgent ones first, preempted ones before new ones."""
        limit = self.queues.running.lanes.num_free + SPARE_CANDIDATES
        waiting = self.queues.policy.candidates(limit, self._estimates)
        return sorted([*self.queues.resuming, *waiting], key=lambda sequence: sequence.urgency)

    def _try(self, sequence: ScheduledSequence, builder: PlanBuilder) -> Stop | None:
        """Brings a sequence in; None too if it waits for something of its own, so that those behind it may go first."""
        if sequence.is_finished:  # refused together with a sequence of the same request
            return None
        if sequence.in_flight:  # preempted while a plan that samples for it is under way
            return None
        if self.capacity.has_shrunk() and (reason := self.capacity.why_never(sequence.request)) is not None:
            builder.refuse(sequence.group, reason)
            return None
        running = self.queues.running
        lanes_needed = 1 if sequence.group.branched else sequence.request.n
        while running.num_free_lanes < lanes_needed:
            if not self._preempt_for(sequence, builder):
                return Stop.BLOCKED
        if sequence.state is SequenceState.SWAPPED:
            return self._resume_swapped(sequence, builder)
        return self._allocate(sequence, builder)

    def _preempt_for(self, sequence: ScheduledSequence, builder: PlanBuilder) -> bool:
        """Preempts a less urgent sequence; returns whether there was one."""
        if self.capacity.guaranteed:
            return False
        victim = self.queues.victim(sequence, only_less_urgent=True)
        if victim is None:
            return False
        builder.preempt(victim)
        return True

    # --- memory ------------------------------------------------------------------------------------------------------

    def _has_room(self, sequence: ScheduledSequence, admission: Admission, future: list[int]) -> bool:
        """Whether it fits beside everything that running sequences were promised."""
        running = self.queues.running
        promised = self.capacity.outstanding(running.lanes)
        room = self.capacity.supply.room(admission, sequence.request.scope.tenant, running.members)
        numbers = zip(room, admission.blocks_needed, future, promised, strict=True)
        return bool(admission) and all(have >= need + later + taken for have, need, later, taken in numbers)

    def _could_make_room(self, sequence: ScheduledSequence, admission: Admission, future: list[int]) -> bool:
        """Whether all less urgent sequences together hold what is missing."""
        blocks = sum(s.live_handle().num_blocks for s in self.queues.running.members if s.urgency > sequence.urgency)
        missing = (
            need + later - have
            for have, need, later in zip(admission.blocks_available, admission.blocks_needed, future, strict=True)
        )
        return blocks > 0 and all(
            blocks * self.capacity.blocks_per_column(pool) >= number for pool, number in enumerate(missing)
        )

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _allocate(self, sequence: ScheduledSequence, builder: PlanBuilder) -> Stop | None:
        """Admits a waiting sequence with the first chunk of its tokens."""
        request, prompt = sequence.request, sequence.prompt
        num_tokens = len(sequence.tokens)
        match = self.manager.match_prefix(prompt)
        alone = not self.queues.running.members  # then nobody would free memory for it: it must go on with less
        if match.in_flight and self.config.wait_for_prefix and not alone:
            if not sequence.waited_for_prefix:
                sequence.waited_for_prefix = True
                self.queues.stats.prefix_waits += 1
            return None
        if builder.is_full:
            return Stop.OUT_OF_TOKENS
        if match.has_last_logits and num_tokens > 1 and not request.ends_with_item(num_tokens):
            num_tokens -= 1  # all is cached: it decodes its last token
            prompt = Prompt(sequence.tokens[:-1], request.scope, request.items, request.cross_tokens, copy=False)
        start = min(match.num_tokens, num_tokens - 1)
        stop = builder.chunk_stop(request, start, num_tokens)
        if stop == start:
            return Stop.OUT_OF_TOKENS
        if not alone:
            future = self.capacity.future(sequence, stop)
            while not self._has_room(sequence, admission := self._ask(sequence, stop), future):
                if not self._could_make_room(sequence, admission, future) or not self._preempt_for(sequence, builder):
                    return Stop.BLOCKED
        handle = self._allocate_at_most(sequence, prompt, start, stop, alone)
        if handle is None:
            return Stop.BLOCKED
        self._enter(sequence, handle)
        (builder.resumed if sequence.num_preemptions else builder.admitted).append(sequence)
        self.queues.stats.cached_tokens += handle.num_cached_tokens
        self._start_prompt(sequence, handle, builder)
        return None

    def _ask(self, sequence: ScheduledSequence, stop: int) -> Admission:
        return self.manager.can_allocate(sequence.prompt, reserve=stop)

    def _allocate_at_most(
        self, sequence: ScheduledSequence, prompt: Prompt, start: int, stop: int, alone: bool
    ) -> KVCacheHandle | None:
        """Blocks for tokens up to `stop`; None if there are too few. A sequence alone on the GPU also begins with fewer."""
        request = sequence.request
        while True:
            try:
                return self.manager.allocate(
                    sequence.id,
                    prompt,
                    reserve=stop,
                    retention=request.retention,
                    ttl=request.ttl,
                    session=request.session,
                )
            except OutOfBlocksError:
                if not alone or stop <= start + 1:
                    return None
                stop = start + (stop - start) // 2

    def _enter(self, sequence: ScheduledSequence, handle: KVCacheHandle) -> None:
        """Moves a sequence onto the GPU, and records what it is promised."""
        self.queues.enter(sequence, handle)
        self.capacity.promise(self.queues.running.lanes, sequence)

    def _start_prompt(self, sequence: ScheduledSequence, handle: KVCacheHandle, builder: PlanBuilder) -> None:
        """Plans the first chunk of what is not cached, unless cached blocks are still being copied to the GPU."""
        running = self.queues.running
        start, stop = handle.num_written, handle.num_reserved
        if start == len(sequence.tokens):  # a prompt with stored logits, of one token or with an image at its end
            self.manager.rewind(handle, 1)
            start = stop = start - 1
        # Memory may have been short, so that less was reused than had been found
        end = self.manager.step_end(handle, start, min(stop, start + builder.budget))
        end = sequence.request.step_stop(start, end, end)
        if end < stop:
            self.manager.rewind(handle, stop - end)
            stop = end
        decodes = start == len(sequence.tokens) - 1 and stop == start
        if builder.hold_back(sequence, decodes=decodes):
            if stop - start > 1:  # reserved again when it begins; a single place may lie in a block that others read
                self.manager.rewind(handle, stop - start)
            running.lanes.places[sequence.lane] = start
            return
        running.lanes.places[sequence.lane] = stop
        running.begin(sequence, decodes=decodes)
        if stop > start:
            builder.plan_chunk(sequence, PromptChunk(start, stop, self.manager.slot_mapping([handle], start, stop)))

    # --- swapped -----------------------------------------------------------------------------------------------------

    def _resume_swapped(self, sequence: ScheduledSequence, builder: PlanBuilder) -> Stop | None:
        """Brings a sequence back from the host. It takes no tokens of the step: it goes on in the next one."""
        running, handle = self.queues.running, sequence.live_handle()
        if running.members:
            future = self.capacity.future(sequence, handle.num_reserved)
            while not self._has_room(sequence, admission := self.manager.can_swap_in(handle), future):
                if not self._could_make_room(sequence, admission, future) or not self._preempt_for(sequence, builder):
                    return Stop.BLOCKED
        try:
            self.manager.swap_in(handle)
        except OutOfBlocksError:
            return Stop.BLOCKED
        committed, written = handle.num_committed, handle.num_written
        if written > committed:  # computed by plans that were in flight when it left
            self.manager.commit(handle, sequence.tokens[committed:written])
        self._enter(sequence, handle)
        self.queues.stats.swapped_in += 1
        builder.resumed.append(sequence)
        decodes = handle.num_reserved >= len(sequence.tokens) - 1
        if not builder.hold_back(sequence, decodes=decodes):
            running.begin(sequence, decodes=decodes)
        return None

    # --- next in line ------------------------------------------------------------------------------------------------

    def _prefetch(self, candidates: list[ScheduledSequence]) -> None:
        """Brings offloaded prefixes of the requests next in line up to the GPU, into room that nobody was promised.

        It does so only where all that a request needs fits. Otherwise the request would wait for room, and its prefix would
        be evicted again before the request runs.
        """
        for sequence in candidates if self.manager.inspect.has_tier(Tier.HOST, Tier.DISK) else ():
            if sequence.state is not SequenceState.WAITING or sequence.in_flight:
                continue
            if self.manager.match_prefix(sequence.prompt).tokens_by_tier.keys() <= {Tier.GPU}:
                continue
            num_tokens = len(sequence.tokens)
            admission, future = self._ask(sequence, num_tokens), self.capacity.future(sequence, num_tokens)
            if not self._has_room(sequence, admission, future):
                continue
            try:
                self.queues.stats.prefetched_blocks += self.manager.cache.onboard(sequence.prompt)
            except OutOfBlocksError:  # other tenants' guarantees are in the way
                continue
