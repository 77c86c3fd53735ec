"""The index of a cluster against a slow and obvious model, and its feeds against what a network does to messages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import managers
from kvpool.cluster import subscriber
from kvpool.cluster.hash_table import HashTable
from kvpool.cluster.index import MAX_NODES, ClusterIndex, Hit, NodeBlocks
from kvpool.cluster.subscriber import NodeFeed
from kvpool.cluster.translator import WireTranslator, group_names
from kvpool.cluster.wire_events import AllBlocksCleared, BlockRemoved, BlockStored, WireBatch, WireEvent
from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError
from kvpool.events import Removed

SIZE = 2
NODES = ["a", "b", "c"]
MEDIA = ("GPU", "CPU", "STORAGE")


class SlowIndex:
    """Every node's blocks by their whole prefix, as lists of tokens."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, set[tuple[Any, ...]]]] = {}
        self.names: dict[str, dict[int, tuple[Any, ...]]] = {}

    def add(self, node: str) -> None:
        self.held[node] = {medium: set() for medium in MEDIA}
        self.names[node] = {}

    def apply(self, node: str, event: WireEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.add(node)
        elif isinstance(event, BlockStored):
            prefix = (event.lora_name,) if event.parent is None else self.names[node][event.parent]
            for at, block_hash in enumerate(event.hashes):
                extra = event.extra_keys[at] if event.extra_keys else None
                prefix = (*prefix, *event.tokens[at * SIZE : (at + 1) * SIZE], tuple(extra or ()))
                self.names[node][block_hash] = prefix
                self.held[node][event.medium].add(prefix)
        else:
            for block_hash in event.hashes:
                prefix = self.names[node][block_hash]
                self.held[node][event.medium].discard(prefix)
                if not any(prefix in held for held in self.held[node].values()):
                    del self.names[node][block_hash]

    def match(self, tokens: Sequence[int], lora_name: str | None, extra: Sequence[Any]) -> dict[str, Hit]:
        found = {}
        for node, held in self.held.items():
            lengths = []
            for num_media in (1, 2, 3):
                anywhere = set().union(*(held[medium] for medium in MEDIA[:num_media]))
                prefix, length = (lora_name,), 0
                for at in range(len(tokens) // SIZE):
                    prefix = (*prefix, *tokens[at * SIZE : (at + 1) * SIZE], tuple(extra[at] or ()))
                    if prefix not in anywhere:
                        break
                    length += SIZE
                lengths.append(length)
            if lengths[-1]:
                found[node] = Hit(*lengths)
        return found


@pytest.mark.quick("by content-0", "by node-1")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("naming", ["by content", "by node", "by number"])
def test_given_random_events_when_asked_then_the_index_answers_as_the_slow_one(seed: int, naming: str) -> None:
    rng = random.Random(seed)
    index, slow = ClusterIndex(SIZE, seed=seed), SlowIndex()
    for node in NODES:
        index.add_node(node)
        slow.add(node)
    numbers = dict.fromkeys(NODES, 0)

    def name(node: str, prefix: tuple[Any, ...]) -> int:
        if naming == "by number":  # as engines do that count: the same number is another block elsewhere
            numbers[node] += 1
            return numbers[node]
        return hash((prefix, node if naming == "by node" else "")) & (2**64 - 1)

    def prompt() -> tuple[list[int], str | None, list[Any]]:
        num_blocks = rng.randrange(1, 9)
        tokens = [rng.choice((0, 0, 1)) for _ in range(num_blocks * SIZE)]
        extra = [["image"] if rng.random() < 0.1 else None for _ in range(num_blocks)]
        return tokens, rng.choice((None, None, "lora")), extra

    for step in range(150):
        node = rng.choice(NODES)
        known = list(slow.names[node])
        action = rng.random()
        event: WireEvent
        if action < 0.55:
            tokens, lora_name, extra = prompt()
            parent = rng.choice(known) if known and rng.random() < 0.5 else None
            base = slow.names[node][parent] if parent is not None else (lora_name,)
            if parent is not None:
                lora_name = base[0]
            hashes, prefix = [], base
            for at in range(len(tokens) // SIZE):
                prefix = (*prefix, *tokens[at * SIZE : (at + 1) * SIZE], tuple(extra[at] or ()))
                same = [h for h in known if slow.names[node][h] == prefix]
                hashes.append(same[0] if same else name(node, prefix))
            event = BlockStored(hashes, parent, tokens, SIZE, rng.choice(MEDIA), lora_name, extra)
        elif action < 0.95 and known:
            held = rng.choice(MEDIA)
            chosen = [h for h in known if slow.names[node][h] in slow.held[node][held]]
            event = BlockRemoved(rng.sample(chosen, min(len(chosen), rng.randrange(1, 5))), held)
        else:
            event = AllBlocksCleared()
        index.apply(node, [event])
        slow.apply(node, event)
        if step % 40 == 39:  # a node leaves and comes back empty
            index.remove_node(node)
            index.add_node(node)
            slow.add(node)
        for _ in range(5):
            tokens, lora_name, extra = prompt()
            assert index.match(tokens, lora_name=lora_name, extra_keys=extra) == slow.match(tokens, lora_name, extra)
        distinct = set().union(*(held for media in slow.held.values() for held in media.values()))
        assert index.stats().num_blocks == len(distinct)
        counted = {name: NodeBlocks(*(len(media[medium]) for medium in MEDIA)) for name, media in slow.held.items()}
        assert index.node_blocks() == counted
    for node in NODES:
        index.clear_node(node)
    assert index.stats().num_blocks == 0
    assert index.stats().num_refused == index.stats().num_orphans == 0


def test_given_managers_when_their_events_are_followed_then_the_index_answers_as_match_prefix_does() -> None:
    rng = random.Random(5)
    index = ClusterIndex(4)
    nodes = {}
    for name in NODES:
        manager = managers.make_manager(gpu_blocks=16, host_blocks=16)
        nodes[name] = (manager, manager.subscribe(), WireTranslator(group_names(manager.config)))
        index.add_node(name)
    for _ in range(150):
        name = rng.choice(NODES)
        manager, subscription, translator = nodes[name]
        managers.cached(manager, rng.randrange(4, 50), first=rng.randrange(6))
        index.apply(name, translator.translate(subscription.poll().events))
        prompt = list(range(rng.randrange(6), 60))
        hits = index.match(prompt)
        for node, (holder, _, _) in nodes.items():
            found = holder.match_prefix(prompt)
            assert hits.get(node, Hit(0, 0, 0)).storage == found.num_blocks * 4
    assert max(hit.cpu - hit.gpu for hit in index.match(list(range(60))).values()) > 0


def test_given_tokens_of_zeros_when_asked_then_a_longer_prompt_is_not_taken_for_its_prefix() -> None:
    index = ClusterIndex(SIZE)
    index.add_node("a")
    index.apply("a", [BlockStored([1], None, [0, 0], SIZE)])
    assert index.match([0, 0, 0, 0]) == {"a": Hit(2, 2, 2)}


def test_given_events_that_say_nothing_about_prefixes_then_they_are_left_out_and_counted() -> None:
    index = ClusterIndex(SIZE)
    index.add_node("a")
    windowed = BlockStored([9], None, [1, 2], SIZE, group=1, kind="sliding_window", window=8)
    assert index.apply("a", [windowed, BlockRemoved([9], group=1)]) == 0
    assert index.apply("a", [BlockStored([2], 77, [1, 2], SIZE)]) == 1  # its parent was never announced
    tape = [BlockStored([1], None, [1, 2], SIZE, "TAPE"), BlockRemoved([1], "TAPE")]
    index.apply("a", [BlockStored([1], None, [1, 2, 3], 3), *tape])
    stats = index.stats()
    assert (stats.num_blocks, stats.num_orphans, stats.num_refused) == (0, 1, 3)
    assert index.match([1, 2]) == {}


def test_given_more_nodes_than_bits_then_the_next_is_refused_and_a_place_that_became_free_is_taken() -> None:
    index = ClusterIndex(SIZE)
    for node in range(MAX_NODES):
        index.add_node(node)
    with pytest.raises(InvalidArgumentError, match="64 nodes"):
        index.add_node("one more")
    index.apply(63, [BlockStored([1], None, [1, 2], SIZE)])
    index.remove_node(63)
    index.add_node("one more")
    assert index.match([1, 2]) == {}
    with pytest.raises(InvalidArgumentError, match="no node"):
        index.apply(63, [AllBlocksCleared()])


@pytest.mark.parametrize("prompt", [[1.5, 2.5], [[1, 2]], ["a"], [[1], [1, 2]]])
def test_given_no_row_of_ids_when_asked_then_it_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"row of token ids|not a rectangular array"):
        ClusterIndex(SIZE).match(prompt)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (BlockStored([1, 2], None, [1, 2], SIZE), "2 blocks of 2 tokens were stored with 2 tokens"),
        (BlockStored([1], None, [1, 2, 3], SIZE), "stored with 3 tokens"),
        (BlockStored([-1], None, [1, 2], SIZE), "no uint64"),
        (BlockStored([1], -1, [1, 2], SIZE), "no uint64"),
        (BlockStored([1], None, [1, 2**64], SIZE), "no int64"),
        (BlockRemoved([2**64]), "no uint64"),
        (Removed(1, (b"digest",), Tier.GPU, 0, "evicted"), "WireTranslator"),
    ],
)
def test_given_an_event_that_cannot_be_then_it_is_refused_and_the_index_stays(event: Any, message: str) -> None:
    index = ClusterIndex(SIZE)
    index.add_node("a")
    index.apply("a", [BlockStored([9], None, [5, 6], SIZE)])
    before = index.stats(), index.node_blocks()
    with pytest.raises(InvalidArgumentError, match=message):
        index.apply("a", [event])
    assert (index.stats(), index.node_blocks()) == before
    assert index.match([5, 6]) == {"a": Hit(2, 2, 2)}


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", [0, 1, 8, 24])  # of the last two, multipliers gather names that are counted up
def test_given_many_blocks_on_all_nodes_then_a_block_costs_what_the_documentation_says(seed: int) -> None:
    index = ClusterIndex(16, seed=seed)
    rng = np.random.default_rng(0)
    for node in range(16):
        index.add_node(node)
    for at in range(200):
        event = BlockStored(list(range(at * 128 + 1, at * 128 + 129)), None, rng.integers(0, 50_000, 2048).tolist(), 16)
        for node in (0, at % 16):
            index.apply(node, [event])
    stats = index.stats()
    assert stats.num_blocks == 25_600
    assert stats.num_bytes / stats.num_blocks <= 192


def test_given_a_block_that_came_back_to_another_place_when_asked_then_its_old_place_is_not_taken_for_it() -> None:
    index = ClusterIndex(SIZE)
    index.add_node("a")
    index.apply("a", [BlockStored([1, 2], None, [1, 1, 2, 2], SIZE), BlockStored([3], None, [3, 3], SIZE)])
    index.apply("a", [BlockRemoved([2]), BlockRemoved([3]), BlockStored([2], 1, [2, 2], SIZE)])
    assert index.match([1, 1, 2, 2]) == {"a": Hit(4, 4, 4)}


def test_given_blocks_that_come_and_go_under_new_names_then_an_index_does_not_grow() -> None:
    index, sizes = ClusterIndex(SIZE, seed=1), []
    index.add_node("a")
    for at in range(40):
        hashes = list(range(at * 1000 + 1, at * 1000 + 1001))
        index.apply("a", [BlockStored(hashes, None, list(range(2000)), SIZE), BlockRemoved(hashes)])
        sizes.append(index.stats().num_bytes)
    assert sizes[-1] <= 2 * sizes[0]  # keys that meet in a bucket may double a table


def test_given_keys_that_come_and_go_when_looked_up_then_the_table_knows_those_that_are_there() -> None:
    rng = np.random.default_rng(1)
    table, known = HashTable(3), {}
    for _ in range(60):
        keys = np.unique(rng.integers(0, 400, 150).astype(np.uint64))
        new = keys[[int(key) not in known for key in keys]]
        slots = rng.integers(0, 1 << 30, len(new)).astype(np.int32)
        table.add(new, slots)
        known.update(zip(new.tolist(), slots.tolist(), strict=True))
        gone = rng.permutation(np.array(list(known), np.uint64))[: rng.integers(0, len(known))]
        table.remove(gone)
        for key in gone.tolist():
            del known[key]
        everything = np.arange(400, dtype=np.uint64)
        expected = [known.get(key, -1) for key in range(400)]
        assert table.find(everything).tolist() == expected
        assert [table.find_one(key) for key in range(400)] == expected
        assert table.num_keys == len(known)


# --- feeds -----------------------------------------------------------------------------------------------------------


class Source:
    """A node that numbers its messages, keeps some, and sends a snapshot where they are gone."""

    def __init__(self, keep: int, start: float = 0.0) -> None:
        self.keep, self.clock = keep, start
        self.messages: list[WireBatch] = []
        self.cached: dict[int, int] = {}  # token of a one-block prompt -> its hash

    def step(self, rng: random.Random) -> tuple[int, WireBatch]:
        self.clock += 1
        events: list[WireEvent] = []
        token = rng.randrange(30)
        if token in self.cached:
            events.append(BlockRemoved([self.cached.pop(token)]))
        else:
            self.cached[token] = token + 1
            events.append(BlockStored([token + 1], None, [token] * SIZE, SIZE))
        self.messages.append(WireBatch(self.clock, events, 0))
        return len(self.messages) - 1, self.messages[-1]

    def replay(self, start: int, *, snapshots: bool) -> list[tuple[int, WireBatch]]:
        first = max(0, len(self.messages) - self.keep)
        if start >= first or not snapshots:
            return list(enumerate(self.messages))[max(first, start) :]
        stored = [BlockStored([h], None, [token] * SIZE, SIZE) for token, h in self.cached.items()]
        return [(len(self.messages) - 1, WireBatch(self.clock, [AllBlocksCleared(), *stored], 0))]


def caught_up(feed: NodeFeed, source: Source, *, snapshots: bool = True) -> None:
    """Answers questions until there are none."""
    while feed.wanted is not None:
        for number, batch in source.replay(feed.wanted, snapshots=snapshots):
            feed.replayed(number, batch)
        feed.replay_ended()


def held(index: ClusterIndex) -> set[int]:
    return {token for token in range(30) if "n" in index.match([token] * SIZE)}


@pytest.mark.parametrize("can_replay", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_given_a_connection_that_broke_then_only_a_node_that_started_again_counts_as_a_restart(
    can_replay: bool, is_new: bool
) -> None:
    feed = NodeFeed(ClusterIndex(16), "a", can_replay=can_replay)
    for number in range(3):
        feed.live(number, WireBatch(float(number), [], None))
    feed.start_over()
    feed.start_over()  # the proxy does so, too, when the node is ready again
    sent = [(0, 10.0), (1, 11.0)] if is_new else [(0, 0.0), (1, 1.0), (2, 2.0)]
    if can_replay:
        for number, stamp in sent:
            feed.replayed(number, WireBatch(stamp, [], None))
        feed.replay_ended()
    following = len(sent) if can_replay or not is_new else 0
    feed.live(following, WireBatch(12.0, [], None))
    feed.live(following + 1, WireBatch(13.0, [], None))
    assert feed.stats.num_restarts == is_new


@pytest.mark.quick("0", "2", "5")
@pytest.mark.parametrize("seed", range(8))
def test_given_lost_repeated_and_late_messages_restarts_and_clocks_that_jump_then_the_index_ends_right(
    seed: int,
) -> None:
    rng = random.Random(seed)
    index = ClusterIndex(SIZE)
    source = Source(keep=rng.choice((3, 1000)))
    for _ in range(rng.randrange(10)):
        source.step(rng)
    feed = NodeFeed(index, "n", can_replay=True)
    num_restarts = 0
    for _ in range(300):
        number, batch = source.step(rng)
        action = rng.random()
        if action < 0.1:
            continue  # lost
        feed.live(number, batch)
        if action < 0.2:
            feed.live(number, batch)
        elif action < 0.25:
            back = rng.randrange(max(0, number - 5), number + 1)
            feed.live(back, source.messages[back])
        elif action < 0.27:
            source = Source(source.keep, start=source.clock + rng.choice((-50.5, 50.5)))  # and its clock is another
            num_restarts += 1
        if rng.random() < 0.8:
            caught_up(feed, source)
    number, batch = source.step(rng)
    feed.live(number, batch)
    caught_up(feed, source)
    if num_restarts:  # a restart may hide behind a gap until numbers meet; a broken connection shows it at once
        feed.start_over()
        caught_up(feed, source)
    assert held(index) == set(source.cached)
    assert feed.stats.num_gaps > 0
    assert feed.stats.num_duplicates > 0


def test_given_a_node_that_began_anew_when_its_first_message_comes_then_what_it_held_is_forgotten() -> None:
    rng, index = random.Random(1), ClusterIndex(SIZE)
    feed, old, new = NodeFeed(index, "n", can_replay=True), Source(1000), Source(1000, start=0.5)
    for _ in range(20):
        feed.live(*old.step(rng))
    feed.live(*new.step(rng))
    assert held(index) == set(new.cached)
    assert feed.stats.num_restarts == 1
    assert feed.wanted is None


@pytest.mark.parametrize("can_replay", [True, False])
def test_given_a_gap_that_cannot_be_closed_when_messages_go_on_then_nothing_stale_is_kept(can_replay: bool) -> None:
    rng, index = random.Random(1), ClusterIndex(SIZE)
    feed, source = NodeFeed(index, "n", can_replay=can_replay), Source(2)
    for _ in range(20):
        feed.live(*source.step(rng))
    for _ in range(10):
        source.step(rng)
    feed.live(*source.step(rng))
    caught_up(feed, source, snapshots=False)
    assert held(index) <= set(source.cached)
    assert feed.stats.num_lost > 0
    for _ in range(5):
        feed.live(*source.step(rng))
    assert feed.wanted is None
    assert held(index) <= set(source.cached)


def test_given_more_messages_during_a_replay_than_are_kept_then_those_before_the_last_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber, "_MOST_WAITING", 3)
    for num_waiting, wanted in ((3, None), (4, 1)):
        feed = NodeFeed(ClusterIndex(SIZE), "n", can_replay=True)
        feed.start_over()
        for number in range(1, 1 + num_waiting):
            feed.live(number, WireBatch(float(number), [], None))
        feed.replayed(0, WireBatch(0.0, [], None))
        feed.replay_ended()
        assert feed.wanted == wanted
        assert feed.stats.num_applied == (4 if wanted is None else 1)


def test_given_no_answer_to_any_question_when_messages_go_on_then_the_feed_goes_on_without() -> None:
    rng, index = random.Random(1), ClusterIndex(SIZE)
    feed, source = NodeFeed(index, "n", can_replay=True), Source(1000)
    source.step(rng)
    for _ in range(6):
        feed.live(*source.step(rng))
        if feed.wanted is not None:
            feed.replay_ended()
    assert feed.wanted is None
    assert feed.stats.num_lost == 1
    assert held(index) <= set(source.cached)
