"""Reading files that others wrote: opened without waiting, of bounded size, with one line of text about what is wrong.

A FIFO, a socket, a device or a directory under a path is refused. docs/formats.md lists the formats of all files.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from kvpool.checks import show
from kvpool.errors import InvalidArgumentError, KVPoolError

_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # the second is for Windows
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
}
MAX_FILE_BYTES = 16 * 2**20  # a config.json or a measurement has some kilobytes


class NotPlainError(OSError):
    """There is something else than a plain file under a path; `strerror` says what."""

    def __init__(self, path: Path, mode: int) -> None:
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        super().__init__(errno.EINVAL, f"not a plain file but {kind}", str(path))


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """`os.open` for plain files and links to them; `NotPlainError` for everything else, and with `os.O_NOFOLLOW` for links.

    It looks at what it has opened, not at what was there before: nobody can put a FIFO in between.
    """
    try:
        fd = os.open(path, flags | _FLAGS, mode)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a socket, a FIFO that nobody reads, or a directory to write to
            raise NotPlainError(path, os.stat(path).st_mode) from None
        if error.errno == errno.ELOOP:
            raise NotPlainError(path, os.lstat(path).st_mode) from None
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


def parse_json(data: bytes) -> Any:
    """The value in a text; `InvalidArgumentError` says what is wrong with it, and the caller where it stands."""
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        reason = f"{error.msg} at {line}column {error.colno}"
    except UnicodeDecodeError as error:
        reason = f"no UTF-8 text: {error.reason} at byte {error.start + 1}"
    except RecursionError:
        reason = "it nests too deep"
    except ValueError:
        reason = "an integer has too many digits"
    raise InvalidArgumentError(f"it is not JSON ({reason})")


def read_json(path: Path, error: type[KVPoolError], remedy: str) -> Any:
    """The value in a small file; what is wrong with the file is an `error` that ends with the remedy."""
    try:
        data = read_plain(path, MAX_FILE_BYTES + 1)
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror or failure}; {remedy}") from None
    if len(data) > MAX_FILE_BYTES:
        raise error(f"{path} is larger than {MAX_FILE_BYTES // 2**20} MiB; {remedy}")
    try:
        return parse_json(data)
    except InvalidArgumentError as failure:
        raise error(f"cannot read {path}: {failure}; {remedy}") from None


def other_format(found: object, oldest: int, newest: int, older_remedy: str) -> str | None:
    """The rest of a sentence about something of format `found`; None if it can be read, from `oldest` to `newest`.

    >>> other_format(7, 1, 3, "make it again")
    'has format 7; this kvpool reads 1 to 3: update kvpool'
    >>> other_format(0, 1, 1, "make it again")
    'has format 0; this kvpool reads 1: make it again'
    """
    if isinstance(found, bool) or not isinstance(found, int):
        return f"has format {show(found)}, which is no whole number"
    if oldest <= found <= newest:
        return None
    known = str(newest) if oldest == newest else f"{oldest} to {newest}"
    return f"has format {found}; this kvpool reads {known}: {'update kvpool' if found > newest else older_remedy}"
