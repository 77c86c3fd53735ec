"""Where the start of an engine goes: a model that is loaded, an engine, its first token; each in a process of its own.

    python benchmarks/start_gpu.py           an 8B shape with random weights, on a GPU
    python benchmarks/start_gpu.py --tiny    a tiny one, which only proves that it runs

Each case runs twice: with empty caches of Triton and torch, and again with what the first process left in them. Seconds from
`Engine(model)` on, with its stages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled layers": {"compile": True},
    "32 GiB on the host": {"kv_bytes": 8 << 30, "host_bytes": 32 << 30},
}
TINY = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


def measured(options: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """One start, in this process: seconds by stage, until the engine is there, and until its first token."""
    import torch

    from cases.engine_gpu import LARGE
    from cases.engine_runs import random_model
    from kvpool.config import Tier
    from kvpool.engine import Engine, SamplingParams
    from kvpool.storage import BlockStore

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model({**LARGE, **(TINY if tiny else {})}, device, torch.float32 if tiny else torch.bfloat16)
    if tiny:
        options = {**options, "kv_bytes": 1 << 22, **({"host_bytes": 1 << 22} if "host_bytes" in options else {})}
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    with Engine(model, **options) as engine:
        found: dict[str, Any] = {"engine": time.perf_counter() - began}
        engine.generate([list(range(3, 203))], one)
        found["first token"] = time.perf_counter() - began
        answers: list[float] = []
        host = engine.plane.stores[0, Tier.HOST]
        while isinstance(host, BlockStore) and host.num_blocks and device == "cuda" and not host.pinned:
            start = time.perf_counter()
            engine.generate([[len(answers) % 250 + 3] * 100], one)
            answers.append(time.perf_counter() - start)
        if answers:
            found["host memory locked"] = time.perf_counter() - began
            found["answers meanwhile, s: middle, longest"] = [sorted(answers)[len(answers) // 2], max(answers)]
        engine.warm_up()
        found["stages"] = dict(engine.start_seconds)
        found["all graphs"] = engine.graphs._asdict()
    return found


def main() -> None:
    """Runs every case twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # one start, in the process of its own
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(measured(json.loads(given.inside), given.tiny)))
        return
    for name in given.case or CASES:
        with tempfile.TemporaryDirectory() as folder:
            kept = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/layers"}
            for caches in ("empty", "filled"):
                command = [sys.executable, str(Path(__file__)), "--inside", json.dumps(CASES[name])]
                command += ["--tiny"] if given.tiny else []
                done = subprocess.run(command, env={**os.environ, **kept}, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{name}, {caches} caches: failed\n{done.stderr[-2000:]}", flush=True)
                    break
                print(f"{name}, {caches} caches: {done.stdout.splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
