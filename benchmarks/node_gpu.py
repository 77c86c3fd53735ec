"""A node's memory beside a GPU: how fast it is registered for DMA, and copied straight, beside pinned memory of torch.

    python benchmarks/node_gpu.py [--gib 4] [--values 512] [--json FILE]

A node runs in a process of its own. This process maps its region and registers it in pieces in the background
(`cudaHostRegister`), while it loads values. Then values of 2 MiB, scattered over the region, are copied straight to the GPU
and back, in turn with as many bytes of pinned memory. GB/s are medians by CUDA events. Bytes are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cases.node_process import VALUE_BYTES, keys, node
from kvpool.storage.dma import copy_places
from kvpool.tiers.contract import Outcome, Slots
from kvpool.tiers.node import wire
from kvpool.tiers.node.connection import Connection
from kvpool.tiers.node.node_tier import NodeTier
from kvpool.tiers.node.wire import Verb

PIECE = 256 << 20
ROUNDS = 9


class Registration(threading.Thread):
    """Registers memory for DMA in pieces, in the background."""

    def __init__(self, address: int, num_bytes: int) -> None:
        super().__init__()
        self.seconds, self.status = 0.0, 0
        self._address, self._num_bytes = address, num_bytes
        self.start()

    def run(self) -> None:
        """In the thread."""
        began = time.perf_counter()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for at in range(0, self._num_bytes, PIECE):
            size = min(PIECE, self._num_bytes - at)
            self.status = self.status or int(runtime.cudaHostRegister(self._address + at, size, 0))
        self.seconds = time.perf_counter() - began


def gb_per_s(copy: Callable[[], None], num_bytes: int, stream: Any) -> float:
    """The speed of one run."""
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    with torch.cuda.stream(stream):
        begin.record()
        copy()
        end.record()
    end.synchronize()
    return float(num_bytes / begin.elapsed_time(end) / 1e6)


def loads(tier: NodeTier, names: list[bytes], stop: Callable[[], bool]) -> list[float]:
    """Milliseconds of loads of 8 values, for as long as something goes on."""
    out = [np.empty(VALUE_BYTES, np.uint8) for _ in range(8)]
    found: list[float] = []
    while not found or not stop():
        began = time.perf_counter()
        tier.load(names[:8], out, timeout=30)
        found.append(1e3 * (time.perf_counter() - began))
    return found


def measured(directory: Path, num_values: int) -> dict[str, Any]:
    """All figures."""
    names, rng = keys(num_values), np.random.default_rng(0)
    data = rng.integers(0, 256, (num_values, VALUE_BYTES), dtype=np.uint8)
    tier = NodeTier(f"node:{directory}?timeout=60")
    order = rng.permutation(num_values)
    began = time.perf_counter()
    outcomes = tier.store([names[i] for i in order], [data[i] for i in order], timeout=120)
    found: dict[str, Any] = {"store GB/s": data.nbytes / (time.perf_counter() - began) / 1e9}
    assert not any(outcomes)
    connection = Connection(directory, "bench", (), 30.0)
    region = torch.frombuffer(connection.region, dtype=torch.uint8)
    torch.zeros(1, device="cuda")
    quiet = loads(tier, names, iter([False] * 50 + [True]).__next__)
    registration = Registration(region.data_ptr(), connection.num_bytes)
    busy = loads(tier, names, lambda: not registration.is_alive())
    registration.join()
    seconds = registration.seconds
    if registration.status:
        sys.exit(f"cudaHostRegister failed with error {registration.status}")
    found |= {"register s": seconds, "register s/GiB": seconds / (connection.num_bytes / 2**30)}
    found |= {"load of 8 ms, before": statistics.median(quiet), "load of 8 ms, meanwhile": statistics.median(busy)}
    lease = wire.message(Verb.LEASE, num_values, 1000, wire.with_numbers(names, [VALUE_BYTES] * num_values))
    places = wire.places_in(connection.ask(lease, time.monotonic() + 30))
    assert wire.ABSENT not in places
    found |= straight(region, places, data)
    found |= staged(tier, names, data)
    connection.close()  # and with it the lease
    found |= stored(tier, names, data)
    tier.close()
    return found


def straight(region: torch.Tensor, places: list[wire.Place], data: Any) -> dict[str, float]:
    """Between slots and the GPU without a copy on the host, in turn with pinned memory of torch."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    size = data.nbytes
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host = np.array([region.data_ptr() + place[0] for place in places], np.uint64)
    gpu = np.uint64(device.data_ptr()) + np.arange(len(places), dtype=np.uint64) * np.uint64(VALUE_BYTES)
    sizes = np.full(len(places), VALUE_BYTES, np.uint64)

    def slots_in() -> None:
        assert copy_places(host, gpu, sizes), "the driver is too old for batches of copies"

    def slots_out() -> None:
        copy_places(gpu, host, sizes)

    runs = {
        "link in": lambda: device.copy_(pinned, non_blocking=True),
        "link out": lambda: pinned.copy_(device, non_blocking=True),
        "region in": slots_in,
        "region out": slots_out,
    }
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            samples[name].append(gb_per_s(run, size, stream))  # type: ignore[arg-type]
    slots_are_right = bool(np.array_equal(data.reshape(-1), _after(slots_in, device, stream)))
    assert slots_are_right, "the GPU has other bytes than were stored"
    found = {f"{name} GB/s": statistics.median(each) for name, each in samples.items()}
    found["region in, share of link"] = found["region in GB/s"] / found["link in GB/s"]
    found["region out, share of link"] = found["region out GB/s"] / found["link out GB/s"]
    return found


def _after(copy: Callable[[], None], device: torch.Tensor, stream: Any) -> Any:
    device.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        copy()
    torch.cuda.synchronize()
    return device.cpu().numpy()


def staged(tier: NodeTier, names: list[bytes], data: Any) -> dict[str, float]:
    """What an engine does: into pinned memory with a checksum, and from there to the GPU."""
    pinned = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
    device, rows = torch.empty_like(pinned, device="cuda"), list(pinned.numpy())
    times = []
    for _ in range(3):
        began = time.perf_counter()
        assert not any(tier.load(names, rows, timeout=120))
        device.copy_(pinned)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {"load with checksum, then copy GB/s": data.nbytes / statistics.median(times) / 1e9}


class DeviceSource:
    """Values on the GPU, [value, byte], for a tier that takes them straight."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data, self._stream = data, torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def write(self, slots: Slots) -> None:
        """Copies values to their slots."""
        self._copy(np.array(slots.numbers, np.uint64), self._data, slots, to_slots=True)

    def is_in(self, slots: Slots) -> bool:
        """Copies the slots back and compares."""
        back = torch.empty((len(slots.views), VALUE_BYTES), dtype=torch.uint8, device="cuda")
        self._copy(np.arange(len(slots.views), dtype=np.uint64), back, slots, to_slots=False)
        return all(torch.equal(back[at], self._data[number]) for at, number in enumerate(slots.numbers))

    def _copy(self, numbers: Any, data: torch.Tensor, slots: Slots, *, to_slots: bool) -> None:
        size = np.uint64(VALUE_BYTES)
        here = np.uint64(data.data_ptr()) + numbers * size
        there = np.array([np.frombuffer(view, np.uint8).ctypes.data for view in slots.views], np.uint64)
        with torch.cuda.stream(self._stream):
            sources, targets = (here, there) if to_slots else (there, here)
            assert copy_places(sources, targets, np.full(len(there), size))
        self._stream.synchronize()


def stored(tier: NodeTier, names: list[bytes], data: Any) -> dict[str, float]:
    """From the GPU into slots, with checksums: through pinned memory, and straight."""
    device, pinned = torch.from_numpy(data).cuda(), torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
    source = DeviceSource(device)

    def through_pinned() -> list[Outcome]:
        pinned.copy_(device)
        return tier.store(names, list(pinned.numpy()), timeout=120)

    ways: dict[str, Callable[[], list[Outcome]]] = {
        "store through pinned memory": through_pinned,
        "store straight": lambda: tier.store_straight(names, [VALUE_BYTES] * len(names), source, timeout=120),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(3):
        for way, run in ways.items():
            tier.remove(names, timeout=30)
            began = time.perf_counter()
            assert not any(run())
            times[way].append(time.perf_counter() - began)
            rows = [np.empty(VALUE_BYTES, np.uint8) for _ in range(8)]
            assert not any(tier.load(names[:8], rows, timeout=30))
            assert np.array_equal(np.stack(rows), data[:8])
    return {f"{way} GB/s": data.nbytes / statistics.median(each) / 1e9 for way, each in times.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--values", type=int, default=512)
    parser.add_argument("--json")
    options = parser.parse_args()
    with node(options.gib << 30) as where:
        figures = {"gpu": torch.cuda.get_device_name(), "region GiB": options.gib, **measured(where, options.values)}
    text = json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in figures.items()}, indent=1)
    print(text)
    if options.json:
        Path(options.json).write_text(text)
