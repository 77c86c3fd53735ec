"""Runs steps on the device, on a GPU from CUDA graphs where it can, and by compiled layers if it is to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpool.attention import AttentionBackend, PagedBatch, PlanBuffers
from kvpool.config.layers import ceil_div
from kvpool.engine.adapters import EngineAdapters
from kvpool.engine.eager_runner import EagerRunner
from kvpool.engine.graphs import (
    DRAFT_SIZES,
    MIXED_SIZES,
    STEPPED_SIZES,
    CaptureError,
    CaptureReport,
    CudaRecorder,
    DecodeGraphs,
    MixedGraphs,
    StepGraphs,
    decode_sizes,
    mixed_sizes,
)
from kvpool.engine.step_part import StepInputs
from kvpool.errors import InvalidArgumentError, SequenceStateError, UnsupportedAttentionError
from kvpool.kernels.layout import current, whole_device
from kvpool.kernels.quantization import TORCH_DTYPES
from kvpool.model.compiled_layers import compile_each_layer, plain_copy, run_layers
from kvpool.model.hook import AttentionCall
from kvpool.model.probing import ModelShape
from kvpool.model.state_steps import StateStep
from kvpool.model.states import state_modules
from kvpool.scheduling import BatchPlan
from kvpool.storage.data_plane import DataPlane, StepSlots

log = logging.getLogger("kvpool")


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, work goes to a stream of its own and is done at the end."""
    if device.type != "cuda":
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


class ModelRunner(EagerRunner):
    """Runs a model on the blocks of a data plane; on a GPU from CUDA graphs.

    Steps of up to about 2,048 tokens run from graphs: the largest are captured by `warm_up`, the others when a step needs
    them, or before that by `capture_next`. Larger steps run without a graph, and so do models and attention that cannot be
    captured. With `compile_layers`, steps run by plain layers until `compile` has compiled them, in any thread, and
    `use_compiled` has taken them over. Layers that keep a state are compiled by the first step.
    """

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        plane: DataPlane,
        backend: AttentionBackend,
        *,
        adapters: EngineAdapters | None = None,
        cuda_graphs: bool | None = None,
        max_sequences: int = 256,
        max_tokens: int = 2048,
        compile_layers: bool = False,
        num_axes: int = 1,
        max_drafts: int = 0,
        recorder: CudaRecorder | None = None,
    ) -> None:
        plain, self._uncompiled = model, None  # a model whose layers are not compiled yet
        if compile_layers:
            compile_each_layer(model, model.config.get_text_config().num_hidden_layers)
            if not shape.states:
                plain, self._uncompiled = plain_copy(model), model
        adapters = EngineAdapters(model) if adapters is None else adapters
        super().__init__(plain, shape, plane, backend, adapters, num_axes)
        self.max_tokens = max_tokens
        self.graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        self._largest_buffers: dict[int, PlanBuffers] = {}  # by kind: all its graphs use their scratch memory
        self._captures_ahead = True  # until there is no memory for it
        self.graphs_required = cuda_graphs is True
        self._recorder = recorder
        self._graph_sizes = decode_sizes(max_sequences, 2 if compile_layers else 1), max_sequences, max_drafts
        if cuda_graphs is not False and self._can_have_graphs():
            self._make_graphs()

    def _make_graphs(self) -> None:
        """Makes room for graphs, of which none is captured."""
        recorder = self._recorder or CudaRecorder(self.device)
        decoding, max_sequences, max_drafts = self._graph_sizes
        self.graphs = DecodeGraphs(self, recorder, decoding, self._largest_buffers)
        chosen = DRAFT_SIZES if max_drafts else MIXED_SIZES
        sizes = mixed_sizes(self.max_tokens, chosen if self.states is None else STEPPED_SIZES)
        if sizes and all(module.packs for module in state_modules(self.model)):
            self.mixed_graphs = MixedGraphs(self, recorder, sizes, self._largest_buffers, max_sequences, max_drafts)

    def _can_have_graphs(self) -> bool:
        """Whether steps can run from graphs; raises if they must and cannot."""
        if self.device.type != "cuda" and self._recorder is None:
            if self.graphs_required:
                raise InvalidArgumentError(f"cuda_graphs=True on {self.device}: graphs need a GPU")
            return False
        try:
            for kind in self.kinds:
                self.backend.require_graphs(kind.spec)
        except UnsupportedAttentionError as error:
            if self.graphs_required:
                raise
            log.info("steps run without CUDA graphs: %s", error)  # no warning: the user chose the backend
            return False
        return True

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures the graphs of the largest steps, and runs a step without one, so that no request waits for what
        torch makes on first use. On a CPU it does nothing.
        """
        jobs = self._compilations() if self.device.type == "cuda" else []
        # A kind's slowest kernel takes as long as all others together. With more threads Python would delay it.
        with ThreadPoolExecutor(len(self.kinds) + 1, "kvpool-compile") as threads:
            self._kernels = [threads.submit(self._compile_kernel, job) for job in jobs]
            if self.mixed_graphs is not None:  # first: all other graphs use the memory of its largest one
                try:
                    self.mixed_graphs.capture_largest()
                except (UnsupportedAttentionError, CaptureError) as error:
                    if isinstance(error, CaptureError) and self.graphs_required:
                        raise
                    # Experts, and modules with a state, compute many tokens by other functions than few
                    log.warning("steps with prompts run without CUDA graphs: %s", error)
                    self.mixed_graphs = None
                    self._largest_buffers.clear()
            if self.graphs is not None:
                try:
                    self.graphs.capture_largest()
                except CaptureError as error:
                    if self.graphs_required:
                        raise
                    log.warning("steps run without CUDA graphs: %s", error)
                    self._drop_graphs()
            if self.device.type == "cuda":
                self._run_once()
            for kernel in self._kernels:
                kernel.result()

    def _compilations(self) -> list[Callable[[], object]]:
        """Calls that compile the kernels that attend and write, the slowest first."""
        jobs_of_kinds: list[list[Callable[[], object]]] = []
        for number, kind in enumerate(self.kinds):
            layer, spec = next(layer for layer, at in self.kind_of_layer.items() if at == number), kind.spec
            values = {
                part.name: torch.zeros(16, part.heads, part.width, dtype=TORCH_DTYPES[spec.dtype], device=self.device)
                for part in kind.group.attention.parts
            }
            nowhere = torch.full((16,), -1, dtype=torch.int32, device=self.device)
            attending = self.backend.compilations(spec, self.plane.layer_cache(layer))
            jobs_of_kinds.append([*attending, partial(self.plane.write_parts, nowhere, values, layer)])
        torch.cuda.current_stream(self.device).synchronize()  # what they read is there for other streams
        return [job for jobs in zip_longest(*jobs_of_kinds) for job in jobs if job is not None]

    def _compile_kernel(self, job: Callable[[], object]) -> None:
        """In a thread, while the model computes what comes before its first attention."""
        with torch.inference_mode(), torch.cuda.device(self.device), _own_stream(self.device):
            torch.zeros(1, device=self.device)  # gives the thread a CUDA context, which tensor descriptors need
            job()

    def _run_once(self) -> None:
        """Runs a step of the largest size and keeps nothing of it: a chunk of one prompt and one token of another."""
        count, groups = self.max_tokens, self.plane.config.groups
        zeros = torch.zeros(count, dtype=torch.int64, device=self.device)
        nowhere = StepSlots(torch.full((len(groups), count), -1, dtype=torch.int32, device=self.device))
        lengths = np.array([1, count - 1] if count > 1 else [1])
        batches = []
        for kind in self.kinds:
            ends = np.cumsum(ceil_div(lengths, kind.group.block_size))
            lists = (np.append(0, ends), np.zeros(ends[-1], np.int32))
            batches.append(PagedBatch.build(*lists, lengths, lengths, block_size=kind.group.block_size))
        states = None
        if self.states is not None:  # nobody has a slot yet
            states = StateStep.of(self.states, lengths.tolist(), [-1] * len(lengths), range(len(lengths)))
        self._run(zeros, zeros, zeros[:1], nowhere, batches, states)

    @property
    def is_uncompiled(self) -> bool:
        """Whether `compile` and `use_compiled` are still to be called."""
        return self._uncompiled is not None

    def compile(self, is_stopped: Callable[[], bool]) -> None:
        """Compiles the layers, or raises SequenceStateError if it `is_stopped`. Another thread may run steps meanwhile."""

        def attend(call: AttentionCall) -> Tensor:
            if is_stopped():
                raise SequenceStateError("the engine was closed while its layers were compiled")
            spec = self.kinds[self.kind_of_layer[self.layer_of_number[call.layer]]].spec
            return call.q.new_zeros(len(call.q), spec.q_heads, spec.v_dim)

        # torch measures variants of kernels, for which it waits for the whole device
        with whole_device, current(self.device), _own_stream(self.device):
            run_layers(self._uncompiled, attend, self.num_axes, one_token=self.graphs is None)

    def use_compiled(self) -> None:
        """Steps run by compiled layers from now on; the graphs of the largest ones are captured again."""
        had_graphs = self.graphs is not None
        self.close()
        self.model, self._uncompiled, self._hidden_source = self._uncompiled, None, None
        if had_graphs:
            self._make_graphs()
        try:
            self.warm_up()
        except (CaptureError, torch.OutOfMemoryError) as error:  # requests are there: they go on
            log.error("steps run without CUDA graphs: %s", error)
            self._drop_graphs()

    def stay_plain(self) -> None:
        """Steps go on by plain layers, because the others could not be compiled."""
        self._uncompiled = None

    @property
    def can_get_faster(self) -> bool:
        """Whether layers are still to be compiled, or graphs may still be captured."""
        return self.is_uncompiled or bool(self._all_graphs())

    def _all_graphs(self) -> list[StepGraphs]:
        return [graphs for graphs in (self.graphs, self.mixed_graphs) if graphs is not None]

    @property
    def captured(self) -> CaptureReport:
        """The graphs so far, and what they cost."""
        reports = [graphs.report for graphs in self._all_graphs()]
        return CaptureReport(*(sum(column) for column in zip(CaptureReport(0, 0.0, 0), *reports, strict=True)))

    @property
    def captures_more(self) -> bool:
        """Whether graphs are left to be captured."""
        return self._captures_ahead and not all(graphs.are_all for graphs in self._all_graphs())

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Captures one of the graphs that are left, those of decoding first."""
        try:
            next(graphs for graphs in self._all_graphs() if not graphs.are_all).capture_next()
        except (CaptureError, torch.OutOfMemoryError) as error:  # not the model's fault: a larger one was captured
            log.warning("the other CUDA graphs are captured when steps need them: %s", error)
            self._captures_ahead = False
        if not self.captures_more:
            log.info("captured %d CUDA graphs in %.1f s, %d MiB", *self.captured[:2], self.captured.num_bytes >> 20)

    def _go_on_without(self, error: Exception) -> None:
        """A step runs without its graph. A larger one was captured, so it may work the next time."""
        if self.graphs_required:
            raise error
        log.warning("a step runs without its CUDA graph: %s", error)

    def _drop_graphs(self) -> None:
        self.graphs = self.mixed_graphs = None
        self._largest_buffers.clear()

    def drop_adapted_graphs(self) -> None:
        """Forgets graphs with adapters, whose stacks have changed. They are captured again when a step needs them."""
        self._wait_for_graphs()
        for graphs in self._all_graphs():
            graphs.drop_adapted()

    def _wait_for_graphs(self) -> None:
        if self.device.type == "cuda" and self.graphs is not None:
            torch.cuda.default_stream(self.device).synchronize()  # the stream of every engine's thread

    def close(self) -> None:
        """Gives the memory of the graphs back, once the device is done with them."""
        self._wait_for_graphs()
        self._drop_graphs()

    def run(self, plan: BatchPlan, inputs: StepInputs) -> Tensor:
        """Logits [row of `plan.logits_indices`, vocabulary] of a step. The copies of the plan must have been started."""
        for graphs in self._all_graphs() if inputs.is_plain else ():
            if graphs.fits(plan):
                try:
                    return graphs.run(plan, inputs)
                except (CaptureError, torch.OutOfMemoryError) as error:
                    self._go_on_without(error)
                    break
        return self._run_plan(plan, inputs)
