"""A tier of your own: one file for each value. Derive KeyedTier, and let kvpool.testing.TierContract test it."""

import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from kvpool.tiers import KeyedTier, KeyPattern, Outcome
from kvpool.tiers.contract import Purged, Room


class FileTier(KeyedTier):
    """Values as files in a directory. `KeyedTier` checks arguments, counts, and turns what is raised here into FAILED."""

    def __init__(self, directory: Path, capacity_bytes: int = 2**30) -> None:
        super().__init__("files")
        self._directory, self._capacity = directory, capacity_bytes
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)

    def _path(self, key: bytes) -> Path:
        return self._directory / key.hex()

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        return [self._load_one(key, view) for key, view in zip(keys, out, strict=True)]

    def _load_one(self, key: bytes, view: memoryview) -> Outcome:
        if not self._path(key).exists():
            return Outcome.MISS
        value = self._path(key).read_bytes()
        if len(value) > len(view):
            return Outcome.FAILED
        view[: len(value)] = value
        self.left_unfilled(len(view) - len(value))
        return Outcome.OK

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        return [self._store_one(key, view) for key, view in zip(keys, data, strict=True)]

    def _store_one(self, key: bytes, view: memoryview) -> Outcome:
        with self._lock:  # several threads may store at once
            if sum(self._sizes()) + view.nbytes > self._capacity:
                return Outcome.REFUSED
            new = self._path(key).with_suffix(".new")
            new.write_bytes(view)
            new.rename(self._path(key))  # a reader sees all of a value, or nothing
            return Outcome.OK

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        with self._lock:
            found = self._contains(keys, deadline)
            for key in keys:
                self._path(key).unlink(missing_ok=True)
        return [Outcome.OK if there else Outcome.MISS for there in found]

    def _purge(self, pattern: KeyPattern, deadline: float) -> Purged:
        with self._lock:
            found = [path for path in self._directory.iterdir() if pattern.matches(bytes.fromhex(path.stem))]
            for path in found:
                path.unlink(missing_ok=True)
        return Purged(len(found), is_complete=True)

    def _look(self) -> Room:
        with self._lock:
            sizes = self._sizes()
        return Room(len(sizes), sum(sizes), self._capacity)

    def _sizes(self) -> list[int]:
        return [path.stat().st_size for path in self._directory.iterdir()]

    def _close(self) -> None:
        pass


if __name__ == "__main__":
    with TemporaryDirectory() as directory:
        key, buffer = bytes(32), bytearray(15)
        with FileTier(Path(directory)) as tier:
            tier.store([key], [b"keys and values"])
        with FileTier(Path(directory)) as tier:  # Engine(model, tiers=[tier]) uses it
            print(tier.load([key], [buffer])[0].name, bytes(buffer).decode())
