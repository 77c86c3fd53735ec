"""AttentionBackend, the interface of attention: plan once per step and layer group, run once per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpool.attention.attention_batch import PagedBatch
from kvpool.checks import check_int
from kvpool.errors import InvalidArgumentError, UnsupportedAttentionError
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache
from kvpool.kernels.quantization import TORCH_DTYPES
from kvpool.kernels.sparse import Choice

CHOSEN_TOKENS = "attention over tokens that an indexer chooses"  # as `missing` says it


class AttentionPlan:
    """What a backend has prepared for one step. It serves every layer with the same spec and block table."""

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, num_query_tokens: int, block_size: int) -> None:
        self.backend = backend
        self.spec = spec
        self.num_query_tokens = num_query_tokens
        self.block_size = block_size


class PlanBuffers:
    """Device memory of fixed size for plans, so that a captured CUDA graph reads the newest plan.

    Queries and outputs have `max_query_tokens` rows. Rows after those of the batch become zeros.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        max_sequences: int,
        max_query_tokens: int,
        max_blocks: int,
        max_keys: int | None = None,
    ) -> None:
        self.spec = spec
        self.max_keys = max_keys  # of a sequence; None: any number
        self.max_sequences = check_int(max_sequences, "max_sequences", 1, 2**24, InvalidArgumentError)
        self.max_query_tokens = check_int(max_query_tokens, "max_query_tokens", 1, 2**24, InvalidArgumentError)
        self.max_blocks = check_int(max_blocks, "max_blocks", 1, 2**31 - 1, InvalidArgumentError)

    def check(self, spec: AttentionSpec, batch: PagedBatch) -> None:
        """Raises InvalidArgumentError unless the batch fits into these buffers."""
        if spec != self.spec:
            raise InvalidArgumentError(
                f"these buffers are for {self.spec}, not for {spec}; reserve a set for each spec"
            )
        limits = [
            ("sequences", len(batch), self.max_sequences),
            ("queries", batch.num_query_tokens, self.max_query_tokens),
            ("blocks", int(batch.indptr[-1]), self.max_blocks),
        ]
        if self.max_keys is not None:
            limits.append(("keys of a sequence", int(batch.kv_lens.max(initial=0)), self.max_keys))
        for name, count, limit in limits:
            if count > limit:
                raise InvalidArgumentError(
                    f"the batch has {count} {name}, its buffers hold {limit}; reserve larger ones"
                )


class AttentionBackend(ABC):
    """Paged attention on one device.

        backend = create_backend(device="cuda")
        plan = backend.plan(spec, PagedBatch.of(kv.batch(handles).csr(0), group, query_lens, kv_lens))
        for layer in layers:                       # K and V of this step are written before
            out = backend.run(q, store.layer(layer), plan)

    For CUDA graphs, `reserve` buffers once, plan into them before the capture and before every replay.
    """

    name: ClassVar[str]
    graphs: ClassVar[bool] = False  # whether `reserve` works

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def missing(self, spec: AttentionSpec) -> str | None:
        """What this backend cannot do of `spec`, in words; None if it can do all of it."""

    @abstractmethod
    def plan(self, spec: AttentionSpec, batch: PagedBatch, buffers: PlanBuffers | None = None) -> AttentionPlan:
        """Prepares one step. With `buffers`, writes the plan into them, which ends earlier plans there."""

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        *,
        sink_logits: Tensor | None = None,
        choice: Choice | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The attention of `q` [tokens, query heads, head dim] over one layer: [tokens, query heads, v dim].

        Rows of sequences without keys become zero. With a `choice`, queries see the tokens that it has chosen; the first
        layer that it comes to chooses them.
        """
        self._check_run(q, cache, plan, sink_logits, out)
        self._check_choice(q, plan.spec, choice)
        if out is None:
            out = q.new_empty(q.shape[0], plan.spec.q_heads, plan.spec.v_dim)
        if choice is None:
            self.attend(q, cache, plan, sink_logits, out)
        else:
            self.attend_chosen(q, cache, plan, choice, sink_logits, out)
        return out

    @abstractmethod
    def attend(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, sink_logits: Tensor | None, out: Tensor
    ) -> None:
        """Writes the attention of `q` over one layer into `out`; all of these fit together."""

    def attend_chosen(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        choice: Choice,
        sink_logits: Tensor | None,
        out: Tensor,
    ) -> None:
        """The same over chosen tokens, which it chooses if nobody did; backends may lack it (`missing`)."""
        raise UnsupportedAttentionError(f"the {self.name} backend cannot do {CHOSEN_TOKENS}")

    def _planned(self, plan: AttentionPlan) -> bool:
        """Whether the plan is one of this backend."""
        return plan.backend is self

    def reserve(
        self,
        spec: AttentionSpec,
        *,
        max_sequences: int,
        max_blocks: int,
        max_query_tokens: int | None = None,
        max_keys: int | None = None,
        beside: PlanBuffers | None = None,
    ) -> PlanBuffers:
        """Buffers for plans of up to so many sequences, queries (default: one each) and listed blocks.

        Where an indexer chooses tokens, `max_keys` is the longest sequence: the scores of all its keys have room.
        `beside` are buffers whose plans never run at the same time as these. Both share scratch memory.
        """
        raise UnsupportedAttentionError(
            f"the {self.name} backend cannot be captured in CUDA graphs; use triton or flashinfer"
        )

    def compilations(self, spec: AttentionSpec, cache: LayerCache) -> Sequence[Callable[[], None]]:
        """Calls that compile the kernels for layers like this one, the slowest first. They may run side by side."""
        self.require(spec)
        return ()

    def require_graphs(self, spec: AttentionSpec) -> None:
        """Raises UnsupportedAttentionError if plans of `spec` cannot be captured in CUDA graphs."""
        self.require(spec)
        if not self.graphs:
            raise UnsupportedAttentionError(f"the {self.name} backend cannot be captured in CUDA graphs")

    def require(self, spec: AttentionSpec) -> None:
        """Raises UnsupportedAttentionError, which names what is missing, if this backend cannot compute `spec`."""
        if reason := self.missing(spec):
            raise UnsupportedAttentionError(f"the {self.name} backend cannot do {reason}; spec: {spec}")

    def _check_choice(self, q: Tensor, spec: AttentionSpec, choice: Choice | None) -> None:
        """Raises InvalidArgumentError if a choice is missing, or is of other tokens than the plan's."""
        if (choice is not None) != (spec.chosen > 0):
            raise InvalidArgumentError(
                f"chosen={spec.chosen} was planned: pass a choice if it is not 0, and None otherwise"
            )
        if choice is not None and (len(choice.q) != len(q) or choice.most != spec.chosen):
            raise InvalidArgumentError(
                f"the choice is of {choice.most} tokens for each of {len(choice.q)}, planned was {spec.chosen} for {len(q)}"
            )

    def _check_run(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, sink_logits: Tensor | None, out: Tensor | None
    ) -> None:
        """Raises InvalidArgumentError if the arguments of `run` do not fit the plan."""
        spec = plan.spec
        expected: list[tuple[str, Tensor | None, Any]] = [
            ("q", q, (plan.num_query_tokens, spec.q_heads, spec.head_dim)),
            ("out", out, (plan.num_query_tokens, spec.q_heads, spec.v_dim)),
        ]
        for name, tensor, shape in expected:
            if tensor is not None and (tensor.shape != shape or tensor.dtype != TORCH_DTYPES[spec.dtype]):
                raise InvalidArgumentError(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, planned was {spec.dtype.value} of {shape}"
                )
        if not self._planned(plan):
            raise InvalidArgumentError(
                f"the plan was made by another {plan.backend.name} backend; plan and run with the same"
            )
        for name, dtype, width in spec.reads:
            part = cache.get(name)
            if part is None:
                raise InvalidArgumentError(
                    f"the layer has no part {name!r}, which the plan reads; it has {list(cache)}"
                )
            held = part.dtype.value, *part.data.shape[1:3], part.width
            planned = dtype.value, plan.block_size, spec.kv_heads, width
            if held != planned:
                raise InvalidArgumentError(
                    f"the layer holds {name!r} as (type, block size, heads, elements) {held}, planned was {planned}"
                )
            if q.device != part.data.device:
                raise InvalidArgumentError(f"q is on {q.device}, the layer on {part.data.device}")
        if (sink_logits is not None) != spec.sink_logits:
            raise InvalidArgumentError(
                f"sink_logits={spec.sink_logits} was planned: pass the tensor if it is True, and None otherwise"
            )
        if sink_logits is not None and sink_logits.shape != (spec.q_heads,):
            raise InvalidArgumentError(f"sink_logits has shape {tuple(sink_logits.shape)}, needed is ({spec.q_heads},)")
