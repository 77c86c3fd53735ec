"""One step on the device: a BatchPlan's tokens through the model, keys and values into their blocks, logits out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.attention import AttentionBackend, AttentionPlan, PagedBatch, PlanBuffers
from kvpool.config import KVCacheConfig, LayerGroup, Tier
from kvpool.engine.hook import AttentionCall
from kvpool.engine.inspection import ModelShape, forward
from kvpool.errors import InvalidArgumentError, KVPoolError, UnsupportedAttentionError, UnsupportedModelError
from kvpool.kernels.current_device import whole_device
from kvpool.kernels.paged_spec import AttentionSpec
from kvpool.layers import ceil_div
from kvpool.scheduling.plan import BatchPlan
from kvpool.storage.data_plane import DataPlane
from kvpool.storage.moving import upload

log = logging.getLogger("kvpool")

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
SHARERS = 4  # of each block on average, that lists have room for


class CaptureError(KVPoolError):
    """A model does something in its forward pass that cannot be recorded in a CUDA graph."""


class AttentionKind(NamedTuple):
    """Layers that share a block table and compute alike: one plan per step serves them all."""

    group: LayerGroup
    spec: AttentionSpec


class ModelRunner:
    """Runs a model on the blocks of a data plane.

    Every step is one variable-length batch without padding. On a GPU, steps that only decode are replayed from CUDA graphs,
    which `warm_up` captures; attention that cannot be captured just runs. With `compile_layers`, torch.compile fuses what
    lies between the matrix products of each decoder layer.
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
        compile_layers: bool = False,
    ) -> None:
        self.model = model
        if compile_layers:
            _compile_layers(model, len(shape.layers))
        self.plane = plane
        self.backend = backend
        self.device = plane.device
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
        self.graphs_required = cuda_graphs is True
        wanted = self.device.type == "cuda" if cuda_graphs is None else cuda_graphs
        if wanted:
            self.graphs = self._graphs(max_sequences, smallest=2 if compile_layers else 1)

    def _graphs(self, max_sequences: int, smallest: int) -> DecodeGraphs | None:
        if self.device.type != "cuda":
            raise InvalidArgumentError(f"cuda_graphs=True on {self.device}: graphs need a GPU")
        try:
            for kind in self.kinds:
                self.backend.require_graphs(kind.spec)
        except UnsupportedAttentionError:
            if self.graphs_required:
                raise
            return None
        return DecodeGraphs(self, max_sequences, smallest)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures all graphs, so that no request waits for one. Without graphs there is nothing to do."""
        if self.graphs is not None:
            try:
                self.graphs.capture_all()
            except CaptureError as error:
                self._give_up_graphs(error)

    def _give_up_graphs(self, error: CaptureError) -> None:
        if self.graphs_required:
            raise error
        log.warning("steps run without CUDA graphs: %s", error)
        self.graphs = None

    def close(self) -> None:
        """Gives the memory of the graphs back, once the device is done with them."""
        if self.graphs is not None:
            torch.cuda.default_stream(self.device).synchronize()  # the stream of every engine's thread
            self.graphs = None

    def run(self, plan: BatchPlan, token_ids: Tensor) -> Tensor:
        """Logits [row of `plan.logits_indices`, vocabulary] of a step; `token_ids` [token] are on the device.

        The copies of the plan must have been run, or be on their way.
        """
        if self.graphs is not None and self.graphs.fits(plan):
            try:
                return self.graphs.run(plan, token_ids)
            except CaptureError as error:
                self._give_up_graphs(error)
        slots = self.plane.prepare(plan.slots, plan.batch)
        plans = [self.backend.plan(kind.spec, self.paged_batch(plan, kind)) for kind in self.kinds]
        positions = self.upload(plan.positions)
        keep = self.upload(plan.logits_indices)

        def attend(call: AttentionCall) -> Tensor:
            self.plane.write(slots, call.k, call.v, call.layer)
            return self.attention(call, plans)

        return forward(self.model, token_ids, positions, keep, attend)

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


def graph_sizes(max_sequences: int, smallest: int = 1) -> list[int]:
    """The batch sizes that get a graph each, so that the largest batch has one.

    >>> graph_sizes(10), graph_sizes(1, smallest=2)
    ([1, 2, 4, 8, 10], [2])
    """
    largest = max(smallest, max_sequences)
    return [size for size in GRAPH_SIZES if smallest <= size < largest] + [largest]


def list_room(config: KVCacheConfig, group: LayerGroup, num_sequences: int) -> int:
    """How long the block lists of so many sequences together may get before their graph must be captured again.

    Sequences that share blocks list them once each, so lists may be several times as long as the pool.
    """
    room = SHARERS * config.pools[group.pool].num_blocks[Tier.GPU]
    return room if config.max_seq_len is None else min(room, num_sequences * ceil_div(config.max_seq_len, config.block_size))


def _compile_layers(model: Any, num_layers: int) -> None:
    """Compiles every decoder layer, for any number of tokens; attention stays as it is (see `hook`)."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of {num_layers} layers; use compile=False")
    for layer in lists[0]:
        if layer._compiled_call_impl is None:  # an engine before this one may have done so
            layer.compile(dynamic=True)


class _Captured(NamedTuple):
    """A graph and the memory that it reads and writes."""

    graph: Any
    token_ids: Tensor
    positions: Tensor
    slots: Tensor  # [layer group, sequence]
    buffers: list[PlanBuffers]
    logits: Tensor
    alive: tuple[Any, ...]  # what the graph reads besides: it must not be freed before the graph

    def holds(self, batches: list[PagedBatch]) -> bool:
        """Whether the block lists of these batches fit into its buffers."""
        return all(int(batch.indptr[-1]) <= buffer.max_blocks for batch, buffer in zip(batches, self.buffers, strict=True))


class DecodeGraphs:
    """Decoding steps as CUDA graphs: one per batch size of `GRAPH_SIZES` from `smallest` on.

    A step fills the graph's inputs, plans attention into its buffers and replays it. Rows behind the batch have no slot and
    no keys: they write nothing, read nothing, and their logits are dropped. (`smallest` is 2 for compiled layers, which
    torch.compile would compile once more for a single row.)
    """

    def __init__(self, runner: ModelRunner, max_sequences: int, smallest: int = 1) -> None:
        self._runner = runner
        self._sizes = graph_sizes(max_sequences, smallest)
        self._captured: dict[int, _Captured] = {}
        self._memory: Any = None
        # One for all captures: memory is shared on the same stream only. And of this device: torch's own is of the first.
        self._stream: Any = torch.cuda.Stream(runner.device)  # type: ignore[no-untyped-call]

    def fits(self, plan: BatchPlan) -> bool:
        """Whether a step has one token for each sequence and samples behind it: decoding, or all but one was cached."""
        return plan.num_tokens == len(plan.sequences) == len(plan.sampling_rows) and plan.num_tokens <= self._sizes[-1]

    def capture_all(self) -> None:
        """Captures every size, the largest first: the others then fit into its memory."""
        for size in reversed(self._sizes):
            self._captured[size] = self._capture(size, [_one_token_each(size, kind) for kind in self._runner.kinds])

    def run(self, plan: BatchPlan, token_ids: Tensor) -> Tensor:
        """The logits of a decoding step."""
        runner, count = self._runner, plan.num_tokens
        size = next(size for size in self._sizes if size >= count)
        batches = [runner.paged_batch(plan, kind) for kind in runner.kinds]
        captured = self._captured.get(size)
        if captured is None or not captured.holds(batches):
            captured = self._captured[size] = self._capture(size, batches)
        slots = runner.plane.prepare(plan.slots, plan.batch)
        captured.token_ids[:count] = token_ids
        captured.positions[:count] = runner.upload(plan.positions)
        captured.slots[:, :count] = slots.tensor
        if count < size:
            captured.slots[:, count:] = -1
        for kind, batch, buffers in zip(runner.kinds, batches, captured.buffers, strict=True):
            runner.backend.plan(kind.spec, batch, buffers)
        captured.graph.replay()
        return captured.logits[:count]

    def _capture(self, size: int, batches: list[PagedBatch]) -> _Captured:
        runner = self._runner
        device, config = runner.device, runner.plane.config
        token_ids = torch.zeros(size, dtype=torch.int64, device=device)
        positions = torch.zeros(size, dtype=torch.int64, device=device)
        slots = torch.full((len(config.groups), size), -1, dtype=torch.int32, device=device)
        keep = torch.arange(size, device=device)
        buffers = []
        plans = []
        for kind, batch in zip(runner.kinds, batches, strict=True):
            room = max(list_room(config, kind.group, size), 2 * int(batch.indptr[-1]))
            buffers.append(runner.backend.reserve(kind.spec, max_sequences=size, max_blocks=room))
            plans.append(runner.backend.plan(kind.spec, batch, buffers[-1]))

        def attend(call: AttentionCall) -> Tensor:
            group = config.group_of_layer[call.layer]
            runner.plane.write(slots[group], call.k, call.v, call.layer)
            return runner.attention(call, plans)

        def step() -> Tensor:
            return forward(runner.model, token_ids, positions, keep, attend)

        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):  # what is made on first use must not be made during the capture
            for _ in range(2):
                step()
        torch.cuda.current_stream(device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": what other threads do on the device meanwhile (another engine that serves) is their own affair.
            with (
                whole_device,
                torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"),
            ):
                logits = step()
        except RuntimeError as error:  # some models wait for the device in the middle (mixtures of experts, mostly)
            raise CaptureError(f"{type(runner.model).__name__} cannot be captured: {error}") from error
        self._memory = graph.pool()
        return _Captured(graph, token_ids, positions, slots, buffers, logits, (keep, plans))


def _one_token_each(size: int, kind: AttentionKind) -> PagedBatch:
    """A batch to capture with: sequences that read whatever is in the first slot of block 0."""
    ones = np.ones(size, np.int64)
    return PagedBatch.build(np.arange(size + 1), np.zeros(size, np.int32), ones, ones, block_size=kind.group.block_size)
