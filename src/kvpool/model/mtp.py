"""The MTP layers of a model as models of their own: each guesses one token further than the one before it.

An MTP layer reads the embedding of a token and, beside it, what was computed for the token before: by the model's last layer,
or by the MTP layer before it. Embeddings and the language-model head are those of the model. transformers loads these layers
for `generate(use_mtp=True)`; here they run as the layers of any other model do.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvpool.errors import UnsupportedModelError
from kvpool.model.loading import LoadedModel, ModelInfo, _no_progress_bars, _one_line
from kvpool.model.private_copy import private_copy


class MtpHead(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """One MTP layer with the embeddings and the head of its model, as a causal model.

    `previous` [row, size] holds what was computed for the token before each token of the next step, in memory that stays:
    a CUDA graph reads it. Without it, these are zeros.
    """

    _supports_sdpa = True

    def __init__(self, layers: Any, number: int) -> None:
        super().__init__(layers.config)
        self.layers = torch.nn.ModuleList([layers.layers[number]])
        self.embed_tokens, self.lm_head, self.rotary_emb = layers.embed_tokens, layers.shared_head, layers.rotary_emb
        self.previous: Tensor | None = None
        module: Any
        for module in self.layers.modules():  # a model of one layer
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0
        self.eval()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Its block is one of its model, which can."""
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_input_embeddings(self) -> Any:
        """Those of the model."""
        return self.embed_tokens

    def get_output_embeddings(self) -> Any:
        """The language-model head of the model."""
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Any:
        """Logits of the tokens behind `input_ids` [1, token]."""
        embedded = self.embed_tokens(input_ids)
        previous = torch.zeros_like(embedded)
        if self.previous is not None:
            previous = self.previous[: input_ids.shape[1]].unsqueeze(0)
        layer = self.layers[0]
        kind = getattr(layer.mtp_block, "attention_type", "full_attention")
        mask = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[kind](
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=None,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        by_kind = (kind,) if "layer_type" in signature(self.rotary_emb.forward).parameters else ()
        hidden = layer(
            embedded,
            previous,
            position_embeddings=self.rotary_emb(embedded, position_ids, *by_kind),
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, kept]))


def load_mtp(loaded: LoadedModel) -> LoadedModel:
    """The MTP layers of a model, from its files; random ones if its own weights are. They share the model's embeddings."""
    model, info = loaded.model, loaded.info
    name = f"{type(model).__name__} ({info.name})"
    number = getattr(model.config.get_text_config(), "num_mtp_layers", None)
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise UnsupportedModelError("draft='mtp': this transformers loads no MTP layers; version 5.17 does") from None
    if not number:
        raise UnsupportedModelError(
            f"draft='mtp': transformers knows no MTP layers of {name}; give a smaller model with its vocabulary as draft"
        )
    if info.random_weights:
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.device(model.device):
            torch.manual_seed(1)
            layers = MtpModel(model, number).to(model.device, model.dtype)
            layers.layers.apply(model.get_decoder()._init_weights)  # MtpModel does not know how its blocks begin
    else:
        layers = _from_files(MtpModel, model, number, name)
    return LoadedModel(layers.eval().requires_grad_(False), None, ModelInfo(f"mtp of {info.name}", info.origin))


def _from_files(family: Any, model: Any, number: int, name: str) -> Any:
    """Reads MTP layers from the files of a model: they follow its own layers there."""
    twin, first = private_copy(model), model.config.get_text_config().num_hidden_layers
    # transformers looks for the layer numbers of the models that its authors know
    known = [*(twin._keys_to_ignore_on_load_unexpected or ())]
    twin._keys_to_ignore_on_load_unexpected = known + [rf"model\.layers\.{first + at}\." for at in range(number)]
    try:
        with _no_progress_bars():
            layers = family.from_pretrained(twin, device_map={"": model.device})
    except Exception as error:  # of transformers, over files that lack them
        raise UnsupportedModelError(
            f"draft='mtp': the files of {name} hold no MTP layers that transformers can load; give a smaller model with its "
            f"vocabulary as draft. transformers said: {_one_line(error)}"
        ) from error
    return layers.to(model.device, model.dtype)


def mtp_heads(layers: Any) -> Sequence[MtpHead]:
    """The MTP layers of an engine's copy, each as a model."""
    if layers.use_shared_post_norm:
        raise UnsupportedModelError("a norm that all MTP layers share is not served")
    layers.config.num_hidden_layers = 1
    return [MtpHead(layers, number) for number in range(len(layers.layers))]
