"""Staging memory: bytes between the cache and a tier wait here. It is bounded and reused."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.tiers.contract import CountedKeeper

Bytes = npt.NDArray[np.uint8]
_PAGE = mmap.PAGESIZE


class _Memory(Protocol):
    """Bytes in a row: an array, or a tensor of a device."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


_M = TypeVar("_M", bound=_Memory)


def page_aligned(num_bytes: int) -> Bytes:
    """New memory that begins at a page, as files opened with O_DIRECT need it.

    It asks Linux for huge pages: then the first write to the memory takes a sixth of the time.
    """
    size = max(num_bytes, _PAGE)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)[:num_bytes]
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets none
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:num_bytes]


@dataclass(frozen=True)
class Staged(Generic[_M]):
    """Memory on loan: `data` is as large as it was asked for."""

    data: _M
    whole: _M


class StagingMemory(Generic[_M]):
    """Lends at most `max_bytes` at a time. It keeps what comes back, and lends it again for about the same size."""

    def __init__(self, max_bytes: int, allocate: Callable[[int], _M] = page_aligned) -> None:  # type: ignore[assignment]
        self.max_bytes = max_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._idle: list[_M] = []
        self._used = 0
        self._lent = 0

    @property
    def lent_bytes(self) -> int:
        """Bytes in use."""
        return self._lent

    def take(self, num_bytes: int) -> Staged[_M] | None:
        """Memory of this size, with undefined content; None if too much is in use."""
        with self._lock:
            at = min(
                (i for i, each in enumerate(self._idle) if num_bytes <= len(each) <= 2 * num_bytes + _PAGE),
                key=lambda i: len(self._idle[i]),
                default=None,
            )
            if at is not None:
                whole = self._idle.pop(at)
                self._lent += len(whole)
                return Staged(whole[:num_bytes], whole)
            while self._idle and self._used + num_bytes > self.max_bytes:
                self._used -= len(self._idle.pop(0))
            if self._used + num_bytes > self.max_bytes:
                return None
            self._used += num_bytes
            self._lent += num_bytes
        try:
            whole = self._allocate(num_bytes)
        except BaseException:
            with self._lock:
                self._used -= num_bytes
                self._lent -= num_bytes
            raise
        return Staged(whole, whole)

    def give(self, staged: Staged[_M]) -> None:
        """Takes back memory that nobody uses any more."""
        with self._lock:
            self._lent -= len(staged.whole)
            self._idle.append(staged.whole)


class SharedStage(CountedKeeper, Generic[_M]):
    """Staging memory with several users; the last one gives it back."""

    def __init__(self, memory: StagingMemory[_M], staged: Staged[_M]) -> None:
        super().__init__()
        self.data: _M = staged.data
        self._memory = memory
        self._staged = staged

    def _end(self) -> None:
        self._memory.give(self._staged)
