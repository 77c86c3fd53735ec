"""Reading and writing trace files: Mooncake JSONL, token JSONL, Azure CSV, our own recordings; plain, gzip or zstd."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from kvpool.checks import check_int, check_number, show
from kvpool.config.layers import MAX_BLOCK_SIZE, ceil_div
from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.files import parse_json
from kvpool.pools.arrays import Int32Array
from kvpool.recording.lines import Lines, open_bytes
from kvpool.recording.operations import MAGIC_KEY, MAX_SECONDS, Operations, unpack
from kvpool.recording.playback import recorded_scope
from kvpool.replay.trace import MAX_LENGTH, MAX_TIMESTAMP, Trace, TraceBuilder
from kvpool.scope import ReuseHint, known_stop

FORMATS = ("mooncake", "tokens", "azure", "recording")
DEFAULT_MAX_ERRORS = 10
DEFAULT_UNIT = 512  # tokens of a Mooncake block
MAX_NAME = 1024  # characters that name a session or a tenant
_SNIFFED_REQUESTS = 256
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TOKEN_KEYS = ("tokens", "token_ids", "prompt_token_ids")
_IDS, _TOKENS, _NUMBERS = frozenset({int, str}), frozenset({int}), frozenset({int, float})  # types that JSON gives
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))? ?(?:Z|([+-]\d\d):?(\d\d))?", re.ASCII)

# What `TraceBuilder.add` takes.
_Request = tuple[float, list[Any], int, int, str | None, str | None, str | None, float | None]


def read_trace(
    path: str | os.PathLike[str],
    *,
    format: str = "auto",
    block_size: int | None = None,
    max_errors: int = DEFAULT_MAX_ERRORS,
    limit: int | None = None,
) -> Trace:
    """The trace in a file, whose format and compression are recognised by its content.

    `block_size` is the number of tokens of each id of a Mooncake trace (by default it is inferred from the lengths). Broken
    lines are skipped and listed in `trace.problems`. More than `max_errors` of them raise `TraceError`; so do damaged
    compression and a line of more than 32 MiB. `limit` stops after so many requests.
    """
    file = Path(path)
    if format not in ("auto", *FORMATS):
        raise TraceError(f"format {format!r} is unknown; known: auto, {', '.join(FORMATS)}")
    if block_size is not None:
        check_int(block_size, "block_size", 1, MAX_BLOCK_SIZE, TraceError)
    if limit is not None:
        check_int(limit, "limit", 1, 2**63, TraceError)
    with Lines(file, max_errors) as lines:
        first = lines.peek()
        if not first.strip():
            raise TraceError(f"{file} is empty or starts with an empty line; a trace has one request per line")
        found = _recognise(first) if format == "auto" else format
        if found == "azure":
            return _read_azure(lines, file.name, limit)
        if found == "recording":
            return requests_of_recording(lines, limit)
        if found == "tokens":
            return _read_json(lines, TraceBuilder(file.name, unit=1, format="tokens"), _token_request, limit)
        builder = TraceBuilder(file.name, unit=block_size or DEFAULT_UNIT, format="mooncake")
        trace = _read_json(lines, builder, _block_request, limit)
    return trace if block_size else _with_inferred_unit(trace)


def _recognise(first: bytes) -> str:
    if b"ContextTokens" in first:
        return "azure"
    try:
        record = parse_json(first)
    except InvalidArgumentError:
        return "mooncake"  # if only the first line is broken, it is reported like any other
    if isinstance(record, dict):
        if MAGIC_KEY in record:
            return "recording"
        if "hash_ids" not in record and any(key in record for key in _TOKEN_KEYS):
            return "tokens"
    return "mooncake"


def _read_json(
    lines: Lines, builder: TraceBuilder, parse: Callable[[dict[str, Any], int], _Request], limit: int | None
) -> Trace:
    builder.problems.broken = lines.broken
    for line in lines:
        if limit is not None and len(builder) >= limit:
            break
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise TraceError(f"a request must be a JSON object, not {type(record).__name__}")
            request = parse(record, builder.unit)
        except InvalidArgumentError as error:
            lines.skip(str(error))
        else:
            builder.add(*request)
    return builder.build()


def _block_request(record: dict[str, Any], unit: int) -> _Request:
    ids = record.get("hash_ids")
    if not isinstance(ids, list):
        raise TraceError("hash_ids is missing or no list")
    if not _IDS.issuperset(map(type, ids)):
        raise TraceError("ids must be integers or strings")
    length = _length(record, "input_length", len(ids) * unit)
    if length == 0 and ids:
        raise TraceError(f"input_length is 0, but there are {len(ids)} hash_ids")
    return _timestamp(record), ids, length, _length(record, "output_length", 0), *_who(record)


def _token_request(record: dict[str, Any], unit: int) -> _Request:
    tokens = next((record[key] for key in _TOKEN_KEYS if key in record), None)
    if not isinstance(tokens, list) or not _TOKENS.issuperset(map(type, tokens)):
        raise TraceError(f"none of {', '.join(_TOKEN_KEYS)} is a list of integers")
    return _timestamp(record), tokens, len(tokens), _length(record, "output_length", 0), *_who(record)


def _timestamp(record: dict[str, Any]) -> float:
    value = record.get("timestamp", 0)
    if type(value) in _NUMBERS and -MAX_TIMESTAMP <= value <= MAX_TIMESTAMP:
        return float(value)
    check_number(value, "timestamp", "a number of milliseconds", TraceError)
    raise TraceError(f"timestamp={show(value)} must be a number of milliseconds, at most 2**53")


def _length(record: dict[str, Any], key: str, default: int) -> int:
    value = record.get(key, default)
    if type(value) is int and 0 <= value <= MAX_LENGTH:
        return value
    return check_int(value, key, 0, MAX_LENGTH, TraceError)


def _who(record: dict[str, Any]) -> tuple[str | None, str | None, str | None, float | None]:
    """Session and tenant of a request, why it stopped (if it is a known word), and when its continuation was expected."""
    expected = record.get("expected_seconds")
    if expected is not None:
        expected = ReuseHint(expected_seconds=expected).expected_seconds
    return _name(record, "session"), _name(record, "tenant"), known_stop(record.get("stop")), expected


def _name(record: dict[str, Any], key: str) -> str | None:
    value = record.get(key)
    if value is None:
        return None
    if type(value) not in (int, str) or len(shown := str(value)) > MAX_NAME:
        raise TraceError(f"{key}={show(value)} must be a text of at most {MAX_NAME} characters, or an integer")
    return shown


def _with_inferred_unit(trace: Trace) -> Trace:
    """Infers the tokens per id from the lengths: the power of two nearest to what most requests have.

    Where it does not fit all of them and another number does, it is that number.
    """
    sizes = [(r.input_length, len(r.ids)) for r in trace.head(_SNIFFED_REQUESTS) if len(r.ids) and r.input_length]
    if not sizes:
        return trace
    typical = median(tokens / ids for tokens, ids in sizes)
    unit = 1 << max(0, round(typical)).bit_length()  # the power of two above; the last block is partial, so round up
    if unit // 2 and typical <= unit // 2 * 1.02:
        unit //= 2
    if not all(ids in (tokens // unit, ceil_div(tokens, unit)) for tokens, ids in sizes):
        least = max(ceil_div(tokens, ids) for tokens, ids in sizes)
        most = min(((tokens - 1) // (ids - 1) for tokens, ids in sizes if ids > 1), default=least)
        fitting = range(least, min(most, MAX_BLOCK_SIZE) + 1)
        unit = max(fitting, key=lambda size: size & -size, default=unit)  # the roundest that fits all
    if unit > MAX_BLOCK_SIZE:
        raise TraceError(
            f"{trace.name} says that one id stands for about {typical:,.0f} tokens; no block is as large as that: give the "
            "number of tokens behind an id as block_size"
        )
    return Trace(**{**trace.__dict__, "unit": unit})


def _read_azure(lines: Lines, name: str, limit: int | None) -> Trace:
    builder = TraceBuilder(name, unit=1, format="azure", reuse_known=False)
    builder.problems.broken = lines.broken
    begin: datetime | None = None
    iterator = iter(lines)
    columns = _azure_fields(next(iterator))
    if any(columns.count(column) != 1 for column in _AZURE_COLUMNS):
        raise TraceError(f"line 1 of {name} must name {','.join(_AZURE_COLUMNS)} once each, not {show(columns)}")
    places = [columns.index(column) for column in _AZURE_COLUMNS]
    for line in iterator:
        if limit is not None and len(builder) >= limit:
            break
        try:
            moment, inputs, outputs = _azure_request(line, places)
            begin = begin or moment
            if (moment.tzinfo is None) != (begin.tzinfo is None):
                raise TraceError("some times of this file name their zone and others do not")
        except InvalidArgumentError as error:
            lines.skip(str(error))
        else:
            builder.add((moment - begin).total_seconds() * 1000, (), inputs, outputs)
    return builder.build()


def _azure_fields(line: bytes) -> list[str]:
    return [field.strip() for field in line.decode("utf-8", "replace").split(",")]


def _azure_request(line: bytes, places: list[int]) -> tuple[datetime, int, int]:
    """One line; `places` are those of `_AZURE_COLUMNS` in it."""
    fields = _azure_fields(line)
    if len(fields) <= max(places):
        raise TraceError(f"a request has a time and two numbers, not {show(fields)}")
    time, *numbers = (fields[place] for place in places)
    try:
        inputs, outputs = map(int, numbers)
    except ValueError:
        raise TraceError(f"the numbers of tokens must be integers, not {show(numbers)}") from None
    if not 0 <= inputs <= MAX_LENGTH or not 0 <= outputs <= MAX_LENGTH:
        raise TraceError(f"the numbers of tokens must lie in 0..{MAX_LENGTH}, not {show(numbers)}")
    return _moment(time), inputs, outputs


def _moment(text: str) -> datetime:
    """A date and time; digits after the microseconds are dropped."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # perhaps a spelling that Python 3.10 does not know: seven digits, Z, a zone without a colon
        found = _TIME.fullmatch(text)
    with suppress(ValueError):
        if found is not None:
            seconds, fraction, hours, minutes = found.groups()
            zone = f"{hours}:{minutes}" if hours else "+00:00" if text.endswith("Z") else ""
            return datetime.fromisoformat(f"{seconds}.{(fraction or '')[:6]:0<6}{zone}")
    raise TraceError(f"{show(text)} is no time such as 2023-11-16 18:15:46.680590")


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a trace as JSONL: Mooncake's form for block ids, tokens otherwise. `.gz` and `.zst` compress."""
    try:
        with open_bytes(Path(path), "wb") as stream:
            for line in _lines_of(trace):
                stream.write(line)
    except OSError as error:  # a full disk
        raise TraceError(f"cannot write {path}: {error.strerror or error}; what is there is a part of it") from None


def _lines_of(trace: Trace) -> Iterator[bytes]:
    key = "tokens" if trace.unit == 1 else "hash_ids"
    for request in trace:
        record: dict[str, Any] = {
            "timestamp": request.timestamp,
            "input_length": request.input_length,
            "output_length": request.output_length,
            key: request.ids.tolist(),
        }
        if request.timestamp.is_integer():
            record["timestamp"] = int(request.timestamp)
        if request.session is not None:
            record["session"] = request.session
        if request.tenant is not None:
            record["tenant"] = request.tenant
        if request.stop is not None:
            record["stop"] = request.stop
        if request.expected_seconds is not None:
            record["expected_seconds"] = min(request.expected_seconds, MAX_SECONDS)
        yield json.dumps(record, separators=(",", ":")).encode() + b"\n"


def requests_of_recording(lines: Lines, limit: int | None = None) -> Trace:
    """The requests in a recording as a trace of tokens: arrival, prompt, tokens generated, tenant."""
    operations = Operations(lines)
    found: dict[int, tuple[float, Int32Array, dict[str, Any]]] = {}
    committed: dict[int, int] = {}
    hints: dict[int, ReuseHint] = {}
    for kind, when, *arguments in operations:
        if kind == "a":
            serial, prefix, more = arguments
            if limit is not None and len(found) >= limit:
                break
            try:
                tokens = operations.prompt(serial, prefix)
            except TraceError as error:
                raise operations.broken(error) from None
            found[serial] = (when * 1000, unpack("") if tokens is None else tokens, more)
        elif kind == "y":
            try:
                hints[arguments[0]] = ReuseHint(arguments[1], arguments[2])
            except InvalidArgumentError as error:
                raise operations.broken(error) from None
        elif kind in "ewsfoi":
            operations.batch(arguments[0])
        elif kind == "c":
            serials = operations.batch(arguments[0])
            counts = arguments[1] or [1] * len(serials)
            if len(counts) != len(serials):
                raise operations.broken(f"{len(counts)} counts for {len(serials)} sequences")
            if arguments[2] is not None:
                for serial, count in zip(serials, counts, strict=True):
                    committed[serial] = committed.get(serial, 0) + count
    builder = TraceBuilder(operations.name, unit=1, format="recording")
    for serial, (when, tokens, more) in found.items():
        said = hints.get(serial, ReuseHint())
        session = None if "session" not in more else f"session {more['session']}"
        builder.add(
            when,
            tokens.tolist(),
            len(tokens),
            committed.get(serial, 0),
            session,
            recorded_scope(more.get("scope")).tenant or None,
            said.stop,
            said.expected_seconds,
        )
    return builder.build()
