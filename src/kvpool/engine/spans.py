"""Steps in which some tokens see one another in both directions: the tokens of an image, or of a whole prompt.

A step computes such a span as a whole, so that all its keys are there. Its queries form a sequence of their own that ends
with the span, over the same blocks. Without a causal mask, they see each other and everything before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvpool.attention import AttentionBackend, AttentionPlan, AttentionSpec, PagedBatch
from kvpool.kernels.layout import LayerCache
from kvpool.pools.arrays import Int64Array
from kvpool.storage.moving import upload


class Span(NamedTuple):
    """Tokens `start..stop` of a row of the step, which see one another."""

    row: int
    start: int
    stop: int


class SpannedPlan(NamedTuple):
    """Attention of a step with spans, as a plan for these and one for all other tokens."""

    parts: list[tuple[Tensor, AttentionPlan]]  # the tokens of each plan

    @classmethod
    def of(
        cls, backend: AttentionBackend, spec: AttentionSpec, batch: PagedBatch, spans: Sequence[Span]
    ) -> SpannedPlan:
        """Plans attention by `spec`, which is causal, but for these spans."""
        ways = (spec, list(_around(batch, spans))), (replace(spec, causal=False), list(spans))
        parts = []
        for way, chosen in ways:
            if chosen:
                rows, tokens = _cut(batch, chosen)
                parts.append((upload(tokens, backend.device), backend.plan(way, rows)))
        return cls(parts)

    def run(self, q: Tensor, cache: LayerCache, sink_logits: Tensor | None) -> Tensor:
        """Attention of one layer: [tokens, query heads, v dim]."""
        spec = self.parts[0][1].spec
        out = q.new_empty(q.shape[0], spec.q_heads, spec.v_dim)
        for tokens, plan in self.parts:
            out[tokens] = plan.backend.run(q[tokens], cache, plan, sink_logits=sink_logits)
        return out


def _around(batch: PagedBatch, spans: Sequence[Span]) -> Iterator[Span]:
    """What is left of each row of the step before, between and behind its spans."""
    for row, (stop, length) in enumerate(zip(batch.kv_lens.tolist(), batch.query_lens.tolist(), strict=True)):
        start = stop - length
        for span in sorted(span for span in spans if span.row == row):
            if start < span.start:
                yield Span(row, start, span.start)
            start = span.stop
        if start < stop:
            yield Span(row, start, stop)


def _cut(batch: PagedBatch, spans: Sequence[Span]) -> tuple[PagedBatch, Int64Array]:
    """The spans as sequences that end with them, and the numbers of their tokens in the step."""
    rows, starts, stops = np.array(spans, np.int64).T
    lists = [batch.indices[batch.indptr[row] : batch.indptr[row + 1]] for row in rows.tolist()]
    cut = PagedBatch.build(
        np.cumsum([0, *map(len, lists)]),
        np.concatenate(lists),
        stops - starts,
        stops,
        block_size=batch.block_size,
        gaps=batch.gaps[rows],
    )
    shift = np.cumsum(batch.query_lens) - batch.kv_lens  # of a token's number in the step against its position
    numbers = [np.arange(start, stop) + shift[row] for row, start, stop in spans]
    return cut, np.concatenate(numbers)
