"""Long chunks of prompts on Hopper: launches the kernels for floats and for quantised K and V, and says what they can do."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from kvpool.config.layers import DType
from kvpool.kernels.attention import KINDS, LOG2_E, Partials, TileShape, scales_of
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache, StoredPart

PREFILL_TILE = TileShape(128, 128, warps=4, stages=2, programs=1)
_Q_STAGES = 2
# Versions of Triton whose interface for such kernels was tested; it still changes. The general kernel serves the others.
_TESTED = "3.6."


def prefills_on(device: torch.device) -> bool:
    """Whether this GPU and this Triton can run it."""
    if device.type != "cuda" or not triton.__version__.startswith(_TESTED):
        return False
    return bool(torch.cuda.get_device_capability(device)[0] == 9)


def prefills(spec: AttentionSpec) -> bool:
    """Whether it computes this kind of attention: plain, causal or not, of 16-bit floats over such or quantised ones."""
    plain = spec.window is None and spec.chunk is None and spec.soft_cap is None
    plain = plain and not (spec.sink_logits or spec.chosen or spec.shares_part) and spec.scale > 0
    floats = spec.dtype in (DType.BFLOAT16, DType.FLOAT16) and spec.kv_dtype in (spec.dtype, *KINDS)
    even = spec.group_size <= PREFILL_TILE.rows // 2 and spec.group_size & (spec.group_size - 1) == 0
    return plain and floats and even and spec.head_dim == spec.v_dim and spec.head_dim in (64, 128)


def reads(q: Tensor, keys: StoredPart, values: StoredPart) -> bool:
    """Whether the kernel can read these tensors.

    The copy engine, which reads floats and queries, wants multiples of 16 bytes, and rounds of whole blocks.
    """
    k, v, block_size = keys.data, values.data, keys.data.shape[1]
    if values.dtype in KINDS:
        return _aligned(q, 16) and _aligned(k, 8) and _aligned(v, 4)
    in_rounds = block_size >= 8 and block_size & (block_size - 1) == 0
    return in_rounds and all(_aligned(data, 16) for data in (q, k, v))


def _aligned(data: Tensor, num_bytes: int) -> bool:
    """Whether all rows begin at a multiple of so many bytes."""
    return all(
        each % num_bytes == 0 for each in (data.data_ptr(), *(n * data.element_size() for n in data.stride()[:-1]))
    )


def prefill_items(
    q: Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    indices: Tensor,
    items: Tensor,
    shape: TileShape,
    out: Tensor,
    partials: Partials | None,
    num_programs: int,
) -> None:
    """Computes work items as `attend_items` does, whose tiles have as many tokens as their heads leave room for."""
    from kvpool.kernels.prefill_gluon import COLUMNS, GROUP_ROWS, prefill_kernel
    from kvpool.kernels.prefill_quantized_gluon import prefill_quantized_kernel

    if not len(items):
        return
    keys, values = cache[spec.keys], cache[spec.values]
    units = len(items) * spec.kv_heads
    grid = (min(units, num_programs),)
    results = (
        out,
        items.view(torch.float32) if partials is None else partials.values,
        items.view(torch.float32) if partials is None else partials.weights,
        indices,
        items,
        units,
        *out.stride()[:2],
    )
    scales = spec.scale * keys.factor * LOG2_E, values.factor
    shapes = {
        "KV_HEADS": spec.kv_heads,
        "GROUP": spec.group_size,
        "DIM": spec.head_dim,
        "PAGE": cache.block_size,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        "Q_STAGES": _Q_STAGES,
        "CAUSAL": spec.causal,
        "num_warps": shape.warps,
    }
    q_box = [GROUP_ROWS.value // spec.group_size, spec.group_size, COLUMNS.value]
    if values.dtype not in KINDS:
        box = min(cache.block_size, shape.keys)
        sides = (boxes(data, [1, box, 1, COLUMNS.value]) for data in (keys.data, values.data))
        prefill_kernel[grid](boxes(q, q_box), *sides, *results, *scales, BOX=box, **shapes)
        return
    k, v = keys.data.view(torch.int32), values.data.view(torch.int32)
    k_scale = k if keys.scale is None else keys.scale
    v_scale, v_zero = scales_of(values, v)
    prefill_quantized_kernel[grid](
        boxes(q.to(torch.float16), q_box),
        k,
        v,
        k_scale,
        v_scale,
        v_zero,
        *results,
        *k.stride()[:3],
        *v.stride()[:3],
        *k_scale.stride()[:3],
        *v_scale.stride()[:3],
        *scales,
        K_STORED=KINDS[keys.dtype],
        V_STORED=KINDS[values.dtype],
        **shapes,
    )


def boxes(data: Tensor, box: list[int]) -> Any:
    """What the copy engine needs to know to copy boxes of a tensor of 16-bit floats."""
    from triton.experimental.gluon.language import NVMMASharedLayout  # type: ignore[import-untyped, unused-ignore]
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped, unused-ignore]

    return TensorDescriptor(data, [*data.shape], [*data.stride()], box, NVMMASharedLayout(128, 16, data.dim()))
