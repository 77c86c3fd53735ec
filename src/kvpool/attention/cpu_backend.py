"""The cpu backend: kvpool's own C code, which reads K and V in their blocks. It exists where it was compiled.

Wheels have `kernels/_paged_attention.c` compiled where a C compiler was found; `tools/compile_c.py` does it in a checkout.
The torch backend computes the same without it, and is its reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.attention.attention_batch import Int32Array, Int64Array, PagedBatch, shared_prefixes
from kvpool.attention.backend import CHOSEN_TOKENS, AttentionBackend, AttentionPlan, PlanBuffers
from kvpool.config.layers import DType, ceil_div
from kvpool.errors import InvalidArgumentError, UnsupportedAttentionError
from kvpool.kernels import compiled_attention
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache, StoredPart
from kvpool.pools.arrays import within

_KINDS = {DType.FLOAT32: 0, DType.BFLOAT16: 1, DType.FLOAT16: 2, DType.INT8: 3}
_PIECE_ROWS = 192  # queries times heads of a group, for which a key is read once
_SHORT = 16  # queries of a sequence up to which a shared prefix is read separately
_SAVED_READS = 512  # tokens; if it saves so many reads, a shared prefix is read separately
_FEWEST_KEYS = 256  # of a piece, if keys are divided between threads
_NO_LIMIT = 2**31 - 2  # as a position


class _Pieces(NamedTuple):
    """Pieces of work as the C code takes them: some queries, and the keys of them that one list of blocks holds."""

    queries: Int32Array  # [queries, 3]: row, and the first and last position that it sees
    pieces: Int64Array  # [pieces, 8]: first query, queries, start of the list, gap, sinks, first and last key, partial result
    merges: Int32Array  # [partial results, 2]: row, partial result; those of a row stand together
    num_partials: int


class _CpuPlan(AttentionPlan):
    def __init__(self, backend: CpuBackend, spec: AttentionSpec, batch: PagedBatch, work: _Pieces) -> None:
        super().__init__(backend, spec, batch.num_query_tokens, batch.block_size)
        self.work = work
        self.indices = np.ascontiguousarray(batch.indices[: batch.indptr[-1]])
        self.highest_block = int(self.indices.max(initial=-1))
        if len(self.indices) and self.indices.min() < 0:
            raise InvalidArgumentError(f"block {self.indices.min()} is negative; list blocks that are held")


class CpuBackend(AttentionBackend):
    """Attends over blocks in place: prompts, decoding and prefixes that sequences share, on torch's number of threads.

    `instructions` is one of those that the processor has ("avx512", "avx2", "sse"; "neon"), None for the best.
    """

    name = "cpu"

    def __init__(self, device: torch.device, instructions: str | None = None, module: Any = None) -> None:
        super().__init__(device)
        if device.type != "cpu":
            raise UnsupportedAttentionError(f"the cpu backend needs a CPU, not {device}; use triton or torch")
        found = module or compiled_attention()
        if found is None:
            raise UnsupportedAttentionError(
                "the cpu backend was not compiled; install kvpool where there is a C compiler, or use torch"
            )
        known: tuple[str, ...] = found.instructions()
        if instructions is not None and instructions not in known:
            raise UnsupportedAttentionError(f"this processor has no {instructions}; it has {', '.join(known)}")
        self.instructions = instructions or known[0]
        self._module = found

    def missing(self, spec: AttentionSpec) -> str | None:
        """It reads floats and int8."""
        if spec.chosen:
            return CHOSEN_TOKENS
        return None if spec.kv_dtype in _KINDS else f"K and V stored as {spec.kv_dtype.value}"

    def plan(self, spec: AttentionSpec, batch: PagedBatch, buffers: PlanBuffers | None = None) -> AttentionPlan:
        """Divides queries and keys into pieces of work; O(queries) array work."""
        if buffers is not None:
            self.reserve(spec, max_sequences=1, max_blocks=1)
        self.require(spec)
        batch.check_for(spec)
        return _CpuPlan(self, spec, batch, _divide(spec, batch, torch.get_num_threads()))

    def attend(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, sink_logits: Tensor | None, out: Tensor
    ) -> None:
        """Computes all pieces and merges their results."""
        assert isinstance(plan, _CpuPlan)
        if plan.highest_block >= cache.num_blocks:
            raise InvalidArgumentError(f"block {plan.highest_block} is listed, but the layer has {cache.num_blocks}")
        spec, work = plan.spec, plan.work
        q = q if q.stride(2) == 1 else q.contiguous()
        result = out if out.stride(2) == 1 else out.new_empty(out.shape)
        logits = None if sink_logits is None else sink_logits.float().contiguous()
        shape = (spec.q_heads, spec.kv_heads, spec.head_dim, spec.v_dim, plan.block_size, spec.sink_tokens)
        self._module.attend(
            self.instructions,
            _packed(q, spec.dtype),
            _packed(result, spec.dtype),
            _stored(cache[spec.keys]),
            _stored(cache[spec.values]),
            0 if logits is None else logits.data_ptr(),
            (*shape, spec.sink_slots(plan.block_size)),
            (spec.scale, spec.soft_cap or 0.0),
            plan.indices,
            work.queries,
            work.pieces,
            work.merges,
            work.num_partials,
            torch.get_num_threads(),
        )
        if result is not out:
            out.copy_(result)


def _packed(data: Tensor, dtype: DType) -> tuple[int, ...]:
    return data.data_ptr(), _KINDS[dtype], data.stride(0), data.stride(1)


def _stored(part: StoredPart) -> tuple[int, ...]:
    scales = (0, 0, 0, 0) if part.scale is None else (part.scale.data_ptr(), *part.scale.stride())
    return part.data.data_ptr(), _KINDS[part.dtype], *part.data.stride()[:3], *scales


def _divide(spec: AttentionSpec, batch: PagedBatch, threads: int) -> _Pieces:
    """Pieces of the batch: a prefix that sequences share, then tiles of the queries of each sequence.

    A sequence without queries has no piece; each query of the others is in exactly one tile, which may have no keys.
    """
    skipped = np.zeros(len(batch), np.int64)  # tokens of each sequence that are read as a shared prefix
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    shared_rows: list[Int64Array] = []
    shared: list[tuple[int, int, int]] = []  # queries, start of the list, keys
    for prefix in _shared(spec, batch):
        skipped[prefix.rows] = prefix.num_tokens
        tokens = _ranges(starts[prefix.rows], batch.query_lens[prefix.rows])
        shared_rows.append(tokens)
        shared.append((len(tokens), int(batch.indptr[prefix.rows[0]]), prefix.num_tokens))

    size = max(1, _PIECE_ROWS // spec.group_size)
    num_tiles = ceil_div(batch.query_lens, size)
    row = np.repeat(np.arange(len(batch)), num_tiles)
    first = within(num_tiles) * size
    count = np.minimum(batch.query_lens[row] - first, size)
    position = batch.kv_lens[row] - batch.query_lens[row] + first
    keys = batch.key_ranges(spec, row, position, position + count - 1)
    tiles = np.empty((len(row), 8), np.int64)
    for column, values in enumerate((starts[row] + first, count, batch.indptr[row], batch.gaps[row], keys.sinks)):
        tiles[:, column] = values
    tiles[:, 5] = np.minimum(np.maximum(keys.start, skipped[row]), keys.end)
    tiles[:, 6] = keys.end
    tiles[:, 7] = skipped[row]  # as a mark: the queries have another part

    prefixes = np.zeros((len(shared), 8), np.int64)
    for number, (queries, table, num_tokens) in enumerate(shared):
        prefixes[number, [1, 2, 6, 7]] = queries, table, num_tokens, 1
    rows = np.concatenate([np.arange(batch.num_query_tokens), *shared_rows])
    prefixes[:, 0] = batch.num_query_tokens + np.cumsum(prefixes[:, 1]) - prefixes[:, 1]
    pieces = _split(np.concatenate([prefixes, tiles]), spec, threads)
    partial = pieces[:, 7] > 0
    sizes = np.where(partial, pieces[:, 1], 0)
    pieces[:, 7] = np.where(partial, np.cumsum(sizes) - sizes, -1)
    merged = rows[_ranges(pieces[partial, 0], pieces[partial, 1])]
    order = np.argsort(merged, kind="stable")
    merges = np.stack([merged[order], order], 1).astype(np.int32)
    return _Pieces(_queries(spec, batch, rows), pieces, merges, len(merged))


def _shared(spec: AttentionSpec, batch: PagedBatch) -> list[Any]:
    """Prefixes that several sequences with few queries share and see completely."""
    if not spec.causal or spec.window is not None or spec.chunk is not None:
        return []
    rows = np.flatnonzero((batch.query_lens > 0) & (batch.query_lens <= _SHORT) & (batch.kv_lens > 0))
    return shared_prefixes(batch, rows, _SAVED_READS)


def _queries(spec: AttentionSpec, batch: PagedBatch, rows: Int64Array) -> Int32Array:
    """What each listed query sees."""
    ends = np.cumsum(batch.query_lens)
    positions = np.arange(batch.num_query_tokens) + np.repeat(batch.kv_lens - ends, batch.query_lens)
    last = positions if spec.causal else np.full_like(positions, _NO_LIMIT)
    seen = np.stack([np.arange(len(positions)), spec.first_visible(positions), last], 1)
    return np.ascontiguousarray(seen[rows], np.int32)


def _split(pieces: Int64Array, spec: AttentionSpec, threads: int) -> Int64Array:
    """Divides the keys of long pieces, if there are too few pieces and heads for the threads. The results are partial."""
    if threads == 1 or len(pieces) * spec.kv_heads >= 2 * threads:
        return pieces
    wanted = ceil_div(2 * threads, max(1, len(pieces) * spec.kv_heads))
    lengths = pieces[:, 6] - pieces[:, 5]
    step = np.maximum(ceil_div(lengths, wanted), _FEWEST_KEYS)
    counts = np.maximum(ceil_div(lengths, step), 1)
    number = within(counts)
    divided = np.repeat(pieces, counts, axis=0)
    step = np.repeat(step, counts)
    divided[:, 4] = np.where(number == 0, divided[:, 4], 0)
    divided[:, 5] += number * step
    divided[:, 6] = np.minimum(divided[:, 6], divided[:, 5] + step)
    divided[:, 7] |= np.repeat(counts, counts) > 1
    return divided


def _ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """start, start + 1, ... of each range, one range after another."""
    ranges: Int64Array = np.repeat(starts, counts) + within(counts)
    return ranges
