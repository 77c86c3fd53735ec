"""The directory of a disk tier: which process writes to it, which files it has, and to which models the values belong."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from kvpool.checks import show
from kvpool.errors import ConfigError
from kvpool.files import NotPlainError, open_plain, read_plain, write_plain
from kvpool.tiers.disk.slab import INDEX_SUFFIX, NEW_SUFFIX, SLAB_SUFFIX, Slab, UnreadableSlabError
from kvpool.tiers.keys import SPACE_BYTES, KeySpace

LOCK = "lock"
_SPACE = "space-"
_NAMED = 5
_locked_here: set[tuple[int, int]] = set()  # by this process; a process id does not tell, containers have the same


class Directory:
    """A directory that one process writes to; any number of others may read."""

    def __init__(self, path: str | os.PathLike[str], *, create: bool) -> None:
        try:
            self.path = Path(path)
            if create:
                self.path.mkdir(0o700, parents=True, exist_ok=True)  # private: values come from what people wrote
        except TypeError:
            raise ConfigError(f"a disk tier's directory is a path, got {show(path)}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            message = f"cannot make the directory {show(str(path))} ({reason}); name one that you can write to"
            raise ConfigError(message) from None
        if not self.path.is_dir():
            raise ConfigError(f"there is no directory {show(str(path))}; a disk tier that is written to makes it")
        self._lock_fd = -1

    def lock(self) -> bool:
        """Makes this process the writer; False if the directory cannot be written to at all."""
        import fcntl

        try:
            fd = open_plain(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except NotPlainError as error:
            raise ConfigError(
                f"{self.path / LOCK} is {error.strerror}; remove it, and a disk tier makes its own"
            ) from None
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            is_ours = _file_id(fd) in _locked_here
            os.close(fd)
            raise ConfigError(
                f"this process writes to {self.path} already: close what has opened it, give the second one a directory of "
                "its own, or read_only=True to use what the first one stores"
                if is_ours
                else f"{self.path} belongs to process {owner}, which writes to it; give this process a directory of its own, "
                "or read_only=True to use what the other one stores"
            ) from None
        with contextlib.suppress(OSError):  # on a full disk, the lock works without the number of its process
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd
        _locked_here.add(_file_id(fd))
        return True

    def unlock(self) -> None:
        """Lets another process write."""
        if self._lock_fd != -1:
            _locked_here.discard(_file_id(self._lock_fd))
            os.close(self._lock_fd)
            self._lock_fd = -1

    def owner(self) -> str:
        """The id of the process that writes to it; empty if none does."""
        import fcntl

        try:
            fd = open_plain(self.path / LOCK)
        except OSError:
            return ""
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return ""
        except OSError:
            return os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        finally:
            os.close(fd)

    # --- slabs -------------------------------------------------------------------------------------------------------

    def slab_paths(self) -> list[Path]:
        """The files with names of slabs, in a fixed order."""
        return sorted(path for path in self.path.iterdir() if path.suffix == SLAB_SUFFIX)

    def open_slabs(self, *, writable: bool, direct: bool, known: Container[Path] = ()) -> tuple[list[Slab], list[str]]:
        """The slabs of this format, and one sentence for each problem. Foreign files are not touched."""
        if writable:
            self._sweep()
        slabs, notes = [], []
        for path in self.slab_paths():
            if path in known:
                continue
            try:
                slab = Slab.open(path, writable=writable, direct=direct)
            except UnreadableSlabError as error:
                notes.append(f"{path.name} {error}: skipped")
                continue
            slabs.append(slab)
            notes.extend(slab.notes)
        if strangers := self.strangers():
            more = f" and {len(strangers) - _NAMED} more" if len(strangers) > _NAMED else ""
            notes.append(f"not kvpool's and left alone: {', '.join(strangers[:_NAMED])}{more}")
        return slabs, notes

    def strangers(self) -> list[str]:
        """Names of files that no disk tier makes."""
        return sorted(path.name for path in self.path.iterdir() if not _is_ours(path))

    def _sweep(self) -> None:
        """Removes unfinished files of a killed process, and index files without a slab."""
        for path in self.path.iterdir():
            orphan = path.suffix == INDEX_SUFFIX and not path.with_suffix(SLAB_SUFFIX).exists()
            if _is_ours(path) and (path.suffix == NEW_SUFFIX or orphan):
                with contextlib.suppress(OSError):
                    path.unlink()

    # --- whose values ------------------------------------------------------------------------------------------------

    def describe(self, space: KeySpace) -> None:
        """Writes the fingerprint of keys to a file, so that people can see to which model values belong."""
        path = self.path / f"{_SPACE}{space.prefix.hex()}.json"
        if not path.exists():
            new = path.with_name(path.name + NEW_SUFFIX)
            write_plain(new, (json.dumps(space.fingerprint.describe(), indent=2) + "\n").encode())
            os.replace(new, path)

    def descriptions(self) -> dict[bytes, dict[str, Any]]:
        """Fingerprints by the first bytes of their keys, without unreadable ones."""
        found = {}
        for path in self.path.glob(f"{_SPACE}{'?' * 2 * SPACE_BYTES}.json"):
            with contextlib.suppress(OSError, ValueError):
                fields = json.loads(read_plain(path))
                if isinstance(fields, dict):
                    found[bytes.fromhex(path.stem.removeprefix(_SPACE))] = fields
        return found


def _file_id(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _is_ours(path: Path) -> bool:
    """Whether a disk tier gives such names to files."""
    name = path.name.removesuffix(NEW_SUFFIX)
    if name == LOCK or (name.startswith("probe-") and path.suffix == NEW_SUFFIX):
        return True
    return (name.startswith("slab-") and name.endswith((SLAB_SUFFIX, INDEX_SUFFIX))) or (
        name.startswith(_SPACE) and name.endswith(".json")
    )
