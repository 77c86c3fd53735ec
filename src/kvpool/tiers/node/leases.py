"""Leases: values that stay where they are while somebody copies them, and the uses that have ended since they were counted.

To begin and to end a lease costs the same for one value and for a thousand. Who needs to know which values are held, to evict
or to remove some, collects them; that happens far less often.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.tiers.node.values import Value


class Leases:
    """All leases of a node, by number."""

    def __init__(self) -> None:
        self._values: dict[int, Sequence[Value]] = {}
        self._held: set[Value] | None = None  # None: not collected since leases changed
        self._last = 0
        self.ended: list[Sequence[Value]] = []
        """The values of leases that ended after a use; whoever counts these uses takes them out."""

    def begin(self, values: Sequence[Value]) -> int:
        """A new lease."""
        self._last += 1
        self._values[self._last] = values
        self._held = None
        return self._last

    def end(self, number: int, *, were_used: bool) -> None:
        """Ends a lease."""
        values = self._values.pop(number)
        self._held = None
        if were_used:
            self.ended.append(values)

    def __getitem__(self, number: int) -> Sequence[Value]:
        return self._values[number]

    @property
    def held(self) -> set[Value]:
        """All values that are under a lease."""
        if self._held is None:
            self._held = set().union(*self._values.values())
        return self._held
