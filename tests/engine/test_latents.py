"""Models with multi-head latent attention: the cache keeps latents, and the tokens are those of transformers' `generate`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from adapter_files import write_adapter  # noqa: E402
from models import random_prompt  # noqa: E402
from torch import nn  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: E402

from kvpool.config import LayerSpec  # noqa: E402
from kvpool.config.model_config import layers_from_hf  # noqa: E402
from kvpool.engine import Engine, SamplingParams, beam_search  # noqa: E402
from kvpool.errors import InvalidArgumentError  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402
from kvpool.tiers import DiskTier  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

RANK, ROTARY = 16, 8
SHARED: dict[str, Any] = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
    q_lora_rank=16,
    kv_lora_rank=RANK,
    qk_rope_head_dim=ROTARY,
    qk_nope_head_dim=12,  # so that keys and values of a head differ in size
    v_head_dim=20,
)
MOE: dict[str, Any] = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**MOE, "q_lora_rank": None},
    "deepseek_v3": MOE,
    "axk1": MOE,
    "glm4_moe_lite": MOE,
    "longcat_flash": dict(
        num_layers=1,
        head_dim=ROTARY,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        moe_topk=2,
        zero_expert_num=2,
    ),
    "minicpm3": {},
    "youtu": {},
    "kimi_linear": dict(
        layer_types=["linear_attention", "full_attention"], linear_num_heads=2, linear_head_dim=16, **MOE
    ),
}
STEPS = SchedulerConfig(max_tokens_per_step=24, max_sequences=8)
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)


def model_of(family: str) -> Any:
    """A tiny random model, whose weights are large enough that what attention sees decides."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SHARED, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" not in name:
                weight.mul_(6.0)
    return model.eval().requires_grad_(False)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return list(map(int, random_prompt(length, seed=seed)))


def generated(model: Any, prompt: list[int], num_new: int = 8, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options = dict(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=num_new) | options
    return list(map(int, model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]))


@cache
def wanted(family: str, length: int, seed: int, num_new: int = 8) -> list[int]:
    return generated(model_of(family), prompt_of(length, seed), num_new)


def engine_of(model: Any, **options: Any) -> Engine:
    settings: dict[str, Any] = {"block_size": 4, "scheduler": STEPS, "model_defaults": False, **options}
    if "kv_blocks" not in settings:
        settings["kv_bytes"] = 2**22
    return Engine(model, **settings)


@pytest.mark.quick("deepseek_v3", "kimi_linear", "longcat_flash")
@pytest.mark.transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_given_a_family_then_chunks_and_prefixes_of_latents_give_the_tokens_of_generate(family: str) -> None:
    model = model_of(family)
    lengths = (61, 18, 7)
    prompts = [prompt_of(length, length) for length in lengths]
    expected = [wanted(family, length, length) for length in lengths]
    assert len({*map(tuple, expected)}) == len(lengths)
    with engine_of(model) as engine:
        attending = [layer for layer in engine.config.layers if isinstance(layer, LayerSpec)]
        assert {(layer.kv_heads, layer.head_dim, layer.k_only) for layer in attending} == {(1, RANK + ROTARY, True)}
        for cached in (False, True):
            answers = engine.generate(prompts, GREEDY)
            assert [answer.token_ids for answer in answers] == expected
            assert (answers[0].num_cached_tokens >= 56) == cached
        engine.manager.check()


@pytest.mark.quick("deepseek_v2", "kimi_linear")
@pytest.mark.transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_given_a_family_then_the_plan_of_its_configuration_has_the_engines_bytes(family: str) -> None:
    model = model_of(family)
    with engine_of(model) as engine:
        planned = layers_from_hf(model.config.to_dict())
        assert sorted(map(str, planned)) == sorted(map(str, engine.config.layers))


def test_samples_and_beams_share_the_latents_of_their_prompt() -> None:
    model, prompt = model_of("deepseek_v3"), prompt_of(22)
    model.generation_config.eos_token_id = None
    beams = generated(model, prompt, 6, num_beams=3)
    with engine_of(model) as engine:
        several = SamplingParams(max_new_tokens=8, temperature=0.0, n=3, ignore_eos=True)
        (completion,) = engine.generate([prompt], several)
        assert [sample.token_ids for sample in completion.samples] == [wanted("deepseek_v3", 22, 0)] * 3
        assert list(beam_search(engine, prompt, 3, max_new_tokens=6, ignore_eos=True)[0].token_ids) == beams


@pytest.mark.quick("swap")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_given_too_little_memory_then_preempted_requests_end_with_the_tokens_of_generate(mode: str) -> None:
    lengths = (20, 25, 30, 35)
    steps = SchedulerConfig(max_tokens_per_step=64, max_sequences=8, preemption=mode)
    with engine_of(
        model_of("deepseek_v3"), kv_blocks=28, host_bytes=2**20, scheduler=steps, cache={"watermark": 0.0}
    ) as engine:
        answers = engine.generate(
            [prompt_of(n, n) for n in lengths], SamplingParams(max_new_tokens=30, ignore_eos=True)
        )
        assert [answer.token_ids for answer in answers] == [wanted("deepseek_v3", n, n, 30) for n in lengths]
        stats = engine.stats().scheduler
        assert (stats.swapped_out > 0) == (mode == "swap")
        assert stats.preemptions > 0


def test_given_a_full_gpu_then_prefixes_are_found_on_the_host() -> None:
    with engine_of(model_of("deepseek_v3"), kv_blocks=20, host_bytes=2**20) as engine:
        for _ in range(2):
            for seed in range(4):
                (answer,) = engine.generate([prompt_of(30, seed)], GREEDY)
                assert answer.token_ids == wanted("deepseek_v3", 30, seed)
        assert answer.num_cached_tokens >= 28


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_given_latents_on_a_disk_then_the_next_engine_goes_on_from_them(family: str, tmp_path: Any) -> None:
    prompt, expected = prompt_of(61, 61), wanted(family, 61, 61)
    for cached in (False, True):
        with DiskTier(tmp_path, 2**24) as tier, engine_of(model_of(family), tiers=[tier]) as engine:
            (answer,) = engine.generate([prompt], GREEDY)
            assert answer.token_ids == expected
            assert (answer.num_cached_tokens > 0) == cached


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "fp8_e5m2"])
def test_given_narrow_latents_then_their_bytes_shrink_and_the_first_token_stays(kv_dtype: str) -> None:
    model = model_of("deepseek_v3")
    scale = 2 if kv_dtype == "int8" else 0
    with engine_of(model, kv_dtype=kv_dtype) as engine:
        assert engine.config.bytes_per_token == 2 * (RANK + ROTARY + scale)
        (answer,) = engine.generate([prompt_of(61, 61)], GREEDY)
        assert answer.token_ids[0] == wanted("deepseek_v3", 61, 61)[0]


def test_given_weights_that_change_in_place_then_the_next_answer_is_that_of_the_new_ones() -> None:
    model, prompt = model_of("deepseek_v3"), prompt_of(30)
    with engine_of(model) as engine:
        (before,) = engine.generate([prompt], GREEDY)
        with torch.no_grad():
            model.model.layers[0].self_attn.kv_b_proj.weight.mul_(-1.5)
        (after,) = engine.generate([prompt], GREEDY)
        assert after.token_ids == generated(model, prompt) != before.token_ids


def test_given_an_adapter_of_folded_weights_then_it_is_refused_by_name(tmp_path: Any) -> None:
    model = model_of("deepseek_v3")
    path = write_adapter(tmp_path, model, ("kv_b_proj", "o_proj"), seed=5)
    with (
        engine_of(model) as engine,
        pytest.raises(
            InvalidArgumentError,
            match=r"layers\.0\.self_attn\.kv_b_proj, whose weights are folded .* leave kv_b_proj out",
        ),
    ):
        engine.load_adapter("a", path)


class Doubled(nn.Linear):
    """A product that gives twice what its weights say."""

    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def test_given_an_expansion_that_does_something_else_then_the_cache_keeps_expanded_heads() -> None:
    model, prompt = model_of("deepseek_v3"), prompt_of(30)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Doubled
    with engine_of(model) as engine:
        assert [(layer.kv_heads, layer.k_only) for layer in engine.config.layers] == [(4, False)] * 2
        assert engine.generate([prompt], GREEDY)[0].token_ids == generated(model, prompt)


def test_given_an_engine_that_was_closed_then_the_model_is_its_owners_as_before() -> None:
    model, prompt = model_of("deepseek_v3"), prompt_of(30)
    with engine_of(model) as engine:
        engine.generate([prompt], GREEDY)
        assert generated(model, prompt) == wanted("deepseek_v3", 30, 0)
    assert not any("expand_kv" in vars(module) for module in model.modules())
