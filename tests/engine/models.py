"""Tiny models with random weights, one configuration per architecture: a forward takes milliseconds on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WINDOW = 24
CHOSEN = 8  # tokens that an indexer chooses for each query; its heads are many, so that no two scores are zero

_COMMON: dict[str, Any] = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
_GPT: dict[str, Any] = dict(
    vocab_size=160,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=512,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
_SLIDING_AND_FULL = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW)
_MOE = dict(num_experts_per_tok=2, moe_intermediate_size=32)
_MLA = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    num_key_value_heads=4,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    **_MOE,
)
_MAMBA = dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16)

# The settings beyond those that all share. Layer types are written out where the default needs more than two layers.
SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(head_dim=24, sliding_window=WINDOW),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2": dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": dict(head_dim=16),
    "qwen3_moe": dict(head_dim=16, num_experts=4, **_MOE),
    "gemma2": dict(head_dim=16, query_pre_attn_scalar=24, attn_logit_softcapping=5.0, **_SLIDING_AND_FULL),
    "gemma3_text": dict(head_dim=16, query_pre_attn_scalar=24, **_SLIDING_AND_FULL),
    "phi3": dict(sliding_window=WINDOW),
    "gpt_oss": dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, **_SLIDING_AND_FULL),
    "gpt2": _GPT,
    "gpt_neox": {},
    "opt": dict(ffn_dim=96, word_embed_proj_dim=64),
    "stablelm": {},
    "deepseek_v3": _MLA,
    "deepseek_v32": dict(index_head_dim=16, index_n_heads=16, index_topk=CHOSEN, **_MLA),
    "glm_moe_dsa": dict(
        index_head_dim=16, index_n_heads=16, index_topk=CHOSEN, indexer_types=["full", "shared"], **_MLA
    ),
    "olmo2": {},
    "granite": dict(attention_multiplier=0.4),
    "starcoder2": dict(sliding_window=WINDOW),
    "cohere2": dict(head_dim=16, **_SLIDING_AND_FULL),
    "smollm3": {},
    "glm4": dict(head_dim=16),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.4),
    "nemotron": {},
    "ministral3": dict(head_dim=16, sliding_window=None),
    "phimoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "llama4_text": dict(
        head_dim=16,
        intermediate_size_mlp=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 0],
        floor_scale=16,  # so that queries grow every 16 tokens
        attn_scale=1.0,
        layer_types=["chunked_attention", "full_attention"],
    ),
}

# Supported, too, though their modules compute attention by themselves.
BY_THEMSELVES: dict[str, dict[str, Any]] = {
    "gptj": dict(rotary_dim=8, **_GPT),
    "codegen": dict(rotary_dim=8, **_GPT),
    "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=WINDOW),
    "gpt_neox_japanese": {},
    "falcon": {},
}

# Supported, too: position embeddings of models that count tokens by themselves, or from another number without `generate`.
_DECODER = dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, d_model=64, is_decoder=True)
COUNTED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["bart", "bigbird_pegasus", "marian"], _DECODER),
    "roberta": dict(is_decoder=True),
}

REFUSED: dict[str, dict[str, Any]] = {
    "bloom": dict(vocab_size=160, hidden_size=64, n_layer=2, n_head=4),
    "mpt": dict(vocab_size=160, d_model=64, n_heads=4, n_layers=2, max_seq_len=512),
    "lfm2": dict(layer_types=["conv", "full_attention"], block_ff_dim=64),
    "diffllama": {},
    "qwen3_next": dict(
        head_dim=16,
        num_experts=4,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        shared_expert_intermediate_size=32,
        **_MOE,
    ),
    "falcon_h1": dict(head_dim=16, **_MAMBA),
    "mamba": dict(state_size=8),
}
_OWN_NAMES = frozenset({"gpt2", "gptj", "codegen", "bloom", "mpt"})  # whose settings are called otherwise


def tiny_config(family: str, **settings: Any) -> Any:
    """The configuration of a tiny model of this `model_type`; `settings` go before those of the table."""
    shared = {} if family in _OWN_NAMES else _COMMON
    return AutoConfig.for_model(
        family, **{**shared, **{**SUPPORTED, **BY_THEMSELVES, **COUNTED, **REFUSED}[family], **settings}
    )


def tiny_model(family: str, *, seed: int = 0, spread: float = 8.0, **settings: Any) -> Any:
    """A tiny random model, float32, in eval mode, with eager attention: sdpa forgets Gemma 2's soft cap.

    Random weights as transformers draws them make attention nearly uniform and layers nearly the identity; `spread` makes
    matrices larger, so that what attention sees decides which token is next.
    """
    torch.manual_seed(seed)
    config = tiny_config(family, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name:
                parameter.mul_(spread)
            if "sinks" in name:
                parameter.normal_(std=2.0)
    return model.eval().requires_grad_(False)


def random_prompt(length: int, *, seed: int = 0, vocab_size: int = 160) -> torch.Tensor:
    """Token ids [length] without the special ones."""
    return torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
