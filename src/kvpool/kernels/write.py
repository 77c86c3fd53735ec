"""What layers store of a batch of tokens, such as keys and values, into its slots, and back out of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.kernels import compiled_attention
from kvpool.kernels.layout import LayerCache, StoredPart, current, widest_view
from kvpool.kernels.quantization import Quantized, dequantize, quantize


def write_slots(cache: LayerCache, slots: Tensor, values: Mapping[str, Tensor]) -> None:
    """Stores token i's `values` of some parts, [token, head, element], in slot `slots[i]` (block * block size + offset).

    A slot of -1 is skipped. Nothing is checked: on CUDA a slot outside the store is skipped too, on a CPU it raises.
    """
    if slots.is_cuda:
        from kvpool.kernels.write_triton import write_slots_triton

        with current(slots.device):
            write_slots_triton(cache, slots, values)
    elif (compiled := compiled_attention()) is None:
        write_slots_reference(cache, slots, values)
    else:
        for target, rows in _stored(cache, values):
            _write_compiled(compiled, rows, slots, target)


def write_slots_reference(cache: LayerCache, slots: Tensor, values: Mapping[str, Tensor]) -> None:
    """What `write_slots` does, with torch (and numpy, which assigns rows at the speed of a plain copy)."""
    if len(slots) and int(slots.min()) < 0:
        kept = slots >= 0
        slots, values = slots[kept], {name: given[kept] for name, given in values.items()}
    if not len(slots):
        return
    places = _Places.of(slots, cache.block_size)
    for target, rows in _stored(cache, values):
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


def _stored(cache: LayerCache, values: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of these parts, each with the rows that are stored in it."""
    for name, given in values.items():
        part = cache[name]
        for target, rows in zip(
            (part.data, part.scale, part.zero), quantize(given, part.dtype, part.factor), strict=True
        ):
            if target is not None and rows is not None:
                yield target, rows


def read_slots(part: StoredPart, slots: Tensor) -> Quantized:
    """A part as it is stored in these slots, [token, head, element]."""
    places = _Places.of(slots, part.data.shape[1])
    scale, zero = (None if tensor is None else _get_rows(tensor, places) for tensor in (part.scale, part.zero))
    return Quantized(_get_rows(part.data, places), scale, zero)


def read_values(part: StoredPart, slots: Tensor) -> Tensor:
    """What a part in these slots is worth, [token, head, element]."""
    return dequantize(read_slots(part, slots), part.dtype, part.width, part.factor)


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
