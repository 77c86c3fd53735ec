"""How fast ranks add up their results on this machine: the two numbers that `kvpool plan --tensor-parallel` takes.

    python benchmarks/all_reduce.py --ranks 2

Ranks are processes. They talk through NCCL if there is a GPU for each, through gloo over the loopback interface otherwise. An
all-reduce of b bytes between n ranks takes `latency + 2 (n - 1) / n * b / bandwidth`; both are fitted to the medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

SIZES = [1 << power for power in range(12, 25, 2)]  # bytes: 4 KiB to 16 MiB


def measure(rank: int, ranks: int, directory: str, on_gpus: bool, repeats: int, answers: Any) -> None:
    """One rank: the median seconds of each size, of which rank 0 tells its own."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    store = dist.FileStore(os.path.join(directory, "store"), ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    medians = []
    for size in SIZES:
        values = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(values)
            if on_gpus:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        medians.append(statistics.median(seconds))
    if rank == 0:
        answers.put(medians)
    dist.destroy_process_group()


def fit(ranks: int, seconds: list[float]) -> tuple[float, float]:
    """Latency in seconds and bus bandwidth in bytes a second, with the least relative errors."""
    moved = 2 * (ranks - 1) / ranks * np.array(SIZES, np.float64)
    measured = np.array(seconds)
    columns = np.stack([np.ones_like(moved), moved], 1) / measured[:, None]
    latency, per_byte = np.linalg.lstsq(columns, np.ones_like(measured), rcond=None)[0]
    return float(latency), float(1 / per_byte)


def main() -> None:
    """Measures, fits and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= arguments.ranks
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        started = [
            context.Process(
                target=measure, args=(rank, arguments.ranks, directory, on_gpus, arguments.repeats, answers)
            )
            for rank in range(arguments.ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
    seconds = answers.get()
    print(f"{arguments.ranks} ranks, {'NCCL' if on_gpus else 'gloo'}")
    for size, each in zip(SIZES, seconds, strict=True):
        bus = 2 * (arguments.ranks - 1) / arguments.ranks * size / each
        print(f"{size:>12,} bytes {each * 1e6:>12,.1f} µs {bus / 1e9:>8.2f} GB/s")
    latency, bandwidth = fit(arguments.ranks, seconds)
    print(f"--all-reduce-bandwidth {bandwidth / 1e9:.2f} --all-reduce-latency {latency * 1e6:.1f}")


if __name__ == "__main__":
    main()
