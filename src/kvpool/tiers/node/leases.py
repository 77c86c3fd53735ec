"""Leases: values that stay where they are while somebody copies them.

To begin and to end a lease costs the same for one value and for a thousand. Who needs to know which values are held, to evict
or to remove some, collects them; that happens far less often.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.tiers.node.values import Span, Value, values_of


class Leases:
    """All leases of a node, by number."""

    def __init__(self) -> None:
        self._spans: dict[int, Sequence[Span]] = {}
        self._held: set[Value] | None = None  # None: not collected since leases changed
        self._last = 0

    def begin(self, spans: Sequence[Span]) -> int:
        """A new lease."""
        self._last += 1
        self._spans[self._last] = spans
        self._held = None
        return self._last

    def end(self, number: int) -> Sequence[Span]:
        """Ends a lease; returns what it kept."""
        self._held = None
        return self._spans.pop(number)

    def __getitem__(self, number: int) -> Sequence[Span]:
        return self._spans[number]

    @property
    def held(self) -> set[Value]:
        """All values that are under a lease."""
        if self._held is None:
            self._held = {value for spans in self._spans.values() for value in values_of(spans)}
        return self._held
