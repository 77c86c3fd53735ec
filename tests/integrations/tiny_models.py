"""Small random models on disk, for engines whose answers only have to be the same: `write(kind, directory)`.

Their weights are drawn wide, so that every answer depends on the whole prompt: a wrong page shows after a token or two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512

COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(num_hidden_layers=3)),
    # Layers with a sliding window beside those with full attention.
    "gemma2": ("Gemma2", dict(num_hidden_layers=4, sliding_window=96, query_pre_attn_scalar=32)),
    "gemma3": (
        "Gemma3",
        dict(num_hidden_layers=6, sliding_window=96, query_pre_attn_scalar=32, sliding_window_pattern=3),
    ),
    "gpt_oss": (
        "GptOss",
        dict(num_hidden_layers=4, sliding_window=128, num_local_experts=4, num_experts_per_tok=2, head_dim=64),
    ),
    # Other frequencies of its positions where texts may have more than 256 tokens.
    "phi3": (
        "Phi3",
        dict(
            num_hidden_layers=2,
            hidden_size=128,
            original_max_position_embeddings=256,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                original_max_position_embeddings=256,
                short_factor=[1.0] * 16,
                long_factor=[1.0 + number for number in range(16)],
            ),
        ),
    ),
    # Latents: 512 numbers of all heads together, and 64 with positions.
    "deepseek_v2": (
        "DeepseekV2",
        dict(
            num_hidden_layers=3,
            num_attention_heads=16,
            num_key_value_heads=16,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            first_k_dense_replace=3,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            num_hidden_layers=3,
            num_attention_heads=16,
            num_key_value_heads=16,
            kv_lora_rank=512,
            q_lora_rank=96,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            first_k_dense_replace=3,
        ),
    ),
    # Layers that keep a state beside full attention: short convolutions, the gated delta rule, Mamba 2.
    "lfm2": (
        "Lfm2",
        dict(
            num_hidden_layers=4,
            full_attn_idxs=[1, 3],
            block_auto_adjust_ff_dim=False,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
    ),
    "qwen3_next": (
        "Qwen3Next",
        dict(
            num_hidden_layers=4,
            linear_conv_kernel_dim=4,
            linear_num_value_heads=2,
            linear_num_key_heads=1,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            num_attention_heads=2,
            head_dim=256,  # a block must have as many bytes as a state
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
    ),
    "falcon_h1": (
        "FalconH1",
        dict(
            num_hidden_layers=3, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=64
        ),
    ),
    "minimax_m2": (
        "MiniMaxM2",
        dict(num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2, rotary_dim=32, use_qk_norm=True),
    ),
}
"""For each kind the beginning of its class in transformers, and its settings besides `COMMON`."""


def write(kind: str, directory: Path, seed: int = 7) -> str:
    """Writes a model of one of `KINDS` and returns its directory."""
    import torch
    import transformers

    torch.manual_seed(seed)
    name, given = KINDS[kind]
    given = {**COMMON, "tie_word_embeddings": name in ("Gemma2", "Gemma3"), **given}
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(config(**given))
    with torch.no_grad():
        for weight, values in model.named_parameters():
            if "norm" not in weight:
                values.normal_(0.0, 1.0 if "embed" in weight or "lm_head" in weight else 0.25)
            elif name == "Gemma2" and "post_" in weight:
                values.fill_(15.0)  # what layers add must outweigh the embedding, which is the output's too
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["torch_dtype"] = "float32"
    if kind == "lfm2":  # what vLLM reads and transformers does not write
        sizes = dict(block_dim=64, conv_dim=64, conv_dim_out=64, block_ff_dim=128, block_multiple_of=16)
        config |= sizes | dict(block_auto_adjust_ff_dim=False, block_ffn_dim_multiplier=1.0)
    if kind == "minimax_m2":
        config |= dict(scoring_func="sigmoid", use_routing_bias=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def write_adapter(directory: Path, seed: int, alpha: int = 16) -> str:
    """A LoRA adapter of the `llama` kind, as files of peft; returns its directory."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    directory.mkdir(exist_ok=True)
    rank, width, outputs = 8, COMMON["hidden_size"], {"q_proj": 128, "v_proj": 64}
    weights = {}
    for layer in range(3):
        for name, size in outputs.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(rank, width) * 0.3
            weights[f"{place}.lora_B.weight"] = torch.randn(size, rank) * 0.3
    save_file(weights, directory / "adapter_model.safetensors")
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, bias="none")
    (directory / "adapter_config.json").write_text(json.dumps(config | {"target_modules": list(outputs)}))
    return str(directory)
