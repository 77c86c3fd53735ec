"""A manager in a drawn setting, the model of its bytes, and what must hold after every operation.

The operations are in `wild_requests`, `wild_steps`, `wild_upkeep` and `wild_mistakes`; `wild_runs` draws and replays them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
from byte_model import Bytes, Histories, Request, Sessions, positions_read, read_tree
from item_codes import KINDS, raw, told
from reference import LOCAL_TIERS, mirror_for
from wild_configs import Setting
from wild_recording import Recording

from kvpool import GroupKind, KVCacheManager, Pin, Prompt, ReuseScope, Tier
from kvpool.errors import KVPoolError
from kvpool.pools.symbols import Symbols

MAX_LIVE = 7
UNCOUNTED = {"allocation_failures", "extend_failures", "nodes_created"}  # what a refused operation may change


class WildMachine:
    """State, helpers and invariants."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.config = setting, setting.config
        self.now = 0.0
        self.manager = KVCacheManager(setting.config, clock=lambda: self.now)
        self.cache = self.manager._cache
        self.recording = Recording(self.manager) if setting.records else None
        # What nobody holds is forgotten all the time. There are so few numbers that other items soon get them, but not where
        # a recording is compared: policies know evicted runs by these numbers, which a recording does not have.
        few = {"num_numbers": len(KINDS) * 3 + 1} if not setting.records else {}
        self.cache.rows.symbols = Symbols(**few, min_limit=0)
        self.histories, self.sessions = Histories(), Sessions()
        self.bytes = Bytes(self.manager)
        groups = setting.config.groups
        self.size = setting.config.block_size
        self.growing = [g.index for g in groups if g.kind not in (GroupKind.CROSS, GroupKind.STATE)]
        self.states = [g.index for g in groups if g.kind is GroupKind.STATE]
        self.cross = [g.index for g in groups if g.kind is GroupKind.CROSS]
        self.live: dict[str, Request] = {}
        self.freed: list[Any] = []
        self.pins: list[Pin] = []
        self.prompts: dict[tuple[Any, ...], Prompt] = {}  # that were named so far; the last one stands last
        self.names = itertools.count()
        self.published: set[int] = set()  # the last bytes of every block that was ever published
        # The same of blocks given up while a fork kept them from being published
        self.never_published: set[int] = set()
        self.only_grew = True  # nothing was ever removed from the index on purpose
        self.subscription: Any = None
        self.mirror: Any = None
        self._books: Any = None
        for pool, tier, num_blocks in setting.cuts:
            self.manager.cache.resize(num_blocks, pool=pool, tier=tier)
        if setting.listens:
            self.listen()

    def listen(self) -> None:
        self.subscription, self.mirror = self.manager.subscribe(), mirror_for(self.config)
        self.changed()

    def step(self, operation: Callable[[WildMachine, Random], None], rng: Random) -> None:
        """One operation; copies are left to pile up for a while now and then."""
        self.now += rng.choice((0.0, 0.0, 0.0, 0.125, 0.5))
        self.manager.cache.gc()  # what is due leaves before the model looks
        postponed = [(request, end) for request in self.live.values() for end in self.postponed_ends(request)]
        self.check_last_prompt()
        operation(self, rng)
        self.check_last_prompt()
        for request, end in postponed:
            if request.swapped or self.live.get(request.handle.request_id) is not request or end not in request.values:
                self.never_published.add(end)
        self.manager.cache.gc()  # what is due leaves now, whether the checks look or not
        self.changed()
        if rng.random() < 0.75:
            self.run_copies()

    # --- what operations use -----------------------------------------------------------------------------------------

    def naming(
        self, codes: list[int], scope: ReuseScope, name: str = "tokens", cross_tokens: int = 0
    ) -> dict[str, Any]:
        """How the manager is told a prompt: in some settings by the `Prompt` that named it before, if one did."""
        if not self.setting.keeps_prompts:
            return {**told(codes, name), "scope": scope} | ({"cross_tokens": cross_tokens} if cross_tokens else {})
        key = (*codes, scope, cross_tokens)
        prompt = self.prompts.pop(key, None)
        if prompt is None:
            prompt = Prompt(**told(codes), scope=scope, cross_tokens=cross_tokens)
        self.prompts[key] = prompt
        return {name: prompt}

    def requests(self, swapped: bool | None = False) -> list[Request]:
        return [r for r in self.live.values() if swapped is None or r.swapped == swapped]

    def pick(self, rng: Random, swapped: bool | None = False) -> Request | None:
        chosen = self.requests(swapped)
        return rng.choice(chosen) if chosen else None

    def pick_some(self, rng: Random, swapped: bool | None = False) -> list[Request]:
        """Some requests in any order; seldom none."""
        chosen = self.requests(swapped)
        return rng.sample(chosen, rng.randrange(rng.randrange(2), len(chosen) + 1)) if chosen else []

    def changed(self) -> None:
        """What was seen of the manager is out of date."""
        self._books = None

    def books(self) -> Any:
        """Everything that a refused operation must leave as it was."""
        if self._books is None:
            self._books = self._read_books()
        return self._books

    def attempt(self, call: Callable[[], Any], *errors: type[KVPoolError]) -> tuple[bool, Any]:
        """Runs an operation that may be refused with one of `errors`; refused, it must have changed nothing."""
        before = self.books()
        self.changed()
        try:
            return True, call()
        except errors as error:
            refusal = error
        assert self.books() == before, f"a refused operation left something changed: {refusal}"
        return False, None

    def refused(self, error: type[KVPoolError], call: Callable[[], Any]) -> None:
        """Runs a wrong call: it must be refused with `error` and change nothing."""
        done, result = self.attempt(call, error)
        assert not done, f"a wrong call was accepted and returned {result!r}"

    def ask(self, call: Callable[[], Any]) -> Any:
        """Runs a question; it must not change anything."""
        before = self.books()
        self.changed()
        result = call()
        assert self.books() == before, "a question changed something"
        return result

    def run_copies(self) -> None:
        """What the data plane does before a forward pass; then nobody may read what a free block held."""
        self.bytes.run(self.manager.take_copies())
        self.bytes.wipe_free_blocks()
        self.changed()

    def note_invalidation(self, cached: list[int]) -> None:
        """Requests that hold some of what was invalidated publish nothing more; what is gone must be committed again."""
        self.only_grew = False
        for request in self.live.values():
            request.publishes = request.publishes and request.handle.publishes
        self.published -= set(cached) - set(self.cached_ends())

    def cached_ends(self) -> list[int]:
        """The last bytes of every block in the index."""
        tree = read_tree(self.manager, self.histories)
        return [end for _, values, _ in tree for end in values[self.size - 1 :: self.size].tolist()]

    def write(self, request: Request, tokens: list[int], slots: Any) -> None:
        """The forward pass: keys and values of the next tokens go to their slots."""
        self.run_copies()
        origin = self.sessions.number(self.origin(request, len(request.values) + len(request.ready)))
        values = []
        first_computed = min(len(tokens), len(request.ready))
        for index, token in enumerate(tokens):
            if index < first_computed:
                value = request.ready[index]
            else:
                before = request.values[-1] if request.values else self.histories.start(request.scope, request.encoder)
                value = self.histories.follow(before, token)
            request.values.append(value)
            values.append(value)
        for group in self.states if tokens else ():
            self.write_state(request, group, len(tokens), values, origin)
        request.tokens += tokens
        del request.ready[: len(tokens)]
        for group in self.growing:
            places = slots[group, first_computed:]
            start = request.written - len(places)
            wanted = positions_read(self.config, group, request.narrowed, request.written)
            needed = np.isin(np.arange(start, request.written), wanted)
            assert (places[needed] >= 0).all(), f"no place to write {len(tokens)} tokens of group {group}"
            assert (slots[group, :first_computed] == -1).all(), "a place for what is there already"
            given = places >= 0
            writable = self.manager.writable_blocks(group)
            assert writable[places[given] // self.size].all(), f"group {group} would write blocks that others read"
            self.bytes.write(group, places[given], np.array(values[first_computed:], np.int64)[given], origin)

    def write_state(self, request: Request, group: int, count: int, values: list[int], origin: int) -> None:
        """A step of layers that keep a state: from where it stands to where the step ends."""
        stop = request.written + count
        target = self.state_block(request, group, stop)
        if request.written >= request.narrowed:
            step = self.manager.state_places([request.handle], request.written, stop)
            source = self.state_block(request, group, request.written) if request.written else -1
            assert (step.sources.tolist(), step.targets.tolist()) == ([source], [target]), f"{request.handle}: {step}"
            assert target >= 0, f"{request.handle}: no place for its state behind {stop} tokens"
        if target >= 0:
            assert self.manager.writable_blocks(group)[target], f"group {group} would write a state that others read"
            self.bytes.write(group, np.arange(self.size) + target * self.size, [values[-1]] * self.size, origin)

    def state_block(self, request: Request, group: int, length: int) -> int:
        """The block that has the state of a request behind so many tokens: the next one that there is; -1 if none is."""
        if request.handle.swapped is not None:
            table = request.handle.swapped[group].tolist()
        else:
            table = request.handle.block_ids(group).tolist()
        return next((block for block in table[(length - 1) // self.size :] if block >= 0), -1)

    def origin(self, request: Request, stop: int) -> frozenset[Any]:
        """The origin of what a request computes now from its first `stop` tokens."""
        found = request.sessions
        for group in self.growing:
            positions = positions_read(self.config, group, max(request.committed, request.narrowed), stop)
            blocks = request.handle.block_ids(group)[positions // self.size]
            read = self.bytes.origins(group, Tier.GPU)[blocks, positions % self.size]
            found |= self.sessions.united(read)
        for group in self.states if request.written > request.narrowed else ():
            block = self.state_block(request, group, request.written)
            found |= self.sessions.united(self.bytes.origins(group, Tier.GPU)[block, :1])
        return found

    # --- what must always hold ---------------------------------------------------------------------------------------

    def check(self) -> None:
        self.manager.check()
        for pool in (pool for tiers in self.cache.pools for pool in tiers):
            assert min(pool.num_free, pool.num_cached, pool.num_pinned, pool.num_referenced) >= 0, pool
        self.check_lengths()
        tree = read_tree(self.manager, self.histories)
        if not self.cache.copies:
            for request in self.live.values():
                self.check_request(request)
            self.check_tree(tree)
        self.check_index()
        if self.mirror is not None:
            self.check_mirror(tree)

    def check_last_prompt(self) -> None:
        """A prompt that is kept is answered as one that nobody has seen."""
        if self.prompts:
            prompt = next(reversed(self.prompts.values()))
            found = self.manager.match_prefix(prompt)
            new = Prompt(prompt.tokens, prompt.scope, prompt.items, prompt.cross_tokens)
            assert found == self.manager.match_prefix(new), f"{prompt}: {found} is out of date"
            self.manager.match_prefix(prompt)  # remembered when the next operation comes

    def check_lengths(self) -> None:
        assert [h.request_id for h in self.manager.handles] == list(self.live)
        for request in self.live.values():
            handle = request.handle
            lengths = handle.num_reserved, handle.num_written, handle.num_committed, handle.is_swapped, handle.publishes
            assert lengths == (
                request.reserved,
                request.written,
                request.committed,
                request.swapped,
                request.publishes,
            ), f"{handle} {lengths}"
            assert handle.token_ids.tolist() == [raw(code) for code in request.known]

    def check_request(self, request: Request) -> None:
        """What later queries of a live request read is what was written for its tokens."""
        values = np.array([*request.values, *request.ready], np.int64)
        for group in self.growing:
            positions = positions_read(self.config, group, max(request.committed, request.narrowed), len(values))
            self.compare(request, group, positions, values[positions])
        for group in self.states if request.written > request.narrowed else ():
            block, tier = self.state_block(request, group, request.written), Tier.GPU
            if request.handle.swapped is not None:
                tier = Tier.HOST
            assert block >= 0, f"{request.handle}: its state is gone"
            expected = self.bytes.marked(group, values[request.written - 1])
            found = self.bytes.cells(group, tier)[block, 0]
            assert found == expected, f"{request.handle}: wrong bytes, a wrong state in {tier.name} block {block}"
        for group in self.cross:
            named = [self.histories.named((request.scope, request.encoder, p)) for p in range(request.num_cross)]
            self.compare(request, group, np.arange(request.num_cross), named)

    def compare(self, request: Request, group: int, positions: Any, values: Any) -> None:
        swapped = request.handle.swapped
        tier, table = Tier.GPU, request.handle.block_ids(group)
        if swapped is not None:
            tier, table = Tier.HOST, swapped[group]
        blocks = table[positions // self.size]
        where = f"{request.handle}, group {group}"
        assert (blocks >= 0).all(), f"{where}: no block for {positions[blocks < 0]} in {table.tolist()}"
        found = self.bytes.read(group, tier, blocks, positions % self.size)
        wrong = found != self.bytes.marked(group, values)
        assert not wrong.any(), (
            f"{where}: wrong bytes at positions {positions[wrong]}, {tier.name} blocks {table.tolist()}"
        )

    def check_tree(self, tree: list[tuple[Any, Any, list[bytes]]]) -> None:
        """Every cached block on every tier holds what its tokens say."""
        for node, values, _ in tree:
            for group in self.states:
                self.check_checkpoints(node, values, group)
            for group in self.growing:
                ids = node.ids[group]
                held = ids >= 0
                width = len(values) // node.num_blocks  # less than a block only in an unfilled one
                found = self.bytes.cells(group, node.tier)[ids[held], :width]
                expected = self.bytes.marked(group, values.reshape(-1, width)[held])
                where = f"cached {node.tokens.tolist()} from block {node.start} on, group {group}, {node.tier.name}"
                assert (found == expected).all(), f"{where}: wrong bytes in {ids.tolist()}"
                self.check_origins(where, self.bytes.origins(group, node.tier)[ids[held], :width])
                if node.host_copy is not None:
                    there = node.host_copy[group]
                    found = self.bytes.cells(group, Tier.HOST)[there[there >= 0], :width]
                    expected = self.bytes.marked(group, values.reshape(-1, width)[there >= 0])
                    assert (found == expected).all(), f"{where}: wrong bytes in its host copy {there.tolist()}"
                    self.check_origins(where, self.bytes.origins(group, Tier.HOST)[there[there >= 0], :width])

    def check_checkpoints(self, node: Any, values: Any, group: int) -> None:
        """Every cached state is the one behind the block where it stands."""
        ends = self.bytes.marked(group, values[self.size - 1 :: self.size])
        for ids, tier in ((node.ids[group], node.tier), ((node.host_copy or node.ids)[group], Tier.HOST)):
            if tier == Tier.HOST and node.tier == Tier.GPU and node.host_copy is None:
                continue
            held = ids >= 0
            where = f"cached {node.tokens.tolist()} from block {node.start} on, group {group}, {tier.name}"
            found = self.bytes.cells(group, tier)[ids[held], 0] if node.tier != Tier.DISK or tier == Tier.DISK else None
            if found is not None:
                assert (found == ends[held]).all(), f"{where}: wrong bytes, a wrong state in {ids.tolist()}"
                self.check_origins(where, self.bytes.origins(group, tier)[ids[held], :1])

    def check_origins(self, where: str, origins: Any) -> None:
        """Nothing that an invalidated session computed, and nothing that was computed from it, can be found."""
        stale = self.sessions.stale(origins)
        assert not stale, f"{where}: bytes that these sessions computed before they were invalidated: {stale}"

    def check_index(self) -> None:
        """Only what was committed can be found, and that once."""
        ends = self.cached_ends()
        assert len(set(ends)) == len(ends), "the index holds a block twice"
        assert self.published.issuperset(ends), "the index holds a block that nobody committed since it was invalidated"
        # Evictions count blocks: runs that have none, not even a state, leave unnoticed.
        if self.only_grew and self.growing and not any(self.cache.counters.evictions.values()):
            postponed = {end for request in self.live.values() for end in self.postponed_ends(request)}
            wanted = self.published - postponed - self.never_published
            assert wanted <= set(ends), "a block that was committed cannot be found"

    def postponed_ends(self, request: Request) -> list[int]:
        """The last bytes of blocks that a request committed and may not publish yet: a rewound fork holds them too."""
        handle, rows = request.handle, self.cache.rows
        if request.swapped or not handle.family or rows.tips[row := handle.row].open_row == row:
            return []
        first, last = rows.tips[row].end, request.committed // self.size
        held = [
            self.cache.groups[g].gpu.refs[ids[ids >= 0]]
            for g in (*self.growing, *self.states)
            for ids in [handle.block_ids(g)[first:last]]
        ]
        if first == last or not any((refs > 1).any() for refs in held):
            return []
        return [request.values[depth * self.size - 1] for depth in range(first + 1, last + 1)]

    def check_mirror(self, tree: list[tuple[Any, Any, list[bytes]]]) -> None:
        batch = self.subscription.poll()
        assert not batch.missed
        self.mirror.apply(batch.events)
        expected: dict[int, dict[bytes, tuple[Tier, int]]] = {}
        for node, _, digests in (found for found in tree if not found[0].is_remainder):
            for group in (*self.growing, *self.states):
                for digest, block in zip(digests, node.ids[group].tolist(), strict=True):
                    if block >= 0:
                        expected.setdefault(group, {})[digest] = (node.tier, node.priority)
        assert {group: blocks for group, blocks in self.mirror.blocks.items() if blocks} == expected
        sizes = {(p.group, p.tier): p.num_blocks for p in self.mirror.pools}
        for group in self.config.groups:
            assert all(sizes[group.index, t] == self.cache.pools[group.pool][t].num_blocks for t in LOCAL_TIERS)

    def _read_books(self) -> Any:
        self.manager.cache.gc()  # what is due goes before any operation, whether it is refused or not
        state, groups = self.cache, range(len(self.config.groups))
        pools = [
            (p.num_blocks, p.num_free, p.num_cached, p.num_pinned, p.refs.tolist())
            for tiers in state.pools
            for p in tiers
        ]
        requests = [
            (
                h.request_id,
                h.num_reserved,
                h.num_written,
                h.num_committed,
                h.num_blocks,
                h.token_ids.tolist(),
                h.publishes,
                [h.block_ids(group).tolist() for group in groups],
                None if h.swapped is None else [ids.tolist() for ids in h.swapped],
            )
            for h in self.manager.handles
        ]
        cached = {}
        runs = read_tree(self.manager, self.histories)
        uses = {use: place for place, use in enumerate(sorted({node.last_access for node, _, _ in runs}))}
        for node, values, _ in runs:
            of_node = (
                node.tier,
                node.priority,
                node.expires_at,
                node.sessions,
                bool(node.pins),
                uses[node.last_access],
            )
            columns = [ids.tolist() for ids in (*node.ids, *(node.host_copy or ()))]
            ends = values[-1:] if node.is_remainder else values[self.size - 1 :: self.size]
            for index, end in enumerate(ends.tolist()):
                cached[end] = (*of_node, *(column[index] for column in columns))
        copies = [(op.kind, op.group, op.src.tolist(), op.dst.tolist(), op.num_tokens) for op in state.copies]
        counters = [(f.name, _plain(getattr(state.counters, f.name))) for f in fields(state.counters)]
        counters = [counter for counter in counters if counter[0] not in UNCOUNTED]
        quotas = [(q.tenant, q.guaranteed, q.maximum, q.cached[:], q.pinned[:]) for q in state.orders.quotas.values()]
        events = self.manager.events._buffer.next_id, len(self.manager.events._removed_digests)
        events = *events, dict(state.rows.symbols.placeholders)
        return pools, requests, cached, copies, counters, quotas, sorted(self.cache.pins), events

    def finish(self) -> None:
        """At the end everything can be given back, and nothing is left."""
        self.manager.free_batch([request.handle for request in self.live.values()])
        self.manager.check()
        if self.recording is not None:
            self.recording.compare()
        self.manager.cache.reset()
        self.manager.check()
        for pool in (pool for tiers in self.cache.pools for pool in tiers):
            assert pool.num_free == pool.num_blocks, f"pool {pool.index} on {pool.tier.name}: blocks are lost"

    def close(self) -> None:
        if self.recording is not None:
            self.recording.close()


def _plain(counter: Any) -> Any:
    """A number, or the numbers in a list, a mapping or a histogram, copied."""
    if isinstance(counter, int):
        return counter
    return list(counter.values() if isinstance(counter, dict) else getattr(counter, "buckets", counter))
