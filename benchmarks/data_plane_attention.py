"""Attention over paged memory: the Triton backend beside FlashInfer, and that of CPUs beside dense attention.

    python benchmarks/data_plane_attention.py [--json FILE] [--check] [--quick] [--only WORD]

On a GPU: one layer of Llama-3.1-8B (32 query heads, 8 KV heads of 128, bfloat16) over scattered blocks of 16 tokens in a
block-first store. A figure is the bytes of K and V that must be read, over the time of one layer: a CUDA graph of six
layers (one for very long prompts), timed with events, so that launch gaps are not in it. FlashInfer reads the same kind of
store in the same run.
On a CPU: the time of one layer, beside `scaled_dot_product_attention` on K and V that are dense already (which no paged
system has), and beside the torch backend, which gathers them. CPU figures are for one thread. kvpool is what `auto` takes:
its own C code where that was compiled (`python tools/compile_c.py`).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness import Bar, Case, NoPartError, Peer, PeerAbsentError, PeerCase, Runner, Times, argument_parser, main
from kvpool.attention import AttentionBackend, AttentionSpec, PagedBatch, create_backend
from kvpool.config import KVCacheConfig
from kvpool.config.layers import DType, LayerSpec
from kvpool.kernels import compiled_attention
from kvpool.kernels.layout import LayerCache
from kvpool.kernels.quantization import TORCH_DTYPES
from kvpool.storage.layout import GroupLayout

BLOCK_SIZE = 16
LAYERS = 3  # of the store; runs go round them, so that nothing is left in a cache from the run before
GRAPH_LAYERS = 6
LONG_PROMPT = 32768  # queries, beyond which a graph has one layer and there are few repeats
LLAMA = AttentionSpec(32, 8, 128)
GPU_PREFILL = (
    (8, 2048, 0),
    (1, 8192, 0),
    (4, 512, 8192),
    (1, 2048, 32768),
    (1, 131072, 0),
)  # sequences, queries, cached
GPU_DECODE = ((64, 4096), (256, 1024), (8, 32768), (1, 131072))
# And the bars on an H200: TB/s of decoding, TFLOP/s of a prompt
QUANTISED = ((DType.FP8_E4M3, 3.6, 400), (DType.INT8, 3.3, 370), (DType.INT4, 3.4, 340))
RAGGED = "ragged"  # 128 sequences of 1 to 8,192 tokens
SMOLLM2 = AttentionSpec(9, 3, 64, dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32)
WIDE = AttentionSpec(32, 8, 128, dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32)
CPU = {  # sequences, queries of each, keys of each
    "decode SmolLM2 16x512": (SMOLLM2, 16, 1, 512),
    "decode 8 KV heads 8x1024": (WIDE, 8, 1, 1024),
    "decode a head each 8x1024": (replace(SMOLLM2, q_heads=16, kv_heads=16), 8, 1, 1024),
    "prompt SmolLM2 1x450": (SMOLLM2, 1, 450, 450),
    "prompts SmolLM2 4x60 behind 400": (SMOLLM2, 4, 60, 460),
    "prompt 8 KV heads 1x1024": (WIDE, 1, 1024, 1024),
    "decode SmolLM2 16x512 bfloat16": (replace(SMOLLM2, dtype=DType.BFLOAT16, kv_dtype=DType.BFLOAT16), 16, 1, 512),
    "decode SmolLM2 16x512 over int8": (replace(SMOLLM2, kv_dtype=DType.INT8), 16, 1, 512),
}


class Problem(NamedTuple):
    """A batch with one query each (or a chunk of a prompt), its store and its queries."""

    spec: AttentionSpec
    batch: PagedBatch
    layers: list[LayerCache]
    q: Tensor

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one layer must read."""
        return int(self.batch.kv_lens.sum()) * layer_of(self.spec).bytes_per_token


def layer_of(spec: AttentionSpec) -> LayerSpec:
    """The layer of a store that a spec reads."""
    return LayerSpec(spec.kv_heads, spec.head_dim, spec.kv_dtype, k_only=spec.shares_part)


def make_problem(
    spec: AttentionSpec, query_lens: Sequence[int], kv_lens: Sequence[int], device: str, layers: int = LAYERS
) -> Problem:
    """Random K, V and queries; the blocks of all sequences are scattered over the store."""
    blocks = -(-np.asarray(kv_lens) // BLOCK_SIZE)
    indptr = np.concatenate(([0], np.cumsum(blocks)))
    total = int(indptr[-1])
    indices = np.random.default_rng(0).permutation(total).astype(np.int32)
    batch = PagedBatch.build(indptr, indices, query_lens, kv_lens, block_size=BLOCK_SIZE)
    q = torch.randn(batch.num_query_tokens, spec.q_heads, spec.head_dim, device=device).to(TORCH_DTYPES[spec.dtype])
    return Problem(spec, batch, [*_random_store(spec, total, device, layers)], q)


def _random_store(spec: AttentionSpec, num_blocks: int, device: str, layers: int) -> Iterator[LayerCache]:
    """Layers of a block-first store; integers are any bytes with small scales, which costs a kernel the same."""
    config = KVCacheConfig([layer_of(spec)] * layers, BLOCK_SIZE, gpu_blocks=1)
    layout = GroupLayout(config.groups[0])
    store = torch.randint(0, 120, (num_blocks, layout.block_bytes), dtype=torch.uint8, device=device)
    for number in range(layers):
        cache = layout.layer_cache(store, number)
        for part in cache.values():
            for scale in (part.scale, part.zero):
                if scale is not None:
                    scale.copy_(torch.randn(scale.shape, device=device) * 0.01)
            if spec.kv_dtype.bits > 8:
                part.data.copy_(torch.randn_like(part.data))
        yield cache


def decode_lengths(params: Mapping[str, Any]) -> list[int]:
    """The context of every sequence of a case."""
    if params["context"] == RAGGED:
        return [int(length) for length in np.random.default_rng(1).integers(1, 8192, params["batch"])]
    return [params["context"]] * params["batch"]


class GraphRunner:
    """Replays a graph of several layers; `value` makes the figure of the seconds that one layer takes."""

    def __init__(self, problem: Problem, layer: Callable[[int], Any], value: Callable[[float], float]) -> None:
        self._value = value
        self._layer = layer  # with all that it needs: a graph does not keep the memory that it reads
        layer(0)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        self._num_layers = 1 if problem.batch.num_query_tokens > LONG_PROMPT else GRAPH_LAYERS
        with torch.cuda.graph(self._graph):
            for number in range(self._num_layers):
                layer(number % len(problem.layers))

    def __call__(self) -> list[float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return [self._value(start.elapsed_time(end) / 1e3 / self._num_layers)]


def attention_runner(backend: AttentionBackend, problem: Problem, value: Callable[[float], float]) -> Runner:
    """One layer after the other through a backend, planned once."""
    plan = backend.plan(problem.spec, problem.batch)
    out = problem.q.new_empty(*problem.q.shape[:2], problem.spec.v_dim)
    return GraphRunner(problem, lambda n: backend.run(problem.q, problem.layers[n], plan, out=out), value)


def gpu_decode(name: str, params: Mapping[str, Any]) -> Runner:
    """Terabytes of K and V a second that a backend reads while it decodes."""
    lengths = decode_lengths(params)
    spec = replace(LLAMA, kv_dtype=params.get("kv_dtype", LLAMA.kv_dtype))
    problem = make_problem(spec, [1] * len(lengths), lengths, "cuda")
    backend = create_backend(name, "cuda")
    return attention_runner(backend, problem, lambda seconds: problem.kv_bytes / seconds / 1e12)


def gpu_prefill(name: str, params: Mapping[str, Any]) -> Runner:
    """Teraflops (of what causality leaves) of a backend over chunks of prompts, each behind a prefix."""
    batch, chunk, prefix = params["batch"], params["chunk"], params["prefix"]
    spec = replace(LLAMA, kv_dtype=params.get("kv_dtype", LLAMA.kv_dtype))
    problem = make_problem(spec, [chunk] * batch, [prefix + chunk] * batch, "cuda")
    pairs = batch * chunk * (prefix + (chunk + 1) / 2)
    flops = 4 * pairs * LLAMA.q_heads * LLAMA.head_dim
    return attention_runner(create_backend(name, "cuda"), problem, lambda seconds: flops / seconds / 1e12)


def gpu_plan(name: str, params: Mapping[str, Any]) -> Runner:
    """Host milliseconds to plan one decode step into the buffers of a captured graph."""
    batch, context = params["batch"], params["context"]
    problem = make_problem(LLAMA, [1] * batch, [context] * batch, "cuda", layers=1)
    backend = create_backend(name, "cuda")
    buffers = backend.reserve(LLAMA, max_sequences=batch, max_blocks=int(problem.batch.indptr[-1]))

    def run() -> list[float]:
        torch.cuda.synchronize()
        start = time.thread_time_ns()
        backend.plan(LLAMA, problem.batch, buffers)
        return [(time.thread_time_ns() - start) / 1e6]

    return run


def cpu_attention(name: str, params: Mapping[str, Any]) -> Runner:
    """CPU milliseconds of one layer through a backend, planned once."""
    spec, batch, queries, context = CPU[params["shape"]]
    torch.set_num_threads(1)
    problem = make_problem(spec, [queries] * batch, [context] * batch, "cpu")
    backend = create_backend(name, "cpu")
    plan = backend.plan(spec, problem.batch)
    return cpu_runner(lambda n: backend.run(problem.q, problem.layers[n], plan))


def cpu_runner(layer: Callable[[int], Any]) -> Runner:
    """Thread CPU milliseconds per layer, over the layers of the store."""

    def run() -> list[float]:
        start = time.thread_time_ns()
        for number in range(LAYERS):
            layer(number)
        return [(time.thread_time_ns() - start) / 1e6 / LAYERS]

    return run


class AttentionPeer(ABC):
    """What the cases are compared with. `runner` makes what repeats one of them; it raises NoPartError for others."""

    name = ""

    def __init__(self) -> None:
        self._runner: Runner | None = None

    def start(self) -> str:
        return str(torch.__version__)

    @abstractmethod
    def runner(self, case: str, params: Mapping[str, Any]) -> Runner: ...

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        self._runner = None  # its memory first
        self._runner = self.runner(case, params)

    def repeat(self) -> Sequence[float]:
        assert self._runner is not None
        return self._runner()

    def close(self) -> None:
        self._runner = None


class FlashInfer(AttentionPeer):
    """FlashInfer in this process, through kvpool's backend: its own kernels and its own planning."""

    name = "flashinfer"
    _cases: Mapping[str, Callable[[str, Mapping[str, Any]], Runner]] = {
        "decode": gpu_decode,
        "prefill": gpu_prefill,
        "plan": gpu_plan,
    }

    def start(self) -> str:
        if not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None:
            raise PeerAbsentError("flashinfer needs a CUDA device and the package flashinfer-python")
        import flashinfer  # type: ignore[import-not-found, unused-ignore]

        return str(flashinfer.__version__)

    def runner(self, case: str, params: Mapping[str, Any]) -> Runner:
        if case not in self._cases:
            raise NoPartError(f"flashinfer has no part in {case}")
        self.start()
        return self._cases[case]("flashinfer", params)


class DenseTorch(AttentionPeer):
    """Plain `scaled_dot_product_attention` on dense K and V: what attention costs where nothing is paged."""

    name = "dense SDPA"

    def runner(self, case: str, params: Mapping[str, Any]) -> Runner:
        spec, batch, queries, context = CPU[params["shape"]] if case == "cpu" else (LLAMA, 0, 0, 0)
        if case != "cpu" or spec.kv_dtype is not DType.FLOAT32:
            raise NoPartError(
                f"dense SDPA has no part in {case}: without instructions for a type it takes many times as long"
            )
        torch.set_num_threads(1)
        k, v = (torch.randn(LAYERS, batch, spec.kv_heads, context, spec.head_dim) for _ in range(2))
        options: dict[str, Any] = {"scale": spec.scale}
        if queries == 1:  # the heads of a group in the rows of one pass over K: faster here than `enable_gqa`
            q = torch.randn(batch, spec.kv_heads, spec.group_size, spec.head_dim)
        else:
            q = torch.randn(batch, spec.q_heads, queries, spec.head_dim)
            mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
            options |= {"enable_gqa": True, **({"is_causal": True} if queries == context else {"attn_mask": mask})}
        attend = torch.nn.functional.scaled_dot_product_attention
        return cpu_runner(lambda n: attend(q, k[n], v[n], **options))


class Gathered(AttentionPeer):
    """The torch backend, which gathers K and V first."""

    name = "torch backend"

    def runner(self, case: str, params: Mapping[str, Any]) -> Runner:
        if case != "cpu":
            raise NoPartError(f"the torch backend has no part in {case}")
        return cpu_attention("torch", params)


def attention_cases() -> list[Case]:
    """The attention rows: those for a GPU only where there is one."""
    cases = []
    if torch.cuda.is_available():
        for batch, context in (*GPU_DECODE, (128, RAGGED)):
            params = {"batch": batch, "context": context}
            cases.append(_gpu_case(f"decode attention {batch}x{context}", "TB/s", "decode", gpu_decode, params, 0.9))
        for dtype, bar, _ in QUANTISED:  # of the bytes as they are stored
            params = {"batch": 64, "context": 4096, "kv_dtype": dtype}
            runner = partial(gpu_decode, "triton", params)
            cases.append(Case(f"decode attention 64x4096 {dtype.value}", "TB/s", "higher", runner, (bar,)))
        params = {"batch": 256, "context": 1024}
        runner = partial(gpu_plan, "triton", params)
        cases.append(Case("plan decode 256x1024", "ms", "lower", runner, (), PeerCase("plan", params)))
        for batch, chunk, prefix in GPU_PREFILL:
            params = {"batch": batch, "chunk": chunk, "prefix": prefix}
            name = f"prefill attention {batch}x{chunk} behind {prefix}"
            cases.append(_gpu_case(name, "TFLOP/s", "prefill", gpu_prefill, params, 0.9))
        for dtype, _, bar in QUANTISED:
            params = {"batch": 1, "chunk": 8192, "prefix": 0, "kv_dtype": dtype}
            runner = partial(gpu_prefill, "triton", params)
            cases.append(Case(f"prefill attention 1x8192 {dtype.value}", "TFLOP/s", "higher", runner, (bar,)))
    for shape, (spec, *_) in CPU.items():
        params = {"shape": shape}
        bars: tuple[Bar, ...] = (Times(1 / 1.1, "dense SDPA"),) if spec.kv_dtype is DType.FLOAT32 else ()
        runner = partial(cpu_attention, "auto", params)
        cases.append(Case(f"attention cpu, {shape}", "ms", "lower", runner, bars, PeerCase("cpu", params)))
    return cases


def _gpu_case(
    name: str,
    unit: str,
    kind: str,
    make: Callable[[str, Mapping[str, Any]], Runner],
    params: Mapping[str, Any],
    share: float,
) -> Case:
    bars, repeats = (Times(share, "flashinfer"),), 5 if params.get("chunk", 0) > LONG_PROMPT else 30
    return Case(name, unit, "higher", partial(make, "triton", params), bars, PeerCase(kind, params), repeats=repeats)


def created_for_cpu() -> str:
    """What computes attention on this CPU."""
    module = compiled_attention()
    return "torch" if module is None else f"compiled ({module.instructions()[0]})"


def attention_peers() -> list[Peer]:
    """Who is measured beside the cases above."""
    return [FlashInfer(), DenseTorch(), Gathered()]


def run(options: argparse.Namespace) -> int:
    """Runs the attention rows alone."""
    versions = {"torch": str(torch.__version__), "attention": created_for_cpu()}
    if torch.cuda.is_available():
        versions["device"] = torch.cuda.get_device_name()
    return main(attention_cases(), attention_peers(), options, versions)


if __name__ == "__main__":
    sys.exit(run(argument_parser("Attention over paged memory, beside FlashInfer and dense attention.").parse_args()))
