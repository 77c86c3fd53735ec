"""Layers that keep a state in a CachePool: the same tokens as `generate`, and a prefix comes back with its state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from hybrids import VOCABULARY, hybrid_model  # noqa: E402
from models import random_prompt  # noqa: E402

from kvpool.errors import SequenceStateError, UnsupportedModelError  # noqa: E402
from kvpool.hf import CachePool, PagedCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")


def run(model: Any, ids: Any, cache: Any = None, **options: Any) -> list[list[int]]:
    given = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": -1, "pad_token_id": 0, **options}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **given)
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.quick("lfm2")
@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "qwen3_next", "bamba"])
def test_given_a_cached_prefix_then_generate_goes_on_from_its_state(family: str) -> None:
    model = hybrid_model(family)
    prompt = random_prompt(50, seed=1, vocab_size=VOCABULARY).unsqueeze(0)
    longer = torch.cat([prompt, random_prompt(9, seed=2, vocab_size=VOCABULARY).unsqueeze(0)], 1)
    expected = [run(model, ids) for ids in (prompt, longer)]
    with CachePool(model, num_blocks=64, block_size=16) as pool:
        for number, cached in enumerate((0, 48, 48)):
            with PagedCache(pool) as cache:
                assert run(model, prompt, cache) == expected[0], number
                assert cache.num_cached_tokens == cached
        with PagedCache(pool) as cache:
            assert run(model, longer, cache) == expected[1]
            assert cache.num_cached_tokens == 48
        pool.manager.check()


def test_given_rows_with_states_at_different_places_then_all_answers_are_right() -> None:
    model = hybrid_model("lfm2")
    rows = torch.stack([random_prompt(50, seed=seed, vocab_size=VOCABULARY) for seed in (1, 2)])
    expected = run(model, rows)
    with CachePool(model, num_blocks=64, block_size=16) as pool:
        with PagedCache(pool) as cache:
            run(model, rows[:1], cache)
        for cached in (0, 48):
            with PagedCache(pool) as cache:
                assert run(model, rows, cache) == expected
                assert cache.num_cached_tokens == cached
        pool.manager.check()


def test_given_beams_then_states_follow_their_rows() -> None:
    model = hybrid_model("lfm2")
    prompt = random_prompt(40, seed=3, vocab_size=VOCABULARY).unsqueeze(0)
    expected = run(model, prompt, num_beams=3)
    with CachePool(model, num_blocks=64, block_size=16) as pool:
        for _ in range(2):
            with PagedCache(pool) as cache:
                assert run(model, prompt, cache, num_beams=3) == expected
        pool.manager.check()


def test_given_a_cache_that_is_cut_then_it_says_that_the_state_is_gone() -> None:
    model = hybrid_model("lfm2")
    with CachePool(model, num_blocks=64, block_size=16) as pool, PagedCache(pool) as cache:
        prompt = random_prompt(40, seed=3, vocab_size=VOCABULARY).unsqueeze(0)
        expected = run(model, prompt, cache)
        with pytest.raises(SequenceStateError, match="keep a state"):
            cache.crop(-5)
        cache.reset()
        assert run(model, prompt, cache) == expected


def test_given_a_directory_then_another_pool_finds_prefix_and_state_there(tmp_path: Path) -> None:
    model = hybrid_model("lfm2")
    prompt = random_prompt(50, seed=1, vocab_size=VOCABULARY).unsqueeze(0)
    expected = run(model, prompt)
    for cached in (0, 48):
        with CachePool(model, num_blocks=64, block_size=16, disk=tmp_path) as pool, PagedCache(pool) as cache:
            assert run(model, prompt, cache) == expected
            assert cache.num_cached_tokens == cached


def test_given_modules_that_begin_at_zero_behind_a_state_then_the_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="JambaMambaMixer of transformers begins at zero"):
        CachePool(hybrid_model("jamba"), num_blocks=64, block_size=16)


def test_given_a_model_that_names_its_cache_otherwise_then_it_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Mamba2ForCausalLM .* past_key_values; kvpool\.Engine serves it"):
        CachePool(hybrid_model("mamba2"), num_blocks=64)
