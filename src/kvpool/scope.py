"""What a caller says about a prompt besides its tokens.

Who may share it, which images it has, how long its blocks should stay, and when it will be continued.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from kvpool.checks import show
from kvpool.errors import InvalidArgumentError


class MultimodalItem(NamedTuple):
    """An image, a clip or another input that stands behind placeholder tokens.

    It has `length` tokens from `position` on. `key` names its content, usually by a hash: inputs with equal keys count as
    equal. All prompts share the blocks before its first token. Only prompts with the same item at the same place share
    the block of that token and those behind it.
    """

    position: int
    length: int
    key: str | bytes | int


@dataclass(frozen=True, slots=True)
class ReuseScope:
    """What must be equal, besides the tokens, before one request may reuse the blocks of another.

    `tenant` isolates tenants from each other, `adapter` names a LoRA, `weights` a version of the model. `multimodal`
    isolates whole prompts by what is behind their placeholder tokens, as (content hash, token offset); their order counts.
    (To share the text before an image, give `allocate` its `MultimodalItem`s instead.) `encoder` names the input of an
    encoder by its content: a decoder's keys and values depend on it, so requests with `cross_tokens` and no such name
    share nothing. `salt` separates further, within a tenant and its quota.

    >>> ReuseScope(adapter="sql-lora") == ReuseScope(adapter="sql-lora")
    True
    >>> ReuseScope(tenant="ab") == ReuseScope(tenant="a", adapter="b")
    False
    """

    tenant: str = ""
    adapter: str = ""
    weights: str = ""
    multimodal: tuple[tuple[str, int], ...] = ()
    encoder: str = ""
    salt: str = ""

    @property
    def fields(self) -> list[str]:
        """What it consists of, but for the salt: different scopes have different lists."""
        fields = [self.tenant, self.adapter, self.weights]
        for content_hash, offset in self.multimodal:
            fields += (content_hash, str(offset))
        if self.encoder:  # an even number of fields: no scope without an encoder has that
            fields.append(self.encoder)
        return fields

    def __post_init__(self) -> None:
        for name in ("tenant", "adapter", "weights", "encoder", "salt"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidArgumentError(f'ReuseScope.{name} must be a string ("" = none), got {value!r}')
        if not isinstance(self.multimodal, tuple):
            raise InvalidArgumentError(
                f"ReuseScope.multimodal must be a tuple of (content hash, token offset) pairs, got {self.multimodal!r}"
            )
        for item in self.multimodal:
            _check_multimodal_item(item)


def _check_multimodal_item(item: object) -> None:
    if not isinstance(item, tuple) or len(item) != 2:
        raise InvalidArgumentError(f"a multimodal item must be a tuple (content hash, token offset), got {item!r}")
    content_hash, offset = item
    if not isinstance(content_hash, str):
        raise InvalidArgumentError(f"a multimodal content hash must be a string, got {content_hash!r}")
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise InvalidArgumentError(f"a multimodal token offset must be an int >= 0, got {offset!r}")


STOPS: Final = ("stop", "tool_calls", "length")


_SAME_AS: Final = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


_SOONEST: Final = 1.0  # seconds


_STEP: Final = 4.0


_STEPS: Final = 6


NUM_HINTS: Final = 1 + len(STOPS) + _STEPS  # hints that policies tell apart; the first is none


@dataclass(frozen=True)
class ReuseHint:
    """A hint for the eviction policy, given when a request ends, or before if it is known then.

    It is no promise: policies learn what it is worth.

    `stop` says why the request stopped, in OpenAI's words or Anthropic's; `expected_seconds` when its continuation is
    expected (`math.inf`: never), which says more and is what counts if both are given.

    >>> ReuseHint(stop="tool_use").stop, ReuseHint(expected_seconds=3).code
    ('tool_calls', 5)
    """

    stop: str | None = None
    expected_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.stop is not None:
            known = known_stop(self.stop)
            if known is None:
                raise InvalidArgumentError(
                    f"stop={show(self.stop)} is unknown; known: {', '.join((*STOPS, *_SAME_AS))}"
                )
            object.__setattr__(self, "stop", known)
        seconds = self.expected_seconds
        if seconds is not None:
            object.__setattr__(self, "expected_seconds", _checked(seconds))

    @property
    def code(self) -> int:
        """The hint as policies tell it apart: 0 says nothing, then reasons to stop, then times in powers of four."""
        if self.expected_seconds is not None:
            step, limit = 0, _SOONEST
            while step < _STEPS - 1 and self.expected_seconds > limit:
                step, limit = step + 1, limit * _STEP
            return 1 + len(STOPS) + step
        return 0 if self.stop is None else 1 + STOPS.index(self.stop)


def check_scope(scope: ReuseScope) -> ReuseScope:
    """Refuses what is no scope."""
    if not isinstance(scope, ReuseScope):
        raise InvalidArgumentError(f"scope must be a ReuseScope, got {scope!r}")
    return scope


def check_hint(hint: object) -> None:
    """Refuses what is no hint."""
    if not isinstance(hint, ReuseHint):
        raise InvalidArgumentError(
            f"{show(hint)} is no hint; write ReuseHint(stop=...) or ReuseHint(expected_seconds=...)"
        )


def _checked(seconds: object) -> float:
    with suppress(OverflowError):  # an integer above every float
        if type(seconds) in (int, float) and (found := float(seconds)) >= 0:  # type: ignore[arg-type]
            return found
    raise InvalidArgumentError(f"expected_seconds={show(seconds)} must be a number of seconds, not negative")


def known_stop(stop: object) -> str | None:
    """The reason to stop of which this is a spelling, or None."""
    if not isinstance(stop, str):
        return None
    found = _SAME_AS.get(stop, stop)
    return found if found in STOPS else None


# --- retention -------------------------------------------------------------------------------------------------------


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
