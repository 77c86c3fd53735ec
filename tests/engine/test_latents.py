"""Models with multi-head latent attention: the cache keeps latents, and the tokens are those of transformers' `generate`.

So it is where an indexer chooses the tokens that attention sees, whose keys are in the cache, too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from adapter_files import merged, write_adapter  # noqa: E402
from fake_graphs import FakeRecorder, graph_runner, use_runner  # noqa: E402
from models import random_prompt  # noqa: E402
from torch import nn  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: E402

from kvpool.config import LayerSpec  # noqa: E402
from kvpool.config.layers import index_part  # noqa: E402
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
INDEX_DIM, CHOSEN = 16, 8
# With few heads many scores are zero, because no product is positive, and which of equal scores wins is nobody's choice
INDEXER: dict[str, Any] = dict(index_head_dim=INDEX_DIM, index_n_heads=16, index_topk=CHOSEN, **MOE)
SHARING: dict[str, Any] = dict(num_hidden_layers=3, indexer_types=["full", "shared", "full"], **INDEXER)
INDEXED: dict[str, dict[str, Any]] = {
    "deepseek_v32": INDEXER,
    "axk2": INDEXER,
    "glm_moe_dsa": SHARING,
    "hy_v4": SHARING,
    # of later versions of transformers
    "dots3_note_text": dict(
        num_hidden_layers=3, layer_types=["sliding_attention", *["indexed_attention"] * 2], sliding_window=16, **INDEXER
    ),
}
FAMILIES |= {family: settings for family, settings in INDEXED.items() if family in CONFIG_MAPPING}
EACH = pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])  # without an indexer, and with one
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


@pytest.mark.quick("deepseek_v3", "kimi_linear", "longcat_flash", "deepseek_v32", "glm_moe_dsa")
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
        assert {(layer.kv_heads, layer.k_only) for layer in attending} == {(1, True)}
        assert RANK + ROTARY in {layer.head_dim for layer in attending}
        indexed = [layer.extra_parts == (index_part(INDEX_DIM, "float32"),) for layer in attending]
        shared = [mode == "shared" for mode in FAMILIES[family].get("indexer_types", ())]
        assert any(indexed) == (family in INDEXED)
        assert [not own for own in indexed] == shared or not shared
        for cached in (False, True):
            answers = engine.generate(prompts, GREEDY)
            assert [answer.token_ids for answer in answers] == expected
            assert (answers[0].num_cached_tokens >= 56) == cached
        engine.manager.check()


@pytest.mark.quick("deepseek_v2", "kimi_linear", "glm_moe_dsa")
@pytest.mark.transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_given_a_family_then_the_plan_of_its_configuration_has_the_engines_bytes(family: str) -> None:
    model = model_of(family)
    if family == "dots3_note_text":
        pytest.skip("its layers have latents of several sizes, which plans refuse")
    with engine_of(model) as engine:
        planned = layers_from_hf(model.config.to_dict())
        assert sorted(map(str, planned)) == sorted(map(str, engine.config.layers))


@EACH
def test_samples_and_beams_share_the_latents_of_their_prompt(family: str) -> None:
    model, prompt = model_of(family), prompt_of(22)
    model.generation_config.eos_token_id = None
    beams = generated(model, prompt, 6, num_beams=3)
    with engine_of(model) as engine:
        several = SamplingParams(max_new_tokens=8, temperature=0.0, n=3, ignore_eos=True)
        (completion,) = engine.generate([prompt], several)
        assert [sample.token_ids for sample in completion.samples] == [wanted(family, 22, 0)] * 3
        assert list(beam_search(engine, prompt, 3, max_new_tokens=6, ignore_eos=True)[0].token_ids) == beams


@pytest.mark.quick("deepseek_v3-swap", "glm_moe_dsa-swap")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@EACH
def test_given_too_little_memory_then_preempted_requests_end_with_the_tokens_of_generate(
    family: str, mode: str
) -> None:
    lengths = (20, 25, 30, 35)
    steps = SchedulerConfig(max_tokens_per_step=64, max_sequences=8, preemption=mode)
    with engine_of(
        model_of(family), kv_blocks=28, host_bytes=2**20, scheduler=steps, cache={"watermark": 0.0}
    ) as engine:
        answers = engine.generate(
            [prompt_of(n, n) for n in lengths], SamplingParams(max_new_tokens=30, ignore_eos=True)
        )
        assert [answer.token_ids for answer in answers] == [wanted(family, n, n, 30) for n in lengths]
        stats = engine.stats().scheduler
        assert (stats.swapped_out > 0) == (mode == "swap")
        assert stats.preemptions > 0


@EACH
def test_given_a_full_gpu_then_prefixes_are_found_on_the_host(family: str) -> None:
    with engine_of(model_of(family), kv_blocks=20, host_bytes=2**20) as engine:
        for _ in range(2):
            for seed in range(4):
                (answer,) = engine.generate([prompt_of(30, seed)], GREEDY)
                assert answer.token_ids == wanted(family, 30, seed)
        assert answer.num_cached_tokens >= 28


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear", "glm_moe_dsa"])
def test_given_latents_on_a_disk_then_the_next_engine_goes_on_from_them(family: str, tmp_path: Any) -> None:
    prompt, expected = prompt_of(61, 61), wanted(family, 61, 61)
    for cached in (False, True):
        with DiskTier(tmp_path, 2**24) as tier, engine_of(model_of(family), tiers=[tier]) as engine:
            (answer,) = engine.generate([prompt], GREEDY)
            assert answer.token_ids == expected
            assert (answer.num_cached_tokens > 0) == cached


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_given_narrow_latents_then_their_bytes_shrink_and_the_first_token_stays(family: str, kv_dtype: str) -> None:
    model = model_of(family)
    scale = 2 if kv_dtype == "int8" else 0
    index = 4 * INDEX_DIM if family in INDEXED else 0  # an indexer's keys stay as the model computes them
    with engine_of(model, kv_dtype=kv_dtype) as engine:
        assert engine.config.bytes_per_token == 2 * (RANK + ROTARY + scale + index)
        (answer,) = engine.generate([prompt_of(61, 61)], GREEDY)
        assert answer.token_ids[0] == wanted(family, 61, 61)[0]


def test_given_weights_that_change_in_place_then_the_next_answer_is_that_of_the_new_ones() -> None:
    model, prompt = model_of("deepseek_v3"), prompt_of(30)
    with engine_of(model) as engine:
        (before,) = engine.generate([prompt], GREEDY)
        with torch.no_grad():
            model.model.layers[0].self_attn.kv_b_proj.weight.mul_(-1.5)
        (after,) = engine.generate([prompt], GREEDY)
        assert after.token_ids == generated(model, prompt) != before.token_ids


@EACH
def test_given_an_adapter_of_folded_weights_then_it_is_refused_by_name(family: str, tmp_path: Any) -> None:
    model = model_of(family)
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


@EACH
def test_given_an_engine_that_was_closed_then_the_model_is_its_owners_as_before(family: str) -> None:
    model, prompt = model_of(family), prompt_of(30)
    with engine_of(model) as engine:
        engine.generate([prompt], GREEDY)
        assert generated(model, prompt) == wanted(family, 30, 0)
    assert not any("expand_kv" in vars(module) for module in model.modules())


# --- tokens that an indexer chooses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_given_an_indexer_then_what_it_leaves_out_decides_the_answer(family: str) -> None:
    """Otherwise the tests above would say nothing of what is chosen."""
    model = model_of(family)
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 512
    assert generated(model, prompt_of(61, 61)) != wanted(family, 61, 61)


@EACH
def test_given_steps_from_graphs_then_the_tokens_are_those_of_generate(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, recorder = (40, 3, 21), FakeRecorder()
    with engine_of(model_of(family)) as engine:
        runner = graph_runner(engine, max_sequences=8, max_tokens=24, recorder=recorder)
        runner.warm_up()
        while runner.captures_more:
            runner.capture_next()
        use_runner(engine, runner)
        monkeypatch.setattr(runner, "_run", None)  # nothing runs as it is
        for _ in range(2):
            answers = engine.generate([prompt_of(n, n) for n in lengths], GREEDY)
            assert [answer.token_ids for answer in answers] == [wanted(family, n, n) for n in lengths]
        assert recorder.num_replays >= 2 * GREEDY.max_new_tokens


def test_given_an_adapter_of_an_indexers_weights_then_it_chooses_as_with_the_adapter_merged(tmp_path: Any) -> None:
    model, prompt = model_of("deepseek_v32"), prompt_of(30)
    path = write_adapter(tmp_path, model, ("wq_b", "wk", "q_b_proj"), seed=5)
    expected = generated(merged(model, path), prompt)
    assert expected != wanted("deepseek_v32", 30, 0)
    with engine_of(model) as engine:
        engine.load_adapter("a", path)
        (answer,) = engine.generate([prompt], GREEDY, adapter="a")
        assert answer.token_ids == expected
        assert engine.generate([prompt], GREEDY)[0].token_ids == wanted("deepseek_v32", 30, 0)
