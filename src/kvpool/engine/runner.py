"""One step on the device: a BatchPlan's tokens through the model, keys and values into their blocks, logits out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.attention import AttentionBackend, AttentionPlan, PagedBatch, PlanBuffers
from kvpool.config.layers import ceil_div
from kvpool.engine.graphs import (
    AttentionKind,
    CaptureError,
    CaptureReport,
    CudaRecorder,
    DecodeGraphs,
    MixedGraphs,
    Recorder,
    capture,
    decode_sizes,
    mixed_sizes,
)
from kvpool.errors import InvalidArgumentError, UnsupportedAttentionError
from kvpool.model.faster_layers import compile_each_layer
from kvpool.model.hook import AttentionCall
from kvpool.model.probing import ModelShape, forward
from kvpool.scheduling import BatchPlan, Scheduler
from kvpool.storage.data_plane import DataPlane, StepSlots
from kvpool.storage.moving import upload
from kvpool.storage.transfer import Transfer


class PlannedCopies:
    """The copies that a scheduler planned, on their way."""

    def __init__(self, scheduler: Scheduler, plane: DataPlane) -> None:
        self._scheduler = scheduler
        self._plane = plane
        self._unstarted: list[BatchPlan] = []  # whose copies are not on their way yet: starting them failed
        self._started: list[tuple[list[BatchPlan], Transfer]] = []

    def start(self, plan: BatchPlan) -> None:
        """Starts the copies of a plan, behind those that could not be started before."""
        if plan.copies:
            self._unstarted.append(plan)
        transfer = self._plane.run_copies(plan.copies, overlap=True)
        if self._unstarted:
            self._started.append((self._unstarted, transfer))
            self._unstarted = []

    def tell(self) -> None:
        """Tells the scheduler which copies are done, so that it plans with what they brought."""
        for done in [item for item in self._started if item[1].done()]:
            self._started.remove(done)
            for plan in done[0]:
                self._scheduler.landed(plan)

    def clear(self) -> None:
        """Nobody waits for any of them any more."""
        self._unstarted.clear()
        self._started.clear()


log = logging.getLogger("kvpool")


class ModelRunner:
    """Runs a model on the blocks of a data plane.

    Every step is one variable-length batch. On a GPU, steps of up to some 2,048 tokens are replayed from CUDA graphs, which
    `warm_up` captures; larger ones, and attention or models that cannot be captured, just run. With `compile_layers`,
    torch.compile fuses what lies between the matrix products of each decoder layer.
    """

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        plane: DataPlane,
        backend: AttentionBackend,
        *,
        cuda_graphs: bool | None = None,
        max_sequences: int = 256,
        max_tokens: int = 2048,
        compile_layers: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        if compile_layers:
            compile_each_layer(model, len(shape.layers))
        self.plane = plane
        self.backend = backend
        self.device = plane.device
        self.max_tokens = max_tokens
        config = plane.config
        groups = [config.groups[config.group_of_layer[layer]] for layer in range(len(config.layers))]
        self.kinds: list[AttentionKind] = []  # distinct ones
        self.kind_of_layer: list[int] = []
        for layer, group in enumerate(groups):
            kind = AttentionKind(group, shape.attention_spec(layer, config.layers[layer].dtype))
            backend.require(kind.spec)
            if kind not in self.kinds:
                self.kinds.append(kind)
            self.kind_of_layer.append(self.kinds.index(kind))
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self.largest_buffers: dict[int, PlanBuffers] = {}  # of each kind: all graphs use their scratch memory
        self.captured = CaptureReport(0, 0.0, 0)
        self.graphs_required = cuda_graphs is True
        possible = self.device.type == "cuda" or recorder is not None
        wanted = possible if cuda_graphs is None else cuda_graphs
        if wanted and self._can_have_graphs(recorder):
            self._recorder = recorder or CudaRecorder(self.device)
            self.graphs = DecodeGraphs(self, self._recorder, decode_sizes(max_sequences, 2 if compile_layers else 1))
            if sizes := mixed_sizes(max_tokens):
                self.mixed_graphs = MixedGraphs(self, self._recorder, sizes, max_sequences)

    def _can_have_graphs(self, recorder: Recorder | None) -> bool:
        if not (self.device.type == "cuda" or recorder is not None):
            raise InvalidArgumentError(f"cuda_graphs=True on {self.device}: graphs need a GPU")
        try:
            for kind in self.kinds:
                self.backend.require_graphs(kind.spec)
        except UnsupportedAttentionError as error:
            if self.graphs_required:
                raise
            log.info("steps run without CUDA graphs: %s", error)  # the backend was chosen
            return False
        return True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures all graphs, and runs a step without one, so that no request waits for what is made on first use.

        On a CPU there is nothing to do.
        """
        if self.mixed_graphs is not None:  # first: its largest graph has the most memory, which all others use
            try:
                self._note(capture(self.mixed_graphs, self._recorder))
            except UnsupportedAttentionError as error:
                log.warning("steps with prompts run without CUDA graphs: %s", error)
                self.mixed_graphs = None
            except CaptureError as error:
                self._give_up_graphs(error)
        if self.graphs is not None:
            try:
                self._note(capture(self.graphs, self._recorder))
            except CaptureError as error:
                self._give_up_graphs(error)
        if self.device.type == "cuda":
            self._run_once()
        if self.captured.num_graphs:
            log.info("captured %d CUDA graphs in %.1f s, %d MiB", *self.captured[:2], self.captured.num_bytes >> 20)

    def _note(self, report: CaptureReport) -> None:
        graphs, seconds, num_bytes = self.captured
        self.captured = CaptureReport(
            graphs + report.num_graphs, seconds + report.seconds, num_bytes + report.num_bytes
        )

    def _give_up_graphs(self, error: CaptureError) -> None:
        """What cannot be captured in one kind of step cannot in the other: a model does the same in both."""
        if self.graphs_required:
            raise error
        log.warning("steps run without CUDA graphs: %s", error)
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        self.graphs = self.mixed_graphs = None
        self.largest_buffers.clear()
        self.captured = CaptureReport(0, 0.0, 0)

    def close(self) -> None:
        """Gives the memory of the graphs back, once the device is done with them."""
        if self.device.type == "cuda" and self.graphs is not None:
            torch.cuda.default_stream(self.device).synchronize()  # the stream of every engine's thread
        self._drop_graphs()

    def run(self, plan: BatchPlan, token_ids: Tensor) -> Tensor:
        """Logits [row of `plan.logits_indices`, vocabulary] of a step; `token_ids` [token] are on the device.

        The copies of the plan must have been run, or be on their way.
        """
        for graphs in (self.graphs, self.mixed_graphs):
            if graphs is not None and graphs.fits(plan):
                try:
                    return graphs.run(plan, token_ids)
                except CaptureError as error:
                    self._give_up_graphs(error)
                    break
        slots = self.plane.prepare(plan.slots, plan.batch)
        batches = [self.paged_batch(plan, kind) for kind in self.kinds]
        return self._run(token_ids, self.upload(plan.positions), self.upload(plan.logits_indices), slots, batches)

    def _run(
        self, token_ids: Tensor, positions: Tensor, keep: Tensor, slots: StepSlots, batches: Sequence[PagedBatch]
    ) -> Tensor:
        """A step as it is, launched operation by operation."""
        plans = [self.backend.plan(kind.spec, batch) for kind, batch in zip(self.kinds, batches, strict=True)]

        def attend(call: AttentionCall) -> Tensor:
            self.plane.write(slots, call.k, call.v, call.layer)
            return self.attention(call, plans)

        return forward(self.model, token_ids, positions, keep, attend)

    def _run_once(self) -> None:
        """A step of the largest size, of which nothing is kept: a chunk of a prompt, and one token of another one."""
        count, groups = self.max_tokens, self.plane.config.groups
        zeros = torch.zeros(count, dtype=torch.int64, device=self.device)
        nowhere = StepSlots(torch.full((len(groups), count), -1, dtype=torch.int32, device=self.device))
        lengths = np.array([1, count - 1] if count > 1 else [1])
        batches = []
        for kind in self.kinds:
            ends = np.cumsum(ceil_div(lengths, kind.group.block_size))
            lists = (np.append(0, ends), np.zeros(ends[-1], np.int32))
            batches.append(PagedBatch.build(*lists, lengths, lengths, block_size=kind.group.block_size))
        self._run(zeros, zeros, zeros[:1], nowhere, batches)

    def attention(self, call: AttentionCall, plans: Sequence[AttentionPlan]) -> Tensor:
        """One layer over the blocks that its plan names."""
        plan = plans[self.kind_of_layer[call.layer]]
        return plan.backend.run(call.q, self.plane.layer_cache(call.layer), plan, sink_logits=call.sinks)

    def paged_batch(self, plan: BatchPlan, kind: AttentionKind) -> PagedBatch:
        """The step's sequences as attention over one layer group sees them."""
        csr = plan.batch.csr(kind.group.index)
        return PagedBatch.of(csr, kind.group, np.diff(plan.query_start), plan.kv_lengths)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """A copy of a host array on the device, without waiting for it."""
        return upload(array, self.device)
