"""The scheduler: which sequences compute which tokens in the next step. Read `Scheduler` first.

    scheduler = Scheduler(manager)
    scheduler.add(Request("r1", prompt, max_new_tokens=64))
    while scheduler.has_work:
        plan = scheduler.step()                  # who computes what, with token ids, positions and slots
        ...                                      # run plan.copies, then the forward pass, then sample
        for done in scheduler.complete(plan, tokens).finished:
            print(done.request.id, done.token_ids)

It decides and counts; it moves no bytes, imports no tensor library, and has no clock but the one it is given: a simulator
drives the same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kvpool.checks import as_count
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    NeverFitsError,
    SequenceStateError,
    UnknownRequestError,
)
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import BoolArray, Int32Array, as_token_array
from kvpool.scheduling.batch_plan import BatchPlan
from kvpool.scheduling.capacity import Capacity
from kvpool.scheduling.cost_model import CostModel, LearningCostModel, LinearCostModel
from kvpool.scheduling.planning import Planner
from kvpool.scheduling.queues import Queues, SchedulerStats
from kvpool.scheduling.request import (
    Finished,
    FinishReason,
    Output,
    Request,
    RequestGroup,
    ScheduledSequence,
    SequenceState,
)
from kvpool.scheduling.results import Fork, Results
from kvpool.scheduling.running import Arrivals
from kvpool.scheduling.scheduler_config import SchedulerConfig
from kvpool.scope import ReuseHint, check_hint


class StepResult(NamedTuple):
    """What `complete` did besides moving sequences on."""

    finished: list[Finished]
    forks: list[Fork]


class Scheduler:
    """Continuous batching over a `KVCacheManager`: `add` requests, then `step` and `complete` until nothing is left.

    `step()` may be called before the last plan is completed, so that the next step is prepared while the device works. Token
    ids that are not known yet are -1 in the plan; the engine takes them from the device. Run and complete plans in the order
    in which they were made. One thread at a time may call a scheduler.

    Copies from a lower tier take a while. With `reports_landings`, the engine says when they are done (`landed`): a sequence
    that reads these blocks joins a later step, and the others do not wait for it.

    >>> from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
    >>> manager = KVCacheManager(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=8))
    >>> scheduler = Scheduler(manager)
    >>> scheduler.add(Request("r1", [5, 6, 7], max_new_tokens=2))
    >>> first = scheduler.step()
    >>> first.token_ids.tolist(), first.positions.tolist()
    ([5, 6, 7], [0, 1, 2])
    >>> second = scheduler.step()  # before the first sample is known
    >>> second.token_ids.tolist(), second.positions.tolist()
    ([-1], [3])
    >>> scheduler.complete(first, [8]).finished
    []
    >>> scheduler.complete(second, [9]).finished[0].token_ids.tolist()
    [8, 9]
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig | None = None,
        cost_model: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        reports_landings: bool = False,
    ) -> None:
        if not isinstance(manager, KVCacheManager):
            raise ConfigError(f"Scheduler takes a KVCacheManager, got {type(manager).__name__}")
        if config is not None and not isinstance(config, SchedulerConfig):
            raise ConfigError(f"Scheduler takes a SchedulerConfig, got {type(config).__name__}")
        if cost_model is not None and not isinstance(cost_model, CostModel):
            raise ConfigError(f"cost_model must have the methods of CostModel, got {type(cost_model).__name__}")
        if not callable(clock):
            raise ConfigError(f"clock must be a function that returns seconds, got {clock!r}")
        self.manager = manager
        self.config = config if config is not None else SchedulerConfig()
        self.costs: CostModel = cost_model if cost_model is not None else LinearCostModel()
        self.clock = clock
        self._capacity = Capacity(manager, self.config)
        self._queues = Queues(manager, self.config, self.costs, clock)
        if reports_landings:
            self._queues.running.arrivals = Arrivals()
        self._planner = Planner(self._queues, self._capacity)
        self._groups: dict[Hashable, RequestGroup] = {}
        self._deadlines: list[tuple[float, int, Hashable]] = []
        self._in_flight: deque[BatchPlan] = deque()
        self._num_added = 0
        self._num_plans = 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request. Raises `NeverFitsError` at once if it could not be completed even with the whole pool."""
        if not isinstance(request, Request):
            raise InvalidArgumentError(f"add takes a Request, got {request!r}")
        if self._is_scheduled(request.id):
            raise DuplicateRequestError(f"request {request.id!r} is already scheduled; use another id")
        self.refuse_oversized(request)
        try:
            self.manager.get((request.id, 0))
        except UnknownRequestError:
            pass
        else:
            raise DuplicateRequestError(f"the manager already has a sequence {(request.id, 0)!r}; use another id")
        group = RequestGroup(request, self.clock() if request.arrival is None else request.arrival)
        self._groups[request.id] = group
        self._num_added += 1
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, self._num_added, request.id))
        self._queues.wait(group.sequences[0])
        self._planner.admissions.num_arrivals += 1

    def refuse_oversized(self, request: Request) -> None:
        """Raises `NeverFitsError` if a request could not be completed even with the whole pool."""
        if not isinstance(request, Request):
            raise InvalidArgumentError(f"refuse_oversized takes a Request, got {request!r}")
        if request.n > self.config.max_sequences:
            raise NeverFitsError(
                f"request {request.id!r}: n={request.n} is over max_sequences={self.config.max_sequences}"
            )
        reason = self._capacity.why_never(request)
        if reason is not None:
            raise NeverFitsError(f"request {request.id!r} can never run: {reason}")

    def fork(self, parent: ScheduledSequence, request: Request) -> bool:
        """Adds a request whose prompt is everything that a sequence has, prompt and samples.

        If the sequence decodes and nothing of it is in flight, the request shares all of its blocks and decodes in the next
        step: True. Otherwise it waits like any other and reuses what is cached: False.
        """
        if not isinstance(request, Request):
            raise InvalidArgumentError(f"fork takes a Request, got {request!r}")
        known = self.token_ids(parent)
        if not np.array_equal(known, request.prompt):
            raise InvalidArgumentError(
                f"request {request.id!r}: its prompt is not what {parent!r} has; see token_ids()"
            )
        self.add(request)
        running, (child,) = self._queues.running, self._group(request.id).sequences
        can_share = parent in running.decoding and not running.lanes.in_flight[parent.lane]
        can_share = can_share and parent.drafts is None and not len(parent.accepted)
        same = request.scope == parent.request.scope and request.multimodal == parent.request.multimodal
        plain = request.n == 1 and same
        if not (can_share and plain) or running.num_free_lanes < 1 or self._capacity.guaranteed:
            return False
        (handle,) = self.manager.fork(parent.live_handle(), child.id)
        self._queues.enter(child, handle)
        self._capacity.promise(running.lanes, child)
        running.decoding.add(child)
        return True

    def cancel(self, request_id: Hashable) -> Finished:
        """Ends a request at any moment, also while a plan with it is in flight; what it has computed stays cached."""
        return self._stop(self._group(request_id), FinishReason.CANCELLED)

    def finish(self, request_id: Hashable, index: int | None = None, hint: ReuseHint | None = None) -> Finished | None:
        """The engine found a reason to stop (a stop string): ends one sequence of a request, or all of them.

        A `hint` tells the eviction policy more, for example that the answer calls a tool. Returns the outputs of the request
        if that was its last sequence.
        """
        if hint is not None:
            check_hint(hint)
        group = self._group(request_id)
        if index is None:
            return self._stop(group, FinishReason.STOP, hint)
        index = as_count(index, "index")
        chosen = [sequence for sequence in group.sequences if sequence.index == index]
        if not chosen or chosen[0].is_finished:
            raise UnknownRequestError(f"request {request_id!r} has no live sequence {index}")
        self._queues.finish(chosen, FinishReason.STOP, hint)
        return self._report(group)

    def propose(self, sequence: ScheduledSequence, drafts: Any) -> None:
        """Draft tokens that the next step should verify behind this sequence's newest token (speculative decoding).

        The step verifies as many as fit beside the other sequences, at most `max_draft_tokens`. The sequence must have no
        sample in flight.
        """
        _check_sequence(sequence)
        ids = as_token_array(drafts, "drafts")
        lanes, lane = self._queues.running.lanes, sequence.lane
        if sequence not in self._queues.running.decoding or lanes.in_flight[lane]:
            raise SequenceStateError(f"{sequence!r} cannot take drafts: it does not decode, or its sample is in flight")
        if not len(ids) or not self.config.max_draft_tokens or lanes.samples[lane] > 1:
            return
        self._queues.running.proposals.add(sequence)
        sequence.drafts = ids[: self.config.max_draft_tokens].copy()

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> BatchPlan:
        """Plans the next step and takes the memory for it. An empty plan may still have copies; it need not be completed."""
        finished = self._expire()
        self._num_plans += 1
        plan, builder = self._planner.plan(self._num_plans, len(self._in_flight))
        refused = (self._report(group, reason) for group, reason in builder.refused)
        plan.finished = [*finished, *(report for report in refused if report is not None)]
        if not plan.is_empty:
            self._in_flight.append(plan)
        return plan

    def complete(self, plan: BatchPlan, tokens: Any = (), counts: Any = None) -> StepResult:
        """The plan has run, and `tokens` are its samples: `plan.num_samples[row]` for each of `plan.sampling_rows`.

        Where that differs, `counts` says how many tokens each of these rows got. A row with drafts gets the accepted ones
        and one more. Sequences may have been cancelled or preempted meanwhile.
        """
        if _check_plan(plan).is_empty:
            return StepResult([], [])
        self._require_oldest(plan)
        ids = as_token_array(tokens)
        results = Results(self._queues, self._capacity, plan, ids)
        results.apply(results.checked_counts(counts))
        self._in_flight.popleft()
        reports = (self._report(group) for group in results.groups)
        return StepResult([report for report in reports if report is not None], results.forks)

    def abandon(self, plan: BatchPlan) -> list[Finished]:
        """The forward pass of a plan failed after its copies ran: ends all its requests. What they computed stays cached."""
        if _check_plan(plan).is_empty:
            return []
        self._require_oldest(plan)
        groups = {sequence.group: None for sequence in plan.sequences if not sequence.group.is_finished}
        finished = [self._stop(group, FinishReason.FAILED) for group in groups]
        self._in_flight.popleft()
        return finished

    def landed(self, plan: BatchPlan) -> None:
        """The copies of a plan are done. Sequences that waited for the blocks join the next step (`reports_landings`)."""
        if self._queues.running.arrivals is not None:
            self._queues.running.arrivals.landed(_check_plan(plan).number)

    def _require_oldest(self, plan: BatchPlan) -> None:
        if not self._in_flight or plan is not self._in_flight[0]:
            raise SequenceStateError(
                "plans must be completed or abandoned once each, in the order in which step() made them"
            )

    def observe(self, plan: BatchPlan, seconds: float) -> None:
        """The forward pass of a plan took this long: a cost model that learns (`LinearCostModel`) takes it into account."""
        _check_plan(plan)
        is_number = isinstance(seconds, (int, float, np.integer, np.floating)) and not isinstance(seconds, bool)
        if not (is_number and 0 <= seconds < np.inf):
            raise InvalidArgumentError(f"seconds must be the time that a step took, got {seconds!r}")
        if isinstance(self.costs, LearningCostModel):
            decoding = int(plan.kv_lengths[: plan.num_decode].sum())
            self.costs.observe_step(plan.prefills(), plan.num_decode, decoding, seconds)

    # --- looking at it -----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is not over, or a plan is in flight."""
        return bool(self._groups or self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold nothing: new ones, and those preempted by recompute."""
        preempted = sum(sequence.state is SequenceState.WAITING for sequence in self._queues.resuming)
        return len(self._queues.policy) + preempted

    def waiting(self, limit: int) -> list[ScheduledSequence]:
        """At most `limit` of the waiting sequences, preempted ones first."""
        limit = as_count(limit, "limit")
        preempted = [sequence for sequence in self._queues.resuming if sequence.state is SequenceState.WAITING]
        return [*preempted, *islice(self._queues.policy, limit)][:limit]

    @property
    def num_running(self) -> int:
        """Sequences with blocks on the GPU."""
        return len(self._queues.running)

    @property
    def decoding(self) -> tuple[ScheduledSequence, ...]:
        """The sequences that decode in the next step if there is memory for it."""
        return self._queues.running.decoding.rows()[0]

    @property
    def num_swapped(self) -> int:
        """Sequences whose blocks are on the host."""
        return sum(sequence.state is SequenceState.SWAPPED for sequence in self._queues.resuming)

    @property
    def num_in_flight(self) -> int:
        """Plans that are not completed yet."""
        return len(self._in_flight)

    @property
    def num_arriving(self) -> int:
        """Running sequences that are held back until their blocks have come from a lower tier."""
        return len(self._queues.running.arrivals or ())

    @property
    def stats(self) -> SchedulerStats:
        """Counters, live."""
        return self._queues.stats

    def current_rows(self, plan: BatchPlan) -> BoolArray:
        """Rows of a plan in flight whose sequence has not left the GPU since: its blocks hold what the plan computes."""
        return _check_plan(plan).current_rows(self._queues.running.departures)

    def sequences(self, request_id: Hashable) -> tuple[ScheduledSequence, ...]:
        """The sequences of a request that is not over."""
        return tuple(self._group(request_id).sequences)

    def token_ids(self, sequence: ScheduledSequence) -> Int32Array:
        """Prompt and samples of a sequence, without the samples in flight."""
        _check_sequence(sequence)
        return self._queues.running.known_tokens(sequence) if sequence.is_running else sequence.tokens

    # --- ends --------------------------------------------------------------------------------------------------------

    def _group(self, request_id: Hashable) -> RequestGroup:
        if not self._is_scheduled(request_id):
            raise UnknownRequestError(f"no request {request_id!r} is scheduled; it may be over")
        return self._groups[request_id]

    def _is_scheduled(self, request_id: Hashable) -> bool:
        try:
            return request_id in self._groups
        except Exception as error:
            message = f"a request id must be hashable and comparable, got {request_id!r}: {error}"
            raise InvalidArgumentError(message) from None

    def _stop(
        self, group: RequestGroup, reason: FinishReason, hint: ReuseHint | None = None, detail: str = ""
    ) -> Finished:
        """Ends all sequences of a request, wherever they are."""
        self._queues.finish(group.sequences, reason, hint)
        report = self._report(group, detail)
        assert report is not None
        return report

    def _report(self, group: RequestGroup, detail: str = "") -> Finished | None:
        """The outputs of a request that is over; None if it is not, or if they were reported before."""
        request = group.request
        if not group.is_finished or self._groups.pop(request.id, None) is None:
            return None
        outputs = tuple(
            Output(sequence.index, sequence.tokens[len(request.prompt) :], sequence.finish_reason)
            for sequence in group.sequences
            if sequence.finish_reason is not None
        )
        self.stats.finished += 1
        return Finished(request, outputs, detail)

    def _expire(self) -> list[Finished]:
        """Ends requests whose deadline has passed."""
        expired: list[Finished] = []
        now = self.clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, request_id = heappop(self._deadlines)
            group = self._groups.get(request_id)
            if (
                group is not None and group.request.deadline == deadline
            ):  # else it is over, and another request has its id
                expired.append(self._stop(group, FinishReason.DEADLINE))
        return expired


def _check_plan(plan: BatchPlan) -> BatchPlan:
    if not isinstance(plan, BatchPlan):
        raise InvalidArgumentError(f"a plan is what step() returned, got {plan!r}")
    return plan


def _check_sequence(sequence: ScheduledSequence) -> None:
    if not isinstance(sequence, ScheduledSequence):
        raise InvalidArgumentError(f"a sequence is one of those in a plan or of sequences(), got {sequence!r}")
