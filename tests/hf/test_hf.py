"""A drop-in cache for transformers: the same tokens, and what was computed before is not computed again."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from models import random_prompt, tiny_model  # noqa: E402
from vision_models import own_answer, vision_model  # noqa: E402
from vision_models import prompt as pictured  # noqa: E402

from kvpool import ReuseScope  # noqa: E402
from kvpool.errors import InvalidArgumentError, KVPoolError, OutOfBlocksError, SequenceStateError, UnsupportedModelError  # noqa: E402
from kvpool.hf import CachePool, PagedCache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(model: Any, prompt: Any, cache: Any = None, **options: Any) -> list[list[int]]:
    ids = (prompt if prompt.ndim == 2 else prompt.unsqueeze(0)).to(model.device)
    defaults = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": -1, "pad_token_id": 0}
    mask = options.pop("attention_mask", torch.ones_like(ids)).to(model.device)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **{**defaults, **options})
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.quick("cpu-llama", "cpu-gemma2", "cpu-deepseek_v3")
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "llama4_text", "deepseek_v3"]
)
def test_given_a_cached_prefix_then_generate_gives_the_same_tokens_and_computes_the_rest(
    family: str, device: str
) -> None:
    model, reference = (tiny_model(family).to(device) for _ in range(2))
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_given_a_gpu_that_is_not_the_current_one_then_the_tokens_are_the_same() -> None:
    model, reference = (tiny_model("llama").to("cuda:1") for _ in range(2))
    pool = CachePool(model, num_blocks=64, block_size=4)
    for _ in range(2):
        with PagedCache(pool) as cache:
            assert run(model, random_prompt(40), cache) == run(reference, random_prompt(40))


def test_given_a_batch_then_its_rows_reuse_what_all_of_them_can(device: str) -> None:
    model, reference = (tiny_model("llama").to(device) for _ in range(2))
    pool = CachePool(model, num_blocks=64, block_size=4)
    shared = random_prompt(20)
    first = torch.stack([torch.cat([shared, random_prompt(6, seed=s)]) for s in (1, 2)])
    assert run(model, first, PagedCache(pool)) == run(reference, first)
    second = torch.stack([first[0], torch.cat([shared, random_prompt(6, seed=3)])])
    cache = PagedCache(pool)
    assert run(model, second, cache) == run(reference, second)
    assert 20 <= cache.num_cached_tokens < 26


def test_given_left_padding_then_the_output_is_right_and_padded_rows_are_not_cached(device: str) -> None:
    model, reference = (tiny_model("llama").to(device) for _ in range(2))
    pool = CachePool(model, num_blocks=64, block_size=4)
    rows = torch.stack([random_prompt(12), torch.cat([torch.zeros(5, dtype=torch.long), random_prompt(7, seed=4)])])
    mask = torch.ones_like(rows)
    mask[1, :5] = 0
    for _ in range(2):
        cache = PagedCache(pool)
        assert run(model, rows, cache, attention_mask=mask) == run(reference, rows, attention_mask=mask)
        assert cache.num_cached_tokens == 0
        cache.close()


def test_given_beam_search_then_beams_fork_instead_of_copying(device: str) -> None:
    model, reference = (tiny_model("llama", spread=3.0).to(device) for _ in range(2))
    pool = CachePool(model, num_blocks=64, block_size=4)
    prompt = random_prompt(21)
    for _ in range(2):
        with PagedCache(pool) as cache:
            assert run(model, prompt, cache, num_beams=3) == run(reference, prompt, num_beams=3)
    assert pool.stats().forks > 0
    pool.manager.check()


def test_given_several_pools_on_one_model_then_each_serves_its_own_caches() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    first, second = (CachePool(model, num_blocks=32, block_size=4) for _ in range(2))
    prompt = random_prompt(21)
    for pool in (first, second, second):
        with PagedCache(pool) as cache:
            assert run(model, prompt, cache) == run(reference, prompt)
    assert cache.num_cached_tokens == 20
    assert (first.stats().hit_tokens["GPU"], second.stats().hit_tokens["GPU"]) == (0, 20)
    first.manager.check()


@pytest.mark.quick("True")
@pytest.mark.parametrize("own_guesses", [True, False])
def test_given_assisted_decoding_then_rejected_tokens_are_rewound_also_from_a_cached_prompt(own_guesses: bool) -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=128, block_size=4)
    prompt = random_prompt(12).repeat(3)
    guesses = {"prompt_lookup_num_tokens": 4} if own_guesses else {"assistant_model": tiny_model("llama", seed=3)}
    want = run(reference, prompt, max_new_tokens=20)
    for num_cached in (0, 31):
        with PagedCache(pool) as cache:
            assert run(model, prompt, cache, max_new_tokens=20, **guesses) == want
            assert cache.num_cached_tokens >= num_cached
    pool.manager.check()


@pytest.mark.quick("1")
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_given_a_prompt_in_chunks_then_the_tokens_are_the_same(chunk: int) -> None:
    model, reference = tiny_model("gemma3_text"), tiny_model("gemma3_text")
    pool = CachePool(model, num_blocks=64, block_size=4)
    prompt = random_prompt(40)
    for _ in range(2):
        with PagedCache(pool) as cache:
            assert run(model, prompt, cache, prefill_chunk_size=chunk) == run(reference, prompt)


def test_given_logits_to_keep_then_as_many_tokens_are_computed_though_they_are_cached() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    ids = random_prompt(20).unsqueeze(0)
    want = reference(ids).logits
    for keep, num_cached in ((0, 0), (0, 19), (5, 15), (torch.tensor([3, 19]), 0)):
        with PagedCache(pool) as cache:
            got = model(ids, past_key_values=cache, logits_to_keep=keep).logits
            assert cache.num_cached_tokens == num_cached
        rows = keep if isinstance(keep, torch.Tensor) else slice(-got.shape[1], None)
        assert torch.allclose(got, want[:, rows], atol=1e-4)
        assert got.shape[1] == (2 if isinstance(keep, torch.Tensor) else 20 - num_cached)


def test_given_labels_then_the_loss_is_that_of_all_tokens_though_they_are_cached() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    ids = random_prompt(20).unsqueeze(0)
    want = reference(ids, labels=ids).loss
    for _ in range(2):
        with PagedCache(pool) as cache:
            assert torch.allclose(model(ids, labels=ids, past_key_values=cache).loss, want, atol=1e-5)


def test_given_positions_or_masks_of_the_callers_own_then_nobody_else_gets_what_was_computed_with_them() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=128, block_size=4)
    causal = torch.ones(20, 20).tril().bool()
    causal[5:, 2] = False  # token 2 is seen by the next ones only
    usual = {"position_ids": torch.arange(20)[None]}
    for seed, unusual in enumerate(
        ({"position_ids": torch.arange(7, 27)[None]}, {"attention_mask": causal[None, None]})
    ):
        ids = random_prompt(20, seed=seed).unsqueeze(0)
        for options, num_cached in ((unusual, 0), (usual, 0), (unusual, 0), (usual, 19)):
            with PagedCache(pool) as cache:
                got = model(ids, past_key_values=cache, **options).logits[:, -1]
                assert torch.allclose(got, reference(ids, **options).logits[:, -1], atol=1e-4)
                assert cache.num_cached_tokens == num_cached


def test_given_a_model_with_an_indexer_then_a_pool_names_what_it_lacks_and_what_serves_it() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokens that an indexer chooses.* kvpool\.Engine serves it"):
        CachePool(tiny_model("deepseek_v32"), num_blocks=64)


@pytest.mark.quick("llava")
@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_given_images_then_prompts_with_equal_ids_share_nothing_and_texts_do(family: str) -> None:
    model = vision_model(family)
    images = [pictured(family, [1, 2, 3], seed, [7, 8, 9, 10]) for seed in (5, 6, 5)]
    text = pictured(family, list(range(1, 12)))
    with CachePool(model, num_blocks=64, block_size=4) as pool:
        for given, num_cached in [*((each, 0) for each in images), (text, 0), (text, 10)]:
            with PagedCache(pool) as cache:
                tokens = model.generate(**given, max_new_tokens=6, do_sample=False, past_key_values=cache)
                assert tokens[0, given["input_ids"].shape[1] :].tolist() == own_answer(model, given, 6)
                assert cache.num_cached_tokens == num_cached
        pool.manager.check()


def test_given_weights_that_changed_then_nothing_of_the_old_ones_is_reused() -> None:
    model, prompt = tiny_model("llama"), random_prompt(30)
    with CachePool(model, num_blocks=64, block_size=4) as pool:
        for factor, num_cached in ((1.0, 0), (1.3, 0), (None, 29)):
            if factor is not None:
                for weight in model.parameters():
                    weight.data.mul_(factor)
            with PagedCache(pool) as cache:
                assert run(model, prompt, cache) == run(model, prompt)
                assert cache.num_cached_tokens == num_cached
        model.lm_head = torch.nn.Linear(64, 160, bias=False)
        with PagedCache(pool) as cache, pytest.raises(SequenceStateError, match="were replaced or moved"):
            run(model, prompt, cache)


@pytest.mark.slow
def test_given_other_active_adapters_then_nothing_of_the_ones_before_is_reused() -> None:
    peft = pytest.importorskip("peft")
    model, prompt = tiny_model("llama"), random_prompt(30)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False))
    with CachePool(model.eval(), num_blocks=64, block_size=4) as pool:
        for is_active, num_cached in ((True, 0), (True, 29), (False, 0), (False, 29), (True, 0)):
            model.enable_adapters() if is_active else model.disable_adapters()
            with PagedCache(pool) as cache:
                assert run(model, prompt, cache) == run(model, prompt)
                assert cache.num_cached_tokens == num_cached


def test_given_adapters_that_are_scaled_otherwise_then_nothing_of_the_old_scale_is_reused() -> None:
    peft = pytest.importorskip("peft")
    model, prompt = tiny_model("llama"), random_prompt(30)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False))
    adapted = [module for module in model.modules() if hasattr(module, "merged_adapters")]
    with CachePool(model.eval(), num_blocks=64, block_size=4) as pool:
        for scale, num_cached in ((1.0, 0), (1.0, 29), (3.0, 0), (3.0, 29)):
            for layer in adapted:
                layer.set_scale("default", scale)
            with PagedCache(pool) as cache:
                assert run(model, prompt, cache) == run(model, prompt)
                assert cache.num_cached_tokens == num_cached


def test_given_hooks_that_steer_a_model_then_nothing_that_was_computed_without_them_is_reused() -> None:
    model, prompt = tiny_model("llama"), random_prompt(30)
    layer = model.model.layers[0]
    with CachePool(model, num_blocks=64, block_size=4) as pool, CachePool(model, num_blocks=8, block_size=4):
        for strength, num_cached in ((0.0, 0), (None, 29), (2.0, 0), (None, 29), (0.0, 0)):
            if strength is not None:
                layer._forward_hooks.clear()
            if strength:
                layer.register_forward_hook(lambda module, given, output: output * 2.0)
            with PagedCache(pool) as cache:
                assert run(model, prompt, cache) == run(model, prompt)
                assert cache.num_cached_tokens == num_cached


def test_given_unusual_positions_in_a_later_pass_then_only_what_was_computed_before_is_found() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    ids = random_prompt(20).unsqueeze(0)
    with PagedCache(pool) as cache:
        model(ids[:, :8], past_key_values=cache)
        model(ids[:, 8:12], past_key_values=cache, position_ids=torch.arange(30, 34)[None])
        model(ids[:, 12:], past_key_values=cache)
    with PagedCache(pool) as cache:
        got = model(ids, past_key_values=cache).logits[:, -1]
        assert cache.num_cached_tokens == 8
    assert torch.allclose(got, reference(ids).logits[:, -1], atol=1e-4)
    pool.manager.check()


@pytest.mark.slow
def test_given_a_compiled_model_then_the_tokens_are_the_same() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    compiled = torch.compile(model, backend="eager")
    ids = random_prompt(20).unsqueeze(0)
    for num_cached in (0, 19):
        with PagedCache(pool) as cache, torch.inference_mode():
            got = compiled(ids, past_key_values=cache).logits[:, -1]
            assert cache.num_cached_tokens == num_cached
        assert torch.allclose(got, reference(ids).logits[:, -1], atol=1e-4)


def test_given_a_pass_that_failed_then_the_cache_goes_on_from_before_it() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    ids = random_prompt(20).unsqueeze(0)
    cache = PagedCache(pool)
    model(ids[:, :12], past_key_values=cache)

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("stopped in the middle")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(ids[:, 12:15], past_key_values=cache)
    hook.remove()
    cache.crop(-2)
    assert cache.length == 10
    got = model(ids[:, 12:], past_key_values=cache).logits  # other tokens than before at these places
    assert torch.allclose(got, reference(torch.cat([ids[:, :10], ids[:, 12:]], dim=1)).logits[:, 10:], atol=1e-4)
    cache.close()
    pool.manager.check()


def test_given_training_mode_then_nothing_that_was_computed_with_dropout_is_reused() -> None:
    model, prompt = tiny_model("gpt2", resid_pdrop=0.9), random_prompt(30)
    with CachePool(model, num_blocks=64, block_size=4) as pool:
        for is_training, num_cached in ((True, 0), (False, 0), (True, 0), (False, 29)):
            model.train(is_training)
            with PagedCache(pool) as cache:
                tokens = run(model, prompt, cache)
                assert cache.num_cached_tokens == num_cached
                assert is_training or tokens == run(model, prompt)


def test_given_gradient_checkpointing_then_a_pass_that_bypassed_the_cache_is_not_kept() -> None:
    model, prompt = tiny_model("llama"), random_prompt(30)
    with CachePool(model, num_blocks=64, block_size=4) as pool:
        model.gradient_checkpointing_enable()
        model.train()
        with PagedCache(pool) as cache, pytest.raises(SequenceStateError, match=r"0 of 2 layers .* call model\.eval"):
            run(model, prompt, cache)
        model.eval()
        with PagedCache(pool) as cache:
            assert run(model, prompt, cache) == run(model, prompt)
            assert cache.num_cached_tokens == 0
        pool.manager.check()


def test_given_one_layer_that_bypassed_the_cache_then_the_pass_is_not_kept() -> None:
    model, prompt = tiny_model("llama"), random_prompt(30)

    def bypass(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "past_key_values": None}

    with CachePool(model, num_blocks=64, block_size=4) as pool, PagedCache(pool) as cache:
        hook = model.model.layers[1].self_attn.register_forward_pre_hook(bypass, with_kwargs=True)
        with pytest.raises(SequenceStateError, match="1 of 2 layers"):
            model(prompt[None], past_key_values=cache)
        hook.remove()
        cache.reset()
        assert run(model, prompt, cache) == run(model, prompt)
        assert cache.num_cached_tokens == 0


def test_given_weights_that_are_trained_then_a_backward_pass_through_the_cache_raises() -> None:
    model, ids = tiny_model("llama").requires_grad_(True), random_prompt(20).unsqueeze(0)
    with CachePool(model, num_blocks=64, block_size=4) as pool, PagedCache(pool) as cache:
        loss = model(ids, labels=ids, past_key_values=cache).loss
        assert torch.allclose(loss, model(ids, labels=ids).loss, atol=1e-5)
        with pytest.raises(SequenceStateError, match="no gradients pass"):
            loss.backward()


def test_given_one_cache_for_a_batch_of_another_size_then_it_must_be_reset_before() -> None:
    model, reference = tiny_model("llama"), tiny_model("llama")
    pool = CachePool(model, num_blocks=64, block_size=4)
    prompt, cache = random_prompt(13), PagedCache(pool)
    run(model, prompt, cache)
    batch = torch.stack([prompt, random_prompt(13, seed=2)])
    with pytest.raises(InvalidArgumentError, match="1 sequences, the batch has 2"):
        run(model, batch, cache)
    cache.reset()
    assert run(model, batch, cache) == run(reference, batch)


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


def test_given_a_cache_that_is_collected_inside_an_operation_of_the_manager_then_its_blocks_come_back_after_it() -> (
    None
):
    model = tiny_model("llama")
    pool = CachePool(model, num_blocks=16, block_size=4)
    cache: Any = PagedCache(pool)
    cache.itself = cache  # only the collector finds it
    run(model, random_prompt(30), cache)
    del cache
    with pool.manager._guard:
        gc.collect()
        assert pool.manager.stats().num_sequences == 1
    run(model, random_prompt(30, seed=2), PagedCache(pool))  # there is room for one only
    gc.collect()
    assert pool.stats().num_sequences == 0
    pool.manager.check()


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


def test_given_a_text_longer_than_the_models_positions_then_it_is_refused() -> None:
    model = tiny_model("llama", max_position_embeddings=32)
    pool = CachePool(model, num_blocks=32, block_size=4)
    assert len(run(model, random_prompt(25), PagedCache(pool), max_new_tokens=8)[0]) == 8
    with pytest.raises(KVPoolError, match="max_seq_len"):
        run(model, random_prompt(25), PagedCache(pool), max_new_tokens=9)


def test_given_rotary_embeddings_that_grow_with_the_text_then_the_model_keeps_them_beside_a_pool() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model, reference = (tiny_model("llama", max_position_embeddings=32, rope_parameters=rope) for _ in range(2))
    pool = CachePool(model, num_blocks=64, block_size=4)
    long, short = random_prompt(60).unsqueeze(0), random_prompt(20)
    for num_cached in (0, 16):
        assert torch.allclose(model(long).logits, reference(long).logits, atol=1e-5)
        with PagedCache(pool) as cache:
            assert run(model, short, cache) == run(reference, short)
            assert cache.num_cached_tokens >= num_cached


def test_given_wrong_use_then_the_error_says_what_is_right() -> None:
    model = tiny_model("llama")
    with pytest.raises(InvalidArgumentError, match="num_blocks or num_bytes"):
        CachePool(model)
    pool = CachePool(model, num_bytes=2**20)
    cache = PagedCache(pool)
    with pytest.raises(InvalidArgumentError, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 64), past_key_values=cache)
    with pytest.raises(SequenceStateError, match="past_key_values="):
        model(random_prompt(5)[None], None, None, cache)  # not by its name
    with pytest.raises(InvalidArgumentError, match=r"\[row, token\], got shape \(5,\)"):
        model(random_prompt(5), past_key_values=cache)
    with pytest.raises(InvalidArgumentError, match="use_cache=False"):
        run(model, random_prompt(5), cache, use_cache=False)
    run(model, random_prompt(9), cache)
    with pytest.raises(InvalidArgumentError, match=r"has 18 of each row already.*reset\(\)"):
        run(model, random_prompt(5), cache)
    cache.close()
    with pytest.raises(SequenceStateError, match="closed"):
        run(model, random_prompt(5), cache)
    pool.close()
    with pytest.raises(SequenceStateError, match="this CachePool is closed"):
        run(model, random_prompt(5), PagedCache(pool))


def test_what_is_no_pool_model_or_scope_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="lives in a CachePool, got 3"):
        PagedCache(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="is no model of transformers"):
        CachePool(3, num_blocks=8)
    with pytest.raises(InvalidArgumentError, match="scope must be a ReuseScope, got 'tenant'"):
        PagedCache(CachePool(tiny_model("llama"), num_blocks=8), "tenant")  # type: ignore[arg-type]
