"""What a caller knows about when a prompt will be continued: why its request stopped, or when the next one is expected."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvpool.checks import show
from kvpool.errors import InvalidArgumentError

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
