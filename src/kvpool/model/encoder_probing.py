"""Finds out what an encoder-decoder model needs of the cache, and refuses models that would run wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpool.errors import UnsupportedModelError
from kvpool.model.encoders import EncoderInput, InputEncoder, decode, prepare, set_decoder_attention
from kvpool.model.hook import ATTENTION_NAME, Attend, AttentionCall
from kvpool.model.probing import ModelShape, common_dtype, errors_of, layer_shape
from kvpool.model.self_check import (
    CachedLayers,
    ContiguousAttention,
    attention,
    flattened_logits,
    random_texts,
    require_close,
)

_TEXT_LENGTHS = (24, 16)  # tokens of the self-check: of the decoder, and of the encoder if it reads text
_SOURCE_LENGTHS = (11, 7)


def inspect_encoder_decoder(model: Any, encoder: InputEncoder) -> ModelShape:
    """The shape of an encoder-decoder model, which from then on runs through `forward`. It changes the model.

    Raises UnsupportedModelError, which names what is missing, if its decoder cannot attend over paged memory, or fails a
    self-check: its logits in flattened steps must equal those of its own eager attention, for two inputs of the encoder.
    """
    with errors_of(model), torch.no_grad():
        if model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no language-model head; load it with AutoModelForSeq2SeqLM"
            )
        if model.main_input_name != ("input_features" if encoder.hears else "input_ids"):
            raise UnsupportedModelError(
                f"the encoder of {type(model).__name__} takes {model.main_input_name}; it must be text, or "
                "Whisper's sound"
            )
        sources = [_random_source(model, encoder, seed) for seed in range(len(_SOURCE_LENGTHS))]
        prepare(model, sources[0])
        shape = _shape_of(model)
        _check_against_eager(model, encoder, sources)
    return shape


def _random_source(model: Any, encoder: InputEncoder, number: int) -> EncoderInput:
    generator = torch.Generator().manual_seed(number)
    if encoder.hears:
        return encoder.input({"input_features": torch.randn(encoder.sound_shape, generator=generator)})
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(size, (_SOURCE_LENGTHS[number],), generator=generator)
    return encoder.input({"input_ids": ids.numpy().astype(np.int32)})


def _shape_of(model: Any) -> ModelShape:
    """The shape of a model whose decoder was made ready, from the tensors of a probe."""
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> Tensor:
        calls.append(call)
        return call.q.new_zeros(*call.q.shape[:2], call.v.shape[-1])

    tokens = torch.arange(3, device=model.device)
    logits = decode(model, tokens, tokens, None, attend)
    calls.sort(key=lambda call: call.layer)
    return ModelShape(
        family=model.config.model_type,
        layers=tuple(layer_shape(model, call) for call in calls),
        dtype=common_dtype(model, calls),
        vocab_size=logits.shape[-1],
        max_positions=getattr(model.get_decoder(), "max_target_positions", None),
        attending=tuple(call.layer for call in calls),
    )


class _WithEncoder(ContiguousAttention):
    """Attention in plain torch over contiguous keys and values, also over those of an encoder's tokens."""

    def __init__(self, encoded: Sequence[dict[int, tuple[Tensor, Tensor]]]) -> None:
        super().__init__()
        self._encoded = encoded  # by sequence and layer

    def step(self, num_tokens: dict[int, int]) -> Attend:
        before = super().step(num_tokens)

        def attend(call: AttentionCall) -> Tensor:
            if not call.across:
                return before(call)
            queries = zip(num_tokens, torch.split(call.q, list(num_tokens.values())), strict=True)
            parts = [attention(call, q, *self._encoded[number][call.layer], causal=False) for number, q in queries]
            return torch.cat(parts)

        return attend


def _check_against_eager(model: Any, encoder: InputEncoder, sources: Sequence[EncoderInput]) -> None:
    """Raises UnsupportedModelError unless flattened steps with our attention give the logits of its own eager attention."""
    from transformers.modeling_outputs import BaseModelOutput

    longest = getattr(model.get_decoder(), "max_target_positions", None)
    texts = random_texts(model, [min(length, longest or length) for length in _TEXT_LENGTHS], [0, 0])
    hidden = [encoder.encode(source) for source in sources]
    reads = _WithEncoder([encoder.keys_and_values(states) for states in hidden])
    got = flattened_logits(model, texts, CachedLayers(frozenset(), {}), reads)
    set_decoder_attention(model, "eager")
    try:
        outputs = [
            model(
                encoder_outputs=BaseModelOutput(last_hidden_state=states[None]),
                decoder_input_ids=text.token_ids[None],
                use_cache=False,
            )
            for states, text in zip(hidden, texts, strict=True)
        ]
    finally:
        set_decoder_attention(model, ATTENTION_NAME)
    expected = torch.cat([output.logits[0] for output in outputs])
    reason = "it masks, keeps or mixes something that attention over cached K and V does not see"
    require_close(model, got, expected, reason)
