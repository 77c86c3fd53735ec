"""Where does the default eviction policy lose to LRU or ARC? Real traces and made-up traffic, tiny caches to huge ones.

    python benchmarks/guard.py                  every trace and workload; an hour of a core, less when it is run again
    python benchmarks/guard.py --only chat      those whose name contains the word
    python benchmarks/guard.py --quick          one block size and five cache sizes
    python benchmarks/guard.py --check          exit status 1 where it loses more than 0.3 points
    python benchmarks/guard.py --seed 7         other traffic of the same kinds

Results are kept in build/guard by trace, policy, size and the sources that decide them, so only what has changed runs again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import kvpool
from cases.guard_workloads import WORKLOADS, workload
from kvpool.replay import ReplayConfig, Trace, read_trace, replay
from kvpool.replay.bounds import OPTIMUM, run_model
from kvpool.replay.runs import map_over

POLICIES = ("lru", "arc", "adaptive", OPTIMUM)
PARTS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95)  # of the different blocks of a trace
QUICK_PARTS = (0.005, 0.02, 0.1, 0.3, 0.7)
FEWEST = 50  # blocks
BLOCK_SIZES = (16, 64, 256)
REQUESTS = 4_000
LIMIT = 0.3  # points that the policy may lose
KEPT = Path(__file__).resolve().parents[1] / "build" / "guard"
SOURCES = ("eviction/*.py", "prefix/*.py", "replay/simulate.py", "replay/bounds.py", "replay/runs.py")
OF_ADAPTIVE = ("adaptive.py", "experience.py", "ghosts.py", "kind_rows.py")


class Row(NamedTuple):
    """Block hit ratios of one trace and cache size, in percent."""

    trace: str
    capacity: int
    lru: float
    arc: float
    adaptive: float
    optimum: float

    @property
    def over_lru(self) -> float:
        return self.adaptive - self.lru

    @property
    def over_best(self) -> float:
        return self.adaptive - max(self.lru, self.arc)


def traces(folder: Path, seed: int, quick: bool) -> Iterator[tuple[str, Callable[[], Trace]]]:
    """Names, and how to get each: the files of a folder, then made-up traffic."""
    for path in sorted(folder.glob("*.jsonl*")):
        yield path.name.split(".")[0], partial(read_trace, path)
    for name in WORKLOADS:
        for block_size in BLOCK_SIZES[1:2] if quick else BLOCK_SIZES:
            yield f"{name} {block_size} #{seed}", partial(workload, name, block_size, seed, REQUESTS)


def sizes(trace: Trace, quick: bool) -> list[int]:
    """Cache sizes from tiny to nearly everything."""
    unique = trace.num_unique
    found = {max(FEWEST, round(part * unique)) for part in (QUICK_PARTS if quick else PARTS)}
    return sorted({FEWEST, *found})


@cache
def version(policy: str) -> str:
    """Of the sources that decide what a policy hits; those of the policy itself count for itself only."""
    root = Path(kvpool.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        if policy == "adaptive" or path.name not in OF_ADAPTIVE:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def ratio(trace: Trace, item: tuple[str, int]) -> float:
    policy, capacity = item
    if policy == OPTIMUM:
        return run_model(trace, OPTIMUM, capacity).hit_ratio
    return replay(trace, ReplayConfig(policy, capacity)).hit_ratio


def sweep(name: str, make: Callable[[], Trace], quick: bool, workers: int) -> list[Row]:
    """The rows of one trace; what was not kept from an earlier run is worked out."""
    trace = make()
    content = hashlib.sha256(trace.ids.tobytes() + trace.timestamps.tobytes()).hexdigest()[:8]
    file = KEPT / f"{name.replace(' ', '-').replace('#', '')}-{content}.json"
    kept: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    items = [(policy, capacity) for capacity in sizes(trace, quick) for policy in POLICIES]
    key = {(policy, capacity): f"{policy} {capacity} {version(policy)}" for policy, capacity in items}
    missing = [item for item in items if key[item] not in kept]
    kept.update(zip((key[item] for item in missing), map_over(trace, ratio, missing, workers=workers), strict=True))
    KEPT.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept))
    return [
        Row(name, capacity, *(100 * kept[key[policy, capacity]] for policy in POLICIES))
        for capacity in sizes(trace, quick)
    ]


def show(rows: list[Row]) -> None:
    print(f"{'trace':30} {'blocks':>7} {'lru':>7} {'arc':>7} {'adaptive':>8} {'optimum':>7} {'- lru':>7} {'- best':>7}")
    for row in rows:
        print(
            f"{row.trace:30.30} {row.capacity:7} {row.lru:7.2f} {row.arc:7.2f} {row.adaptive:8.2f} {row.optimum:7.2f} "
            f"{row.over_lru:+7.2f} {row.over_best:+7.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("KVPOOL_TRACES") or str(Path(__file__).resolve().parents[2] / "shared" / "traces")
    parser.add_argument("--traces", metavar="DIR", default=default, help="folder of real traces ($KVPOOL_TRACES)")
    parser.add_argument("--only", metavar="WORD", default="", help="traces whose name contains the word")
    parser.add_argument("--quick", action="store_true", help="one block size, five cache sizes")
    parser.add_argument("--check", action="store_true", help="exit status 1 where more than 0.3 points are lost")
    parser.add_argument("--seed", type=int, default=1, help="of the made-up traffic")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, make in traces(Path(options.traces), options.seed, options.quick):
        if options.only in name:
            found = sweep(name, make, options.quick, options.workers)
            show(found)
            rows += found
    if not rows:
        parser.error(f"no trace's name contains {options.only!r}")
    worst = sorted(rows, key=lambda row: row.over_best)
    below = [row for row in rows if row.over_best < -LIMIT]
    print(f"\nthe worst of {len(rows)}, minus the better of LRU and ARC")
    show(worst[:8])
    gap = np.mean([(row.adaptive - row.lru) / (row.optimum - row.lru) for row in rows if row.optimum - row.lru > 0.5])
    print(f"\nmean over LRU {np.mean([row.over_lru for row in rows]):+.2f} points, {gap:.0%} of the way to the optimum")
    print(f"{len(below)} of {len(rows)} lose more than {LIMIT} points to LRU or ARC")
    return 1 if options.check and below else 0


if __name__ == "__main__":
    sys.exit(main())
