"""Nodes whose messages are lost, doubled, late and out of order, who restart, vanish and return: the index ends right."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvpool.cluster.index import ClusterIndex, Hit, NodeBlocks
from kvpool.cluster.subscriber import NodeFeed
from kvpool.cluster.wire_events import AllBlocksCleared, BlockRemoved, BlockStored, WireBatch, WireEvent

SIZE = 2
MEDIA = ("GPU", "CPU", "STORAGE")
BLOCKS = ((0, 0), (0, 1), (1, 1))  # what a block may hold
MOST_TRIES = 12  # messages and questions after which a feed must have caught up

Prefix = tuple[tuple[int, int], ...]  # a block, by all blocks up to it


class Source:
    """A node: what it has cached, the messages that it numbered, and those that are under way to the index."""

    def __init__(self, name: str, naming: str, keep: int, clock: float) -> None:
        self.name, self.naming, self.keep, self.clock = name, naming, keep, clock
        self.under_way: list[tuple[int, WireBatch]] = []
        self.restart(clock)

    def restart(self, clock: float) -> None:
        """It begins anew: empty, numbers from 0, and its clock may be another."""
        self.clock, self.num_names = clock, 0
        self.messages: list[WireBatch] = []
        self.held: dict[str, set[Prefix]] = {medium: set() for medium in MEDIA}
        self.names: dict[Prefix, int] = {}

    @property
    def cached(self) -> set[Prefix]:
        return set().union(*self.held.values())

    def name_of(self, prefix: Prefix) -> int:
        if prefix not in self.names:
            self.num_names += 1
            number = {"by content": hash(prefix), "by node": hash((prefix, self.name)), "by number": self.num_names}
            self.names[prefix] = number[self.naming] & (2**64 - 1)
        return self.names[prefix]

    def send(self, events: list[WireEvent]) -> None:
        self.clock += 0.5
        self.messages.append(WireBatch(self.clock, events, 0))
        self.under_way.append((len(self.messages) - 1, self.messages[-1]))

    def stored(self, first: Prefix, last: Prefix, medium: str) -> BlockStored:
        """The blocks after `first` up to `last`."""
        chain = [last[:end] for end in range(len(first) + 1, len(last) + 1)]
        parent = self.names[first] if first else None
        tokens = [token for prefix in chain for token in prefix[-1]]
        return BlockStored([self.name_of(prefix) for prefix in chain], parent, tokens, SIZE, medium)

    def replay(self, start: int) -> list[tuple[int, WireBatch]]:
        first = max(0, len(self.messages) - self.keep)
        if start >= first:
            return list(enumerate(self.messages))[start:]
        events: list[WireEvent] = [AllBlocksCleared()]
        for prefix in sorted(self.cached, key=len):
            events += [self.stored(prefix[:-1], prefix, medium) for medium in MEDIA if prefix in self.held[medium]]
        return [(len(self.messages) - 1, WireBatch(self.clock, events, 0))]


class Feeds(RuleBasedStateMachine):
    """Four nodes, one index. Two of them count, so that one name means two blocks."""

    nodes = Bundle("nodes")

    @initialize(target=nodes, keep=st.sampled_from((2, 1000)))
    def begin(self, keep: int) -> Any:
        self.index = ClusterIndex(SIZE)
        kinds = ("by content", "by node", "by number", "by number")
        self.sources = [Source("abcd"[at], kind, keep, 1000.0 * at) for at, kind in enumerate(kinds)]
        self.feeds = {source.name: NodeFeed(self.index, source.name, can_replay=True) for source in self.sources}
        self.answers: dict[str, list[tuple[int, WireBatch]] | None] = dict.fromkeys(self.feeds)
        self.is_broken = dict.fromkeys(self.feeds, False)  # a connection whose end is not noticed yet
        return multiple(*self.sources)

    # --- what a node does --------------------------------------------------------------------------------------------

    @rule(source=nodes, blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=5), medium=st.sampled_from(MEDIA))
    def store(self, source: Source, blocks: list[tuple[int, int]], medium: str) -> None:
        last: Prefix = tuple(blocks)
        cached = source.cached
        first: Prefix = ()
        while len(first) < len(last) - 1 and last[: len(first) + 1] in cached:
            first = last[: len(first) + 1]
        source.send([source.stored(first, last, medium)])
        source.held[medium] |= {last[:end] for end in range(len(first) + 1, len(last) + 1)}

    @rule(source=nodes, data=st.data())
    def remove(self, source: Source, data: st.DataObject) -> None:
        medium = data.draw(st.sampled_from(MEDIA))
        leaves = [each for each in source.held[medium] if not any(other[:-1] == each for other in source.cached)]
        if leaves:
            gone = data.draw(st.lists(st.sampled_from(sorted(leaves)), min_size=1, max_size=3, unique=True))
            source.send([BlockRemoved([source.names[prefix] for prefix in gone], medium)])
            source.held[medium] -= set(gone)
            for prefix in gone:
                if prefix not in source.cached:
                    del source.names[prefix]

    @rule(source=nodes)
    def clear(self, source: Source) -> None:
        source.send([AllBlocksCleared()])
        source.held = {medium: set() for medium in MEDIA}
        source.names = {}

    @rule(source=nodes, skew=st.sampled_from((-700.25, -0.75, 0.25, 700.25)))
    def restart(self, source: Source, skew: float) -> None:
        source.restart(source.clock + skew)
        self.is_broken[source.name] = True

    # --- what the network does ---------------------------------------------------------------------------------------

    @rule(source=nodes, count=st.integers(1, 4))
    def deliver(self, source: Source, count: int) -> None:
        for _ in range(min(count, len(source.under_way))):
            self.feeds[source.name].live(*source.under_way.pop(0))

    @rule(source=nodes, at=st.integers(0, 5), what=st.sampled_from(("lose", "double", "overtake")))
    def disturb(self, source: Source, at: int, what: str) -> None:
        if at < len(source.under_way):
            message = source.under_way[at] if what == "double" else source.under_way.pop(at)
            if what != "lose":
                self.feeds[source.name].live(*message)

    @rule(source=nodes, count=st.integers(0, 3), is_whole=st.booleans())
    def answer(self, source: Source, count: int, is_whole: bool) -> None:
        """A replay comes in pieces, between which live messages arrive, and may break off."""
        feed = self.feeds[source.name]
        if feed.wanted is None:
            return
        left = self.answers[source.name]
        left = source.replay(feed.wanted) if left is None else left
        taken, left = (left, []) if is_whole else (left[:count], left[count:])
        for number, batch in taken:
            feed.replayed(number, batch)
        self.answers[source.name] = left or None
        if not left:
            feed.replay_ended()

    @rule(source=nodes)
    def give_up_asking(self, source: Source) -> None:
        if self.feeds[source.name].wanted is not None:
            self.answers[source.name] = None
            self.feeds[source.name].replay_ended()

    @rule(source=nodes)
    def notice_a_broken_connection(self, source: Source) -> None:
        self.is_broken[source.name] = False
        self.answers[source.name] = None
        self.feeds[source.name].start_over()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def caught_up(self, source: Source) -> None:
        """All that is under way comes, and the node says that it lives until nothing is asked for any more."""
        if self.is_broken[source.name]:
            self.notice_a_broken_connection(source)
        for _ in range(MOST_TRIES):
            self.deliver(source, len(source.under_way))
            while self.feeds[source.name].wanted is not None:
                self.answer(source, 0, is_whole=True)
            source.send([])
        self.deliver(source, len(source.under_way))
        assert self.feeds[source.name].wanted is None

    @rule(source=nodes)
    def a_node_that_can_be_followed_is_known(self, source: Source) -> None:
        self.caught_up(source)
        blocks = self.index.node_blocks()[source.name]
        assert blocks == NodeBlocks(*(len(source.held[medium]) for medium in MEDIA))

    @rule()
    def all_prompts_are_answered_as_the_nodes_would(self) -> None:
        for source in self.sources:
            self.caught_up(source)
        prompts = {(*prefix, (1, 0)) for source in self.sources for prefix in source.cached} | {((0, 0),)}
        for prompt in prompts:
            expected = {source.name: self.expected(source, prompt) for source in self.sources}
            tokens = [token for block in prompt for token in block]
            assert self.index.match(tokens) == {name: hit for name, hit in expected.items() if hit.storage}
        assert self.index.stats().num_blocks == len(set().union(*(source.cached for source in self.sources)))

    @staticmethod
    def expected(source: Source, prompt: Prefix) -> Hit:
        lengths = []
        for number in (1, 2, 3):
            anywhere = set().union(*(source.held[medium] for medium in MEDIA[:number]))
            whole = [prompt[:end] in anywhere for end in range(1, len(prompt) + 1)]
            lengths.append(SIZE * ([*whole, False].index(False)))
        return Hit(*lengths)

    @invariant()
    def nothing_is_counted_that_is_not_there(self) -> None:
        if hasattr(self, "index"):
            counted = self.index.node_blocks()
            assert all(min(blocks) >= 0 for blocks in counted.values())
            assert self.index.stats().num_blocks <= sum(sum(blocks) for blocks in counted.values())


TestFeeds = Feeds.TestCase
TestFeeds.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
