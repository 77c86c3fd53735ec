"""Writes a tiny Llama as a GGUF file, the way llama.cpp lays it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from models import tiny_model

TOKENS = ["<unk>", "<s>", "</s>", "w", "a", "b", "wa", "wb", *(f"unused{i}" for i in range(152))]
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_llama(path: Path, **tokenizer_fields: Any) -> Any:
    """Writes the file and returns the model that is in it; `tokenizer_fields` such as add_bos_token go into the header."""
    import gguf

    model = tiny_model("llama")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["w a", "w b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, value in tokenizer_fields.items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(*_as_llama_cpp(name, tensor.numpy(), config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _as_llama_cpp(name: str, tensor: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in plain:
        return f"{plain[stem]}.weight", tensor
    _, _, layer, part = stem.split(".", 3)
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}.get(part)
    if heads is not None:  # rotary pairs stand side by side there, half a head apart here
        halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
        tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight", tensor
