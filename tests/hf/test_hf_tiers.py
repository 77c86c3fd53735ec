"""Tiers behind a pool of transformers: `generate` starts warm after a restart; whatever tiers do, the tokens are right."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from models import random_prompt, tiny_model  # noqa: E402

from kvpool import ReuseScope  # noqa: E402
from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import ConfigError  # noqa: E402
from kvpool.hf import CachePool, PagedCache  # noqa: E402
from kvpool.tiers import KeyedTier, MemoryTier, Outcome  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

SECONDS = 60.0  # until a test that hangs is a failure
PROMPT = random_prompt(41)


def run(model: Any, prompt: Any, cache: Any = None, **options: Any) -> list[list[int]]:
    ids = prompt if prompt.ndim == 2 else prompt.unsqueeze(0)
    defaults = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": 0}
    mask = options.pop("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **{**defaults, **options})
    return out[:, ids.shape[1] :].tolist()


def made(model: Any, *tiers: KeyedTier, **options: Any) -> CachePool:
    settings: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "tier_timeout": SECONDS, **options}
    return CachePool(model, tiers=list(tiers) or None, **settings)


def filled(model: Any, prompt: Any = PROMPT, **options: Any) -> MemoryTier:
    """A tier that holds what `generate` computed for a prompt."""
    tier = MemoryTier(2**26)
    with made(model, tier) as pool:
        run(model, prompt, PagedCache(pool), **options)
    return tier


def answer(pool: CachePool, model: Any, prompt: Any = PROMPT, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of a call, and how many of its prompt were not computed; nothing is leaked by it."""
    with PagedCache(pool) as cache:
        tokens, num_cached = run(model, prompt, cache, **options), cache.num_cached_tokens
    assert pool.tiers is not None
    assert pool.tiers.transport.storer.flush(SECONDS)
    stats = pool.tier_stats()
    assert stats is not None
    assert (stats.blocks_waiting, stats.staging_bytes) == (0, 0)
    assert pool.stats().num_sequences == 0
    pool.manager.check()
    return tokens, num_cached


class Broken(MemoryTier):
    """A tier that does something else than it should when values are loaded."""

    def __init__(self, inner: MemoryTier, how: str) -> None:
        super().__init__(2**26)
        self.inner, self.how = inner, how
        self.goes_on = threading.Event()

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return self.inner._contains(keys, deadline)

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        if self.how == "raises":
            raise OSError("gone")
        if self.how == "hangs":
            self.goes_on.wait(SECONDS)
        found = self.inner._load(keys, out, deadline)
        return [Outcome.FAILED, *found[1:]] if self.how == "loses the first" else found


# --- warm ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_a_disk_then_a_pool_of_tomorrow_starts_warm_and_gives_the_same_tokens(
    family: str, tmp_path: Path
) -> None:
    model, want = tiny_model(family), run(tiny_model(family), PROMPT)
    for num_cached in (0, 40):
        with made(model, disk=tmp_path / "blocks", disk_bytes=2**26) as pool:
            assert answer(pool, model) == (want, num_cached)
            assert pool.stats().hit_tokens == {"GPU": 0, "HOST": 0, "DISK": num_cached, "REMOTE": 0}


def test_given_an_engine_that_stored_a_prefix_then_a_pool_of_the_same_model_finds_it() -> None:
    tier, model = MemoryTier(2**26), tiny_model("llama")
    with Engine(tiny_model("llama"), kv_blocks=64, block_size=4, tiers=[tier]) as engine:
        engine.generate([PROMPT.tolist()], SamplingParams(max_new_tokens=2, ignore_eos=True))
    with made(model, tier) as pool:
        assert answer(pool, model) == (run(tiny_model("llama"), PROMPT), 40)


def test_given_a_batch_then_its_rows_come_as_far_as_all_of_them_can() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    rows = torch.stack([torch.cat([PROMPT[:20], random_prompt(9, seed=seed)]) for seed in (1, 2)])
    tier = filled(model, rows)
    other = torch.stack([torch.cat([PROMPT[:20], random_prompt(9, seed=3)]), rows[1]])
    for batch, num_cached in ((rows, 28), (other, 20), (torch.stack([random_prompt(29, seed=4), rows[1]]), 0)):
        with made(model, tier) as pool:
            assert answer(pool, model, batch) == (run(reference, batch), num_cached)
            stats = pool.tier_stats()
            assert stats is not None
            assert stats.fetches.lookups == (2 if num_cached else 1)


def test_given_more_than_staging_memory_holds_then_it_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    tier = filled(model)
    monkeypatch.setattr("kvpool.tiers.transport.tier_transport.STAGING_BYTES", 4 * 4 * 4096)
    with made(model, tier) as pool:
        assert answer(pool, model) == (run(tiny_model("llama"), PROMPT), 40)
        stats = pool.tier_stats()
        assert stats is not None
        assert stats.imports > 1


@pytest.mark.quick("options0")
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 12}])
def test_given_beams_guesses_or_chunks_then_what_was_stored_is_right(options: dict[str, Any]) -> None:
    model, reference = tiny_model("llama", spread=3.0), tiny_model("llama", spread=3.0)
    prompt = random_prompt(12).repeat(3)
    tier = filled(model, prompt, **options, max_new_tokens=20)
    longer = torch.cat([prompt, torch.tensor(run(reference, prompt, **options, max_new_tokens=20)[0][:16])])
    for text, num_cached in ((prompt, 35), (longer, 51)):
        with made(model, tier) as pool:
            assert answer(pool, model, text) == (run(reference, text), num_cached)


# --- never wrong ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick("raises")
@pytest.mark.parametrize("how", ["raises", "loses the first", "hangs"])
def test_given_a_tier_that_fails_then_it_is_a_miss(how: str) -> None:
    model = tiny_model("llama")
    tier = Broken(filled(model), how)
    with made(model, tier, tier_timeout=0.05 if how == "hangs" else SECONDS) as pool:
        with PagedCache(pool) as cache:
            assert run(model, PROMPT, cache) == run(tiny_model("llama"), PROMPT)
            assert cache.num_cached_tokens == 0
        tier.goes_on.set()
        assert answer(pool, model)[1] == 40  # from the pool itself


def test_given_a_device_that_fails_while_blocks_come_then_nothing_of_them_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    with made(model, filled(model)) as pool:
        assert pool.tiers is not None
        bring = pool.tiers.transport.import_prefix

        def lose_the_device() -> None:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(pool.tiers.transport, "import_prefix", lambda *asked: (bring(*asked)[0], [lose_the_device]))
        with PagedCache(pool) as cache, pytest.raises(RuntimeError, match="the device is lost"):
            run(model, PROMPT, cache)
        stats = pool.tier_stats()
        assert stats is not None
        assert (stats.staging_bytes, pool.stats().num_sequences) == (0, 0)
        pool.manager.check()


def test_given_rows_with_padding_or_places_of_their_own_then_nothing_of_them_is_stored() -> None:
    model = tiny_model("llama")
    mask = torch.ones(1, 41, dtype=torch.long)
    mask[0, :5] = 0
    assert filled(model, attention_mask=mask).stats().num_values == 0
    tier = MemoryTier(2**26)
    with made(model, tier) as pool:
        cache = PagedCache(pool)
        model(PROMPT[None, :8], past_key_values=cache)
        model(PROMPT[None, 8:12], past_key_values=cache, position_ids=torch.arange(30, 34)[None])
        model(PROMPT[None, 12:], past_key_values=cache)
    assert tier.stats().num_values == 2


def test_given_another_tenant_or_other_weights_then_nothing_comes() -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=7)
    tier = filled(model)
    with made(model, tier) as pool, PagedCache(pool, ReuseScope(tenant="a")) as cache:
        run(model, PROMPT, cache)
        assert cache.num_cached_tokens == 0
    with made(other, tier) as pool:
        assert answer(pool, other) == (run(other, PROMPT), 0)


def test_given_content_that_was_invalidated_then_it_does_not_come_back_and_leaves_the_tier() -> None:
    model = tiny_model("llama")
    tier = MemoryTier(2**26)
    with made(model, tier) as pool:
        answer(pool, model)
        assert pool.invalidate(PROMPT[:8]) == 10
        assert pool.tiers is not None
        assert pool.tiers.transport.storer.flush(SECONDS)
        assert tier.stats().num_values == 1
        assert answer(pool, model)[1] == 4
        assert pool.reset_prefix_cache() > 0
        assert answer(pool, model)[1] == 0


def test_wrong_settings_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="disk_bytes=5 needs disk"):
        CachePool(model, num_blocks=8, disk_bytes=5)
    with pytest.raises(ConfigError, match="remote must be the address of a tier"):
        CachePool(model, num_blocks=8, remote=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tiers need enable_prefix_caching"):
        CachePool(model, num_blocks=8, disk=tmp_path, enable_prefix_caching=False)
    assert CachePool(model, num_blocks=8).tier_stats() is None
