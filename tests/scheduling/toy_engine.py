"""A model whose next token depends on every token before it, as the blocks hold them: whatever is lost shows up.

Its "keys and values" are the token ids themselves, written to slots and copied between tiers as the plans say. It reads a
sequence's history through the block table, never from the scheduler, so a wrong slot, copy or table gives a wrong token.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool import CopyOp, GroupKind, KVCacheManager, Tier
from kvpool.kinds import kind_of
from kvpool.scheduling import BatchPlan, Finished, Request, Scheduler, StepResult
from kvpool.scheduling.request import SequenceState

VOCABULARY = 50
NOTHING = -7  # what a block holds before anybody wrote to it


def next_token(history: np.ndarray, sample: int = 0) -> int:
    """The model: a token out of the whole history."""
    return zlib.crc32(np.ascontiguousarray(history, np.int32).tobytes(), sample) % VOCABULARY


def expected_output(request: Request, sample: int = 0) -> list[int]:
    """What a request generates if it is alone and nothing ever happens to it."""
    tokens = request.prompt.tolist()
    while len(tokens) < len(request.prompt) + request.max_new_tokens:
        first = len(tokens) == len(request.prompt)
        tokens.append(next_token(np.array(tokens, np.int32), sample if first else 0))
        if tokens[-1] in request.stop_ids:
            break
    return tokens[len(request.prompt) :]


@dataclass(eq=False)
class Coming:
    """A copy from a lower tier that is on its way: what it brings, and when it is there by itself."""

    plan: BatchPlan
    op: CopyOp
    data: np.ndarray
    due: int
    arrived: bool = False


class ToyEngine:
    """Runs plans in the order in which they are launched; keeps up to `depth` of them in flight.

    Copies from lower tiers to the GPU take `link_steps` steps. A step that touches their blocks before they are there waits
    for them, as a device would: its number is then in `waited`.
    """

    def __init__(self, scheduler: Scheduler, depth: int = 1, drafts: Sequence[int] = (), link_steps: int = 0) -> None:
        self.link_steps = link_steps
        self.coming: list[Coming] = []
        self.waited: list[int] = []
        self.scheduler = scheduler
        self.manager: KVCacheManager = scheduler.manager
        self.depth = depth
        self.drafts = list(drafts)  # how many right drafts, then a wrong one, to propose for each sequence in turn
        config = self.manager.config
        self.size = config.block_size
        self.memory = {
            (group.index, tier): np.full(
                config.pools[group.pool].num_blocks[tier] * self.size, NOTHING, np.int64
            ).reshape(-1, self.size)
            for group in config.groups
            for tier in (Tier.GPU, Tier.HOST, Tier.DISK)
        }
        self.newest = np.full(scheduler.config.max_sequences, NOTHING, np.int64)  # by lane, as a device would keep it
        self.launched: deque[tuple[BatchPlan, list[int], list[int]]] = deque()
        self.finished: dict[object, Finished] = {}

    # --- the device --------------------------------------------------------------------------------------------------

    def launch(self, plan: BatchPlan) -> tuple[list[int], list[int]]:
        """Runs a plan; returns its samples and how many each sampling row has."""
        for op in plan.copies:
            for tier, blocks in ((op.src_tier, op.src), (op.dst_tier, op.dst)):
                if tier == Tier.GPU:
                    self._finish_copies(op.group, blocks)
            upto = self.size if op.num_tokens is None else op.num_tokens
            data = self.memory[op.group, op.src_tier][op.src, :upto]
            coming = Coming(plan, op, data, plan.number + self.link_steps)
            if self.link_steps and op.dst_tier == Tier.GPU != op.src_tier:
                self.coming.append(coming)
            else:
                self._arrive(coming)
        for group in range(len(self.manager.config.groups)):
            written = plan.slots[group][plan.slots[group] >= 0] // self.size
            read = plan.batch.padded_table(group) if plan.sequences else written
            if self._finish_copies(group, np.append(written, read)):
                self.waited.append(plan.number)
        inputs = plan.token_ids.astype(np.int64)
        owners = np.repeat(plan.lanes, np.diff(plan.query_start))
        inputs[inputs < 0] = self.newest[owners[inputs < 0]]
        for group in range(len(self.manager.config.groups)):
            written = plan.slots[group] >= 0
            self.memory[group, Tier.GPU].reshape(-1)[plan.slots[group][written]] = inputs[written]
        samples, counts = [], []
        for row in plan.sampling_rows.tolist():
            drawn = self._sample(plan, row)
            samples += drawn
            counts.append(len(drawn))
            self.newest[plan.lanes[row]] = drawn[-1] if plan.num_drafts[row] else drawn[0]
        return samples, counts

    def _arrive(self, coming: Coming) -> None:
        op = coming.op
        if not coming.arrived:
            self.memory[op.group, op.dst_tier][op.dst, : coming.data.shape[1]] = coming.data
        coming.arrived = True

    def _finish_copies(self, group: int, blocks: np.ndarray) -> bool:
        """Waits for the copies that bring these blocks to the GPU; whether there are any."""
        wanted = [
            coming
            for coming in self.coming
            if coming.op.group == group and not coming.arrived and np.isin(coming.op.dst, blocks).any()
        ]
        for coming in wanted:
            self._arrive(coming)
        return bool(wanted)

    def _land(self) -> None:
        """Tells the scheduler of the plans whose copies are done before the next step."""
        number = self.scheduler._num_plans + 1
        for coming in [coming for coming in self.coming if coming.due <= number]:
            self._arrive(coming)
            self.coming.remove(coming)
            if all(other.plan is not coming.plan for other in self.coming):
                self.scheduler.landed(coming.plan)

    def _sample(self, plan: BatchPlan, row: int) -> list[int]:
        history = self._history(plan, row)
        num_drafts = int(plan.num_drafts[row])
        if not num_drafts:
            return [next_token(history, sample) for sample in range(int(plan.num_samples[row]))]
        drawn = []
        for behind in range(num_drafts, -1, -1):  # stops behind the first draft that is not what the model says
            drawn.append(next_token(history[: len(history) - behind]))
            if behind and drawn[-1] != history[len(history) - behind]:
                break
        return drawn

    def _history(self, plan: BatchPlan, row: int) -> np.ndarray:
        """What the blocks of a row hold, read through the table of the full-attention group; windows must agree."""
        length = int(plan.kv_lengths[row])
        groups = self.manager.config.groups
        full = next(group.index for group in groups if not kind_of(group).by_block)
        ids = plan.batch.padded_table(full)[row, : -(-length // self.size)]
        assert (ids >= 0).all()
        history = self.memory[full, Tier.GPU][ids].reshape(-1)[:length]
        csr = plan.batch.csr(full)
        assert csr.indices[csr.indptr[row] : csr.indptr[row + 1]].tolist() == ids.tolist()
        assert int(csr.last_page_len[row]) == (length - 1) % self.size + 1
        for group in groups:
            if kind_of(group).by_block:
                chunk_start = (length - 1) // group.window * group.window
                start = chunk_start if group.kind is GroupKind.CHUNKED else max(0, length - group.window)
                seen = np.arange(length)
                seen = seen[(seen >= start) | (seen < group.sink_tokens)]
                table = plan.batch.padded_table(group.index)[row]
                assert (table[seen // self.size] >= 0).all(), (row, table, group.sink_tokens)
                values = self.memory[group.index, Tier.GPU][table[seen // self.size], seen % self.size]
                assert values.tolist() == history[seen].tolist()
        return history.astype(np.int32)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def step(self) -> BatchPlan:
        """Plans and launches one step; completes the oldest one when `depth` are in flight."""
        self._land()
        plan = self.scheduler.step()
        self._check_waiting()
        self._note(plan.finished)
        self.launched.append((plan, *self.launch(plan)))
        while len(self.launched) >= (1 if plan.is_empty else self.depth):
            self.complete()
        return plan

    def _check_waiting(self) -> None:
        """What waits is what holds nothing, counted one by one."""
        groups = self.scheduler._groups.values()
        every = [each for group in groups for each in group.sequences if each.state is SequenceState.WAITING]
        assert self.scheduler.num_waiting == len(every)
        assert set(self.scheduler.waiting(1000)) == set(every)

    def complete(self) -> StepResult:
        """Tells the scheduler what the oldest plan in flight brought."""
        plan, samples, counts = self.launched.popleft()
        result = self.scheduler.complete(plan, samples, counts)
        for parent, child in result.forks:
            if child.lane >= 0:
                self.newest[child.lane] = self.scheduler.token_ids(child)[-1]
            assert parent.request is child.request
        self._note(result.finished)
        self._propose(plan)
        return result

    def abandon(self) -> None:
        """Tells the scheduler that the oldest plan in flight could not run."""
        plan, *_ = self.launched.popleft()
        self._note(self.scheduler.abandon(plan))

    def _propose(self, plan: BatchPlan) -> None:
        for sequence in plan.sequences:
            lanes = self.scheduler._queues.running.lanes
            if not self.drafts or not sequence.is_running or lanes.in_flight[sequence.lane]:
                continue
            history = self.scheduler.token_ids(sequence).tolist()
            for _ in range(self.drafts[0]):
                history.append(next_token(np.array(history, np.int32)))
            drafts = [*history[len(history) - self.drafts[0] :], VOCABULARY + 1] if self.drafts[0] else [VOCABULARY + 1]
            if sequence in self.scheduler._queues.running.decoding:
                self.scheduler.propose(sequence, drafts)
                self.drafts.append(self.drafts.pop(0))

    def _note(self, finished: list[Finished]) -> None:
        for done in finished:
            assert done.request.id not in self.finished
            self.finished[done.request.id] = done

    def drain(self, max_steps: int = 10_000) -> int:
        """Steps until nothing is left; returns how many it took."""
        for steps in range(max_steps):
            if not self.scheduler.has_work:
                return steps
            self.step()
            self.manager.check()
        raise AssertionError(f"not done after {max_steps} steps: a livelock")

    def assert_right(self, *requests: Request) -> None:
        """Every sample of these requests is what it would be alone."""
        for request in requests:
            outputs = {output.sample: output.token_ids.tolist() for output in self.finished[request.id].outputs}
            assert outputs == {sample: expected_output(request, sample) for sample in range(request.n)}
