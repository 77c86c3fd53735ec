"""Keys and values of a batch of tokens into their slots, and back out of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvpool.kernels.copy_blocks import widest_view
from kvpool.kernels.layer_cache import LayerCache
from kvpool.kernels.quantization import Quantized, quantize

_FIELDS = {"k": ("k", "k_scale", "k_zero"), "v": ("v", "v_scale", "v_zero")}


def write_slots(cache: LayerCache, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Stores token i's K and V, [token, head, element], in slot `slots[i]` (block * block size + offset), quantised.

    A slot of -1 is skipped. Nothing is checked: on CUDA a slot outside the store is skipped too, on a CPU it raises.
    """
    if k.is_cuda:
        from kvpool.kernels.scatter_triton import write_slots_triton

        write_slots_triton(cache, slots, k, v)
    else:
        write_slots_reference(cache, slots, k, v)


def write_slots_reference(cache: LayerCache, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    """What `write_slots` does, with torch (and numpy, which assigns rows at the speed of a plain copy)."""
    slots = slots.long()
    if len(slots) and int(slots.min()) < 0:
        kept = slots >= 0
        slots, k, v = slots[kept], k[kept], None if v is None else v[kept]
    if not len(slots):
        return
    for side, values, factor in (("k", k, cache.k_factor), ("v", v, cache.v_factor)):
        if values is not None:
            stored = quantize(values, cache.dtype, factor)
            for field, rows in zip(_FIELDS[side], stored, strict=True):
                if rows is not None:
                    _put_rows(getattr(cache, field), slots, rows)


def read_slots(cache: LayerCache, slots: Tensor) -> tuple[Quantized, Quantized | None]:
    """K and V as they are stored in these slots, [token, head, element]; V is None in a K-only layer."""
    slots = slots.long()
    sides = []
    for fields in _FIELDS.values():
        tensors = [getattr(cache, field) for field in fields]
        rows = [None if tensor is None else _get_rows(tensor, slots) for tensor in tensors]
        sides.append(None if rows[0] is None else Quantized(rows[0], rows[1], rows[2]))
    assert sides[0] is not None
    return sides[0], sides[1]


def _put_rows(target: Tensor, slots: Tensor, rows: Tensor) -> None:
    """`target[block, token] = rows[i]` for the slot of every i."""
    flat = _flat_rows(target)
    if flat is None or target.is_cuda:
        size = target.shape[1]
        _as_bits(target)[slots // size, slots % size] = _as_bits(rows)
        return
    data, step, offset = flat
    whole_rows = np.dtype((np.void, data.shape[1]))  # one element each: numpy then copies a row as one piece of memory
    given = rows.contiguous().view(len(rows), -1).view(torch.uint8)
    places = _indices(slots, target.shape[1], step, offset).numpy()
    data.numpy().view(whole_rows)[:, 0][places] = given.numpy().view(whole_rows)[:, 0]


def _get_rows(source: Tensor, slots: Tensor) -> Tensor:
    """`source[block, token]` for every slot."""
    flat = _flat_rows(source)
    shape = (len(slots), *source.shape[2:])
    if flat is None:
        size = source.shape[1]
        return _as_bits(source)[slots // size, slots % size].view(source.dtype).reshape(shape)
    data, step, offset = flat
    rows = widest_view(data).index_select(0, _indices(slots, source.shape[1], step, offset))
    return rows.view(source.dtype).view(shape)


def _indices(slots: Tensor, block_size: int, step: int, offset: int) -> Tensor:
    """Rows of `_flat_rows` where these slots are."""
    if slots.is_cuda:
        return slots + slots // block_size * (step - block_size) + offset
    numbers = slots.numpy()  # numpy divides integers several times faster
    return torch.from_numpy(numbers + numbers // block_size * (step - block_size) + offset)


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
