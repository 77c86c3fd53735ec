"""What tests of broken tiers share: an engine on a tiny model, what it should answer, and what must be true when it rests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from models import random_prompt, tiny_model

from kvpool.engine import Engine, SamplingParams
from kvpool.tiers import KeyedTier, Outcome
from kvpool.tiers.contract import Keeper

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
PROMPTS = [random_prompt(100, seed=seed).tolist() for seed in range(4)]
ALL_CACHED = 4 * 96  # their tokens in whole blocks
FLUSH_SECONDS = 30.0


@cache
def model() -> Any:
    return tiny_model("gemma2")


@cache
def computed() -> tuple[tuple[int, ...], ...]:
    """The answers of an engine without tiers."""
    with Engine(model(), kv_blocks=128, block_size=8) as engine:
        return tuple(tuple(result.token_ids) for result in engine.generate(PROMPTS, PARAMS))


def make_engine(**options: Any) -> Engine:
    return Engine(model(), block_size=8, **{"kv_blocks": 128, "tier_timeout": 2.0, **options})


def assert_right(engine: Engine) -> int:
    """Every prompt is answered as if it were computed, one after the other; returns how many tokens were cached."""
    results = [engine.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    assert tuple(tuple(result.token_ids) for result in results) == computed()
    assert_balanced(engine)
    return sum(result.num_cached_tokens for result in results)


def assert_balanced(engine: Engine) -> None:
    """Nothing leaked, and every block that was moved is counted once, on both sides.

    At rest: nobody waits, holds a lease or has memory on loan, and no block is referenced. Stores: what the engine counts as
    stored and as failed is what its tiers count. Loads: every look-up that found something was decided, and no more prefixes
    came than were asked for.
    """
    assert engine._tiers is not None
    assert engine._tiers.flush(FLUSH_SECONDS)
    engine.manager.check()
    stats = engine.stats()
    assert all(pool.referenced == 0 for pool in stats.cache.pools)
    link = stats.tiers
    assert link is not None
    assert (link.held, link.leases, link.blocks_waiting, link.staging_bytes) == (0, (), 0, 0)
    tiers = [measured.stats for measured in link.tiers]
    assert link.stores.stored == sum(tier.stored for tier in tiers)
    assert link.stores.failed == sum(tier.refused + tier.store_failures + tier.late_stores for tier in tiers)
    assert link.stores.bytes_stored == sum(tier.bytes_stored for tier in tiers)
    assert link.decisions.loads + link.decisions.recomputes == link.fetches.found <= link.fetches.lookups
    assert link.imports + link.imports_without_room <= link.decisions.loads


class Clock:
    """The time of a link in a test: it passes when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


MODULES_WITH_TIME = (
    *("kvpool.engine.tier_link", "kvpool.tiers.transport.tier_transport"),
    *("kvpool.tiers.transport.chain", "kvpool.tiers.transport.fetching", "kvpool.tiers.transport.chain"),
)


class SlowestAllowed(KeyedTier):
    """Another tier; by the clock, each look-up and each load takes all of the time that it was given."""

    def __init__(self, inner: KeyedTier, clock: Clock) -> None:
        super().__init__(inner.name)
        self.inner = inner
        self.clock = clock

    def contains(self, keys: Sequence[bytes], *, timeout: float | None = None) -> list[bool]:
        assert timeout is not None
        found = self.inner.contains(keys, timeout=timeout)
        self.clock.now += timeout
        return found

    def load(
        self, keys: Sequence[bytes], out: Sequence[Any], *, timeout: float | None = None, keeper: Keeper | None = None
    ) -> list[Outcome]:
        assert timeout is not None
        found = super().load(keys, out, timeout=timeout, keeper=keeper)
        self.clock.now += timeout
        return found

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        raise AssertionError("contains is its own")

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        return self.inner._load(keys, out, deadline)

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        return self.inner._store(keys, data, deadline)

    def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
        return self.inner._remove(keys, deadline)
