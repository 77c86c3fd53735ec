"""Cache events on the wire: their form, what a manager's events become, and who misses nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import managers
from kvpool import KVCacheManager, LayerSpec, MultimodalItem, ReuseScope, Tier
from kvpool.cluster.publisher import SNAPSHOT, EventPublisher, in_messages
from kvpool.cluster.translator import WireTranslator, group_names, scope_keys
from kvpool.cluster.wire_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    WireEvent,
    decode_batch,
    encode_batch,
    wire_hash,
)
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.prefix.digests import chain_digests, root_digest

zmq = pytest.importorskip("zmq", reason="pip install 'kvpool[cluster]'")
msgspec = pytest.importorskip("msgspec", reason="pip install 'kvpool[cluster]'")

EVENTS = [
    BlockStored([1, 2], None, [5, 6, 7, 8], 2, "GPU", None, None, 0, "full_attention"),
    BlockStored([3], 2, [9, 9], 2, "CPU", "sql", [["key"]], 1, "sliding_window", 32, "LOCAL", "session"),
    BlockRemoved([3, 1], "STORAGE", 0, "REMOTE"),
    AllBlocksCleared(),
]


ONE_BLOCK = {"block_hashes": [1], "token_ids": [1, 2], "block_size": 2}


class Contents:
    """The slow and obvious reader: which hashes each medium of each group holds, and what they say of themselves."""

    def __init__(self) -> None:
        self.held: dict[tuple[int | None, str], dict[int, tuple[Any, ...]]] = {}

    def apply(self, events: Iterable[WireEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
            elif isinstance(event, BlockStored):
                held = self.held.setdefault((event.group, event.medium), {})
                for at, block_hash in enumerate(event.hashes):
                    parent = event.hashes[at - 1] if at else event.parent
                    tokens = event.tokens[at * event.block_size : (at + 1) * event.block_size]
                    held[block_hash] = (parent, tuple(tokens), event.lora_name)
            else:
                for block_hash in event.hashes:
                    del self.held[event.group, event.medium][block_hash]

    @property
    def hashes(self) -> set[int]:
        return {block_hash for held in self.held.values() for block_hash in held}

    @property
    def present(self) -> dict[tuple[int | None, str], dict[int, tuple[Any, ...]]]:
        return {key: held for key, held in self.held.items() if held}


class Reader:
    """A subscriber as anybody would write it, with blocking sockets and a limit to its patience."""

    def __init__(self, publisher: EventPublisher) -> None:
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        self.live.connect(publisher.endpoint)
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.connect(publisher.replay_endpoint)
        for socket in (self.live, self.asking):
            socket.setsockopt(zmq.RCVTIMEO, 30_000)

    def receive(self) -> tuple[int, list[WireEvent]]:
        _, number, payload = self.live.recv_multipart()
        return int.from_bytes(number, "big"), decode_batch(payload).events

    def replay(self, start: int | bytes) -> list[tuple[int, list[WireEvent]]]:
        self.asking.send_multipart((b"", start if isinstance(start, bytes) else start.to_bytes(8, "big")))
        found = []
        while (frames := self.asking.recv_multipart())[2] != (-1).to_bytes(8, "big", signed=True):
            found.append((int.from_bytes(frames[2], "big"), decode_batch(frames[3]).events))
        return found

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def stack() -> Iterator[list[Any]]:
    """What a test opened, closed in the opposite order."""
    opened: list[Any] = []
    yield opened
    for each in reversed(opened):
        each.close()


def published(stack: list[Any], manager: KVCacheManager, **options: Any) -> EventPublisher:
    publisher = EventPublisher(manager, "tcp://127.0.0.1:0", **{"heartbeat": 0.05} | options)
    stack.append(publisher)
    return publisher


def reading(stack: list[Any], publisher: EventPublisher) -> Reader:
    reader = Reader(publisher)
    stack.append(reader)
    return reader


def test_given_events_when_written_and_read_then_they_are_the_same() -> None:
    batch = decode_batch(encode_batch(1.5, EVENTS, rank=3))
    assert batch.events == EVENTS
    assert (batch.timestamp, batch.rank) == (1.5, 3)


def test_given_events_when_written_then_they_have_the_names_and_order_of_the_field() -> None:
    timestamp, events, rank = msgspec.msgpack.decode(encode_batch(2.0, EVENTS))
    assert (timestamp, rank) == (2.0, 0)
    assert events[0] == {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": [5, 6, 7, 8],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert events[2:] == [
        {"type": "BlockRemoved", "block_hashes": [3, 1], "medium": "STORAGE", "group_idx": 0, "locality": "REMOTE"},
        {"type": "AllBlocksCleared"},
    ]


def test_given_events_of_an_older_form_or_with_whole_digests_when_read_then_they_mean_the_same() -> None:
    digest = bytes(range(32))
    payload = msgspec.msgpack.encode(
        [
            7,
            [
                ["BlockStored", [digest], None, [1, 2], 2, None],
                ["BlockRemoved", [-1]],
                ["AllBlocksCleared"],
                {"type": "New"},
            ],
        ]
    )
    batch = decode_batch(payload)
    assert batch.rank is None
    assert batch.events == [
        BlockStored([wire_hash(digest)], None, [1, 2], 2),
        BlockRemoved([2**64 - 1]),
        AllBlocksCleared(),
    ]
    assert wire_hash(digest) == int.from_bytes(digest, "big") & (2**64 - 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\x05",
        msgspec.msgpack.encode(["soon", []]),
        msgspec.msgpack.encode(
            [1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 2}]]
        ),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}]]),
        msgspec.msgpack.encode([1.0, [7]]),
        msgspec.msgpack.encode([1.0, [], float("inf")]),
        *(
            msgspec.msgpack.encode([1.0, [{"type": "BlockStored", **ONE_BLOCK, **wrong}]])
            for wrong in (
                {"token_ids": ["a", "b"]},
                {"token_ids": "ab"},
                {"token_ids": [1, 2**63]},
                {"token_ids": [[1], [2]]},
                {"block_size": float("inf")},
                {"block_hashes": [float("inf")]},
                {"lora_name": [1]},
                {"group_idx": [1]},
                {"extra_keys": [{"a": 1}]},
                {"extra_keys": [[[{}]]]},
                {"kv_cache_spec_kind": ["full_attention"]},
            )
        ),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "group_idx": {}}]]),
    ],
)
def test_given_bytes_that_are_no_batch_when_read_then_they_are_refused(payload: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="no batch of cache events"):
        decode_batch(payload)


def test_given_a_prompt_on_two_nodes_then_both_announce_the_hashes_that_anybody_computes_from_its_tokens() -> None:
    prompt = list(range(100, 112))
    announced = []
    for _ in range(2):
        manager = managers.make_manager()
        with manager.subscribe() as subscription:
            managers.cached(manager, 12, first=100)
            events = WireTranslator(group_names(manager.config)).translate(subscription.poll().events)
        announced.append([block_hash for event in events for block_hash in event.hashes])
    digests = chain_digests(root_digest(ReuseScope()), np.array(prompt, np.int32), 4)
    assert announced == [[wire_hash(digest) for digest in digests]] * 2


def test_given_traffic_over_tiers_when_translated_then_a_reader_holds_what_the_manager_does_at_any_moment() -> None:
    rng = random.Random(3)
    manager = managers.make_manager(gpu_blocks=12, host_blocks=8, disk_blocks=8)
    translator, contents = WireTranslator(group_names(manager.config)), Contents()
    subscription = manager.subscribe()
    seen_media: set[str] = set()
    for at in range(200):
        first = rng.randrange(12) * 2
        managers.cached(manager, rng.randrange(4, 40), first=first)
        if at % 50 == 49:
            manager.cache.reset()
        events = translator.translate(subscription.poll().events)
        before, moments = contents.hashes, []
        for event in events:
            contents.apply([event])
            moments.append(contents.hashes)
            if isinstance(event, BlockStored):
                seen_media.add(event.medium)
                assert event.parent is None or event.parent in contents.hashes
        assert all(before & contents.hashes <= moment for moment in moments)  # what stays is there at any moment
        late = Contents()
        late.apply(translator.snapshot())
        assert late.present == contents.present
        for start in range(0, 24, 2):
            found = manager.match_prefix(list(range(start, start + 40))).tokens_by_tier
            hashes = map(
                wire_hash, chain_digests(root_digest(ReuseScope()), np.arange(start, start + 40, dtype=np.int32), 4)
            )
            media = [
                next((m for m in ("GPU", "CPU", "STORAGE") if h in contents.held.get((0, m), {})), None) for h in hashes
            ]
            prefix = media[: media.index(None)] if None in media else media[:-1]  # the last token is always computed
            assert {t: 4 * prefix.count(m) for t, m in zip(Tier, ("GPU", "CPU", "STORAGE"), strict=False)} == {
                t: found.get(t, 0) for t in (Tier.GPU, Tier.HOST, Tier.DISK)
            }
    assert seen_media == {"GPU", "CPU", "STORAGE"}
    subscription.close()


def test_given_tenants_adapters_and_images_when_announced_then_they_differ_and_no_name_of_a_tenant_is_told() -> None:
    manager = managers.make_manager(LayerSpec(1, 8), gpu_blocks=64)
    with manager.subscribe() as subscription:
        managers.cached(manager, 8, first=0)
        managers.cached(manager, 8, first=0, scope=ReuseScope(adapter="sql"))
        managers.cached(manager, 8, first=0, scope=ReuseScope(tenant="secret"))
        managers.cached(manager, 8, first=0, multimodal=[MultimodalItem(5, 2, "image")])
        plain, adapted, isolated, image = WireTranslator(group_names(manager.config)).translate(
            subscription.poll().events
        )
    assert isinstance(plain, BlockStored)
    assert plain.extra_keys is None
    assert (adapted.lora_name, adapted.extra_keys) == ("sql", None)
    assert isolated.extra_keys == [[*scope_keys(ReuseScope(tenant="secret"))[1]], None]
    assert b"secret" not in encode_batch(0.0, [isolated])
    assert len({*plain.hashes, *adapted.hashes, *isolated.hashes}) == 6
    # the block before the image is shared: only the one with its placeholders is announced
    assert image.parent == plain.hashes[0]
    assert image.extra_keys == [["73696d616765@1"]]


def test_given_a_late_subscriber_when_it_asks_then_it_gets_kept_messages_or_everything_cached(stack: list[Any]) -> None:
    manager = managers.make_manager(gpu_blocks=16, host_blocks=16)
    managers.cached(manager, 12, first=0)
    everything, little = published(stack, manager), published(stack, manager, keep_messages=1)
    for first in range(0, 60, 4):
        managers.cached(manager, 16, first=first)
    translator = WireTranslator(group_names(manager.config))
    with manager.subscribe() as subscription:
        expected = Contents()
        expected.apply(translator.translate(subscription.poll().events))
    for publisher in (everything, little):
        reader, contents, numbers = reading(stack, publisher), Contents(), []
        number, _ = reader.receive()  # a sign of life: all is sent
        for number, events in reader.replay(0):
            contents.apply(events)
            numbers.append(number)
        assert contents.present == expected.present
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert little.stats().num_snapshots == 1
    assert everything.stats().num_snapshots == 0
    asked = reading(stack, everything).replay(SNAPSHOT)
    assert asked[0][1][0] == AllBlocksCleared()
    assert everything.stats().num_snapshots == 1


def test_given_a_log_that_ran_over_when_published_then_the_loss_is_counted_and_everything_is_announced_anew(
    stack: list[Any],
) -> None:
    manager = managers.make_manager(gpu_blocks=64, event_buffer_size=2)
    blocked = threading.Event()
    publisher = published(stack, manager, clock=lambda: blocked.wait(30) and 0.0)  # its thread cannot go on meanwhile
    reader = reading(stack, publisher)
    for first in range(0, 400, 20):
        managers.cached(manager, 8, first=first)
    blocked.set()
    reader.receive()
    while publisher.stats().num_lost_events == 0:  # its next look at the log
        reader.receive()
    contents, expected = Contents(), Contents()
    for _, events in reader.replay(SNAPSHOT):
        contents.apply(events)
    with manager.subscribe() as subscription:
        expected.apply(WireTranslator(group_names(manager.config)).translate(subscription.poll().events))
    assert contents.present == expected.present


def test_given_a_very_long_run_when_sent_then_no_message_is_longer_than_the_limit_and_parents_follow() -> None:
    event = BlockStored(list(range(10_000)), None, list(range(20_000)), 2, extra_keys=[None] * 10_000)
    removed = BlockRemoved(list(range(5000)))
    messages = list(in_messages([AllBlocksCleared(), event, removed]))
    assert all(sum(len(getattr(e, "hashes", ())) for e in message) <= 4096 for message in messages)
    stored = [e for message in messages for e in message if isinstance(e, BlockStored)]
    assert [e.parent for e in stored] == [None, 4095, 8191]
    assert [token for e in stored for token in e.tokens] == list(event.tokens)
    assert [h for message in messages for e in message if isinstance(e, BlockRemoved) for h in e.hashes] == list(
        range(5000)
    )
    assert list(in_messages([])) == [[]]


@pytest.mark.parametrize(
    ("endpoint", "options", "message"),
    [
        ("tcp://nowhere", {}, "tcp://HOST:PORT"),
        ("udp://somewhere", {}, "say where to listen for replay"),
        ("tcp://256.0.0.1:0", {}, "cannot be published"),
        ("tcp://127.0.0.1:0", {"heartbeat": 0}, "heartbeat"),
        ("tcp://127.0.0.1:0", {"keep_messages": 0}, "keep_messages"),
        ("tcp://127.0.0.1:0", {"rank": -1}, "rank"),
    ],
)
def test_given_a_wrong_setting_when_a_publisher_is_made_then_it_is_refused_and_leaves_nothing(
    endpoint: str, options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where a file would be seen
    manager = managers.make_manager()
    with pytest.raises(ConfigError, match=message):
        EventPublisher(manager, endpoint, **options)
    assert not manager.events.listening
    assert not list(tmp_path.iterdir())


def test_given_a_file_then_events_are_published_there_and_sent_again_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has 107 bytes at most
    publisher = EventPublisher(managers.make_manager(), "ipc://events")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events", "events.replay"]
    publisher.close()


def test_given_a_publisher_when_closed_then_its_ports_are_free_and_nothing_is_computed_for_it(stack: list[Any]) -> None:
    manager = managers.make_manager()
    publisher = EventPublisher(manager, "tcp://127.0.0.1:0")
    assert manager.events.listening
    publisher.close()
    publisher.close()
    assert not manager.events.listening
    stack.append(EventPublisher(manager, publisher.endpoint, replay=publisher.replay_endpoint))


@pytest.mark.skipif("KVPOOL_DYNAMO_PYTHON" not in os.environ, reason="make test-dynamo installs it and runs this")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_given_dynamos_indexer_when_fed_by_random_traffic_then_it_answers_as_the_managers_do(seed: int) -> None:
    script = Path(__file__).parent / "dynamo_inside.py"
    command = [sys.executable, str(script), os.environ["KVPOOL_DYNAMO_PYTHON"], str(seed)]
    inside = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    result = subprocess.run(inside, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    answer = msgspec.json.decode(result.stdout)
    assert answer["compared"] == 96
    assert answer["most_cached"] >= 20


READ_BY_VLLM = """
import msgspec, sys
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.Decoder(KVEventBatch).decode(bytes.fromhex(sys.argv[1]))
assert batch.ts == 1.5 and batch.data_parallel_rank == 3, batch
print([type(event).__name__ for event in batch.events], batch.events[1].medium, batch.events[0].block_hashes)
"""


@pytest.mark.skipif("KVPOOL_VLLM_PYTHON" not in os.environ, reason="make test-vllm installs it")
def test_given_vllms_own_structs_when_they_read_a_batch_then_it_is_theirs() -> None:
    payload = encode_batch(1.5, EVENTS, rank=3).hex()
    command = [os.environ["KVPOOL_VLLM_PYTHON"], "-c", READ_BY_VLLM, payload]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "['BlockStored', 'BlockStored', 'BlockRemoved', 'AllBlocksCleared'] CPU [1, 2]" in result.stdout
