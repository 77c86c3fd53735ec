"""When should runs be copied to the host: on eviction, or at once? Replays of traces, counted, not timed.

    python benchmarks/host_writes.py [--traces DIR] [--policy adaptive] [--json FILE]

Every trace runs with two sizes of the host's pool. `hits` are blocks of prompts found on either tier,
`down` blocks copied from the GPU, `awaited` those of them that were copied when they were evicted: the request that gets
their place cannot be computed before the copy is over. What is not awaited is copied behind the requests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpool.replay import ReplayConfig, read_trace, replay

TRACES = ("mooncake_conversation_trace.jsonl", "lmcache_magagent_b16.jsonl", "wekacc_dev.jsonl.gz")
GPU_SHARE = 0.05  # of the different blocks of a trace
HOST_FACTORS = (1, 4)  # times the GPU pool
WRITES = ("back", "through")


def measure(path: Path, policy: str) -> Iterator[dict[str, Any]]:
    """One row for every size of the host and every way to write."""
    trace = read_trace(path)
    gpu = int(GPU_SHARE * trace.num_unique)
    for factor in HOST_FACTORS:
        for write in WRITES:
            result = replay(trace, ReplayConfig(policy, gpu, host=factor * gpu, host_write=write))
            yield {
                "trace": path.name.partition(".")[0],
                "gpu": gpu,
                "host": factor * gpu,
                "host_write": write,
                "hit_ratio": round(result.hit_ratio, 4),
                "gpu_hits": result.hit_blocks_by_tier["GPU"],
                "host_hits": result.hit_blocks_by_tier["HOST"],
                "down_per_request": round(result.copied_down_blocks / result.requests, 2),
                "awaited_per_request": round(result.awaited_blocks / result.requests, 2),
                "up_per_request": round(result.onboarded_blocks / result.requests, 2),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder with the traces")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in TRACES:
        if not (args.traces / name).exists():
            print(f"{name} is not in {args.traces}; give --traces")
            continue
        for row in measure(args.traces / name, args.policy):
            if not rows:
                print("  ".join(f"{name:>12}" for name in row))
            print("  ".join(f"{value!s:>12}" for value in row.values()), flush=True)
            rows.append(row)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
