"""Drives vLLM's engine on a CPU, for `engine_cpu.py`. Runs under an interpreter that has vLLM for CPUs, never under ours.

The engine runs inside this process (no process of its own), so that its CPU time is this process's. It has one thread, as
kvpool has. With `compile` the model goes through torch.compile, which is what vLLM does unless it is told otherwise.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Runner
from peers import serve

_loaded: dict[tuple[str, bool], Any] = {}
_walls: list[float] = []


def _engine(model: str, dtype: str, compile: bool) -> Any:
    """The engine for this kind of numbers; the one before gives its memory back."""
    from vllm import LLM

    if (dtype, compile) not in _loaded:
        _loaded.clear()
        _loaded[dtype, compile] = LLM(
            model, dtype=dtype, enforce_eager=not compile, max_model_len=1024, max_num_seqs=16
        )
    return _loaded[dtype, compile]


def cpu_per_token(model: str, dtype: str, prompts: list[list[int]], num_new: int, compile: bool) -> Runner:
    """CPU milliseconds per generated token of whole runs from an empty cache."""
    from vllm import SamplingParams

    engine = _engine(model, dtype, compile)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]

    def run(num_tokens: int) -> int:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        return sum(len(output.outputs[0].token_ids) for output in engine.generate(inputs, params, use_tqdm=False))

    def repeat() -> list[float]:
        assert engine.reset_prefix_cache()
        wall, start = time.perf_counter(), time.process_time()
        num_tokens = run(num_new)
        _walls.append(1000 * (time.perf_counter() - wall) / num_tokens)
        return [1000 * (time.process_time() - start) / num_tokens]

    run(2)
    _walls.clear()
    return repeat


def wall_per_token(**_: Any) -> Runner:
    """Wall milliseconds per token of the runs that `cpu_per_token` measured last."""
    return lambda: list(_walls)


def _version() -> str:
    from importlib.metadata import version

    import vllm  # noqa: F401

    return version("vllm-cpu")


if __name__ == "__main__":
    serve(_version, {case.__name__: case for case in (cpu_per_token, wall_per_token)})
    os._exit(0)  # as in vllm_peer.py
