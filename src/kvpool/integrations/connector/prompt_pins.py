"""Prompts that requests asked to pin: pinned when all of their blocks are there, for as long as they said."""

from __future__ import annotations

import logging

from kvpool.errors import KVPoolError
from kvpool.integrations.connector.tracked_request import TrackedRequest
from kvpool.manager import KVCacheManager
from kvpool.manager.pins import Pin
from kvpool.quiet import QuietLog

_MANY = 1024  # pins after which those whose time is over are dropped

_log = logging.getLogger("kvpool")


class PromptPins:
    """Pins of the host, by scope and prompt."""

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._due: list[TrackedRequest] = []
        self._pins: dict[tuple[object, ...], Pin] = {}
        self._quiet = QuietLog(_log)

    def add(self, tracked: TrackedRequest) -> None:
        """A request has ended that wanted its prompt pinned, or not any more."""
        self._due.append(tracked)

    def apply(self) -> None:
        """Pins the prompts whose blocks are not on their way any more."""
        if not self._due:
            return
        over = [tracked for tracked in self._due if tracked.saving is None]
        self._due = [tracked for tracked in self._due if tracked.saving is not None]
        for tracked in over:
            self._pin(tracked)

    def _pin(self, tracked: TrackedRequest) -> None:
        tokens = tracked.tokens(tracked.num_prompt // self._block_size * self._block_size)
        items = tracked.items_within(len(tokens))
        key = tracked.scope, items, tokens.tobytes()
        before, seconds = self._pins.pop(key, None), tracked.wishes.pin
        if seconds:
            try:
                self._pins[key] = self._manager.pin(tokens, tracked.scope, float(seconds), items)
            except KVPoolError as error:
                name = tracked.request.request_id
                self._quiet.warning("kvpool connector: the prompt of %s is not pinned: %s", name, error)
        if before is not None and self._manager.is_pinned(before):
            self._manager.unpin(before)
        if len(self._pins) > _MANY:
            self._pins = {key: pin for key, pin in self._pins.items() if self._manager.is_pinned(pin)}

    def end_all(self) -> None:
        """Nothing is pinned any more."""
        self._due.clear()
        for pin in self._pins.values():
            if self._manager.is_pinned(pin):
                self._manager.unpin(pin)
        self._pins.clear()
