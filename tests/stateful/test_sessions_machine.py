"""Ends of sessions against an oracle that remembers every user of every block, after every operation of drawn runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvpool import (
    DType,
    KVCacheConfig,
    KVCacheHandle,
    KVCacheManager,
    LayerSpec,
    ReuseScope,
    StatePart,
    StateSpec,
    Tier,
)
from kvpool.core.node import Node
from kvpool.errors import (
    InvalidArgumentError,
    OutOfBlocksError,
    PinBudgetError,
    SequenceStateError,
    UnknownSessionError,
)
from kvpool.eviction import KeyedPolicy, Run
from kvpool.prefix.tree import all_nodes
from kvpool.replay.policies import ARCPolicy, SievePolicy

FULL, WINDOWED = LayerSpec(kv_heads=1, head_dim=8), LayerSpec(kv_heads=1, head_dim=8, window=6)
STATE = StateSpec((StatePart("recurrent", (8,), DType.FLOAT32),))
SIZE = 4
NAMES = ("main", "agent", "helper", "chat", None)
User = tuple[str, str | None]
Key = tuple[ReuseScope, tuple[int, ...]]


class LongestFirst(KeyedPolicy):
    """A policy of a user's own."""

    def key(self, run: Run) -> int:
        return -run.num_blocks


class Machine:
    """A manager under drawn operations, and who used which block, written down in full."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        layers = rng.choice(([FULL], [FULL], [FULL, WINDOWED], [FULL, STATE]))
        pools = 2 if STATE in layers else 1
        unfilled = STATE not in layers and rng.random() < 0.3
        config = KVCacheConfig(
            layers,
            block_size=SIZE,
            gpu_blocks=(rng.choice((40, 60)), 24)[:pools] if pools > 1 else rng.choice((40, 60)),
            host_blocks=rng.choice((0, (24, 12)[:pools])),
            watermark=0.0,
            cache_unfilled_blocks=unfilled,
            copy_on_partial_reuse=rng.random() < 0.7,
            host_write=rng.choice(("back", "through")),
        )
        policy = rng.choice(("lru", "adaptive", "priority", LongestFirst, ARCPolicy, SievePolicy))
        self.now = 0.0
        self.manager = KVCacheManager(config, policy=policy, clock=lambda: self.now)
        self.has_quota = rng.random() < 0.2
        if self.has_quota:
            self.manager.cache.set_quota("t", guaranteed=0.2, maximum=0.6)
        self.live: list[KVCacheHandle] = []
        self.pins: list[Any] = []
        self.number = 0
        self.histories: dict[User, list[int]] = {}
        self.prompts: dict[Any, list[int]] = {}
        # The oracle
        self.users: dict[Key, set[User]] = {}
        self.made: dict[Key, int] = {}
        self.parents: dict[User, User | None] = {}
        self.ended: set[User] = set()

    # --- the oracle --------------------------------------------------------------------------------------------------

    def tree(self) -> dict[Key, Node]:
        """Every cached block by all tokens up to its end."""
        found: dict[Key, Node] = {}
        for node in all_nodes(self.manager._cache):
            if node.detached:
                continue
            tokens = [int(t) for run in node.path() for t in run.tokens]
            for end in range(node.start + 1, node.end + 1):
                found[node.root.scope, tuple(tokens[: end * SIZE])] = node
        return found

    def observe(self, actor: User | None = None) -> dict[Key, Node]:
        """A block has a new user when it stands in the table of one. What nobody held was published at an end, by `actor`."""
        tree = self.tree()
        made = {key: node.created for key, node in tree.items()}  # a block may leave and come back in one operation
        self.users = {key: users for key, users in self.users.items() if self.made[key] == made.get(key)}
        self.made = made
        for key, node in tree.items():
            depth = (len(key[1]) - 1) // SIZE
            new = key not in self.users
            users = self.users.setdefault(key, set())
            for handle in self.live:
                has_block = not handle.is_swapped and handle.scope == key[0] and depth < handle.num_blocks
                same = has_block and handle.block_ids()[depth] == node.ids[0][depth - node.start]
                if same and node.tier == Tier.GPU:
                    users.add((handle.scope.tenant, handle.session))
            if new and not users:
                assert actor is not None
                users.add(actor)
        return tree

    def family(self, user: User) -> set[User]:
        """A session and all that were forked from it."""
        found = {user}
        while more := {child for child, parent in self.parents.items() if parent in found} - found:
            found |= more
        return found

    def is_given_up(self, users: set[User]) -> bool:
        """Whether the smallest group that has all users is known, and has ended."""
        if any(name is None for _, name in users):
            return False
        if len(users) == 1:
            return users <= self.ended
        groups = [group for user in self.parents if users <= (group := self.family(user))]
        return bool(groups) and min(groups, key=len) <= self.ended

    def compare(self, actor: User | None = None) -> dict[Key, Node]:
        tree = self.observe(actor)
        given_up = {key for key, node in tree.items() if node.leaves}
        expected = {key for key in tree if self.is_given_up(self.users[key])}
        assert given_up == expected
        return tree

    # --- operations --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += self.rng.choice((0.0, 0.1, 5.0))
        operations: list[tuple[Callable[[], None], int]] = [
            (self.ask, 30),
            (self.go_on, 20),
            (self.free, 25),
            (self.end, 6),
            (self.end_family, 3),
            (self.fork_session, 8),
            (self.fork_rows, 3),
            (self.pause, 4),
            (self.resume, 3),
            (self.evict, 4),
            (self.evict_given_up, 3),
            (self.swap, 4),
            (self.rewind, 3),
            (self.pin, 2),
        ]
        do = self.rng.choices([do for do, _ in operations], [weight for _, weight in operations])[0]
        with suppress(OutOfBlocksError):
            do()
        self.compare()

    def user(self) -> User:
        return self.rng.choice(("", "t")), self.rng.choice(NAMES)

    def ask(self) -> None:
        """A turn: the history of the session or of another, or a new beginning."""
        user, rng = self.user(), self.rng
        source = rng.choices((user, self.parents.get(user) or user, self.user()), (5, 4, 2))[0]
        before = self.histories.get(source, [])
        if not before or rng.random() < 0.1:
            first = rng.choice((0, 100 * (1 + NAMES.index(user[1]))))
            before = list(range(first, first + rng.choice((8, 13))))
        prompt = before[: rng.randint(1, len(before))] if rng.random() < 0.2 else list(before)
        prompt = (prompt + [rng.randrange(200, 204) for _ in range(rng.randint(1, 7))])[:40]
        self.number += 1
        scope = ReuseScope(tenant=user[0])
        handle = self.manager.allocate(self.number, prompt, scope=scope, session=user[1])
        self.histories[user] = self.prompts[self.number] = prompt
        if user[1] is not None:
            self.parents.setdefault(user, None)
            self.ended.discard(user)
        self.live.append(handle)
        self.compare()
        if rng.random() < 0.8:
            self.manager.commit(handle)

    def pick(self) -> KVCacheHandle | None:
        here = [handle for handle in self.live if not handle.is_swapped]
        return self.rng.choice(here) if here else None

    def go_on(self) -> None:
        handle = self.pick()
        if handle is None:
            return
        done = handle.num_committed
        rest = self.prompts[handle.request_id][done:] or [self.rng.randrange(300, 303) for _ in range(6)]
        tokens = rest[: self.rng.randint(1, len(rest))]
        if done < 56:
            self.manager.extend(handle, max(0, done + len(tokens) - handle.num_reserved))
            self.manager.commit(handle, tokens)
            self.histories[handle.scope.tenant, handle.session] = handle.token_ids.tolist()[:30]

    def free(self) -> None:
        if self.live:
            handle = self.live.pop(self.rng.randrange(len(self.live)))
            actor = handle.scope.tenant, handle.session
            self.manager.free(handle)
            self.compare(actor)

    def end(self) -> None:
        tenant, name = self.user()
        if name is None:
            return
        before = self.tree()
        try:
            given_up = self.manager.sessions.end(name, tenant=tenant)
        except UnknownSessionError:
            assert (tenant, name) not in self.parents
            return
        self.ended.add((tenant, name))
        assert self.compare().keys() == before.keys()  # nothing is lost by anybody
        assert given_up == sum(users == {(tenant, name)} for users in self.users.values())

    def end_family(self) -> None:
        """An agent is done, and all that it called."""
        if self.parents:
            for tenant, name in sorted(self.family(self.rng.choice(sorted(self.parents, key=str))), key=str):
                assert name is not None
                self.manager.sessions.end(name, tenant=tenant)
                self.ended.add((tenant, name))
                self.compare()

    def fork_session(self) -> None:
        (tenant, parent), child = self.user(), self.rng.choice(("helper", "deep"))
        if parent is None:
            return
        try:
            self.manager.sessions.fork(parent, child, tenant=tenant)
        except InvalidArgumentError:
            known = self.parents.get((tenant, child), (tenant, parent))
            assert parent == child or known != (tenant, parent) or (tenant, child) in self.parents
            return
        if (tenant, parent) not in self.parents:
            self.parents[tenant, parent] = None
        self.parents.setdefault((tenant, child), (tenant, parent))

    def fork_rows(self) -> None:
        handle = self.pick()
        if handle is not None and len(self.live) < 8:
            self.number += 1
            self.live += self.manager.fork(handle, self.number)
            self.prompts[self.number] = self.prompts[handle.request_id]

    def pause(self) -> None:
        self.of_session(lambda name, tenant: self.manager.sessions.pause(name, 300.0, tenant=tenant))

    def resume(self) -> None:
        self.of_session(lambda name, tenant: self.manager.sessions.resume(name, tenant=tenant))

    def of_session(self, do: Callable[[str, str], Any]) -> None:
        tenant, name = self.user()
        if name is None:
            return
        known, ended = (tenant, name) in self.parents, (tenant, name) in self.ended
        if known and not ended:
            do(name, tenant)
        else:
            with pytest.raises(InvalidArgumentError if ended else UnknownSessionError):
                do(name, tenant)

    def evict(self) -> None:
        self.manager.cache.evict(self.rng.randint(1, 10), tier=self.rng.choice((Tier.GPU, Tier.HOST)))

    def evict_given_up(self) -> None:
        """While something given up can go, nothing else does."""
        for tier in (Tier.GPU, Tier.HOST):
            while not self.has_quota:
                before = self.observe()
                if not any(node.leaves and node.tier == tier and node.is_candidate() for node in before.values()):
                    break
                copies = self.manager._cache.host_copies.num_blocks[0]
                assert self.manager.cache.evict(1, tier=tier)
                lost = before.keys() - self.observe().keys()
                assert all(before[key].leaves for key in lost)
                assert lost or copies > self.manager._cache.host_copies.num_blocks[0]

    def swap(self) -> None:
        if swapped := [handle for handle in self.live if handle.is_swapped]:
            self.manager.swap_in(self.rng.choice(swapped))
        elif (handle := self.pick()) is not None and handle.family is None:
            self.manager.swap_out(handle)

    def rewind(self) -> None:
        handle = self.pick()
        if handle is not None and handle.num_reserved > 1:
            with suppress(SequenceStateError):  # past its window, or its states
                self.manager.rewind(handle, self.rng.randint(1, min(6, handle.num_reserved - 1)))

    def pin(self) -> None:
        handle = self.pick()
        if self.pins and self.rng.random() < 0.6:
            self.manager.cache.unpin(self.pins.pop())
        elif handle is not None and handle.num_committed >= SIZE and len(self.pins) < 2:
            with suppress(InvalidArgumentError, PinBudgetError):  # nothing of it is published, or too much is pinned
                self.pins.append(self.manager.cache.pin(handle))


def run(seed: int, num_operations: int) -> Machine:
    machine = Machine(seed)
    for number in range(num_operations):
        machine.step()
        if number % 10 == 0:
            machine.manager.check()
    return machine


@pytest.mark.parametrize("seed", range(8))
def test_given_drawn_operations_then_an_end_gives_up_what_only_that_session_used(seed: int) -> None:
    run(seed, 250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_given_thousands_of_drawn_operations_then_others_lose_nothing_by_an_end(seed: int) -> None:
    run(seed, 1000)
