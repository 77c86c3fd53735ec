"""`explain` against an oracle that keeps everything, after every operation of drawn runs."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everything import Everything
from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, ReuseScope, StatePart, StateSpec, Tier
from kvpool.config import DType
from kvpool.errors import OutOfBlocksError

FULL, WINDOWED = LayerSpec(kv_heads=1, head_dim=8), LayerSpec(kv_heads=1, head_dim=8, window=6)
STATE = StateSpec((StatePart("state", (64, 16), DType.FLOAT32),))
SCOPES = [ReuseScope(), ReuseScope(salt="s"), ReuseScope(adapter="a"), ReuseScope(tenant="t")]
BASES = [list(range(first, first + 60)) for first in (0, 1000, 2000)]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """A document, often with a token changed, a piece left out, or another end."""
    base = draw(st.sampled_from(BASES))
    cut, left_out = draw(st.integers(1, 58)), draw(st.integers(0, 9))
    way = draw(st.integers(0, 3))
    if way == 1:
        base = [*base[:cut], 9000 + draw(st.integers(0, 3)), *base[cut + 1 :]]
    elif way == 2:
        base = base[:cut] + base[cut + left_out :]
    elif way == 3:
        base = base[:cut] + draw(st.sampled_from(BASES))
    return base[: draw(st.integers(1, len(base)))]


class ExplainMachine(RuleBasedStateMachine):
    @initialize(
        layers=st.sampled_from([[FULL], [FULL], [FULL, WINDOWED], [FULL, STATE]]),
        size=st.sampled_from([1, 4, 8]),
        host=st.sampled_from([0, 0, 12]),
        remembered=st.sampled_from([None, None, 10, 40]),
        partial=st.booleans(),
        unfilled=st.booleans(),
        policy=st.sampled_from(["adaptive", "lru"]),
    )
    def begin(
        self, layers: Any, size: int, host: int, remembered: int | None, partial: bool, unfilled: bool, policy: str
    ) -> None:
        self.now = 0.0
        has_states = STATE in layers
        config = KVCacheConfig(
            layers,
            block_size=size,
            gpu_blocks=(104 // size, 12) if has_states else 104 // size,
            host_blocks=(host, host // 2) if has_states else host,
            partial_match=partial and not has_states,
            cache_unfilled_blocks=unfilled and partial and not has_states,
            checkpoint_every=2 * size if has_states and unfilled else None,
            watermark=0.0,
            eviction_policy=policy,
            remembered_blocks=1000 if remembered is None else remembered,
        )
        self.manager = KVCacheManager(config, clock=lambda: self.now)
        self.everything = Everything(self.manager)
        self.forgets = remembered is not None
        self.live: list[tuple[Any, list[int]]] = []
        self.names = itertools.count()

    @rule(tokens=prompts(), scope=st.sampled_from(SCOPES), ttl=st.sampled_from([None, None, 2.0]), part=st.booleans())
    def come(self, tokens: list[int], scope: ReuseScope, ttl: float | None, part: bool) -> None:
        session = f"session {len(tokens) % 3}"
        name = f"r{next(self.names)}"
        self.manager.cache.gc()
        self.everything.look()
        before = dict(self.everything.left)
        try:
            handle = self.manager.allocate(name, tokens, scope=scope, ttl=ttl, session=session, reserve=0)
        except OutOfBlocksError:
            return
        self.everything.look()
        after, self.everything.left = self.everything.left, before  # what was known when it was admitted
        self.everything.left_now = after
        self.everything.note(handle, tokens)
        spans = self.manager.inspect.explain(handle)
        hit = handle.num_cached_tokens
        self.everything.check(spans, tokens, scope, hit, self.forgets, me=handle)
        assert sum(handle.missed_tokens.values()) == len(tokens) - hit
        self.everything.left = self.everything.left_now = after
        self.live.append((handle, list(tokens)))
        if part:
            self.write(len(self.live) - 1, len(tokens))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), count=st.integers(1, 30))
    def write(self, which: int, count: int) -> None:
        handle, _ = self.live[which % len(self.live)]
        count = min(count, handle.num_prompt_tokens - handle.num_committed)
        if count <= 0:
            return
        stop = handle.num_committed + count
        try:
            while (start := handle.num_committed) < stop:
                end = self.manager.step_end(handle, start, stop)
                self.manager.extend(handle, max(0, end - handle.num_reserved))
                self.manager.commit(handle, end - start)
        except OutOfBlocksError:
            return

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), more=st.lists(st.integers(0, 60), min_size=1, max_size=9))
    def decode(self, which: int, more: list[int]) -> None:
        handle, tokens = self.live[which % len(self.live)]
        if handle.num_committed < handle.num_prompt_tokens:
            return
        try:
            self.manager.extend(handle, len(more))
            self.manager.commit(handle, more)
        except OutOfBlocksError:
            return
        tokens += more
        self.everything.note(handle, tokens)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), keep=st.booleans())
    def end(self, which: int, keep: bool) -> None:
        handle, _ = self.live.pop(which % len(self.live))
        self.manager.free(handle, keep=keep)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.manager.cache.gc()

    @rule(way=st.integers(0, 5), tokens=prompts(), scope=st.sampled_from(SCOPES))
    def upkeep(self, way: int, tokens: list[int], scope: ReuseScope) -> None:
        cache = self.manager.cache
        if way == 0:
            cache.reset()
        elif way == 1:
            cache.invalidate(scope=scope)
        elif way == 2:
            cache.invalidate(session="session 1")
        elif way == 3:
            cache.invalidate(tokens, scope=scope)
        elif way == 4:
            cache.evict(5)
        elif self.manager.inspect.has_tier(Tier.HOST):
            cache.offload(4)

    @invariant()
    def told_right(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.everything.look()

    @rule(tokens=prompts(), scope=st.sampled_from(SCOPES), everyone=st.booleans())
    def ask(self, tokens: list[int], scope: ReuseScope, everyone: bool) -> None:
        self.manager.cache.gc()
        self.everything.look()
        before = self.manager.stats()
        spans = self.manager.inspect.explain(tokens, scope, all_tenants=everyone)
        assert self.manager.stats() == before
        hit = self.manager.match_prefix(tokens, scope).num_tokens
        self.everything.check(spans, tokens, scope, hit, self.forgets, all_tenants=everyone)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()


TestExplain = ExplainMachine.TestCase
