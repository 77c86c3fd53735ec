"""Paged attention as its definition reads, in float64, and the references of the kernels. Slow and plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache, StoredPart
from kvpool.kernels.quantization import Quantized, dequantize


def reference_attention(
    q: Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    blocks: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    gaps: Sequence[int],
    sink_logits: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Float64 [tokens, query heads, v dim]. Sequence i has `blocks[i]`, of which `gaps[i]` positions after the sinks miss.

    `chosen` are the positions that queries see, [tokens, number]; by default all that the spec says.
    """
    out = torch.zeros(q.shape[0], spec.q_heads, spec.v_dim, dtype=torch.float64, device=q.device)
    size, row = cache.block_size, 0
    sinks = spec.sink_slots(size)
    for block_list, num_queries, num_keys, gap in zip(blocks, query_lens, kv_lens, gaps, strict=True):
        listed = torch.arange(max(num_keys - gap, 0))
        positions = (listed + gap * (listed >= sinks)).to(q.device)
        ids = torch.tensor(block_list, dtype=torch.long)[listed // size].to(q.device)
        k, v = _values(cache, spec, ids, (listed % size).to(q.device))
        queries = torch.arange(num_keys - num_queries, num_keys, device=q.device)
        seen = spec.visible(queries[:, None], positions[None, :])
        if chosen is not None:
            picked = chosen[row : row + num_queries]
            seen &= (positions[None, :, None] == picked[:, None, :]).any(-1)
        for head in range(spec.q_heads):
            rows = q[row : row + num_queries, head].double()
            scores = rows @ k[:, head // spec.group_size].T * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sink_logits is not None:
                extra = sink_logits[head].double().expand(num_queries, 1)
                scores = torch.cat((scores, extra), dim=1)
            weights = torch.softmax(scores, dim=1).nan_to_num(0.0)[:, : len(listed)]  # a row that sees nothing is 0/0
            hidden = ~seen.any(0)
            out[row : row + num_queries, head] = weights @ v[:, head // spec.group_size].masked_fill(
                hidden[:, None], 0.0
            )
        row += num_queries
    return out


def attend_items_reference(
    q: Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    indices: Tensor,
    items: Tensor,
    tile_tokens: int,
    shape: Any,
    out: Tensor,
    partials: tuple[Tensor, Tensor] | None,
    sink_logits: Tensor | None,
) -> None:
    """What `attend_items` computes, one work item after another. `tile_tokens` and `shape` change nothing here."""
    size = cache.block_size
    sinks = spec.sink_slots(size)
    for token, count, position, table, gap, first, last, slot in items.tolist():
        listed = torch.arange(first, last, device=q.device)
        k, v = _values(cache, spec, indices[table + listed // size].long(), listed % size)
        queries = position + torch.arange(count, device=q.device)
        positions = listed + gap * (listed >= sinks)
        seen = spec.visible(queries[:, None], positions[None, :])
        rows = q[token : token + count].double().view(count, spec.kv_heads, spec.group_size, -1)
        scores = torch.einsum("thgd,khd->thgk", rows, k) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf).flatten(1, 2)
        weight = scores.logsumexp(-1)
        if sink_logits is not None and slot < 0:
            weight = torch.logaddexp(weight, sink_logits.double())
        shares = (scores - weight[..., None]).exp().nan_to_num(0.0).view(count, spec.kv_heads, spec.group_size, -1)
        values = torch.einsum("thgk,khd->thgd", shares, v).flatten(1, 2)
        if slot < 0:
            out[token : token + count] = values.to(out.dtype)
        else:
            assert partials is not None
            partials[0][slot, :, :count] = values.transpose(0, 1).float()
            partials[1][slot, :, :count] = (weight / math.log(2.0)).T.float()


def merge_partials_reference(
    spec: AttentionSpec,
    tiles: Tensor,
    tile_tokens: int,
    out: Tensor,
    partials: tuple[Tensor, Tensor],
    sink_logits: Tensor | None,
) -> None:
    """What `merge_partials` computes, one tile after another. `tile_tokens` changes nothing here."""
    for token, count, first, parts in tiles.tolist():
        if parts == 0:
            continue
        values = partials[0][first : first + parts, :, :count].double()
        weights = partials[1][first : first + parts, :, :count].double() * math.log(2.0)
        total = weights.logsumexp(0)
        if sink_logits is not None:
            total = torch.logaddexp(total, sink_logits.double()[:, None])
        shares = (weights - total).exp().nan_to_num(0.0)
        out[token : token + count] = (values * shares[..., None]).sum(0).transpose(0, 1).to(out.dtype)


def _values(cache: LayerCache, spec: AttentionSpec, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    def worth(part: StoredPart) -> Tensor:
        data, scale, zero = (
            None if tensor is None else tensor[ids, offsets] for tensor in (part.data, part.scale, part.zero)
        )
        assert data is not None
        return dequantize(Quantized(data, scale, zero), part.dtype, part.width, part.factor).double()

    return worth(cache[spec.keys]), worth(cache[spec.values])[..., : spec.v_dim]
