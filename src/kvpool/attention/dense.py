"""Attention over dense K and V in torch: one call for all sequences of a bucket, whose queries share one pass over K."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpool.kernels.attention_spec import AttentionSpec

PACKED_QUERIES = 16  # up to so many queries a sequence, the heads of a group share one pass over K


def materialises(spec: AttentionSpec) -> bool:
    """Whether scores must be computed in the open, because torch's fused attention has no such feature."""
    return spec.soft_cap is not None or spec.sink_logits


def attend_with_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """What `attend` gives, on a CPU, and the logarithms of the sums that it was divided by: [queries, query heads]."""
    sequences, queries = q.shape[:2]
    dense, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _packed(q, spec), k, v, attn_mask=_packed_mask(mask, queries, spec), scale=spec.scale
    )
    split = sums.reshape(sequences, spec.kv_heads, queries, spec.group_size)
    return _unpack(dense, queries, spec), split.transpose(1, 2).reshape(-1, spec.q_heads).float()


def _packed(q: Tensor, spec: AttentionSpec) -> Tensor:
    """[sequences, KV heads, queries × group, head dim]: the heads of a group share one pass over K."""
    sequences, queries = q.shape[:2]
    grouped = q.view(sequences, queries, spec.kv_heads, spec.group_size, spec.head_dim)
    return grouped.permute(0, 2, 1, 3, 4).reshape(sequences, spec.kv_heads, -1, spec.head_dim)


def _packed_mask(mask: Tensor | None, queries: int, spec: AttentionSpec) -> Tensor | None:
    if mask is None:
        return None
    return (mask if queries == 1 else mask.repeat_interleave(spec.group_size, dim=1))[:, None]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    triangular: bool,
    spec: AttentionSpec,
    sink_logits: Tensor | None,
) -> Tensor:
    """[sequences, queries, query heads, v dim] for dense K and V [sequences, KV heads, keys, dim]."""
    if materialises(spec):
        return _attend_openly(q, k, v, mask, triangular, spec, sink_logits)
    sequences, queries = q.shape[:2]
    if sequences == 1 and queries > PACKED_QUERIES:
        grouped = q.view(sequences, queries, spec.kv_heads, spec.group_size, spec.head_dim)
        # One batch entry per KV head, one head per query head; K and V are repeated by a stride of 0, not by copying.
        expand = (spec.kv_heads, spec.group_size, k.shape[2], -1)
        dense = scaled_dot_product_attention(
            grouped[0].permute(1, 2, 0, 3),
            k[0, :, None].expand(*expand),
            v[0, :, None].expand(*expand),
            attn_mask=None if mask is None else mask[0],  # torch's fused attention takes 2 or 4 dimensions
            is_causal=triangular,
            scale=spec.scale,
        )
        return dense.permute(2, 0, 1, 3).reshape(1, queries, spec.q_heads, spec.v_dim)
    if triangular:
        mask = torch.ones(1, queries, queries, dtype=torch.bool, device=q.device).tril()
    dense = scaled_dot_product_attention(
        _packed(q, spec), k, v, attn_mask=_packed_mask(mask, queries, spec), scale=spec.scale
    )
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
    scores = torch.matmul(_packed(q * spec.scale, spec), k.transpose(-1, -2)).float()
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
