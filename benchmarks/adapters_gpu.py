"""Decoding with LoRA adapters beside decoding without: a batch of 64 requests over 16 adapters of rank 16.

python benchmarks/adapters_gpu.py            # the shape of Llama 3.1 8B with random weights, on a GPU
python benchmarks/adapters_gpu.py --tiny     # two small layers, on a CPU: whether it runs
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from kvpool.engine import Engine, SamplingParams
from kvpool.model.loading import load_model
from kvpool.scheduling import SchedulerConfig

BATCH, ADAPTERS, RANK = 64, 16, 16
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(directory: Path, model: Any) -> Path:
    """An adapter for all linear layers, with random weights."""
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            outputs, inputs = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inputs, device=model.device) / 64
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, RANK, device=model.device) / 64
    directory.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {key: tensor.to(model.dtype).cpu() for key, tensor in tensors.items()}, directory / "adapter_model.safetensors"
    )
    return directory


def tokens_per_second(engine: Engine, names: list[str | None], num_tokens: int, seed: int) -> float:
    """New tokens a second of a full batch."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    prompts = torch.randint(3, 1000, (BATCH, 64), generator=torch.Generator().manual_seed(seed)).tolist()
    began = time.perf_counter()
    each = zip(prompts, names, strict=True)
    running = [engine.submit(prompt, params, adapter=name) for prompt, name in each]
    for generation in running:
        generation.result()
    return BATCH * num_tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7, help="of all cases, one after another; medians are shown")
    given = parser.parse_args()
    shape = TINY if given.tiny else LARGE
    model = load_model({"model_type": "llama", "vocab_size": 32000, "num_key_value_heads": 8, **shape}).model
    limits = SchedulerConfig(max_sequences=BATCH, max_tokens_per_step=512)
    options: dict[str, Any] = {"kv_bytes": 2**26 if given.tiny else 2**33, "scheduler": limits}
    none = "without adapters"
    with tempfile.TemporaryDirectory() as directory, Engine(model, **options) as plain:
        plain.warm_up()
        paths = {f"a{i}": write_adapter(Path(directory) / f"a{i}", model) for i in range(ADAPTERS)}
        began = time.perf_counter()
        with Engine(model, **options, adapters=paths, max_adapters=ADAPTERS) as engine:
            engine.warm_up()
            print(f"engine with {ADAPTERS} adapters: ready in {time.perf_counter() - began:.1f} s", flush=True)
            cases: dict[str, tuple[Engine, list[str | None]]] = {
                none: (plain, [None] * BATCH),
                "rows of no adapter": (engine, [None] * BATCH),
                "rows of one adapter": (engine, ["a0"] * BATCH),
                f"rows of {ADAPTERS} adapters": (engine, [f"a{i % ADAPTERS}" for i in range(BATCH)]),
            }
            speeds: dict[str, list[float]] = {name: [] for name in cases}
            for turn in range(given.rounds + 1):  # the first one warms up
                for name, (chosen, names) in cases.items():
                    speed = tokens_per_second(chosen, names, given.tokens, turn)
                    if turn:
                        speeds[name].append(speed)
    for name, found in speeds.items():
        ratios = [speed / base for speed, base in zip(found, speeds[none], strict=True)]
        print(
            f"{name}: {median(found):.0f} tokens/s, {median(ratios):.3f} times ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
