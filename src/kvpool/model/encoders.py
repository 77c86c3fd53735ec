"""Encoder-decoder models: the encoder reads an input once, and the decoder runs in flattened steps.

Each decoder layer attends twice: over the tokens before, and over what the encoder made of its input. The second kind of
attention is numbered behind all layers of the first: in a decoder of 6 layers, those of the encoder's input are 6 to 11.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.checks import show
from kvpool.errors import InvalidArgumentError, StepError, UnsupportedModelError
from kvpool.model.hook import ATTENTION_NAME, Attend, AttentionCall, attending, register
from kvpool.model.positions import counts_by_itself, placed, use_positions
from kvpool.model.vision import as_taken, content_hash
from kvpool.pools.arrays import Int32Array

_AUDIO = frozenset({"whisper"})  # families whose encoder takes sound, all of one length


class EncoderInput(NamedTuple):
    """What the encoder reads for one request."""

    key: str  # a hash of its content
    num_tokens: int  # that the decoder attends to
    inputs: Mapping[str, Tensor]  # what the encoder takes


class InputEncoder:
    """The encoder of an encoder-decoder model. Any thread may ask for `input`; only the engine's calls the others."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.family: str = model.config.model_type
        self.hears = self.family in _AUDIO
        encoder = model.get_encoder()
        self.max_tokens: int | None = getattr(encoder, "max_source_positions", None)
        if self.hears:
            self.sound_shape = 1, model.config.num_mel_bins, _num_frames(encoder)

    def input(self, given: Mapping[str, Any]) -> EncoderInput:
        """The input of the encoder from what a tokenizer or a processor gave for one prompt."""
        name = "input_features" if self.hears else "input_ids"
        if unknown := sorted(given.keys() - {name, "attention_mask", "token_type_ids"}):
            raise InvalidArgumentError(f"the encoder of {self.family} takes {name}; got {unknown[0]}, too")
        if given.get(name) is None:
            remedy = "audio=..., or input_features of its feature extractor" if self.hears else name
            raise InvalidArgumentError(f"the encoder of {self.family} takes {remedy}; got {show(sorted(given))}")
        inputs = {name: self._sound(given[name]) if self.hears else self._text(given[name])}
        num_tokens = self.max_tokens if self.hears else inputs[name].shape[1]
        assert num_tokens is not None
        return EncoderInput(content_hash(inputs), num_tokens, inputs)

    def _text(self, tokens: Int32Array) -> Tensor:
        if self.max_tokens is not None and len(tokens) > self.max_tokens:
            raise InvalidArgumentError(
                f"the prompt has {len(tokens)} tokens, the encoder of {self.family} reads up to {self.max_tokens}"
            )
        return torch.from_numpy(tokens.astype(np.int64))[None]

    def _sound(self, features: Any) -> Tensor:
        found = torch.as_tensor(features, dtype=torch.float32)
        found = found[None] if found.ndim == 2 else found
        if found.shape != self.sound_shape:
            raise InvalidArgumentError(
                f"input_features of {self.family} must have the shape {self.sound_shape}, got {tuple(found.shape)}; "
                "give what the feature extractor makes of one clip"
            )
        return found

    @torch.inference_mode()
    def encode(self, source: EncoderInput) -> Tensor:
        """The hidden states [token, hidden size] of an input, on the model's device."""
        model = self._model
        hidden: Tensor = model.get_encoder()(**as_taken(model, source.inputs)).last_hidden_state[0]
        if len(hidden) != source.num_tokens:
            raise StepError(f"the encoder of {self.family} gave {len(hidden)} tokens for {source.num_tokens}")
        return hidden

    @torch.inference_mode()
    def keys_and_values(self, hidden: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values [token, head, dim] of the encoder's tokens, by the number of the layer that attends to them."""
        found: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(call: AttentionCall) -> Tensor:
            if call.across:
                found[call.layer] = call.k, call.v
            return call.q.new_zeros(*call.q.shape[:2], call.v.shape[-1])

        first = torch.zeros(1, dtype=torch.int64, device=hidden.device)
        decode(self._model, first, first, first[:0], attend, hidden)
        return found


# --- steps of the decoder ---------------------------------------------------------------------------------------------


def decode(
    model: Any, input_ids: Tensor, positions: Tensor, keep: Tensor | None, attend: Attend, hidden: Tensor | None = None
) -> Tensor:
    """Logits [row of `keep`, vocabulary] of one flattened step of the decoder.

    `attend` has the keys and values of the encoder's tokens. The model computes some from `hidden`, too, by default of one
    token, which nobody reads.
    """
    from transformers.modeling_outputs import BaseModelOutput

    if hidden is None:
        hidden = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=input_ids.device)
    with attending(attend), placed(positions), _only(model, keep):
        output = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden.unsqueeze(0)),
            decoder_input_ids=input_ids.unsqueeze(0),
            use_cache=False,
        )
    logits: Tensor = output.logits[0]
    return logits


@contextmanager
def _only(model: Any, keep: Tensor | None) -> Iterator[None]:
    """Lets the head compute the logits of some tokens only."""
    if keep is None:
        yield
        return

    def choose(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (args[0].index_select(1, keep), *args[1:]), kwargs

    with _hooked(model.get_output_embeddings(), choose):
        yield


@contextmanager
def _hooked(module: Any, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


# --- making a model ready ---------------------------------------------------------------------------------------------


def prepare(model: Any, source: EncoderInput) -> None:
    """Makes the decoder of a model attend through kvpool, and leaves the encoder as it is. The model stays so.

    `source` is any input of the encoder: a forward shows which modules attend to it.
    """
    decoder = model.get_decoder()
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}) does not compute attention through transformers' "
            "AttentionInterface, so no paged cache can serve it"
        )
    table = getattr(decoder, "embed_positions", None)
    if table is not None and not counts_by_itself(decoder):
        raise UnsupportedModelError(
            f"the decoder of {type(model).__name__} ({model.config.model_type}) finds out positions by itself "
            f"({type(table).__name__}): sequences cannot share a step"
        )
    own = copy.deepcopy(decoder.config)  # some decoders have that of the encoder
    for module in decoder.modules():
        if getattr(module, "config", None) is not None:
            module.config = own
    across = _across(model, decoder, source)
    num_layers = len(across)
    for module in decoder.modules():
        if hasattr(module, "layer_idx"):
            module.attends_across = module in across
            if module.attends_across:
                module.layer_idx += num_layers
            elif hasattr(module, "compute_bias"):
                module.compute_bias = _by_distance(module)
    use_positions(decoder)
    register()
    set_decoder_attention(model, ATTENTION_NAME)


def set_decoder_attention(model: Any, name: str) -> None:
    """Sets the attention of a decoder that was made ready."""
    model.get_decoder().config._attn_implementation_internal = name


def _across(model: Any, decoder: Any, source: EncoderInput) -> set[Any]:
    """The modules of a decoder that attend to the encoder's tokens."""
    found: set[Any] = set()

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(kwargs.get(name) is not None for name in ("key_value_states", "encoder_hidden_states")):
            found.add(module)

    with ExitStack() as stack, torch.no_grad():
        for module in decoder.modules():
            if hasattr(module, "layer_idx"):
                stack.enter_context(_hooked(module, note))
        first = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(**as_taken(model, source.inputs), decoder_input_ids=first, use_cache=False)
    layers = [module.layer_idx for module in decoder.modules() if hasattr(module, "layer_idx")]
    if not found or sorted(layers) != sorted([*range(len(found))] * 2):
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}): {len(found)} modules of its decoder attend to the encoder, "
            f"of {len(layers)} that attend; needed are one for its own tokens and one for the encoder's in each layer"
        )
    return found


def _by_distance(module: Any) -> Callable[..., Tensor]:
    """In place of `compute_bias` of T5: while kvpool attends, the biases [1, head, 1, distance] of keys before a query."""
    compute = module.compute_bias
    num_distances = module.relative_attention_max_distance + 1  # all that are farther have the bias of the last

    def compute_bias(*args: Any, **kwargs: Any) -> Tensor:
        if module.config._attn_implementation != ATTENTION_NAME:
            biases: Tensor = compute(*args, **kwargs)
        else:
            biases = compute(1, num_distances, past_seen_tokens=num_distances - 1).flip(-1)
        return biases

    return compute_bias


def _num_frames(encoder: Any) -> int:
    """How many frames the encoder of Whisper takes, which it makes fewer of in two convolutions."""
    return int(encoder.config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0])
