"""kvpool's connector in a real vLLM on a GPU, beside vLLM alone, its own offload and LMCache: the same traffic in one run.

    python benchmarks/vllm_gpu.py                       # all rows, three interleaved repeats
    python benchmarks/vllm_gpu.py --only small --repeats 1 --json out.json

ample and small: conversations of several turns share the beginning of their prompts. All start within two seconds; each turn
follows the last answer at once. Every repeat has other tokens and begins with empty caches. Engines that are compared live
side by side, and one of them works at a time.

restart: the first token of a prompt of 8,192 tokens, computed, cached by vLLM, from the host, and by a new engine from the
disk, the node or the Redis that one that ended has filled; beside it what the link and the disk can do.

The model has the shape of Llama 3 8B and random weights. Run it with the Python that has vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
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
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GIB = 1 << 30
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
CONVERSATIONS, TURNS, SHARED, SAID, ANSWERED = 96, 4, 1500, 600, 120  # the last three in tokens
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "ample": {
        "vLLM, 40 GiB": {"gpu": 40},
        "vLLM + kvpool, 40 + 40 GiB": {"gpu": 40, "host": 40, "by": "kvpool"},
    },
    "small": {
        "vLLM, 8 GiB": {"gpu": 8},
        "vLLM + its offload, 8 + 32 GiB": {"gpu": 8, "host": 32, "by": "vllm"},
        "vLLM + LMCache, 8 + 32 GiB": {"gpu": 8, "host": 32, "by": "lmcache"},
        "vLLM + kvpool, 8 + 32 GiB": {"gpu": 8, "host": 32, "by": "kvpool"},
        "vLLM + kvpool, 8 + 32 GiB, host_write=through": {
            "gpu": 8,
            "host": 32,
            "by": "kvpool",
            "extra": {"host_write": "through"},
        },
    },
}
LONG, LONG_PROMPTS = 8192, 3
COLUMNS = ("wall", "first p50", "first p90", "first p99", "between p50", "between p99", "one token")


# --- an engine in a process of its own -------------------------------------------------------------------------------


def serve(row: dict[str, Any], folder: str) -> None:
    """Starts an engine, and runs the traffic of each seed that comes in, one a line."""
    begun = time.monotonic()
    asyncio.run(_serve(row, folder, begun))


async def _serve(row: dict[str, Any], folder: str, begun: float) -> None:
    from vllm import AsyncEngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {}
    if row.get("by") == "vllm":
        options = {"kv_offloading_size": row["host"], "kv_offloading_backend": "native"}
    elif row.get("by") == "kvpool":
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVPoolConnector",
            kv_connector_module_path="kvpool.integrations.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"host_bytes": int(row["host"] * GIB), **row.get("extra", {})},
        )
    elif row.get("by") == "lmcache":  # its chunks are 256 tokens; answers are kept as the others keep them
        os.environ |= {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": str(row["host"])}
        os.environ |= {"LMCACHE_SAVE_DECODE_CACHE": "True", "LMCACHE_CHUNK_SIZE": "256"}
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="LMCacheConnectorV1Dynamic",
            kv_connector_module_path="lmcache.integration.vllm.lmcache_connector_v1",
            kv_role="kv_both",
        )
    arguments = AsyncEngineArgs(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=32768,
        kv_cache_memory_bytes=int(row["gpu"] * GIB),
        gpu_memory_utilization=0.1,
        **options,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    _say({"ready": time.monotonic() - begun})
    while line := await asyncio.to_thread(sys.stdin.readline):
        kind, seed = json.loads(line)
        _say(await (_traffic(engine, seed) if kind == "traffic" else _prompts(engine, seed)))
    engine.shutdown()


def _say(what: dict[str, Any]) -> None:
    print("\n" + json.dumps(what), flush=True)


async def _traffic(engine: Any, seed: int) -> dict[str, float]:
    await engine.reset_prefix_cache(reset_connector=True)
    rng = random.Random(seed)
    shared = _tokens(rng, SHARED)
    firsts: list[float] = []
    gaps: list[float] = []
    warm: list[float] = []
    await _request(engine, f"warm {seed}", _tokens(rng, 64), 64, [], warm)
    start = time.monotonic()
    starts = [(rng.uniform(0, 2), [_tokens(rng, SAID) for _ in range(TURNS)]) for _ in range(CONVERSATIONS)]
    await asyncio.gather(
        *(
            _conversation(engine, f"{seed} {number}", shared, pause, said, firsts, gaps)
            for number, (pause, said) in enumerate(starts)
        )
    )
    wall = time.monotonic() - start
    return {
        "wall": wall,
        **{f"first p{q}": _percentile(firsts, q) for q in (50, 90, 99)},
        **{f"between p{q}": 1e3 * _percentile(gaps, q) for q in (50, 99)},
        "one token": 1e3 * statistics.median(warm),
    }


async def _prompts(engine: Any, seed: int) -> dict[str, list[float]]:
    """First tokens of long prompts: as they come, again, and when vLLM has forgotten them."""
    rng = random.Random(seed)
    prompts = [_tokens(rng, LONG) for _ in range(LONG_PROMPTS)]
    await _request(engine, f"warm {seed}", _tokens(random.Random(f"warm {seed}"), LONG), 2, [], [])
    seen: dict[str, list[float]] = {}
    for name in ("first", "again", "forgotten"):
        if name == "forgotten":
            await asyncio.sleep(2.0)  # the last blocks are on their way to the host and the disk
            await engine.reset_prefix_cache()
        seen[name] = []
        for number, prompt in enumerate(prompts):
            await _request(engine, f"{seed} {name} {number}", prompt, 2, seen[name], [])
    return seen


async def _conversation(
    engine: Any,
    name: str,
    shared: list[int],
    pause: float,
    said: list[list[int]],
    firsts: list[float],
    gaps: list[float],
) -> None:
    history = list(shared)
    await asyncio.sleep(pause)
    for turn, words in enumerate(said):
        history += words
        history += await _request(engine, f"{name} {turn}", history, ANSWERED, firsts, gaps)


async def _request(
    engine: Any, name: str, prompt: list[int], number: int, firsts: list[float], gaps: list[float]
) -> list[int]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=number,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    asked, last = time.monotonic(), 0.0
    came: list[int] = []
    async for output in engine.generate({"prompt_token_ids": list(prompt)}, sampling, name):
        now = time.monotonic()
        tokens = list(output.outputs[0].token_ids)
        if not came:
            firsts.append(now - asked)
        else:
            gaps += [(now - last) / len(tokens)] * len(tokens)
        last = now
        came += tokens
    return came


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(1000, 120_000) for _ in range(number)]


def _percentile(numbers: list[float], percent: int) -> float:
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


# --- all of them -----------------------------------------------------------------------------------------------------


class Engine:
    """A process with one engine."""

    def __init__(self, name: str, row: dict[str, Any], folder: str, log: Path) -> None:
        self.name, self.log = name, log
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(row), "--folder", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def answer(self) -> dict[str, Any]:
        """The next line of JSON; an engine that ended raises its last words."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        raise SystemExit(f"{self.name} ended:\n{self.log.read_text()[-6000:]}")

    def run(self, kind: str, seed: int) -> dict[str, Any]:
        """One run of the traffic, or of long prompts."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, seed]) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """Ends the process, and those that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(group: str, repeats: int, folder: Path, kept: dict[str, Any], rows: dict[str, Any]) -> None:
    """Starts the engines of a group at once, then runs them in turns, each repeat in another order."""
    engines = [
        Engine(name, row, str(folder), folder / f"{group}-{number}.log")
        for number, (name, row) in enumerate(rows.items())
    ]
    try:
        for engine in engines:
            kept[engine.name] = {"start": engine.answer()["ready"], "runs": []}
            print(f"{engine.name}: started in {kept[engine.name]['start']:.1f} s", flush=True)
        for repeat in range(repeats):
            for engine in engines if repeat % 2 == 0 else engines[::-1]:
                kept[engine.name]["runs"].append(run := engine.run("traffic", 100 + repeat))
                print(f"  {engine.name}: " + "  ".join(f"{key} {run[key]:.3f}" for key in COLUMNS), flush=True)
    finally:
        for engine in engines:
            engine.close()


def restart(folder: Path) -> dict[str, Any]:
    """The first token of a long prompt: computed, from every place that keeps it, and in a new engine from what is below."""
    seen: dict[str, Any] = {"bytes": 131_072 * LONG, "GB/s": {"link": link_speed(), "disk": disk_speed(folder)}}
    print(seen, flush=True)
    with ExitStack() as stack:
        places: dict[str, dict[str, Any]] = {
            "disk": {"disk": str(folder / "disk"), "disk_bytes": 16 * GIB},
            "node": {"remote": node(stack, folder)},
        }
        if shutil.which("redis-server") and find_spec("glide_sync"):
            places["redis"] = {"remote": redis(stack, folder)}
        for place, below in places.items():
            extra = {**below, "model_id": "random weights of one seed", "timeout": 10.0}
            row = {"gpu": 8, "host": 8, "by": "kvpool", "extra": extra}
            for life in ("before the restart", "after it"):
                engine = Engine(life, row, str(folder), folder / f"{place} {life}.log")
                try:
                    seen[f"{place}, start {life}"] = engine.answer()["ready"]
                    seen[f"{place}, {life}"] = engine.run("prompts", 7)
                finally:
                    engine.close()
                for name, firsts in seen[f"{place}, {life}"].items():
                    print(f"{place}, {life}, {name}:", *(f"{seconds:.3f}" for seconds in firsts), flush=True)
                with suppress(OSError):  # only root may; without it the disk is the system's memory
                    Path("/proc/sys/vm/drop_caches").write_text("3")
    return seen


def node(stack: ExitStack, folder: Path) -> str:
    """A node that lives as long as the stack; its address."""
    directory = f"/dev/shm/{folder.name}"
    process = subprocess.Popen([sys.executable, "-m", "kvpool", "node", directory, "--bytes", "8GiB"])
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    return f"node:{directory}"


def redis(stack: ExitStack, folder: Path) -> str:
    """A Redis that lives as long as the stack; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--save", "", "--maxmemory", "8gb", "--dir", str(folder), "--io-threads", "4"]
    process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    return f"redis://127.0.0.1:{port}"


def link_speed() -> float:
    """GB/s of a large copy from locked memory of the host to the GPU, in a process of its own."""
    code = (
        "import torch; a=torch.empty(1<<30,dtype=torch.uint8,pin_memory=True); b=torch.empty_like(a,device='cuda');"
        "b.copy_(a);"
        "s,e=(torch.cuda.Event(enable_timing=True) for _ in 'se'); s.record(); b.copy_(a,non_blocking=True); e.record();"
        "e.synchronize(); print((1<<30)/1e6/s.elapsed_time(e))"
    )
    return float(subprocess.check_output([sys.executable, "-c", code], text=True))


def disk_speed(folder: Path) -> float:
    """GB/s of reading a new file of 1 GiB, after the system has dropped what it keeps of it if it may."""
    path = folder / "speed"
    with path.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 24))
        os.fsync(file.fileno())
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")
    begun, buffer = time.monotonic(), bytearray(1 << 24)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    path.unlink()
    return GIB / 1e9 / (time.monotonic() - begun)


def can_run(row: dict[str, Any]) -> bool:
    """Whether what a row needs is installed."""
    if row.get("by") == "lmcache" and find_spec("lmcache") is None:
        print("LMCache is not installed: its row is left out")
        return False
    return True


def table(kept: dict[str, Any]) -> str:
    """Medians of all rows as a Markdown table."""
    lines = ["| | start | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, row in kept.items():
        cells = [f"{statistics.median(run[key] for run in row['runs']):.3f}" for key in COLUMNS] if row["runs"] else []
        lines.append(f"| {name} | {row['start']:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Runs the benchmark, or one engine of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        choices=[*ROWS, "restart"],
        nargs="*",
        default=[*ROWS, "restart"],
        help="groups of rows (default: all)",
    )
    parser.add_argument("--rows", default="", help="of these groups, the rows whose name contains one of these words")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--json", type=Path, help="writes all runs to this file")
    parser.add_argument("--extra", type=json.loads, default={}, help="more settings of kvpool's connector, as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(json.loads(options.serve), options.folder)
        return
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        if "restart" in options.only:
            kept["restart"] = restart(folder)
        for group in (group for group in ROWS if group in options.only):
            words = options.rows.split(",")
            rows = {
                name: {**row, "extra": {**row.get("extra", {}), **options.extra}}
                for name, row in ROWS[group].items()
                if any(word in name for word in words) and can_run(row)
            }
            measure(group, options.repeats, folder, kept, rows)
        if options.json:
            options.json.write_text(json.dumps(kept, indent=1))
    print(table({name: row for name, row in kept.items() if name != "restart"}))


if __name__ == "__main__":
    main()
