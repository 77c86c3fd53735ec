"""Opens plain files by path and never waits: a FIFO, a socket, a device or a directory under the path is refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # the second is for Windows
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


class NotPlainError(OSError):
    """There is something else than a plain file under a path; `strerror` says what."""

    def __init__(self, path: Path, mode: int) -> None:
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        super().__init__(errno.EINVAL, f"not a plain file but {kind}", str(path))


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """`os.open` for plain files and links to them; `NotPlainError` for everything else.

    It looks at what it has opened, not at what was there before: nobody can put a FIFO in between.
    """
    try:
        fd = os.open(path, flags | _FLAGS, mode)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket, a FIFO that nobody reads, or a directory to write to
            raise NotPlainError(path, os.stat(path).st_mode) from None
        raise
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        os.close(fd)
        raise NotPlainError(path, kind)
    return fd


def read_plain(path: Path, max_bytes: int = -1) -> bytes:
    """The content of a plain file, or the first bytes of it."""
    with os.fdopen(open_plain(path), "rb") as stream:
        return stream.read(max_bytes)


def write_plain(path: Path, data: bytes) -> None:
    """A plain file with this content, in place of the one that may be there."""
    with os.fdopen(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as stream:
        stream.write(data)
