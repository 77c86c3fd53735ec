"""Applies the events of nodes to an index over ZeroMQ. Each node has a thread, which reconnects and catches up.

A `NodeFeed` puts the messages of one node in order, even if some are lost or sent twice, or the node starts again. It decides
by message numbers. Timestamps only tell whether a repeated number is the same message, so clocks need not agree. If messages
are missing, it asks for them, keeps what comes meanwhile, and goes on. If it cannot get them, it forgets the blocks of the
node, because it may have missed removals.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, NamedTuple

from kvpool.cluster.index import ClusterIndex
from kvpool.cluster.wire_events import AllBlocksCleared, WireBatch, decode_batch
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.quiet import QuietLog

_REMEMBERED = 1024
_MOST_WAITING = 10_000
_ATTEMPTS = 3
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MOST_BYTES = 2**28  # of one frame: some million blocks; a longer one closes the connection before it is in memory
_PAUSE_SECONDS = 0.1  # before a connection is made again
_CLOSE_SECONDS = 10.0  # that `close` waits for the thread
log = logging.getLogger("kvpool")


class FeedStats(NamedTuple):
    """Counts of a feed: messages applied, received twice and lost, gaps, and how often the node started again."""

    num_applied: int
    num_duplicates: int
    num_lost: int
    num_gaps: int
    num_restarts: int


class NodeFeed:
    """Follows one node. `can_replay` says whether missing messages can be asked for.

    Its owner passes live messages to `live`. Whenever `wanted` is a number, the owner asks the node for the messages from
    there on, passes them to `replayed`, and then calls `replay_ended`, even if nothing came.
    """

    def __init__(self, index: ClusterIndex, node: Hashable, *, can_replay: bool) -> None:
        self._index = index
        self._node = node
        self._can_replay = can_replay
        self._next: int | None = None  # the number of the next message; None before the first
        self._stamps: OrderedDict[int, float] = OrderedDict()
        self._waiting: list[tuple[int, WireBatch]] | None = None  # messages that came during a replay
        self._attempts = 0
        self._before: tuple[int, dict[int, float]] | None = None  # next number and stamps when it started over
        self._num_applied = self._num_duplicates = self._num_lost = self._num_gaps = self._num_restarts = 0
        index.add_node(node)

    @property
    def wanted(self) -> int | None:
        """The number from which on messages are missing and should be asked for; None if none are."""
        return None if self._waiting is None else self._next or 0

    @property
    def stats(self) -> FeedStats:
        """The counts so far."""
        return FeedStats(self._num_applied, self._num_duplicates, self._num_lost, self._num_gaps, self._num_restarts)

    def live(self, number: int, batch: WireBatch) -> None:
        """A message as it was sent."""
        if self._waiting is not None:
            if len(self._waiting) == _MOST_WAITING:
                self._waiting.clear()  # the next message will show the gap
            self._waiting.append((number, batch))
        elif self._next is not None and number < self._next:
            self._again(number, batch)
        elif number == (self._next or 0):
            self._apply(number, batch)
        else:
            self._num_gaps += 1
            self._missing(number, batch)

    def replayed(self, number: int, batch: WireBatch) -> None:
        """A message of a replay."""
        is_snapshot = bool(batch.events) and isinstance(batch.events[0], AllBlocksCleared)
        expected = self._next or 0
        if number < expected and not is_snapshot:
            self._num_duplicates += 1
            return
        if number > expected and not is_snapshot:
            self._lose(number - expected)
        if self._before is not None and not is_snapshot:
            stamp = self._before[1].get(number)
            if stamp is not None and stamp != batch.timestamp:  # another message has this number now
                self._num_restarts += 1
                self._before = None
        self._apply(number, batch)

    def replay_ended(self) -> None:
        """The replay is over, complete or not."""
        waiting, self._waiting = self._waiting or [], None
        self._attempts += 1
        self._compare()
        for number, batch in waiting:
            if self._waiting is None and self._next is not None and number < self._next:
                self._num_duplicates += 1
            elif self._waiting is None and number != (self._next or 0):
                self._missing(number, batch)
            elif self._waiting is None:
                self._apply(number, batch)
            else:
                self._waiting.append((number, batch))
        if self._waiting is None:
            self._attempts = 0

    def start_over(self) -> None:
        """The connection broke or the node is gone: forgets its blocks until it announces them again."""
        self._index.clear_node(self._node)
        if self._next is not None:
            self._before = (self._next, dict(self._stamps))
        self._next = None
        self._stamps.clear()
        self._waiting = [] if self._can_replay else None
        self._attempts = 0

    # --- what a message is -------------------------------------------------------------------------------------------

    def _apply(self, number: int, batch: WireBatch) -> None:
        self._index.apply(self._node, batch.events)
        self._next = number + 1
        self._num_applied += 1
        self._stamps[number] = batch.timestamp
        if len(self._stamps) > _REMEMBERED:
            self._stamps.popitem(last=False)
        if self._waiting is None:
            self._compare()

    def _compare(self) -> None:
        """After it started over: numbers that are lower than before are those of a node that started again."""
        if self._before is not None and self._next is not None:
            self._num_restarts += self._next < self._before[0]
            self._before = None

    def _again(self, number: int, batch: WireBatch) -> None:
        """A message number came again: it is the same message, or the node started again."""
        stamp = self._stamps.get(number)
        oldest = next(iter(self._stamps.values()), batch.timestamp)
        is_same = batch.timestamp == stamp if stamp is not None else number > 0 and batch.timestamp <= oldest
        if is_same:
            self._num_duplicates += 1
            return
        self._num_restarts += 1
        self._index.clear_node(self._node)
        self._next = None
        self._stamps.clear()
        if number == 0:
            self._apply(number, batch)
        else:
            self._missing(number, batch)

    def _missing(self, number: int, batch: WireBatch) -> None:
        """Messages before this one are missing. Asks the node for them; if it cannot be asked, forgets its blocks."""
        if self._can_replay and self._attempts < _ATTEMPTS:
            self._waiting = [(number, batch)]
        else:
            self._attempts = 0
            self._lose(number - (self._next or 0))
            self._apply(number, batch)

    def _lose(self, num_messages: int) -> None:
        """Goes on without the missing messages.

        They may have removed blocks, so all blocks of the node are forgotten. The node may publish them again.
        """
        self._num_lost += num_messages
        self._index.clear_node(self._node)


class NodeSubscriber:
    """Follows one node. `endpoint` is where it publishes, `replay` where it sends messages again, if it can.

    When the connection breaks, the index forgets the blocks of the node. When it is back, the node is asked for everything. A
    replay that does not come within `patience` seconds is given up.
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
        """Counts of the messages of this node."""
        return self._feed.stats

    def resync(self) -> None:
        """Forgets the blocks of the node and asks it for everything; if it cannot be asked, goes on from here."""
        self._wants_all = True

    def close(self) -> None:
        """Ends the thread. What the node holds stays in the index as it is."""
        self._is_closed = True
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():  # it uses its sockets, and dies with the process
            log.warning("the thread that follows %s still runs after %g seconds", self._endpoint, _CLOSE_SECONDS)
            return
        self._context.destroy(linger=0)

    # --- its thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._feed.start_over()  # a new subscriber asks for everything
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
        """Connects again. ZeroMQ does so by itself, but not after a message over the limit."""
        with suppress(self._zmq.ZMQError):  # it is disconnected already
            self._live.disconnect(self._endpoint)
        time.sleep(_PAUSE_SECONDS)
        self._live.connect(self._endpoint)

    def _ask(self, poller: Any, start: int) -> None:
        """Asks for messages, on a new socket each time, so that a late answer is not taken for the answer to another one."""
        self._asking = self._context.socket(self._zmq.DEALER)
        self._asking.set(self._zmq.LINGER, 0)
        self._asking.set(self._zmq.MAXMSGSIZE, MOST_BYTES)
        self._asking.connect(self._replay)
        with suppress(self._zmq.Again):  # something else listens there and refused us: no answer comes
            self._asking.send_multipart((b"", start.to_bytes(8, "big")), self._zmq.NOBLOCK)
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
        """Applies a message. Its last frames are the number and the batch; since vLLM 0.26, replies begin with a topic."""
        self.last_heard = self._clock()
        try:
            number = int.from_bytes(frames[-2], "big", signed=True) if len(frames) > 1 and len(frames[-2]) == 8 else -1
            if number < 0:
                raise InvalidArgumentError("it has no number of 8 bytes before its batch")
            batch = decode_batch(frames[-1])
        except InvalidArgumentError as error:
            self.num_unreadable += 1
            self._quiet.warning("a message of %s cannot be read: %s", self._endpoint, error)
            return  # the number of the next message shows the gap
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
        raise ConfigError(
            f"following events needs {error.name}: pip install '.[cluster]' in a checkout of kvpool"
        ) from None
    return zmq
