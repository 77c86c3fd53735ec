"""Tiny random encoder-decoder models, and what transformers' own `generate` answers."""

from __future__ import annotations

from typing import Any

import torch

_SMALL: dict[str, Any] = {"vocab_size": 120, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
_BART: dict[str, Any] = {
    **_SMALL,
    **{"d_model": 48, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "bos_token_id": 2, "decoder_start_token_id": 1},
}
_T5: dict[str, Any] = {
    **_SMALL,
    **{"d_model": 48, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "umt5": _T5,
    "bart": {**_BART, "max_position_embeddings": 96, "forced_eos_token_id": None, "tie_word_embeddings": False},
    "whisper": {
        **_BART,
        **{"num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 64},
        **{"suppress_tokens": None, "begin_suppress_tokens": None},
    },
}


_SPREAD = {"shared": 0.5, "embed_tokens": 0.5, "embed_positions": 1.0}


def encoder_model(family: str, seed: int = 1) -> Any:
    """A model whose answers depend on its encoder: random weights of a larger spread than usual."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    torch.manual_seed(seed)
    auto = AutoModelForSpeechSeq2Seq if family == "whisper" else AutoModelForSeq2SeqLM
    config = AutoConfig.for_model(family, **CONFIGS[family])
    model = auto.from_config(config, attn_implementation="eager")  # with sdpa, umt5 of transformers is not causal
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, _SPREAD.get(name.split(".")[-2], 0.3))
            if "encoder_attn.out_proj.weight" in name:  # or all tokens of an answer are the same
                parameter.mul_(0.3)
    return model.eval()


def sound(seed: int) -> torch.Tensor:
    """What the feature extractor of Whisper would give for a clip."""
    return torch.randn(1, 8, 60, generator=torch.Generator().manual_seed(seed))


def own_answer(model: Any, given: dict[str, Any], count: int, **options: Any) -> list[int]:
    """The tokens of transformers' own greedy `generate` behind those that the decoder begins with."""
    start = given.get("decoder_input_ids")
    inputs = {name: torch.as_tensor(value) for name, value in given.items()}
    usual: dict[str, Any] = {"max_new_tokens": count, "do_sample": False, "num_beams": 1}
    with torch.no_grad():
        from transformers import GenerationMixin

        tokens = GenerationMixin.generate(model, **inputs, **{**usual, **options})  # without Whisper's own around it
    num_begun = 1 if start is None else torch.as_tensor(start).shape[1]
    answer: list[int] = tokens[0, num_begun:].tolist()
    return answer
