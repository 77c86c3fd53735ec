"""Planning: parameters from a config alone, what fits, and where loading wins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llama_config import LLAMA

from kvpool import AllocStatus, KVCacheConfig, KVCacheManager
from kvpool.config.model_config import layers_from_hf
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError
from kvpool.replay.capacity_plan import PlanRequest, curve_sentence, knee, make_plan
from kvpool.replay.costs import GPUS, costs_for, count_weights, find_gpu


def config(**values: Any) -> dict[str, Any]:
    return {**LLAMA, **values}


# Published parameter counts, in billions (the language model, where there is more).
FAMILIES = {
    "llama-3-8b": (config(), 8.03),
    "llama-3-70b": (
        config(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
        70.6,
    ),
    "mixtral-8x7b": (config(model_type="mixtral", vocab_size=32000, num_local_experts=8, num_experts_per_tok=2), 46.7),
    "qwen3-30b-a3b": (
        config(
            model_type="qwen3_moe",
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        30.5,
    ),
    "gemma-2-9b": (
        config(
            model_type="gemma2",
            hidden_size=3584,
            num_hidden_layers=42,
            num_attention_heads=16,
            head_dim=256,
            vocab_size=256000,
        ),
        9.24,
    ),
    "gpt2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, 0.124),
    "deepseek-v3": (
        config(
            model_type="deepseek_v3",
            hidden_size=7168,
            intermediate_size=18432,
            num_hidden_layers=61,
            num_attention_heads=128,
            vocab_size=129280,
            kv_lora_rank=512,
            q_lora_rank=1536,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=256,
            num_experts_per_tok=8,
            n_shared_experts=1,
            moe_intermediate_size=2048,
            first_k_dense_replace=3,
        ),
        671.0,
    ),
}

# Counts of transformers' own models with these configs, in billions.
QWEN3_NEXT = config(
    model_type="qwen3_next",
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    vocab_size=151936,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
MAMBA = {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50280}
MAMBA |= {"intermediate_size": 1536, "conv_kernel": 4, "state_size": 16, "time_step_rank": 48}
HYBRIDS = {
    "qwen3-next": (QWEN3_NEXT, 79.674),
    "qwen3.5": (
        config(
            model_type="qwen3_5_text",
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=256,
            intermediate_size=12288,
            vocab_size=248320,
            full_attention_interval=4,
        ),
        8.954,
    ),
    "falcon-h1": (
        config(
            model_type="falcon_h1",
            vocab_size=128000,
            mamba_d_ssm=1024,
            mamba_n_heads=128,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
        ),
        8.515,
    ),
    "mamba": (MAMBA, 0.1593),
    "lfm2": (
        {
            "model_type": "lfm2",
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 65536,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention"] * 4,
        },
        1.198,
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_given_layers_with_a_state_then_their_projections_are_counted(name: str) -> None:
    source, billions = HYBRIDS[name]
    assert count_weights(source).total / 1e9 == pytest.approx(billions, rel=0.002)


def test_given_a_family_whose_weights_cannot_be_counted_then_it_is_refused() -> None:
    source = config(model_type="zamba2", layers_block_type=["mamba"] * 32)
    with pytest.raises(ConfigError, match=r"weights of model_type='zamba2' cannot be counted; config_from_hf"):
        count_weights(source)


def test_given_layers_with_a_state_then_the_plan_divides_the_budget_between_blocks_and_checkpoints() -> None:
    request = PlanRequest(QWEN3_NEXT, "h200", num_gpus=2, context=32768, host_bytes=2**40)
    plan = make_plan(request)
    numbers = plan.numbers
    state = 36 * (65536 + 2**21)
    assert (numbers["kv_bytes_per_token"], numbers["checkpoint_bytes"]) == (12 * 2 * 2 * 256 * 2, state)
    assert numbers["sequence_bytes"] == 32768 * 24576 + 2 * state
    assert numbers["host_sequences"] == 2**40 // (32768 * 24576 + state)  # cached ones have one checkpoint
    used = numbers["gpu_blocks"] * 16 * 24576 + numbers["gpu_checkpoints"] * state
    assert 0.99 < used / numbers["kv_budget_bytes"] <= 1
    assert "24% of the budget for states and 76% for K and V" in plan.why["gpu_checkpoints"]
    assert numbers["sequences_that_fit"] == 88
    assert plan.why["sequences_that_fit"].endswith("divides the budget for cached prefixes; 97 with plan_tokens=32768")
    assert set(plan.why) == set(numbers)


ROOM = {
    "one pool": config(),
    "windows": config(model_type="mistral", sliding_window=1024),
    "windows and full attention": config(model_type="gemma3_text", sliding_window=512, head_dim=128),
    "states": QWEN3_NEXT,
    "states alone": MAMBA,
}


@pytest.mark.slow
@settings(max_examples=8)
@given(
    model=st.sampled_from(sorted(ROOM)),
    context=st.integers(200, 2000),
    block_size=st.sampled_from([16, 64]),
    gigabytes=st.floats(0.3, 2.5),
)
@example(model="one pool", context=1024, block_size=16, gigabytes=10 * 2**27 / 1e9)  # 10, but for the watermark
@example(model="states", context=1000, block_size=16, gigabytes=2.5)
def test_given_a_plan_then_a_manager_with_default_settings_has_room_for_so_many_sequences(
    model: str, context: int, block_size: int, gigabytes: float
) -> None:
    source = ROOM[model]
    memory = find_gpu("h200").memory_bytes * 4
    fraction = (2 * count_weights(source).total + gigabytes * 1e9) / memory
    plan = make_plan(PlanRequest(source, "h200", None, context, 10**6, 4, block_size, None, fraction))
    kept = KVCacheConfig(layers_from_hf(source), block_size, gpu_bytes=int(plan.numbers["kv_budget_bytes"]))
    manager, promised = KVCacheManager(kept), int(plan.numbers["sequences_that_fit"])
    for number in range(min(promised, 20)):
        handle = manager.allocate(number, num_tokens=block_size)
        manager.commit(handle, block_size)
        for start in range(block_size, context, block_size):
            manager.extend(handle, min(block_size, context - start))
            manager.commit(handle, min(block_size, context - start))
    if promised <= 20 and model == "one pool":  # others are admitted and fall short while they grow
        assert manager.can_allocate(num_tokens=context).status is not AllocStatus.OK
    assert f"{promised} of 1000000 sequences" in plan.verdict


def test_given_states_alone_then_a_plan_has_no_bytes_per_token() -> None:
    numbers = make_plan(PlanRequest(MAMBA, "h200")).numbers
    assert "kv_bytes_per_token" not in numbers
    assert numbers["gpu_blocks"] == 0 < numbers["gpu_checkpoints"]
    assert numbers["host_break_even_tokens"] > 0


def test_given_a_state_then_a_decode_step_reads_and_writes_it_for_each_sequence() -> None:
    costs, layers = costs_for(QWEN3_NEXT, "h200")
    computing = 2 * count_weights(QWEN3_NEXT).active / find_gpu("h200").flops(2)
    moving = 2 * 36 * (65536 + 2**21) / find_gpu("h200").decode_bytes_per_second
    assert costs.decode_seconds_per_sequence == pytest.approx(computing + moving)
    assert costs.decode_seconds_per_context_token == 24576 / find_gpu("h200").decode_bytes_per_second
    assert len(layers) == 48


@pytest.mark.parametrize("name", FAMILIES)
def test_given_a_family_then_its_parameters_are_counted_within_one_percent(name: str) -> None:
    source, billions = FAMILIES[name]
    assert count_weights(source).total / 1e9 == pytest.approx(billions, rel=0.012)


def test_given_experts_then_a_token_uses_a_few_of_them() -> None:
    weights = count_weights(FAMILIES["qwen3-30b-a3b"][0])
    assert weights.active / 1e9 == pytest.approx(3.3, rel=0.05)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({}, 2.0),
        ({"torch_dtype": "float32"}, 4.0),
        ({"quantization_config": {"quant_method": "fp8"}}, 1.0),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 0.5),
    ],
)
def test_given_a_dtype_or_quantisation_then_bytes_follow(values: dict[str, Any], size: float) -> None:
    assert count_weights(config(**values)).bytes_per_parameter == size


def test_given_a_config_without_a_size_then_it_is_named() -> None:
    source = config()
    del source["vocab_size"]
    with pytest.raises(ConfigError, match="vocab_size"):
        count_weights(source)


@pytest.mark.parametrize("name", FAMILIES)
def test_given_every_family_then_a_plan_is_made_and_explained(name: str) -> None:
    plan = make_plan(PlanRequest(FAMILIES[name][0], "h200", num_gpus=16, host_bytes=2**40, disk_bytes=2**42))
    assert set(plan.why) == set(plan.numbers)
    assert all(plan.why.values())
    assert plan.numbers["sequences_that_fit"] > 0
    assert plan.numbers["disk_sequences"] >= plan.numbers["host_sequences"] > 0


def test_given_weights_that_do_not_fit_then_the_verdict_says_so() -> None:
    plan = make_plan(PlanRequest(FAMILIES["llama-3-70b"][0], "a100"))
    assert "do not fit" in plan.verdict
    assert plan.numbers["kv_budget_bytes"] < 0


def test_given_room_then_the_verdict_says_how_much() -> None:
    assert "there is room for" in make_plan(PlanRequest(config(), "h100", context=2048, concurrency=4)).verdict


def test_given_the_break_even_length_then_loading_wins_there_and_not_before() -> None:
    plan = make_plan(PlanRequest(config(), "h200")).numbers
    length = int(plan["disk_break_even_tokens"])
    load = plan["kv_bytes_per_token"] / 6e9

    def gain(n: int) -> float:
        token, pair = plan["recompute_seconds_per_token"], plan["recompute_seconds_per_token_pair"]
        return n * token + n * n / 2 * pair - (2e-4 + n * load)

    assert gain(length) >= 0 > gain(length - 1)


def test_given_a_curve_then_the_knee_is_where_it_bends() -> None:
    assert knee([1, 10, 100, 1000], [0.1, 0.4, 0.42, 0.43]) == 10
    assert knee([1, 10], [0.3, 0.3]) == 1
    assert knee([72, 300, 1200, 5000], [0.01, 0.03, 0.08, 0.23]) is None, "it bends upwards"
    assert knee([1, 10, 100], [0.1, 0.2, 0.3]) is None
    assert "no knee yet: from 1 to 100 blocks" in curve_sentence([1, 10, 100], [0.1, 0.2, 0.5])
    assert "No size finds anything" in curve_sentence([1, 10], [0.0, 0.0])
    assert curve_sentence([1, 10, 100], [0.1, 0.4, 0.42]) == ""
    with pytest.raises(InvalidArgumentError):
        knee([], [])


def test_given_gpu_names_then_spelling_is_forgiven_and_unknown_ones_are_refused() -> None:
    assert find_gpu("H200") is GPUS["h200"]
    assert find_gpu("RTX-4090") is GPUS["rtx4090"]
    with pytest.raises(InvalidArgumentError, match="unknown GPU"):
        find_gpu("voodoo2")


@pytest.mark.parametrize(
    "bad",
    [
        {"context": 0},
        {"concurrency": -1},
        {"gpu_fraction": 0.0},
        {"num_gpus": 0},
        *({"weight_bytes": value} for value in (0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_given_a_wrong_request_then_the_field_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(KVPoolError, match=next(iter(bad))):
        PlanRequest(config(), "h200", **bad)
