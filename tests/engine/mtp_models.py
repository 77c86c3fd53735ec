"""Tiny models with MTP layers that often guess right, as directories: transformers loads such layers from files only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import _COMMON, _MLA, _MOE, WINDOW
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.modeling_layers import MtpModel

_VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
_KINDS = ["full_attention", "sliding_attention"]
FAMILIES = ("deepseek_v3", "glm4_moe", "kimi_k25", "step3p7")


def mtp_config(family: str, depth: int) -> Any:
    """The configuration of a tiny model with so many MTP layers."""
    mla = {**_COMMON, **_MLA, "num_mtp_layers": depth}
    experts = dict(n_routed_experts=4, head_dim=16, **_MOE)
    if family == "glm4_moe":
        own: dict[str, Any] = dict(first_k_dense_replace=1, n_group=1, topk_group=1, num_mtp_layers=depth)
        return AutoConfig.for_model(family, **_COMMON, **experts, **own)
    if family == "kimi_k25":
        text, tokens = (
            {"model_type": "deepseek_v3", **mla},
            ("image_token", "video_token", "vision_start", "vision_end"),
        )
        ids = {f"{name.removesuffix('_token')}_token_id": at for at, name in enumerate(tokens)}
        return AutoConfig.for_model(family, text_config=text, vision_config=_VISION, projection_hidden_size=32, **ids)
    if family == "step3p7":
        text = dict(
            **_COMMON,
            **experts,
            share_expert_dim=32,
            sliding_window=WINDOW,
            num_nextn_predict_layers=depth,
            layer_types=[*_KINDS, *(_KINDS * depth)[:depth]],
            mlp_layer_types=["dense", "sparse"] + ["dense"] * depth,
        )
        return AutoConfig.for_model(family, text_config=text, vision_config=_VISION, image_token_id=0)
    return AutoConfig.for_model(family, **mla)


def save_mtp_model(family: str, depth: int, directory: Path) -> tuple[Any, Any]:
    """Saves a model and its MTP layers, and returns both.

    The model's next token depends mostly on the newest one. So do the guesses of its MTP layers, but they also depend on
    everything else that they read.
    """
    torch.manual_seed(0)
    config = mtp_config(family, depth)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    size = config.get_text_config().hidden_size
    torch.manual_seed(1)
    layers = MtpModel(model, depth)
    layers.layers.apply(model._init_weights)
    with torch.no_grad():
        for part in (model.get_decoder().layers, layers.layers):
            for parameter in part.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(4)
        model.get_input_embeddings().weight.mul_(50)
        for layer in layers.layers:
            layer.eh_proj.weight.copy_(0.02 * torch.randn(size, 2 * size))
            layer.eh_proj.weight[:, :size] += torch.eye(size)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    weights = load_file(file)
    begin = "language_model.model" if family == "kimi_k25" else "model"
    for name, weight in layers.layers.state_dict().items():
        at, rest = name.split(".", 1)
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        number = config.get_text_config().num_hidden_layers + int(at)
        weights[f"{begin}.layers.{number}.{rest}"] = weight.contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    return model.eval().requires_grad_(False), layers.eval().requires_grad_(False)


@torch.no_grad()
def mtp_keys(model: Any, layers: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """The keys [token, head, dim] of each MTP layer for a text, computed in one forward by the layers themselves.

    A layer reads the hidden state of the token before; the first token has none before it, and zeros stand for it.
    """
    tokens = torch.tensor([token_ids])
    positions = torch.arange(len(token_ids))[None]
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    embedded, found = layers.embed_tokens(tokens), []
    for number, layer in enumerate(layers.layers):
        kind = getattr(layer.mtp_block, "attention_type", None)
        far = positions.T - positions
        hides = (far < 0) | (far >= (WINDOW if kind == "sliding_attention" else len(token_ids)))
        cache = DynamicCache()
        hidden = layer(
            embedded,
            functional.pad(hidden[:, :-1], (0, 0, 1, 0)),
            position_embeddings=layers.rotary_emb(embedded, positions, *([kind] if kind else [])),
            attention_mask=torch.zeros(hides.shape).masked_fill(hides, -torch.inf)[None, None],
            position_ids=positions,
            past_key_values=cache,
        )
        found.append(cache.layers[number].keys[0].transpose(0, 1))
    return found
