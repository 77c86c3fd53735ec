"""The weights of small models of every family, counted by hand, and what follows from them for a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.replay.costs import GPU, GPUS, costs_for, count_weights, find_gpu

LLAMA = {
    "model_type": "llama",
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 100,
}
EMBEDDINGS = 2 * 100 * 12
ATTENTION = 12 * 3 * (4 + 2 + 2 + 4)  # queries, keys, values, output; heads of 12 / 4
FEED_FORWARD = 3 * 12 * 20
LATENT = {"kv_lora_rank": 5, "qk_rope_head_dim": 2, "qk_nope_head_dim": 3, "v_head_dim": 7}
AFTER_QUERIES = 12 * (5 + 2) + 5 * 4 * (3 + 7) + 4 * 7 * 12
MOE = {"num_local_experts": 6, "num_experts_per_tok": 2}
EXPERT, ROUTER = FEED_FORWARD, 12 * 6
LFM2 = {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}
MAMBA = {"model_type": "mamba", "state_size": 6, "conv_kernel": 4, "expand": 2}
MAMBA2 = {
    "model_type": "mamba2",
    "num_heads": 8,
    "head_dim": 3,
    "expand": 2,
    "state_size": 6,
    "conv_kernel": 4,
    "n_groups": 2,
}
DELTA = {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 7,
    "head_dim": 3,
}


def whole(attention: int = ATTENTION, dense: int = FEED_FORWARD, embeddings: int = EMBEDDINGS) -> int:
    return embeddings + 3 * (attention + dense)


def sparse(num_sparse: int, experts: int, shared: int = 0, expert: int = EXPERT) -> int:
    layers = (3 - num_sparse) * FEED_FORWARD + num_sparse * (experts * expert + shared + ROUTER)
    return EMBEDDINGS + 3 * ATTENTION + layers


MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama": ({}, whole(), whole()),
    "tied": ({"tie_word_embeddings": True}, whole(embeddings=1200), whole(embeddings=1200)),
    "tied by its family": ({"model_type": "gemma"}, whole(embeddings=1200), whole(embeddings=1200)),
    "wide heads": ({"head_dim": 8}, whole(12 * 8 * 12), whole(12 * 8 * 12)),
    "as many groups as heads": ({"num_key_value_heads": None}, whole(12 * 3 * 16), whole(12 * 3 * 16)),
    "one group": (
        {"multi_query": True, "model_type": "falcon"},
        1200 + 3 * (12 * 3 * 10 + 480),
        1200 + 3 * (360 + 480),
    ),
    "two matrices": ({"model_type": "phi"}, whole(dense=2 * 240), whole(dense=2 * 240)),
    "no width": ({"intermediate_size": None}, whole(dense=3 * 12 * 48), whole(dense=3 * 12 * 48)),
    "latent": (LATENT, whole(12 * 4 * 5 + AFTER_QUERIES), whole(12 * 4 * 5 + AFTER_QUERIES)),
    "latent queries": (
        {**LATENT, "q_lora_rank": 6},
        whole(12 * 6 + 6 * 4 * 5 + AFTER_QUERIES),
        whole(12 * 6 + 6 * 4 * 5 + AFTER_QUERIES),
    ),
    "experts": (MOE, sparse(3, 6), sparse(3, 2)),
    "two experts, one used": ({"num_experts": 2}, whole(dense=2 * EXPERT + 24), whole(dense=EXPERT + 24)),
    "a list of widths": ({"intermediate_size": [20, 99, 99]}, whole(), whole()),
    "an empty list": ({"intermediate_size": []}, whole(dense=3 * 12 * 48), whole(dense=3 * 12 * 48)),
    "one token": ({"vocab_size": 1}, whole(embeddings=24), whole(embeddings=24)),
    "one expert": ({"num_local_experts": 1}, whole(), whole()),
    "small experts": ({**MOE, "moe_intermediate_size": 5}, sparse(3, 6, expert=180), sparse(3, 2, expert=180)),
    "shared experts": ({**MOE, "n_shared_experts": 2}, sparse(3, 6, 2 * EXPERT), sparse(3, 2, 2 * EXPERT)),
    "a shared expert": (
        {**MOE, "shared_expert_intermediate_size": 7},
        sparse(3, 6, 3 * 12 * 7),
        sparse(3, 2, 3 * 12 * 7),
    ),
    "dense first": ({**MOE, "first_k_dense_replace": 1}, sparse(2, 6), sparse(2, 2)),
    "dense between": ({**MOE, "interleave_moe_layer_step": 2}, sparse(1, 6), sparse(1, 2)),
    "llama 4": ({**MOE, "model_type": "llama4_text"}, sparse(3, 6, EXPERT), sparse(3, 2, EXPERT)),
    "short convolutions": (
        {**LFM2, "block_auto_adjust_ff_dim": False},
        1200 + 2 * (4 * 144 + 12 * 4) + ATTENTION + 3 * FEED_FORWARD,
        1200 + 2 * (4 * 144 + 12 * 4) + ATTENTION + 3 * FEED_FORWARD,
    ),
    "adjusted width": (
        {**LFM2, "block_multiple_of": 4, "block_ffn_dim_multiplier": 1.5},
        1200 + 2 * (4 * 144 + 12 * 4) + ATTENTION + 3 * 36 * 20,
        1200 + 2 * (4 * 144 + 12 * 4) + ATTENTION + 3 * 36 * 20,
    ),
    "usual width": (
        {**LFM2, "intermediate_size": 600},
        1200 + 2 * (4 * 144 + 12 * 4) + ATTENTION + 3 * 36 * 512,
        1200 + 2 * (4 * 144 + 12 * 4) + ATTENTION + 3 * 36 * 512,
    ),
    "exact width": (
        {**LFM2, "block_multiple_of": 1},
        1200 + 2 * (4 * 144 + 12 * 4) + ATTENTION + 3 * 36 * 13,
        1200 + 2 * (4 * 144 + 12 * 4) + ATTENTION + 3 * 36 * 13,
    ),
    "mamba": (
        MAMBA,
        1200 + 3 * (3 * 12 * 20 + 20 * 4 + 20 * 6 + 20 * (2 * 1 + 2 * 6)),
        1200 + 3 * (3 * 12 * 20 + 20 * 4 + 20 * 6 + 20 * (2 * 1 + 2 * 6)),
    ),
    "mamba with a rank": (
        {**MAMBA, "time_step_rank": 5},
        1200 + 3 * (3 * 12 * 20 + 20 * 4 + 20 * 6 + 20 * (2 * 5 + 2 * 6)),
        1200 + 3 * (3 * 12 * 20 + 20 * 4 + 20 * 6 + 20 * (2 * 5 + 2 * 6)),
    ),
    "mamba 2": (
        MAMBA2,
        EMBEDDINGS + 3 * (12 * (48 + 2 * 24 + 8) + 48 * 4),
        EMBEDDINGS + 3 * (12 * (48 + 2 * 24 + 8) + 48 * 4),
    ),
    "gated delta": (
        DELTA,
        EMBEDDINGS + 2 * (12 * (47 + 2 * 35 + 2 * 7) + 47 * 4) + ATTENTION + 12 * 3 * 4 + 3 * FEED_FORWARD,
        EMBEDDINGS + 2 * (12 * (47 + 2 * 35 + 2 * 7) + 47 * 4) + ATTENTION + 12 * 3 * 4 + 3 * FEED_FORWARD,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_counted_as_by_hand(name: str) -> None:
    changes, total, active = MODELS[name]
    found = count_weights({**LLAMA, **changes})
    assert (found.total, found.active, found.hidden_size) == (total, active, 12)
    assert found.num_attention_layers == {"mamba": 0, "mamba with a rank": 0, "mamba 2": 0}.get(
        name, 1 if changes.get("layer_types") else 3
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 2.0),
        ({"dtype": "float32"}, 4.0),
        ({"torch_dtype": "torch.float16"}, 2.0),
        ({"dtype": "float8_e4m3fn"}, 1.0),
        ({"quantization_config": {"quant_method": "awq"}}, 0.5),
        ({"quantization_config": {"quant_method": "mxfp4"}}, 0.53),
        ({"quantization_config": {"quant_method": "unheard of"}}, 1.0),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, 0.375),
    ],
)
def test_the_size_of_a_weight_is_what_the_file_says(fields: dict[str, Any], expected: float) -> None:
    assert count_weights({**LLAMA, **fields}).bytes_per_parameter == expected


@pytest.mark.parametrize("lacking", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_what_a_count_needs_is_asked_for(lacking: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks {lacking}"):
        count_weights({**LLAMA, lacking: None})
    with pytest.raises(ConfigError, match=f"{lacking}=0"):
        count_weights({**LLAMA, lacking: 0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**LFM2, "block_multiple_of": 0}, "block_multiple_of=0"),
        ({**MAMBA, "time_step_rank": 0}, "time_step_rank=0"),
        (
            {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 0},
            "of model_type='jamba' cannot be counted",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        count_weights({**LLAMA, **fields})


@pytest.mark.parametrize(("hidden", "given", "rank"), [(32, "auto", 2), (33, None, 3), (48, "auto", 3), (48, 1, 1)])
def test_time_steps_of_mamba_go_through_a_narrow_matrix(hidden: int, given: Any, rank: int) -> None:
    found = count_weights({**LLAMA, **MAMBA, "hidden_size": hidden, "time_step_rank": given}).total
    assert found == 100 * hidden + 3 * (60 * hidden + 80 + 120 + 20 * (2 * rank + 12))


def test_a_nested_text_config_is_counted() -> None:
    assert count_weights({"model_type": "llava", "text_config": LLAMA}).total == whole()
    nameless = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert count_weights({"model_type": "gemma", "text_config": nameless}).total == whole(embeddings=1200)
    quantised = {**LLAMA, "quantization_config": {"quant_method": "awq"}}
    assert count_weights({"model_type": "llava", "text_config": quantised}).bytes_per_parameter == 0.5


def test_a_count_says_what_it_is_made_of() -> None:
    large = {**LLAMA, "hidden_size": 4096, "intermediate_size": 81920, "vocab_size": 122071}
    assert count_weights(large).why == "3 x 50.3 M attention + 3 x 1.01 B feed-forward + 1.00 B embeddings"
    alone = {**LLAMA, **MAMBA, "hidden_size": 500, "vocab_size": 2_000_000}
    assert count_weights(alone).why == "3 x 0.0 M layers with a state + 1.00 B embeddings"
    assert count_weights({**large, **MOE}).why == (
        "3 layers x 6 experts x 1.01 B (2 used per token) + 3 x 50.3 M attention + 1.00 B embeddings"
    )


def test_a_gpu_computes_weights_of_up_to_a_byte_in_eight_bits() -> None:
    gpu = GPU("own", 10, 100.0, 300.0, 1000.0, 50.0, 70.0)
    assert [gpu.flops(size) for size in (0.5, 1.0, 1.001, 2.0)] == [150.0, 150.0, 50.0, 50.0]
    assert (gpu.decode_bytes_per_second, gpu.swap_bytes_per_second) == (650.0, 42.5)
    assert find_gpu(" RTX 4090 ") is find_gpu("rtx-4090") is GPUS["rtx4090"]
    assert find_gpu("A100_40GB") is GPUS["a100-40gb"]
    with pytest.raises(InvalidArgumentError, match="unknown GPU 'x'; known: t4, l4"):
        find_gpu("x")


def near(expected: float) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize("num_gpus", [1, 4])
def test_costs_follow_from_weights_and_the_gpu(num_gpus: int) -> None:
    costs, layers = costs_for({**LLAMA, **MOE}, "h100", num_gpus=num_gpus, weight_bytes=1)
    active, flops, bandwidth = sparse(3, 2), 1979e12 / 2 * num_gpus, 3.35e12 * 0.65 * num_gpus
    assert len(layers) == 3
    assert costs.prefill_seconds_per_token == near(2 * active / flops)
    assert costs.seconds_per_token_pair == near(4 * 12 * 3 / flops)
    assert costs.decode_seconds_per_step == near(active / bandwidth)
    assert costs.decode_seconds_per_sequence == near(2 * active / flops)
    assert costs.decode_seconds_per_context_token == near(3 * 2 * 2 * 3 * 2 / bandwidth)
    assert costs.transfer_bytes_per_second == near(64e9 * 0.85 * num_gpus)


def test_a_decode_step_reads_and_writes_states() -> None:
    costs, layers = costs_for({**LLAMA, **MAMBA}, "h100")
    weights = count_weights({**LLAMA, **MAMBA})
    states = sum(layer.bytes for layer in layers)  # type: ignore[union-attr]
    expected = 2 * weights.active / (989e12 / 2) + 2 * states / (3.35e12 * 0.65)
    assert costs.decode_seconds_per_sequence == near(expected)
    assert costs.decode_seconds_per_step == near(weights.active * 2 / (3.35e12 * 0.65))
