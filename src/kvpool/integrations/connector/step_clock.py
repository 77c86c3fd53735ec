"""The time that a connector's manager sees. It stands still from a step's first look-up until the step is planned."""

from __future__ import annotations

from collections.abc import Callable


class StepClock:
    """What a look-up found must be there when the engine has made room for it: nothing expires in between."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: float | None = None

    def __call__(self) -> float:
        return self._clock() if self._held is None else self._held

    def hold(self) -> None:
        """Something is promised."""
        if self._held is None:
            self._held = self._clock()

    def go_on(self) -> None:
        """Promises were kept."""
        self._held = None
