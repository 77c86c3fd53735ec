"""The engine's pages as opaque bytes, and the host's rows that hold copies of them.

A page is the memory of one block of tokens in every layer. Nothing here interprets the bytes: layouts differ between engines,
versions and attention backends, but a copy to the same place of the same layout is always correct.

On a GPU (`LinkedPages`), copies run on streams of their own, and the CPU does not wait for them:

    loads    run before the step. Layer by layer during the step, they would cost more than they gain: docs/decisions
    stores   run after the step; large ones run layer by layer, while the next layers are computed
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.errors import ConfigError
from kvpool.integrations.connector.orders import NO_PAGE
from kvpool.kernels.layout import current
from kvpool.pools.arrays import Int32Array
from kvpool.storage.dma import copy_places
from kvpool.storage.memory import HostMemory, free_bytes
from kvpool.tiers.transport.staging import Bytes, page_aligned

Layer = Tensor | Sequence[Tensor]
_Parts = list[tuple[Bytes, slice]]
_PARTS = 4  # the most pieces of a page per layer: keys, values, and the scales of both


class LayerPages(NamedTuple):
    """One layer: its group, where its bytes begin in a row, and its pieces, each uint8 [page, byte]."""

    name: str
    group: int
    start: int
    pieces: list[Tensor]


class Move(NamedTuple):
    """Pages of each group and their rows. A page that is not moved is `NO_PAGE`."""

    pages: Sequence[Sequence[int]]
    rows: Sequence[int]


def nothing_left() -> bool:
    """For copies that were done at once: nothing is left to wait for."""
    return True


class EnginePages:
    """The pages of all layers. A row has the bytes of one block, layer after layer and piece after piece.

    `groups` names the layers that share page numbers; without it all do. A layer is one tensor, or several if it keeps a
    state of several parts. This class is for engines on a CPU: it copies at once. `LinkedPages` copies to and from a GPU
    while it computes.
    """

    gpu: torch.device | None = None  # where the pages are

    def __init__(
        self, layers: Mapping[str, Layer], num_pages: int, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        named = [list(layers)] if groups is None else [list(group) for group in groups]
        self.layers: list[LayerPages] = []
        self.row_bytes = 0
        for number, group in enumerate(named):
            for name in group:
                pieces = _pieces(name, layers[name], num_pages)
                self.layers.append(LayerPages(name, number, self.row_bytes, pieces))
                self.row_bytes += sum(piece.shape[1] for piece in pieces)
        self.num_pages = num_pages
        self.num_groups = len(named)
        of_groups = [name for name in layers if any(name in group for group in named)]
        described: list[Any] = [
            [name, str(each.dtype), list(each.shape), list(each.stride())]
            for name in of_groups
            for each in _tensors(layers[name])
        ]
        for each in described:
            each[2] = [
                0 if size == num_pages else size for size in each[2]
            ]  # the number of pages is no part of the layout
            each[3] = [stride for stride, size in zip(each[3], each[2], strict=True) if size]
        told = described if len(named) == 1 else [described, named]
        self.layout = hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def write(self, moves: Sequence[Move], host: HostRows) -> None:
        """Copies rows into pages, before anything that is computed next. After a `TransferError` some may be missing."""
        for page, whole, pieces in self._places(moves, host):
            for piece, part in pieces:
                piece[page] = whole[part]

    def read(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        """Begins to copy written pages into rows. Returns a function that says whether the bytes are there."""
        for page, whole, pieces in self._places(moves, host):
            for piece, part in pieces:
                whole[part] = piece[page]
        return nothing_left

    def read_layer(self, name: str, moves: Sequence[Move], host: HostRows) -> None:
        """This layer has written its pages. `moves` are those that `read` will get."""

    def settle(self) -> None:
        """Waits until no row is being copied into pages, so that rows may be written."""

    def close(self) -> None:
        """Waits for all copies, because their rows are about to be freed."""

    def _places(self, moves: Sequence[Move], host: HostRows) -> Iterator[tuple[int, Bytes, _Parts]]:
        """Each page that is to be moved, its row, and the pieces of its group."""
        for move in moves:
            for of_group, pieces in zip(move.pages, self._arrays, strict=True):
                for page, row in zip(of_group, move.rows, strict=True):
                    if page != NO_PAGE:
                        yield page, host.slices[row], pieces

    @cached_property
    def _arrays(self) -> list[_Parts]:
        """The pieces of each group and their parts of a row, as numpy arrays, whose slices are copied fastest."""
        groups: list[_Parts] = [[] for _ in range(self.num_groups)]
        for layer in self.layers:
            start = layer.start
            for piece in layer.pieces:
                groups[layer.group].append((piece.numpy(), slice(start, start + piece.shape[1])))
                start += piece.shape[1]
        return groups


def _tensors(layer: Layer) -> list[Tensor]:
    return [layer] if isinstance(layer, Tensor) else list(layer)


def _pieces(name: str, layer: Layer, num_pages: int) -> list[Tensor]:
    """One layer as matrices of bytes, [page, byte]."""
    if not isinstance(layer, Tensor):
        return [piece for part in layer for piece in _pieces(name, part, num_pages)]
    if layer.shape[0] == num_pages:
        parts = [layer]
    elif layer.dim() > 1 and layer.shape[0] <= _PARTS and layer.shape[1] == num_pages:
        parts = list(layer)
    elif layer.shape[0] % num_pages == 0:  # the kernels use smaller pages than the scheduler
        parts = [layer.reshape(num_pages, -1, *layer.shape[1:])]
    else:
        raise ConfigError(
            f"the cache of {name} has the shape {tuple(layer.shape)}, in which {num_pages} pages cannot be found"
        )
    for part in parts:
        if not part[0].is_contiguous():
            raise ConfigError(f"the pages of {name} are not contiguous: shape {tuple(part.shape)}, {part.stride()}")
    return [_as_bytes(part) for part in parts]


def _as_bytes(part: Tensor) -> Tensor:
    size = part.element_size()
    width, stride = part[0].numel(), part.stride(0)
    flat = torch.as_strided(part, (part.shape[0], width), (stride, 1))
    return flat.view(torch.uint8) if size > 1 else flat


def _check_room(num_bytes: int) -> None:
    """Refuses more memory than is free: the system would promise it, and kill the engine when it is used."""
    if num_bytes > (free := free_bytes("cpu")):
        raise ConfigError(
            f"host_bytes: {num_bytes:,} bytes do not fit into the memory of this machine, of which about {free:,} bytes are "
            "free; lower host_bytes or host_blocks"
        )


class HostRows:
    """Memory of the host for `num_rows` pages, page-locked if the engine computes on a GPU."""

    def __init__(self, num_rows: int, row_bytes: int, gpu: torch.device | None = None) -> None:
        self.is_pinned = False
        if gpu is None:
            _check_room(num_rows * row_bytes)
            self.array: Bytes = page_aligned(num_rows * row_bytes).reshape(num_rows, row_bytes)
        else:
            self._memory = HostMemory(num_rows, row_bytes, gpu)
            self.is_pinned, self.array = self._memory.pinned, self._memory.tensor.numpy()
        self.slices = list(self.array)

    def gather(self, rows: Sequence[int], out: Bytes) -> None:
        """Copies rows one after the other into `out`."""
        np.take(self.array, rows, axis=0, out=out.reshape(len(rows), -1))

    def close(self) -> None:
        """The memory is not locked any more."""
        if self.is_pinned:
            self._memory.close()


_Numbers = list[tuple[Int32Array, Int32Array]]  # of each group: pages, and their rows
_MANY_BLOCKS = 64  # smaller stores are copied after the step, because a copy per layer costs time on the CPU


class LinkedPages(EnginePages):
    """`EnginePages` for a GPU. Only the thread that computes uses it; any thread may call `settle`."""

    def __init__(
        self, layers: Mapping[str, Layer], num_pages: int, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        super().__init__(layers, num_pages, groups)
        self.gpu = self._device = self.layers[0].pieces[0].device
        with current(self._device):
            self._in: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._out: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._last_write: torch.cuda.Event | None = None
        self._said: dict[str, int] = {}  # by layer: how often `read_layer` was called in this step

    def write(self, moves: Sequence[Move], host: HostRows) -> None:
        """Copies rows into pages after all work that the GPU has so far. Later work on the GPU waits for the copies."""
        if not moves:
            return
        numbers = _numbers(moves)
        with current(self._device):
            self._in.wait_stream(torch.cuda.current_stream())
            self._in.wait_stream(self._out)
            try:
                with torch.cuda.stream(self._in):
                    for layer in self.layers:
                        self._copy(layer, numbers, host, to_host=False)
            finally:
                self._last_write = self._in.record_event()
                torch.cuda.current_stream().wait_event(self._last_write)

    def settle(self) -> None:
        """Waits until no row is copied into pages any more."""
        if (event := self._last_write) is not None:
            event.synchronize()

    def close(self) -> None:
        """Waits for all copies: their rows are about to go."""
        self._in.synchronize()
        self._out.synchronize()

    def read_layer(self, name: str, moves: Sequence[Move], host: HostRows) -> None:
        """Copies a layer while the next ones are computed, if there are many blocks."""
        if sum(len(move.rows) for move in moves) < _MANY_BLOCKS:
            return
        self._said[name] = self._said.get(name, 0) + 1
        if self._said[name] == 1:
            self._send([layer for layer in self.layers if layer.name == name], moves, host)

    def read(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        """Copies layers that are not copied yet, or were written again since. Later work on the GPU waits for the copies."""
        said, self._said = self._said, {}
        self._send([layer for layer in self.layers if said.get(layer.name) != 1], moves, host)
        with current(self._device):
            over = self._out.record_event()
            torch.cuda.current_stream().wait_event(over)  # the engine may give these pages to other requests
        return lambda: bool(over.query())

    def _send(self, layers: Sequence[LayerPages], moves: Sequence[Move], host: HostRows) -> None:
        numbers = _numbers(moves)
        with current(self._device):
            self._out.wait_stream(torch.cuda.current_stream())
            self._out.wait_stream(self._in)  # it may still read rows that belong to another request now
            with torch.cuda.stream(self._out):
                for layer in layers:
                    self._copy(layer, numbers, host, to_host=True)

    def _copy(self, layer: LayerPages, numbers: _Numbers, host: HostRows, *, to_host: bool) -> None:
        """On the current stream."""
        start = layer.start
        for piece in layer.pieces:
            end = start + piece.shape[1]
            _copy_piece(piece, host, slice(start, end), *numbers[layer.group], to_host=to_host)
            start = end


def _numbers(moves: Sequence[Move]) -> _Numbers:
    """All pages and rows of each group, without those that have left their window."""
    rows: Int32Array = np.array([row for move in moves for row in move.rows], np.int32)
    numbers = []
    for group in range(len(moves[0].pages)):
        pages: Int32Array = np.array([page for move in moves for page in move.pages[group]], np.int32)
        there = pages != NO_PAGE
        numbers.append((pages[there], rows[there]))
    return numbers


def _copy_piece(
    piece: Tensor, host: HostRows, part: slice, pages: Int32Array, rows: Int32Array, *, to_host: bool
) -> None:
    """Between pages of a piece and its part of each row."""
    if not len(pages):
        return
    ours = host.array[:, part]
    here = np.uint64(ours.ctypes.data) + rows.astype(np.uint64) * np.uint64(ours.strides[0])
    there = np.uint64(piece.data_ptr()) + pages.astype(np.uint64) * np.uint64(piece.stride(0))
    sizes = np.full(len(pages), piece.shape[1], np.uint64)
    sources, targets = (there, here) if to_host else (here, there)
    if host.is_pinned and copy_places(sources, targets, sizes):
        return
    for page, row in zip(pages.tolist(), rows.tolist(), strict=True):
        place = torch.from_numpy(ours[row])
        target, source = (place, piece[page]) if to_host else (piece[page], place)
        target.copy_(source, non_blocking=True)
