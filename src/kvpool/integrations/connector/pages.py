"""The engine's pages as opaque bytes, and the host's rows that hold copies of them.

A page is the memory of one block of tokens in every layer. Nothing here interprets the bytes: layouts differ between engines,
versions and attention backends, but a copy to the same place of the same layout is always correct.

On a GPU (`LinkedPages`), copies run on streams of their own, beside what the GPU computes, and nobody waits for them:

    loads    run behind the work that the GPU had when the step began. The request waits outside of steps. What a load
             displaces is copied on the same stream, so everything of it happens in order.
    stores   run behind the work that the GPU has. Work that would write their pages waits for them (`fence`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.errors import ConfigError, TransferError
from kvpool.integrations.connector.orders import NO_PAGE
from kvpool.kernels.layout import current
from kvpool.pools.arrays import Int32Array
from kvpool.storage.dma import Places, copy_places
from kvpool.storage.memory import HostMemory, free_bytes
from kvpool.tiers.transport.staging import Bytes, page_aligned

Layer = Tensor | Sequence[Tensor]
_Parts = list[tuple[Bytes, slice]]
_PARTS = 4  # the most pieces of a page per layer: keys, values, and the scales of both


class Part(NamedTuple):
    """Bytes of a page that lie side by side: their group, where they begin in a row, and uint8 [page, byte]."""

    group: int
    start: int
    bytes: Tensor

    @property
    def width(self) -> int:
        """Bytes of one page."""
        return self.bytes.shape[1]


class Move(NamedTuple):
    """Pages of each group and their rows. A page that is not moved is `NO_PAGE`.

    `is_back`: among moves of rows into pages, this one copies its pages into its rows.
    """

    pages: Sequence[Sequence[int]]
    rows: Sequence[int]
    is_back: bool = False


_is_back = attrgetter("is_back")


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
    copies_later = False  # copies go on when the calls below have returned

    def __init__(
        self, layers: Mapping[str, Layer], num_pages: int, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        named = [list(layers)] if groups is None else [list(group) for group in groups]
        self.parts: list[Part] = []
        self.row_bytes = 0
        described: dict[str, list[Any]] = {}
        for number, group in enumerate(named):
            for name in group:
                pieces = _pieces(name, layers[name], num_pages)
                described[name] = [[name, str(each.dtype), *_inside(each)] for each in pieces]
                for piece in pieces:
                    self._add(number, _as_bytes(piece))
        self.num_pages = num_pages
        self.num_groups = len(named)
        in_order = [each for name in layers if name in described for each in described[name]]
        self.layout = hashlib.sha256(
            json.dumps(in_order if len(named) == 1 else [in_order, named]).encode()
        ).hexdigest()

    def _add(self, group: int, piece: Tensor) -> None:
        """Appends a piece to the row. If it follows the last one in the memory of every page, both become one part."""
        start = self.row_bytes
        self.row_bytes += piece.shape[1]
        if self.parts and self.parts[-1].group == group:
            last = self.parts[-1]
            width, stride = last.width + piece.shape[1], piece.stride(0)
            follows = last.bytes.data_ptr() + last.width == piece.data_ptr() and last.bytes.stride(0) == stride
            if follows and width <= stride and _memory(last.bytes) == _memory(piece):
                both = torch.as_strided(last.bytes, (piece.shape[0], width), (stride, 1))
                self.parts[-1] = Part(group, last.start, both)
                return
        self.parts.append(Part(group, start, piece))

    def write(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        """Begins to copy rows into pages, one move after the other. Returns a function that says whether the bytes are there.

        After a `TransferError` some of them may be missing, and none is being copied any more.
        """
        self._copy_in_turns(moves, host)
        return nothing_left

    def read(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        """Begins to copy written pages into rows. Returns a function that says whether the bytes are there."""
        self._copy(moves, host, to_host=True)
        return nothing_left

    def begin_step(self, *, fences_loads: bool) -> None:
        """Pages that `write` gets from now on belonged to others only in work that the engine has ordered already.

        With `fences_loads`, `read` may still copy them.
        """

    def fence(self) -> None:
        """Work that the engine orders from now on may write pages that `read` still copies, so it must come behind."""

    def settle(self) -> None:
        """Waits until `read` copies nothing any more."""

    def close(self) -> None:
        """Waits for all copies, because their rows are about to be freed."""

    def _copy_in_turns(self, moves: Sequence[Move], host: HostRows) -> None:
        for is_back, some in groupby(moves, _is_back):
            self._copy(list(some), host, to_host=is_back)

    def _copy(self, moves: Sequence[Move], host: HostRows, *, to_host: bool) -> None:
        for page, whole, pieces in self._places(moves, host):
            for piece, part in pieces:
                if to_host:
                    whole[part] = piece[page]
                else:
                    piece[page] = whole[part]

    def _places(self, moves: Sequence[Move], host: HostRows) -> Iterator[tuple[int, Bytes, _Parts]]:
        """Each page that is to be moved, its row, and the pieces of its group."""
        for move in moves:
            for of_group, pieces in zip(move.pages, self._arrays, strict=True):
                for page, row in zip(of_group, move.rows, strict=True):
                    if page != NO_PAGE:
                        yield page, host.slices[row], pieces

    @cached_property
    def _arrays(self) -> list[_Parts]:
        """The parts of each group, in pages and in a row, as numpy arrays, whose slices are copied fastest."""
        groups: list[_Parts] = [[] for _ in range(self.num_groups)]
        for part in self.parts:
            groups[part.group].append((part.bytes.numpy(), slice(part.start, part.start + part.width)))
        return groups


def _pieces(name: str, layer: Layer, num_pages: int) -> list[Tensor]:
    """One layer as tensors [page, ...] whose pages are dense, in whatever order their dimensions lie."""
    if not isinstance(layer, Tensor):
        return [piece for part in layer for piece in _pieces(name, part, num_pages)]
    if layer.shape[0] == num_pages:
        parts = [layer]
    elif layer.dim() > 1 and layer.shape[0] <= _PARTS and layer.shape[1] == num_pages:
        parts = list(layer)
    elif layer.shape[0] % num_pages == 0:  # the kernels use smaller pages than the scheduler
        parts = [layer.unflatten(0, (num_pages, -1))]  # type: ignore[no-untyped-call]
    else:
        raise ConfigError(
            f"the cache of {name} has the shape {tuple(layer.shape)}, in which {num_pages} pages cannot be found"
        )
    for part in parts:
        if not _is_dense(part):
            raise ConfigError(
                f"a page of {name} does not lie in one piece of memory: shape {tuple(part.shape)}, strides {part.stride()}"
            )
    return parts


def _is_dense(part: Tensor) -> bool:
    """Whether each page is one stretch of memory that nothing else lies in."""
    size = 1
    for stride, length in sorted(zip(*reversed(_inside(part)), strict=True)):
        if length > 1:
            if stride != size:
                return False
            size *= length
    return part.shape[0] == 1 or part.stride(0) >= size


def _inside(part: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of one page: the order of its bytes, wherever pages lie."""
    return list(part.shape[1:]), list(part.stride()[1:])


def _as_bytes(part: Tensor) -> Tensor:
    width, stride = part[0].numel(), part.stride(0)
    flat = torch.as_strided(part, (part.shape[0], width), (stride, 1))
    return flat.view(torch.uint8) if part.element_size() > 1 else flat


def _memory(part: Tensor) -> int:
    return part.untyped_storage().data_ptr()


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


class _Places(NamedTuple):
    """Where the parts of one group lie: addresses of page 0, bytes from page to page, starts in a row, and widths."""

    addresses: Places
    strides: Places
    starts: Places
    widths: Places


class LinkedPages(EnginePages):
    """`EnginePages` for a GPU. Only the thread that computes uses it."""

    copies_later = True

    def __init__(
        self, layers: Mapping[str, Layer], num_pages: int, groups: Sequence[Sequence[str]] | None = None
    ) -> None:
        super().__init__(layers, num_pages, groups)
        self.gpu = self._device = self.parts[0].bytes.device
        self._groups = [_places_of(part for part in self.parts if part.group == n) for n in range(self.num_groups)]
        with current(self._device):
            self._in: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._out: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._before: torch.cuda.Event | None = None  # what the GPU had to do when the step began
        self._last_read: torch.cuda.Event | None = None

    def begin_step(self, *, fences_loads: bool) -> None:
        """Loads from now on wait for the work that the GPU has by now, and not for what the step orders."""
        with current(self._device):
            self._before = torch.cuda.current_stream().record_event()
            if fences_loads and self._last_read is not None:
                self._in.wait_event(self._last_read)

    def fence(self) -> None:
        """What the GPU gets to do from now on waits for all pages that are being read."""
        if self._last_read is not None:
            with current(self._device):
                torch.cuda.current_stream().wait_event(self._last_read)

    def write(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        """Copies rows into pages, beside what the GPU computes."""
        with current(self._device):
            if self._before is None:
                self._in.wait_stream(torch.cuda.current_stream())
            else:
                self._in.wait_event(self._before)
            try:
                with torch.cuda.stream(self._in):
                    self._copy_in_turns(moves, host)
            except TransferError:  # the engine computes these pages itself now, behind what was begun
                torch.cuda.current_stream().wait_stream(self._in)
                raise
            over = self._in.record_event()
        return lambda: bool(over.query())

    def read(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        """Copies pages into rows when the GPU has done the work that it has by now."""
        with current(self._device):
            self._out.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._out):
                self._copy(moves, host, to_host=True)
            over = self._last_read = self._out.record_event()
        return lambda: bool(over.query())

    def settle(self) -> None:
        """Waits for copies to the host."""
        self._out.synchronize()

    def close(self) -> None:
        """Waits for all copies: their rows are about to go."""
        self._in.synchronize()
        self._out.synchronize()

    def _copy(self, moves: Sequence[Move], host: HostRows, *, to_host: bool) -> None:
        """On the current stream."""
        rows: Int32Array = np.array([row for move in moves for row in move.rows], np.int32)
        for number, places in enumerate(self._groups):
            pages: Int32Array = np.array([page for move in moves for page in move.pages[number]], np.int32)
            there = pages != NO_PAGE
            if not there.any():
                continue
            if not (host.is_pinned and _copy_at_once(places, pages[there], host, rows[there], to_host=to_host)):
                _copy_each([part for part in self.parts if part.group == number], pages, host, rows, to_host=to_host)


def _places_of(parts: Iterable[Part]) -> _Places:
    told = [(part.bytes.data_ptr(), part.bytes.stride(0), part.start, part.width) for part in parts]
    return _Places(*(np.array(column, np.uint64) for column in zip(*told, strict=True)))


def _copy_at_once(places: _Places, pages: Int32Array, host: HostRows, rows: Int32Array, *, to_host: bool) -> bool:
    """All parts of all pages, page after page, by the driver's batches; False if the driver has none."""
    first, width = np.uint64(host.array.ctypes.data), np.uint64(host.array.strides[0])
    here = (first + rows.astype(np.uint64)[:, None] * width + places.starts).ravel()
    there = (places.addresses + pages.astype(np.uint64)[:, None] * places.strides).ravel()
    sizes = np.tile(places.widths, len(pages))
    return copy_places(there, here, sizes) if to_host else copy_places(here, there, sizes)


def _copy_each(parts: Sequence[Part], pages: Int32Array, host: HostRows, rows: Int32Array, *, to_host: bool) -> None:
    for page, row in zip(pages.tolist(), rows.tolist(), strict=True):
        if page == NO_PAGE:
            continue
        for part in parts:
            place = torch.from_numpy(host.array[row, part.start : part.start + part.width])
            target, source = (place, part.bytes[page]) if to_host else (part.bytes[page], place)
            target.copy_(source, non_blocking=True)
