"""Attention over chosen tokens in torch: the torch backend's, and the reference of others on any device.

Queries of one sequence are scored and attend in tiles, so that no tensor of a tile is large. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.attention.attention_batch import PagedBatch
from kvpool.attention.backend import AttentionBackend, AttentionPlan
from kvpool.attention.dense import Scratch, TokenPlaces, attend, computing_dtype, gather_layer
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache
from kvpool.kernels.sparse import Choice, index_keys, scores_of

_TILE = 2**24  # elements of products with the indexer's keys, and of gathered K, of one tile


class _Row(NamedTuple):
    """The queries of one sequence: the last tokens of those in `slots`."""

    first: int  # row of the query tensor
    num_queries: int
    slots: Tensor  # of all its tokens

    def tiles(self, elements: int) -> Iterator[tuple[slice, Tensor]]:
        """Its queries as rows of the query tensor, with their positions; a query takes so many elements of memory."""
        size, before = max(1, _TILE // elements), len(self.slots) - self.num_queries
        for start in range(0, self.num_queries, size):
            stop = min(start + size, self.num_queries)
            yield (
                slice(self.first + start, self.first + stop),
                torch.arange(before + start, before + stop, device=self.slots.device),
            )


class TorchSparsePlan(AttentionPlan):
    """Where the tokens of each sequence lie; `dense` is set where every query sees all tokens, chosen or not."""

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, batch: PagedBatch) -> None:
        super().__init__(backend, spec, batch.num_query_tokens, batch.block_size)
        self.dense = None
        self.rows: list[_Row] = []
        if int(batch.kv_lens.max(initial=0)) <= spec.chosen:
            self.dense = backend.plan(replace(spec, chosen=0), batch)
            return
        size, firsts = batch.block_size, np.cumsum(batch.query_lens) - batch.query_lens
        for row in np.flatnonzero((batch.query_lens > 0) & (batch.kv_lens > 0)).tolist():
            listed = np.arange(batch.kv_lens[row])
            blocks = batch.indices[batch.indptr[row] + listed // size].astype(np.int64)
            slots = torch.from_numpy(blocks * size + listed % size).to(backend.device)
            self.rows.append(_Row(int(firsts[row]), int(batch.query_lens[row]), slots))

    def choose(self, choice: Choice, cache: LayerCache) -> Tensor:
        """The positions of the best tokens [token, number], as `Choice.chosen`."""
        chosen = choice.q.new_zeros((len(choice.q), choice.most), dtype=torch.int32)
        for row in self.rows:
            keys = index_keys(cache, row.slots)
            most = min(choice.most, len(keys))
            listed = torch.arange(len(keys), device=keys.device)
            for tokens, positions in row.tiles(choice.q.shape[1] * len(keys)):
                scores = scores_of(choice.q[tokens], choice.weights[tokens], keys)
                scores.masked_fill_(listed > positions.unsqueeze(1), -torch.inf)
                chosen[tokens, :most] = scores.topk(most).indices.int()
        return chosen

    def attend(
        self, q: Tensor, cache: LayerCache, chosen: Tensor, sink_logits: Tensor | None, out: Tensor, scratch: Scratch
    ) -> None:
        """Computes every sequence in turn."""
        spec, compute = self.spec, computing_dtype(q.dtype, q.device)
        if sum(row.num_queries for row in self.rows) < self.num_query_tokens:
            out.zero_()
        number = torch.arange(chosen.shape[1], device=q.device)
        for row in self.rows:
            for tokens, positions in row.tiles(chosen.shape[1] * spec.kv_heads * spec.head_dim):
                positions = positions.unsqueeze(1)
                seen = number <= positions  # the best come first, and what a query does not see comes last
                slots = row.slots[torch.where(seen, chosen[tokens], 0).long()]
                places = TokenPlaces(slots // self.block_size, slots % self.block_size)
                k, v = gather_layer(cache, spec, places, compute, scratch)
                result = attend(q[tokens].unsqueeze(1).to(compute), k, v, seen.unsqueeze(1), False, spec, sink_logits)
                out[tokens] = result.squeeze(1).to(q.dtype)
