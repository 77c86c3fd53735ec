"""The engine's pages as opaque bytes, and the host's rows that hold copies of them.

A page is what one block of tokens takes in every layer. Nothing here knows what the bytes mean: layouts differ between
engines, versions and attention backends, and a copy into the same place of the same layout is right for all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpool.errors import ConfigError
from kvpool.integrations.connector.step_orders import NO_PAGE
from kvpool.tiers.transport.staging import Bytes, page_aligned

_PARTS = 4  # at most so many pieces of a page per layer: keys and values apart, and their scales


class EnginePages:
    """The pages of all layers, [page, byte] for each piece; a row has the bytes of one block, piece after piece.

    `groups` names the layers that share page numbers; without it all do.
    """

    def __init__(
        self, layers: Mapping[str, Tensor], num_pages: int, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        named = [list(layers)] if groups is None else [list(group) for group in groups]
        self._pieces = [
            [piece for name in group for piece in _pieces(name, layers[name], num_pages)] for group in named
        ]
        self.num_pages = num_pages
        self.num_groups = len(named)
        self.row_bytes = sum(piece.shape[1] for pieces in self._pieces for piece in pieces)
        self.is_cuda = any(piece.is_cuda for pieces in self._pieces for piece in pieces)
        described = [[name, str(each.dtype), list(each.shape), list(each.stride())] for name, each in layers.items()]
        for each in described:
            each[2] = [0 if size == num_pages else size for size in each[2]]  # how many there are changes no page
            each[3] = [stride for stride, size in zip(each[3], each[2], strict=True) if size]
        told = described if len(named) == 1 else [described, named]
        self.layout = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        # Slices of arrays are copied with the least ado; a GPU's memory has none.
        self._arrays = None if self.is_cuda else [[piece.numpy() for piece in pieces] for pieces in self._pieces]

    def read(self, pages: Sequence[Sequence[int]], rows: Sequence[int], host: HostRows) -> None:
        """Copies the pages of each group into rows. The bytes are there when it returns."""
        self._copy(pages, rows, host, to_host=True)

    def write(self, pages: Sequence[Sequence[int]], rows: Sequence[int], host: HostRows) -> None:
        """Copies rows into the pages of each group; on a GPU before what is computed next on its stream."""
        self._copy(pages, rows, host, to_host=False)

    def _copy(self, pages: Sequence[Sequence[int]], rows: Sequence[int], host: HostRows, *, to_host: bool) -> None:
        theirs: list[list[Any]] = self._pieces if self._arrays is None else self._arrays
        start = 0
        for of_group, pieces in zip(pages, theirs, strict=True):
            self._copy_group(pieces, of_group, rows, host, start, to_host=to_host)
            start += sum(piece.shape[1] for piece in pieces)
        if self.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _copy_group(
        self, pieces: list[Any], pages: Sequence[int], rows: Sequence[int], host: HostRows, start: int, *, to_host: bool
    ) -> None:
        """One group's part of each row, which begins at byte `start`."""
        ours: list[Any] = host.rows_of(self._arrays is not None)
        for page, row in zip(pages, rows, strict=True):
            if page == NO_PAGE:
                continue
            at, whole = start, ours[row]
            for piece in pieces:
                end = at + piece.shape[1]
                if self._arrays is None:
                    target, source = (whole[at:end], piece[page]) if to_host else (piece[page], whole[at:end])
                    target.copy_(source, non_blocking=True)
                elif to_host:
                    whole[at:end] = piece[page]
                else:
                    piece[page] = whole[at:end]
                at = end


def _pieces(name: str, layer: Tensor, num_pages: int) -> list[Tensor]:
    """One layer as matrices of bytes, [page, byte]."""
    if layer.shape[0] == num_pages:
        parts = [layer]
    elif layer.dim() > 1 and layer.shape[0] <= _PARTS and layer.shape[1] == num_pages:
        parts = list(layer)
    elif layer.shape[0] % num_pages == 0:  # kernels that use smaller pages than the scheduler
        parts = [layer.reshape(num_pages, -1, *layer.shape[1:])]
    else:
        raise ConfigError(f"the cache of {name} has the shape {tuple(layer.shape)}: where are its {num_pages} pages?")
    for part in parts:
        if not part[0].is_contiguous():
            raise ConfigError(f"the pages of {name} are not contiguous: shape {tuple(part.shape)}, {part.stride()}")
    return [_as_bytes(part) for part in parts]


def _as_bytes(part: Tensor) -> Tensor:
    size = part.element_size()
    width, stride = part[0].numel(), part.stride(0)
    flat = torch.as_strided(part, (part.shape[0], width), (stride, 1))
    return flat.view(torch.uint8) if size > 1 else flat


class HostRows:
    """Memory of the host for `num_rows` pages, pinned where the engine computes on a GPU."""

    def __init__(self, num_rows: int, row_bytes: int, *, pinned: bool) -> None:
        if pinned:
            self._tensor = torch.empty((num_rows, row_bytes), dtype=torch.uint8, pin_memory=True)
            self.array: Bytes = self._tensor.numpy()
        else:
            self.array = page_aligned(num_rows * row_bytes).reshape(num_rows, row_bytes)
            self._tensor = torch.from_numpy(self.array)
        self._arrays, self._tensors = list(self.array), list(self._tensor)

    def rows_of(self, as_arrays: bool) -> list[Any]:
        """All rows, as arrays or as tensors."""
        return self._arrays if as_arrays else self._tensors

    def gather(self, rows: Sequence[int], out: Bytes) -> None:
        """Copies rows one after the other into `out`."""
        np.take(self.array, rows, axis=0, out=out.reshape(len(rows), -1))
