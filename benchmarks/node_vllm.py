"""Two vLLM engines on one machine: the second's first token for a prompt that the first has seen.

    python benchmarks/node_vllm.py --python VLLM_PYTHON [--model DIR] [--tokens 512] [--prompts 5] [--json FILE]

Both engines are processes of their own and live at the same time, SmolLM2-135M on the CPU with one thread each. "node" and
"redis" are the tier that they share (`remote` of kvpool's connector), Redis on the loopback; "computed" is vLLM without a
connector. The first engine computes the prompts. The second is timed: from the request to its first token, after a prompt
of its own, so that nothing is met for the first time. Times are wall-clock times; compare within a run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "src"
BLOCK = 32
REGION = 1 << 30
SECONDS = 900.0


# --- an engine, run by the Python that has vLLM ----------------------------------------------------------------------


class Served:
    """One vLLM engine in this process."""

    def __init__(self, model: str, remote: str | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options: dict[str, Any] = {}
        if remote is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KVPoolConnector",
                kv_connector_module_path="kvpool.integrations.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"remote": remote, "host_bytes": "256MB", "timeout": 60.0},
            )
        self._engine = LLM(
            model,
            enforce_eager=True,
            dtype="bfloat16",
            block_size=BLOCK,
            max_model_len=2048,
            skip_tokenizer_init=True,
            num_gpu_blocks_override=512,
            **options,
        )

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Milliseconds to the first token, which token it is, and how much of the prompt was cached."""
        from vllm import SamplingParams

        once = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)
        began = time.perf_counter()
        (output,) = self._engine.generate([{"prompt_token_ids": prompt}], once, use_tqdm=False)
        seconds = time.perf_counter() - began
        return {
            "ms": 1e3 * seconds,
            "token": output.outputs[0].token_ids[0],
            "cached": output.num_cached_tokens or 0,
        }

    def settle(self) -> None:
        """Steps until nothing is on its way to the tier."""
        core = self._engine.llm_engine.engine_core.engine_core
        connector, due = core.scheduler.connector, time.monotonic() + SECONDS
        while connector is not None and connector.has_pending_push_work():
            assert time.monotonic() < due, "stores do not end"
            core.step_fn()


def serve(model: str, remote: str) -> None:
    """Answers one line for each line of the input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints what it likes
    engine = Served(model, remote or None)
    print("up", file=out, flush=True)
    for line in sys.stdin:
        answer = [engine.first_token(prompt) for prompt in json.loads(line)]
        engine.settle()
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)


# --- both of them ----------------------------------------------------------------------------------------------------


class Engine:
    """One engine, seen from here."""

    def __init__(self, python: str, model: str, remote: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(SOURCES),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [python, __file__, "--serve", model, remote]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait(self) -> None:
        if self._heard() != "up\n":
            sys.exit("an engine did not start")

    def ask(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        found: list[dict[str, Any]] = json.loads(self._heard())
        return found

    def _heard(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


@contextmanager
def redis() -> Iterator[str]:
    """The address of a Redis on the loopback that runs in the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tempfile.gettempdir()) as process:
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def measured(options: argparse.Namespace, remote: str, seed: int) -> list[dict[str, Any]]:
    """What the second engine saw of each prompt."""
    drawn = random.Random(seed)
    prompts = [[drawn.randrange(3, 40_000) for _ in range(options.tokens)] for _ in range(options.prompts + 1)]
    with ExitStack() as closing:
        engines = [Engine(options.python, options.model, remote) for _ in range(2)]
        for engine in engines:
            closing.callback(engine.close)
        for engine in engines:
            engine.wait()
        first, second = engines
        expected = [each["token"] for each in first.ask(prompts[1:])] if remote else []
        found = second.ask(prompts)[1:]  # the first one is only known here
        if remote:
            assert [each["token"] for each in found] == expected, "a first token is not what the first engine computed"
        return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="a Python that has vLLM for CPUs, with xxhash")
    parser.add_argument("--model", help="a directory; SmolLM2-135M if not given")
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.model is None:
        from kvpool.model.loading import default_model_directory

        options.model = str(default_model_directory())
    return options


def main() -> int:
    from cases.node_process import node

    options = arguments()
    rows: dict[str, list[dict[str, Any]]] = {}
    with node(REGION) as directory, ExitStack() as closing:
        tiers = {"node": f"node:{directory}?timeout=60"}
        if shutil.which("redis-server"):
            tiers["redis"] = closing.enter_context(redis()) + "?timeout=60"
        for seed, (name, remote) in enumerate([*tiers.items(), ("computed", "")]):
            rows[name] = measured(options, remote, seed)
            times = [each["ms"] for each in rows[name]]
            cached = [each["cached"] for each in rows[name]]
            print(
                f"{name:10s} first token {statistics.median(times):8.1f} ms of {sorted(map(round, times))}, cached {cached}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3])
    sys.exit(main())
