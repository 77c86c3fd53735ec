"""Pages on a GPU: copies go over the link on streams of their own, and the CPU does not wait for them.

loads    before what the step computes. Layer by layer beside it, they cost more than they gain: docs/decisions
stores   after the step; much of one is copied layer by layer, while the next layers are computed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from kvpool.integrations.connector.engine_pages import EnginePages, HostRows, LayerPages, Move
from kvpool.integrations.connector.step_orders import NO_PAGE
from kvpool.kernels.device import current
from kvpool.pools.arrays import Int32Array
from kvpool.storage.dma import copy_places

_Numbers = list[tuple[Int32Array, Int32Array]]  # of each group: pages, and their rows
_MANY_BLOCKS = 64  # a store of fewer is copied at the end of the step: each layer's turn costs time on the CPU


class LinkedPages(EnginePages):
    """What `EnginePages` does, on a GPU. Used from the thread that computes; `settle` from any."""

    def __init__(
        self, layers: Mapping[str, Tensor], num_pages: int, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        super().__init__(layers, num_pages, groups)
        self.gpu = self._device = self.layers[0].pieces[0].device
        with current(self._device):
            self._in: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._out: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._last_write: torch.cuda.Event | None = None
        self._said: dict[str, int] = {}  # how often layers said in this step that they have written their pages

    def write(self, moves: Sequence[Move], host: HostRows) -> None:
        """Copies rows into pages, behind everything that was given to the GPU so far; what comes next there waits for it."""
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
        """Copies a layer while the next ones are computed, if there is much of it."""
        if sum(len(move.rows) for move in moves) < _MANY_BLOCKS:
            return
        self._said[name] = self._said.get(name, 0) + 1
        if self._said[name] == 1:
            self._send([layer for layer in self.layers if layer.name == name], moves, host)

    def read(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        """Copies the layers that were not, or that have written again since; what comes next on the GPU waits for it."""
        said, self._said = self._said, {}
        self._send([layer for layer in self.layers if said.get(layer.name) != 1], moves, host)
        with current(self._device):
            over = self._out.record_event()
            torch.cuda.current_stream().wait_event(over)  # the engine may give these pages to others
        return lambda: bool(over.query())

    def _send(self, layers: Sequence[LayerPages], moves: Sequence[Move], host: HostRows) -> None:
        numbers = _numbers(moves)
        with current(self._device):
            self._out.wait_stream(torch.cuda.current_stream())
            self._out.wait_stream(self._in)  # which may still read rows that have another owner now
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
