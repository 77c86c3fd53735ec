"""Scattered tokens of a layer collected into dense tensors, at the speed of a plain copy where the layout allows."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpool.kernels.layer_cache import LayerCache
from kvpool.kernels.quantization import Quantized, dequantize


class TokenPlaces:
    """Where the tokens of some sequences lie: block and token in block, both [sequences, tokens]."""

    def __init__(self, blocks: Tensor, offsets: Tensor) -> None:
        self.blocks = blocks
        self.offsets = offsets
        self._rows: dict[tuple[int, ...], Tensor] = {}  # by layout: all layers of a group have the same

    def gather(self, stored: Tensor) -> Tensor:
        """[sequences, heads, tokens, ...] of a stored tensor [block, token in block, head, ...]."""
        if stored.dim() == 4 and all(stride % stored.shape[3] == 0 for stride in stored.stride()[:3]):
            return self._gather_rows(stored)
        heads = torch.arange(stored.shape[2], device=stored.device)
        return stored[self.blocks[:, None], self.offsets[:, None], heads[None, :, None]]

    def _gather_rows(self, stored: Tensor) -> Tensor:
        """Sees the memory from the first element on as rows of one head each, and picks rows: one memcpy a row."""
        heads, dim = stored.shape[2:]
        per_block, per_token, per_head = (stride // dim for stride in stored.stride()[:3])
        key = (heads, per_block, per_token, per_head)
        if (rows := self._rows.get(key)) is None:
            first_head = (self.blocks * per_block + self.offsets * per_token)[:, None]
            rows = first_head + torch.arange(heads, device=stored.device)[:, None] * per_head
            self._rows[key] = rows
        last = [(size - 1) * step for size, step in zip(stored.shape, (per_block, per_token, per_head), strict=False)]
        data = stored.view(torch.uint8) if stored.element_size() == 1 else stored  # fp8 has no index_select
        picked = data.as_strided((sum(last) + 1, dim), (dim, 1)).index_select(0, rows.flatten())
        return picked.view(stored.dtype).view(*rows.shape, dim)


def gather_layer(
    cache: LayerCache, places: TokenPlaces, dtype: torch.dtype, head_dim: int, v_dim: int
) -> tuple[Tensor, Tensor]:
    """K and V of the given tokens, worth what was written: [sequences, heads, tokens, dim] of type `dtype`."""
    k = _worth(cache, places, cache.k, cache.k_scale, cache.k_zero, head_dim, cache.k_factor).to(dtype)
    if cache.v is None:
        return k, k[..., :v_dim]
    return k, _worth(cache, places, cache.v, cache.v_scale, cache.v_zero, v_dim, cache.v_factor).to(dtype)


def _worth(
    cache: LayerCache,
    places: TokenPlaces,
    data: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    dim: int,
    factor: float,
) -> Tensor:
    scales = [None if part is None else places.gather(part) for part in (scale, zero)]
    return dequantize(Quantized(places.gather(data), *scales), cache.dtype, dim, factor)
