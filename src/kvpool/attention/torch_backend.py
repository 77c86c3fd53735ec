"""The torch backend: the production path on CPUs, and what other backends are compared with on any device.

Sequences with equally many queries and about equally many keys form a bucket: their tokens are gathered with one index
operation and attended to with one call. A longer chunk of a prompt is a bucket of its own, cut into tiles of queries so
that no tile computes what causality hides from all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpool.attention.attention_batch import Int64Array, PagedBatch
from kvpool.attention.backend import AttentionBackend, AttentionPlan, PlanBuffers
from kvpool.attention.gather import Scratch, TokenPlaces, gather_layer
from kvpool.kernels.paged.paged_spec import AttentionSpec
from kvpool.kernels.scattering.layer_cache import LayerCache

_PACKED_QUERIES = 16  # up to so many queries a sequence, the heads of a group share one pass over K
_TILE_QUERIES = 512
_TILE_SCORES = 2**22  # of one tile, where scores are materialised
_BUCKET_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # of gathered K; on a CPU it should stay in the cache
_FILL = 0.75  # the shortest sequence of a bucket has at least this share of the longest
_CACHED_MASK = 2**22


@dataclass
class _Tile:
    """Queries [first, last) of a bucket and the keys [start, end) that at least one of them sees."""

    first: int
    last: int
    start: int
    end: int
    triangular: bool  # each query sees the keys up to itself, and these are all there are
    mask: Tensor | None = None  # kept where it is small


@dataclass
class _Bucket:
    """Sequences with the same number of queries, padded to the same number of keys."""

    tokens: Tensor  # rows of the query tensor, [sequences * queries]
    num_sequences: int
    num_queries: int
    places: TokenPlaces
    query_positions: Tensor  # [sequences, queries]
    key_positions: Tensor  # [sequences, keys]
    num_keys: Tensor | None  # [sequences]; None where nothing is padded
    tiles: list[_Tile]


class _TorchPlan(AttentionPlan):
    def __init__(
        self, backend: AttentionBackend, spec: AttentionSpec, batch: PagedBatch, buckets: list[_Bucket]
    ) -> None:
        super().__init__(backend, spec, batch.num_query_tokens, batch.block_size)
        self.buckets = buckets
        self.complete = sum(len(bucket.tokens) for bucket in buckets) == self.num_query_tokens


class TorchBackend(AttentionBackend):
    """Plain torch operations on any device: every kind of attention and every stored type."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._scratch = Scratch()

    def missing(self, spec: AttentionSpec) -> str | None:
        """Nothing is missing."""
        return None

    def plan(self, spec: AttentionSpec, batch: PagedBatch, buffers: PlanBuffers | None = None) -> AttentionPlan:
        """Sorts sequences into buckets; O(sequences + keys) array work."""
        if buffers is not None:
            self.reserve(spec, max_sequences=1, max_blocks=1)
        batch.check_for(spec)
        return _TorchPlan(self, spec, batch, [self._bucket(spec, batch, rows) for rows in self._divide(spec, batch)])

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        *,
        sink_logits: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of every bucket in turn. Rows of sequences without keys become zero."""
        assert isinstance(plan, _TorchPlan)
        self.check_run(q, cache, plan, sink_logits, out)
        spec = plan.spec
        if out is None:
            out = q.new_empty(q.shape[0], spec.q_heads, spec.v_dim)
        if not plan.complete:
            out.zero_()
        for bucket in plan.buckets:
            k, v = gather_layer(cache, bucket.places, q.dtype, spec.head_dim, spec.v_dim, self._scratch)
            queries = q.index_select(0, bucket.tokens).view(bucket.num_sequences, bucket.num_queries, *q.shape[1:])
            results = [
                _attend(
                    queries[:, tile.first : tile.last],
                    k[:, :, tile.start : tile.end],
                    v[:, :, tile.start : tile.end],
                    _mask(spec, bucket, tile),
                    tile.triangular,
                    spec,
                    sink_logits,
                )
                for tile in bucket.tiles
            ]
            result = results[0] if len(results) == 1 else torch.cat(results, dim=1)
            out.index_copy_(0, bucket.tokens, result.reshape(-1, *result.shape[2:]))
        return out

    def _divide(self, spec: AttentionSpec, batch: PagedBatch) -> Iterator[Int64Array]:
        """Rows of the batch, bucket by bucket. Sequences without queries or keys are in none."""
        first = batch.kv_lens - batch.query_lens
        ranges = batch.key_ranges(spec, slice(None), first, batch.kv_lens - 1)
        num_keys = ranges.sinks + ranges.end - ranges.start
        rows = np.flatnonzero((batch.query_lens > 0) & (num_keys > 0))
        rows = rows[np.lexsort((num_keys[rows], batch.query_lens[rows]))[::-1]]
        max_keys = max(1, _BUCKET_BYTES.get(self.device.type, 2**22) // (4 * spec.kv_heads * spec.head_dim))
        while len(rows):
            longest, queries = int(num_keys[rows[0]]), batch.query_lens[rows[0]]
            count = 1
            if queries <= _PACKED_QUERIES:
                alike = (batch.query_lens[rows] == queries) & (num_keys[rows] >= _FILL * longest)
                count = min(int(alike.argmin()) or len(rows), max(1, max_keys // longest))
            yield rows[:count]
            rows = rows[count:]

    def _bucket(self, spec: AttentionSpec, batch: PagedBatch, rows: Int64Array) -> _Bucket:
        first = batch.kv_lens[rows] - batch.query_lens[rows]
        ranges = batch.key_ranges(spec, rows, first, batch.kv_lens[rows] - 1)
        num_keys = ranges.sinks + ranges.end - ranges.start
        # Padding repeats the last key of the sequence, so that what is computed and dropped is finite.
        key = np.minimum(np.arange(int(num_keys.max())), num_keys[:, None] - 1)
        listed = np.where(key < ranges.sinks[:, None], key, key - ranges.sinks[:, None] + ranges.start[:, None])
        blocks = batch.indices[batch.indptr[rows].astype(np.int64)[:, None] + listed // batch.block_size]
        sink_slots = spec.sink_slots(batch.block_size)
        positions = listed + batch.gaps[rows][:, None] * (listed >= sink_slots)
        num_queries = int(batch.query_lens[rows[0]])
        steps = np.arange(num_queries)
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        tokens = (starts[rows][:, None] + steps).ravel()
        queries = first[:, None] + steps
        padded = self._tensor(num_keys) if int(num_keys.min()) < key.shape[1] else None
        places = TokenPlaces(self._tensor(blocks.astype(np.int64)), self._tensor(listed % batch.block_size))
        return _Bucket(
            self._tensor(tokens),
            len(rows),
            num_queries,
            places,
            self._tensor(queries),
            self._tensor(positions),
            padded,
            list(_tiles(spec, queries[0], positions[0])) if len(rows) == 1 else [_whole(num_queries, key.shape[1])],
        )

    def _tensor(self, array: Int64Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _whole(num_queries: int, num_keys: int) -> _Tile:
    return _Tile(0, num_queries, 0, num_keys, triangular=False)


def _tiles(spec: AttentionSpec, queries: Int64Array, keys: Int64Array) -> Iterator[_Tile]:
    """Cuts the queries of one sequence so that a tile needs few keys that most of its queries do not see."""
    num_queries, num_keys = len(queries), len(keys)
    if not spec.causal:
        yield _whole(num_queries, num_keys)
        return
    size = _TILE_QUERIES
    if _materialises(spec):
        size = max(_PACKED_QUERIES, min(size, _TILE_SCORES // (spec.q_heads * num_keys)))
    for first in range(0, num_queries, size):
        last = min(first + size, num_queries)
        end = num_keys - (num_queries - last)
        lowest = 0 if spec.sink_tokens else int(np.searchsorted(keys, spec.first_visible(queries[first])))
        reaches_start = bool(spec.first_visible(queries[last - 1]) <= keys[lowest])
        yield _Tile(first, last, lowest, end, triangular=end - lowest == last - first and reaches_start)


def _mask(spec: AttentionSpec, bucket: _Bucket, tile: _Tile) -> Tensor | None:
    """[sequences, queries, keys]: who sees what; None where everybody sees everything, or the tile is triangular."""
    if tile.mask is not None:
        return tile.mask
    if tile.triangular or (bucket.num_keys is None and (bucket.num_queries == 1 or not spec.causal)):
        return None
    keys = bucket.key_positions[:, None, tile.start : tile.end]
    if bucket.num_queries == 1 or not spec.causal:
        mask = torch.ones_like(keys, dtype=torch.bool)  # a single query's keys were chosen for it
    else:
        mask = spec.visible(bucket.query_positions[:, tile.first : tile.last, None], keys)
    if bucket.num_keys is not None:
        index = torch.arange(tile.start, tile.end, device=keys.device)
        mask = mask & (index < bucket.num_keys[:, None, None])
    if mask.numel() <= _CACHED_MASK:
        tile.mask = mask
    return mask


def _materialises(spec: AttentionSpec) -> bool:
    """Whether scores must be computed in the open, because torch's fused attention has no such feature."""
    return spec.soft_cap is not None or spec.sink_logits


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    triangular: bool,
    spec: AttentionSpec,
    sink_logits: Tensor | None,
) -> Tensor:
    """[sequences, queries, query heads, v dim] for dense K and V [sequences, KV heads, keys, dim]."""
    if _materialises(spec):
        return _attend_openly(q, k, v, mask, triangular, spec, sink_logits)
    sequences, queries = q.shape[:2]
    grouped = q.view(sequences, queries, spec.kv_heads, spec.group_size, spec.head_dim)
    if sequences == 1 and queries > _PACKED_QUERIES:
        # One batch entry per KV head, one head per query head; K and V are repeated by a stride of 0, not by copying.
        expand = (spec.kv_heads, spec.group_size, k.shape[2], -1)
        dense = scaled_dot_product_attention(
            grouped[0].permute(1, 2, 0, 3),
            k[0, :, None].expand(*expand),
            v[0, :, None].expand(*expand),
            attn_mask=mask,
            is_causal=triangular,
            scale=spec.scale,
        )
        return dense.permute(2, 0, 1, 3).reshape(1, queries, spec.q_heads, spec.v_dim)
    packed = grouped.permute(0, 2, 1, 3, 4).reshape(sequences, spec.kv_heads, -1, spec.head_dim)
    if triangular:
        mask = torch.ones(1, queries, queries, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        mask = mask if queries == 1 else mask.repeat_interleave(spec.group_size, dim=1)
        mask = mask[:, None]
    dense = scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=spec.scale)
    return _unpack(dense, queries, spec)


def _attend_openly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    triangular: bool,
    spec: AttentionSpec,
    sink_logits: Tensor | None,
) -> Tensor:
    """The same with soft-capped scores and with sink logits, which only take part in the denominator."""
    sequences, queries = q.shape[:2]
    grouped = (q * spec.scale).view(sequences, queries, spec.kv_heads, spec.group_size, spec.head_dim)
    packed = grouped.permute(0, 2, 1, 3, 4).reshape(sequences, spec.kv_heads, -1, spec.head_dim)
    scores = torch.matmul(packed, k.transpose(-1, -2)).float()
    if spec.soft_cap is not None:
        scores.div_(spec.soft_cap).tanh_().mul_(spec.soft_cap)
    if triangular:
        mask = torch.ones(1, queries, queries, dtype=torch.bool, device=q.device).tril()
    split = scores.view(sequences, spec.kv_heads, queries, spec.group_size, -1)
    if mask is not None:
        split.masked_fill_(~mask[:, None, :, None], -torch.inf)
    highest = split.amax(-1, keepdim=True)
    if sink_logits is None:
        weights = split.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
    else:
        sinks = sink_logits.float().view(spec.kv_heads, 1, spec.group_size, 1)
        highest = torch.maximum(highest, sinks)
        weights = split.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True) + (sinks - highest).exp()
    dense = torch.matmul(weights.view(scores.shape).to(v.dtype), v)
    return _unpack(dense / total.flatten(2, 3).to(v.dtype), queries, spec)


def _unpack(dense: Tensor, queries: int, spec: AttentionSpec) -> Tensor:
    """[sequences, KV heads, queries × group, v dim] as [sequences, queries, query heads, v dim]."""
    split = dense.view(dense.shape[0], spec.kv_heads, queries, spec.group_size, spec.v_dim)
    return split.permute(0, 2, 1, 3, 4).reshape(dense.shape[0], queries, spec.q_heads, spec.v_dim)
