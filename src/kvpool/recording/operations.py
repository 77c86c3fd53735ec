"""Reads and checks the lines of a recording: every operation has the arguments that its verb takes.

Each line is one JSON value. The first line describes the manager, the last one says how the recording ended. Between them is
one list per operation: a letter (`VERBS`), the time in seconds, and its arguments. Sequences, tenants and sessions are
numbers. A list of sequences may be null, which means the same as in the last line that named more than one. Tokens are base64
of little-endian int32. A prompt is [earlier sequence, how many of its first tokens are shared, the other tokens].
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvpool.checks import check_int, check_number, show
from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.files import other_format, parse_json
from kvpool.pools.arrays import Int32Array
from kvpool.recording.lines import Lines

MAGIC_KEY = "kvpool_recording"
VERSION = 2
VERBS = {
    "a": "allocate",
    "e": "extend",
    "c": "commit",
    "p": "commit_prompt",
    "w": "mark_written",
    "s": "slot_mapping",
    "r": "rewind",
    "k": "fork",
    "f": "free",
    "l": "store_last_logits",
    "o": "swap_out",
    "i": "swap_in",
    "t": "pin",
    "u": "unpin",
    "q": "set_quota",
    "v": "evict",
    "d": "offload",
    "b": "onboard",
    "x": "invalidate",
    "h": "resize",
    "g": "defragment",
    "z": "reset_prefix_cache",
    "n": "narrow",
    "y": "hint",
    "m": "invalidate_tenant",
    "j": "session",
}
SESSION_VERBS = ("pause", "resume", "fork", "end")
MAX_SECONDS = 2**40  # since the recording began
_MAX_NUMBER = 2**40
MAX_TOKENS = 2**30  # of all prompts: 4 GiB in memory, whatever the file holds

Check = Callable[[Any], None]


def pack(tokens: Int32Array) -> str:
    """Writes tokens as text."""
    return base64.b64encode(tokens.astype("<i4").tobytes()).decode()


def unpack(text: str) -> Int32Array:
    """The tokens in a text that `pack` wrote."""
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<i4").astype(np.int32)
    except ValueError:  # no base64, or no multiple of four bytes
        raise TraceError(f"{show(text)} is no text of tokens") from None


class Operations:
    """The operations of a recording. It keeps all prompts, because later ones may refer to them."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._iterator = iter(lines)
        self.name = lines.path.name
        self._prompts: dict[int, Int32Array] = {}
        self._num_tokens = 0  # of all prompts
        self._batch: list[int] = []
        header = self._parse(next(self._iterator, b""))
        if not isinstance(header, dict) or MAGIC_KEY not in header:
            raise TraceError(f"{self.name} is no kvpool recording")
        if problem := other_format(header[MAGIC_KEY], VERSION, VERSION, "record it again"):
            raise TraceError(f"{self.name} {problem}")
        self.header: dict[str, Any] = header
        self.end: dict[str, Any] | None = None  # the last line; None before it is reached, or if it is missing

    def __iter__(self) -> Iterator[list[Any]]:
        for line in self._iterator:
            operation = self._parse(line)
            if isinstance(operation, dict):
                self.end = operation
                if next(self._iterator, None) is not None:  # this also checks the end of the compression
                    raise self.broken("it follows the end")
                return
            try:
                _check_operation(operation)
            except TraceError as error:
                raise self.broken(error) from None
            yield operation

    def _parse(self, line: bytes) -> Any:
        try:
            return parse_json(line)
        except InvalidArgumentError as error:
            raise self.broken(error) from None

    def broken(self, reason: object) -> TraceError:
        """The error for the current line."""
        return TraceError(
            f"line {self._lines.number} of {self.name} is broken ({reason}); a recording needs all its lines"
        )

    @property
    def place(self) -> str:
        """The current line, in words."""
        return f"line {self._lines.number} of {self.name}"

    def notes(self) -> list[str]:
        """Sentences about what is missing. Call it when all operations were read."""
        found = []
        if runs := self.header.get("cached_runs"):
            found.append(f"{show(runs)} cached runs are older than the recording: what was reused of them is missing")
        if self.end is None:
            found.append("the recording has no end: it was not closed, and its last operations are missing")
        elif isinstance(end := self.end.get("end"), dict) and (reason := end.get("stopped_because")) is not None:
            found.append(f"the recording stopped early: {str(reason)[:200]}")
        return found

    def batch(self, serials: list[int] | None) -> list[int]:
        """The sequences of an operation."""
        if serials is None:
            return self._batch
        if len(serials) > 1:
            self._batch = serials
        return serials

    def tokens(self, prefix: list[Any]) -> Int32Array:
        """Tokens, from the part that they share with an earlier prompt and the rest."""
        shared_with, num_shared, packed = prefix
        rest = unpack(packed)
        if rest.min(initial=0) < 0:
            raise TraceError(f"a token is {rest.min()}; none is negative")
        if not num_shared:
            return rest
        shared = self._prompts.get(shared_with)
        if shared is None or len(shared) < num_shared:
            raise TraceError(f"no earlier prompt {shared_with} has {num_shared} tokens")
        return np.concatenate((shared[:num_shared], rest))

    def prompt(self, serial: int, prefix: list[Any] | None) -> Int32Array | None:
        """The tokens of a new sequence, kept for later ones that share them; None if only their number is known."""
        if prefix is None:
            return None
        found = self._prompts[serial] = self.tokens(prefix)
        self._num_tokens += len(found)
        if self._num_tokens > MAX_TOKENS:
            raise TraceError(f"its prompts have more than {MAX_TOKENS:,} tokens in all; read fewer of them with limit")
        return found


# --- what an operation must look like --------------------------------------------------------------------------------


def _check_operation(operation: Any) -> None:
    if not isinstance(operation, list) or len(operation) < 2 or type(operation[0]) is not str:
        raise TraceError(f"no operation: {show(operation)}")
    kind, when, *arguments = operation
    checks = _ARGUMENTS.get(kind)
    if checks is None or len(arguments) != len(checks):
        raise TraceError(f"no operation: {show(operation)}")
    if type(when) is not float or not -MAX_SECONDS <= when <= MAX_SECONDS:
        _check_time(when)
    for check, argument in zip(checks, arguments, strict=True):
        check(argument)


def _check_time(when: Any) -> None:
    if abs(check_number(when, "time", "a number of seconds", TraceError)) > MAX_SECONDS:
        raise TraceError(f"time={show(when)} must be a number of seconds, at most 2**40")


def _number(value: Any) -> None:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        check_int(value, "a number", 0, _MAX_NUMBER, TraceError)


def _numbers(values: Any) -> None:
    if type(values) is not list:
        raise TraceError(f"{show(values)} must be a list of numbers")
    for value in values:
        _number(value)


def _number_or_numbers(value: Any) -> None:
    if type(value) is list:
        _numbers(value)
    else:
        _number(value)


def _text(value: Any) -> None:
    if type(value) is not str:
        raise TraceError(f"{show(value)} must be a text")


def _session_verb(value: Any) -> None:
    if value not in SESSION_VERBS:
        raise TraceError(f"{show(value)} must be one of {', '.join(SESSION_VERBS)}")


def _bool(value: Any) -> None:
    if type(value) is not bool:
        raise TraceError(f"{show(value)} must be true or false")


def _seconds(value: Any) -> None:
    check_number(value, "a duration", "a number of seconds", TraceError)


def _share(value: Any) -> None:
    """Blocks, or a fraction of a pool."""
    if type(value) is float:
        check_number(value, "a share", "a number of blocks or a fraction", TraceError)
    else:
        _number(value)


def _tier(value: Any) -> None:
    check_int(value, "a tier", 0, len(Tier) - 1, TraceError)


def _prefix(value: Any) -> None:
    if type(value) is not list or len(value) != 3:
        raise TraceError(f"{show(value)} must be [earlier sequence, tokens shared with it, other tokens]")
    for check, part in zip((_number, _number, _text), value, strict=True):
        check(part)


def _pinned(value: Any) -> None:
    if type(value) is list:
        _prefix(value)
    else:
        _number(value)


def _scope(value: Any) -> None:
    if type(value) is not list or len(value) not in (2, 3):
        raise TraceError(f"{show(value)} must be [tenant, scope] or [tenant, scope, 1]")
    _numbers(value)


def _object(fields: dict[str, Check]) -> Check:
    """An object with these fields; each may be absent."""

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise TraceError(f"{show(value)} must be an object")
        for name, part in value.items():
            if name not in fields:
                raise TraceError(f"{show(name)} is unknown; known: {', '.join(fields)}")
            fields[name](part)

    return check


def _list_of(check: Check) -> Check:
    def check_list(values: Any) -> None:
        if type(values) is not list:
            raise TraceError(f"{show(values)} must be a list")
        for value in values:
            check(value)

    return check_list


def _or_null(check: Check) -> Check:
    def check_present(value: Any) -> None:
        if value is not None:
            check(value)

    return check_present


_sequences = _or_null(_numbers)
_counts = _or_null(_numbers)
_range = _object({"start": _number, "end": _or_null(_number), "priority": _number, "duration": _or_null(_seconds)})
_retention = _object(
    {"ranges": _list_of(_range), "decode_priority": _or_null(_number), "decode_duration": _or_null(_seconds)}
)
_options = _object(
    {
        "num_tokens": _number,
        "reserve": _number,
        "lookahead": _number,
        "cross_tokens": _number,
        "retention": _retention,
        "ttl": _seconds,
        "session": _number,
        "source": _number,  # written by 0.2: the run of which a block was found in part; not used any more
        "scope": _scope,
        "lease": _bool,
    }
)
_ARGUMENTS: dict[str, tuple[Check, ...]] = {
    "a": (_number, _or_null(_prefix), _options),
    "e": (_sequences, _number_or_numbers, _number),
    "c": (_sequences, _counts, _or_null(_text)),
    "p": (_number,),
    "w": (_sequences, _number_or_numbers),
    "s": (_sequences, _number_or_numbers, _number_or_numbers),
    "r": (_number, _number),
    "n": (_number, _number),
    "k": (_number, _numbers),
    "f": (_sequences, _bool),
    "l": (_number, _or_null(_number)),
    "o": (_sequences,),
    "i": (_sequences,),
    "t": (_number, _pinned, _or_null(_scope), _or_null(_seconds)),
    "u": (_number,),
    "q": (_number, _share, _or_null(_share)),
    "v": (_number, _number, _tier),
    "d": (_number, _number, _tier),
    "b": (_prefix, _or_null(_scope)),
    "x": (_or_null(_prefix), _or_null(_scope), _or_null(_number)),
    "h": (_number, _number, _tier),
    "g": (_tier,),
    "z": (),
    "y": (_number, _or_null(_text), _or_null(_seconds)),
    "m": (_number,),
    "j": (_session_verb, _number, _number, _or_null(_seconds), _or_null(_number)),
}
