"""Mixtures of experts on a GPU: steps that decode, with our kernel for experts and with transformers' own.

    python benchmarks/experts_gpu.py [--layers 8] [--compile] [--json FILE]

Random weights, bfloat16, so many layers of the shapes of Qwen3 30B-A3B, gpt-oss 20B and Mixtral 8x7B with a vocabulary of
32,000; prompts of 128 tokens; milliseconds per step of 1, 8 and 64 sequences, the better of two runs. Beside them stands what
the kernel alone reaches of the memory's speed: the bytes of the chosen experts a second, for the first product of a layer.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kvpool.engine import Chunk, Engine, SamplingParams
from kvpool.kernels.experts_triton import expert_product_triton
from kvpool.model.loading import load_model
from kvpool.scheduling import SchedulerConfig

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3 30B-A3B": {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **{"intermediate_size": 6144, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    },
    "gpt-oss 20B": {
        **{"model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 2880},
        **{"sliding_window": 128},
    },
    "Mixtral 8x7B": {
        **{"model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336},
    },
}
BATCHES = (1, 8, 64)
NUM_TOKENS, COUNTED = 100, 60  # of each answer, and of its end


def step_milliseconds(model: Any, compile: bool) -> dict[int, float]:
    """What a step of each batch takes."""
    limits = SchedulerConfig(max_sequences=max(BATCHES), max_tokens_per_step=2048)
    params, found = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True), {}
    with Engine(model, kv_bytes=2**32, scheduler=limits, compile=compile) as engine:
        engine.warm_up()
        for batch in BATCHES:
            prompts = torch.randint(3, 32000, (batch, 128)).tolist()
            took = []
            for _ in range(2):
                times: list[float] = []

                def note(chunk: Chunk, times: list[float] = times) -> None:
                    times.append(time.perf_counter())

                running = [engine.submit(prompt, params, on_chunk=note) for prompt in prompts]
                for generation in running:
                    generation.result()
                last = sorted(times)[-batch * COUNTED :]
                took.append((last[-1] - last[0]) / (COUNTED - 1) * 1e3)
            found[batch] = min(took)
    return found


def kernel_terabytes(weights: torch.Tensor, per_token: int, num_tokens: int) -> float:
    """Bytes of chosen experts that the kernel reads a second, in a graph, over copies that no cache holds."""
    copies = [weights, weights.clone(memory_format=torch.preserve_format)]
    chosen = torch.stack([torch.randperm(len(weights))[:per_token] for _ in range(num_tokens)]).to(weights.device)
    x = torch.randn(num_tokens, weights.shape[2], device=weights.device, dtype=weights.dtype)
    expert_product_triton(x, weights, None, chosen)
    graph = torch.cuda.CUDAGraph()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph):
        for turn in range(20):
            expert_product_triton(x, copies[turn % 2], None, chosen)
    milliseconds: list[float] = []
    for _ in range(5):
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        milliseconds.append(began.elapsed_time(ended) / 20)
    num_bytes = len(set(chosen.flatten().tolist())) * weights[0].nbytes
    return num_bytes / min(milliseconds[1:]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        common = {"num_hidden_layers": given.layers, "vocab_size": 32000, "max_position_embeddings": 4096}
        model = load_model({**shape, **common}, device="cuda", dtype="bfloat16").model
        ours = step_milliseconds(model, given.compile)
        with patch("kvpool.engine.engine_parts.fuse_experts"):
            plain = step_milliseconds(model, given.compile)
        experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
        weights = experts.gate_up_proj.transpose(1, 2) if experts.is_transposed else experts.gate_up_proj
        per_token = shape["num_experts_per_tok"]
        reads = {batch: kernel_terabytes(weights, per_token, batch) for batch in BATCHES}
        results[name] = {"ours": ours, "transformers": plain, "kernel": reads}
        for batch in BATCHES:
            line = f"{name}, batch {batch}: {ours[batch]:.2f} ms a step, with transformers' experts {plain[batch]:.2f}"
            print(
                f"{line} ({plain[batch] / ours[batch]:.2f} times); the kernel reads {reads[batch]:.2f} TB/s", flush=True
            )
        del model, experts, weights
        torch.cuda.empty_cache()
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
