"""How long cached blocks should stay: priorities by token range, with an optional duration."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kvpool.errors import InvalidArgumentError


def _check_priority(priority: int | None, name: str) -> None:
    if priority is not None and (type(priority) is not int or not 0 <= priority <= 100):
        raise InvalidArgumentError(f"{name} must be an int in 0..100, got {priority!r}")


def _check_duration(duration: float | None, name: str) -> None:
    if duration is not None and (type(duration) not in (int, float) or not duration > 0):
        raise InvalidArgumentError(f"{name} must be a positive number of seconds or None, got {duration!r}")


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Priority of the tokens `start..end` (end exclusive, None = to the end of the prompt), for `duration` seconds."""

    start: int
    end: int | None
    priority: int
    duration: float | None = None

    def __post_init__(self) -> None:
        if type(self.start) is not int or self.start < 0:
            raise InvalidArgumentError(f"a token range must start at 0 or later, got start {self.start!r}")
        if self.end is not None and (type(self.end) is not int or self.end <= self.start):
            raise InvalidArgumentError(f"a token range must not be empty, got {self.start}..{self.end}")
        if self.priority is None:
            raise InvalidArgumentError("a token range needs a priority, an int in 0..100, got None")
        _check_priority(self.priority, "priority")
        _check_duration(self.duration, "duration")


@dataclass(frozen=True, slots=True)
class Retention:
    """Priorities 0 (goes first) to 100 (stays longest) for the blocks of one request; unnamed tokens keep theirs.

    A block takes the range that holds its first token. Durations run from the moment the request is freed; afterwards the
    block falls back to the default priority of 35. They order the policies `adaptive` and `priority`, on every
    tier: an evicted run is dropped when it could only push a more important one out of the tier below.

    >>> Retention([TokenRange(0, 512, priority=90)], decode_priority=10).priority_at(100, num_prompt_tokens=600)
    (90, None)
    """

    ranges: tuple[TokenRange, ...] | list[TokenRange] = ()
    decode_priority: int | None = None
    decode_duration: float | None = None

    def __post_init__(self) -> None:
        _check_priority(self.decode_priority, "decode_priority")
        _check_duration(self.decode_duration, "decode_duration")
        if self.decode_duration is not None and self.decode_priority is None:
            raise InvalidArgumentError("decode_duration needs a decode_priority: set both or neither")
        if not isinstance(self.ranges, (tuple, list)) or not all(isinstance(part, TokenRange) for part in self.ranges):
            raise InvalidArgumentError(f"ranges must be a list of TokenRange, got {self.ranges!r}")
        ordered = tuple(sorted(self.ranges, key=lambda r: r.start))
        for left, right in pairwise(ordered):
            if left.end is None:
                raise InvalidArgumentError(
                    f"the open range from {left.start} must be the last; {right.start}.. follows it"
                )
            if right.start < left.end:
                raise InvalidArgumentError(
                    f"token ranges {left.start}..{left.end} and {right.start}..{right.end} overlap; cut them apart"
                )
        object.__setattr__(self, "ranges", ordered)

    def priority_at(self, position: int, num_prompt_tokens: int) -> tuple[int | None, float | None]:
        """Priority and duration of the token at `position`; (None, None) leaves it as it is."""
        if position >= num_prompt_tokens:
            return self.decode_priority, self.decode_duration
        for part in self.ranges:
            if part.start <= position and (part.end is None or position < part.end):
                return part.priority, part.duration
        return None, None

    def cuts(self, num_prompt_tokens: int, block_size: int) -> list[int]:
        """Depths in blocks where the priority may change; behind the prompt it is the same everywhere."""
        depths = {-(-num_prompt_tokens // block_size)}
        for part in self.ranges:
            for position in (part.start, part.end):
                if position is not None:
                    depths.add(-(-min(position, num_prompt_tokens) // block_size))
        depths.discard(0)
        return sorted(depths)
