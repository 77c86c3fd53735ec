"""Attention over latents (MLA) on a GPU: the Triton backend beside FlashInfer's MLA decode, and beside copying.

    python benchmarks/latents_gpu.py [--json FILE] [--check] [--quick] [--only WORD]

One layer of DeepSeek V3 (128 query heads) or V2-Lite (16) over latents of 512 + 64 numbers in scattered blocks of 16 tokens
of a block-first store. A figure of decoding is the bytes of latents, each read once, over the time of one layer: a CUDA
graph of six layers, timed with events. One of a prompt is the arithmetic of absorbed attention that causality leaves.
FlashInfer reads the same store in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data_plane_attention import AttentionPeer, GraphRunner, Problem, attention_runner, make_problem
from harness import Bar, Case, NoPartError, PeerAbsentError, PeerCase, Runner, Times, argument_parser, main
from kvpool.attention import AttentionSpec, create_backend
from kvpool.config.layers import DType

LATENT, ROTARY = 512, 64
SCALE = (128 + ROTARY) ** -0.5
DECODE = ((64, 4096), (8, 32768), (1, 131072))
PROMPTS = ((1, 4096, 0), (1, 2048, 32768))  # sequences, queries, cached
WORKSPACE = 2**28


def spec_of(params: Mapping[str, Any]) -> AttentionSpec:
    return AttentionSpec(
        params["heads"],
        1,
        LATENT + ROTARY,
        v_dim=LATENT,
        values="k",
        scale=SCALE,
        kv_dtype=params.get("kv_dtype", DType.BFLOAT16),
    )


def decoding(params: Mapping[str, Any]) -> Problem:
    return make_problem(spec_of(params), [1] * params["batch"], [params["context"]] * params["batch"], "cuda")


def decode(params: Mapping[str, Any]) -> Runner:
    """Terabytes of latents a second of the Triton backend."""
    problem = decoding(params)
    return attention_runner(
        create_backend("triton", "cuda"), problem, lambda seconds: problem.kv_bytes / seconds / 1e12
    )


def prompt(params: Mapping[str, Any]) -> Runner:
    """Teraflops of the Triton backend over a chunk of a prompt."""
    chunk, prefix = params["chunk"], params["prefix"]
    problem = make_problem(spec_of(params), [chunk], [prefix + chunk], "cuda")
    flops = 2 * (2 * LATENT + ROTARY) * params["heads"] * chunk * (prefix + (chunk + 1) / 2)
    return attention_runner(create_backend("triton", "cuda"), problem, lambda seconds: flops / seconds / 1e12)


class FlashInferLatents(AttentionPeer):
    """FlashInfer's MLA over the same store, planned once."""

    name = "flashinfer"

    def start(self) -> str:
        if not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None:
            raise PeerAbsentError("flashinfer needs a CUDA device and the package flashinfer-python")
        import flashinfer  # type: ignore[import-not-found, unused-ignore]

        return str(flashinfer.__version__)

    def runner(self, case: str, params: Mapping[str, Any]) -> Runner:
        if case != "decode" or "kv_dtype" in params:
            raise NoPartError(f"flashinfer has no part in {case}")
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found, unused-ignore]

        problem = decoding(params)
        spec, batch = problem.spec, problem.batch
        device = problem.q.device
        wrapper = BatchMLAPagedAttentionWrapper(torch.empty(WORKSPACE, dtype=torch.int8, device=device))
        lists = (torch.from_numpy(each).to(device) for each in (batch.indptr, batch.indices))
        wrapper.plan(
            torch.arange(len(batch) + 1, dtype=torch.int32, device=device),
            *lists,
            torch.from_numpy(batch.kv_lens).to(device, torch.int32),
            spec.q_heads,
            LATENT,
            ROTARY,
            batch.block_size,
            True,
            spec.scale,
            problem.q.dtype,
            problem.q.dtype,
        )
        latent, rotary = (part.contiguous() for part in torch.split(problem.q, [LATENT, ROTARY], dim=-1))
        out = torch.empty_like(latent)

        def layer(number: int) -> Tensor:
            data = problem.layers[number]["k"].data[:, :, 0]
            result: Tensor = wrapper.run(latent, rotary, data[..., :LATENT], data[..., LATENT:], out=out)
            return result

        return GraphRunner(problem, layer, lambda seconds: problem.kv_bytes / seconds / 1e12)


class Copying(AttentionPeer):
    """A copy of as many bytes as one layer reads: half of what a copy moves is read."""

    name = "copy"

    def runner(self, case: str, params: Mapping[str, Any]) -> Runner:
        if case != "decode":
            raise NoPartError(f"copying has no part in {case}")
        problem = decoding(params)
        source = torch.empty(problem.kv_bytes, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return GraphRunner(problem, lambda _: target.copy_(source), lambda seconds: 2 * len(source) / seconds / 1e12)


def cases() -> list[Case]:
    """The rows: decoding in bfloat16 and over narrow latents, and absorbed prompts."""
    found = []
    for heads in (128, 16):
        for batch, context in DECODE:
            params: dict[str, Any] = {"heads": heads, "batch": batch, "context": context}
            bars: tuple[Bar, ...] = (Times(0.95, "flashinfer"),)
            name = f"decode latents, {heads} heads {batch}x{context}"
            found.append(
                Case(name, "TB/s", "higher", partial(decode, params), bars, PeerCase("decode", params), repeats=20)
            )
        for dtype in (DType.FP8_E4M3, DType.INT8):
            params = {"heads": heads, "batch": 64, "context": 4096, "kv_dtype": dtype}
            name = f"decode latents, {heads} heads 64x4096 {dtype.value}"
            found.append(Case(name, "TB/s", "higher", partial(decode, params), (), repeats=20))
        for _, chunk, prefix in PROMPTS:
            params = {"heads": heads, "chunk": chunk, "prefix": prefix}
            name = f"absorbed prompt, {heads} heads 1x{chunk} behind {prefix}"
            found.append(Case(name, "TFLOP/s", "higher", partial(prompt, params), (), repeats=5))
    return found


def run(options: argparse.Namespace) -> int:
    versions = {"torch": str(torch.__version__)}
    if not torch.cuda.is_available():
        print("there is no GPU to measure on", file=sys.stderr)
        return 1
    versions["device"] = torch.cuda.get_device_name()
    return main(cases(), [FlashInferLatents(), Copying()], options, versions)


if __name__ == "__main__":
    sys.exit(run(argument_parser("Attention over latents, beside FlashInfer's MLA decode and copying.").parse_args()))
