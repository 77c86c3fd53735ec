"""The whole manager, driven by random operations and compared with a slow, obvious model after every one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reference import (
    LOCAL_TIERS,
    CachedBlocks,
    Contents,
    Sequence,
    cached_blocks,
    expected_hit,
    mirror_for,
    mirror_of,
    needed_positions,
    snapshot,
)

from kvpool import (
    AllocStatus,
    GroupKind,
    KVCacheConfig,
    KVCacheManager,
    LayerSpec,
    Pin,
    Retention,
    ReuseScope,
    Tier,
    TokenRange,
)
from kvpool.errors import (
    DuplicateRequestError,
    InvalidArgumentError,
    KVPoolError,
    OutOfBlocksError,
    PinBudgetError,
    SequenceStateError,
    UnknownRequestError,
)
from kvpool.mirror import CacheMirror

SCOPES = (ReuseScope(), ReuseScope(tenant="a"), ReuseScope(tenant="b"), ReuseScope(tenant="a", adapter="lora"))
SESSIONS = (None, "s", "t")
TTLS = (None, None, 5.0, 20.0)
RETENTIONS = (
    None,
    None,
    None,
    Retention([TokenRange(0, 3, priority=90, duration=10.0)], decode_priority=10),
    Retention(
        [TokenRange(0, 2, priority=5), TokenRange(2, None, priority=60)], decode_priority=80, decode_duration=4.0
    ),
)
MAX_LIVE = 7

small = st.integers(0, 5)
picks = st.integers(0, 2**16)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
scopes = st.sampled_from((SCOPES[0], *SCOPES))
tiers = st.sampled_from((Tier.GPU, Tier.GPU, Tier.HOST, Tier.DISK))


class ManagerMachine(RuleBasedStateMachine):
    """Every rule drives one verb with the real manager and the model; the invariants compare the two."""

    config: ClassVar[KVCacheConfig]
    policy: ClassVar[str | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.manager = KVCacheManager(self.config, policy=self.policy, clock=lambda: self.now)
        size = self.config.block_size
        self.contents = Contents(size, {g.index: g.pool for g in self.config.groups})
        self.growing = [g.index for g in self.config.groups if g.kind is not GroupKind.CROSS]
        self.cross = [g.index for g in self.config.groups if g.kind is GroupKind.CROSS]
        self.live: dict[str, Sequence] = {}
        self.freed: list[Any] = []
        self.pins: list[Pin] = []
        self.names = itertools.count()
        self.subscription: Any = None
        self.mirror: CacheMirror | None = None
        self.published: set[tuple[ReuseScope, tuple[int, ...]]] = set()  # every block ever published
        self.only_grew = True  # nothing was ever removed from the index on purpose

    # --- helpers -----------------------------------------------------------------------------------------------------

    def pick(self, number: int, swapped: bool | None = False) -> Sequence | None:
        chosen = [s for s in self.live.values() if swapped is None or s.swapped == swapped]
        return chosen[number % len(chosen)] if chosen else None

    def pick_some(self, number: int, swapped: bool | None = False) -> list[Sequence]:
        """Some sequences, in an order that the number decides as well."""
        chosen = [s for s in self.live.values() if swapped is None or s.swapped == swapped]
        some = [s for i, s in enumerate(chosen) if number >> i & 1]
        return some[::-1] if number >> 9 & 1 else some

    def attempt(self, call: Callable[[], Any], *errors: type[KVPoolError]) -> tuple[bool, Any]:
        """Runs an operation that may be refused with one of `errors`; refused, it must have changed nothing."""
        before = snapshot(self.manager)
        try:
            return True, call()
        except errors:
            assert snapshot(self.manager) == before, "a refused operation left something changed"
            return False, None

    def unchanged(self, call: Callable[[], Any]) -> Any:
        """Runs a question; it must not change anything."""
        before = snapshot(self.manager)
        result = call()
        assert snapshot(self.manager) == before, "a question changed something"
        return result

    def run_copies(self) -> None:
        self.contents.apply(self.manager.take_copies())
        for tiers_of_pool in self.manager._state.pools:
            for pool in tiers_of_pool:
                self.contents.poison(pool.tier, pool.index, pool.free_ids().tolist())

    def supply(self) -> list[int]:
        """Free and evictable GPU blocks per pool, when there are no quotas."""
        stats = self.manager.stats()
        return [stats.pool(i).free + stats.pool(i).cached - stats.pool(i).pinned for i in range(len(self.config.pools))]

    def check_slots(self, seq: Sequence, slots: Any, start: int, stop: int) -> None:
        """Slots name the right places of the sequence's own table."""
        size = self.config.block_size
        assert slots.shape == (len(self.config.groups), stop - start)
        for group in self.growing:
            table = seq.handle.block_table(group)
            for position in range(start, stop):
                block = table[position // size]
                is_there = seq.written <= position < seq.present
                expected = -1 if block is None or is_there else block * size + position % size
                assert slots[group, position - start] == expected
        for group in self.cross:
            assert (slots[group] == -1).all()

    def write(self, seq: Sequence, tokens: list[int], slots: Any) -> None:
        """The forward pass: keys and values of the next tokens go to their slots."""
        self.run_copies()
        for offset, token in enumerate(tokens):
            position = seq.written
            seq.tokens.append(token)
            for group in self.growing:
                slot = int(slots[group, offset])
                if position < seq.present:
                    continue
                assert slot >= 0, f"no place to write position {position} of group {group}"
                self.contents.write(group, slot, seq.content(position))

    def next_tokens(self, seq: Sequence, count: int, number: int) -> list[int]:
        """Known ids where there are any, then drawn ones."""
        return [
            seq.known[p] if p < len(seq.known) else number >> (p - seq.written) & 1
            for p in range(seq.written, seq.written + count)
        ]

    def note_commit(self, seq: Sequence, count: int, by_ids: bool) -> None:
        size = self.config.block_size
        end = seq.committed + count
        if by_ids:
            seq.known = [*seq.known, *seq.tokens[len(seq.known) : end]]
        if seq.publishes:
            for depth in range(seq.committed // size + 1, min(end, len(seq.known)) // size + 1):
                self.published.add((seq.scope, tuple(seq.tokens[: depth * size])))
        if end > len(seq.known):
            seq.publishes = False
        seq.committed = end

    def note_gone(self, before: CachedBlocks) -> None:
        """What was invalidated may be cached again only if somebody commits it again."""
        self.published -= set(before) - set(cached_blocks(self.manager))
        self.note_silenced()

    def note_silenced(self) -> None:
        """Requests that hold invalidated data stop publishing."""
        for seq in self.live.values():
            seq.publishes = seq.publishes and seq.handle.publishes

    # --- admission ---------------------------------------------------------------------------------------------------

    @initialize(listen=st.booleans())
    def begin(self, listen: bool) -> None:
        if listen:
            self.subscribe()

    @precondition(lambda self: self.subscription is None)
    @rule()
    def subscribe(self) -> None:
        self.subscription = self.manager.subscribe()
        self.mirror = mirror_for(self.config)

    @precondition(lambda self: self.subscription is not None)
    @rule(really=st.integers(0, 4))
    def unsubscribe(self, really: int) -> None:
        if not really:
            self.subscription.close()
            self.subscription = self.mirror = None

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(
        tokens=prompts, repeat=st.integers(0, 3), scope=scopes, named=st.integers(0, 5), reserve=st.none() | small,
        lookahead=st.sampled_from((0, 0, 0, 1, 3)), cross=st.integers(0, 5), session=st.sampled_from(SESSIONS),
        ttl=st.sampled_from(TTLS), retention=st.sampled_from(RETENTIONS), fill=st.booleans(),
    )  # fmt: skip
    def allocate(
        self, tokens: list[int], repeat: int, scope: ReuseScope, named: int, reserve: int | None, lookahead: int,
        cross: int, session: str | None, ttl: float | None, retention: Retention | None, fill: bool,
    ) -> None:  # fmt: skip
        if not repeat and self.live:  # a prompt that continues what another request computed
            other = self.pick(len(tokens), swapped=None)
            assert other is not None
            tokens, scope = (
                [*other.tokens, *tokens[: len(tokens) % 3 + 1]][-40:] if other.tokens else tokens,
                other.scope,
            )
        known = bool(named)
        if self.cross and cross and named % 2:  # a named encoder input; the decoders of unnamed ones share nothing
            scope = replace(scope, encoder="audio")
        shares = not self.cross or not cross or bool(scope.encoder)
        options: dict[str, Any] = {"scope": scope, "lookahead": lookahead}
        if reserve is not None:
            options["reserve"] = min(reserve + 1, len(tokens))
        if self.cross:
            options["cross_tokens"] = cross
        described: dict[str, Any] = {"tokens": tokens} if known else {"num_tokens": len(tokens)}
        cached = cached_blocks(self.manager)
        match = self.unchanged(lambda: self.manager.match_prefix(tokens, scope)) if known and shares else None
        answer = self.unchanged(lambda: self.manager.can_allocate(**described, **options))
        name = f"r{next(self.names)}"
        admitted, handle = self.attempt(
            lambda: self.manager.allocate(name, **described, **options, session=session, ttl=ttl, retention=retention),
            OutOfBlocksError,
        )
        if self.config.watermark == 0:
            assert admitted == (answer.status is AllocStatus.OK), f"{answer} but admitted={admitted}"
        elif answer:
            assert admitted
        if not admitted:
            return
        hit = handle.num_cached_tokens
        if match is not None:
            self.check_hit(match, answer, handle, tokens, scope, cached)
        else:
            assert hit == 0
        reserved = max(options.get("reserve", len(tokens)), hit)
        if hit == len(tokens) - 1 and len(tokens) % self.config.block_size == 0 and handle.num_reserved == len(tokens):
            reserved = len(tokens)  # the last block is held as a whole, though its last token is computed again
        present = len(tokens) if known and hit == len(tokens) - 1 and (scope, tuple(tokens)) in cached else hit
        seq = Sequence(
            handle, scope, tokens[:hit], tokens[:] if known else [], reserved, hit, len(tokens) if known else 0,
            self.config.enable_prefix_caching and shares, options.get("cross_tokens", 0), name, present=present,
        )  # fmt: skip
        self.live[name] = seq
        self.write_cross(seq)
        if fill:  # the usual prefill: everything reserved is written and committed at once
            self.advance(seq, seq.reserved - seq.written, 0, True, by_ids=False)

    def check_hit(
        self, match: Any, answer: Any, handle: Any, tokens: list[int], scope: ReuseScope, cached: CachedBlocks
    ) -> None:
        hit = handle.num_cached_tokens
        assert match.num_tokens == match.num_blocks * self.config.block_size + match.num_partial_tokens
        assert match.num_tokens in expected_hit(self.config, cached, scope, tokens, match.has_last_logits)
        # the answer may do without a partial block for the watermark's sake; allocate does not look at that
        assert hit == answer.num_cached_tokens or (self.config.watermark and answer.num_cached_tokens < hit)
        # a block that would be copied from may have to make room instead: then only whole blocks are reused
        assert hit == match.num_tokens or (match.num_partial_tokens and hit < match.num_tokens)
        assert hit < len(tokens) or handle.last_logits is not None
        if handle.last_logits is not None:
            assert hit == len(tokens)
            assert handle.last_logits == (scope, tuple(tokens))

    def write_cross(self, seq: Sequence) -> None:
        self.run_copies()
        size = self.config.block_size
        for group in self.cross:
            table = seq.handle.block_table(group)
            assert len(table) == -(-seq.num_cross // size)
            for position in range(seq.num_cross):
                block = table[position // size]
                assert block is not None
                self.contents.write(group, block * size + position % size, (seq.cross_name, position))

    # --- steps -------------------------------------------------------------------------------------------------------

    def advance(self, seq: Sequence, count: int, number: int, commit: bool, by_ids: bool) -> None:
        """Writes the next `count` reserved tokens of one sequence and commits them, or only marks them as written."""
        start = seq.written
        count = min(count, seq.reserved - start)
        done, slots = self.attempt(
            lambda: self.manager.slot_mapping([seq.handle], start, start + count), OutOfBlocksError
        )
        if not done:
            return
        self.check_slots(seq, slots, start, start + count)
        self.write(seq, self.next_tokens(seq, count, number), slots)
        if not commit:
            self.manager.mark_written(seq.handle, count)
            return
        by_ids = by_ids and seq.committed <= len(seq.known)
        num_tokens = seq.written - seq.committed
        self.manager.commit(seq.handle, seq.tokens[seq.committed :] if by_ids else num_tokens)
        self.note_commit(seq, num_tokens, by_ids)

    @rule(number=picks, count=st.integers(0, 6), draw=picks, commit=st.booleans(), by_ids=st.booleans())
    def compute(self, number: int, count: int, draw: int, commit: bool, by_ids: bool) -> None:
        if seq := self.pick(number):
            self.advance(seq, count, draw, commit, by_ids)

    @rule(number=picks, count=st.integers(0, 6), by_ids=st.booleans())
    def commit_drafts(self, number: int, count: int, by_ids: bool) -> None:
        """Some of the written tokens become final."""
        seq = self.pick(number)
        if seq is None:
            return
        count = min(count, seq.written - seq.committed)
        by_ids = by_ids and seq.committed <= len(seq.known)
        tokens = seq.tokens[seq.committed : seq.committed + count]
        self.manager.commit(seq.handle, tokens if by_ids else count)
        self.note_commit(seq, count, by_ids)

    @rule(number=picks, count=st.integers(0, 7), lookahead=st.sampled_from((0, 0, 1, 4)), draw=picks, use=st.booleans())
    def extend(self, number: int, count: int, lookahead: int, draw: int, use: bool) -> None:
        seq = self.pick(number)
        if seq is None:
            return
        needs = self.unchanged(lambda: self.manager.blocks_needed(seq.handle, count, lookahead))
        fits = all(need <= have for need, have in zip(needs, self.supply(), strict=True))
        done, slots = self.attempt(lambda: self.manager.extend(seq.handle, count, lookahead), OutOfBlocksError)
        if not self.manager._state.cache.quotas:
            assert done == fits, f"needs {needs} of {self.supply()}, done={done}"
        if not done:
            return
        start = seq.reserved
        seq.reserved += count
        self.check_slots(seq, slots, start, start + count)
        if use and seq.written == start and count:
            self.write(seq, self.next_tokens(seq, count, draw), slots)
            self.manager.mark_written(seq.handle, count)

    @rule(
        number=picks, counts=st.none() | st.lists(st.integers(0, 4), min_size=MAX_LIVE, max_size=MAX_LIVE), ahead=small
    )
    def extend_batch(self, number: int, counts: list[int] | None, ahead: int) -> None:
        some = self.pick_some(number)
        per_sequence = [1] * len(some) if counts is None else counts[: len(some)]
        argument = 1 if counts is None else per_sequence
        handles = [seq.handle for seq in some]
        batch = self.manager.batch(handles) if number >> 10 & 1 else handles
        done, slots = self.attempt(lambda: self.manager.extend_batch(batch, argument, ahead % 3), OutOfBlocksError)
        if not done:
            return
        offset = 0
        for seq, count in zip(some, per_sequence, strict=True):
            seq.reserved += count
            self.check_slots(seq, slots[:, offset : offset + count], seq.reserved - count, seq.reserved)
            offset += count

    @rule(number=picks, draw=picks, steps=st.integers(1, 4))
    def decode(self, number: int, draw: int, steps: int) -> None:
        """Decode steps of a batch: one token each, written and committed."""
        some = [seq for seq in self.pick_some(number) if seq.committed == seq.written == seq.reserved]
        some = [seq for seq in some if seq.committed == len(seq.known)]
        batch = self.manager.batch([seq.handle for seq in some])
        for step in range(steps):
            done, slots = self.attempt(lambda: self.manager.extend_batch(batch), OutOfBlocksError)
            if not done:
                return
            tokens = [draw >> (step + i) & 1 for i in range(len(some))]
            for i, (seq, token) in enumerate(zip(some, tokens, strict=True)):
                seq.reserved += 1
                self.write(seq, [token], slots[:, i : i + 1])
            self.manager.commit_batch(batch, tokens)
            for seq in some:
                self.note_commit(seq, 1, by_ids=True)

    @rule(number=picks, draw=picks, by_ids=st.booleans())
    def compute_batch(self, number: int, draw: int, by_ids: bool) -> None:
        """All reserved tokens of several sequences, written and committed in one call."""
        some = self.pick_some(number)
        if by_ids:
            some = [seq for seq in some if seq.committed <= len(seq.known)]
        handles = [seq.handle for seq in some]
        starts, stops = [seq.written for seq in some], [seq.reserved for seq in some]
        done, slots = self.attempt(lambda: self.manager.slot_mapping(handles, starts, stops), OutOfBlocksError)
        if not done:
            return
        offset = 0
        for seq, start, stop in zip(some, starts, stops, strict=True):
            self.check_slots(seq, slots[:, offset : offset + stop - start], start, stop)
            self.write(seq, self.next_tokens(seq, stop - start, draw), slots[:, offset : offset + stop - start])
            offset += stop - start
        counts = [seq.written - seq.committed for seq in some]
        tokens = [token for seq in some for token in seq.tokens[seq.committed :]] if by_ids else None
        self.manager.commit_batch(handles, tokens, counts)
        for seq, count in zip(some, counts, strict=True):
            self.note_commit(seq, count, by_ids)

    @rule(number=picks, count=st.integers(0, 12))
    def rewind(self, number: int, count: int) -> None:
        seq = self.pick(number)
        if seq is None:
            return
        count = min(count, seq.reserved)
        done, _ = self.attempt(lambda: self.manager.rewind(seq.handle, count), OutOfBlocksError, SequenceStateError)
        if not done:
            return
        seq.reserved -= count
        del seq.tokens[seq.reserved :]
        seq.present = min(seq.present, seq.reserved)
        if seq.committed > seq.reserved:
            seq.committed = seq.reserved
            del seq.known[seq.reserved :]

    # --- families and ends -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(number=picks, children=st.integers(1, 3))
    def fork(self, number: int, children: int) -> None:
        seq = self.pick(number)
        if seq is None:
            return
        names = [f"f{next(self.names)}" for _ in range(min(children, MAX_LIVE - len(self.live)))]
        for name, handle in zip(names, self.manager.fork(seq.handle, *names), strict=True):
            self.live[name] = Sequence(
                handle, seq.scope, seq.tokens[:], seq.known[:], seq.reserved, seq.committed, seq.num_prompt,
                seq.publishes, seq.num_cross, seq.cross_name, present=seq.present,
            )  # fmt: skip

    @rule(number=picks, keep=st.sampled_from((True, True, True, False)))
    def free(self, number: int, keep: bool) -> None:
        if seq := self.pick(number, swapped=None):
            self.manager.free(seq.handle, keep)
            self.ended(seq, keep)

    @rule(number=picks, keep=st.sampled_from((True, True, True, False)))
    def free_batch(self, number: int, keep: bool) -> None:
        some = self.pick_some(number, swapped=None)
        self.manager.free_batch([seq.handle for seq in some], keep)
        for seq in some:
            self.ended(seq, keep)

    def ended(self, seq: Sequence, keep: bool) -> None:
        del self.live[seq.handle.request_id]
        self.freed.append(seq.handle)
        self.only_grew = self.only_grew and keep

    @rule(number=picks)
    def store_last_logits(self, number: int) -> None:
        seq = self.pick(number)
        if seq is None:
            return
        prompt = tuple(seq.tokens[: seq.num_prompt])
        done, stored = self.attempt(
            lambda: self.manager.store_last_logits(seq.handle, (seq.scope, prompt)), SequenceStateError
        )
        assert done == (0 < seq.num_prompt <= seq.committed)
        if done and stored:
            match = self.manager.match_prefix(list(prompt), seq.scope)
            assert match.has_last_logits == (match.num_tokens == len(prompt))

    # --- the cache as a whole ----------------------------------------------------------------------------------------

    @rule(number=picks, tokens=prompts, ttl=st.sampled_from(TTLS), of_handle=st.booleans())
    def pin(self, number: int, tokens: list[int], ttl: float | None, of_handle: bool) -> None:
        seq = self.pick(number, swapped=None)
        scope = SCOPES[number % len(SCOPES)] if seq is None else seq.scope
        what = seq.handle if of_handle and seq is not None else tokens
        done, pin = self.attempt(
            lambda: self.manager.pin(what, scope, ttl), InvalidArgumentError, PinBudgetError, SequenceStateError
        )
        if done:
            self.pins.append(pin)

    @precondition(lambda self: self.pins)
    @rule(number=picks)
    def unpin(self, number: int) -> None:
        pin = self.pins.pop(number % len(self.pins))
        active = pin.pin_id in self.manager._pins.active
        done, _ = self.attempt(lambda: self.manager.unpin(pin), InvalidArgumentError)
        assert done == active

    @rule(tenant=st.sampled_from(("", "a", "b")), low=st.integers(0, 4), high=st.none() | st.integers(0, 6))
    def set_quota(self, tenant: str, low: int, high: int | None) -> None:
        self.attempt(lambda: self.manager.set_quota(tenant, guaranteed=low, maximum=high), InvalidArgumentError)

    @rule()
    def clear_quotas(self) -> None:
        for tenant in ("", "a", "b"):
            self.manager.set_quota(tenant)

    @rule(count=st.integers(0, 6), pool=st.integers(0, 2), tier=tiers)
    def evict(self, count: int, pool: int, tier: Tier) -> None:
        index = pool % len(self.config.pools)
        before = self.manager.get_num_free_blocks(index, tier)
        freed = self.manager.evict(count, pool=index, tier=tier)
        assert self.manager.get_num_free_blocks(index, tier) == before + freed

    @rule(seconds=st.sampled_from((1.0, 6.0, 25.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def gc(self) -> None:
        self.manager.gc()
        assert all(pin.expires_at > self.now for pin in self.manager._pins.active.values())

    @rule(count=st.integers(0, 6), pool=st.integers(0, 2), tier=st.sampled_from((Tier.GPU, Tier.HOST)))
    def offload(self, count: int, pool: int, tier: Tier) -> None:
        self.attempt(
            lambda: self.manager.offload(count, pool=pool % len(self.config.pools), tier=tier), InvalidArgumentError
        )

    @rule(tokens=prompts, scope=scopes, number=picks)
    def onboard(self, tokens: list[int], scope: ReuseScope, number: int) -> None:
        if number % 2 and (seq := self.pick(number, swapped=None)):
            tokens, scope = seq.tokens, seq.scope
        done, _ = self.attempt(lambda: self.manager.onboard(tokens, scope), OutOfBlocksError)
        if done and self.config.enable_prefix_caching:
            assert set(self.manager.match_prefix(tokens, scope).tokens_by_tier) <= {Tier.GPU}

    @rule(number=picks)
    def swap_out(self, number: int) -> None:
        some = self.pick_some(number)
        handles = [seq.handle for seq in some]
        answer = self.unchanged(lambda: self.manager.can_swap_out(*handles))
        done, _ = self.attempt(lambda: self.manager.swap_out(*handles), OutOfBlocksError)
        assert done == bool(answer), f"{answer} but done={done}"
        if done:
            for seq in some:
                seq.swapped = True
            self.note_silenced()

    @rule(number=picks)
    def swap_in(self, number: int) -> None:
        some = self.pick_some(number, swapped=True)
        handles = [seq.handle for seq in some]
        answer = self.unchanged(lambda: self.manager.can_swap_in(*handles))
        done, _ = self.attempt(lambda: self.manager.swap_in(*handles), OutOfBlocksError)
        if self.config.watermark == 0:
            assert done == bool(answer), f"{answer} but done={done}"
        if done:
            for seq in some:
                seq.swapped = False

    @rule(
        tokens=prompts,
        scope=st.none() | scopes,
        session=st.sampled_from(SESSIONS),
        kind=st.integers(0, 4),
        number=picks,
    )
    def invalidate(
        self, tokens: list[int], scope: ReuseScope | None, session: str | None, kind: int, number: int
    ) -> None:
        if kind == 4 and number % 8:
            return
        if kind == 3 and (seq := self.pick(number, swapped=None)) and seq.tokens:
            tokens, scope, kind = seq.tokens[: number % 9 + 1], seq.scope, 0
        cached = cached_blocks(self.manager)
        size = self.config.block_size
        self.only_grew = False
        if kind == 0:
            cut = tuple(tokens[: len(tokens) // size * size])
            gone = {key for key in cached if cut and key[0] == (scope or SCOPES[0]) and key[1][: len(cut)] == cut}
            removed = self.manager.invalidate(tokens, scope=scope)
        elif kind == 1 and scope is not None:
            gone = {key for key in cached if key[0] == scope}
            removed = self.manager.invalidate(scope=scope)
        elif kind == 2 and session is not None:
            self.manager.invalidate(session=session)
            self.note_gone(cached)
            return
        else:
            gone = set(cached)
            removed = self.manager.reset_prefix_cache()
        self.note_gone(cached)
        assert set(cached_blocks(self.manager)) == set(cached) - gone
        assert removed == len(gone)

    @rule(tier=tiers)
    def defragment(self, tier: Tier) -> None:
        before = self.manager.stats().pools
        self.manager.defragment(tier)
        after = self.manager.stats().pools
        assert [(p.free, p.cached) for p in before] == [(p.free, p.cached) for p in after]
        for tiers_of_pool in self.manager._state.pools:
            pool = tiers_of_pool[tier]
            live = pool.num_blocks - pool.num_free
            assert all(block >= live for block in pool.free_ids().tolist()), "a hole is left"

    @rule(change=st.integers(-4, 4), pool=st.integers(0, 2), tier=tiers)
    def resize(self, change: int, pool: int, tier: Tier) -> None:
        index = pool % len(self.config.pools)
        current = self.manager._state.pools[index][tier].num_blocks
        if not current or not 1 <= current + change <= 24:
            return
        done, result = self.attempt(
            lambda: self.manager.resize(current + change, pool=index, tier=tier), OutOfBlocksError
        )
        if done:
            assert self.manager._state.pools[index][tier].num_blocks == result.num_blocks == current + change

    @rule()
    def take_copies(self) -> None:
        self.run_copies()

    # --- wrong calls -------------------------------------------------------------------------------------------------

    def refused(self, error: type[KVPoolError], call: Callable[[], Any]) -> None:
        before = snapshot(self.manager)
        with pytest.raises(error):
            call()
        assert snapshot(self.manager) == before, "a wrong call changed something"

    @rule(number=picks)
    def wrong_calls(self, number: int) -> None:
        manager = self.manager
        self.refused(UnknownRequestError, lambda: manager.get("nobody"))
        self.refused(InvalidArgumentError, lambda: manager.allocate("x", []))
        self.refused(InvalidArgumentError, lambda: manager.allocate("x", [1], num_tokens=1))
        self.refused(InvalidArgumentError, lambda: manager.allocate("x", [1, 2], reserve=3))
        self.refused(InvalidArgumentError, lambda: manager.allocate("x", num_tokens=-1))
        self.refused(InvalidArgumentError, lambda: manager.allocate("x", [-1]))
        self.refused(InvalidArgumentError, lambda: manager.evict(-1))
        self.refused(InvalidArgumentError, lambda: manager.resize(0))
        self.refused(InvalidArgumentError, lambda: manager.invalidate())
        self.refused(OutOfBlocksError, lambda: manager.allocate("x", num_tokens=10_000))
        if self.freed:
            handle = self.freed[number % len(self.freed)]
            for call in (manager.free, manager.extend, manager.swap_out, manager.swap_in, manager.pin):
                self.refused(UnknownRequestError, lambda call=call: call(handle))
            self.refused(UnknownRequestError, lambda: manager.commit(handle, 1))
            self.refused(UnknownRequestError, lambda: manager.fork(handle, "x"))
            self.refused(UnknownRequestError, lambda: manager.rewind(handle, 0))
            self.refused(UnknownRequestError, lambda: handle.num_reserved)

    @rule(number=picks)
    def wrong_steps(self, number: int) -> None:
        manager = self.manager
        seq, other = self.pick(number), self.pick(number // 8, swapped=None)
        if seq is None or other is None:
            return
        handle, groups = seq.handle, len(self.config.groups)
        self.refused(DuplicateRequestError, lambda: manager.allocate(other.handle.request_id, [1]))
        self.refused(DuplicateRequestError, lambda: manager.fork(handle, "x", other.handle.request_id))
        self.refused(DuplicateRequestError, lambda: manager.fork(handle, "x", "x"))
        self.refused(InvalidArgumentError, lambda: manager.extend(handle, -1))
        self.refused(InvalidArgumentError, lambda: manager.extend(handle, 1, lookahead=-1))
        self.refused(InvalidArgumentError, lambda: manager.extend_batch([handle], [1, 1]))
        self.refused(InvalidArgumentError, lambda: manager.extend_batch([handle, handle]))
        wrong_out = np.zeros((groups, 5), np.int32)
        self.refused(KVPoolError, lambda: manager.extend_batch([handle], 2, out=wrong_out))
        self.refused(KVPoolError, lambda: manager.slot_mapping([handle], 0, 10_000))
        wrong_type = np.zeros((groups, seq.reserved - seq.written), np.int64)
        self.refused(KVPoolError, lambda: manager.slot_mapping([handle], seq.written, seq.reserved, out=wrong_type))
        self.refused(SequenceStateError, lambda: manager.mark_written(handle, seq.reserved - seq.written + 1))
        self.refused(SequenceStateError, lambda: manager.commit(handle, seq.reserved - seq.committed + 1))
        self.refused(InvalidArgumentError, lambda: manager.commit(handle, -1))
        self.refused(KVPoolError, lambda: manager.commit_batch([handle], [1, 1], [1]))
        self.refused(InvalidArgumentError, lambda: manager.rewind(handle, seq.reserved + 1))
        self.refused(InvalidArgumentError, lambda: manager.rewind(handle, -1))
        self.refused(SequenceStateError, lambda: manager.swap_in(handle))
        self.refused(KVPoolError, lambda: manager.free_batch([handle, handle]))
        self.refused(KVPoolError, lambda: manager.swap_out(handle, handle))
        if seq.committed < min(len(seq.known), seq.reserved):
            self.refused(InvalidArgumentError, lambda: manager.commit(handle, [seq.known[seq.committed] ^ 1]))
        swapped = self.pick(number, swapped=True)
        if swapped is not None:
            away = swapped.handle
            for call in (manager.extend, manager.swap_out, manager.mark_written):
                self.refused(SequenceStateError, lambda call=call: call(away))
            self.refused(SequenceStateError, lambda: manager.commit(away, 1))
            self.refused(SequenceStateError, lambda: manager.fork(away, "x"))
            self.refused(SequenceStateError, lambda: manager.rewind(away, 0))
            self.refused(SequenceStateError, lambda: manager.extend_batch([handle, away]))

    # --- what must always hold ---------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.manager.check()
        for pool in self.manager.stats().pools:
            assert pool.free + pool.referenced + pool.cached == pool.total
            assert min(pool.free, pool.referenced, pool.cached, pool.pinned) >= 0
        assert {h.request_id for h in self.manager.handles} == set(self.live)

    @invariant()
    def lengths_agree(self) -> None:
        for seq in self.live.values():
            handle = seq.handle
            lengths = (handle.num_reserved, handle.num_written, handle.num_committed, handle.is_swapped)
            assert lengths == (seq.reserved, seq.written, seq.committed, seq.swapped)
            assert handle.token_ids.tolist() == seq.known
            assert handle.publishes == seq.publishes

    @invariant()
    def bytes_are_right(self) -> None:
        """Every live sequence, and every cached block on every tier, holds exactly what its tokens say."""
        contents = self.contents.after(self.manager._state.copies)
        size = self.config.block_size
        for name, seq in self.live.items():
            for group in self.growing:
                positions = needed_positions(self.config, group, seq.committed) | set(range(seq.committed, seq.written))
                for position in positions:
                    found = self.read(contents, seq, group, position // size, position % size)
                    assert found == seq.content(position), f"{name}, group {group}, position {position}: {found}"
            for group in self.cross:
                for position in range(seq.num_cross):
                    found = self.read(contents, seq, group, position // size, position % size)
                    assert found == (seq.cross_name, position), f"{name}, group {group}, position {position}: {found}"
        for (scope, prefix), groups in cached_blocks(self.manager).items():
            for group, (tier, _, block) in groups.items():
                for offset in range(size):
                    expected = (scope, *prefix[: len(prefix) - size + offset + 1])
                    found = contents.read(tier, group, block, offset)
                    assert found == expected, f"cached {prefix}, group {group}, {tier.name} block {block}: {found}"

    @staticmethod
    def read(contents: Contents, seq: Sequence, group: int, column: int, offset: int) -> Any:
        if seq.handle.swapped is not None:
            block = int(seq.handle.swapped.ids[group][column])
            return contents.read(Tier.HOST, group, block, offset) if block >= 0 else "not on the host"
        entry = seq.handle.block_table(group)[column]
        return contents.read(Tier.GPU, group, entry, offset) if entry is not None else "not in the table"

    @invariant()
    def cache_holds_what_was_published(self) -> None:
        cached = set(cached_blocks(self.manager))
        assert cached <= self.published
        stats = self.manager.stats()
        if self.only_grew and not any(stats.evictions.values()):
            assert cached == self.published

    @invariant()
    def mirror_follows(self) -> None:
        if self.subscription is None or self.mirror is None:
            return
        batch = self.subscription.poll()
        assert not batch.missed
        self.mirror.apply(batch.events)
        expected = mirror_of(self.manager, cached_blocks(self.manager))
        found = {group: dict(blocks) for group, blocks in self.mirror.blocks.items() if blocks}
        assert found == expected
        sizes = {(p.group, p.tier): p.num_blocks for p in self.mirror.pools}
        for group in self.config.groups:
            for tier in LOCAL_TIERS:
                assert sizes[group.index, tier] == self.manager._state.pools[group.pool][tier].num_blocks

    def teardown(self) -> None:
        """At the end everything can be given back, and nothing is left."""
        self.manager.free_batch([seq.handle for seq in self.live.values()])
        self.manager.check()
        self.manager.reset_prefix_cache()
        self.manager.check()
        assert all(p.free == p.total for p in self.manager.stats().pools)


def full(**options: Any) -> LayerSpec:
    return LayerSpec(kv_heads=1, head_dim=8, **options)


def big(**options: Any) -> LayerSpec:
    return LayerSpec(kv_heads=1, head_dim=32, **options)


CONFIGS: dict[str, tuple[list[LayerSpec], dict[str, Any]]] = {
    "full": ([full()], dict(block_size=4, gpu_blocks=10)),
    "roomy": ([full()], dict(block_size=2, gpu_blocks=200, event_buffer_size=4096)),
    "block of one": ([full()], dict(block_size=1, gpu_blocks=16)),
    "block of two": ([full()], dict(block_size=2, gpu_blocks=12, watermark=0.1)),
    "shared pool": ([full(), full(window=5)], dict(block_size=2, gpu_blocks=20)),
    "sinks, two pools": ([full(), big(window=4, sink_tokens=3)], dict(block_size=2, gpu_blocks=(12, 10))),
    "three groups": (
        [full(), full(window=3), big(window=6, sink_tokens=1)],
        dict(block_size=2, gpu_blocks=(20, 10), host_blocks=(10, 5), disk_blocks=(6, 4)),
    ),
    "chunked": ([full(), full(chunk=4)], dict(block_size=2, gpu_blocks=20, host_blocks=10)),
    "odd chunk": ([full(chunk=3)], dict(block_size=2, gpu_blocks=10)),
    "pure sliding": ([full(window=4)], dict(block_size=2, gpu_blocks=8)),
    "sliding with host": ([full(window=4, sink_tokens=2)], dict(block_size=2, gpu_blocks=8, host_blocks=6)),
    "windows on three tiers": (
        [full(), full(window=3), big(window=5, sink_tokens=2)],
        dict(block_size=2, gpu_blocks=(16, 9), host_blocks=(6, 3), disk_blocks=(4, 4)),
    ),
    "k only": ([full(k_only=True)], dict(block_size=4, gpu_blocks=10, host_blocks=6)),
    "cross": ([full(), full(cross_attention=True)], dict(block_size=2, gpu_blocks=16, host_blocks=10)),
    "cross, sliding": (
        [full(), full(window=4), big(cross_attention=True)],
        dict(block_size=2, gpu_blocks=(20, 8), host_blocks=(12, 6)),
    ),
    "host": ([full()], dict(block_size=2, gpu_blocks=10, host_blocks=8)),
    "host, kept on eviction": ([full()], dict(block_size=2, gpu_blocks=10, host_blocks=8, offload_on_evict=False)),
    "disk": ([full()], dict(block_size=2, gpu_blocks=8, host_blocks=5, disk_blocks=6)),
    "no caching": (
        [full(), full(window=4)],
        dict(block_size=2, gpu_blocks=16, host_blocks=8, enable_prefix_caching=False),
    ),
    "no partial": ([full(), full(window=5)], dict(block_size=4, gpu_blocks=14, partial_match=False)),
    "no partial, host": ([full()], dict(block_size=4, gpu_blocks=8, host_blocks=4, partial_match=False)),
    "default ttl": ([full()], dict(block_size=2, gpu_blocks=10, host_blocks=4, default_ttl=8.0)),
}
POLICIES = ("lru", "lfu", "fifo", "clock", "sieve", "s3fifo", "2q", "arc", "priority", "cost")


def machine(layers: list[LayerSpec], options: dict[str, Any], policy: str | None = None) -> type[ManagerMachine]:
    config = KVCacheConfig(layers, **{"watermark": 0.0, **options})
    return type("Machine", (ManagerMachine,), {"config": config, "policy": policy})


@pytest.mark.parametrize("name", CONFIGS)
def test_manager(name: str) -> None:
    run_state_machine_as_test(machine(*CONFIGS[name]), settings=settings())


@pytest.mark.parametrize("policy", POLICIES)
def test_manager_with_policy(policy: str) -> None:
    run_state_machine_as_test(machine(*CONFIGS["disk"], policy), settings=settings())
