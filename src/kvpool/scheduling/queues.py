"""Where every sequence is (waiting, running or swapped), and the moves between these places."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from kvpool.config import Tier
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import InvalidArgumentError
from kvpool.manager import KVCacheManager
from kvpool.scheduling.cost_model import CostModel
from kvpool.scheduling.policies import OrderedQueue, make_scheduling_policy
from kvpool.scheduling.request import FinishReason, ScheduledSequence, SequenceState
from kvpool.scheduling.running import Running
from kvpool.scheduling.scheduler_config import PreemptionMode, SchedulerConfig
from kvpool.scope import ReuseHint

# What the reason of an end tells the eviction policy about a continuation.
_SAYS = {reason: ReuseHint(reason.value) for reason in (FinishReason.STOP, FinishReason.LENGTH)}


@dataclass
class SchedulerStats:
    """Counters since the scheduler was made; tokens and sequences, never mixed."""

    steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0  # of admitted prompts, not computed
    preemptions: int = 0
    swapped_out: int = 0  # preemptions by swap
    swapped_in: int = 0
    recomputed_tokens: int = 0  # computed once and given up by preemptions
    stalls: int = 0  # running sequences that had to sit out a step for want of memory
    prefix_waits: int = 0  # sequences that waited for a prefix that another one was computing
    prefetched_blocks: int = 0
    arrival_waits: int = 0  # times a sequence was held back until its blocks had come from a lower tier
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    finished: int = 0  # requests


class Queues:
    """All sequences that are not over: `policy` holds new ones, `resuming` preempted ones, `running` those on the GPU.

    Of equally urgent sequences, a preempted one goes before a new one.
    """

    def __init__(
        self, manager: KVCacheManager, config: SchedulerConfig, costs: CostModel, clock: Callable[[], float]
    ) -> None:
        self.manager = manager
        self.config = config
        self.costs = costs
        self.clock = clock
        self.policy = make_scheduling_policy(config.policy)
        self.resuming = OrderedQueue(lambda sequence: sequence.rank)
        self.running = Running(manager, config.max_sequences)
        self.stats = SchedulerStats()
        self._num_seniors = 0

    def wait(self, sequence: ScheduledSequence) -> None:
        """A new sequence begins to wait."""
        sequence.urgency = self.policy.urgency(sequence)
        self.policy.push(sequence)

    def leave_queue(self, sequence: ScheduledSequence) -> None:
        """A sequence no longer waits."""
        if sequence in self.resuming:
            self.resuming.remove(sequence)
        else:
            self.policy.remove(sequence)

    def enter(self, sequence: ScheduledSequence, handle: KVCacheHandle) -> None:
        """A waiting or swapped sequence got its blocks."""
        self.leave_queue(sequence)
        if not sequence.seniority:
            self._num_seniors += 1
            sequence.seniority = self._num_seniors
            self.policy.charge(sequence, sequence.request.num_places)
        self.running.enter(sequence, handle, handle.num_reserved)

    # --- preemption --------------------------------------------------------------------------------------------------

    def victim(self, above: ScheduledSequence, *, only_less_urgent: bool = False) -> ScheduledSequence | None:
        """The running sequence that loses the least if it is preempted for `above`; None if all rank higher.

        A sequence whose last sample is in flight is no victim, because it leaves by itself.
        """
        lanes = self.running.lanes
        leaves_by_itself = lanes.generated + lanes.in_flight >= lanes.limit
        best, least = None, (float("inf"), 0, 0)
        for sequence in self.running.members:
            ranks_lower = sequence.urgency > above.urgency if only_less_urgent else sequence.rank > above.rank
            if not ranks_lower or leaves_by_itself[sequence.lane]:
                continue
            loss = (self.loss(sequence), -sequence.seniority, -sequence.index)
            if loss < least:
                best, least = sequence, loss
        return best

    def loss(self, sequence: ScheduledSequence) -> float:
        """Seconds that it takes to bring a preempted sequence back to where it is."""
        return self._swap_seconds(sequence) if self._prefers_swap(sequence) else self._recompute_seconds(sequence)

    def _recompute_seconds(self, sequence: ScheduledSequence) -> float:
        """Seconds to compute it again, without the tokens that other sequences of its request hold: they stay cached."""
        places = int(self.running.lanes.places[sequence.lane])
        kept = min(places, len(sequence.request.prompt)) if self._has_siblings(sequence) else 0
        return self.costs.prefill_seconds(places - kept, kept)

    def _swap_seconds(self, sequence: ScheduledSequence) -> float:
        num_bytes = sequence.live_handle().num_blocks * self.manager.config.block_bytes
        return 2 * self.costs.transfer_seconds(num_bytes)

    def _has_siblings(self, sequence: ScheduledSequence) -> bool:
        return any(other is not sequence and other.is_running for other in sequence.group.sequences)

    def _prefers_swap(self, sequence: ScheduledSequence) -> bool:
        """Whether a preempted sequence is swapped to the host; otherwise it is computed again later.

        Forks are computed again: alone on the host, each would have its own copies of the blocks they share. So are sequences
        with drafts in flight, because nobody knows yet how many of their places will count, and those whose accepted drafts
        must be computed again anyway.
        """
        mode = self.config.preemption
        if (
            mode is PreemptionMode.RECOMPUTE
            or not self.manager.inspect.has_tier(Tier.HOST)
            or self._has_siblings(sequence)
        ):
            return False
        if sequence.num_drafts_in_flight or len(sequence.accepted):
            return False
        return mode is PreemptionMode.SWAP or self._swap_seconds(sequence) < self._recompute_seconds(sequence)

    def preempt(self, sequence: ScheduledSequence, num_planned: int) -> None:
        """Takes a sequence off the GPU. `num_planned` of its places belong to the step being planned: nobody writes them.

        Plans in flight write before the copies of the next plan run, so what they write is swapped out with the rest.
        """
        handle = sequence.live_handle()
        places = int(self.running.lanes.places[sequence.lane]) - num_planned
        # A sequence that was held back before its first token loses nothing: the prefix that it reuses stays cached.
        swap = handle.num_reserved == places + num_planned and self._prefers_swap(sequence)
        if swap:
            if num_planned:
                self.manager.rewind(handle, num_planned)
            self.manager.mark_written(handle, places - handle.num_written)
            swap = bool(self.manager.can_swap_out(handle))
        self.running.leave(sequence)
        if swap:
            self.manager.swap_out(handle)
            sequence.state = SequenceState.SWAPPED
            self.stats.swapped_out += 1
        else:
            self.manager.free(handle)
            sequence.handle = None
            sequence.state = SequenceState.WAITING
            self.stats.recomputed_tokens += places
        sequence.num_preemptions += 1
        self.stats.preemptions += 1
        self.resuming.push(sequence)

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(
        self, sequences: Iterable[ScheduledSequence], reason: FinishReason, hint: ReuseHint | None = None
    ) -> None:
        """Ends sequences, wherever they are, and gives back all they hold; those that ended before stay as they are.

        The eviction policy gets `hint`, or the hint of the request, or what the reason says about a continuation.
        """
        handles = []
        paused: list[tuple[str, str, float]] = []  # sessions that go on after so many seconds, with their tenants
        for sequence in sequences:
            if sequence.is_finished:
                continue
            if sequence.is_running:
                self.running.leave(sequence)
            else:
                self.leave_queue(sequence)
            if sequence.handle is not None:
                handles.append(sequence.handle)
                said = hint or _hint_of(sequence, reason)
                if said is not None:
                    self.manager.hint(sequence.handle, said)
                    session, seconds = sequence.request.session, said.expected_seconds
                    if session is not None and seconds is not None:
                        paused.append((session, sequence.request.scope.tenant, seconds))
                sequence.handle = None
            self.end(sequence, reason)
        self.manager.free_batch(handles)
        for name, tenant, expected in paused:
            with suppress(InvalidArgumentError):  # it has ended meanwhile
                self.manager.sessions.pause(name, expected, tenant=tenant)

    def end(self, sequence: ScheduledSequence, reason: FinishReason) -> None:
        """Notes that a sequence which holds nothing is over."""
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        unused = sequence.request.num_places + 1 - len(sequence.tokens)
        if sequence.seniority and unused > 0:
            self.policy.charge(sequence, -unused)


def _hint_of(sequence: ScheduledSequence, reason: FinishReason) -> ReuseHint | None:
    """The hint about a continuation that its request gives, or the one that follows from the reason."""
    usual, request = _SAYS.get(reason), sequence.request
    if usual is None or request.hint is None:
        return usual
    if callable(request.hint) and reason is FinishReason.LENGTH:  # an answer that was cut says nothing
        return usual
    return request.hint_at_end(sequence.tokens[len(request.prompt) :]) or usual
