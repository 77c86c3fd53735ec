"""Why tokens of a trace's prompts missed, by cause: how many, and the seconds of computing that each cause costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvpool.sequences.missed import MissedSpan


class Missed(NamedTuple):
    """What one cause costs: a cache that had these tokens saves these seconds."""

    tokens: int = 0
    seconds: float = 0.0


class Misses:
    """Adds up what the requests of a trace missed.

    An id of it is `unit` tokens; `lengths` are those of its prompts. `seconds` is what computing so many first tokens takes.
    """

    def __init__(self, unit: int, lengths: Sequence[int], seconds: Callable[[int], float]) -> None:
        self._unit, self._lengths, self._seconds = unit, lengths, seconds
        self.by_cause: dict[str, Missed] = {}

    def note(self, index: int, num_ids: int, num_hit_ids: int, spans: Iterable[MissedSpan]) -> None:
        """A request: the spans of its ids that missed. An id that was found counts as found, but for the last token."""
        length = self._lengths[index]
        found = min(num_hit_ids * self._unit, length - 1)
        for span in spans:
            start = max(span.start * self._unit, found)
            end = length if span.end == num_ids else span.end * self._unit
            if start < end:
                before = self.by_cause.get(span.cause.value, Missed())
                seconds = before.seconds + self._seconds(end) - self._seconds(start)
                self.by_cause[span.cause.value] = Missed(before.tokens + end - start, seconds)


def cells(missed: Mapping[str, Missed], num_tokens: int, seconds: float) -> Iterator[tuple[str, ...]]:
    """Of each cause its tokens, their share of all, its seconds, and theirs; the cause that costs most first."""
    for cause, one in sorted(missed.items(), key=lambda item: -item[1].seconds):
        share = one.seconds / seconds if seconds else 0.0
        yield (
            cause,
            f"{one.tokens:,}",
            f"{one.tokens / max(1, num_tokens):.1%}",
            f"{one.seconds:,.1f} s",
            f"{share:.1%}",
        )
