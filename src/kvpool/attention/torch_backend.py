"""The torch backend: used on CPUs, and the reference for other backends on any device.

Sequences with equally many queries and about equally many keys form a bucket: one index operation gathers their tokens, and
one call computes attention. A long chunk of a prompt is its own bucket. It is cut into tiles of queries, so that no tile
computes scores that the causal mask hides completely. On a CPU, blocks that decoding sequences share are read once for all
of them. The results are merged with the others by the logarithms of their softmax denominators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpool.attention.attention_batch import Int64Array, KeyRanges, PagedBatch, shared_prefixes
from kvpool.attention.backend import AttentionBackend, AttentionPlan, PlanBuffers
from kvpool.attention.dense import (
    PACKED_QUERIES,
    Scratch,
    TokenPlaces,
    WholeBlocks,
    attend,
    attend_with_sums,
    computing_dtype,
    gather_layer,
    materialises,
)
from kvpool.attention.torch_sparse import TorchSparsePlan
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache
from kvpool.kernels.sparse import Choice

_TILE_QUERIES = {"cpu": 64, "cuda": 512}
_TILE_SCORES = 2**22  # scores of one tile, if they are materialised
_BUCKET_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # of gathered K; on a CPU it should stay in the cache
_FILL = 0.75  # the shortest sequence of a bucket has at least this share of the longest
_CACHED_MASK = 2**22  # elements of the masks of a bucket
_SAVED_READS = 512  # tokens; if it saves so many reads, a shared prefix is read separately


@dataclass
class _Tile:
    """Queries [first, last) of a bucket and the keys [start, end) that at least one of them sees."""

    first: int
    last: int
    start: int
    end: int
    triangular: bool  # the tile has all keys up to its last query, and each query sees those up to itself
    mask: Tensor | None = None  # kept if it is small


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
    partial: bool  # the sequences have earlier keys, which are read separately


@dataclass
class _SharedKeys:
    """Keys that all given queries see, also queries of different sequences."""

    tokens: Tensor  # rows of the query tensor
    places: TokenPlaces  # of one sequence


class _TorchPlan(AttentionPlan):
    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        batch: PagedBatch,
        buckets: list[_Bucket],
        shared: list[_SharedKeys],
    ) -> None:
        super().__init__(backend, spec, batch.num_query_tokens, batch.block_size)
        self.buckets = buckets
        self.shared = shared
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
        if spec.chosen:
            return TorchSparsePlan(self, spec, batch)
        skipped = np.zeros(len(batch), np.int64)  # tokens of each sequence that are read as a shared prefix
        shared = list(self._shared(spec, batch, skipped))
        buckets = [self._bucket(spec, batch, rows, skipped) for rows in self._divide(spec, batch, skipped)]
        return _TorchPlan(self, spec, batch, buckets, shared)

    def attend(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, sink_logits: Tensor | None, out: Tensor
    ) -> None:
        """Computes every bucket in turn."""
        assert isinstance(plan, _TorchPlan)
        spec = plan.spec
        if not plan.complete:
            out.zero_()
        sums = q.new_empty(q.shape[0], spec.q_heads, dtype=torch.float32) if plan.shared else None
        compute = computing_dtype(q.dtype, q.device)
        for bucket in plan.buckets:
            k, v = gather_layer(cache, spec, bucket.places, compute, self._scratch)
            queries = q.index_select(0, bucket.tokens).to(compute)
            queries = queries.view(bucket.num_sequences, bucket.num_queries, *q.shape[1:])
            if bucket.partial:
                assert sums is not None
                result, part = attend_with_sums(queries, k, v, _mask(spec, bucket, bucket.tiles[0], compute), spec)
                sums.index_copy_(0, bucket.tokens, part)
            else:
                result = _attend_tiles(queries, k, v, spec, bucket, sink_logits)
            out.index_copy_(0, bucket.tokens, result.reshape(-1, *result.shape[2:]).to(q.dtype))
        for keys in plan.shared:
            assert sums is not None
            k, v = gather_layer(cache, spec, keys.places, compute, self._scratch)
            result, part = attend_with_sums(q.index_select(0, keys.tokens).to(compute)[None], k, v, None, spec)
            rest = out.index_select(0, keys.tokens).to(compute)
            share = torch.sigmoid(part - sums.index_select(0, keys.tokens)).to(compute)
            out.index_copy_(0, keys.tokens, torch.lerp(rest, result[0], share.unsqueeze(-1)).to(q.dtype))

    def attend_chosen(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        choice: Choice,
        sink_logits: Tensor | None,
        out: Tensor,
    ) -> None:
        """Chooses if need be, and computes every sequence in turn."""
        assert isinstance(plan, TorchSparsePlan)
        if plan.dense is not None:
            self.attend(q, cache, plan.dense, sink_logits, out)
            return
        if choice.chosen is None:
            choice.chosen = plan.choose(choice, cache)
        plan.attend(q, cache, choice.chosen, sink_logits, out, self._scratch)

    def _shared(self, spec: AttentionSpec, batch: PagedBatch, skipped: Int64Array) -> Iterator[_SharedKeys]:
        """Prefixes that several sequences with few queries share. Writes their lengths to `skipped`."""
        unbounded = spec.causal and spec.window is None and spec.chunk is None
        if self.device.type != "cpu" or not unbounded or materialises(spec) or spec.v_dim != spec.head_dim:
            return
        rows = np.flatnonzero((batch.query_lens > 0) & (batch.query_lens <= PACKED_QUERIES))
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        for prefix in shared_prefixes(batch, rows, _SAVED_READS):
            skipped[prefix.rows] = prefix.num_tokens
            queries = [np.arange(starts[row], starts[row] + batch.query_lens[row]) for row in prefix.rows]
            listed = np.arange(prefix.num_tokens)[None]
            places = self._places(batch, prefix.rows[:1], listed, np.array([prefix.num_tokens]), in_order=True)
            yield _SharedKeys(self._tensor(np.concatenate(queries)), places)

    def _divide(self, spec: AttentionSpec, batch: PagedBatch, skipped: Int64Array) -> Iterator[Int64Array]:
        """Rows of the batch, bucket by bucket, without sequences that have no queries or no keys."""
        ranges = _key_ranges(spec, batch, np.arange(len(batch)), skipped)
        num_keys = ranges.sinks + ranges.end - ranges.start
        rows = np.flatnonzero((batch.query_lens > 0) & (num_keys > 0))
        rows = rows[np.lexsort((num_keys[rows], skipped[rows] > 0, batch.query_lens[rows]))[::-1]]
        max_keys = max(1, _BUCKET_BYTES.get(self.device.type, 2**22) // (4 * spec.kv_heads * spec.head_dim))
        while len(rows):
            longest, queries = int(num_keys[rows[0]]), batch.query_lens[rows[0]]
            count = 1
            if queries <= PACKED_QUERIES:
                alike = (batch.query_lens[rows] == queries) & (num_keys[rows] >= _FILL * longest)
                alike &= (skipped[rows] > 0) == (skipped[rows[0]] > 0)
                count = min(int(alike.argmin()) or len(rows), max(1, max_keys // longest))
            yield rows[:count]
            rows = rows[count:]

    def _bucket(self, spec: AttentionSpec, batch: PagedBatch, rows: Int64Array, skipped: Int64Array) -> _Bucket:
        ranges = _key_ranges(spec, batch, rows, skipped)
        num_keys = ranges.sinks + ranges.end - ranges.start
        # Padding repeats the last key of the sequence, so that the dropped results are finite.
        key = np.minimum(np.arange(int(num_keys.max())), num_keys[:, None] - 1)
        listed = np.where(key < ranges.sinks[:, None], key, key - ranges.sinks[:, None] + ranges.start[:, None])
        sink_slots = spec.sink_slots(batch.block_size)
        positions = listed + batch.gaps[rows][:, None] * (listed >= sink_slots)
        num_queries = int(batch.query_lens[rows[0]])
        steps = np.arange(num_queries)
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        tokens = (starts[rows][:, None] + steps).ravel()
        queries = (batch.kv_lens[rows] - batch.query_lens[rows])[:, None] + steps
        padded = self._tensor(num_keys) if int(num_keys.min()) < key.shape[1] else None
        in_order = not (ranges.sinks.any() or (ranges.start % batch.block_size).any())
        size = _TILE_QUERIES.get(self.device.type, 512)
        partial = bool(skipped[rows[0]])
        whole = len(rows) > 1 or partial
        return _Bucket(
            self._tensor(tokens),
            len(rows),
            num_queries,
            self._places(batch, rows, listed, num_keys, in_order=in_order),
            self._tensor(queries),
            self._tensor(positions),
            padded,
            [_whole(num_queries, key.shape[1])] if whole else list(_tiles(spec, queries[0], positions[0], size)),
            partial,
        )

    def _places(
        self, batch: PagedBatch, rows: Int64Array, listed: Int64Array, num_keys: Int64Array, *, in_order: bool
    ) -> TokenPlaces:
        """The places of listed tokens [sequence, token]. If `in_order`, they are contiguous from the first of a block."""
        size = batch.block_size
        blocks = batch.indices[batch.indptr[rows].astype(np.int64)[:, None] + listed // size].astype(np.int64)
        whole = None
        if in_order:
            num_tokens = -(-listed.shape[1] // size) * size
            unread = np.flatnonzero(np.arange(num_tokens) >= num_keys[:, None])
            whole = WholeBlocks(self._tensor(blocks[:, ::size]), self._tensor(unread))
        return TokenPlaces(self._tensor(blocks), self._tensor(listed % size), whole)

    def _tensor(self, array: Int64Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _key_ranges(spec: AttentionSpec, batch: PagedBatch, rows: Int64Array, skipped: Int64Array) -> KeyRanges:
    """The ranges that the queries of sequences read, without the skipped tokens."""
    last = batch.kv_lens[rows] - 1
    ranges = batch.key_ranges(spec, rows, last + 1 - batch.query_lens[rows], last)
    return ranges._replace(start=np.maximum(ranges.start, skipped[rows]))


def _whole(num_queries: int, num_keys: int) -> _Tile:
    return _Tile(0, num_queries, 0, num_keys, triangular=False)


def _tiles(spec: AttentionSpec, queries: Int64Array, keys: Int64Array, size: int) -> Iterator[_Tile]:
    """Cuts the queries of one sequence into tiles, so that a tile has few keys that most of its queries do not see."""
    num_queries, num_keys = len(queries), len(keys)
    if not spec.causal:
        yield _whole(num_queries, num_keys)
        return
    if materialises(spec):
        size = max(PACKED_QUERIES, min(size, _TILE_SCORES // (spec.q_heads * num_keys)))
    for first in range(0, num_queries, size):
        last = min(first + size, num_queries)
        end = num_keys - (num_queries - last)
        lowest = 0 if spec.sink_tokens else int(np.searchsorted(keys, spec.first_visible(queries[first])))
        reaches_start = bool(spec.first_visible(queries[last - 1]) <= keys[lowest])
        yield _Tile(first, last, lowest, end, triangular=end - lowest == last - first and reaches_start)


def _mask(spec: AttentionSpec, bucket: _Bucket, tile: _Tile, dtype: torch.dtype) -> Tensor | None:
    """The mask [sequences, queries, keys]; None if all queries see all keys, or if the tile is triangular.

    It is boolean if scores are materialised. Otherwise torch's attention adds it to the scores: 0 or -inf, of type `dtype`.
    """
    if tile.mask is not None:
        return tile.mask
    if tile.triangular or (bucket.num_keys is None and (bucket.num_queries == 1 or spec.sees_all)):
        return None
    keys = bucket.key_positions[:, None, tile.start : tile.end]
    if bucket.num_queries == 1 or spec.sees_all:
        mask = torch.ones_like(keys, dtype=torch.bool)  # the keys were chosen for this single query
    else:
        mask = spec.visible(bucket.query_positions[:, tile.first : tile.last, None], keys)
    if bucket.num_keys is not None:
        index = torch.arange(tile.start, tile.end, device=keys.device)
        mask = mask & (index < bucket.num_keys[:, None, None])
    if not materialises(spec):
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    if mask.numel() * len(bucket.tiles) <= _CACHED_MASK:
        tile.mask = mask
    return mask


def _attend_tiles(
    queries: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    bucket: _Bucket,
    sink_logits: Tensor | None,
) -> Tensor:
    """[sequences, queries, query heads, v dim] of a bucket."""
    results = [
        attend(
            queries[:, tile.first : tile.last],
            k[:, :, tile.start : tile.end],
            v[:, :, tile.start : tile.end],
            _mask(spec, bucket, tile, queries.dtype),
            tile.triangular,
            spec,
            sink_logits,
        )
        for tile in bucket.tiles
    ]
    return results[0] if len(results) == 1 else torch.cat(results, dim=1)
