"""Tiny random models of the families that mix attention with layers that keep a state."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, set_seed

VOCABULARY = 128
_ALTERNATING = ["linear_attention", "full_attention"] * 2
_SHARED: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    shared_intermediate_size=64,
    num_experts=4,
    num_experts_per_tok=2,
    num_local_experts=4,
    n_routed_experts=4,
)
_MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=8)
_DELTA = dict(
    layer_types=_ALTERNATING,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)
# Transformers bounds the time step of these in prompts, and forgets to in decoding; a low bound is never met.
_LOW_BOUND = dict(time_step_min=1e-6)
HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "falcon_mamba": dict(state_size=16),
    "granitemoehybrid": {**_MAMBA, "layer_types": _ALTERNATING},
    "inkling_text": dict(
        layer_types=["hybrid_sliding", "hybrid"] * 2,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=8,
        d_rel=8,
        rel_extent=64,
        n_shared_experts=1,
    ),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=8),
    "kimi_linear": dict(
        layer_types=_ALTERNATING,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        linear_num_heads=2,
        linear_head_dim=16,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    "mamba": dict(state_size=16),
    "mamba2": dict(state_size=16, num_heads=8, n_groups=2, chunk_size=8),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention", "linear_attention", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        **_LOW_BOUND,
    ),
    "olmo_hybrid": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "zamba": dict(num_hidden_layers=6, attn_layer_period=2, attn_layer_offset=1, n_mamba_heads=2),
    "zamba2": dict(
        num_hidden_layers=6,
        layers_block_type=["linear_attention", "hybrid"] * 3,
        num_key_value_heads=4,
        num_mem_blocks=2,
        use_mem_rope=True,
        use_shared_attention_adapter=True,
        adapter_rank=8,
        n_mamba_heads=8,
        mamba_d_state=16,
        mamba_ngroups=2,
        chunk_size=8,
        **_LOW_BOUND,
    ),
    "zaya": dict(num_experts_per_tok=1, router_hidden_size=16),
}


def hybrid_config(family: str, **settings: Any) -> Any:
    """A configuration of a family of which every dimension is small."""
    known = CONFIG_MAPPING[family]
    shared = {name: value for name, value in _SHARED.items() if name in inspect.signature(known.__init__).parameters}
    return known(**{**shared, **HYBRIDS[family], **settings})


def hybrid_model(family: str, **settings: Any) -> Any:
    """A model with random weights whose states matter: what is left of earlier tokens changes its logits visibly."""
    set_seed(0)
    model = AutoModelForCausalLM.from_config(hybrid_config(family, **settings)).eval().float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "conv" in name and name.endswith("weight"):
                weight.mul_(0.5 / weight.std())
            elif "proj" in name and "dt_proj" not in name and weight.dim() > 1:
                weight.mul_(0.15 / weight.std())
    return model
