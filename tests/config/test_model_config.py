"""Hugging Face configs of real models, as their files say it, and everything that must be refused."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.config import DType, GroupKind, LayerSpec, Tier
from kvpool.config.layers import TokenPart
from kvpool.config.model_config import _DEFAULTS, config_from_hf, layers_from_hf
from kvpool.errors import ConfigError

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN2_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 2048,
    "max_window_layers": 48,
    "model_type": "qwen3_moe",
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
MISTRAL_7B_V01: dict[str, Any] = {
    "hidden_size": 4096,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
MIXTRAL_8X7B: dict[str, Any] = {**MISTRAL_7B_V01, "model_type": "mixtral", "sliding_window": None}
GEMMA_7B: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 3072,
    "model_type": "gemma",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "torch_dtype": "bfloat16",
}
GEMMA2_9B: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 3584,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "float32",
}
GEMMA3_4B: dict[str, Any] = {  # the nested part is saved without the values that are transformers' defaults
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}
GEMMA3_1B: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 1152,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
DEEPSEEK_V3: dict[str, Any] = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
PHI_2: dict[str, Any] = {
    "hidden_size": 2560,
    "model_type": "phi",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "torch_dtype": "float16",
}
PHI_3_MINI_4K: dict[str, Any] = {
    "hidden_size": 3072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "sliding_window": 2047,
    "torch_dtype": "bfloat16",
}
LLAMA4_SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}
UNKNOWN: dict[str, Any] = {
    "model_type": "brand_new",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 32,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("source", "bytes_per_token"),
    [
        pytest.param(LLAMA_31_8B, 32 * 2 * 8 * 128 * 2, id="llama-3.1-8b"),
        pytest.param(without(LLAMA_31_8B, "num_key_value_heads"), 32 * 2 * 32 * 128 * 2, id="llama-1-7b, MHA"),
        pytest.param(QWEN2_7B, 28 * 2 * 4 * 128 * 2, id="qwen2-7b"),
        pytest.param(QWEN3_30B_A3B, 48 * 2 * 4 * 128 * 2, id="qwen3-30b-a3b"),
        pytest.param(MISTRAL_7B_V01, 32 * 2 * 8 * 128 * 2, id="mistral-7b"),
        pytest.param(MIXTRAL_8X7B, 32 * 2 * 8 * 128 * 2, id="mixtral-8x7b"),
        pytest.param(GEMMA_7B, 28 * 2 * 16 * 256 * 2, id="gemma-7b, heads wider than hidden_size"),
        pytest.param(GEMMA2_9B, 42 * 2 * 8 * 256 * 4, id="gemma-2-9b, float32"),
        pytest.param(GEMMA3_4B, 34 * 2 * 4 * 256 * 2, id="gemma-3-4b"),
        pytest.param(GEMMA3_1B, 26 * 2 * 1 * 256 * 2, id="gemma-3-1b"),
        pytest.param(GPT_OSS_20B, 24 * 2 * 8 * 64 * 2, id="gpt-oss-20b, head_dim is not hidden/heads"),
        pytest.param(DEEPSEEK_V3, 61 * 576 * 2, id="deepseek-v3"),
        pytest.param(PHI_2, 32 * 2 * 32 * 80 * 2, id="phi-2"),
        pytest.param(PHI_3_MINI_4K, 32 * 2 * 32 * 96 * 2, id="phi-3-mini"),
        pytest.param(LLAMA4_SCOUT, 48 * 2 * 8 * 128 * 2, id="llama-4-scout"),
        pytest.param(GPT2, 12 * 2 * 12 * 64 * 2, id="gpt2"),
        pytest.param(UNKNOWN, 2 * 2 * 4 * 8 * 2, id="unknown type, standard keys"),
    ],
)
def test_real_models_have_these_bytes_per_token(source: dict[str, Any], bytes_per_token: int) -> None:
    assert config_from_hf(source, gpu_blocks=1000).bytes_per_token == bytes_per_token


def test_llama_in_one_call() -> None:
    config = config_from_hf(LLAMA_31_8B, gpu_bytes=16 * 2**30)
    assert config.bytes_per_token == 128 * 1024
    assert config.block_bytes == 2 * 2**20
    assert config.num_blocks(Tier.GPU) == 8192
    fp8 = config_from_hf(LLAMA_31_8B, dtype="fp8", block_size=32, gpu_bytes=16 * 2**30, watermark=0)
    assert (fp8.bytes_per_token, fp8.block_size, fp8.longest_sequence()) == (64 * 1024, 32, 262144)
    int8 = config_from_hf(LLAMA_31_8B, dtype=DType.INT8, gpu_blocks=2)
    assert int8.bytes_per_token == 32 * 2 * 8 * (128 + 2)
    int4 = config_from_hf(LLAMA_31_8B, dtype="int4", gpu_blocks=2)
    assert int4.bytes_per_token == 32 * 8 * (128 + 2 + 64 + 4)  # K is int8


INDEXED = {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}


@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_an_indexers_keys_are_a_part_of_each_layer_as_the_model_computes_them(dtype: str | None) -> None:
    layer, *others = layers_from_hf(INDEXED, dtype=dtype)
    assert layer.parts[1:] == (TokenPart("index", DType.BFLOAT16, 1, 128),)
    assert layer.bytes_per_token == 576 * (2 if dtype is None else 1) + 256
    assert set(others) == {layer}


@pytest.mark.parametrize(
    ("more", "full"),
    [
        ({"indexer_types": ["full", "shared", "shared", "full"]}, [0, 3]),
        ({"index_topk_pattern": "FSFS"}, [0, 2]),
        ({"index_topk_freq": 3}, [0, 1]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2]),
        ({"model_type": "hy_v4"}, [0, 1]),
        ({"layer_types": ["sliding_attention", *["indexed_attention"] * 3], "sliding_window": 8}, [1, 2, 3]),
        ({"layer_types": ["deepseek_sparse_attention"] * 4}, [0, 1, 2, 3]),
    ],
)
def test_layers_that_use_what_another_one_has_chosen_keep_no_keys_of_an_indexer(
    more: dict[str, Any], full: list[int]
) -> None:
    layers = layers_from_hf({**INDEXED, "num_hidden_layers": 4, **more})
    assert [number for number, layer in enumerate(layers) if layer.extra_parts] == full


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"indexer_types": ["full", "none"]}, "must hold full or shared for each of 61 layers"),
        ({"indexer_types": ["full"]}, "must hold full or shared for each of 61 layers"),
        ({"index_topk_freq": 0}, "index_topk_freq=0"),
        ({"index_kpool": 16}, "keeps an indexer's keys in a form of its own"),
        ({"index_topk": None}, "keeps an indexer's keys in a form of its own"),
        ({"kv_lora_rank": None}, "keeps an indexer's keys in a form of its own"),
    ],
)
def test_an_indexer_that_a_file_describes_otherwise_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_from_hf({**INDEXED, **more})


def test_deepseek_is_one_k_only_head_per_layer() -> None:
    assert layers_from_hf(DEEPSEEK_V3) == (LayerSpec(kv_heads=1, head_dim=576, k_only=True),) * 61
    assert layers_from_hf({**DEEPSEEK_V3, "model_type": "deepseek_v2", "q_lora_rank": None})[0].head_dim == 576


def test_given_layers_of_longcat_then_each_attends_twice() -> None:
    config = {key: value for key, value in DEEPSEEK_V3.items() if key != "num_hidden_layers"}
    assert len(layers_from_hf({**config, "model_type": "longcat_flash", "num_layers": 28})) == 56
    assert layers_from_hf({**DEEPSEEK_V3, "model_type": "something_mla"})[0].k_only


def test_gemma_3_4b_has_5_full_and_29_sliding_layers_in_two_pools() -> None:
    config = config_from_hf(GEMMA3_4B, gpu_blocks=100)
    full, sliding = config.groups
    assert (full.kind, full.layers, full.block_bytes) == (GroupKind.FULL, (5, 11, 17, 23, 29), 16 * 5 * 4096)
    assert (sliding.kind, sliding.window, len(sliding.layers)) == (GroupKind.SLIDING, 1024, 29)
    assert sliding.block_bytes == 16 * 29 * 4096
    assert [pool.groups for pool in config.pools] == [(0,), (1,)]


def test_gemma_3_pattern_and_layer_types_say_the_same() -> None:
    types = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)]
    listed = {**without(GEMMA3_1B, "sliding_window_pattern"), "layer_types": types, "_sliding_window_pattern": 6}
    assert layers_from_hf(listed) == layers_from_hf(GEMMA3_1B)
    assert layers_from_hf(without(listed, "layer_types")) == layers_from_hf(GEMMA3_1B)
    half = layers_from_hf({**GEMMA3_1B, "sliding_window_pattern": 2})
    assert [layer.window for layer in half] == [512, None] * 13


def test_nested_text_config_without_model_type_takes_it_from_outside() -> None:
    text = without(GEMMA3_4B["text_config"], "model_type")
    assert layers_from_hf({**GEMMA3_4B, "text_config": text}) == layers_from_hf(GEMMA3_4B)
    deep = {"model_type": "omni", "thinker_config": {"model_type": "omni_thinker", "text_config": QWEN2_7B}}
    assert layers_from_hf(deep) == layers_from_hf(QWEN2_7B)


def test_gpt_oss_alternates_in_one_shared_pool() -> None:
    config = config_from_hf(GPT_OSS_20B, gpu_blocks=100)
    full, sliding = config.groups
    assert (full.layers, sliding.layers) == (tuple(range(1, 24, 2)), tuple(range(0, 24, 2)))
    assert (sliding.window, sliding.sink_tokens) == (128, 0)
    assert full.block_bytes == sliding.block_bytes == 16 * 12 * 2 * 8 * 64 * 2
    assert len(config.pools) == 1
    assert layers_from_hf(without(GPT_OSS_20B, "layer_types")) == layers_from_hf(GPT_OSS_20B)


def test_gemma_2_slides_on_even_layers() -> None:
    assert [layer.window for layer in layers_from_hf(GEMMA2_9B)] == [4096, None] * 21


def test_mistral_slides_everywhere_unless_its_window_is_null() -> None:
    assert {layer.window for layer in layers_from_hf(MISTRAL_7B_V01)} == {4096}
    assert {layer.window for layer in layers_from_hf({**MISTRAL_7B_V01, "sliding_window": None})} == {None}
    assert {layer.window for layer in layers_from_hf(without(MISTRAL_7B_V01, "sliding_window"))} == {4096}
    assert {layer.window for layer in layers_from_hf(MIXTRAL_8X7B)} == {None}


def test_phi_3_slides_by_its_number_or_not_at_all() -> None:
    assert {layer.window for layer in layers_from_hf(PHI_3_MINI_4K)} == {2047}
    assert {layer.window for layer in layers_from_hf({**PHI_3_MINI_4K, "sliding_window": None})} == {None}
    assert {layer.window for layer in layers_from_hf(without(PHI_3_MINI_4K, "sliding_window"))} == {None}


def test_qwen_2_slides_above_max_window_layers_only_when_switched_on() -> None:
    on = {**QWEN2_7B, "use_sliding_window": True, "sliding_window": 1000, "max_window_layers": 20}
    assert [layer.window for layer in layers_from_hf(on)] == [None] * 20 + [1000] * 8
    assert {layer.window for layer in layers_from_hf({**on, "use_sliding_window": False})} == {None}
    assert {layer.window for layer in layers_from_hf(without(on, "use_sliding_window"))} == {None}
    assert {layer.window for layer in layers_from_hf({**on, "max_window_layers": 28})} == {None}
    assert [layer.window for layer in layers_from_hf({**on, "model_type": "qwen3"})] == [None] * 20 + [1000] * 8


def test_qwen_mixtures_that_slide_must_say_which_layers() -> None:
    on = {**QWEN3_30B_A3B, "use_sliding_window": True, "sliding_window": 1000}
    with pytest.raises(ConfigError, match="which layers of model_type='qwen3_moe' slide"):
        layers_from_hf(on)
    types = ["full_attention"] * 40 + ["sliding_attention"] * 8
    assert [layer.window for layer in layers_from_hf({**on, "layer_types": types})] == [None] * 40 + [1000] * 8


def test_llama_4_chunks_three_layers_of_four() -> None:
    layers = layers_from_hf(LLAMA4_SCOUT)
    assert [layer.chunk for layer in layers] == [8192, 8192, 8192, None] * 12
    text = LLAMA4_SCOUT["text_config"]
    assert [layer.chunk for layer in layers_from_hf({**text, "no_rope_layers": [1, 0] * 30})] == [8192, None] * 24
    assert [layer.chunk for layer in layers_from_hf({**text, "no_rope_layer_interval": 2})] == [8192, None] * 24
    assert {layer.chunk for layer in layers_from_hf({**text, "attention_chunk_size": None})} == {None}
    types = ["full_attention"] * 24 + ["chunked_attention"] * 24
    assert [layer.chunk for layer in layers_from_hf({**text, "layer_types": types})] == [None] * 24 + [8192] * 24


def test_older_names_and_multi_query() -> None:
    opt = {**UNKNOWN, "model_type": "opt", "num_key_value_heads": 1}
    assert layers_from_hf(opt)[0].kv_heads == 4
    assert layers_from_hf({**UNKNOWN, "model_type": "gpt_neox"})[0].kv_heads == 4
    assert layers_from_hf({**GPT2, "model_type": "gpt_bigcode"})[0].kv_heads == 1
    assert layers_from_hf({**GPT2, "model_type": "gpt_bigcode", "multi_query": False})[0].kv_heads == 12
    falcon = {"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60}
    assert layers_from_hf({**falcon, "multi_query": True})[0] == LayerSpec(1, 64)
    assert layers_from_hf({**falcon, "new_decoder_architecture": True, "num_kv_heads": 8})[0].kv_heads == 8


def test_dtype_comes_from_the_call_then_the_text_part_then_the_file() -> None:
    assert layers_from_hf(GEMMA2_9B)[0].dtype is DType.FLOAT32
    assert layers_from_hf(GEMMA2_9B, dtype="bf16")[0].dtype is DType.BFLOAT16
    assert layers_from_hf({**GPT2, "dtype": "float16"})[0].dtype is DType.FLOAT16
    assert layers_from_hf(GPT2)[0].dtype is DType.BFLOAT16
    nested = {"model_type": "vlm", "torch_dtype": "float32", "text_config": {**LLAMA_31_8B, "torch_dtype": "float16"}}
    assert layers_from_hf(nested)[0].dtype is DType.FLOAT16
    assert layers_from_hf({**GPT2, "torch_dtype": "float64"}, dtype="fp8")[0].dtype is DType.FP8_E4M3


def test_dict_file_and_folder_give_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA3_4B), encoding="utf-8")
    for source in (tmp_path, file, str(tmp_path), str(file)):
        assert layers_from_hf(source) == layers_from_hf(GEMMA3_4B)


def test_source_is_not_changed() -> None:
    before = json.dumps(GEMMA3_4B)
    layers_from_hf(GEMMA3_4B)
    assert json.dumps(GEMMA3_4B) == before


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_unreadable_sources_are_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file"):
        layers_from_hf(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read meta-llama/Llama-3\.1-8B: .* nothing is downloaded"):
        layers_from_hf("meta-llama/Llama-3.1-8B")
    file = tmp_path / "config.json"
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not JSON"):
        layers_from_hf(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not JSON"):
        layers_from_hf(file)
    file.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"must hold a JSON object, not \[1\]"):
        layers_from_hf(file)
    with pytest.raises(ConfigError, match="source=3 must be a dict or the path"):
        layers_from_hf(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_hidden_layers=None), "model_type='brand_new' lacks num_hidden_layers;"),
        (dict(hidden_size=None, num_attention_heads=None), "lacks num_attention_heads, hidden_size;"),
        (dict(model_type=None, hidden_size=None), "model_type='' lacks hidden_size"),
        (dict(model_type=5), "model_type=5 must be a string"),
        (dict(text_config={"model_type": 5}), "model_type=5 must be a string"),
        (dict(num_hidden_layers=0), "num_hidden_layers=0"),
        (dict(num_hidden_layers=2.0), r"num_hidden_layers=2\.0 must be an integer"),
        (dict(num_hidden_layers=True), "num_hidden_layers=True"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be at most"),
        (dict(num_attention_heads="4"), "num_attention_heads='4'"),
        (dict(num_key_value_heads=3), "num_key_value_heads=3 does not divide num_attention_heads=4"),
        (dict(num_key_value_heads=[1, 2]), r"num_key_value_heads=\[1, 2\] must be an integer"),
        (dict(num_key_value_heads=-1), "num_key_value_heads=-1"),
        (dict(hidden_size=33), "hidden_size=33 is no multiple of num_attention_heads=4; add head_dim"),
        (dict(head_dim=0), "head_dim=0"),
        (dict(torch_dtype="float64"), "dtype='float64'"),
        (dict(layer_types=["full_attention"]), "for each of num_hidden_layers=2"),
        (dict(layer_types="full"), "layer_types='full'"),
        (dict(layer_types=["full_attention", "linear_attention"]), "layer_types holds 'linear_attention'"),
        (dict(layer_types=["conv", ["x"]]), r"layer_types holds 'conv', \['x'\]"),
        (dict(layer_types=["sliding_attention"] * 2), "lacks sliding_window"),
        (dict(layer_types=["chunked_attention"] * 2), "lacks attention_chunk_size"),
        (
            dict(layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=False),
            "use_sliding_window=False, but layer_types",
        ),
        (dict(sliding_window=8), "sliding_window=8, but which layers of model_type='brand_new' slide"),
        (dict(sliding_window=8, sliding_window_pattern="LLLG"), "sliding_window_pattern='LLLG'"),
        (dict(sliding_window=8, use_sliding_window="yes"), "use_sliding_window='yes'"),
        (dict(use_sliding_window=True), "lacks sliding_window"),
        (dict(model_type="mistral", sliding_window=-1), "sliding_window=-1"),
        (dict(model_type="mistral", sliding_window=True), "sliding_window=True"),
        (dict(model_type="qwen2", use_sliding_window=True, max_window_layers=1.5), "max_window_layers=1.5"),
        (dict(model_type="llama4_text", no_rope_layers=[1]), r"no_rope_layers=\[1\] must hold 0 or 1"),
        (dict(model_type="llama4_text", no_rope_layers=[1, 7]), r"no_rope_layers=\[1, 7\] must hold 0 or 1"),
        (dict(model_type="deepseek_v3"), "lacks kv_lora_rank"),
        (dict(kv_lora_rank=512), "lacks qk_rope_head_dim"),
        (dict(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128), "index_head_dim=128"),
        (dict(mamba_d_state=16), "mamba_d_state=16"),
        (dict(ssm_cfg={"layer": "Mamba2"}), "ssm_cfg="),
        (dict(conv_L_cache=3), "conv_L_cache=3"),
        (
            dict(linear_num_key_heads=16, full_attention_interval=4),
            "full_attention_interval=4, linear_num_key_heads=16",
        ),
        (dict(hybrid_override_pattern="M-M*"), "hybrid_override_pattern="),
        (dict(num_kv_shared_layers=10), "num_kv_shared_layers=10"),
        (dict(num_key_value_heads_per_layer=[4, 2]), "num_key_value_heads_per_layer"),
        (dict(is_encoder_decoder=True), "is_encoder_decoder=True"),
        (dict(model_type="bert", type_vocab_size=2), "type_vocab_size=2"),
    ],
)
def test_configs_that_do_not_say_enough_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_from_hf({**UNKNOWN, **changes})


def test_signs_that_are_switched_off_do_no_harm() -> None:
    off = {"num_kv_shared_layers": 0, "use_cla": False, "is_encoder_decoder": False, "sliding_window": None}
    assert layers_from_hf({**UNKNOWN, **off}) == layers_from_hf(UNKNOWN)
    assert layers_from_hf({**UNKNOWN, "is_decoder": True, "type_vocab_size": 2}) == layers_from_hf(UNKNOWN)
    assert layers_from_hf({**UNKNOWN, "sliding_window": 8, "use_sliding_window": False}) == layers_from_hf(UNKNOWN)


def test_defaults_fill_a_nested_text_config_but_not_a_top_level_file() -> None:
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "torch_dtype": "float16"}}
    assert layers_from_hf(llava) == (LayerSpec(32, 128, DType.FLOAT16),) * 32
    with pytest.raises(ConfigError, match="lacks num_hidden_layers, num_attention_heads, hidden_size"):
        layers_from_hf({"model_type": "llama"})


def test_memory_must_be_given_and_unknown_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="exactly one of gpu_blocks"):
        config_from_hf(LLAMA_31_8B)
    with pytest.raises(ConfigError, match=r"one block of 16 tokens needs 2097152 bytes"):
        config_from_hf(LLAMA_31_8B, gpu_bytes=2 * 2**20 - 1)
    with pytest.raises(TypeError, match="gpu_mem"):
        config_from_hf(LLAMA_31_8B, gpu_mem=5)


@pytest.mark.parametrize("model_type", sorted(_DEFAULTS))
def test_what_a_nested_configuration_leaves_out_is_what_transformers_assumes(model_type: str) -> None:
    known = pytest.importorskip("transformers").CONFIG_MAPPING[model_type]
    assumed = {name: parameter.default for name, parameter in inspect.signature(known.__init__).parameters.items()}
    ours = _DEFAULTS[model_type]
    theirs = {name: assumed[name] for name in ours}
    second = "sliding_attention" if "sliding_window" in ours else "full_attention"
    kinds = {"layer_types": ["full_attention", second] * (theirs["num_hidden_layers"] // 2)}
    lacking, whole = (
        layers_from_hf({"model_type": "nested", "text_config": {"model_type": model_type, **kinds, **told}})
        for told in ({}, theirs)
    )
    assert (ours, lacking) == (theirs, whole)
