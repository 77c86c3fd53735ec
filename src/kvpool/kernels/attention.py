"""Paged attention for GPUs: tiles of queries over ranges of keys, and the merging of what several ranges gave.

One kernel serves decode and prefill. A work item is a tile of queries of one sequence (all query heads of a KV head
times a few tokens, so that K and V are read once for the whole group) and a range of its keys. A tile whose keys are
divided between several items (split-K) leaves partial results, which the second kernel merges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from kvpool.config.layers import DType, ceil_div
from kvpool.errors import InvalidArgumentError
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.attention_triton import attend_kernel, merge_kernel
from kvpool.kernels.layout import LayerCache, StoredPart

LOG2_E = 1.4426950408889634

# Fields of a work item, int32: the first query row, the number of queries (0: nothing to do), the position of the first
# query, where the sequence's block list begins, positions missing from it, the range of listed keys, and the partial
# result to write (-1: the range is everything, write the output).
ITEM_FIELDS = 8
# Fields of a tile: the first query row, the number of queries, the first of its partial results, how many there are.
TILE_FIELDS = 4
# Few merges get many warps a head, to have the parts of a long context read at once. Of many, most have nothing to merge,
# and ending a program early costs as much for one head as for four: these get four heads, with a warp each.
FEW_MERGES = 1024  # heads, over all tiles
KINDS = {DType.FP8_E4M3: "e4m3", DType.FP8_E5M2: "e5m2", DType.INT8: "int8", DType.INT4: "int4"}  # as kernels name them


class TileShape(NamedTuple):
    """How a kernel is cut: rows of queries (heads × tokens) times keys, and the warps and pipeline stages to do it."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int  # that run on one multiprocessor at once


class Partials(NamedTuple):
    """Results over parts of the keys, float32 [slot, query head, token of the tile]: values, and log2 of the sum of exp2."""

    values: Tensor
    weights: Tensor


def attend_items(
    q: Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    indices: Tensor,
    items: Tensor,
    tile_tokens: int,
    shape: TileShape,
    out: Tensor,
    partials: Partials | None,
    sink_logits: Tensor | None,
) -> None:
    """Computes every work item (int32 [items, 8]) into `out` or `partials`. `indices` are the block lists of the batch.

    Where queries see chosen tokens (`spec.chosen`), they are lists of slots, and an item has one query.
    """
    heads = max(1, min(spec.group_size, shape.rows // tile_tokens))
    programs = len(items) * spec.kv_heads * ceil_div(spec.group_size, heads)
    if programs == 0:
        return
    nothing = q  # stands in for a pointer that is not used
    keys, values = cache[spec.keys], cache[spec.values]
    (k_stored, k_parts, k), (v_stored, v_parts, v) = _words(keys, values)
    k_scale = nothing if keys.scale is None else keys.scale
    v_scale, v_zero = scales_of(values, nothing)
    no_partials = items.view(torch.float32)  # of the right type, so that one variant of the kernel does for both cases
    score_scale = spec.scale * keys.factor
    softmax_scale = abs(score_scale) if spec.soft_cap is None else spec.soft_cap
    # Of a latent, which is key and value, what is behind the value; it begins with a word
    tail = spec.head_dim - spec.v_dim if spec.shares_part and spec.v_dim % k_parts == 0 else 0
    attend_kernel[(programs,)](
        q,
        k,
        v,
        k_scale,
        v_scale,
        v_zero,
        out,
        no_partials if partials is None else partials.values,
        no_partials if partials is None else partials.weights,
        nothing if sink_logits is None else sink_logits,
        indices,
        items,
        *q.stride()[:2],
        *out.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        *k_scale.stride()[:3],
        *v_scale.stride()[:3],
        score_scale,
        spec.soft_cap or 0.0,
        softmax_scale * LOG2_E,
        values.factor,
        KV_HEADS=spec.kv_heads,
        GROUP=spec.group_size,
        HEADS=heads,
        TILE_TOKENS=tile_tokens,
        HEAD_DIM=spec.head_dim,
        V_DIM=spec.v_dim,
        BLOCK_D=_block(spec.head_dim - tail),
        BLOCK_V=_block(spec.v_dim),
        TAIL=tail,
        BLOCK_T=_block(tail),
        PAGE=cache.block_size,
        SLOTS=spec.chosen > 0,
        ROWS=shape.rows,
        KEYS=shape.keys,
        CAUSAL=spec.causal,
        ALIGNED=spec.window is None and spec.chunk is None and not spec.chosen and shape.keys % cache.block_size == 0,
        WINDOW=spec.window or 0,
        SINK_TOKENS=spec.sink_tokens,
        SINK_SLOTS=spec.sink_slots(cache.block_size),
        CHUNK=spec.chunk or 0,
        SOFT_CAP=spec.soft_cap is not None,
        NEGATED=spec.soft_cap is None and score_scale < 0,
        SINK_LOGITS=sink_logits is not None,
        K_STORED=k_stored,
        V_STORED=v_stored,
        K_PARTS=k_parts,
        V_PARTS=v_parts,
        K_ONLY=spec.shares_part,
        PRECISION="ieee",
        ASSEMBLER=not use_interpreter(),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def merge_partials(
    spec: AttentionSpec, tiles: Tensor, tile_tokens: int, out: Tensor, partials: Partials, sink_logits: Tensor | None
) -> None:
    """Writes the output of every tile (int32 [tiles, 4]) that has partial results."""
    few = len(tiles) * tile_tokens * spec.q_heads <= FEW_MERGES
    heads = 1 if few else min(4, 1 << (spec.q_heads - 1).bit_length())
    programs = len(tiles) * tile_tokens * ceil_div(spec.q_heads, heads)
    if programs == 0:
        return
    merge_kernel[(programs,)](
        out,
        partials.values,
        partials.weights,
        out if sink_logits is None else sink_logits,
        tiles,
        *out.stride()[:2],
        Q_HEADS=spec.q_heads,
        HEADS=heads,
        TILE_TOKENS=tile_tokens,
        V_DIM=spec.v_dim,
        BLOCK_V=_block(spec.v_dim),
        PARTS=16 if few else 8,
        SINK_LOGITS=sink_logits is not None,
        num_warps=4 if few else heads,
    )


class _Words(NamedTuple):
    """Stored K or V as a kernel reads it: words of 16 bits, or of 8 where those do not fit; floats are words of one part."""

    kind: str
    parts: int  # elements of a word
    data: Tensor


def _words(keys: StoredPart, values: StoredPart) -> tuple[_Words, _Words]:
    """K and V, which may be the same."""
    if values.dtype not in KINDS:
        return _Words("float", 1, keys.data), _Words("float", 1, values.data)
    sides = [(part.data, part.dtype) for part in (keys, values)]
    sizes = [size for data, _ in sides for size in (data.shape[-1], data.storage_offset(), *data.stride()[:3])]
    word = torch.uint8 if any(size % 2 for size in sizes) else torch.int16
    k, v = (_Words(KINDS[dtype], 8 * word.itemsize // dtype.bits, data.view(word)) for data, dtype in sides)
    return k, v


def scales_of(part: StoredPart, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zeros to point at; one set of strides serves both."""
    scale, zero = part.scale, part.zero
    if scale is None:
        return unused, unused
    if zero is not None and zero.stride() != scale.stride():
        raise InvalidArgumentError(
            f"scales and zeros must have equal strides, got {scale.stride()} and {zero.stride()}"
        )
    return scale, scale if zero is None else zero


def _block(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def use_interpreter() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    runs: Any = triton.knobs.runtime.interpret
    return bool(runs) and not torch.cuda.is_available()
