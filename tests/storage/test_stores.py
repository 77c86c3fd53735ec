"""Stores: exact sizes, resizing that keeps bytes, honest errors when there is no room."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool import KVCacheConfig, LayerSpec, Tier  # noqa: E402
from kvpool.errors import InvalidArgumentError, StorageMemoryError, TransferError  # noqa: E402
from kvpool.storage import BlockStore, DiskStore, GroupLayout, free_bytes, measure_budget  # noqa: E402
from kvpool.storage import memory as memory_module  # noqa: E402

HUGE = 2**31 - 1  # blocks


def config(**sizes: Any) -> KVCacheConfig:
    return KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)] * 2, 4, **{"gpu_blocks": 6, **sizes})


def store(num_blocks: int = 6, **options: Any) -> BlockStore:
    made = config()
    return BlockStore(
        made.pools[0], Tier.GPU, {0: GroupLayout(made.groups[0])}, num_blocks, **{"device": "cpu", **options}
    )


def test_given_a_pool_when_its_store_is_made_then_bytes_allocated_are_bytes_configured() -> None:
    made = config(host_blocks=3)
    found = BlockStore(made.pools[0], Tier.HOST, {0: GroupLayout(made.groups[0])})
    assert found.num_bytes == made.pool_bytes(Tier.HOST) == found.data.untyped_storage().nbytes()


@pytest.mark.parametrize("num_blocks", [0, 2, 9])
def test_given_a_store_when_it_is_resized_then_the_blocks_that_remain_keep_their_bytes(num_blocks: int) -> None:
    blocks = store()
    blocks.data.copy_(torch.arange(6, dtype=torch.uint8)[:, None].expand_as(blocks.data))
    stale = blocks.layer_cache(0, 1)
    blocks.resize(num_blocks)
    kept = min(num_blocks, 6)
    assert blocks.num_blocks == num_blocks
    assert blocks.data[:kept, 0].tolist() == list(range(kept))
    assert blocks.layer_cache(0, 1).num_blocks == num_blocks != stale.num_blocks


def test_given_more_blocks_than_host_memory_when_a_store_is_made_then_the_error_says_how_many_would_fit() -> None:
    with pytest.raises(StorageMemoryError, match=r"about \d+ blocks would.*host_bytes.*kv_bytes"):
        store(HUGE)


def test_given_a_store_that_cannot_grow_then_it_is_as_it_was() -> None:
    blocks = store()
    blocks.data.fill_(7)
    with pytest.raises(StorageMemoryError):
        blocks.resize(HUGE)
    assert blocks.num_blocks == 6
    assert (blocks.data == 7).all()


def test_given_free_memory_then_a_budget_is_a_fraction_of_it_less_what_is_reserved() -> None:
    assert 0 < measure_budget("cpu", 0.5, reserve_bytes=2**20) < free_bytes("cpu")
    assert measure_budget("cpu", 0.5, reserve_bytes=2**60) == 0


@pytest.mark.parametrize("fraction", [0, 1.5, float("nan"), "all"])
def test_given_a_wrong_fraction_then_measuring_a_budget_is_refused(fraction: Any) -> None:
    with pytest.raises(ValueError, match="fraction"):
        measure_budget("cpu", fraction)


def test_given_a_budget_when_a_config_is_made_from_it_then_its_blocks_fit() -> None:
    budget = measure_budget("cpu", 0.001)
    made = KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], 4, gpu_bytes=budget)
    assert made.pool_bytes(Tier.GPU) <= budget


def test_given_memory_that_cannot_be_pinned_then_a_warning_says_so_and_the_store_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = threading.Event()

    class Refusing:
        def cudaHostRegister(self, *_: Any) -> int:
            assert asked.wait(60)
            return 2

    monkeypatch.setattr(memory_module, "_cudart", Refusing)
    monkeypatch.setattr(memory_module, "_cpus_near", lambda gpu: set())
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: nullcontext())
    blocks = store(gpu=torch.device("cuda", 0))
    with pytest.warns(RuntimeWarning, match="could not be locked"):
        assert asked.set() or not blocks.lock(np.array([0], np.int32))
    assert not blocks.pinned
    blocks.data.fill_(3)
    assert (blocks.data == 3).all()


def test_given_a_gpu_whose_place_is_unknown_then_any_cpu_may_touch_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        pci_domain_id = pci_bus_id = pci_device_id = 0xFE

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: Properties)
    assert memory_module._cpus_near(torch.device("cuda", 0)) == set()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux says which CPUs a process may use")
def test_given_a_gpu_then_its_memory_is_touched_by_cpus_near_it_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Properties:
        pci_domain_id, pci_bus_id, pci_device_id = 1, 0x2A, 3

    (tmp_path / "0001:2a:03.0").mkdir()
    (tmp_path / "0001:2a:03.0" / "local_cpulist").write_text("0-2,5,\n")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: Properties)
    monkeypatch.setattr(memory_module, "Path", lambda place: tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3, 5, 9})
    assert memory_module._cpus_near(torch.device("cuda", 0)) == {1, 2, 5}


def test_given_what_the_kernel_estimates_then_free_bytes_of_the_host_are_those(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "meminfo"
    said.write_text("MemTotal:       99 kB\nMemFree:        7 kB\nMemAvailable:   50 kB\n")
    monkeypatch.setattr(memory_module, "Path", lambda place: said)
    assert free_bytes("cpu") == 50 * 1024
    said.unlink()
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert free_bytes("cpu") == 3 * 4096


@pytest.mark.gpu
def test_given_a_gpu_then_host_memory_is_pinned_and_unpinned_again() -> None:
    for _ in range(2):
        blocks = store(gpu=torch.device("cuda", 0))
        assert blocks.lock(np.array([blocks.num_blocks - 1], np.int32))
        assert blocks.pinned
        assert blocks.data.is_pinned()
        blocks.resize(9)
        assert blocks.lock(np.array([8], np.int32))
        assert blocks.pinned
        blocks.close()
        assert not blocks.pinned


@pytest.mark.gpu
def test_given_more_blocks_than_the_gpu_has_then_the_error_says_how_many_would_fit_and_nothing_leaks() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = free_bytes("cuda")
    with pytest.raises(StorageMemoryError, match=r"about \d+ blocks would"):
        store(HUGE, device="cuda")
    assert abs(free_bytes("cuda") - before) < 2**26


# --- disk --------------------------------------------------------------------------------------------------------------


def rows(*values: int, size: int) -> list[Any]:
    return [np.full(size, value, np.uint8) for value in values]


def test_given_blocks_on_disk_when_read_then_they_are_what_was_written(tmp_path: Path) -> None:
    disk = DiskStore(config(disk_blocks=5).pools[0], directory=tmp_path)
    size = disk.block_bytes
    disk.write(np.array([4, 0], np.int32), rows(1, 2, size=size))
    found = rows(9, 9, size=size)
    disk.read(np.array([0, 4], np.int32), found)
    assert [row.tolist() for row in found] == [[2] * size, [1] * size]
    assert disk.num_bytes == 5 * size
    assert list(tmp_path.iterdir()) == []  # the file has no name: it cannot be left behind
    disk.close()
    assert disk.num_blocks == 0


@pytest.mark.parametrize("num_blocks", [1, 9])
def test_given_a_disk_store_when_resized_then_the_blocks_that_remain_keep_their_bytes(
    num_blocks: int, tmp_path: Path
) -> None:
    disk = DiskStore(config(disk_blocks=3).pools[0], directory=tmp_path)
    disk.write(np.array([0], np.int32), rows(5, size=disk.block_bytes))
    disk.resize(num_blocks)
    assert os.fstat(disk._file).st_size == disk.num_bytes == num_blocks * disk.block_bytes
    found = rows(0, size=disk.block_bytes)
    disk.read(np.array([0], np.int32), found)
    assert (found[0] == 5).all()
    disk.close()


def test_given_a_directory_that_is_not_there_then_the_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageMemoryError, match="missing"):
        DiskStore(config(disk_blocks=3).pools[0], directory=tmp_path / "missing")


def test_given_a_full_disk_then_the_store_stays_as_it_was_and_says_what_would_fit(tmp_path: Path) -> None:
    disk = DiskStore(config(disk_blocks=3).pools[0], directory=tmp_path)
    with pytest.raises(StorageMemoryError, match=r"about \d+ would"):
        disk.resize(2**31 - 1)
    assert disk.num_blocks == 3
    disk.close()


def test_given_a_file_that_ends_early_when_read_then_it_is_a_transfer_error(tmp_path: Path) -> None:
    disk = DiskStore(config(disk_blocks=3).pools[0], directory=tmp_path)
    with pytest.raises(TransferError, match="ends"):
        disk.read(np.array([7], np.int32), rows(0, size=disk.block_bytes))
    disk.close()


def test_given_a_negative_size_then_it_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_blocks"):
        store(-1)
