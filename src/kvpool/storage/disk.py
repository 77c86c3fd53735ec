"""DiskStore: the bytes of one pool in one preallocated file, read and written block by block from several threads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool.checks import check_int
from kvpool.config import PoolSpec, Tier
from kvpool.config.layers import MAX_BLOCKS
from kvpool.errors import InvalidArgumentError, StorageMemoryError, TransferError
from kvpool.pools.arrays import Int32Array

ByteRows = npt.NDArray[np.uint8]
_THREADS = 4


class DiskStore:
    """A file of `num_blocks * block_bytes` bytes in `directory`; it has no name and goes away with the process.

    What it holds is only found through the manager in memory, so nothing is lost with it. Space is reserved at once: a
    disk that is full says so here and not in the middle of an eviction.
    """

    def __init__(self, pool: PoolSpec, num_blocks: int | None = None, directory: Path | str | None = None) -> None:
        self.pool = pool.index
        self.tier = Tier.DISK
        self.block_bytes = pool.block_bytes
        self.num_blocks = 0
        self._directory = Path(tempfile.gettempdir()) if directory is None else Path(directory)
        self._file = -1
        self._threads: ThreadPoolExecutor | None = None
        self.resize(pool.num_blocks[Tier.DISK] if num_blocks is None else num_blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved on the disk."""
        return self.num_blocks * self.block_bytes

    def resize(self, num_blocks: int) -> None:
        """Reserves space for more blocks, or gives some back; the blocks that remain keep their bytes."""
        check_int(num_blocks, "num_blocks", 0, MAX_BLOCKS, InvalidArgumentError)
        if self._file < 0 and num_blocks:
            self._open()
        if num_blocks > self.num_blocks:
            self._reserve(num_blocks)
        elif self._file >= 0:
            os.ftruncate(self._file, num_blocks * self.block_bytes)
        self.num_blocks = num_blocks

    def _open(self) -> None:
        try:
            self._file, path = tempfile.mkstemp(prefix="kvpool-", suffix=".blocks", dir=self._directory)
        except OSError as error:
            raise StorageMemoryError(
                f"no file for disk blocks can be made in {str(self._directory)!r}: {error.strerror}; name another directory"
            ) from None
        os.unlink(path)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvpool-disk")

    def _reserve(self, num_blocks: int) -> None:
        start, size = self.num_bytes, (num_blocks - self.num_blocks) * self.block_bytes
        try:
            os.posix_fallocate(self._file, start, size)
        except OSError as error:
            os.ftruncate(self._file, start)
            usage = os.statvfs(self._directory)
            fitting = self.num_blocks + usage.f_bavail * usage.f_frsize // self.block_bytes
            raise StorageMemoryError(
                f"{num_blocks} blocks of {self.block_bytes} bytes do not fit on the disk of {str(self._directory)!r} "
                f"({error.strerror}): about {fitting} would; lower disk_blocks or disk_bytes"
            ) from None

    def write(self, blocks: Int32Array, rows: list[ByteRows]) -> None:
        """Stores `rows[i]`, the bytes of one block each, as block `blocks[i]`."""
        self._each(self._write_block, blocks, rows)

    def read(self, blocks: Int32Array, rows: list[ByteRows]) -> None:
        """Reads block `blocks[i]` into `rows[i]`."""
        self._each(self._read_block, blocks, rows)

    def _each(self, move: Callable[[int, ByteRows], None], blocks: Int32Array, rows: list[ByteRows]) -> None:
        if not len(blocks):
            return
        assert self._threads is not None
        try:
            list(self._threads.map(move, blocks.tolist(), rows))
        except OSError as error:
            raise TransferError(f"the disk of {str(self._directory)!r} failed: {error}") from error

    def _write_block(self, block: int, row: ByteRows) -> None:
        start, view = block * self.block_bytes, row.data
        while view.nbytes:
            done = os.pwrite(self._file, view, start)
            start, view = start + done, view[done:]

    def _read_block(self, block: int, row: ByteRows) -> None:
        start, view = block * self.block_bytes, row.data
        while view.nbytes:
            done = os.preadv(self._file, [view], start)
            if not done:
                raise OSError(f"block {block} ends {view.nbytes} bytes early")
            start, view = start + done, view[done:]

    def close(self) -> None:
        """Gives the space back; the store is empty afterwards."""
        if self._file >= 0:
            assert self._threads is not None
            self._threads.shutdown()
            os.close(self._file)
            self._file, self._threads, self.num_blocks = -1, None, 0

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()
