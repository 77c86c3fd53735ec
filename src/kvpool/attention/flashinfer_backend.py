"""The FlashInfer backend: its paged kernels on kvpool's block lists. It is the default on NVIDIA GPUs if installed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import flashinfer  # type: ignore[import-not-found, unused-ignore]
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.attention.attention_batch import Int64Array, PagedBatch
from kvpool.attention.backend import CHOSEN_TOKENS, AttentionBackend, AttentionPlan, PlanBuffers
from kvpool.config.layers import DType, ceil_div
from kvpool.errors import InvalidArgumentError, UnsupportedAttentionError
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache
from kvpool.kernels.quantization import TORCH_DTYPES

_WORKSPACE_BYTES = 128 * 2**20
_HEAD_DIMS = (64, 128, 256)
_FA3_ROWS = 128  # queries × heads in one tile of FlashAttention 3
_TENSOR_CORE_GROUP = 4  # with at least so many query heads per KV head, tensor-core decode is faster


class _WrapperRows(NamedTuple):
    """The query rows of one wrapper: decode rows, or chunks of prompts."""

    wrapper: Any
    tokens: slice | Tensor  # rows of the query tensor


class _FlashInferPlan(AttentionPlan):
    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, num_query_tokens: int, block_size: int) -> None:
        super().__init__(backend, spec, num_query_tokens, block_size)
        self.parts: list[_WrapperRows] = []
        self.empty: Tensor | None = None  # query rows of sequences without keys


class _Lists(NamedTuple):
    """Block lists as FlashInfer takes them: exactly the blocks that are read, with the length of the last one."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


class _Wrappers:
    """Wrappers that hold no live plan. A wrapper keeps its plan in memory of its own, so each live plan needs one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._idle: list[tuple[Any, torch.cuda.Event]] = []

    def take(self) -> Any:
        if not self._idle:
            return self._make()
        wrapper, planned = self._idle.pop(0)
        planned.synchronize()  # the copies of its last plan may still read its pinned memory
        return wrapper

    def lend_to(self, plan: AttentionPlan, wrapper: Any) -> None:
        """Takes the wrapper back when the plan is gone."""
        planned = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        planned.record()
        weakref.finalize(plan, self._idle.append, (wrapper, planned)).atexit = False


class _FlashInferBuffers(PlanBuffers):
    """A wrapper for CUDA graphs: always the same number of sequences, with one query each."""

    def __init__(self, backend: FlashInferBackend, spec: AttentionSpec, max_sequences: int, max_blocks: int) -> None:
        super().__init__(spec, max_sequences, max_sequences, max_blocks)
        sizes = (max_sequences + 1, max_blocks + max_sequences, max_sequences)  # one block for each row of padding
        indptr, indices, last = (torch.zeros(size, dtype=torch.int32, device=backend.device) for size in sizes)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            backend.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=spec.group_size >= _TENSOR_CORE_GROUP,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
        )
        self.planned: torch.cuda.Event | None = None


class FlashInferBackend(AttentionBackend):
    """Decode rows go to FlashInfer's decode kernels, longer chunks to its prefill kernels."""

    name = "flashinfer"
    graphs = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._decode = {
            cores: _Wrappers(
                lambda cores=cores: flashinfer.BatchDecodeWithPagedKVCacheWrapper(  # type: ignore[misc]
                    self.workspace, "NHD", use_tensor_cores=cores
                )
            )
            for cores in (False, True)
        }
        self._prefill = {
            kernels: _Wrappers(
                lambda kernels=kernels: flashinfer.BatchPrefillWithPagedKVCacheWrapper(  # type: ignore[misc]
                    self.workspace, "NHD", backend=kernels
                )
            )
            for kernels in ("fa2", "fa3")
        }
        properties = torch.cuda.get_device_properties(device)
        self._hopper_sms = properties.multi_processor_count if properties.major == 9 else None

    def missing(self, spec: AttentionSpec) -> str | None:
        """It supports plain, windowed and soft-capped attention over 16-bit floats, and nothing else."""
        unknown = {
            f"{spec.dtype.value} queries": spec.dtype is DType.FLOAT32,
            f"K and V stored as {spec.kv_dtype.value}": spec.kv_dtype is not spec.dtype,
            f"heads of {spec.head_dim} elements": spec.head_dim not in _HEAD_DIMS,
            f"V of {spec.v_dim} elements beside K of {spec.head_dim}": spec.v_dim != spec.head_dim,
            "K and V in one part of the cache": spec.shares_part,
            "sink tokens": spec.sink_tokens > 0,
            "chunked attention": spec.chunk is not None,
            "sink logits": spec.sink_logits,
            CHOSEN_TOKENS: spec.chosen > 0,
            "a window that is not causal": not spec.causal and spec.window is not None,
        }
        return next((feature for feature, wanted in unknown.items() if wanted), None)

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
        """Fixed buffers for decode: one query per sequence. All plans share one workspace."""
        self.require(spec)
        if (max_query_tokens or max_sequences) != max_sequences:
            raise UnsupportedAttentionError(
                f"max_query_tokens={max_query_tokens}: the flashinfer backend captures one query a sequence; use triton"
            )
        return _FlashInferBuffers(self, spec, max_sequences, max_blocks)

    def plan(self, spec: AttentionSpec, batch: PagedBatch, buffers: PlanBuffers | None = None) -> AttentionPlan:
        """Plans with FlashInfer's own scheduler."""
        self.require(spec)
        batch.check_for(spec)
        if buffers is not None:
            assert isinstance(buffers, _FlashInferBuffers)
            return self._plan_into(buffers, spec, batch)
        plan = _FlashInferPlan(self, spec, batch.num_query_tokens, batch.block_size)
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        with_keys = batch.kv_lens > 0
        decode = np.flatnonzero((batch.query_lens == 1) & with_keys)
        chunks = np.flatnonzero((batch.query_lens > 1) & with_keys)
        empty = np.flatnonzero((batch.query_lens > 0) & ~with_keys)
        if len(decode):
            wrappers = self._decode[spec.group_size >= _TENSOR_CORE_GROUP]
            wrapper = wrappers.take()
            wrapper.plan(*_lists(batch, decode), **_decode_options(spec, batch))
            wrappers.lend_to(plan, wrapper)
            plan.parts.append(_WrapperRows(wrapper, self._rows(starts[decode], batch.query_lens[decode])))
        if len(chunks):
            wrappers = self._prefill[self._prefill_kernels(spec, int(batch.query_lens[chunks].sum()))]
            wrapper = wrappers.take()
            self._plan_chunks(wrapper, spec, batch, chunks)
            wrappers.lend_to(plan, wrapper)
            plan.parts.append(_WrapperRows(wrapper, self._rows(starts[chunks], batch.query_lens[chunks])))
        if len(empty):
            rows = self._rows(starts[empty], batch.query_lens[empty])
            plan.empty = torch.arange(plan.num_query_tokens, device=self.device)[rows]
        return plan

    def attend(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, sink_logits: Tensor | None, out: Tensor
    ) -> None:
        """Runs the planned wrappers on the current stream."""
        assert isinstance(plan, _FlashInferPlan)
        stored = cache[plan.spec.keys].data, cache[plan.spec.values].data
        for wrapper, tokens in plan.parts:
            if isinstance(tokens, slice) and out.is_contiguous():  # its kernels take strides of queries, not of outputs
                wrapper.run(q[tokens], stored, out=out[tokens])
            else:
                out[tokens] = wrapper.run(q[tokens].contiguous(), stored)
        if plan.empty is not None:
            out.index_fill_(0, plan.empty, 0.0)

    def _prefill_kernels(self, spec: AttentionSpec, num_tokens: int) -> str:
        """FlashAttention 3 runs on Hopper and does not divide keys, so it needs enough queries to fill the GPU."""
        fills = self._hopper_sms is not None and num_tokens * spec.q_heads >= _FA3_ROWS * self._hopper_sms
        return "fa3" if fills else "fa2"

    def _plan_chunks(self, wrapper: Any, spec: AttentionSpec, batch: PagedBatch, rows: Int64Array) -> None:
        wrapper.plan(
            _int32(np.concatenate(([0], np.cumsum(batch.query_lens[rows])))),
            *_lists(batch, rows),
            spec.q_heads,
            spec.kv_heads,
            spec.head_dim,
            batch.block_size,
            causal=spec.causal,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.soft_cap,
            q_data_type=TORCH_DTYPES[spec.dtype],
        )

    def _plan_into(self, buffers: _FlashInferBuffers, spec: AttentionSpec, batch: PagedBatch) -> AttentionPlan:
        buffers.check(spec, batch)
        if (batch.query_lens != 1).any():
            raise InvalidArgumentError(
                "a plan in flashinfer's buffers has exactly one query a sequence; use triton for more"
            )
        if buffers.planned is not None:
            buffers.planned.synchronize()  # the copies of the last plan may still read the wrapper's pinned memory
        lists = _lists(batch, np.arange(len(batch)), pad_to=buffers.max_sequences)
        buffers.wrapper.plan(*lists, **_decode_options(spec, batch))
        buffers.planned = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        buffers.planned.record()
        plan = _FlashInferPlan(self, spec, buffers.max_sequences, batch.block_size)
        plan.parts.append(_WrapperRows(buffers.wrapper, slice(0, buffers.max_sequences)))
        return plan

    def _rows(self, starts: Int64Array, lens: Int64Array) -> slice | Tensor:
        """The query rows of some sequences; a slice if they are contiguous."""
        if (starts[1:] == starts[:-1] + lens[:-1]).all():
            return slice(int(starts[0]), int(starts[-1] + lens[-1]))
        rows = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, lens, strict=True)])
        return torch.from_numpy(rows).to(self.device)


def _decode_options(spec: AttentionSpec, batch: PagedBatch) -> dict[str, Any]:
    return {
        "num_qo_heads": spec.q_heads,
        "num_kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "page_size": batch.block_size,
        "sm_scale": spec.scale,
        "window_left": -1 if spec.window is None else spec.window - 1,
        "logits_soft_cap": spec.soft_cap,
        "q_data_type": TORCH_DTYPES[spec.dtype],
    }


def _lists(batch: PagedBatch, rows: Int64Array, pad_to: int = 0) -> _Lists:
    """The lists of sequences `rows`, cut to the tokens that may be read. Padding reads one token of block 0.

    Positions that left the window shift queries and keys alike. FlashInfer looks only at distances, which stay the same.
    """
    listed = batch.num_listed[rows]
    needed = ceil_div(listed, batch.block_size)
    starts = batch.indptr[rows].astype(np.int64)
    indptr = np.concatenate(([0], np.cumsum(needed)))
    indices = batch.indices[np.repeat(starts - indptr[:-1], needed) + np.arange(indptr[-1])]
    last = listed - (needed - 1) * batch.block_size
    if (padding := pad_to - len(rows)) > 0:
        indptr = np.concatenate((indptr, indptr[-1] + np.arange(1, padding + 1)))
        indices = np.concatenate((indices, np.zeros(padding, np.int32)))
        last = np.concatenate((last, np.ones(padding, np.int64)))
    return _Lists(_int32(indptr), _int32(indices), _int32(last))


def _int32(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
