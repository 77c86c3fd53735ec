"""An index that follows real publishers over loopback, through loss, death and return."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import managers
from kvpool.cluster import publisher as publisher_module
from kvpool.cluster.index import ClusterIndex, Hit
from kvpool.cluster.publisher import EventPublisher
from kvpool.cluster.subscriber import NodeSubscriber
from kvpool.cluster.wire_events import AllBlocksCleared, BlockStored, decode_batch, encode_batch
from kvpool.errors import ConfigError

zmq = pytest.importorskip("zmq", reason="pip install 'kvpool[cluster]'")
pytest.importorskip("msgspec", reason="pip install 'kvpool[cluster]'")

PROMPT = list(range(12))


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    found: list[Any] = []
    yield found
    for each in reversed(found):
        each.close()


class PublishingPeer(socketserver.BaseRequestHandler):
    """Says of itself that it is a PUB socket, and nothing else."""

    def handle(self) -> None:
        ready = b"\5READY\x0bSocket-Type\0\0\0\3PUB"
        greeting = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
        self.request.sendall(greeting + bytes([4, len(ready)]) + ready)
        while self.request.recv(4096):
            pass


def until(is_so: Callable[[], bool]) -> None:
    """Waits for other threads, half a minute at most."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end, "it did not come true in half a minute"
        time.sleep(0.005)


def publishing(opened: list[Any], manager: Any, endpoint: str = "tcp://127.0.0.1:0", **options: Any) -> EventPublisher:
    publisher = EventPublisher(manager, endpoint, heartbeat=0.05, **options)
    opened.append(publisher)
    return publisher


@pytest.mark.parametrize("keep_messages", [1, 10_000])
def test_given_nodes_that_cached_before_and_after_when_followed_then_the_index_knows_both(
    opened: list[Any], keep_messages: int
) -> None:
    index = ClusterIndex(4)
    nodes = {name: managers.make_manager() for name in ("a", "b")}
    managers.cached(nodes["a"], 12)
    for name, manager in nodes.items():
        publisher = publishing(opened, manager, keep_messages=keep_messages)
        managers.cached(manager, 8)
        opened.append(NodeSubscriber(index, name, publisher.endpoint, publisher.replay_endpoint))
    managers.cached(nodes["b"], 12)
    until(lambda: index.match(PROMPT) == {"a": Hit(12, 12, 12), "b": Hit(12, 12, 12)})
    nodes["a"].cache.reset()
    until(lambda: index.match(PROMPT) == {"b": Hit(12, 12, 12)})


@pytest.mark.parametrize(("num_sent", "numbers"), [(2, [1]), (3, [0, 1, 2]), (4, [1, 2, 3])])
def test_given_a_snapshot_in_parts_then_each_has_a_number_that_was_used_or_all_are_one_message(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch, num_sent: int, numbers: list[int]
) -> None:
    publisher = EventPublisher(managers.make_manager(), "tcp://127.0.0.1:0", heartbeat=1000.0)
    opened.append(publisher)
    until(lambda: publisher.stats().num_messages > 0)
    events = [AllBlocksCleared(), BlockStored([1], None, [1] * 4, 4, "GPU"), BlockStored([2], 1, [2] * 4, 4, "GPU")]
    monkeypatch.setattr(publisher_module, "in_messages", lambda _: [[event] for event in events])
    monkeypatch.setattr(publisher, "_next_number", num_sent)
    sent = publisher._replayed(publisher_module.SNAPSHOT)
    assert [number for number, _ in sent] == numbers
    assert [event for _, payload in sent for event in decode_batch(payload).events] == events


def test_given_a_node_that_dies_and_comes_back_then_its_blocks_vanish_and_only_its_new_ones_appear(
    opened: list[Any],
) -> None:
    index = ClusterIndex(4)
    old, new = managers.make_manager(), managers.make_manager()
    managers.cached(old, 12)
    publisher = EventPublisher(old, "tcp://127.0.0.1:0", heartbeat=0.05)
    follower = NodeSubscriber(index, "a", publisher.endpoint, publisher.replay_endpoint)
    opened.append(follower)
    until(lambda: index.match(PROMPT) == {"a": Hit(12, 12, 12)})
    publisher.close()
    until(lambda: index.match(PROMPT) == {})
    managers.cached(new, 4)
    publishing(opened, new, publisher.endpoint, replay=publisher.replay_endpoint)
    until(lambda: index.match(PROMPT) == {"a": Hit(4, 4, 4)})


def test_given_a_node_without_replay_when_followed_then_what_it_says_from_now_on_counts(opened: list[Any]) -> None:
    index, manager = ClusterIndex(4), managers.make_manager()
    managers.cached(manager, 12)
    publisher = publishing(opened, manager)
    follower = NodeSubscriber(index, "a", publisher.endpoint)
    opened.append(follower)
    until(lambda: follower.stats.num_applied > 0)
    managers.cached(manager, 8, first=100)
    until(lambda: index.match(list(range(100, 108))) == {"a": Hit(8, 8, 8)})


@pytest.mark.parametrize(
    "frames", [[b""], [b"", b"12", encode_batch(1.0, [])], [b"", b"\xff" * 8, encode_batch(1.0, [])]]
)
def test_given_messages_that_are_none_when_followed_then_they_are_counted_and_the_rest_is_read(
    frames: list[bytes],
) -> None:
    index, said = ClusterIndex(4), BlockStored([1], None, [0, 1, 2, 3], 4)
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        follower = NodeSubscriber(index, "a", f"tcp://127.0.0.1:{port}")
        publisher.recv()  # it listens
        publisher.send_multipart(frames)
        publisher.send_multipart([b"", bytes(8), encode_batch(1.0, [said])])
        until(lambda: index.match(PROMPT) == {"a": Hit(4, 4, 4)})
        assert follower.num_unreadable == 1
        follower.close()


def test_given_many_messages_that_are_none_when_followed_then_all_are_counted_and_one_line_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        follower = NodeSubscriber(ClusterIndex(4), "a", f"tcp://127.0.0.1:{port}")
        publisher.recv()  # it listens
        for _ in range(500):
            publisher.send_multipart([b"", bytes(8), b"noise"])
        until(lambda: follower.num_unreadable == 500)
        follower.close()
    assert [record.getMessage()[:14] for record in caplog.records] == ["a message of t"]


def test_given_a_message_over_the_limit_then_it_is_not_read_and_the_next_connection_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.cluster.subscriber.MOST_BYTES", 1000)
    index, said = ClusterIndex(4), BlockStored([1], None, [0, 1, 2, 3], 4)
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.set(zmq.LINGER, 0)
        publisher.set(zmq.RCVTIMEO, 30_000)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        follower = NodeSubscriber(index, "a", f"tcp://127.0.0.1:{port}")
        assert publisher.recv() == b"\1"  # it listens
        publisher.send_multipart([b"", bytes(8), bytes(2000)])
        assert publisher.recv() == b"\0"  # it has left
        assert publisher.recv() == b"\1"  # it is back
        publisher.send_multipart([b"", bytes(8), encode_batch(1.0, [said])])
        until(lambda: index.match(PROMPT) == {"a": Hit(4, 4, 4)})
        assert follower.num_unreadable == 0
        follower.close()


def test_given_a_question_over_the_limit_then_the_publisher_closes_the_connection(opened: list[Any]) -> None:
    publisher = publishing(opened, managers.make_manager())
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.set(zmq.LINGER, 0)
        gone = asking.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        asking.connect(publisher.replay_endpoint)
        asking.send_multipart((b"", bytes(2000)))
        assert gone.poll(30_000)
        asking.disable_monitor()
        gone.close()


def test_given_an_endpoint_that_is_none_when_followed_then_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        NodeSubscriber(ClusterIndex(4), "a", "nowhere")


def test_given_a_replay_address_where_somebody_publishes_when_asked_then_the_thread_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two nodes at neighbouring ports, one is asked for its replay where the other one publishes."""
    connect = zmq.Socket.connect
    refused = threading.Event()

    def connect_and_be_refused(socket: Any, address: str) -> None:
        connect(socket, address)
        if socket.type == zmq.DEALER:
            until(lambda: not socket.poll(0, zmq.POLLOUT))  # a message would wait for ever from now on
            refused.set()

    monkeypatch.setattr(zmq.Socket, "connect", connect_and_be_refused)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), PublishingPeer) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = "tcp://127.0.0.1:{}".format(*server.server_address[1:])
        follower = NodeSubscriber(ClusterIndex(4), "a", address, address)
        assert refused.wait(30)
        follower.close()
        server.shutdown()
    assert not follower._thread.is_alive()


def test_given_a_thread_that_does_not_end_when_closed_then_closing_gives_up_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvpool.cluster.subscriber._CLOSE_SECONDS", 0.01)
    index, manager = ClusterIndex(4), managers.make_manager()
    stuck, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(index, "clear_node", lambda _: stuck.set() or go_on.wait(30))
    with EventPublisher(manager, "tcp://127.0.0.1:0") as publisher:
        follower = NodeSubscriber(index, "a", publisher.endpoint)
        assert stuck.wait(30)
        follower.close()
        assert "still runs" in caplog.text
        go_on.set()
        follower.close()
