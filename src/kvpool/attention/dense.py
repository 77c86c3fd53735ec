"""Attention over dense K and V in torch: one call for all sequences of a bucket.

K and V are gathered from their blocks first, at the speed of a plain copy if the layout allows. Attention is computed in the
type of the queries, or in float32 if a CPU multiplies the narrow type slowly.
"""

from __future__ import annotations

import threading
import time
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache
from kvpool.kernels.quantization import Quantized, dequantize

PACKED_QUERIES = 16  # with up to so many queries per sequence, the heads of a group share one pass over K


def materialises(spec: AttentionSpec) -> bool:
    """Whether scores must be materialised, because torch's fused attention lacks a feature."""
    return spec.soft_cap is not None or spec.sink_logits


def attend_with_sums(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """The result of `attend` on a CPU, and the logarithms of its softmax denominators: [queries, query heads]."""
    sequences, queries = q.shape[:2]
    dense, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _packed(q, spec), k, v, attn_mask=_packed_mask(mask, spec), scale=spec.scale
    )
    split = sums.reshape(sequences, spec.kv_heads, queries, spec.group_size)
    return _unpack(dense, queries, spec), split.transpose(1, 2).reshape(-1, spec.q_heads).float()


def _packed(q: Tensor, spec: AttentionSpec) -> Tensor:
    """[sequences, KV heads, queries × group, head dim]: the heads of a group share one pass over K."""
    sequences, queries = q.shape[:2]
    grouped = q.view(sequences, queries, spec.kv_heads, spec.group_size, spec.head_dim)
    return grouped.permute(0, 2, 1, 3, 4).reshape(sequences, spec.kv_heads, -1, spec.head_dim)


def _packed_mask(mask: Tensor | None, spec: AttentionSpec) -> Tensor | None:
    if mask is None:
        return None
    return (mask if mask.shape[1] == 1 else mask.repeat_interleave(spec.group_size, dim=1))[:, None]


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
    dense = scaled_dot_product_attention(_packed(q, spec), k, v, attn_mask=_packed_mask(mask, spec), scale=spec.scale)
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
    """The same with soft-capped scores, and with sink logits, which only count in the denominator."""
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


def computing_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which K, V and queries of type `dtype` are computed. Results are rounded to `dtype` in any case."""
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    return torch.float32 if _seconds(dtype) > _seconds(torch.float32) else dtype


@cache
def _seconds(dtype: torch.dtype) -> float:
    """The seconds of a small attention, measured once per process. Without bfloat16 instructions it is 100 times slower."""
    q, k = (torch.ones(1, 2, rows, 64, dtype=dtype) for rows in (16, 256))

    def once() -> float:
        start = time.thread_time()
        _attend(q, k)
        return time.thread_time() - start

    _attend(q, k)
    return min(once() for _ in range(5))


@torch.inference_mode()
def _attend(q: Tensor, k: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, k)


class Scratch(threading.local):
    """Memory for gathered tokens. On a CPU it is kept between calls, because new pages cost more than the copy itself.

    What was gathered under a name is valid until the same thread gathers under that name again.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def rows(self, name: str, num_rows: int, like: Tensor) -> Tensor | None:
        """A tensor [rows, elements] to write to; None on a GPU, whose allocator keeps memory by itself."""
        if like.device.type != "cpu":
            return None
        num_bytes = num_rows * like.shape[-1] * like.element_size()
        memory = self._memory.get(name)
        if memory is None or len(memory) < num_bytes:
            self._memory[name] = memory = torch.empty(num_bytes, dtype=torch.uint8)
        return memory[:num_bytes].view(like.dtype).view(num_rows, -1)


class WholeBlocks(NamedTuple):
    """Tokens that fill whole blocks, from the first one on."""

    ids: Tensor  # [sequences, blocks]
    unread: Tensor  # indices of tokens of these blocks that must not be read


class TokenPlaces:
    """Where the tokens of some sequences lie: block and token in block, both [sequences, tokens]."""

    def __init__(self, blocks: Tensor, offsets: Tensor, whole: WholeBlocks | None = None) -> None:
        self.blocks = blocks
        self.offsets = offsets
        self.whole = whole
        self._rows: dict[tuple[int, ...], Tensor] = {}  # by layout; all layers of a group have the same layout

    def gather(self, stored: Tensor, scratch: Scratch, name: str) -> Tensor:
        """[sequences, heads, tokens, ...] of a stored tensor [block, token in block, head, ...]."""
        if stored.dim() == 4 and self.whole is not None and _is_run(stored):
            return self._gather_blocks(stored, self.whole, scratch, name)
        if stored.dim() == 4 and all(stride % stored.shape[3] == 0 for stride in stored.stride()[:3]):
            return self._gather_rows(stored, scratch, name)
        heads = torch.arange(stored.shape[2], device=stored.device)
        return stored[self.blocks[:, None], self.offsets[:, None], heads[None, :, None]]

    def _gather_blocks(self, stored: Tensor, whole: WholeBlocks, scratch: Scratch, name: str) -> Tensor:
        """One memcpy per block, which takes a third of the time of one per head and token. Unread tokens become 0."""
        size = stored[0].numel()
        step = stored.stride(0) // size
        if (rows := self._rows.get((size, step))) is None:
            rows = self._rows[size, step] = whole.ids.flatten() * step
        data = stored.view(torch.uint8) if stored.element_size() == 1 else stored
        source = data.as_strided(((stored.shape[0] - 1) * step + 1, size), (size, 1))
        picked = torch.index_select(source, 0, rows, out=scratch.rows(name, len(rows), source))
        picked.view(-1, size // stored.shape[1]).index_fill_(0, whole.unread, 0)
        tokens = picked.view(stored.dtype).view(len(whole.ids), -1, *stored.shape[2:])
        return tokens[:, : self.blocks.shape[1]].transpose(1, 2)

    def _gather_rows(self, stored: Tensor, scratch: Scratch, name: str) -> Tensor:
        """Views the memory as rows of one head each, and picks rows: one memcpy per row."""
        heads, dim = stored.shape[2:]
        per_block, per_token, per_head = (stride // dim for stride in stored.stride()[:3])
        key = (heads, per_block, per_token, per_head)
        if (rows := self._rows.get(key)) is None:
            first_head = (self.blocks * per_block + self.offsets * per_token)[:, None]
            rows = first_head + torch.arange(heads, device=stored.device)[:, None] * per_head
            self._rows[key] = rows
        last = [(size - 1) * step for size, step in zip(stored.shape, (per_block, per_token, per_head), strict=False)]
        data = stored.view(torch.uint8) if stored.element_size() == 1 else stored  # fp8 has no index_select
        source = data.as_strided((sum(last) + 1, dim), (dim, 1))
        out = scratch.rows(name, rows.numel(), source)
        picked = torch.index_select(source, 0, rows.flatten(), out=out)
        return picked.view(stored.dtype).view(*rows.shape, dim)


def _is_run(stored: Tensor) -> bool:
    """Whether the tokens of a block are contiguous, and the distance of blocks is a multiple of a block."""
    return stored[0].is_contiguous() and stored.stride(0) % stored[0].numel() == 0


def gather_layer(
    cache: LayerCache, spec: AttentionSpec, places: TokenPlaces, dtype: torch.dtype, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """K and V of the given tokens, dequantised: [sequences, heads, tokens, dim] of type `dtype`."""

    def worth(name: str) -> Tensor:
        part = cache[name]
        scale, zero = (
            None if tensor is None else places.gather(tensor, scratch, name) for tensor in (part.scale, part.zero)
        )
        stored = Quantized(places.gather(part.data, scratch, name), scale, zero)
        return dequantize(stored, part.dtype, part.width, part.factor).to(dtype)

    k = worth(spec.keys)
    return k, k[..., : spec.v_dim] if spec.shares_part else worth(spec.values)
