"""Content that was invalidated never comes back from a tier in the same process, and leaves the tiers as far as it is known.

Answers are right either way here: what tells that something came back is how many tokens were cached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.scope import ReuseScope  # noqa: E402
from kvpool.tiers import MemoryTier, Outcome  # noqa: E402
from kvpool.tiers.transport.deciding import LoadDecision  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

SECONDS = 60.0
PROMPT = random_prompt(96, seed=1).tolist()
OTHER = random_prompt(96, seed=2).tolist()
PARAMS = SamplingParams(max_new_tokens=1, ignore_eos=True)
TENANT = ReuseScope(tenant="acme")
SALTED = ReuseScope(tenant="acme", salt="chat 7")


@pytest.fixture(autouse=True)
def _loads_all_it_finds(patient_tiers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine also loads what it finds, whatever computing it would take."""
    decide = "kvpool.tiers.transport.deciding.Decider._decide"
    monkeypatch.setattr(decide, lambda self, options, *_: LoadDecision([None, *options][-1], "always"))


def make_engine(tier: MemoryTier, family: str = "llama") -> Engine:
    return Engine(tiny_model(family), block_size=8, kv_blocks=128, tier_timeout=SECONDS, tiers=[tier])


def cached(engine: Engine, prompt: list[int], **options: Any) -> int:
    """How many tokens of a prompt need not be computed, with nothing but tiers to bring them."""
    engine.manager.cache.reset()
    (result,) = engine.generate([prompt], PARAMS, **options)
    assert engine._tiers is not None
    assert engine._tiers.flush(SECONDS)
    engine.manager.check()
    return result.num_cached_tokens


INVALIDATIONS: dict[str, tuple[Callable[[Engine], int], dict[str, Any]]] = {
    "prefix": (lambda engine: engine.invalidate(PROMPT[:8]), {}),
    "scope": (lambda engine: engine.invalidate(scope=TENANT), {"scope": TENANT}),
    "prefix in a scope": (lambda engine: engine.invalidate(PROMPT[:8], scope=TENANT), {"scope": TENANT}),
    "session": (lambda engine: engine.invalidate(session="chat"), {"session": "chat"}),
    "tenant": (lambda engine: engine.invalidate(tenant="acme"), {"scope": SALTED}),
    "everything": (lambda engine: engine.reset_prefix_cache(), {}),
}


@pytest.mark.quick("prefix-llama", "session-llama")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("what", INVALIDATIONS)
def test_given_an_invalidation_then_nothing_of_it_comes_back_from_a_tier_but_what_is_stored_afterwards(
    what: str, family: str
) -> None:
    invalidate, options = INVALIDATIONS[what]
    tier = MemoryTier(2**28)
    with make_engine(tier, family) as engine:
        assert cached(engine, PROMPT, **options) == 0
        assert cached(engine, PROMPT, **options) >= 88
        invalidate(engine)
        assert cached(engine, PROMPT, **options) == 0
        assert cached(engine, PROMPT, **options) >= 88  # computed since: under other keys
        invalidate(engine)
        assert cached(engine, PROMPT, **options) == 0


@pytest.mark.quick("prefix", "session")
@pytest.mark.parametrize("what", INVALIDATIONS)
def test_given_an_invalidation_then_values_that_are_known_leave_the_tier_and_the_next_process_finds_none(
    what: str,
) -> None:
    invalidate, options = INVALIDATIONS[what]
    tier = MemoryTier(2**28)
    with make_engine(tier) as engine:
        cached(engine, PROMPT, **options)
        num_values = tier.stats().num_values
        invalidate(engine)
        assert engine._tiers is not None
        assert engine._tiers.flush(SECONDS)
        stats = engine.stats().tiers
        assert stats is not None
        assert (stats.stores.removed, stats.stores.not_removed) == (num_values, 0)
        assert tier.stats().num_values == 0
    with make_engine(tier) as engine:
        assert cached(engine, PROMPT, **options) == 0


def test_given_an_invalidated_prefix_then_what_comes_before_it_and_others_still_come_from_the_tier() -> None:
    tier = MemoryTier(2**28)
    with make_engine(tier) as engine:
        cached(engine, PROMPT)
        cached(engine, OTHER)
        engine.invalidate(PROMPT[:52])  # its last whole block is the sixth
        assert cached(engine, PROMPT) == 40
        assert cached(engine, OTHER) >= 88


def test_given_an_invalidated_session_then_what_it_took_from_others_stays() -> None:
    tier = MemoryTier(2**28)
    shared = PROMPT[:48]
    with make_engine(tier) as engine:
        engine.generate([shared], PARAMS)
        engine.generate([PROMPT], PARAMS, session="chat")
        engine.invalidate(session="chat")
        assert cached(engine, shared) >= 40
        assert cached(engine, PROMPT) == 48


@pytest.mark.parametrize("other", [None, "another chat"])
def test_given_what_a_session_computed_came_back_for_another_when_it_is_invalidated_then_it_leaves_the_cache(
    other: str | None,
) -> None:
    tier = MemoryTier(2**28)
    with make_engine(tier) as engine:
        cached(engine, PROMPT[:48], session="first")
        cached(engine, PROMPT, session="second")
        assert cached(engine, PROMPT, session=other) >= 88  # from the tier, for a request that computed none of it
        assert engine.invalidate(session="second") >= 6
        assert engine.generate([PROMPT], PARAMS)[0].num_cached_tokens <= 48
        assert engine._tiers is not None
        assert engine._tiers.flush(SECONDS)  # what it computed again is on its way to the tier
        assert cached(engine, PROMPT, session=other) >= 88
        assert engine.invalidate(session="first") >= 11
        assert engine.generate([PROMPT], PARAMS)[0].num_cached_tokens == 0


def test_given_values_of_another_process_behind_a_prefix_then_its_last_block_leaves_the_tier_and_none_is_loaded() -> (
    None
):
    tier = MemoryTier(2**28)
    with make_engine(tier) as engine:
        cached(engine, PROMPT)
    num_values = tier.stats().num_values
    assert num_values is not None
    with make_engine(tier) as engine:
        engine.invalidate(PROMPT[:16])
        assert cached(engine, PROMPT) == 8
        assert tier.stats().num_values == 2 * num_values - 2
    with make_engine(tier) as engine:  # which knows nothing of it
        assert cached(engine, PROMPT) == 8


def test_given_values_of_another_process_in_a_scope_then_all_of_them_leave_the_tier_and_others_stay() -> None:
    tier = MemoryTier(2**28)
    with make_engine(tier) as engine:
        cached(engine, PROMPT)
        others = tier.stats().num_values
        cached(engine, PROMPT, scope=TENANT)
    with make_engine(tier) as engine:
        engine.invalidate(scope=TENANT)
        assert engine._tiers is not None
        assert engine._tiers.flush(SECONDS)
        assert tier.stats().num_values == others
        tiers = engine.stats().tiers
        assert tiers is not None
        assert (tiers.stores.removed, tiers.stores.not_removed) == (others, 0)
        assert cached(engine, PROMPT, scope=TENANT) == 0
        assert cached(engine, PROMPT, scope=TENANT) > 80  # what is stored afterwards stays


def test_given_a_tenant_whose_scopes_only_a_tier_knows_then_all_of_them_are_forgotten_and_others_stay() -> None:
    tier = MemoryTier(2**28)
    with make_engine(tier) as engine:
        cached(engine, PROMPT, scope=ReuseScope(tenant="other"))
        others = tier.stats().num_values
        for scope in (TENANT, SALTED):
            cached(engine, PROMPT, scope=scope)
    with make_engine(tier) as engine:  # which has seen none of them
        engine.invalidate(tenant="acme")
        assert engine._tiers is not None
        assert engine._tiers.flush(SECONDS)
        assert tier.stats().num_values == others
        assert [cached(engine, PROMPT, scope=scope) for scope in (TENANT, SALTED)] == [0, 0]
        assert cached(engine, PROMPT, scope=ReuseScope(tenant="other")) > 80
        assert cached(engine, PROMPT, scope=SALTED) > 80  # what is stored afterwards stays


def test_given_a_tier_that_cannot_remove_then_a_forgotten_tenant_is_not_loaded_from_it_again() -> None:
    class Keeping(MemoryTier):
        def _remove(self, keys: Sequence[bytes], deadline: float) -> list[Outcome]:
            return [Outcome.FAILED] * len(keys)

        def _purge(self, *arguments: Any) -> Any:
            raise OSError("the store is read-only")

    tier = Keeping(2**28)
    with make_engine(tier) as engine:
        cached(engine, PROMPT, scope=SALTED)
    with make_engine(tier) as engine:
        engine.invalidate(tenant="acme")
        assert cached(engine, PROMPT, scope=SALTED) == 0


class Waiting(MemoryTier):
    """Holds loads until the test lets them go."""

    def __init__(self) -> None:
        super().__init__(2**28)
        self.begun, self.opened = threading.Event(), threading.Event()
        self.opened.set()

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        found = super()._load(keys, out, deadline)
        self.begun.set()
        self.opened.wait(SECONDS)
        return found


@pytest.mark.quick("prefix", "session")
@pytest.mark.parametrize("what", INVALIDATIONS)
def test_given_a_load_on_its_way_when_it_is_invalidated_then_it_is_dropped(what: str) -> None:
    invalidate, options = INVALIDATIONS[what]
    tier = Waiting()
    with make_engine(tier) as engine:
        cached(engine, PROMPT, **options)
        engine.manager.cache.reset()
        tier.opened.clear()
        waiting = engine.submit(PROMPT, PARAMS, **options)
        assert tier.begun.wait(SECONDS)
        invalidate(engine)
        tier.opened.set()
        assert waiting.result(SECONDS).num_cached_tokens == 0
        assert engine._tiers is not None
        assert engine._tiers.flush(SECONDS)
        stats = engine.stats().tiers
        assert stats is not None
        assert (stats.held, stats.leases, stats.staging_bytes, stats.imports) == (0, (), 0, 0)
        engine.manager.check()


def test_given_a_wrong_argument_then_nothing_is_forgotten() -> None:
    tier = MemoryTier(2**28)
    with make_engine(tier) as engine:
        cached(engine, PROMPT)
        for wrong in ({}, {"session": 5}, {"scope": "acme"}, {"session": "a", "scope": TENANT}):
            with pytest.raises(InvalidArgumentError):
                engine.invalidate(**wrong)  # type: ignore[arg-type]
        assert cached(engine, PROMPT) >= 88


def test_given_no_tiers_then_an_engine_forgets_what_it_has_cached() -> None:
    with Engine(tiny_model("llama"), block_size=8, kv_blocks=128) as engine:
        engine.generate([PROMPT], PARAMS)
        assert engine.invalidate(PROMPT[:8]) == 12
        engine.generate([PROMPT], PARAMS)
        assert engine.reset_prefix_cache() == 12
