"""What a tier opens it closes: no file, no socket and no thread is left, however it was used."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from nodes import MEGABYTE, needs_linux, node_folder, node_thread
from servers import eventually

from kvpool.errors import ConfigError
from kvpool.testing import key, load, store
from kvpool.tiers import CompressedTier, DiskTier, KeyedTier, MemoryTier, NodeTier, Outcome
from kvpool.tiers.disk.directory import Directory
from kvpool.tiers.node.settings import read_node

pytestmark = [needs_linux, pytest.mark.usefixtures("patience")]
USED = [Outcome.OK] * 3


def open_files() -> list[str]:
    """What the descriptors of this process are, in words."""
    gc.collect()  # maps end with their last view
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the one of this listing
            continue
    return sorted(name for name in found if not name.startswith("/dev/null"))


@contextmanager
def nothing_left() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what other tests have left need not be looked at again and again
    files, threads = open_files(), set(threading.enumerate())
    yield
    eventually(lambda: set(threading.enumerate()) <= threads, "all threads have ended")
    assert open_files() == files


def use(tier: KeyedTier) -> None:
    assert store(tier, [1, 2, 3]) == USED
    assert load(tier, [1, 2, 3])[0] == USED
    assert tier.remove([key(2)]) == [Outcome.OK]


@contextmanager
def disk(folder: Path) -> Iterator[KeyedTier]:
    with DiskTier(folder / "disk", 10**7) as tier:
        yield tier


@contextmanager
def compressed(folder: Path) -> Iterator[KeyedTier]:
    with CompressedTier(DiskTier(folder / "disk", 10**7), "lz4") as tier:
        yield tier


@contextmanager
def node(folder: Path, **options: Any) -> Iterator[KeyedTier]:
    with node_thread(folder / "n", 2 * MEGABYTE, **options), NodeTier(f"node:{folder / 'n'}") as tier:
        yield tier


@contextmanager
def node_over_disk(folder: Path) -> Iterator[KeyedTier]:
    with node(folder, tiers=[DiskTier(folder / "disk", 10**7)]) as tier:
        yield tier


@pytest.mark.parametrize("kind", [disk, compressed, node, node_over_disk])
def test_given_a_tier_that_was_used_then_no_file_and_no_thread_outlives_it(kind: Callable[[Path], Any]) -> None:
    with node_folder() as folder:
        with kind(folder) as first:  # what is imported or made once stays
            use(first)
        with nothing_left(), kind(folder) as tier:
            tier.remove([key(number) for number in (1, 2, 3)])
            use(tier)


def test_given_a_reader_that_reads_again_while_slabs_come_and_go_then_no_file_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.tiers.disk.disk_tier.REFRESH_SECONDS", 0.0)
    with nothing_left(), DiskTier(tmp_path, 2**20) as tier, DiskTier(tmp_path, 2**20, read_only=True) as reader:
        for number, size in enumerate((5_000, 40_000, 90_000, 200_000)):
            assert tier.store([key(number)], [bytes(size)]) == [Outcome.OK]
            assert reader.contains([key(number), key(99)]) == [True, False]


def test_given_a_tier_that_cannot_be_opened_then_it_leaves_nothing_open(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(DiskTier(tmp_path / "disk", 10**7))
        folder = stack.enter_context(node_folder())
        stack.enter_context(node_thread(folder, 2 * MEGABYTE))
        with nothing_left():
            with pytest.raises(ConfigError):
                DiskTier(tmp_path / "disk", 10**7)
            with pytest.raises(ConfigError, match="is the node of"), node_thread(folder, 2 * MEGABYTE):
                raise AssertionError
            with pytest.raises(ConfigError), node_thread(tmp_path / "new", 2**50):
                raise AssertionError


def test_given_a_node_with_metrics_and_a_disk_that_ends_then_it_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvpool.tiers.node import node_command, server

    monkeypatch.setattr(server.NodeServer, "serve", lambda self: None)
    monkeypatch.setattr(node_command.signal, "signal", lambda *_: None)
    with node_folder() as folder:
        options = {"bytes": "2MB", "disk": str(folder / "disk"), "disk_bytes": "10MB", "metrics": "127.0.0.1:0"}
        with nothing_left():
            node_command.run(folder / "n", read_node(None, options), quiet=True)


def test_given_a_directory_that_was_locked_before_then_the_number_of_its_last_owner_does_not_stay(
    tmp_path: Path,
) -> None:
    (tmp_path / "lock").write_text("123456789012345\n")
    directory = Directory(tmp_path, create=True)
    assert directory.owner() == ""
    assert directory.lock()
    assert directory.owner() == str(os.getpid())
    with pytest.raises(ConfigError, match="this process writes to"):
        Directory(tmp_path, create=True).lock()
    directory.unlock()
    assert directory.owner() == ""
    assert directory.lock()
    directory.unlock()


def test_given_a_memory_tier_that_is_closed_then_it_keeps_nothing() -> None:
    tier = MemoryTier(10**6)
    use(tier)
    tier.close()
    assert (tier._values, tier._used) == ({}, 0)
    tier.close()
    assert tier.stats().problem == "closed"
