"""The viewers of one manager: a thread samples it while anybody watches, and each viewer reads at its own pace.

A viewer that reads too slowly loses unread messages and gets a new snapshot instead. The page shows how often that happened.
No viewer makes the manager, or another viewer, wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvpool.errors import InvalidArgumentError
from kvpool.manager import KVCacheManager
from kvpool.version import __version__
from kvpool.view.frames import PLAIN, Names, frame, view_event
from kvpool.view.sampling import Look, Sampler

log = logging.getLogger("kvpool")

MAX_PENDING = 8  # messages that a viewer has not read yet
MAX_VIEWERS = 16
_IDLE_SECONDS = 1.0  # at least so often something is sent, so that a page knows that it is connected
_SHARE_OF_TIME = 0.1  # looks and their messages may take this share of one core

_LOOKS_IN_MEAN = 20


class Viewer:
    """One viewer. Any thread may call its `wake` when there is something to read."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self.num_skipped = 0  # messages that were never sent

    def offer(self, message: bytes, snapshot: Callable[[], bytes]) -> None:
        """Adds a message. If too many are unread, replaces them all by a snapshot. The caller wakes the viewer."""
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                self.num_skipped += len(self._pending)
                self._pending = [view_event("skipped", {"messages": self.num_skipped}), snapshot()]
            else:
                self._pending.append(message)

    def take(self) -> bytes:
        """All unread messages."""
        with self._lock:
            messages, self._pending = self._pending, []
        return b"".join(messages)


class Hub:
    """Samples a manager at most `rate` times a second while somebody watches, and not at all otherwise.

    `more` is called at every look for what else the page shows (waiting requests, latencies); it must be quick. `names`
    tells what else is known of its requests.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        title: str = "kvpool",
        rate: float = 10.0,
        events: bool = True,
        more: Callable[[], Mapping[str, Any]] | None = None,
        about: Mapping[str, Any] | None = None,
        names: Names = PLAIN,
    ) -> None:
        if not rate > 0:
            raise InvalidArgumentError(f"rate must be looks per second, more than 0, got {rate!r}")
        self.manager = manager
        self.names = names
        self.sampler = Sampler(manager, with_events=events)
        self._period = 1.0 / rate
        self._more = more
        self._about = {"title": title, "version": __version__, "rate": rate, **(about or {})}
        self._about |= {
            "block_size": manager.config.block_size,
            "group_pools": [group.pool for group in manager.config.groups],
        }
        self._wake = threading.Condition()  # guards what follows
        self._viewers: list[Viewer] = []
        self._thread: threading.Thread | None = None
        self._look: Look | None = None

    @property
    def num_viewers(self) -> int:
        """How many watch now."""
        return len(self._viewers)

    @property
    def last_look(self) -> Look | None:
        """The last look that was sent to viewers."""
        return self._look

    def join(self, wake: Callable[[], None]) -> Viewer:
        """Adds a viewer. Its first message describes the cache, its second is a snapshot."""
        viewer = Viewer(wake)
        with self._wake:
            if len(self._viewers) >= MAX_VIEWERS:
                raise InvalidArgumentError(f"{MAX_VIEWERS} pages watch already; close one of them")
            viewer.offer(view_event("hello", self._about), bytes)
            if self._look is not None:
                viewer.offer(self._message(None, self._look), bytes)
            self._viewers.append(viewer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpool-view", daemon=True)
                self._thread.start()
            self._wake.notify_all()
        viewer.wake()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """A viewer leaves. When the last one has left, the hub stops looking at the manager."""
        with self._wake:
            if viewer in self._viewers:
                self._viewers.remove(viewer)
            self._wake.notify_all()

    def close(self) -> None:
        """Stops sampling, even if somebody still watches."""
        with self._wake:
            self._viewers.clear()
            self._wake.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        self.sampler.start()
        try:
            sent = usual = 0.0
            due = time.perf_counter()
            while True:
                used = time.thread_time()
                sent = self._step(sent)
                usual += (time.thread_time() - used - usual) / _LOOKS_IN_MEAN
                # Counted from when this look was due, so that late wake-ups do not lower the rate. Missed looks are skipped.
                due = max(due + max(self._period, usual / _SHARE_OF_TIME), time.perf_counter())
                with self._wake:
                    self._wake.wait_for(lambda: not self._viewers, due - time.perf_counter())
                    if not self._viewers:
                        self._end()
                        return
        except Exception:
            log.exception("the live view stopped looking at the manager, which is not affected")
            with self._wake:
                self._viewers.clear()
                self._end()

    def _end(self) -> None:
        """The thread ends; the next viewer starts another one."""
        self.sampler.stop()
        self._thread = self._look = None

    def _step(self, sent: float) -> float:
        """Takes one look, and sends it if something has changed; returns when something was last sent."""
        look = self.sampler.look(self._more() if self._more else None)
        old, now = self._look, time.perf_counter()
        if old is not None and _is_same(old, look) and now - sent < _IDLE_SECONDS:
            return sent
        message = self._message(old, look)
        made: list[bytes] = []  # a snapshot is made once for all who need it

        def snapshot() -> bytes:
            if not made:
                made.append(self._message(None, look))
            return made[0]

        with self._wake:
            viewers = list(self._viewers)
            for viewer in viewers:
                viewer.offer(message, snapshot)
            self._look = look
        for viewer in viewers:
            viewer.wake()
        return now

    def _message(self, old: Look | None, new: Look) -> bytes:
        return view_event("frame", frame(old, new, self.names))


def _is_same(old: Look, new: Look) -> bool:
    return old.tick == new.tick and old.runs_number == new.runs_number and old.more == new.more
