"""Publishes what a manager caches over ZeroMQ, in vLLM's format, which common routers read.

    publisher = EventPublisher(manager, "tcp://127.0.0.1:5557")

Messages have three frames: a topic, the number of the message (8 bytes, big-endian), a batch of events. A subscriber that
missed some asks the replay socket, one port above. It sends kept messages from a number on. If these are gone, it sends
everything that is cached; the last of these messages has the number up to which that holds.

The manager never waits: a thread reads its bounded event log. If the thread falls behind, the oldest events are lost and
counted, and everything cached is published again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from kvpool.checks import check_int, check_number, show
from kvpool.cluster.translator import WireTranslator, group_names
from kvpool.cluster.wire_events import AllBlocksCleared, BlockStored, WireEvent, encode_batch
from kvpool.errors import ConfigError
from kvpool.manager import KVCacheManager
from kvpool.quiet import QuietLog

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
SNAPSHOT = END_OF_REPLAY  # asked for in place of a number, it means everything that is cached
_BLOCKS_PER_MESSAGE = 4096
_SEND_QUEUE = 100_000
_MOST_ASKED_BYTES = 1024  # a question for a replay has 8
log = logging.getLogger("kvpool")


class PublisherStats(NamedTuple):
    """What a publisher has done: messages sent, events that it lost, and blocks that are cached now."""

    num_messages: int
    num_lost_events: int
    num_blocks: int
    num_snapshots: int


class EventPublisher:
    """Publishes what one manager caches to any number of subscribers.

    `endpoint` is where to listen, such as `tcp://127.0.0.1:5557`. Port 0 takes a free port, which `endpoint` then names. The
    replay socket is one port above, or at `replay`; with a free port it takes another free one. `ipc://FILE` is for processes
    of this machine that may open the file. `keep_messages` limits how
    many messages can be sent again. While nothing happens, an empty batch every `heartbeat` seconds shows that the node is
    alive and that no message was missed.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay: str | None = None,
        topic: str = "",
        rank: int = 0,
        keep_messages: int = 10_000,
        heartbeat: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank = check_int(rank, "rank", 0, 2**31)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=check_int(keep_messages, "keep_messages", 1, 2**31))
        self._heartbeat = check_number(heartbeat, "heartbeat", "a number of seconds above 0")
        if self._heartbeat <= 0:
            raise ConfigError(f"heartbeat={heartbeat} must be a number of seconds above 0")
        self._topic = topic.encode()
        self._clock = clock
        self._translator = WireTranslator(group_names(manager.config))
        self._quiet = QuietLog(log)
        self._next_number = self._num_lost = self._num_snapshots = 0
        self._lock = threading.Lock()  # guards the translator and the kept messages
        replay = replay or port_above(endpoint)
        self._zmq = _zmq()
        self._context = self._zmq.Context()
        try:
            self._out, self._asked = _listening(self._zmq, self._context, endpoint, replay)
            self.endpoint, self.replay_endpoint = (
                str(each.get_string(self._zmq.LAST_ENDPOINT)) for each in (self._out, self._asked)
            )
            self._subscription = manager.subscribe()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._threads = [
            threading.Thread(target=target, name=f"kvpool-{name}", daemon=True)
            for target, name in ((self._publish, "publish"), (self._answer, "replay"))
        ]
        for thread in self._threads:
            thread.start()

    # --- its two threads ---------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        with self._out:
            while not self._subscription.closed:
                self._subscription.wait(self._heartbeat)
                if self._subscription.closed:
                    break
                with self._lock:
                    for number, payload in self._next_messages():
                        self._kept.append((number, payload))
                        self._out.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _next_messages(self) -> Iterator[tuple[int, bytes]]:
        batch = self._subscription.poll()
        if batch.missed:
            self._num_lost += batch.missed
            self._quiet.warning(
                "the event publisher came too late for %d events; everything is announced anew", batch.missed
            )
            events = self._translator.start_over(self._subscription.resync().events)
        else:
            events = self._translator.translate(batch.events)
        for part in in_messages(events):
            yield self._next_number, encode_batch(self._clock(), part, self._rank)
            self._next_number += 1

    def _answer(self) -> None:
        """Sends the messages again that subscribers ask for."""
        with self._asked:
            while True:
                try:
                    frames = self._asked.recv_multipart()
                except self._zmq.ContextTerminated:
                    return
                if len(frames) == 3 and len(frames[2]) == 8:
                    with suppress(self._zmq.ZMQError):  # it went away
                        for number, payload in self._replayed(frames[2]):
                            self._asked.send_multipart(
                                (frames[0], b"", self._topic, number.to_bytes(8, "big"), payload)
                            )
                        self._asked.send_multipart((frames[0], b"", b"", END_OF_REPLAY, b""))

    def _replayed(self, wanted: bytes) -> list[tuple[int, bytes]]:
        with self._lock:
            start = int.from_bytes(wanted, "big")
            first_kept = self._kept[0][0] if self._kept else self._next_number
            if not self._kept or (wanted != SNAPSHOT and start >= first_kept):
                return [(number, payload) for number, payload in self._kept if number >= start]
            parts = list(in_messages(self._translator.snapshot()))
            if len(parts) > self._next_number:  # each part needs a number that was used before
                parts = [[event for part in parts for event in part]]
            self._num_snapshots += 1
            now = self._clock()
            return [
                (number, encode_batch(now, part, self._rank))
                for number, part in enumerate(parts, self._next_number - len(parts))
            ]

    # --- for its owner -----------------------------------------------------------------------------------------------

    def stats(self) -> PublisherStats:
        """What was sent so far."""
        with self._lock:
            return PublisherStats(self._next_number, self._num_lost, self._translator.num_blocks, self._num_snapshots)

    def close(self) -> None:
        """Ends both threads and frees the ports. Events that were not sent yet are dropped."""
        if self._subscription.closed:
            return
        self._subscription.close()
        self._threads[0].join()
        self._context.term()  # wakes the other one
        self._threads[1].join()

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def in_messages(events: Sequence[WireEvent]) -> Iterator[list[WireEvent]]:
    """Cuts events into messages of a limited number of blocks. Without events it gives one empty message, a heartbeat."""
    part: list[WireEvent] = []
    room = _BLOCKS_PER_MESSAGE
    for event in _cut(events):
        size = 0 if isinstance(event, AllBlocksCleared) else len(event.hashes)
        if size > room:
            yield part
            part, room = [], _BLOCKS_PER_MESSAGE
        part.append(event)
        room -= size
    yield part


def _cut(events: Iterable[WireEvent]) -> Iterator[WireEvent]:
    """Cuts events that are longer than a message."""
    for event in events:
        if isinstance(event, AllBlocksCleared) or len(event.hashes) <= _BLOCKS_PER_MESSAGE:
            yield event
            continue
        for begin in range(0, len(event.hashes), _BLOCKS_PER_MESSAGE):
            part = slice(begin, begin + _BLOCKS_PER_MESSAGE)
            if isinstance(event, BlockStored):
                yield replace(
                    event,
                    hashes=event.hashes[part],
                    parent=event.hashes[begin - 1] if begin else event.parent,
                    tokens=event.tokens[begin * event.block_size : part.stop * event.block_size],
                    extra_keys=None if event.extra_keys is None else event.extra_keys[part],
                )
            else:
                yield replace(event, hashes=event.hashes[part])


def check_publishing(*endpoints: object) -> None:
    """Refuses wrong endpoints of `publish=`, and those where somebody listens, before a model is loaded. None means: publish
    nothing.
    """
    wanted = [endpoint for endpoint in endpoints if endpoint is not None]
    if not wanted:
        return
    zmq = _zmq()
    context = zmq.Context()
    listening: list[Any] = []
    try:
        for endpoint in wanted:
            if not isinstance(endpoint, str):
                raise ConfigError(f"publish must be where to listen, as tcp://127.0.0.1:5557, got {show(endpoint)}")
            listening += _listening(zmq, context, endpoint, port_above(endpoint))  # all at once: no two at one port
    finally:
        context.destroy(linger=0)


def _listening(zmq: Any, context: Any, endpoint: str, replay: str) -> tuple[Any, Any]:
    """A socket for events and one for those that somebody missed."""
    out, asked = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    out.set(zmq.SNDHWM, _SEND_QUEUE)
    asked.set(zmq.MAXMSGSIZE, _MOST_ASKED_BYTES)
    try:
        for socket, address in ((out, endpoint), (asked, replay)):
            socket.set(zmq.LINGER, 0)
            socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"events cannot be published at {show(endpoint)}, and at {show(replay)} for readers that missed some: {error}; "
            f"give tcp://HOST:PORT where both ports are free"
        ) from None
    return out, asked


def port_above(endpoint: str) -> str:
    """The default address of the replay socket: one port above that of the events; for a free port, another free port; for
    a file, one beside it.
    """
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.replay"
    host, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or int(port) > 65534:
        raise ConfigError(f"publish at tcp://HOST:PORT, or say where to listen for replay, too; got {show(endpoint)}")
    return f"{host}:{int(port) + 1 if int(port) else 0}"


def _zmq() -> Any:
    try:
        import msgspec  # noqa: F401
        import zmq
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"publishing events needs {error.name}: pip install '.[cluster]' in a checkout of kvpool"
        ) from None
    return zmq
