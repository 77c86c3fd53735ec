"""Follows the events of nodes over ZeroMQ into an index: one thread for each, which reconnects and catches up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from kvpool.cluster.feed import FeedStats, NodeFeed
from kvpool.cluster.index import ClusterIndex
from kvpool.cluster.wire_events import decode_batch
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.quiet import QuietLog

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MOST_BYTES = 2**28  # of one frame: some million blocks; who sends more is cut off before it is in memory
_PAUSE_SECONDS = 0.1  # before a connection is made again
log = logging.getLogger("kvpool")


class NodeSubscriber:
    """Follows one node. `endpoint` is where it publishes, `replay` where it sends messages again, if it does.

    When the connection breaks, what the node held vanishes from the index; when it comes back, it is asked for everything.
    A replay that does not come within `patience` seconds is given up.
    """

    def __init__(
        self,
        index: ClusterIndex,
        node: Hashable,
        endpoint: str,
        replay: str | None = None,
        *,
        topic: str = "",
        patience: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._zmq = _zmq()
        self._clock = clock
        self._patience = patience
        self._endpoint, self._replay = endpoint, replay
        self._context = self._zmq.Context()
        self._feed = NodeFeed(index, node, can_replay=replay is not None)
        self.num_unreadable = 0
        self.num_unknown = 0
        self._quiet, self._quiet_unknown = QuietLog(log), QuietLog(log)
        self.last_heard: float | None = None
        self._asking: Any = None
        self._deadline = 0.0
        try:
            self._live = self._context.socket(self._zmq.SUB)
            self._live.set(self._zmq.LINGER, 0)
            self._live.set(self._zmq.MAXMSGSIZE, MOST_BYTES)
            self._live.set(self._zmq.SUBSCRIBE, topic.encode())
            self._monitor = self._live.get_monitor_socket(self._zmq.EVENT_DISCONNECTED)
            self._live.connect(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"events cannot be followed at {endpoint!r}: {error}; give tcp://HOST:PORT") from None
        self._is_closed = self._wants_all = False
        self._thread = threading.Thread(target=self._run, name=f"kvpool-follow-{node}", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> FeedStats:
        """What happened to the messages of this node."""
        return self._feed.stats

    def resync(self) -> None:
        """Forgets what is known of the node and asks it for everything, or goes on from here where it cannot be asked."""
        self._wants_all = True

    def close(self) -> None:
        """Ends the thread. What the node holds stays in the index as it is."""
        self._is_closed = True
        self._thread.join()
        self._context.destroy(linger=0)

    # --- its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._feed.start_over()  # whoever comes late asks for everything
        poller = self._zmq.Poller()
        poller.register(self._live, self._zmq.POLLIN)
        poller.register(self._monitor, self._zmq.POLLIN)
        while not self._is_closed:
            if self._feed.wanted is not None and self._asking is None:
                self._ask(poller, self._feed.wanted)
            ready = dict(poller.poll(100))
            if self._monitor in ready or self._wants_all:
                self._wants_all = False
                if self._monitor in ready:
                    self._monitor.recv_multipart()
                    self._reconnect()
                self._stop_asking(poller)
                self._feed.start_over()
            if self._live in ready:
                self._take(self._live.recv_multipart(), self._feed.live)
            if self._asking is not None and self._asking in ready:
                self._take_replay(poller)
            if self._asking is not None and self._clock() > self._deadline:
                self._stop_asking(poller)
                self._feed.replay_ended()
        self._stop_asking(poller)
        self._live.disable_monitor()

    def _reconnect(self) -> None:
        """ZeroMQ tries again by itself, but not where the connection ended by a message over the limit."""
        with suppress(self._zmq.ZMQError):  # it has given up by itself
            self._live.disconnect(self._endpoint)
        time.sleep(_PAUSE_SECONDS)
        self._live.connect(self._endpoint)

    def _ask(self, poller: Any, start: int) -> None:
        """A socket for each question: an answer that comes too late has nobody to reach."""
        self._asking = self._context.socket(self._zmq.DEALER)
        self._asking.set(self._zmq.LINGER, 0)
        self._asking.set(self._zmq.MAXMSGSIZE, MOST_BYTES)
        self._asking.connect(self._replay)
        self._asking.send_multipart((b"", start.to_bytes(8, "big")))
        self._deadline = self._clock() + self._patience
        poller.register(self._asking, self._zmq.POLLIN)

    def _stop_asking(self, poller: Any) -> None:
        if self._asking is not None:
            poller.unregister(self._asking)
            self._asking.close()
            self._asking = None

    def _take_replay(self, poller: Any) -> None:
        frames = self._asking.recv_multipart()
        if END_OF_REPLAY in frames[-2:-1]:
            self._stop_asking(poller)
            self._feed.replay_ended()
        else:
            self._deadline = self._clock() + self._patience
            self._take(frames, self._feed.replayed)

    def _take(self, frames: list[bytes], hand_over: Callable[[int, Any], None]) -> None:
        """The number of a message and its batch are its last frames: replies have a topic before them since vLLM 0.26."""
        self.last_heard = self._clock()
        try:
            number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) > 1 and len(frames[-2]) == 8 else -1
            if number < 0:
                raise InvalidArgumentError("it has no number of 8 bytes before its batch")
            batch = decode_batch(frames[-1])
        except InvalidArgumentError as error:
            self.num_unreadable += 1
            self._quiet.warning("a message of %s cannot be read: %s", self._endpoint, error)
            return  # the next number shows the gap
        if batch.unknown:
            self.num_unknown += 1
            kinds = ", ".join(batch.unknown)
            self._quiet_unknown.warning("%s sends events that are left out (%s): update kvpool", self._endpoint, kinds)
        hand_over(number, batch)


def _zmq() -> Any:
    try:
        import msgspec  # noqa: F401
        import zmq
    except ModuleNotFoundError as error:
        raise ConfigError(f"following events needs {error.name}: pip install 'kvpool[cluster]'") from None
    return zmq
