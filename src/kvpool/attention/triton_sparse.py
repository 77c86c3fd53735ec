"""Attention over chosen tokens for GPUs: an indexer's scores, the best of them, and a list of slots for each query.

The kernel of attention reads that list as it reads lists of blocks: each query is a sequence of its own. What a step says of
its tokens lies in fixed memory where a graph is to read it. Nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.attention.attention_batch import Int32Array, PagedBatch
from kvpool.attention.backend import AttentionBackend, AttentionPlan, PlanBuffers
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache
from kvpool.kernels.sparse import Choice, chosen_slots, score
from kvpool.pools.arrays import within

_TILE = 2**24  # scores that are there at once


class Tokens(NamedTuple):
    """What a step says of its tokens, int32: where their block lists begin in `indices`, and their positions, or -1."""

    starts: Tensor
    positions: Tensor
    indices: Tensor


def token_arrays(batch: PagedBatch) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The same of a batch, on the host."""
    before = np.repeat(batch.kv_lens - batch.query_lens, batch.query_lens) + within(batch.query_lens)
    positions = np.where(np.repeat(batch.kv_lens, batch.query_lens) > 0, before, -1)
    starts = np.repeat(batch.indptr[:-1], batch.query_lens)
    return starts.astype(np.int32), positions.astype(np.int32), batch.indices[: int(batch.indptr[-1])]


def listed_batch(positions: Int32Array, width: int) -> PagedBatch:
    """Each query as a sequence that reads the first of its `width` listed slots; the lists are made on the device."""
    count = len(positions)
    ones, lengths = np.ones(count, np.int64), np.minimum(positions + 1, width).astype(np.int64)
    indptr = np.arange(count + 1, dtype=np.int32) * width
    return PagedBatch(indptr, np.zeros(0, np.int32), ones, lengths, np.zeros(count, np.int64), 1)


class SparseBuffers(PlanBuffers):
    """Fixed memory for what steps say of their tokens, and that of the plans over chosen slots."""

    def __init__(
        self,
        spec: AttentionSpec,
        listed: PlanBuffers,
        max_sequences: int,
        max_query_tokens: int,
        max_blocks: int,
        max_keys: int,
        device: torch.device,
    ) -> None:
        super().__init__(spec, max_sequences, max_query_tokens, max_blocks, max_keys)
        self.listed = listed
        sizes = [max_query_tokens, max_query_tokens, max_blocks]
        self.memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.tokens = Tokens(*torch.split(self.memory, sizes))

    def fill(self, host: Tensor, arrays: tuple[Int32Array, ...]) -> None:
        """Writes what a step says of its tokens to `host`, which goes to the front of the memory. Other rows see nothing."""
        target, at = host.numpy(), 0
        for array, room, rest in zip(arrays, map(len, self.tokens), (0, -1, 0), strict=True):
            target[at : at + len(array)] = array
            target[at + len(array) : at + room] = rest
            at += room


class SparsePlan(AttentionPlan):
    """A step whose queries see chosen tokens; `dense` is set where all of them see all tokens, chosen or not."""

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        num_query_tokens: int,
        block_size: int,
        *,
        dense: AttentionPlan | None = None,
        listed: AttentionPlan | None = None,
        tokens: Tokens | None = None,
        num_keys: int = 0,
    ) -> None:
        super().__init__(backend, spec, num_query_tokens, block_size)
        self.dense = dense
        self.listed = listed
        self._tokens = tokens
        self._num_keys = num_keys  # of the longest sequence

    def choose(self, choice: Choice, cache: LayerCache) -> Tensor:
        """The positions of the best tokens [token, number], as `Choice.chosen`."""
        assert self._tokens is not None
        starts, positions, indices = self._tokens
        width = min(self.spec.chosen, self._num_keys)
        count = len(choice.q)
        chosen = torch.empty(count, width, dtype=torch.int32, device=choice.q.device)
        size = min(count, max(1, _TILE // self._num_keys))
        scores = torch.empty(size, self._num_keys, dtype=torch.float32, device=choice.q.device)
        for first in range(0, count, size):
            rows = slice(first, min(first + size, count))
            some, room = choice.rows(rows), scores[: rows.stop - first]
            score(some, cache, starts[rows], positions[rows], indices, room)
            chosen[rows] = room.topk(width).indices
        return chosen

    def slots(self, chosen: Tensor) -> Tensor:
        """Where the chosen tokens of all queries lie, one query after another."""
        assert self._tokens is not None
        starts, positions, indices = self._tokens
        return chosen_slots(chosen, starts[: len(chosen)], positions[: len(chosen)], indices, self.block_size).flatten()
