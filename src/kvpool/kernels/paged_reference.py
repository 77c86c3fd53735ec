"""Paged attention as its definition reads: one sequence and one head after another, in float64. Slow and plain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpool.kernels.layer_cache import LayerCache
from kvpool.kernels.paged_spec import AttentionSpec
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
) -> Tensor:
    """Float64 [tokens, query heads, v dim]. Sequence i has `blocks[i]`, of which `gaps[i]` positions after the sinks miss."""
    out = torch.zeros(q.shape[0], spec.q_heads, spec.v_dim, dtype=torch.float64, device=q.device)
    size, row = cache.block_size, 0
    sinks = -(-spec.sink_tokens // size) * size
    for block_list, num_queries, num_keys, gap in zip(blocks, query_lens, kv_lens, gaps, strict=True):
        listed = torch.arange(max(num_keys - gap, 0))
        positions = (listed + gap * (listed >= sinks)).to(q.device)
        ids = torch.tensor(block_list, dtype=torch.long)[listed // size].to(q.device)
        k, v = _values(cache, spec, ids, (listed % size).to(q.device))
        queries = torch.arange(num_keys - num_queries, num_keys, device=q.device)
        seen = spec.visible(queries[:, None], positions[None, :])
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


def _values(cache: LayerCache, spec: AttentionSpec, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    def worth(data: Tensor, scale: Tensor | None, zero: Tensor | None, dim: int, factor: float) -> Tensor:
        parts = [None if part is None else part[ids, offsets] for part in (scale, zero)]
        return dequantize(Quantized(data[ids, offsets], *parts), cache.dtype, dim, factor).double()

    k = worth(cache.k, cache.k_scale, cache.k_zero, spec.head_dim, cache.k_factor)
    if cache.v is None:
        return k, k[..., : spec.v_dim]
    return k, worth(cache.v, cache.v_scale, cache.v_zero, spec.v_dim, cache.v_factor)
