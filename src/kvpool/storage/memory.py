"""Memory for stores: a device's, or the host's, pinned where a GPU is there to read it. Exactly the bytes asked for."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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

_PAGE = mmap.PAGESIZE
_TOUCH_THREADS = 8
_FOR_ALL_GPUS = 1  # cudaHostRegisterPortable
_LOCKED_AT_ONCE = 1 << 28  # a tenth of a second


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


class HostMemory:
    """uint8 [num_blocks, block_bytes] of host memory; page-locked if `gpu` is given and the system allows it.

    Pages are first touched by threads that run beside the GPU, so that Linux places them on its NUMA node. A system that
    refuses to lock so much memory (`ulimit -l`, containers) gets ordinary memory and a warning; `pinned` says which.
    """

    def __init__(self, num_blocks: int, block_bytes: int, gpu: torch.device | None = None) -> None:
        self.pinned = False
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
            _touch(flat, _cpus_near(gpu))
            self.pinned = self._pin(flat, gpu)

    def _pin(self, flat: Tensor, gpu: torch.device) -> bool:
        with torch.cuda.device(gpu):
            status = int(_cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0))
        if status:
            warnings.warn(
                f"{flat.numel()} bytes of host memory could not be pinned (CUDA error {status}): transfers will be several "
                f"times slower; raise the limit of locked memory (ulimit -l) or lower host_bytes",
                RuntimeWarning,
                stacklevel=3,
            )
            return False
        self._unpin = weakref.finalize(self, _unpin, flat)
        return True

    def close(self) -> None:
        """Unlocks the pages now instead of when the object dies."""
        if self.pinned:
            self._unpin()
            self.pinned = False


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


class LinkedMemory:
    """Memory of others that is mapped into this process, page-locked part by part in the background, for a GPU to read.

    It knows one memory at a time; a new one takes the place of the one before.
    """

    def __init__(self, driver: PageLocks) -> None:
        self._driver = driver
        self._memory: npt.NDArray[np.uint8] | None = None
        self._locked: set[int] = set()  # parts, by number
        self._part_bytes = 1
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
            if self._memory is None or (self._memory.ctypes.data, self._memory.nbytes) != (
                whole.ctypes.data,
                whole.nbytes,
            ):
                self._forget()
                self._memory, self._part_bytes = whole, ceil_div(_LOCKED_AT_ONCE, part_bytes) * part_bytes
                threading.Thread(target=self._lock_all, args=(whole,), name="kvpool-lock-memory", daemon=True).start()
            addresses = np.array([np.frombuffer(view, np.uint8).ctypes.data for view in views if view.nbytes], np.int64)
            return set(((addresses - whole.ctypes.data) // self._part_bytes).tolist()) <= self._locked

    @property
    def is_locked(self) -> bool:
        """Whether all of a memory is locked."""
        with self._guard:
            return self._memory is not None and len(self._locked) == ceil_div(self._memory.nbytes, self._part_bytes)

    def _lock_all(self, whole: npt.NDArray[np.uint8]) -> None:
        size = self._part_bytes
        for number, start in enumerate(range(0, whole.nbytes, size)):
            address, length = whole.ctypes.data + start, min(size, whole.nbytes - start)
            if not self._driver.lock(address, length):
                warnings.warn(
                    f"{whole.nbytes - start} bytes of shared memory could not be locked for the GPU: what lies there is "
                    f"copied twice; raise the limit of locked memory (ulimit -l)",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return
            with self._guard:
                if self._memory is whole:
                    self._locked.add(number)
                    continue
            self._driver.unlock(address)  # another memory took its place meanwhile
            return

    def _forget(self) -> None:
        for number in self._locked:
            assert self._memory is not None
            self._driver.unlock(self._memory.ctypes.data + number * self._part_bytes)
        self._locked.clear()
        self._memory = None

    def close(self) -> None:
        """Unlocks everything."""
        with self._guard:
            self._is_closed = True
            self._forget()


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


def _unpin(flat: Tensor) -> None:
    _cudart().cudaHostUnregister(flat.data_ptr())


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


def _touch(flat: Tensor, cpus: set[int]) -> None:
    """Writes every page once, from threads that run on `cpus` where any are named."""
    size = flat.numel()
    share = ceil_div(size, _TOUCH_THREADS * _PAGE) * _PAGE

    def touch(start: int) -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # of this thread only
        ctypes.memset(flat.data_ptr() + start, 0, min(share, size - start))

    with ThreadPoolExecutor(_TOUCH_THREADS) as threads:
        list(threads.map(touch, range(0, size, share)))
