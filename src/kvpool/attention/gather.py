"""Scattered tokens of a layer collected into dense tensors, at the speed of a plain copy where the layout allows."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from kvpool.kernels.layout import LayerCache
from kvpool.kernels.quantization import Quantized, dequantize


class Scratch(threading.local):
    """Memory that gathered tokens go into, kept from call to call on a CPU: fresh pages cost more than the copy itself.

    What was gathered under a name is valid until the next gathering under it, in the same thread.
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
    """Tokens that are those of whole blocks, from the first one on."""

    ids: Tensor  # [sequences, blocks]
    unread: Tensor  # numbers of the tokens that nobody may read, among all tokens of these blocks


class TokenPlaces:
    """Where the tokens of some sequences lie: block and token in block, both [sequences, tokens]."""

    def __init__(self, blocks: Tensor, offsets: Tensor, whole: WholeBlocks | None = None) -> None:
        self.blocks = blocks
        self.offsets = offsets
        self.whole = whole
        self._rows: dict[tuple[int, ...], Tensor] = {}  # by layout: all layers of a group have the same

    def gather(self, stored: Tensor, scratch: Scratch, name: str) -> Tensor:
        """[sequences, heads, tokens, ...] of a stored tensor [block, token in block, head, ...]."""
        if stored.dim() == 4 and self.whole is not None and _is_run(stored):
            return self._gather_blocks(stored, self.whole, scratch, name)
        if stored.dim() == 4 and all(stride % stored.shape[3] == 0 for stride in stored.stride()[:3]):
            return self._gather_rows(stored, scratch, name)
        heads = torch.arange(stored.shape[2], device=stored.device)
        return stored[self.blocks[:, None], self.offsets[:, None], heads[None, :, None]]

    def _gather_blocks(self, stored: Tensor, whole: WholeBlocks, scratch: Scratch, name: str) -> Tensor:
        """One memcpy a block: a third of the time that one for each head of a token takes. What is not read becomes 0."""
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
        source = data.as_strided((sum(last) + 1, dim), (dim, 1))
        out = scratch.rows(name, rows.numel(), source)
        picked = torch.index_select(source, 0, rows.flatten(), out=out)
        return picked.view(stored.dtype).view(*rows.shape, dim)


def _is_run(stored: Tensor) -> bool:
    """Whether a block's tokens lie one behind the other, and blocks whole runs apart."""
    return stored[0].is_contiguous() and stored.stride(0) % stored[0].numel() == 0


def gather_layer(
    cache: LayerCache, places: TokenPlaces, dtype: torch.dtype, head_dim: int, v_dim: int, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """K and V of the given tokens, worth what was written: [sequences, heads, tokens, dim] of type `dtype`."""

    def worth(name: str, dim: int, factor: float, data: Tensor, *scales: Tensor | None) -> Tensor:
        parts = [None if part is None else places.gather(part, scratch, name) for part in scales]
        return dequantize(Quantized(places.gather(data, scratch, name), *parts), cache.dtype, dim, factor).to(dtype)

    k = worth("k", head_dim, cache.k_factor, cache.k, cache.k_scale, cache.k_zero)
    if cache.v is None:
        return k, k[..., :v_dim]
    return k, worth("v", v_dim, cache.v_factor, cache.v, cache.v_scale, cache.v_zero)
