"""Reading and writing trace files: Mooncake JSONL, token JSONL, Azure CSV, our own recordings; plain, gzip or zstd."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, cast

from kvpool.replay.recording import MAGIC_KEY, requests_of_recording
from kvpool.replay.trace import Trace, TraceBuilder, TraceError

FORMATS = ("mooncake", "tokens", "azure", "recording")
DEFAULT_MAX_ERRORS = 10
DEFAULT_UNIT = 512  # tokens of a Mooncake block
_SNIFFED_REQUESTS = 256
_TOKEN_KEYS = ("tokens", "token_ids", "prompt_token_ids")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

Progress = Callable[[int], None]  # called with the number of lines read since the last call


def read_trace(
    path: str | os.PathLike[str],
    *,
    format: str = "auto",
    block_size: int | None = None,
    max_errors: int = DEFAULT_MAX_ERRORS,
    limit: int | None = None,
) -> Trace:
    """The trace in a file, whose format and compression are recognised by its content.

    `block_size` is the number of tokens behind each id of a Mooncake trace (by default it is inferred from the lengths).
    Broken lines are skipped and noted in `trace.problems`; more than `max_errors` of them raise `TraceError`. `limit`
    stops after so many requests.
    """
    file = Path(path)
    if format not in ("auto", *FORMATS):
        raise TraceError(f"format {format!r} is unknown; known: auto, {', '.join(FORMATS)}")
    with open_bytes(file) as stream:
        lines = _Lines(file, stream, max_errors)
        first = lines.peek()
        found = _recognise(first, file) if format == "auto" else format
        if found == "azure":
            return _read_azure(lines, file.name, limit)
        if found == "recording":
            return requests_of_recording(lines, file.name, limit)
        if found == "tokens":
            return _read_json(lines, TraceBuilder(file.name, unit=1, format="tokens"), _token_request, limit)
        builder = TraceBuilder(file.name, unit=block_size or DEFAULT_UNIT, format="mooncake")
        trace = _read_json(lines, builder, _block_request, limit)
    return trace if block_size else _with_inferred_unit(trace)


class _Lines:
    """Lines with their numbers, one of them looked at ahead; counts broken ones."""

    def __init__(self, path: Path, stream: BinaryIO, max_errors: int) -> None:
        self._path, self._stream, self._max_errors = path, stream, max_errors
        self._next: bytes | None = None
        self.broken: list[tuple[int, str]] = []
        self.number = 0

    def peek(self) -> bytes:
        if self._next is None:
            self._next = self._read()
        return self._next

    def _read(self) -> bytes:
        try:
            return self._stream.readline()
        except (OSError, EOFError) as error:
            raise TraceError(f"{self._path} ends or breaks after line {self.number}: {error}") from None

    def __iter__(self) -> Iterator[bytes]:
        while line := self.peek():
            self._next = None
            self.number += 1
            if not line.isspace():
                yield line

    def skip(self, reason: str) -> None:
        """Notes that the current line is broken; raises when there are too many."""
        self.broken.append((self.number, reason))
        if len(self.broken) > self._max_errors:
            shown = "; ".join(f"line {number}: {text}" for number, text in self.broken[:5])
            raise TraceError(
                f"{self._path} has more than {self._max_errors} broken lines ({shown}); correct it, name its format, or "
                "raise max_errors"
            )


def open_bytes(path: Path, mode: str = "rb") -> BinaryIO:
    """Opens a file for reading (compression by content) or writing (compression by suffix: .gz, .zst)."""
    try:
        if mode == "wb":
            return _open_for_writing(path)
        with path.open("rb") as plain:
            magic = plain.read(4)
        if magic[:2] == _GZIP:
            return cast(BinaryIO, io.BufferedReader(gzip.open(path, "rb")))
        if magic == _ZSTD:
            return cast(BinaryIO, io.BufferedReader(_zstandard().open(path, "rb")))
        return path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot open {path}: {error.strerror or error}") from None


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


def _recognise(first: bytes, path: Path) -> str:
    if not first.strip():
        raise TraceError(f"{path} is empty or starts with an empty line; a trace has one request per line")
    if b"ContextTokens" in first:
        return "azure"
    try:
        record = json.loads(first)
    except ValueError:
        return "mooncake"  # the first line alone may be broken: it is reported like any other
    if isinstance(record, dict):
        if MAGIC_KEY in record:
            return "recording"
        if "hash_ids" not in record and any(key in record for key in _TOKEN_KEYS):
            return "tokens"
    return "mooncake"


def _read_json(
    lines: _Lines, builder: TraceBuilder, parse: Callable[[dict[str, Any], TraceBuilder], None], limit: int | None
) -> Trace:
    builder.problems.broken = lines.broken
    for line in lines:
        if limit is not None and len(builder) >= limit:
            break
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TraceError(f"a request must be a JSON object, not {type(record).__name__}")
            parse(record, builder)
        except json.JSONDecodeError as error:
            lines.skip(f"it is not JSON ({error.msg} at column {error.colno})")
        except TypeError:  # a list or an object where an id should be
            lines.skip("ids must be numbers or strings")
        except ValueError as error:  # TraceError is one
            lines.skip(str(error)[:120])
    return builder.build()


def _block_request(record: dict[str, Any], builder: TraceBuilder) -> None:
    ids = record.get("hash_ids")
    if not isinstance(ids, list):
        raise TraceError("hash_ids is missing or no list")
    length = _length(record, "input_length", len(ids) * builder.unit)
    if length == 0 and ids:
        raise TraceError(f"input_length is 0, but there are {len(ids)} hash_ids")
    builder.add(_timestamp(record), ids, length, _length(record, "output_length", 0), *_who(record))


def _token_request(record: dict[str, Any], builder: TraceBuilder) -> None:
    tokens = next((record[key] for key in _TOKEN_KEYS if key in record), None)
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise TraceError(f"none of {', '.join(_TOKEN_KEYS)} is a list of integers")
    builder.add(_timestamp(record), tokens, len(tokens), _length(record, "output_length", 0), *_who(record))


def _timestamp(record: dict[str, Any]) -> float:
    value = record.get("timestamp", 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise TraceError(f"timestamp is {value!r}; it must be a number of milliseconds")
    return float(value)


def _length(record: dict[str, Any], key: str, default: int) -> int:
    value = record.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TraceError(f"{key} is {value!r}; it must be an integer, 0 or more")
    return value


def _who(record: dict[str, Any]) -> tuple[str | None, str | None]:
    """Session and tenant of a request, where the file names them."""
    session, tenant = record.get("session"), record.get("tenant")
    return None if session is None else str(session), None if tenant is None else str(tenant)


def _with_inferred_unit(trace: Trace) -> Trace:
    """Tokens per id, from the lengths: the power of two nearest to what most requests say."""
    ratios = [r.input_length / len(r.ids) for r in trace.head(_SNIFFED_REQUESTS) if len(r.ids) and r.input_length]
    if not ratios:
        return trace
    typical = median(ratios)
    unit = 1 << max(0, round(typical)).bit_length()  # the power of two above; the last block is partial, so round up
    if unit // 2 and typical <= unit // 2 * 1.02:
        unit //= 2
    return Trace(**{**trace.__dict__, "unit": unit})


def _read_azure(lines: _Lines, name: str, limit: int | None) -> Trace:
    builder = TraceBuilder(name, unit=1, format="azure", reuse_known=False)
    builder.problems.broken = lines.broken
    begin: datetime | None = None
    iterator = iter(lines)
    header = next(iterator).decode("utf-8", "replace").strip().split(",")
    if len(header) < 3:
        raise TraceError(f"line 1 of {name} must name TIMESTAMP,ContextTokens,GeneratedTokens, not {header}")
    for line in iterator:
        if limit is not None and len(builder) >= limit:
            break
        try:
            when, inputs, outputs = line.decode("utf-8").strip().split(",")[:3]
            moment = datetime.fromisoformat(when[:26])
            begin = begin or moment
            if int(inputs) < 0 or int(outputs) < 0:
                raise TraceError("a number of tokens is negative")
            builder.add((moment - begin).total_seconds() * 1000, (), int(inputs), int(outputs))
        except ValueError as error:
            lines.skip(str(error)[:120])
    return builder.build()


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a trace as JSONL: Mooncake's form for block ids, tokens otherwise. `.gz` and `.zst` compress."""
    key = "tokens" if trace.unit == 1 else "hash_ids"
    with open_bytes(Path(path), "wb") as stream:
        for request in trace:
            record: dict[str, Any] = {
                "timestamp": request.timestamp, "input_length": request.input_length,
                "output_length": request.output_length, key: request.ids.tolist(),
            }  # fmt: skip
            if request.timestamp.is_integer():
                record["timestamp"] = int(request.timestamp)
            if request.session is not None:
                record["session"] = request.session
            if request.tenant is not None:
                record["tenant"] = request.tenant
            stream.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
