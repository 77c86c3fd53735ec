"""Is the cache of any use? If prompts begin like earlier ones and nothing was ever found, one log line says so, and why."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping

from kvpool.integrations.connector.tracked_request import TrackedRequest

REPEATS = 8  # prompts that should have been found, before it is said
SHORT_PROMPTS = 32  # prompts without a whole block, before it is said
_REMEMBERED = 4096

_log = logging.getLogger("kvpool")


class UnfoundPrefixes:
    """Counts prompts that begin like one that ended before, until something is found for the first time."""

    def __init__(self, block_size: int, num_rows: int, counts: Callable[[], Mapping[str, int]]) -> None:
        self._block_size = block_size
        self._num_rows = num_rows
        self._counts = counts
        self._ended: OrderedDict[tuple[object, bytes], None] = OrderedDict()
        self._repeats = 0
        self._short = 0
        self._is_settled = False  # something was found, or the line was written

    def looked(self, tracked: TrackedRequest, num_local: int, num_found: int) -> None:
        """A request was looked up for the first time: so many blocks were in the engine's own cache, so many were found."""
        if self._is_settled:
            return
        if num_found:
            self._is_settled = True
            self._ended.clear()
        elif tracked.num_ids <= self._block_size:
            self._short += 1
            if self._short == SHORT_PROMPTS:
                self._say(
                    f"none of {SHORT_PROMPTS} prompts is longer than a block of {self._block_size} tokens, and only whole "
                    "blocks are kept; a smaller --block-size would help"
                )
        elif not num_local and self._key(tracked) in self._ended:
            self._repeats += 1
            if self._repeats == REPEATS:
                self._say(self._reason())

    def ended(self, tracked: TrackedRequest) -> None:
        """A request is over: what it computed should be found from now on."""
        if self._is_settled or not tracked.is_known or tracked.num_ids <= self._block_size:
            return
        self._short = -(2**60)  # there are long ones
        self._ended[self._key(tracked)] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def forget(self) -> None:
        """After a reset nothing is expected to be found."""
        self._ended.clear()

    def _key(self, tracked: TrackedRequest) -> tuple[object, bytes]:
        return (tracked.scope, tracked.items_within(self._block_size)), tracked.tokens(self._block_size).tobytes()

    def _reason(self) -> str:
        counts = self._counts()
        said = f"{REPEATS} prompts began like earlier ones, and nothing was ever found for them: "
        said += f"{counts['stored']} blocks were stored, {counts['no_room']} had no room on a host of {self._num_rows} blocks"
        if counts["no_room"] or counts["stored"]:
            return f"{said}; a larger host_bytes would help"
        return f"{said}; do requests ask for no_store, or is kv_role kv_consumer?"

    def _say(self, what: str) -> None:
        self._is_settled = True
        self._ended.clear()
        _log.warning("kvpool connector: %s", what)
