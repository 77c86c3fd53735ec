"""Long chunks of prompts on Hopper: launches the kernel in `prefill_gluon.py`, and says for what it can be used."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped, unused-ignore]
from torch import Tensor

from kvpool.config.layers import DType
from kvpool.kernels.attention import LOG2_E, Partials, TileShape
from kvpool.kernels.attention_spec import AttentionSpec
from kvpool.kernels.layout import LayerCache

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
    """Whether it computes this kind of attention: plain, causal or not, over 16-bit floats."""
    plain = spec.window is None and spec.chunk is None and spec.soft_cap is None
    plain = (
        plain
        and not spec.sink_logits
        and spec.slopes is None
        and not spec.biases
        and not spec.k_only
        and spec.scale > 0
    )
    floats = spec.dtype is spec.kv_dtype and spec.dtype in (DType.BFLOAT16, DType.FLOAT16)
    even = spec.group_size <= PREFILL_TILE.rows // 2 and spec.group_size & (spec.group_size - 1) == 0
    return plain and floats and even and spec.head_dim == spec.v_dim and spec.head_dim in (64, 128)


def reads(q: Tensor, cache: LayerCache) -> bool:
    """Whether the copy engine can read these tensors: it wants multiples of 16 bytes, and rounds of whole blocks."""
    assert cache.v is not None
    aligned = all(
        tensor.data_ptr() % 16 == 0 and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in (q, cache.k, cache.v)
    )
    return aligned and cache.block_size >= 8 and cache.block_size & (cache.block_size - 1) == 0


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
    from triton.experimental.gluon.language import NVMMASharedLayout  # type: ignore[import-untyped, unused-ignore]
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped, unused-ignore]

    from kvpool.kernels.prefill_gluon import COLUMNS, GROUP_ROWS, prefill_kernel

    if not len(items):
        return
    assert cache.v is not None
    tokens, columns = GROUP_ROWS.value // spec.group_size, COLUMNS.value
    box = min(cache.block_size, shape.keys)
    q_box, kv_box = [tokens, spec.group_size, columns], [1, box, 1, columns]
    q_boxes, k_boxes, v_boxes = (
        TensorDescriptor(data, [*data.shape], [*data.stride()], size, NVMMASharedLayout(128, 16, data.dim()))
        for data, size in ((q, q_box), (cache.k, kv_box), (cache.v, kv_box))
    )
    units = len(items) * spec.kv_heads
    prefill_kernel[(min(units, num_programs),)](
        q_boxes,
        k_boxes,
        v_boxes,
        out,
        items.view(torch.float32) if partials is None else partials.values,
        items.view(torch.float32) if partials is None else partials.weights,
        indices,
        items,
        units,
        *out.stride()[:2],
        spec.scale * cache.k_factor * LOG2_E,
        cache.v_factor,
        KV_HEADS=spec.kv_heads,
        GROUP=spec.group_size,
        DIM=spec.head_dim,
        PAGE=cache.block_size,
        BOX=box,
        KEYS=shape.keys,
        STAGES=shape.stages,
        Q_STAGES=_Q_STAGES,
        CAUSAL=spec.causal,
        num_warps=shape.warps,
    )
