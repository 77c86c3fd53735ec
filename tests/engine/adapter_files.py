"""Writes adapters as peft does, and merges them into models: what requests with an adapter must answer like."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    model: Any,
    targets: Sequence[str] = ALL,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    size: float = 1.0,
    **fields: Any,
) -> Path:
    """An adapter with random weights, large enough to change which token is the likeliest. `fields` are more of its file."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            inputs, outputs = sizes_of(module)
            own = (fields.get("rank_pattern") or {}).get(name.rpartition(".")[2], rank)
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(own, inputs, generator=generator) / inputs**0.5
            tensors[f"{key}.lora_B.weight"] = size * torch.randn(outputs, own, generator=generator) / own**0.5
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM", **fields}))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def sizes_of(module: Any) -> tuple[int, int]:
    outputs, inputs = module.weight.shape
    return (inputs, outputs) if isinstance(module, torch.nn.Linear) else (outputs, inputs)


def merged(model: Any, directory: Path) -> Any:
    """A copy of a model whose weights have an adapter in them."""
    result, config = copy.deepcopy(model), json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    for key in [key for key in tensors if key.endswith("lora_A.weight")]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        alpha = (config.get("alpha_pattern") or {}).get(name.rpartition(".")[2], config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        module = result.get_submodule(name)
        delta = scale * b @ a
        module.weight.data += delta if isinstance(module, torch.nn.Linear) else delta.T
    return result
