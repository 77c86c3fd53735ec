"""Opens files, plain or compressed, and gives their lines with their numbers. The length of a line is limited, so that no
file takes more memory than that while it is read.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvpool.errors import TraceError

MAX_LINE_BYTES = 32 * 2**20  # a prompt of four million tokens
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_GZIP_WINDOW = 31  # zlib reads the header and checks the trailer of gzip
_BOM = b"\xef\xbb\xbf"
_BUFFER_BYTES = 2**18
_INPUT_BYTES = 2**10  # decompressed at once; they become 1 MiB at most with gzip, 32 MiB with zstd


class Lines:
    """The lines of a file with their numbers. It can look one line ahead, and counts broken lines."""

    def __init__(self, path: Path, max_errors: int = 0) -> None:
        self.path, self._max_errors = path, max_errors
        self.broken: list[tuple[int, str]] = []
        self.number = 0  # of the last line that was returned
        self._stream = open_bytes(path)
        self._next: bytes | None = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def peek(self) -> bytes:
        """The next line, without moving on; empty at the end of the file."""
        if self._next is None:
            self._next = self._read()
            if not self.number and self._next.startswith(_BOM):
                self._next = self._next[len(_BOM) :]
        return self._next

    def _read(self) -> bytes:
        try:
            line = self._stream.readline(MAX_LINE_BYTES + 1)
        except (OSError, EOFError) as error:
            raise TraceError(f"{self.path} ends or breaks after line {self.number}: {error}") from None
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(
                f"line {self.number + 1} of {self.path} is longer than {MAX_LINE_BYTES // 2**20} MiB; a trace has one "
                "request or operation per line"
            )
        return line

    def __iter__(self) -> Iterator[bytes]:
        while line := self.peek():
            self._next = None
            self.number += 1
            if not line.isspace():
                yield line

    def skip(self, reason: str) -> None:
        """Records that the current line is broken; raises if there are too many."""
        self.broken.append((self.number, reason))
        if len(self.broken) > self._max_errors:
            shown = "; ".join(f"line {number}: {text}" for number, text in self.broken[:5])
            raise TraceError(
                f"{self.path} has more than {self._max_errors} broken lines ({shown}); correct it, name its format, or "
                "raise max_errors"
            )


def open_bytes(path: Path, mode: str = "rb") -> BinaryIO:
    """Opens a file for reading (compression by content; a pipe will do) or writing (compression by suffix: .gz, .zst)."""
    try:
        if mode == "wb":
            return _open_for_writing(path)
        return _decompressed(path.open("rb"))
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise TraceError(f"cannot open {path}: {getattr(error, 'strerror', None) or error}") from None


def _decompressed(stream: BinaryIO) -> BinaryIO:
    head = stream.read(len(_ZSTD))
    raw: io.RawIOBase = _Whole(head, stream)
    if head.startswith(_GZIP):
        raw = _Members(raw, lambda: zlib.decompressobj(_GZIP_WINDOW), zlib.error)
    elif head == _ZSTD:
        zstandard = _zstandard()
        raw = _Members(raw, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError)
    return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))


class _Whole(io.RawIOBase):
    """A stream with its first bytes put back. They were read to recognise the compression, and a pipe cannot go back."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = head, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        taken, self._head = self._head or self._stream.read(len(buffer)), b""
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Members(io.RawIOBase):
    """Decompresses member after member, in small parts. A file that ends inside a member raises an error."""

    def __init__(self, source: io.RawIOBase, begin: Callable[[], Any], error: type[Exception]) -> None:
        self._source = io.BufferedReader(source, _BUFFER_BYTES)
        self._begin, self._error = begin, error
        self._member: Any = None  # the member that has begun and not ended
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._source.read(_INPUT_BYTES)
            if not self._input:
                if self._member is not None:
                    raise EOFError("it was cut off")
                return 0
            self._decompress()
        taken, self._output = self._output[: len(buffer)], self._output[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def _decompress(self) -> None:
        self._member = self._member or self._begin()
        try:
            self._output = memoryview(self._member.decompress(self._input))
        except self._error as error:
            raise OSError(str(error)) from None
        self._input = b""
        if self._member.eof:
            self._input, self._member = self._member.unused_data.lstrip(b"\0"), None  # zeros may fill up a tape's block

    def close(self) -> None:
        self._source.close()
        super().close()


def _open_for_writing(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "wb"))
    if path.suffix == ".zst":
        return cast(BinaryIO, _zstandard().open(path, "wb"))
    return path.open("wb")


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise TraceError("zstd files need the package zstandard: pip install zstandard, or use gzip") from None
    return zstandard
