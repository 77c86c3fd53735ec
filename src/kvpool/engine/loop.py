"""The engine's loop: plans a step, runs it, samples, and gives each request its tokens. One thread drives it.

On a GPU the loop plans and launches the next step before it has the tokens of the last one, so that host and device work at
the same time. Only sampled ids are copied to the host. Some sequences cannot go on without their tokens. Either the next
step leaves them out (several samples), or the loop waits (drafts).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.core.handle import KVCacheHandle
from kvpool.engine.generation import Generation
from kvpool.engine.runner import ModelRunner
from kvpool.engine.sampling import Sampled, StepSampler
from kvpool.engine.scheduled_requests import ScheduledRequests
from kvpool.engine.speculation import num_accepted
from kvpool.engine.step_part import StepInputs, StepPart, StepParts
from kvpool.errors import KVPoolError, OutOfBlocksError, StepError, UnknownRequestError
from kvpool.kernels.layout import whole_device
from kvpool.pools.arrays import Int32Array, Int64Array, within
from kvpool.scheduling import BatchPlan, Fork, Request, ScheduledSequence, Scheduler
from kvpool.scheduling.request import Finished
from kvpool.storage import DataPlane, Transfer

log = logging.getLogger("kvpool")


class _Launched(NamedTuple):
    """A launched step: its plan, and its samples, which are on the host once the event `ready` has happened."""

    plan: BatchPlan
    began: float  # on the host's clock
    sampled: Sampled | None = None
    ready: Any = None


class _PlannedCopies:
    """The copies that a scheduler planned and that are not done."""

    def __init__(self, scheduler: Scheduler, plane: DataPlane) -> None:
        self._scheduler = scheduler
        self._plane = plane
        self._unstarted: list[BatchPlan] = []  # plans whose copies could not be started
        self._started: list[tuple[list[BatchPlan], Transfer]] = []

    def start(self, plan: BatchPlan) -> None:
        """Starts the copies of a plan, after those that could not be started before."""
        if plan.copies:
            self._unstarted.append(plan)
        transfer = self._plane.run_copies(plan.copies, overlap=True)
        if self._unstarted:
            self._started.append((self._unstarted, transfer))
            self._unstarted = []

    def tell(self) -> None:
        """Tells the scheduler which copies are done, so that it can plan with their blocks."""
        for done in [item for item in self._started if item[1].done()]:
            self._started.remove(done)
            for plan in done[0]:
                self._scheduler.landed(plan)

    def clear(self) -> None:
        """Forgets all copies: nobody waits for them any more."""
        self._unstarted.clear()
        self._started.clear()


class EngineLoop:
    """Joins scheduler, runner and sampling."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: ScheduledRequests,
        runner: ModelRunner,
        vocabulary: int,
        *,
        parts: Sequence[StepPart],
        overlap: bool,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        max_sequences = scheduler.config.max_sequences
        lanes = vocabulary, max_sequences, runner.device
        self._sampler = StepSampler(*lanes, requests.generations, scheduler.token_ids)
        self.parts = StepParts([self._sampler, *parts])
        self._last_token = torch.zeros(max_sequences, dtype=torch.int64, device=runner.device)  # by lane
        self._requests = requests
        self._flying: deque[_Launched] = deque()
        self._broken: list[Generation] = []  # requests that failed in this step
        self._copies = _PlannedCopies(scheduler, runner.plane)
        self._last_finish = 0.0
        self._remembers = scheduler.manager.config.remembered_blocks_limit > 0  # what left the cache: docs/why.md
        self._num_detours = -1  # of the runner, when the last step was over
        self.overlap = overlap

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._flying) or bool(self._requests.held())

    @property
    def held(self) -> list[Request]:
        """The requests that wait outside the scheduler."""
        return [request for held in self.parts.held for request in held()]

    @property
    def patience(self) -> float | None:
        """Seconds until `tend` has something to do; None: until something else happens."""
        return min((left for patience in self.parts.patience if (left := patience()) is not None), default=None)

    def tend(self) -> None:
        """Called between two steps: requests that have waited long enough outside the scheduler go on."""
        for tend in self.parts.tend:
            tend()

    @property
    def has_idle_work(self) -> bool:
        """Whether something is left to do while no request is there."""
        return any(has_idle_work() for has_idle_work in self.parts.has_idle_work)

    def use_idle_time(self) -> None:
        """Does a bit of that."""
        for use_idle_time in self.parts.use_idle_time:
            use_idle_time()

    # --- requests ----------------------------------------------------------------------------------------------------

    def add(self, generation: Generation, request: Request, hold: Callable[[], bool] | None = None) -> None:
        """Queues a request; raises if it can never run. `hold` may let it wait outside the scheduler, and says so."""
        self.scheduler.refuse_oversized(request)  # before it waits for anything
        for adding in self.parts.adding:
            adding()
        if hold is None or not hold():
            self._requests.enqueue(generation, request)

    @torch.inference_mode()  # as steps, in which the counts of penalties were made
    def fork(self, other: Generation, generation: Generation, request: Request) -> None:
        """Adds a request that goes on from what another one has; they share blocks where `Scheduler.fork` can."""
        live: tuple[ScheduledSequence, ...] = ()
        if self._requests.includes(other):
            with suppress(UnknownRequestError):  # the scheduler has ended it already
                live = self.scheduler.sequences(other.id)
        parent = next((sequence for sequence in live if sequence.index == 0 and not sequence.is_finished), None)
        if (
            parent is None
            or parent.request.scope != request.scope
            or not np.array_equal(self.scheduler.token_ids(parent), request.prompt)
        ):
            self.add(generation, request)
            return
        if self._requests.fork(parent, generation, request):
            (child,) = self.scheduler.sequences(request.id)
            handle = child.live_handle()
            generation.admit(handle.num_cached_tokens)
            self._explain(generation, handle)
            self._entered(child)

    def cancel(self, generation: Generation) -> None:
        """Ends a request that is not over; nothing happens if it is."""
        for release in self.parts.release:
            release(generation)
        if self._requests.includes(generation):
            self._end(self.scheduler.cancel(generation.id))

    def fail(self, error: KVPoolError) -> None:
        """Ends every request with an error."""
        for fail in self.parts.fail:
            fail(error)
        self._flying.clear()
        self._copies.clear()

    # --- steps -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> None:
        """Launches the next step, and finishes the one before it (or this one, where steps do not overlap)."""
        for planning in self.parts.planning:
            planning()
        self._copies.tell()
        plan = self.scheduler.step()
        for before in self.parts.before:
            before(plan)
        try:
            launched = self._launch(plan)
        except Exception as error:
            self._give_up(plan, error)
            return
        self._flying.append(launched)
        self._explain_admitted(plan)
        wait = not self.overlap or plan.is_empty
        while len(self._flying) > (0 if wait else 1):
            self._finish(self._flying.popleft())
        for done in plan.finished:  # now: the scheduler does not know them any more when the plan is completed
            self._end(done)

    def _give_up(self, plan: BatchPlan, error: Exception) -> None:
        """A step could not be launched: ends its requests. The others go on, unless the device is lost."""
        self._catch_up()
        if plan.is_empty:  # no request caused it, so the next step would fail like this one
            raise error
        if self.runner.device.type == "cuda":
            torch.cuda.current_stream(self.runner.device).synchronize()  # raises if the device is lost
            with whole_device:  # torch refuses this while another engine captures
                torch.cuda.empty_cache()
        log.error("a step of %d sequences failed; their requests end", len(plan.sequences), exc_info=error)
        failure = StepError(f"the step that this request was part of failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        for done in plan.finished:
            self._end(done)
        for done in self.scheduler.abandon(plan):
            self._end(done, failure)

    def _launch(self, plan: BatchPlan) -> _Launched:
        began = time.perf_counter()
        self._copies.start(plan)  # first: other sequences rely on them even if this step fails
        for sequence in plan.admitted:
            generation = self._generation(sequence)
            if generation is not None and not generation.samples:
                generation.admit(sequence.live_handle().num_cached_tokens)
        self._entered(*plan.admitted, *plan.resumed)
        if plan.is_empty:
            return _Launched(plan, began)
        logits = self._logits(plan)
        if not len(plan.sampling_rows):
            return _Launched(plan, began)
        sampled = self._sampler.sample(plan, logits, self._catch_up)
        self._remember(plan, sampled.tokens)
        if self.runner.device.type == "cpu":
            return _Launched(plan, began, sampled)
        on_host = sampled.to_host()
        ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return _Launched(plan, began, on_host, ready)

    def _logits(self, plan: BatchPlan) -> Tensor:
        """Runs the model. Returns the logits that tokens are sampled from."""
        token_ids = self.runner.upload(plan.token_ids.astype(np.int64))
        if plan.has_unknown_tokens:  # the newest samples of their lanes, which the host does not know yet
            lanes = np.repeat(plan.lanes, np.diff(plan.query_start))
            newest = self._last_token.index_select(0, self.runner.upload(lanes))
            token_ids = torch.where(token_ids < 0, newest, token_ids)
        inputs = StepInputs(token_ids, plan.positions)
        with inputs.closing:
            for change in self.parts.inputs:
                change(plan, inputs)
            logits = self.runner.run(plan, inputs)
        for take in self.parts.after:
            logits = take(plan, logits)
        return logits

    def _catch_up(self) -> None:
        """Finishes the steps in flight."""
        while self._flying:
            self._finish(self._flying.popleft())

    def _remember(self, plan: BatchPlan, tokens: Tensor) -> None:
        if not self.overlap:
            return
        rows = plan.sampling_rows
        if len(tokens) > len(rows):  # the next plan leaves out rows with several samples: any token will do
            tokens = tokens.index_select(0, self.runner.upload(plan.first_samples))
        self._last_token.index_copy_(0, self.runner.upload(plan.lanes[rows]), tokens)

    # --- results -----------------------------------------------------------------------------------------------------

    def _finish(self, launched: _Launched) -> None:
        plan = launched.plan
        if launched.ready is not None:
            launched.ready.synchronize()
        seconds = self._seconds(launched)
        if seconds is not None:
            self.scheduler.observe(plan, seconds)
        for done_with in self.parts.done:
            done_with(plan, seconds)
        if launched.sampled is None:
            result = self.scheduler.complete(plan)
        else:
            tokens, counts, samples_at = self._chosen(launched)
            result = self.scheduler.complete(plan, tokens, counts)
            self._hand_out(launched, tokens, counts, samples_at, result.forks)
        for done in result.finished:
            self._end(done)

    def _seconds(self, launched: _Launched) -> float | None:
        """How long a step took: since it began, or since the one before it was over; None if others take another time."""
        now = time.perf_counter()
        num_detours = self.runner.num_detours
        is_direct, self._num_detours = num_detours == self._num_detours, num_detours
        since, self._last_finish = max(launched.began, self._last_finish), now
        return now - since if is_direct and launched.sampled is not None and not launched.plan.copies else None

    def _chosen(self, launched: _Launched) -> tuple[Int32Array, Int64Array, Int64Array]:
        """The tokens for `complete`, how many of each sampling row, and which sample each of them is."""
        plan, sampled = launched.plan, launched.sampled
        assert sampled is not None
        rows = plan.sampling_rows
        tokens = sampled.tokens.numpy().astype(np.int32)
        counts = plan.num_samples[rows].copy()
        drafts = plan.num_drafts[rows]
        if not drafts.any():
            return tokens, counts, np.arange(len(tokens))
        counts = np.where(drafts > 0, num_accepted(plan, tokens), counts)
        samples_at = np.repeat(plan.first_samples, counts) + within(counts)
        return tokens[samples_at], counts, samples_at

    def _hand_out(
        self, launched: _Launched, tokens: Int32Array, counts: Int64Array, samples_at: Int64Array, forks: list[Fork]
    ) -> None:
        """Gives every request its new tokens. Further samples of a row belong to its forks."""
        plan, sampled = launched.plan, launched.sampled
        assert sampled is not None
        children: dict[ScheduledSequence, list[ScheduledSequence]] = {}
        for fork in forks:
            children.setdefault(fork.parent, []).append(fork.child)
            self._entered(fork.child)
        stopped: list[ScheduledSequence] = []
        ids = tokens.tolist()
        at = 0
        for row, count in zip(plan.sampling_rows.tolist(), counts.tolist(), strict=True):
            sequence = plan.sequences[row]
            start, at = at, at + count
            generation = self._generation(sequence)
            if generation is None or generation.has_ended(sequence.index):
                continue
            if plan.num_samples[row] > 1:
                self._entered(sequence)
                for place, owner in enumerate([sequence, *children.get(sequence, [])], start):
                    if self._push(generation, owner, ids[place : place + 1], sampled, samples_at[place : place + 1]):
                        stopped.append(owner)
            elif self._push(generation, sequence, ids[start:at], sampled, samples_at[start:at]):
                stopped.append(sequence)
        for broken in self._broken:
            with suppress(UnknownRequestError):  # it got its last token, so the step has ended it
                self._end(self.scheduler.cancel(broken.id))
        self._broken.clear()
        # Only now, when all samples have their tokens: the last sample that stops ends its request.
        for sequence in stopped:
            done = self.scheduler.finish(sequence.request.id, sequence.index)
            if done is not None:
                self._end(done)

    def _push(
        self,
        generation: Generation,
        sequence: ScheduledSequence,
        tokens: list[int],
        sampled: Sampled,
        samples_at: Int64Array,
    ) -> bool:
        """Gives a sample its new tokens. True: its text is complete, and the scheduler does not know it yet."""
        try:
            asked = generation.params.logprobs
            is_complete = generation.push(sequence.index, tokens, sampled.entries(samples_at, tokens, asked))
        except StepError:
            self._broken.append(generation)
            return False
        if is_complete:
            generation.end_sample(sequence.index, "stop")
            return not sequence.is_finished
        if sequence.finish_reason is not None:  # at once: steps in flight may bring more tokens of it
            generation.end_sample(sequence.index, sequence.finish_reason.value)
        return False

    def _generation(self, sequence: ScheduledSequence) -> Generation | None:
        """The request of a sequence, unless it is over."""
        return self._requests.generations.get(sequence.request.id)

    def _explain_admitted(self, plan: BatchPlan) -> None:
        """Asks why prompts missed that begin with this step. It is launched, so that a GPU works meanwhile.

        When others have gone on, the answer would be another one.
        """
        for sequence in plan.admitted:
            generation = self._generation(sequence)
            if generation is not None and not generation.samples:
                self._explain(generation, sequence.live_handle())

    def _explain(self, generation: Generation, handle: KVCacheHandle) -> None:
        if self._remembers:
            generation.missed = self.scheduler.manager.inspect.explain(handle)

    def _entered(self, *sequences: ScheduledSequence) -> None:
        for entered in self.parts.entered:
            for sequence in sequences:
                entered(sequence)

    def _end(self, done: Finished, failure: KVPoolError | None = None) -> None:
        """A request is over, by itself or because of a failure."""
        for ended in self.parts.ended:
            ended(done)
        generation = self._requests.pop(done.request.id)
        if generation is None:
            return
        if generation.is_private:
            self.scheduler.manager.cache.invalidate(None, scope=done.request.scope)
        for output in done.outputs:
            generation.end_sample(output.sample, output.reason.value)
        if done.detail:
            failure = OutOfBlocksError(f"request {done.request.id!r} was refused: {done.detail}")
        failure = failure or generation.failure
        if failure is None:
            for index in range(generation.params.n):  # it may have ended before its samples branched off
                generation.end_sample(index, done.reason.value)
        generation.end(failure)
