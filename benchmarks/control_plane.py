"""Speed and size of the control plane, beside vLLM in the same run.

    python benchmarks/control_plane.py [--vllm-python PATH] [--json FILE] [--check] [--quick] [--only WORD]

This is what an engine's scheduler thread pays for its KV cache: blocks of 16 tokens, 65,536 of them, random tokens.
The cases and their bars are here, what they time is in `cases/control_plane_runs.py`. `benchmarks/README.md` says what is
in each figure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import kvpool
from cases.control_plane_runs import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Params,
    announce,
    churn,
    cold_admission,
    construction,
    csr,
    decode,
    free_all,
    growth,
    hit_admission,
    import_time,
    metadata,
)
from harness import Bar, Case, PeerCase, Runner, Times, TimesRecorded
from peers import PeerProcess
from peers.recorded_figures import FIGURES

MILLION = 1_048_576
TORCH_MODULES = "import sys; from kvpool import KVCacheManager; print(sum(m.startswith('torch') for m in sys.modules))"


def _both(name: str, unit: str, case: Callable[..., Runner], params: Params, **options: Any) -> Case:
    """A case that vLLM's driver has under the same name, with the same parameters."""
    return Case(
        name=name,
        unit=unit,
        better="higher" if unit == "req/s" else "lower",
        kvpool=partial(case, **params),
        peer_case=PeerCase(case.__name__, params, options.pop("max_peer_repeats", None)),
        recorded=FIGURES.get(options.pop("figures"), ()),
        **options,
    )


def _times_best(factor: float) -> tuple[Bar, ...]:
    return Times(factor, "vllm"), TimesRecorded(factor)


def _decode_cases() -> list[Case]:
    name, plain, full = "decode step, {:,} sequences", {"commit": False}, {"commit": True}
    large, small = {"num_sequences": 1024}, {"num_sequences": 64}
    bars = (0.10, Times(125, "vllm"), TimesRecorded(5))
    return [
        _both(name.format(1024), "ms", decode, {**large, **plain}, bars=bars, figures="decode 1024"),
        _both(name.format(64), "ms", decode, {**small, **plain}, bars=_times_best(2), figures="decode 64"),
        _both(name.format(1024) + ", with commit", "ms", decode, {**large, **full}, figures="decode and commit 1024"),
        Case(
            name="CSR export, 1,024 sequences of 50 blocks",
            unit="ms",
            better="lower",
            kvpool=partial(csr, 1024, 49 * BLOCK_SIZE),  # the first export is of the 50th block
            bars=(0.25,),
            repeats=15,
        ),
    ]


def _admission_cases() -> list[Case]:
    params = {
        "1k": {"num_tokens": 1024, "per_repeat": 20},
        "8k": {"num_tokens": 8192, "per_repeat": 5},
        "128k": {"num_tokens": 131_072, "per_repeat": 1},
    }
    kinds = (
        ("cold", cold_admission, {"1k": 6, "8k": 12, "128k": 14}),
        ("full hit", hit_admission, {"1k": 8, "8k": 10, "128k": 4}),
    )
    return [
        _both(f"{kind} admission, {size}", "ms", case, params[size], bars=_times_best(factor), figures=f"{kind} {size}")
        for kind, case, factors in kinds
        for size, factor in factors.items()
    ]


def _throughput_cases() -> list[Case]:
    released = {"num_sequences": 1024, "prompt_length": 512, "num_decoded": 208}
    long, short = {"prompt_length": 2048, "per_repeat": 100}, {"prompt_length": 128, "per_repeat": 400}
    quiet, loud = {"events": False}, {"events": True}
    few: dict[str, Any] = {"repeats": 5}
    return [
        _both(
            "free 1,024 sequences of 45 blocks",
            "ms",
            free_all,
            released,
            bars=_times_best(3),
            figures="free 1024",
            **few,
        ),
        _both("churn of 2k prompts", "req/s", churn, {**long, **quiet}, bars=(25_000,), figures="churn 2k"),
        _both(
            "churn of 2k prompts, events on",
            "req/s",
            churn,
            {**long, **loud},
            bars=(Times(10, "vllm"),),
            figures="churn 2k with events",
        ),
        _both(
            "churn of 128-token prompts, 8,192 leaves",
            "req/s",
            churn,
            {**short, **quiet},
            bars=(30_000,),
            figures="churn 128",
        ),
        _both(
            "128k prompt announced as events",
            "ms",
            announce,
            {"num_tokens": 131_072},
            bars=(10,),
            figures="announce 128k",
        ),
    ]


def _size_cases() -> list[Case]:
    once: dict[str, Any] = {"repeats": 1, "warmups": 0}
    filled = {"num_blocks": NUM_BLOCKS, "prompt_length": 2048}
    return [
        _both("metadata per cached block", "B", metadata, filled, bars=(140,), figures="metadata", **once),
        _both(
            "build 1,048,576 blocks",
            "ms",
            construction,
            {"num_blocks": MILLION},
            bars=(50,),
            figures="construction 1M",
            repeats=5,
            max_peer_repeats=2,
        ),
        _both(
            "import in a fresh process",
            "s",
            import_time,
            {},
            bars=(0.25,),
            figures="import",
            repeats=5,
            max_peer_repeats=1,
            warmups=0,
        ),
        Case("torch modules after the import", "modules", "lower", partial(import_time, TORCH_MODULES), (0,), **once),
    ]


def _growth_cases(quick: bool) -> list[Case]:
    blocks = {"num_blocks": NUM_BLOCKS}, {"num_blocks": MILLION}
    leaves = {"fill_length": 800 * BLOCK_SIZE}, {"fill_length": 8 * BLOCK_SIZE}
    step = {"num_sequences": 256, "commit": False}
    hit = {"num_tokens": 8192, "per_repeat": 10}
    long, short = {"prompt_length": 2048, "per_repeat": 100}, {"prompt_length": 128, "per_repeat": 100}
    same_pool = {"num_blocks": 81_920 if quick else 819_200}  # 102,400 leaves of 8 blocks, or 1,024 of 800
    leaves_name = "10k over 100 leaves" if quick else "100k over 1k leaves"
    grown = {
        "1M over 64k blocks, decode step": partial(growth, decode, step, *blocks),
        "1M over 64k blocks, full hit of 8k": partial(growth, hit_admission, {**hit, "fill_length": 2048}, *blocks),
        "1M over 64k blocks, churn of 2k": partial(growth, churn, long, *blocks),
        f"{leaves_name}, full hit of 8k": partial(growth, hit_admission, {**hit, **same_pool}, *leaves),
        f"{leaves_name}, churn of 128": partial(growth, churn, {**short, **same_pool}, *leaves),
    }
    return [Case(f"growth, {name}", "x", "lower", runner, (1.3,), repeats=10) for name, runner in grown.items()]


def cases(quick: bool = False) -> list[Case]:
    """All cases, in the order of the table."""
    return [*_decode_cases(), *_admission_cases(), *_throughput_cases(), *_size_cases(), *_growth_cases(quick)]


if __name__ == "__main__":
    parser = harness.argument_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--vllm-python",
        metavar="PATH",
        default=os.environ.get("KVPOOL_VLLM_PYTHON"),
        help="an interpreter that has vLLM (default: $KVPOOL_VLLM_PYTHON); see benchmarks/README.md",
    )
    options = parser.parse_args()
    driver = Path(__file__).parent / "peers" / "vllm_peer.py"
    vllm = PeerProcess("vllm", driver, options.vllm_python, "no --vllm-python or KVPOOL_VLLM_PYTHON was given")
    sys.exit(
        harness.main(cases(options.quick), [vllm], options, {"kvpool": getattr(kvpool, "__version__", "from source")})
    )
