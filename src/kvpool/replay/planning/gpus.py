"""GPUs by name: what their makers promise, what was measured where we had one, and how much of a promise to expect."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.errors import InvalidArgumentError

# What to expect of a data sheet. Memory and link are what kvpool's own engine reached on an H200 (docs/benchmarks-engine.md):
# copies move 4.25 of 4.8 TB/s, and a compiled decode step takes 1.36 times as long as reading its bytes at that speed;
# swaps move 54.5 of 64 GB/s. Compute was not measured: half of the dense peak is what long prefills usually reach.
COMPUTE_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.65
LINK_EFFICIENCY = 0.85
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
        """What prefill may be expected to reach with weights of this size per element."""
        return COMPUTE_EFFICIENCY * (self.flops_8bit if weight_bytes <= 1 else self.flops_16bit)

    @property
    def decode_bytes_per_second(self) -> float:
        """What decoding may be expected to read."""
        return MEMORY_EFFICIENCY * self.memory_bytes_per_second

    @property
    def swap_bytes_per_second(self) -> float:
        """What large pinned copies to or from the host may be expected to reach."""
        return LINK_EFFICIENCY * self.link_bytes_per_second


# Data-sheet figures, as published in NVIDIA's data sheets of the T4, L4, A10, A100, L40S, H100 SXM, H200 SXM and HGX B200, in
# its Ada white paper (RTX 4090), and in AMD's data sheet of the MI300X; checked in November 2026 against reprints of them.
# Tensor figures are dense: where a data sheet gives them with sparsity (L4, H100, H200, B200), they are halved. 8-bit is FP8;
# GPUs without it compute 8-bit weights in 16 bits. Links: PCIe 3 x16 16, PCIe 4 x16 32, PCIe 5 x16 64 GB/s one way.
_GB = 10**9
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("t4", 16 * _GB, 65e12, 65e12, 0.32e12, 16e9),
        GPU("l4", 24 * _GB, 121e12, 242e12, 0.30e12, 32e9),
        GPU("a10", 24 * _GB, 125e12, 125e12, 0.60e12, 32e9),
        GPU("rtx4090", 24 * _GB, 165e12, 330e12, 1.01e12, 32e9),
        GPU("l40s", 48 * _GB, 362e12, 733e12, 0.864e12, 32e9),
        GPU("a100-40gb", 40 * _GB, 312e12, 312e12, 1.555e12, 32e9),
        GPU("a100", 80 * _GB, 312e12, 312e12, 2.04e12, 32e9),
        GPU("h100", 80 * _GB, 989e12, 1979e12, 3.35e12, 64e9),
        GPU("h200", 141 * _GB, 989e12, 1979e12, 4.8e12, 64e9),
        GPU("b200", 180 * _GB, 2250e12, 4500e12, 7.7e12, 64e9),
        GPU("mi300x", 192 * _GB, 1307e12, 2615e12, 5.3e12, 64e9),
    )
}


def find_gpu(name: str) -> GPU:
    """A GPU by its name, in any case, with or without dashes."""
    key = name.strip().lower().replace("_", "-").replace(" ", "")
    found = GPUS.get(key) or GPUS.get(key.replace("-", ""))
    if found is None:
        raise InvalidArgumentError(
            f"unknown GPU {name!r}; known: {', '.join(GPUS)}; or measure yours: kvpool bench --json FILE, then --costs FILE"
        )
    return found
