"""Tiny random models that take images, one for each family, and the inputs that a processor would make for them."""

from __future__ import annotations

from typing import Any

import torch

IMAGE, VIDEO = 190, 191  # placeholder tokens
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 192, "vision_end_token_id": 193}
_GRID = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3 = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        "image_token_id": IMAGE,
        "vision_feature_layer": -1,
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, "rope_parameters": _AXES},
        "vision_config": {**_GRID, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _AXES},
        "vision_config": {
            **_GRID,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": _AXES},
        "vision_config": {**_GRID, **_QWEN3, "num_position_embeddings": 64},
        **_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "rope_parameters": _AXES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        "vision_config": {**_GRID, **_QWEN3, "num_position_embeddings": 64},
        **_TOKENS,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": {"model_type": "pixtral", **_VISION, "image_size": 32, "head_dim": 16},
        "image_token_id": IMAGE,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": _VISION,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": _VISION,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "gemma3": {
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _VISION,
        "image_token_id": IMAGE,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
    },
    "paligemma": {
        "text_config": {"model_type": "gemma", "head_dim": 16, **_TEXT},
        "vision_config": {**_VISION, "projection_dim": 64},
        "projection_dim": 64,
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
    },
}
BOTH_WAYS = ("gemma3", "paligemma")  # whose image tokens see one another
SERVED = tuple(CONFIGS)


def vision_model(family: str, seed: int = 1) -> Any:
    """A model whose answers depend on its images: random weights of a larger spread than usual."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **CONFIGS[family])
    # sdpa drops PaliGemma's mask, because it hides nothing, and then attends causally
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
        if family == "gemma3":  # which transformers leaves at zero
            model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.5)
    return model.eval()


def picture(family: str, seed: int, wide: bool = False) -> dict[str, torch.Tensor]:
    """The pixels of one image as the family's processor gives them. A wide image has another shape where it may."""
    generator = torch.Generator().manual_seed(seed)
    if family.startswith("qwen"):
        grid = torch.tensor([[1, 4, 6 if wide else 4]])
        return {"pixel_values": torch.randn(int(grid.prod()), 3 * 2 * 16, generator=generator), "image_grid_thw": grid}
    if family == "mistral3":
        size = torch.tensor([[16, 24 if wide else 16]])
        return {"pixel_values": torch.randn(1, 3, *size[0].tolist(), generator=generator), "image_sizes": size}
    pixels = torch.randn(1, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels[None] if family in ("idefics3", "smolvlm") else pixels}


def placeholders(family: str, wide: bool = False) -> list[int]:
    """The tokens that stand for one image, with those around them."""
    if family.startswith("qwen"):
        return [192, *[IMAGE] * (6 if wide else 4), 193]
    if family == "mistral3":  # rows of tokens with a break behind each
        return [token for _ in range(2) for token in (*[IMAGE] * (3 if wide else 2), 194)]
    return [IMAGE] * {"llava": 16, "paligemma": 16}.get(family, 4)


def prompt(family: str, *parts: list[int] | int, wide: frozenset[int] = frozenset()) -> dict[str, torch.Tensor]:
    """What a processor gives for texts (lists of tokens) and images (their seeds), in this order."""
    tokens: list[int] = []
    pixels: list[dict[str, torch.Tensor]] = []
    for part in parts:
        if isinstance(part, int):
            tokens += placeholders(family, part in wide)
            pixels.append(picture(family, part, part in wide))
        else:
            tokens += part
    ids = torch.tensor([tokens])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pixels:
        axis = 1 if family in ("idefics3", "smolvlm") else 0
        given |= {name: _joined([each[name] for each in pixels], axis) for name in pixels[0]}
    if family.startswith("qwen"):
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    if family in BOTH_WAYS:  # PaliGemma's say what is prompt and what is the answer to learn
        given["token_type_ids"] = (ids == IMAGE).int() * (family == "gemma3")
    return given


def _joined(tensors: list[torch.Tensor], axis: int) -> torch.Tensor:
    """Tensors one after the other; images of different sizes are padded, as processors do."""
    if tensors[0].ndim < 4:
        return torch.cat(tensors, dim=axis)
    height, width = (max(tensor.shape[side] for tensor in tensors) for side in (-2, -1))
    padded = [
        torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1], 0, height - tensor.shape[-2]))
        for tensor in tensors
    ]
    return torch.cat(padded, dim=axis)


def tiny_processor() -> Any:
    """A processor of Llava for images of 16 x 16 pixels, with words w0, w1, ..."""
    import tokenizers
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(IMAGE)} | {"<image>": IMAGE}
    words |= {f"w{number}": number for number in range(IMAGE + 1, 200)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
    fast.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=fast,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=(
            "{% for m in messages %}w1 {% for part in m['content'] %}"
            "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}w2"
        ),
    )


def own_answer(model: Any, given: dict[str, torch.Tensor], count: int) -> list[int]:
    """What transformers' own greedy `generate` answers."""
    tokens = model.generate(**given, max_new_tokens=count, do_sample=False)
    answer: list[int] = tokens[0, given["input_ids"].shape[1] :].tolist()
    return answer
