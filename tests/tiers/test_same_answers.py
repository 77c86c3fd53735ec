"""The same calls, faults and times make tiers answer, count, log and write to their files as ever.

`same_answers.txt` has a line for each case and a letter for each step. A change that is meant to answer otherwise writes it
again, and says in its commit what is else: `python tests/tiers/test_same_answers.py`. With the name of a case, that prints
what each step said. Time stands still except where a step or a fault lets it go on. The jobs of a disk run when somebody
waits for them, so that no thread is ever ahead of another.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # for programs that run without pytest
from runs import (
    NUM_KEYS,
    PATTERNS,
    SIZES,
    VERBS,
    WAITS,
    Remote,
    Run,
    Runs,
    Slow,
    assert_same,
    call,
    content,
    figures,
    key,
    write_down,
)

from kvpool.errors import ConfigError
from kvpool.tiers import CompressedTier, DiskTier, MemoryTier
from kvpool.tiers.contract import Worth
from kvpool.tiers.disk.upkeep import Upkeep
from kvpool.tiers.node.index import NodeIndex
from kvpool.tiers.node.region import Region
from kvpool.tiers.node.values import Holder, Quotas, Slot
from kvpool.tiers.transport.chain import TierChain

ANSWERS = Path(__file__).with_name("same_answers.txt")


# --- a disk ----------------------------------------------------------------------------------------------------------


class Faults:
    """Lets calls of the operating system fail or do less, and lets reads and writes take a millisecond."""

    NAMES = ("open", "pread", "preadv", "pwrite", "pwritev", "posix_fallocate", "replace", "fsync", "unlink")
    NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EINVAL)

    def __init__(self, run: Run) -> None:
        self._run = run
        self.name, self.skip, self.number = "", 0, 0
        self._opened: dict[int, tuple[int, int]] = {}  # descriptors, and the files that they were opened for

    def choose(self) -> str:
        rng = self._run.rng
        self.name, self.skip = rng.choice(self.NAMES), rng.choice((0, 0, 1, 2))
        self.number = 0 if self.name in ("preadv", "pwritev") and rng.random() < 0.3 else rng.choice(self.NUMBERS)
        return f"{self.name} {self.skip} {self.number}"

    @contextmanager
    def watching(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.NAMES:
                patch.setattr(os, name, self._watched(name, getattr(os, name)))
            yield

    def _watched(self, name: str, system: Any) -> Any:
        def watched(first: Any, *rest: Any, **options: Any) -> Any:
            if name in ("preadv", "pwritev"):
                self._run.wait(0.001)
            if name == self.name:
                self.skip -= 1
                if self.skip < 0:
                    self.name = ""
                    if self.number:
                        raise OSError(self.number, errno.errorcode[self.number])
                    (view, *_), at = rest
                    return system(first, [view[: view.nbytes // 2]], at)
            found = system(first, *rest, **options)
            if name == "open" and str(first).startswith(str(self._run.folder)):
                self._opened[found] = file_of(found)
            return found

        return watched

    def num_open(self) -> int:
        """How many of the files are still open."""
        return sum(file_of(descriptor) == file for descriptor, file in self._opened.items())


def file_of(descriptor: int) -> tuple[int, int]:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return -1, -1
    return status.st_dev, status.st_ino


class Disk:
    """A directory with a tier that writes and one that reads."""

    def __init__(self, run: Run, faults: Faults) -> None:
        self.run, self.faults = run, faults
        self.folder = run.folder / "disk"
        self.capacity = 2**20
        self.tiers = self.opened()

    def opened(self) -> list[DiskTier]:
        for _ in range(2):
            try:
                tier = DiskTier(self.folder, self.capacity, io_threads=1, direct=False)
                break
            except ConfigError as error:
                self.run.say("not opened", error)
        return [tier, DiskTier(self.folder, self.capacity, io_threads=1, direct=False, read_only=True, name="reader")]

    def close(self) -> None:
        for tier in reversed(self.tiers):
            tier.close()
            slabs = tier._state.catalog.slabs.values()
            assert not any(slab.num_jobs or slab.num_writing for slab in slabs)
            assert not tier._storing._waiting
            assert tier._workers._buffers.qsize() == 2
        assert not self.faults.num_open()

    def step(self) -> None:
        rng, run = self.run.rng, self.run
        run.wait(rng.choice(WAITS))
        chosen = rng.random()
        fault = self.faults.choose() if rng.random() < 0.35 else ""
        if chosen < 0.05:
            if self.faults.name == "unlink":  # a directory lists files in any order
                self.faults.name = ""
            self.close()
            said = f"opened again {self.upkeep() if rng.random() < 0.5 else ''}"
            self.capacity = rng.choice((2**20, 2**20, 2**20 + 2**18))
            self.tiers = self.opened()
        elif chosen < 0.1:
            said = self.damage()
        else:
            tier = self.tiers[rng.random() < 0.2]
            said = f"{tier.name} {call(run, tier, rng.choice(VERBS))}"
        self.faults.name = ""
        run.say(said, fault, *map(figures, self.tiers), self.files(), *map(self.books, self.tiers))
        slabs = [slab for tier in self.tiers for slab in tier._state.catalog.slabs.values()]
        fds = [fd for slab in slabs for fd in (slab.data_fd, slab.index_fd)]
        fds += [tier.directory._lock_fd for tier in self.tiers]
        assert self.faults.num_open() == sum(fd != -1 for fd in fds)

    def books(self, tier: DiskTier) -> str:
        """What a tier has noted."""
        catalog, storing = tier._state.catalog, tier._storing
        slabs = [
            (slab.num_jobs, slab.num_writing, slab.newest_use, slab._is_synced, slab.records["used"].tolist())
            for slab in catalog.slabs.values()
        ]
        free = [(size.slot_bytes, size.slabs, size.free, list(size.victims)) for size in catalog.classes.values()]
        times = storing._paused_until, storing._next_flush, storing._slab_maker._next_try, tier._next_refresh
        in_use = len(storing._waiting), tier._workers._buffers.qsize()
        return f"{catalog.allocated_bytes} {slabs} {free} {times} {in_use}"

    def files(self) -> str:
        digest = hashlib.blake2b(digest_size=4)
        for path in sorted(self.folder.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def damage(self) -> str:
        """One byte of a file changes, or a file ends early."""
        rng = self.run.rng
        paths = [path for path in sorted(self.folder.iterdir()) if path.name.startswith("slab-")]
        if not paths:
            return "nothing to damage"
        path = rng.choice(paths)
        size = path.stat().st_size
        if rng.random() < 0.2:
            os.truncate(path, size // 2)
            return f"{path.name} is cut off"
        at = rng.randrange(size) if rng.random() < 0.3 else rng.choice((20, 64, 100, 4096 + 8, 4096 + 60, 8200)) % size
        with path.open("r+b") as stream:
            stream.seek(at)
            (old,) = stream.read(1)
            stream.seek(at)
            stream.write(bytes([old ^ 0x41]))
        return f"byte {at} of {path.name}"

    def upkeep(self) -> str:
        rng = self.run.rng
        done: list[int] = []
        with Upkeep(self.folder, writing=True) as upkeep:
            verb = rng.choice(("verify", "repair", "compact", "purge", "values"))
            if verb in ("verify", "repair"):
                found: object = upkeep.verify(done.append, repair=verb == "repair")
            elif verb == "compact":
                found = upkeep.compact(done.append)
            elif verb == "purge":
                before = int((self.run.now - 60) * 1e6)
                found = upkeep.purge(done.append, pattern=rng.choice(PATTERNS), used_before=before)
            else:
                values = upkeep.values(done.append, rng.choice((b"", bytes([1]) * 8)))
                found = [(each.key[-2:].hex(), each.data.nbytes, each.last_use) for each in values]
            return f"{verb} {found} {sum(done)} {len(done)} {upkeep.notes} {upkeep.num_values} {upkeep.spaces()}"


def disk(run: Run, steps: int = 400) -> None:
    faults = Faults(run)
    with faults.watching(), mock.patch("kvpool.tiers.disk.disk_tier.supports_direct", return_value=True):
        on_disk = Disk(run, faults)
        for _ in range(steps):
            on_disk.step()
        on_disk.close()
    run.say(on_disk.files())


def full_disk(run: Run) -> None:
    """Values of nearly one size, of which it holds a third; the clock often stands still."""
    with (
        mock.patch("runs.SIZES", (40_000, 40_000, 37_000, 40_960)),
        mock.patch(f"{__name__}.WAITS", (0.0, 0.0, 0.0, 0.000001, 5.0, 31.0)),
        mock.patch("kvpool.tiers.disk.catalog._MIN_VICTIMS", 3),
    ):
        disk(run, 250)


# --- memory, compression and chains ----------------------------------------------------------------------------------


def chain(run: Run) -> None:
    inner = MemoryTier(400_000, name="inner")
    tiers = [Slow(run, 90_000, "small"), CompressedTier(inner, Runs(run)), Slow(run, 700_000, "large")]
    in_a_row = TierChain(tiers)
    with mock.patch("kvpool.tiers.compressed_tier.AT_ONCE_BYTES", 40_000):
        for _ in range(500):
            run.wait(run.rng.choice(WAITS))
            numbers, due = run.some(), run.now + run.rng.choice((0.0005, 0.001, 0.015, 1.0))
            keys = [key(number) for number in numbers]
            verb = run.rng.choice((*VERBS, "find", "find_prefix", "load of all", "load_prefix"))
            if verb in ("find", "find_prefix"):
                said: object = getattr(in_a_row, verb)(keys, due)
            elif verb in ("load of all", "load_prefix"):
                rows = [bytearray(len(content(number))) for number in numbers]
                said = (in_a_row.load if verb == "load of all" else in_a_row.load_prefix)(keys, rows, due)
            else:
                watched = run.rng.choice(in_a_row.watched)
                said = call(run, watched, verb.removesuffix("_prefix"))
            known = [[number for number in range(NUM_KEYS) if key(number) in each.known] for each in in_a_row.watched]
            run.say(verb, numbers, said, known, *map(figures, tiers), tiers[1].compression())
    in_a_row.close()
    run.say(*in_a_row.stats(), inner.stats())


# --- a remote store --------------------------------------------------------------------------------------------------


def remote(run: Run) -> None:
    waits = (0.0, 0.0, 0.0, 0.3, 0.999, 1.0, 1.001, 3.0, 9.0, 10.0, 33.0)
    with mock.patch.multiple("kvpool.tiers.remote.remote_tier", SHARE_BYTES=40_000, SHARE_KEYS=2, MAX_STALE=6):
        with Remote(run) as tier:
            for _ in range(500):
                run.wait(run.rng.choice(waits))
                if run.rng.random() < 0.05:
                    listing = tier.listed(timeout=1.0)
                    said = f"listed {sum(listing.sizes.values())} {len(listing.sizes)} {listing.problem}"
                else:
                    said = call(run, tier, run.rng.choice(VERBS))
                run.say(said, figures(tier), len(tier.stale), [node.is_full() for node in tier.nodes])
        run.say(figures(tier))


# --- the memory of a node --------------------------------------------------------------------------------------------


def node(policy: str, quotas: Quotas | None = None) -> Callable[[Run], None]:
    def steps(run: Run) -> None:
        region = Region(run.folder, 4 * 2**20)
        index = NodeIndex(region, policy, quotas, clock=lambda: run.now)
        holders = [Holder(owner) for owner in (1, 1, 2)]
        with mock.patch.multiple("kvpool.tiers.node.index", MOST_USED=4, SPAN_VALUES=2):
            for _ in range(500):
                run.wait(run.rng.choice(WAITS))
                said = node_step(run, index, run.rng.choice(holders))
                used = sorted(index.used_by_engine.items()), sorted(index.used_by_tenant.items())
                places = [(value.slab, value.slot, value.priority) for value in index._values.values()]
                records = hashlib.blake2b(region._records[32:], digest_size=4).hexdigest()
                held = [(sorted(h.leases), sorted(h.reservations), h.reserved_bytes) for h in holders]
                run.say(said, used, index.num_evicted, places, sorted(index.slot_counts()), held, records)
        region.close()
        again = NodeIndex(Region(run.folder, 4 * 2**20), policy, quotas, clock=lambda: run.now)
        run.say(sorted((value.key.hex(), value.slab, value.slot) for value in again._values.values()))
        again.region.close()

    return steps


def node_step(run: Run, index: NodeIndex, holder: Holder) -> str:
    rng, numbers = run.rng, run.some(12)
    keys = [key(1000 * rng.randrange(6) + number) for number in numbers]
    chosen = rng.random()
    if chosen < 0.35:
        worths = [Worth(rng.choice((0, 35, 35, 80)), at, rng.choice((None, None, 5.0))) for at in range(len(keys))]
        sizes = [3 * SIZES[number % len(SIZES)] for number in numbers]
        lacking = [at for at, each in enumerate(keys) if index.find(each)[0].batch is None]
        number, slots = index.reserve(holder, [(keys[at], sizes[at], worths[at]) for at in lacking])
        return f"reserve {number} {[slot and (slot.slab, slot.slot, slot.offset) for slot in slots]}"
    if chosen < 0.6 and holder.reservations:
        number = rng.choice(sorted(holder.reservations))
        taken: list[Slot] = holder.reservations[number]
        found = index.commit(holder, number, [None if rng.random() < 0.1 else at for at in range(len(taken))])
        return f"commit {number} {[value and value.created for value in found]}"
    if chosen < 0.8:
        spans = index.find(b"".join(keys))
        answer = index.lease(holder, spans)
        return f"lease {[(span.start, span.stop, span.batch is None) for span in spans]} {answer}"
    if chosen < 0.92 and holder.leases:
        return f"release {index.release(holder, rng.choice(sorted(holder.leases)))} {index.release(holder, 10**6)}"
    if chosen < 0.94:
        index.release_all(holder)
        return "leave"
    if chosen < 0.97:
        at, listed = index.listed(rng.choice((0, 1, 2**20 + 3)), rng.choice((1, 5, 1000)))
        return f"listed {at} {[(value.slab, value.slot) for value in listed]} {index.num_leased(holder)}"
    return f"remove {index.remove(keys[0])} {len(index.matching(rng.choice(PATTERNS)))} {len(index)}"


# --- all of them -----------------------------------------------------------------------------------------------------

CASES: dict[str, Callable[[Run], None]] = {
    "disk": disk,
    "full disk": full_disk,
    "chain": chain,
    "remote": remote,
    "node by lru": node("lru"),
    "node by priority": node("priority"),
    "node by adaptive with quotas": node("adaptive", Quotas(engine=0.6, tenant=0.5)),
}


@pytest.mark.quick("disk", "chain", "remote", "node by lru", "node by priority", "node by adaptive with quotas")
@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files and a node as on Linux")
@pytest.mark.parametrize("name", CASES)
def test_given_the_same_calls_faults_and_times_then_tiers_answer_count_and_write_as_ever(name: str) -> None:
    assert_same(name, CASES, ANSWERS)


if __name__ == "__main__":
    write_down(CASES, ANSWERS)
