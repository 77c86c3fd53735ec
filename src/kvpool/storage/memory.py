"""Memory for stores: a device's, or the host's, pinned where a GPU is there to read it. Exactly the bytes asked for."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.checks import check_int, check_number
from kvpool.config.layers import ceil_div
from kvpool.errors import InvalidArgumentError, StorageMemoryError
from kvpool.kernels.layout import whole_device
from kvpool.pools.arrays import Int32Array

_PAGE = mmap.PAGESIZE
_TOUCH_THREADS = 8
_POPULATE = 23  # MADV_POPULATE_WRITE
_FOR_ALL_GPUS = 1  # cudaHostRegisterPortable
_LOCKED_AT_ONCE = 1 << 28  # a tenth of a second
log = logging.getLogger("kvpool")


def free_bytes(device: torch.device | str) -> int:
    """Bytes that can still be allocated: of a GPU as its driver says, of the host as the kernel estimates."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_budget(device: torch.device | str = "cuda", fraction: float = 0.9, reserve_bytes: int = 0) -> int:
    """Bytes to give the GPU tier: `fraction` of what is free on `device` now, less `reserve_bytes` (activations).

    Call it when the model's weights are loaded, and pass the result on; several ranks pass the smallest of theirs:

        config = KVCacheConfig(layers, gpu_bytes=measure_budget("cuda:0", 0.9))
    """
    check_number(fraction, "fraction", "a fraction above 0 and up to 1")
    if not 0 < fraction <= 1:
        raise InvalidArgumentError(f"fraction={fraction} must be above 0 and up to 1")
    check_int(reserve_bytes, "reserve_bytes", 0, 2**63 - 1, InvalidArgumentError)
    return max(0, int(free_bytes(device) * fraction) - reserve_bytes)


def allocate_device(device: torch.device, num_blocks: int, block_bytes: int) -> Tensor:
    """uint8 [num_blocks, block_bytes] on a GPU, or an error that says how many blocks would have fit."""
    try:
        return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        with whole_device:  # torch refuses this while an engine captures
            torch.cuda.empty_cache()
        fitting = free_bytes(device) // block_bytes
        raise StorageMemoryError(
            f"{num_blocks} blocks of {block_bytes} bytes do not fit on {device}: about {fitting} blocks would; "
            f"lower gpu_blocks, gpu_bytes or gpu_fraction"
        ) from None


class PageLocks:
    """Stretches of memory that this process has locked for its GPUs; what several users lock is locked once."""

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._guard = threading.Lock()

    def lock(self, address: int, size: int) -> bool:
        """One more user; False if the system refuses."""
        with self._guard:
            if not self._users[address] and int(_cudart().cudaHostRegister(address, size, _FOR_ALL_GPUS)):
                return False
            self._users[address] += 1
            return True

    def unlock(self, address: int) -> None:
        """One user less."""
        with self._guard:
            self._users[address] -= 1
            if not self._users[address]:
                _cudart().cudaHostUnregister(address)


page_locks = PageLocks()


class PartLocks:
    """Page-locks a memory for GPUs part by part, from its begin to its end, in a thread of its own.

    With a `gpu`, the pages are got from the system first, by threads that run on `cpus` if any are named.
    """

    def __init__(
        self,
        driver: PageLocks,
        memory: npt.NDArray[np.uint8],
        part_bytes: int,
        gpu: torch.device | None = None,
        cpus: set[int] | None = None,
    ) -> None:
        self.memory = memory
        self._driver = driver
        self._part_bytes = part_bytes
        self._gpu = gpu
        self._cpus = cpus or set()
        self._num_locked = 0  # bytes
        self._is_over = False  # the thread has ended, or must end
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._lock_all, name="kvpool-lock-memory", daemon=True)
        self._thread.start()

    @property
    def is_locked(self) -> bool:
        """Whether all of it is locked."""
        return self.covers(self.memory.nbytes)

    def covers(self, num_bytes: int) -> bool:
        """Whether so many bytes from the begin on are locked."""
        with self._changed:
            return self._num_locked >= num_bytes

    def wait(self, num_bytes: int) -> bool:
        """Waits until so many bytes from the begin on are locked; False if they never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_locked >= num_bytes or self._is_over)
            return self._num_locked >= num_bytes

    def close(self) -> None:
        """Unlocks everything."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():  # which may be the one that drops the last reference
            self._thread.join()
        with self._changed:
            for start in range(0, self._num_locked, self._part_bytes):
                self._driver.unlock(self.memory.ctypes.data + start)
            self._num_locked = 0

    def _lock_all(self) -> None:
        began, whole = time.perf_counter(), self.memory.nbytes
        try:
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)  # of this thread, and of those that it starts
            with nullcontext() if self._gpu is None else torch.cuda.device(self._gpu):
                for start in range(0, whole, self._part_bytes):
                    if self._is_over or not self._lock(start, min(self._part_bytes, whole - start)):
                        return
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
        if (seconds := time.perf_counter() - began) > 2.0:
            log.info("locked %.1f GiB of host memory for the GPU in %.1f s, beside other work", whole / 2**30, seconds)

    def _lock(self, start: int, size: int) -> bool:
        if self._gpu is not None:
            _touch(self.memory[start : start + size])
        if not self._driver.lock(self.memory.ctypes.data + start, size):
            warnings.warn(
                f"{self.memory.nbytes - start} bytes of host memory could not be locked for the GPU: copies of what lies "
                f"there will be several times slower; raise the limit of locked memory (ulimit -l) or lower host_bytes",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        with self._changed:
            self._num_locked += size
            self._changed.notify_all()
        return True


class LinkedMemory:
    """Memory of others that is mapped into this process, page-locked part by part in the background, for a GPU to read.

    It knows one memory at a time; a new one takes the place of the one before.
    """

    def __init__(self, driver: PageLocks) -> None:
        self._driver = driver
        self._locks: PartLocks | None = None
        self._guard = threading.Lock()
        self._is_closed = False

    def has(self, memory: memoryview, part_bytes: int, views: Sequence[memoryview]) -> bool:
        """Whether all these views can be copied now. They are of `memory`, and none crosses a multiple of `part_bytes`.

        A memory that is new begins to be locked.
        """
        whole = np.frombuffer(memory, np.uint8)
        with self._guard:
            if self._is_closed:
                return False
            known = None if self._locks is None else self._locks.memory
            if known is None or (known.ctypes.data, known.nbytes) != (whole.ctypes.data, whole.nbytes):
                self._forget()
                self._locks = PartLocks(self._driver, whole, ceil_div(_LOCKED_AT_ONCE, part_bytes) * part_bytes)
            assert self._locks is not None
            ends = [np.frombuffer(view, np.uint8).ctypes.data + view.nbytes for view in views if view.nbytes]
            return self._locks.covers(max(ends, default=whole.ctypes.data) - whole.ctypes.data)

    @property
    def is_locked(self) -> bool:
        """Whether all of a memory is locked."""
        with self._guard:
            return self._locks is not None and self._locks.is_locked

    def _forget(self) -> None:
        if self._locks is not None:
            self._locks.close()
            self._locks = None

    def close(self) -> None:
        """Unlocks everything."""
        with self._guard:
            self._is_closed = True
            self._forget()


class HostMemory:
    """uint8 [num_blocks, block_bytes] of host memory; page-locked if `gpu` is given and the system allows it.

    Threads that run beside the GPU get the pages first, so that Linux places them on its NUMA node. A system that
    refuses to lock so much memory (`ulimit -l`, containers) gets ordinary memory and a warning. Locking takes a third of a
    second for each GiB. With `in_parts`, a thread does it part by part: `lock` waits for the blocks that it is given.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, gpu: torch.device | None = None, *, in_parts: bool = False
    ) -> None:
        self._locks: PartLocks | None = None
        self.part_blocks = max(1, num_blocks)  # that are locked together: CUDA refuses a copy that goes beyond them
        num_bytes = num_blocks * block_bytes
        if not num_bytes:
            self.tensor = torch.empty((num_blocks, block_bytes), dtype=torch.uint8)
            return
        memory = _map(num_blocks, block_bytes)
        if gpu is None:
            # Huge pages, where the system has them, for the CPU's sake
            with contextlib.suppress(AttributeError, OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        self.tensor = flat.view(num_blocks, block_bytes)
        if gpu is not None:
            pages = math.lcm(block_bytes, _PAGE)  # a part begins with a page, and with a block
            part_bytes = ceil_div(_LOCKED_AT_ONCE, pages) * pages if in_parts else num_bytes
            self.part_blocks = part_bytes // block_bytes
            self._locks = PartLocks(page_locks, flat.numpy(), part_bytes, gpu, _cpus_near(gpu))
            self._unlock = weakref.finalize(self, self._locks.close)
            if not in_parts:
                self._locks.wait(num_bytes)

    @property
    def pinned(self) -> bool:
        """Whether all of it is page-locked."""
        return self._locks is not None and self._locks.is_locked

    def lock(self, blocks: Int32Array) -> bool:
        """Waits until these blocks are page-locked. False: the system refused, or no GPU was given."""
        if self._locks is None or not len(blocks):
            return False
        return self._locks.wait((int(blocks.max()) + 1) * self.tensor.shape[1])

    def close(self) -> None:
        """Unlocks the pages now instead of when the object dies."""
        if self._locks is not None:
            self._unlock()
            self._locks = None


def _map(num_blocks: int, block_bytes: int) -> mmap.mmap:
    """Fresh pages. More than there is memory for is refused here: Linux would promise it and kill the process later."""
    available = free_bytes("cpu")
    try:
        if num_blocks * block_bytes > available:
            raise OSError("not enough memory")
        return mmap.mmap(-1, num_blocks * block_bytes)
    except OSError as error:
        raise StorageMemoryError(
            f"{num_blocks} blocks of {block_bytes} bytes do not fit into host memory ({error}): about "
            f"{available // block_bytes} blocks would; lower host_blocks or host_bytes, or kv_bytes, gpu_blocks or gpu_bytes "
            f"where the model runs on the CPU"
        ) from None


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _cpus_near(gpu: torch.device) -> set[int]:
    """CPUs of the GPU's NUMA node, as far as Linux says and this process may use them; empty: unknown."""
    properties: Any = torch.cuda.get_device_properties(gpu)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    listing = Path("/sys/bus/pci/devices") / address / "local_cpulist"
    try:
        ranges = listing.read_text(encoding="ascii").strip().split(",")
        cpus = {cpu for r in ranges if r for cpu in range(int(r.split("-")[0]), int(r.split("-")[-1]) + 1)}
        return cpus & os.sched_getaffinity(0)
    except (OSError, ValueError, AttributeError):
        return set()


def _touch(memory: npt.NDArray[np.uint8]) -> None:
    """Gets the pages from the system, by several threads. What they hold stays: somebody may use them already."""
    share = ceil_div(memory.nbytes, _TOUCH_THREADS * _PAGE) * _PAGE

    def touch(start: int) -> None:
        place, size = memory.ctypes.data + start, min(share, memory.nbytes - start)
        _libc().madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), _POPULATE)  # if refused, locking does it

    with ThreadPoolExecutor(_TOUCH_THREADS) as threads:
        list(threads.map(touch, range(0, memory.nbytes, share)))


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
