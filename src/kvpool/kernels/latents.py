"""Attention over latents on Hopper: launches the kernel, and says what it can do."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpool.config.layers import DType, ceil_div
from kvpool.kernels.attention import LOG2_E, Partials, TileShape
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache
from kvpool.kernels.prefill import boxes

LATENT_TILE = TileShape(64, 32, warps=4, stages=4, programs=1)
_LATENT, _ROTARY = 512, 64


def attends_latents(spec: AttentionSpec) -> bool:
    """Whether it computes this kind of attention: over latents of 512 numbers with 64 behind them, in 16-bit floats."""
    plain = spec.window is None and spec.chunk is None and spec.soft_cap is None and not spec.chosen
    plain = plain and spec.shares_part and not spec.sink_logits and spec.scale > 0 and spec.kv_heads == 1
    floats = spec.dtype in (DType.BFLOAT16, DType.FLOAT16) and spec.kv_dtype is spec.dtype
    even = spec.q_heads & (spec.q_heads - 1) == 0
    return plain and floats and even and (spec.v_dim, spec.head_dim) == (_LATENT, _LATENT + _ROTARY)


def latent_items(
    q: Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    indices: Tensor,
    items: Tensor,
    tile_tokens: int,
    shape: TileShape,
    out: Tensor,
    partials: Partials | None,
) -> None:
    """Computes work items as `attend_items` does."""
    from kvpool.kernels.latents_gluon import COLUMNS, ROWS, latent_kernel

    if not len(items):
        return
    keys = cache[spec.keys]
    heads, box = min(spec.q_heads, ROWS.value), min(cache.block_size, shape.keys)
    latent_kernel[(len(items) * ceil_div(spec.q_heads, heads),)](
        boxes(q, [ROWS.value // heads, heads, COLUMNS.value]),
        boxes(keys.data, [1, box, 1, COLUMNS.value]),
        out,
        items.view(torch.float32) if partials is None else partials.values,
        items.view(torch.float32) if partials is None else partials.weights,
        indices,
        items,
        *out.stride()[:2],
        spec.scale * keys.factor * LOG2_E,
        keys.factor,
        GROUP=spec.q_heads,
        HEADS=heads,
        TILE_TOKENS=tile_tokens,
        LATENT=spec.v_dim,
        ROTARY=spec.head_dim - spec.v_dim,
        PAGE=cache.block_size,
        BOX=box,
        KEYS=shape.keys,
        STAGES=shape.stages,
        CAUSAL=spec.causal,
        num_warps=shape.warps,
    )
