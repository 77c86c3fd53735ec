"""Runs a step on the device, operation by operation: the model computes the tokens, K and V go to blocks, logits come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.attention import AttentionBackend, AttentionPlan, PagedBatch
from kvpool.config import LayerGroup, LayerSpec
from kvpool.config.layers import INDEX, DType
from kvpool.engine.adapters import EngineAdapters
from kvpool.engine.embedding import source_of
from kvpool.engine.spans import Span, SpannedPlan
from kvpool.engine.step_part import StepInputs
from kvpool.errors import UnsupportedModelError
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.lora import group_tokens, tile_size
from kvpool.kernels.quantization import TORCH_DTYPES, rotation
from kvpool.model.adapter_steps import AdapterStep, adapting
from kvpool.model.forward import forward
from kvpool.model.hook import AttentionCall
from kvpool.model.probing import ModelShape
from kvpool.model.state_steps import StateStep
from kvpool.model.vision import Shown
from kvpool.scheduling import BatchPlan
from kvpool.storage.data_plane import DataPlane, StepSlots
from kvpool.storage.moving import upload


class AttentionKind(NamedTuple):
    """Layers with the same block table and the same attention: one plan per step serves them all."""

    group: LayerGroup
    spec: AttentionSpec


def rotates(layer: LayerSpec) -> tuple[bool, bool]:
    """Whether keys, and values, of such a layer are rotated before they are stored: outliers would cost others their bits.

    Values in 8 bits gain too little for the time it takes. A part that is both cannot be rotated: they differ in size.
    """
    stored = {part.name: part.dtype for part in layer.parts}
    return "v" in stored and stored["k"] is DType.INT8, stored.get("v") is DType.INT4


def _rotations(kind: AttentionKind, device: torch.device) -> list[Tensor | None]:
    """The matrices for keys and queries, and for values and results."""
    spec = kind.spec
    of_both = zip(rotates(kind.group.attention), (spec.head_dim, spec.v_dim), strict=True)
    return [rotation(dim).to(device, TORCH_DTYPES[spec.dtype]) if does else None for does, dim in of_both]


class EagerRunner:
    """Runs steps without graphs. Every step is one variable-length batch."""

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        plane: DataPlane,
        backend: AttentionBackend,
        adapters: EngineAdapters,
        num_axes: int,
    ) -> None:
        self.model = model
        self.num_axes = num_axes  # of positions; images give tokens one each for time, height and width
        self.plane = plane
        self.backend = backend
        self.adapters = adapters
        self.device = plane.device
        config = plane.config
        # The layers of the cache that layers of the model attend over, by the numbers of these
        self.layer_of_number = {number: layer for layer, number in enumerate(shape.attending)}
        states = dict(enumerate(shape.states, len(shape.layers)))
        self.states = plane.state_slots(states) if states else None
        self.kinds: list[AttentionKind] = []  # distinct ones
        self.kind_of_layer: dict[int, int] = {}
        for index, layer in enumerate(self.layer_of_number.values()):
            group = config.groups[config.group_of_layer[layer]]
            kind = AttentionKind(group, shape.attention_spec(index, config.attention_layer(layer).dtype))
            backend.require(kind.spec)
            if kind not in self.kinds:
                self.kinds.append(kind)
            self.kind_of_layer[layer] = self.kinds.index(kind)
        self._rotations = [_rotations(kind, self.device) for kind in self.kinds]
        self._kernels: list[Future[None]] = []  # that are being compiled
        self._hidden_source: torch.nn.Module | None = None
        self.num_detours = 0  # how often something was done that later steps do not repeat, such as capturing a graph

    def _run_plan(self, plan: BatchPlan, inputs: StepInputs) -> Tensor:
        """The logits of a step."""
        slots = self.plane.prepare(plan.slots, plan.batch, plan.states)
        batches = [self.paged_batch(plan, kind) for kind in self.kinds]
        states = None
        if self.states is not None and plan.states is not None:
            sources, targets = plan.states
            states = StateStep.of(self.states, np.diff(plan.query_start), sources, targets, plan.num_kept)
        adapted = None
        if inputs.adapter_slots is not None:
            tile = tile_size(plan.num_tokens) if self.device.type == "cuda" else plan.num_tokens
            adapted = AdapterStep(self.adapters.stacks, self.upload(group_tokens(inputs.adapter_slots, tile)))
        keep = self.upload(plan.logits_indices if inputs.keep is None else inputs.keep)
        first = inputs.token_ids, self.upload(inputs.positions), keep
        with adapting(adapted):
            return self._run(*first, slots, batches, states, inputs.shown, inputs.spans)

    def _run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        keep: Tensor,
        slots: StepSlots,
        batches: Sequence[PagedBatch],
        states: StateStep | None,
        shown: Shown | None = None,
        spans: Sequence[Span] = (),
    ) -> Tensor:
        """A step without a graph, launched operation by operation."""
        plans: list[AttentionPlan | SpannedPlan] = [
            SpannedPlan.of(self.backend, kind.spec, batch, spans) if spans else self.backend.plan(kind.spec, batch)
            for kind, batch in zip(self.kinds, batches, strict=True)
        ]

        def attend(layer: int, call: AttentionCall) -> Tensor:
            self.write(slots, call, layer)
            return self.attention(layer, call, plans)

        return self.forward(token_ids, positions, keep, attend, states, shown)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        keep: Tensor,
        attend: Callable[[int, AttentionCall], Tensor],
        states: StateStep | None,
        shown: Shown | None = None,
    ) -> Tensor:
        """The logits of a step; raises if attention of a layer of the cache was computed by something else than `attend`."""
        num_calls = 0

        def counted(call: AttentionCall) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            layer = self.layer_of_number[call.layer]
            of_keys, of_values = self._rotations[self.kind_of_layer[layer]]
            if of_keys is None:
                return attend(layer, call)
            call = call._replace(q=call.q @ of_keys, k=call.k @ of_keys)
            if of_values is None:
                return attend(layer, call)
            return attend(layer, call._replace(v=call.v @ of_values)) @ of_values.T

        logits = forward(self.model, token_ids, positions, keep, counted, states, shown)
        if num_calls != len(self.kind_of_layer):
            raise UnsupportedModelError(
                f"{num_calls} of {len(self.kind_of_layer)} layers attended over the cache: another program has replaced the "
                "attention that kvpool registered in transformers; start this one again without it"
            )
        return logits

    @torch.inference_mode()
    def hidden_source(self) -> torch.nn.Module:
        """The module that returns the hidden states of a step, for embeddings."""
        if self._hidden_source is None:
            self._hidden_source = source_of(self.model)
        return self._hidden_source

    def write(self, slots: StepSlots | Tensor, call: AttentionCall, layer: int) -> None:
        """Stores what a layer of the cache keeps of the tokens of a step."""
        values = {"k": call.k} if call.k_only else {"k": call.k, "v": call.v}
        if call.choice is not None and self.layer_of_number[call.choice.layer] == layer:
            values[INDEX] = call.choice.k
        self.plane.write_parts(slots, values, layer, whole=True)

    def attention(self, layer: int, call: AttentionCall, plans: Sequence[AttentionPlan | SpannedPlan]) -> Tensor:
        """Attention of a layer of the cache over the blocks in its plan."""
        while self._kernels:
            self._kernels.pop().result()
        plan = plans[self.kind_of_layer[layer]]
        if isinstance(plan, SpannedPlan):
            return plan.run(call.q, self.plane.layer_cache(layer), call.sinks)
        cache = self.plane.layer_cache(layer)
        return plan.backend.run(call.q, cache, plan, sink_logits=call.sinks, choice=call.choice)

    def paged_batch(self, plan: BatchPlan, kind: AttentionKind) -> PagedBatch:
        """The step's sequences as attention over one layer group sees them."""
        csr = plan.batch.csr(kind.group.index)
        return PagedBatch.of(csr, kind.group, np.diff(plan.query_start), plan.kv_lengths)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """A copy of a host array on the device, without waiting for it."""
        return upload(array, self.device)
