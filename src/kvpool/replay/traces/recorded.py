"""The requests of a recording as a trace."""

from __future__ import annotations

from typing import Any

from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.eviction.hints import ReuseHint
from kvpool.pools.arrays import Int32Array
from kvpool.recording.lines import Lines
from kvpool.recording.operations import Operations, unpack
from kvpool.recording.playback import scope_of
from kvpool.replay.traces.trace import Trace, TraceBuilder


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
            scope_of(more.get("scope")).tenant or None,
            said.stop,
            said.expected_seconds,
        )
    return builder.build()
