"""GPUs by name: what their data sheets say. Plans and simulations multiply these by the efficiencies below."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.errors import InvalidArgumentError

COMPUTE_EFFICIENCY = 0.5  # of the peak that long prefills reach
MEMORY_EFFICIENCY = 0.75  # of the bandwidth that decoding reaches
LINK_EFFICIENCY = 0.8  # of the host link, for large pinned copies
DISK_BYTES_PER_SECOND = 6e9  # one good NVMe drive


class GPU(NamedTuple):
    """Memory in bytes; dense peak FLOP/s for 16-bit and 8-bit floats; bytes per second of memory and host link (one way)."""

    name: str
    memory_bytes: int
    flops_16bit: float
    flops_8bit: float
    memory_bytes_per_second: float
    link_bytes_per_second: float

    def flops(self, weight_bytes: float) -> float:
        """Peak for weights of this size per element."""
        return self.flops_8bit if weight_bytes <= 1 else self.flops_16bit


_GB = 10**9
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("t4", 16 * _GB, 65e12, 65e12, 0.32e12, 16e9),
        GPU("l4", 24 * _GB, 121e12, 242e12, 0.30e12, 32e9),
        GPU("a10", 24 * _GB, 125e12, 125e12, 0.60e12, 32e9),
        GPU("rtx4090", 24 * _GB, 165e12, 330e12, 1.01e12, 32e9),
        GPU("l40s", 48 * _GB, 362e12, 733e12, 0.86e12, 32e9),
        GPU("a100-40gb", 40 * _GB, 312e12, 312e12, 1.56e12, 32e9),
        GPU("a100", 80 * _GB, 312e12, 312e12, 2.04e12, 32e9),
        GPU("h100", 80 * _GB, 989e12, 1979e12, 3.35e12, 64e9),
        GPU("h200", 141 * _GB, 989e12, 1979e12, 4.8e12, 64e9),
        GPU("b200", 180 * _GB, 2250e12, 4500e12, 8.0e12, 64e9),
        GPU("mi300x", 192 * _GB, 1307e12, 2615e12, 5.3e12, 64e9),
    )
}


def find_gpu(name: str) -> GPU:
    """A GPU by its name, in any case, with or without dashes."""
    key = name.strip().lower().replace("_", "-").replace(" ", "")
    found = GPUS.get(key) or GPUS.get(key.replace("-", ""))
    if found is None:
        raise InvalidArgumentError(f"unknown GPU {name!r}; known: {', '.join(GPUS)}")
    return found
