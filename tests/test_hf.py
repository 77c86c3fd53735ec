"""A drop-in cache for transformers: the same tokens, and what was computed before is not computed again."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent / "engine"))

from models import random_prompt, tiny_model  # noqa: E402

from kvpool import ReuseScope  # noqa: E402
from kvpool.errors import InvalidArgumentError, OutOfBlocksError, SequenceStateError  # noqa: E402
from kvpool.hf import CachePool, PagedCache  # noqa: E402


def run(model: Any, prompt: Any, cache: Any = None, **options: Any) -> list[list[int]]:
    ids = prompt if prompt.ndim == 2 else prompt.unsqueeze(0)
    defaults = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": -1, "pad_token_id": 0}
    mask = options.pop("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **{**defaults, **options})
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "gpt2"])
def test_given_a_cached_prefix_then_generate_gives_the_same_tokens_and_computes_only_the_rest(family: str) -> None:
    model, reference = tiny_model(family), tiny_model(family)
    pool = CachePool(model, num_blocks=64, block_size=4)
    prompt = random_prompt(40)
    with PagedCache(pool) as cache:
        assert run(model, prompt, cache) == run(reference, prompt)
        assert cache.num_cached_tokens == 0
    longer = torch.cat([prompt, random_prompt(7, seed=5)])
    with PagedCache(pool) as cache:
        assert run(model, longer, cache) == run(reference, longer)
        assert cache.num_cached_tokens >= 40
    pool.manager.check()
    assert pool.stats().hit_tokens["GPU"] >= 40


def test_given_a_batch_then_its_rows_reuse_what_all_of_them_can() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    shared = random_prompt(20)
    first = torch.stack([torch.cat([shared, random_prompt(6, seed=s)]) for s in (1, 2)])
    assert run(model, first, PagedCache(pool)) == run(reference, first)
    second = torch.stack([first[0], torch.cat([shared, random_prompt(6, seed=3)])])
    cache = PagedCache(pool)
    assert run(model, second, cache) == run(reference, second)
    assert 20 <= cache.num_cached_tokens < 26


def test_given_left_padding_then_the_output_is_right_and_padded_rows_are_not_cached() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    rows = torch.stack([random_prompt(12), torch.cat([torch.zeros(5, dtype=torch.long), random_prompt(7, seed=4)])])
    mask = torch.ones_like(rows)
    mask[1, :5] = 0
    for _ in range(2):
        cache = PagedCache(pool)
        assert run(model, rows, cache, attention_mask=mask) == run(reference, rows, attention_mask=mask)
        assert cache.num_cached_tokens == 0
        cache.close()


def test_given_beam_search_then_beams_fork_instead_of_copying() -> None:
    model, reference = tiny_model("llama", spread=3.0), tiny_model("llama", spread=3.0)
    pool = CachePool(model, num_blocks=64, block_size=4)
    prompt = random_prompt(21)
    for _ in range(2):
        with PagedCache(pool) as cache:
            assert run(model, prompt, cache, num_beams=3) == run(reference, prompt, num_beams=3)
    assert pool.stats().forks > 0
    pool.manager.check()


def test_given_a_conversation_then_one_cache_goes_on() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    cache, turn = PagedCache(pool), random_prompt(9)
    for seed in range(3):
        answer = run(model, turn, cache)
        assert answer == run(reference, turn)
        turn = torch.cat([turn, torch.tensor(answer[0]), random_prompt(3, seed=seed)])


def test_given_a_cache_that_is_let_go_then_its_blocks_come_back() -> None:
    model = tiny_model("llama")
    pool = CachePool(model, num_blocks=16, block_size=4)
    run(model, random_prompt(30), PagedCache(pool))
    gc.collect()
    assert pool.stats().num_sequences == 0


def test_given_another_tenant_then_nothing_is_reused() -> None:
    model = tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    run(model, random_prompt(30), PagedCache(pool, ReuseScope(tenant="a")))
    cache = PagedCache(pool, ReuseScope(tenant="b"))
    run(model, random_prompt(30), cache)
    assert cache.num_cached_tokens == 0


def test_given_too_small_a_pool_then_the_error_comes_from_kvpool_and_nothing_is_lost() -> None:
    model = tiny_model("llama")
    pool = CachePool(model, num_blocks=4, block_size=4)
    with pytest.raises(OutOfBlocksError):
        run(model, random_prompt(30), PagedCache(pool))
    gc.collect()
    assert pool.stats().num_sequences == 0


def test_given_wrong_use_then_the_error_says_what_is_right() -> None:
    model = tiny_model("llama")
    with pytest.raises(InvalidArgumentError, match="num_blocks or num_bytes"):
        CachePool(model)
    pool = CachePool(model, num_bytes=2**20)
    cache = PagedCache(pool)
    with pytest.raises(InvalidArgumentError, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 64), past_key_values=cache)
    cache.close()
    with pytest.raises(SequenceStateError, match="closed"):
        run(model, random_prompt(5), cache)
    pool.close()
    with pytest.raises(SequenceStateError, match="CachePool"):
        run(model, random_prompt(5), PagedCache(pool))
