"""Tests of tiers import servers.py beside them. None may lose a buffer or a job, or leave a disk tier or a file of it open.

No thread of a tier keeps a process alive.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvpool.tiers import DiskTier, KeyedTier
from kvpool.tiers.contract import CALL_TIMEOUT
from kvpool.tiers.disk.buffers import BUFFERS_PER_THREAD, Workers

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test names no time, a call to a tier may take a minute: a second is little on a busy machine."""
    make = KeyedTier.__init__

    def make_patient(tier: Any, name: str, *, timeout: float = CALL_TIMEOUT) -> None:
        make(tier, name, timeout=60.0 if timeout == CALL_TIMEOUT else timeout)

    monkeypatch.setattr(KeyedTier, "__init__", make_patient)


@pytest.fixture(autouse=True)
def nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever fails: every buffer of a disk tier comes back, its jobs end, and somebody closes it and its files."""
    lost: list[str] = []
    made: list[DiskTier] = []
    make, close, close_workers = DiskTier.__init__, DiskTier._close, Workers.close

    def recorded(tier: DiskTier, *arguments: Any, **options: Any) -> None:
        make(tier, *arguments, **options)
        made.append(tier)

    def checked(tier: DiskTier) -> None:
        close(tier)
        if not any(thread.is_alive() for thread in tier._workers._threads):
            lost.extend(f"a job of {slab.path.name}" for slab in tier._state.catalog.slabs.values() if slab.num_jobs)

    def checked_workers(workers: Workers) -> bool:
        have_ended = close_workers(workers)
        missing = BUFFERS_PER_THREAD * len(workers._threads) - workers._buffers.qsize()
        if have_ended and missing:
            lost.append(f"{missing} buffers")
        return have_ended

    def started(thread: threading.Thread) -> None:
        if thread.name.startswith("kvpool-") and not thread.daemon:
            lost.append(f"the thread {thread.name} is no daemon")
        start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(DiskTier, "__init__", recorded)
    monkeypatch.setattr(DiskTier, "_close", checked)
    monkeypatch.setattr(Workers, "close", checked_workers)
    before = open_files()
    yield
    lost += [f"open: {tier.directory.path}" for tier in made if not tier._closed]
    lost += open_files() - before
    assert lost == []


def open_files() -> set[str]:
    """The files of disk tiers that this process has open: slabs, their records, locks, descriptions."""
    try:
        links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # not Linux
        return set()
    found = set()
    for link in links:
        with suppress(FileNotFoundError):  # a thread has closed it meanwhile
            found.add(os.readlink(link))
    return {
        path
        for path in found
        if path.removesuffix(" (deleted)").endswith((".kvslab", ".kvindex", "/lock", ".json", ".new"))
    }
