"""Keys and values of a batch of tokens into their slots, and back out of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.kernels import compiled_attention
from kvpool.kernels.layout import LayerCache, current, widest_view
from kvpool.kernels.quantization import Quantized, dequantize, quantize

_FIELDS = {"k": ("k", "k_scale"), "v": ("v", "v_scale", "v_zero")}


def write_slots(cache: LayerCache, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Stores token i's K and V, [token, head, element], in slot `slots[i]` (block * block size + offset), quantised.

    A slot of -1 is skipped. Nothing is checked: on CUDA a slot outside the store is skipped too, on a CPU it raises.
    """
    if k.is_cuda:
        from kvpool.kernels.write_triton import write_slots_triton

        with current(k.device):
            write_slots_triton(cache, slots, k, v)
    elif (compiled := compiled_attention()) is None:
        write_slots_reference(cache, slots, k, v)
    else:
        for target, rows in _stored(cache, k, v):
            _write_compiled(compiled, rows, slots, target)


def write_slots_reference(cache: LayerCache, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    """What `write_slots` does, with torch (and numpy, which assigns rows at the speed of a plain copy)."""
    if len(slots) and int(slots.min()) < 0:
        kept = slots >= 0
        slots, k, v = slots[kept], k[kept], None if v is None else v[kept]
    if not len(slots):
        return
    places = _Places.of(slots, cache.block_size)
    for target, rows in _stored(cache, k, v):
        _put_rows(target, places, rows)


def _write_compiled(module: Any, rows: Tensor, slots: Tensor, target: Tensor) -> None:
    """Copies row i [head, element], or [head], into `target[block, token]` of slot `slots[i]`; skips slots below 0."""
    rows = rows if rows.ndim == 2 or rows.stride(2) == 1 else rows.contiguous()
    slots = slots.long().contiguous()
    each = target.element_size()
    size = each * rows.shape[2:].numel()
    source = rows.data_ptr(), *(each * stride for stride in rows.stride()[:2])
    blocks = target.data_ptr(), *target.shape[:2], *(each * stride for stride in target.stride()[:3])
    module.write(source, rows.shape[1], size, (slots.data_ptr(), slots.numel()), blocks)


def _stored(cache: LayerCache, k: Tensor, v: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of a layer, each with the rows that are stored in it."""
    sides = (("k", k, cache.dtype.of_keys, cache.k_factor), ("v", v, cache.dtype, cache.v_factor))
    for side, values, dtype, factor in sides:
        if values is not None:
            for field, rows in zip(_FIELDS[side], quantize(values, dtype, factor), strict=False):
                if rows is not None:
                    yield getattr(cache, field), rows


def read_slots(cache: LayerCache, slots: Tensor) -> tuple[Quantized, Quantized | None]:
    """K and V as they are stored in these slots, [token, head, element]; V is None in a K-only layer."""
    places = _Places.of(slots, cache.block_size)
    sides = []
    for fields in _FIELDS.values():
        tensors = [getattr(cache, field) for field in fields]
        rows = [None if tensor is None else _get_rows(tensor, places) for tensor in tensors]
        sides.append(None if rows[0] is None else Quantized(rows[0], *rows[1:]))
    assert sides[0] is not None
    return sides[0], sides[1]


def read_values(cache: LayerCache, slots: Tensor, k_dim: int, v_dim: int) -> tuple[Tensor, Tensor | None]:
    """What K and V in these slots are worth, [token, head, element]; heads have `k_dim` and `v_dim` elements."""
    k, v = read_slots(cache, slots)
    values = None if v is None else dequantize(v, cache.dtype, v_dim, cache.v_factor)
    return dequantize(k, cache.dtype.of_keys, k_dim, cache.k_factor), values


class _Places(NamedTuple):
    """Slots taken apart: token i goes to `offsets[i]` of block `blocks[i]`."""

    blocks: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, slots: Tensor, block_size: int) -> _Places:
        slots = slots.long()
        if slots.is_cuda:
            blocks = slots // block_size
        else:
            blocks = torch.from_numpy(slots.numpy() // block_size)  # numpy divides integers several times faster
        return cls(blocks, slots - blocks * block_size)


def _put_rows(target: Tensor, places: _Places, rows: Tensor) -> None:
    """`target[block, offset] = rows[i]` for the place of every i."""
    flat = _flat_rows(target)
    if flat is None or target.is_cuda:
        _as_bits(target)[places] = _as_bits(rows)
        return
    data, step, first = flat
    whole_rows = np.dtype((np.void, data.shape[1]))  # one element each: numpy then copies a row as one piece of memory
    given = rows.contiguous().view(len(rows), -1).view(torch.uint8)
    numbers = (places.blocks * step + places.offsets + first).numpy()
    data.numpy().view(whole_rows)[:, 0][numbers] = given.numpy().view(whole_rows)[:, 0]


def _get_rows(source: Tensor, places: _Places) -> Tensor:
    """`source[block, offset]` for every place."""
    flat = _flat_rows(source)
    if flat is None:
        return _as_bits(source)[places].view(source.dtype)
    data, step, first = flat
    rows = widest_view(data).index_select(0, places.blocks * step + places.offsets + first)
    return rows.view(source.dtype).view(len(rows), *source.shape[2:])


def _flat_rows(tensor: Tensor) -> tuple[Tensor, int, int] | None:
    """The whole store cut into rows as long as one token's, [row, byte], if every token starts at a multiple of that.

    Returns it with the rows from block to block and the row of the first token; None where sizes do not divide.
    """
    item = tensor.element_size()
    row, block = tensor.stride(1) * item, tensor.stride(0) * item
    start = tensor.storage_offset() * item
    if block % row or start % row:
        return None
    count = tensor.untyped_storage().nbytes() // row
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole.set_(tensor.untyped_storage(), 0, (count, row), (row, 1))
    return whole, block // row, start // row


def _as_bits(tensor: Tensor) -> Tensor:
    """The same bits as integers: not every float type can be indexed everywhere."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
