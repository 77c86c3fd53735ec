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


def write(kind: str, directory: Path, seed: int = 7) -> str:
    """Writes a model of a kind (`llama`, `gemma2`, `lfm2`, `phi3`, `qwen3_next`) and returns its directory."""
    import torch
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        Lfm2Config,
        Lfm2ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Phi3Config,
        Phi3ForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    torch.manual_seed(seed)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **COMMON))
    elif kind == "phi3":  # other frequencies of its positions where texts may have more than 256 tokens
        factors = dict(short_factor=[1.0] * 16, long_factor=[1.0 + number for number in range(16)])
        rope = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=256, **factors)
        given = {**COMMON, "hidden_size": 128, "original_max_position_embeddings": 256}
        model = Phi3ForCausalLM(Phi3Config(num_hidden_layers=2, rope_parameters=rope, **given))
    elif kind == "lfm2":  # short convolutions, which keep a state, beside attention
        given = {**COMMON, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = Lfm2ForCausalLM(
            Lfm2Config(num_hidden_layers=4, full_attn_idxs=[1, 3], block_auto_adjust_ff_dim=False, **given)
        )
    elif kind == "qwen3_next":  # three layers with the gated delta rule, then attention
        heads = dict(
            linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=128, linear_value_head_dim=128
        )
        experts = dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
        )
        given = {**COMMON, "num_attention_heads": 2, "head_dim": 256}  # a block must have as many bytes as a state
        model = Qwen3NextForCausalLM(
            Qwen3NextConfig(num_hidden_layers=4, linear_conv_kernel_dim=4, **heads, **experts, **given)
        )
    else:
        model = Gemma2ForCausalLM(
            Gemma2Config(
                num_hidden_layers=4,
                sliding_window=96,
                query_pre_attn_scalar=32,
                **{**COMMON, "tie_word_embeddings": True},
            )
        )
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" not in name:
                weights.normal_(0.0, 1.0 if "embed" in name or "lm_head" in name else 0.25)
            elif kind == "gemma2" and "post_" in name:
                weights.fill_(15.0)  # what layers add must outweigh the embedding, which is the output's too
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["torch_dtype"] = "float32"
    if kind == "lfm2":  # what vLLM reads and transformers does not write
        sizes = dict(block_dim=64, conv_dim=64, conv_dim_out=64, block_ff_dim=128, block_multiple_of=16)
        config |= sizes | dict(block_auto_adjust_ff_dim=False, block_ffn_dim_multiplier=1.0)
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
