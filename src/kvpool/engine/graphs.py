"""Steps as CUDA graphs: captured once per size, then filled and replayed for every step that fits.

Launching the thousand kernels of a step from Python takes longer than the GPU takes to run them, unless the step has
thousands of tokens. A graph needs only one launch. It has a fixed number of tokens. If a step has fewer, the other rows have
no slot and no keys: they write and read nothing, and their results are dropped.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.attention import PagedBatch, PlanBuffers
from kvpool.config import KVCacheConfig, LayerGroup, Tier
from kvpool.config.layers import GroupKind, ceil_div
from kvpool.engine.eager_runner import AttentionKind, EagerRunner
from kvpool.engine.step_part import StepInputs
from kvpool.errors import KVPoolError
from kvpool.kernels.layout import whole_device
from kvpool.kernels.lora import group_tokens, max_groups, tile_size
from kvpool.model.adapter_steps import AdapterStep, adapting
from kvpool.model.hook import AttentionCall
from kvpool.model.state_steps import StateStep
from kvpool.pools.arrays import Int64Array
from kvpool.scheduling.batch_plan import BatchPlan
from kvpool.storage import StateSlots

DECODE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
# Matrix products are computed in tiles of 64 or 128 rows, so rows up to the next multiple cost little. Above the largest
# size, the GPU takes longer than launching does.
MIXED_SIZES = (*range(64, 512, 64), *range(512, 2048 + 1, 128))
DRAFT_SIZES = (16, 32, 48, *MIXED_SIZES)  # of steps with a few drafts
MOST_SINGLE = 48  # tokens of a step that attend one by one: several queries of a sequence, but none has many
# Where layers keep a state, kernels compute the tokens of a sequence one after another (about a microsecond for a token and
# layer on an H200, against 20 ms of launches for a step without a graph). Chunks of prompts are computed together, without.
STEPPED_SIZES = (16, 32, 64, 128)
MAX_DRAFT_LOGITS = 512  # of a step with drafts that runs from a graph: each graph computes as many, needed or not
SHARERS = 4  # sequences that share a block, on average, for which block lists have room


class CaptureError(KVPoolError):
    """A model does something in its forward pass that cannot be recorded in a CUDA graph."""


class CaptureReport(NamedTuple):
    """What the graphs of a runner cost when they were made."""

    num_graphs: int
    seconds: float
    num_bytes: int  # of the device's memory


class RecordedStep(NamedTuple):
    """A step that can be replayed, and the tensor that holds its result."""

    replay: Callable[[], None]
    output: Tensor


class CudaRecorder:
    """Records CUDA graphs. They share their memory, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = None
        # One stream for all captures, because graphs share memory only on the same stream. Torch's default capture stream
        # belongs to the first device, so this is one of our own.
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, step: Callable[[], Tensor]) -> RecordedStep:
        """Records a step that reads and writes fixed memory; raises CaptureError if that is impossible.

        It runs the step first, so that nothing is initialised during the capture.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(2 if self._memory is None else 1):  # some things are initialised by the second run
                step()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": other threads, such as another engine that serves, may use the device meanwhile.
            with (
                whole_device,
                _no_garbage_collection(),
                torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"),
            ):
                output = step()
        except RuntimeError as error:  # some models, mostly mixtures of experts, wait for the device in the middle
            self._memory = None  # torch takes this pool for one that is being recorded to, and records nothing else
            raise CaptureError(str(error)) from error
        self._memory = graph.pool()
        return RecordedStep(graph.replay, output)

    def num_bytes(self) -> int:
        """Bytes that torch has taken from the device and cannot give back."""
        with whole_device:  # torch refuses this while another engine captures
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disables the garbage collector: it might free another graph during a capture, which CUDA forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Captured(NamedTuple):
    """A graph and the memory that it reads and writes."""

    recorded: RecordedStep
    token_ids: Tensor
    positions: Tensor  # [token], or [axis, token] where the model has several
    slots: Tensor  # [layer group, token]
    keep: Tensor  # tokens whose logits are computed
    states: Tensor | None  # where sequences have their states: see `_state_inputs`
    adapted: AdapterStep | None  # tokens by the slots of their adapters
    buffers: list[PlanBuffers]
    alive: Any  # other objects that the graph reads: they must live as long as the graph

    def holds(self, batches: Sequence[PagedBatch]) -> bool:
        """Whether the block lists of these batches, and scores of all their keys, fit into its buffers."""
        return all(
            int(batch.indptr[-1]) <= buffer.max_blocks and _longest(batch) <= (buffer.max_keys or _longest(batch))
            for batch, buffer in zip(batches, self.buffers, strict=True)
        )


class StepGraphs(ABC):
    """Graphs for one kind of step, each for a fixed number of tokens.

    `run` fills the inputs of the smallest graph that is large enough, plans attention into its buffers and replays it.
    """

    def __init__(
        self,
        runner: EagerRunner,
        recorder: CudaRecorder,
        sizes: Sequence[int],
        largest_buffers: dict[int, PlanBuffers],
    ) -> None:
        self._runner = runner
        self._recorder = recorder
        self._largest_buffers = largest_buffers  # by kind of attention, of all graphs of the runner
        self._sizes = list(sizes)
        self._captured: dict[tuple[int, bool], _Captured] = {}  # by size and whether tokens may have adapters
        self._seconds, self._num_bytes = 0.0, 0

    @property
    def sizes(self) -> list[int]:
        """Tokens of each graph that was captured."""
        return sorted({size for size, _ in self._captured})

    @property
    def report(self) -> CaptureReport:
        """What was captured so far, for steps without adapters and for steps with some, and what that cost."""
        return CaptureReport(len(self._captured), self._seconds, self._num_bytes)

    @property
    def are_all(self) -> bool:
        """Whether every size is captured."""
        return next(self._left(), None) is None

    def _left(self) -> Iterator[tuple[int, bool]]:
        """What is not captured yet, the largest first, so that the others fit into its memory."""
        kinds = (False, True) if self._runner.adapters.stacks.num_bytes else (False,)
        return (key for key in product(reversed(self._sizes), kinds) if key not in self._captured)

    def drop_adapted(self) -> None:
        """Forgets the graphs of steps with adapters."""
        self._captured = {key: captured for key, captured in self._captured.items() if not key[1]}

    @abstractmethod
    def fits(self, plan: BatchPlan) -> bool:
        """Whether a step can be run by one of these graphs."""

    @abstractmethod
    def max_sequences(self, size: int) -> int:
        """The most sequences of a step with up to `size` tokens."""

    def max_logits(self, size: int) -> int:
        """The most tokens of such a step whose logits are computed."""
        return self.max_sequences(size)

    def capture_largest(self) -> None:
        """Captures the largest size. It comes before the others, so that they fit into its memory."""
        self._capture(self._sizes[-1], [_one_token(kind) for kind in self._runner.kinds], False)

    def capture_next(self) -> None:
        """Captures one of those that are left."""
        size, adapted = next(self._left())
        self._capture(size, [_one_token(kind) for kind in self._runner.kinds], adapted)

    def run(self, plan: BatchPlan, inputs: StepInputs) -> Tensor:
        """The logits of a step that fits; the next step of the same kind overwrites them."""
        runner, adapter_slots = self._runner, inputs.adapter_slots
        size, adapted = self._size_for(plan), adapter_slots is not None
        batches = [runner.paged_batch(plan, kind) for kind in runner.kinds]
        captured = self._graph(size, batches, adapted)
        if captured.adapted is not None and adapter_slots is not None:
            _fill_groups(captured.adapted.groups, adapter_slots, runner)
        slots = runner.plane.prepare(plan.slots, plan.batch, plan.states)
        if captured.states is not None and runner.states is not None:
            captured.states.copy_(runner.upload(self._state_inputs(len(captured.token_ids), runner.states, plan)))
        num_logits = self._choose_logits(captured, plan)
        self._replay(captured, inputs.token_ids, runner.upload(inputs.positions), slots.tensor, batches)
        return captured.recorded.output[:num_logits]

    def _graph(self, size: int, batches: Sequence[PagedBatch], adapted: bool) -> _Captured:
        """The graph of a size, captured now if need be; a larger one while another thread has the device for itself."""
        captured = self._captured.get((size, adapted))
        if captured is not None and captured.holds(batches):
            return captured
        if whole_device.acquire(blocking=False):
            try:
                return self._capture(size, batches, adapted)
            finally:
                whole_device.release()
        fitting = (at for at, graph in self._captured.items() if at[1] == adapted and graph.holds(batches))
        larger = min((at for at in fitting if at[0] > size), default=None)
        return self._capture(size, batches, adapted) if larger is None else self._captured[larger]

    def _replay(
        self,
        captured: _Captured,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        batches: Sequence[PagedBatch],
    ) -> None:
        """Fills the inputs of a graph, plans attention and replays it."""
        count, runner = len(token_ids), self._runner
        captured.token_ids[:count] = token_ids
        captured.positions[..., :count] = positions
        captured.slots[:, :count] = slots
        if count < len(captured.token_ids):
            captured.slots[:, count:] = -1
        for kind, batch, buffers in zip(runner.kinds, batches, captured.buffers, strict=True):
            runner.backend.plan(kind.spec, batch, buffers)
        captured.recorded.replay()

    @abstractmethod
    def _size_for(self, plan: BatchPlan) -> int:
        """The size of the graph for a step that fits."""

    @abstractmethod
    def _choose_logits(self, captured: _Captured, plan: BatchPlan) -> int:
        """Tells the graph of which tokens to compute logits; returns how many."""

    @abstractmethod
    def _state_inputs(self, size: int, slots: StateSlots, plan: BatchPlan | None) -> Int64Array:
        """What the graph of a size reads about the states of a step, one kind of number in each row; None: of no step."""

    @abstractmethod
    def _state_step(self, slots: StateSlots, inputs: Tensor) -> StateStep:
        """The step that modules with a state compute in a graph which reads these numbers."""

    def _kept(self, logits: Tensor) -> Tensor:
        """The tensor that holds the logits until they are sampled from: here, memory of the graph itself."""
        return logits

    def _capture(self, size: int, batches: Sequence[PagedBatch], adapted: bool) -> _Captured:
        began, before = time.perf_counter(), self._recorder.num_bytes()
        runner = self._runner
        device, config = runner.device, runner.plane.config
        token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        axes = (runner.num_axes,) if runner.num_axes > 1 else ()
        positions = torch.zeros(*axes, size, dtype=torch.int64, device=device)
        slots = torch.full((len(config.groups), size), -1, dtype=torch.int32, device=device)
        num_sequences = self.max_sequences(size)
        keep = torch.arange(min(size, self.max_logits(size)), device=device)
        buffers = []
        plans = []
        for number, (kind, batch) in enumerate(zip(runner.kinds, batches, strict=True)):
            reserved = runner.backend.reserve(
                kind.spec,
                max_sequences=num_sequences,
                max_query_tokens=size,
                max_blocks=max(list_room(config, kind.group, num_sequences), 2 * int(batch.indptr[-1])),
                max_keys=max(2 * kind.spec.chosen, 2 * _longest(batch)) if kind.spec.chosen else None,
                beside=self._largest_buffers.get(number),
            )
            self._largest_buffers.setdefault(number, reserved)
            buffers.append(reserved)
            plans.append(runner.backend.plan(kind.spec, batch, reserved))

        def attend(layer: int, call: AttentionCall) -> Tensor:
            runner.write(slots[config.group_of_layer[layer]], call, layer)
            return runner.attention(layer, call, plans)

        inputs = states = None
        if runner.states is not None:
            inputs = torch.from_numpy(self._state_inputs(size, runner.states, None)).to(device)
            states = self._state_step(runner.states, inputs)

        adapters = None
        if adapted:
            stacks, tile = runner.adapters.stacks, tile_size(size)
            shape = max_groups(size, stacks.num_slots), tile + 1
            adapters = AdapterStep(stacks, torch.full(shape, -1, dtype=torch.int32, device=device))

        def step() -> Tensor:
            with adapting(adapters):
                return self._kept(runner.forward(token_ids, positions, keep, attend, states))

        try:
            recorded = self._recorder.record(step)
        except CaptureError as error:
            raise CaptureError(f"{type(runner.model).__name__} cannot be captured: {error}") from error
        captured = _Captured(recorded, token_ids, positions, slots, keep, inputs, adapters, buffers, plans)
        self._captured[size, adapted] = captured
        runner.num_detours += 1
        self._seconds += time.perf_counter() - began
        self._num_bytes += self._recorder.num_bytes() - before
        return captured


class DecodeGraphs(StepGraphs):
    """Steps with one token for each sequence. Every graph keeps its logits."""

    def fits(self, plan: BatchPlan) -> bool:
        """Whether each sequence of a step computes one token and samples: it decodes, or all but one token was cached."""
        if plan.states is not None and (plan.states.sources < 0).any():  # no state to go on from
            return False
        return plan.num_tokens == len(plan.sequences) == len(plan.sampling_rows) and plan.num_tokens <= self._sizes[-1]

    def max_sequences(self, size: int) -> int:
        """As many as tokens."""
        return size

    def _size_for(self, plan: BatchPlan) -> int:
        return self._sizes[bisect_left(self._sizes, plan.num_tokens)]

    def _choose_logits(self, captured: _Captured, plan: BatchPlan) -> int:
        return plan.num_tokens

    def _state_inputs(self, size: int, slots: StateSlots, plan: BatchPlan | None) -> Int64Array:
        """Sources and targets. Rows that only fill the graph up have the slot that nobody uses."""
        inputs = np.full((2, size), slots.spare, np.int64)
        if plan is not None and plan.states is not None:
            inputs[:, : plan.num_tokens] = plan.states
        return inputs

    def _state_step(self, slots: StateSlots, inputs: Tensor) -> StateStep:
        return StateStep.decoding(slots, *inputs)


class MixedGraphs(StepGraphs):
    """Steps with sequences that decode and others that compute prompts. All graphs write their logits to one tensor."""

    def __init__(
        self,
        runner: EagerRunner,
        recorder: CudaRecorder,
        sizes: Sequence[int],
        largest_buffers: dict[int, PlanBuffers],
        max_sequences: int,
        max_drafts: int,
    ) -> None:
        super().__init__(runner, recorder, sizes, largest_buffers)
        self._max_sequences = max_sequences
        self._max_logits = max(max_sequences, min(max_sequences * (1 + max_drafts), MAX_DRAFT_LOGITS))
        self._logits: Tensor | None = None

    def fits(self, plan: BatchPlan) -> bool:
        """Whether a graph has room for the tokens, sequences and logits of a step. Each draft needs logits, too."""
        if self._places(plan) > self._sizes[-1]:
            return False
        return len(plan.logits_indices) <= self.max_logits(self._size_for(plan))

    def max_sequences(self, size: int) -> int:
        """Fewer than tokens, so that attention is prepared for sequences with many tokens; as many in small steps."""
        if size <= MOST_SINGLE and size < self._sizes[-1]:
            return size
        return min(self._max_sequences, size - 1)

    def max_logits(self, size: int) -> int:
        """More than sequences where steps have drafts."""
        return min(self._max_logits, size)

    def _places(self, plan: BatchPlan) -> int:
        return max(plan.num_tokens, len(plan.sequences) + 1)

    def _size_for(self, plan: BatchPlan) -> int:
        return self._sizes[bisect_left(self._sizes, self._places(plan))]

    def _choose_logits(self, captured: _Captured, plan: BatchPlan) -> int:
        chosen = plan.logits_indices
        if len(chosen):
            captured.keep[: len(chosen)] = self._runner.upload(chosen)
        return len(chosen)

    def _state_inputs(self, size: int, slots: StateSlots, plan: BatchPlan | None) -> Int64Array:
        """Sources, targets, first tokens, and where states are left. Sequences that are not there have no tokens."""
        inputs = np.zeros((4, self.max_sequences(size) + 1), np.int64)
        if plan is not None and plan.states is not None and plan.num_kept is not None:
            num = len(plan.sequences)
            inputs[:2, :num] = plan.states
            inputs[2:] = plan.num_tokens
            inputs[2, :num] = plan.query_start[:-1]
            inputs[3, :num] = plan.query_start[:-1] + plan.num_kept
        return inputs

    def _state_step(self, slots: StateSlots, inputs: Tensor) -> StateStep:
        sources, targets, starts, ends = inputs
        return StateStep.stepping(slots, sources[:-1], targets[:-1], starts, ends[:-1])

    def _kept(self, logits: Tensor) -> Tensor:
        if self._logits is None or len(self._logits) < len(logits):  # the largest graph comes first
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)


def decode_sizes(max_sequences: int, smallest: int = 1) -> list[int]:
    """The batch sizes that get a graph each. The last one is the largest batch.

    >>> decode_sizes(10), decode_sizes(1, smallest=2)
    ([1, 2, 4, 8, 10], [2])
    """
    largest = max(smallest, max_sequences)
    return [size for size in DECODE_SIZES if smallest <= size < largest] + [largest]


def mixed_sizes(max_tokens: int, sizes: Sequence[int] = MIXED_SIZES) -> list[int]:
    """The numbers of tokens that get a graph each, for steps of up to `max_tokens`; very large steps need none.

    >>> mixed_sizes(200), mixed_sizes(10**6)[-3:], mixed_sizes(1)
    ([64, 128, 192, 200], [1792, 1920, 2048], [])
    """
    largest = min(max_tokens, sizes[-1])
    return [size for size in sizes if size < largest] + [largest] if largest > 1 else []


def list_room(config: KVCacheConfig, group: LayerGroup, num_sequences: int) -> int:
    """How many entries the block lists of a graph have room for. With longer lists, the graph is captured again.

    Every sequence lists the blocks that it shares with others, so lists may be several times as long as the pool.
    """
    room = SHARERS * config.pools[group.pool].num_blocks[Tier.GPU]
    return (
        room
        if config.max_seq_len is None or group.kind is GroupKind.CROSS
        else min(room, num_sequences * ceil_div(config.max_seq_len, config.block_size))
    )


def _longest(batch: PagedBatch) -> int:
    """The tokens of its longest sequence."""
    return int(batch.kv_lens.max(initial=0))


def _fill_groups(groups: Tensor, adapter_slots: Int64Array, runner: EagerRunner) -> None:
    """Tells a graph the adapter of each token."""
    rows = np.full(groups.shape, -1, np.int32)
    found = group_tokens(adapter_slots, groups.shape[1] - 1)
    rows[: len(found)] = found
    groups.copy_(runner.upload(rows))


def _one_token(kind: AttentionKind) -> PagedBatch:
    """A batch for the capture: one sequence that reads the first slot of block 0, whatever it holds."""
    return PagedBatch.build([0, 1], [0], [1], [1], block_size=kind.group.block_size)
