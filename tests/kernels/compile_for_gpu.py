"""Compiles the kernels for an H100 or H200 as the product launches them, on a machine without a GPU.

Run by `test_compilation.py` in a process of its own, in which Triton's interpreter is off. Prints a line for every kernel
that was compiled: its name, the case, and its shared memory in bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "attention"))

from paged_cases import poisoned_layer, spec

from kvpool.attention import AttentionBackend, AttentionSpec, PagedBatch
from kvpool.attention.triton_backend import TritonBackend
from kvpool.config.layers import INDEX, DType
from kvpool.kernels.convolution_triton import convolve_one_triton, convolve_triton
from kvpool.kernels.copy_triton import copy_blocks_triton, copy_tokens_triton, copy_words
from kvpool.kernels.experts_triton import expert_product_triton
from kvpool.kernels.layout import PackedStates, Runs, Selection, SlotStates, SteppedStates, StoredPart
from kvpool.kernels.lora import empty_weights
from kvpool.kernels.lora_triton import add_lora_triton
from kvpool.kernels.quantization import TORCH_DTYPES
from kvpool.kernels.sparse import Choice
from kvpool.kernels.states_triton import (
    delta_rule_one_triton,
    delta_rule_steps_triton,
    select_one_triton,
    select_steps_triton,
)
from kvpool.kernels.write_triton import write_slots_triton

HALF: dict[str, Any] = {"dtype": DType.BFLOAT16, "kv_dtype": DType.BFLOAT16}
SPECS = {
    "llama": spec(32, 8, 128, **HALF),
    "llama in fp8": spec(32, 8, 128, dtype=DType.BFLOAT16, kv_dtype=DType.FP8_E4M3),
    "llama in int8": spec(32, 8, 128, dtype=DType.BFLOAT16, kv_dtype=DType.INT8),
    "llama in int4": spec(32, 8, 128, dtype=DType.BFLOAT16, kv_dtype=DType.INT4),
    "gemma 2": spec(16, 8, 256, soft_cap=50.0, window=512, **HALF),
    "gpt-oss": spec(64, 8, 64, sink_logits=True, window=128, **HALF),
    "sinks and window": spec(8, 8, 64, window=64, sink_tokens=4, **HALF),
    "latent": spec(16, 1, 576, v_dim=512, values="k", **HALF),
    "latent of 128 heads": spec(128, 1, 576, v_dim=512, values="k", **HALF),
    "latent in fp8": spec(16, 1, 576, v_dim=512, values="k", dtype=DType.BFLOAT16, kv_dtype=DType.FP8_E4M3),
    "latent in int8": spec(16, 1, 576, v_dim=512, values="k", dtype=DType.BFLOAT16, kv_dtype=DType.INT8),
    "chosen latents": spec(128, 1, 576, v_dim=512, values="k", chosen=64, **HALF),
    "chosen latents in int8": spec(
        16, 1, 576, v_dim=512, values="k", chosen=64, dtype=DType.BFLOAT16, kv_dtype=DType.INT8
    ),
    "the widest heads": spec(4, 2, 1024),
}


class HopperWithoutOne:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def attend(
    kind: AttentionSpec,
    max_sequences: int | None = None,
    max_query_tokens: int | None = None,
    *,
    specialised: bool = False,
) -> None:
    """Decoding over divided keys, and a chunk of a prompt; or into buffers: decoding, or both with `max_query_tokens`."""
    backend = object.__new__(TritonBackend)  # its constructor wants a GPU
    AttentionBackend.__init__(backend, torch.device("cpu"))
    backend.num_sms, backend.specialised, backend._beside = 132, specialised, None
    query_lens = [1, 1 if max_sequences is not None and max_query_tokens is None else 200]
    batch = PagedBatch.build([0, 125, 150], list(range(150)), query_lens, [2000, 400], block_size=16)
    buffers = None
    if max_sequences is not None:
        sizes = {"max_sequences": max_sequences, "max_query_tokens": max_query_tokens, "max_blocks": 150}
        buffers = backend.reserve(kind, **sizes)
    plan = backend.plan(kind, batch, buffers)
    cache, choice = poisoned_layer(kind, 1, 16, "nhd", "cpu"), None
    tokens, options = max_query_tokens or max_sequences or 201, {"dtype": TORCH_DTYPES[kind.dtype]}
    q = torch.zeros(tokens, kind.q_heads, kind.head_dim, **options)
    sinks = torch.zeros(kind.q_heads) if kind.sink_logits else None
    if kind.chosen:  # by an indexer as DeepSeek's
        cache[INDEX] = StoredPart(kind.dtype, torch.zeros(150, 16, 1, 128, **options), 128)
        asked = torch.zeros(tokens, 64, 128, **options), torch.zeros(tokens, 1, 128, **options)
        choice = Choice(0, *asked, torch.zeros(tokens, 64), kind.chosen)
    backend.run(q, cache, plan, sink_logits=sinks, choice=choice)


def write(kind: AttentionSpec) -> None:
    given = {
        name: torch.zeros(3, kind.kv_heads, width, dtype=TORCH_DTYPES[kind.dtype]) for name, _, width in kind.reads
    }
    write_slots_triton(poisoned_layer(kind, 1, 16, "nhd", "cpu"), torch.zeros(3, dtype=torch.int32), given)


def copy() -> None:
    store, ids = torch.zeros(4, 4096, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
    copy_blocks_triton(store, store, ids, ids)
    copy_tokens_triton(store, store, ids, ids, ids, [Runs(0, 2048, 2, 128)])
    copy_words(ids, ids)


def update_states() -> None:
    """One token and some tokens of a layer of Qwen3-Next and of one of Falcon-H1; a chunk through their convolution."""
    half, rows = {"dtype": torch.bfloat16}, torch.zeros(2, dtype=torch.int64)

    def states(*shape: int, dtype: torch.dtype = torch.float32) -> SlotStates:
        return SlotStates(torch.zeros(3, *shape, dtype=dtype), rows, rows)

    x, inputs, taps = torch.zeros(2, 8192, **half), states(8192, 4, **half), torch.zeros(8192, 4, **half)
    convolve_one_triton(x, inputs, taps, None, True)
    packed = PackedStates(inputs.stored, rows, rows, torch.zeros(3, dtype=torch.int64), (100, 1))
    convolve_triton(x, packed, taps, taps[:, 0], True)

    def stepped(*shape: int) -> SteppedStates:
        return SteppedStates(torch.zeros(3, *shape), rows, rows, torch.zeros(3, dtype=torch.int64), rows)

    heads, numbers = torch.zeros(2, 32, 128, **half), torch.zeros(2, 32)
    for decay in (numbers, torch.zeros(2, 32, 128)):
        delta_rule_one_triton(heads, heads, heads, decay, numbers, states(32, 128, 128), True)
        delta_rule_steps_triton(heads, heads, heads, decay, numbers, stepped(32, 128, 128), True)
    channels, b = torch.zeros(1, 1).expand(24, 128), torch.zeros(2, 2, 256, **half)
    a, dt = channels[:, :, None].expand(-1, -1, 256), channels.expand(2, -1, -1)
    x = torch.zeros(2, 24, 128, **half)
    select_one_triton(x, Selection(dt, a, b, b, channels, channels, True), states(24, 128, 256), x)
    select_steps_triton(x.float(), Selection(dt, a, b, b, channels, None, False), stepped(24, 128, 256))
    a, b, channels = torch.zeros(1, 8192, 16), torch.zeros(2, 1, 16, **half), torch.zeros(2, 1, 8192, **half)
    select_one_triton(channels, Selection(channels, a, b, b, None, None, True), states(1, 8192, 16), None)


def add_adapters() -> None:
    """Q, K and V of Llama 3.1 8B, for decoding tokens and for prompts, with adapters of low and of high ranks."""
    sizes = (4096, 1024, 1024)
    for dtype, tile, rank in ((torch.bfloat16, 16, 16), (torch.bfloat16, 64, 256), (torch.float32, 64, 32)):
        weights = empty_weights(2, rank, 4096, sizes, dtype=dtype, device=torch.device("cpu"))
        groups = torch.zeros(20, tile + 1, dtype=torch.int32)
        add_lora_triton(torch.zeros(64, sum(sizes), dtype=dtype), torch.zeros(64, 4096, dtype=dtype), weights, groups)


def multiply_by_experts() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        weights = torch.zeros(8, 1536, 2048, dtype=dtype)
        for num_tokens in (8, 128):
            experts, x = torch.zeros(num_tokens, 8, dtype=torch.int64), torch.zeros(num_tokens, 2048, dtype=dtype)
            expert_product_triton(x, weights, None, experts)
            expert_product_triton(x.repeat(8, 1), weights, weights[:, :, 0], experts, torch.zeros(num_tokens, 8))


def main() -> None:
    case = ""

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        print(kernel.__name__, case, compiled.metadata.shared, sep="\t")
        return compiled

    driver.set_active(HopperWithoutOne())
    run = JITFunction.run
    JITFunction.run = compile_only
    case = "copies"
    copy()
    case = "adapters"
    add_adapters()
    case = "experts"
    multiply_by_experts()
    case = "states"
    update_states()
    for name, kind in SPECS.items():
        case = name
        attend(kind)
        write(kind)
    case = "llama, a graph for 256"
    attend(SPECS["llama"], max_sequences=256)
    case = "llama, a graph for 256 and prompts"
    attend(SPECS["llama"], max_sequences=256, max_query_tokens=2048)
    for name in ("llama", "llama in fp8", "llama in int8", "llama in int4", "latent of 128 heads"):
        case = f"{name}, prompts on Hopper"
        attend(SPECS[name], specialised=True)


if __name__ == "__main__":
    main()
