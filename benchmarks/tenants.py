"""Can a tenant tell by time whether another has cached a prompt? CPU time of probes, and what the best guess is worth.

    python benchmarks/tenants.py [--probes 4000] [--json FILE]

A probe asks the manager for a prompt of 2,048 tokens (`match_prefix`), or runs a request with it (`allocate`, `commit`,
`free`). Probes for a foreign prompt, for a prompt of nobody and for the tenant's own alternate in random order. `AUC` is
how often the time of a random probe for a cached prompt is below that of a random probe for none: 0.5 is a coin, 0 or 1
tells them apart always. `noise` is four standard errors of the AUC of two equal distributions. The row of the tenant's own
prompt shows that the method would see a difference.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, ReuseScope

LENGTH = 2048
KINDS = ("own", "foreign", "nobody's")
VICTIM, PROBER = ReuseScope(tenant="victim"), ReuseScope(tenant="prober")
Probe = Callable[[KVCacheManager, "np.ndarray[Any, Any]"], None]


def match(manager: KVCacheManager, prompt: np.ndarray[Any, Any]) -> None:
    """Asks what is cached."""
    manager.match_prefix(prompt, scope=PROBER)


def compute(manager: KVCacheManager, prompt: np.ndarray[Any, Any]) -> None:
    """Runs a request to its end."""
    handle = manager.allocate("probe", prompt, scope=PROBER)
    manager.commit(handle)
    manager.free(handle)


def filled(random: np.random.Generator) -> tuple[KVCacheManager, dict[str, np.ndarray[Any, Any]]]:
    """A manager with prompts of both tenants, and a prompt of each kind."""
    manager = KVCacheManager(KVCacheConfig([LayerSpec(kv_heads=8, head_dim=128)] * 4, block_size=16, gpu_blocks=16_384))
    prompts = {kind: random.integers(1, 100_000, LENGTH, dtype=np.int32) for kind in KINDS}
    for scope, own in ((VICTIM, prompts["foreign"]), (PROBER, prompts["own"])):
        for prompt in (*random.integers(1, 100_000, (20, LENGTH), dtype=np.int32), own):
            handle = manager.allocate("fill", prompt, scope=scope)
            manager.commit(handle)
            manager.free(handle)
    return manager, prompts


def times(probe: Probe, count: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Nanoseconds of CPU time of `count` probes of each kind, in random order."""
    random = np.random.default_rng(seed)
    manager, prompts = filled(random)
    found: dict[str, list[int]] = {kind: [] for kind in KINDS}
    gc.collect()
    gc.freeze()
    for kind in random.permutation(np.repeat(KINDS, count)):
        prompt = prompts[kind].copy()
        start = time.thread_time_ns()
        probe(manager, prompt)
        found[kind].append(time.thread_time_ns() - start)
        if probe is compute and kind != "own":  # the next probe for it finds nothing of this one
            manager.cache.invalidate(prompt[:16], scope=PROBER)
    return {kind: np.array(values) for kind, values in found.items()}


def auc(cached: np.ndarray[Any, Any], uncached: np.ndarray[Any, Any]) -> float:
    """How often a value of the first is below one of the second; ties count half."""
    ordered = np.sort(uncached)
    above = len(ordered) - np.searchsorted(ordered, cached, "right")
    equal = np.searchsorted(ordered, cached, "right") - np.searchsorted(ordered, cached, "left")
    return float((above + equal / 2).sum() / (len(cached) * len(uncached)))


def measure(count: int) -> list[dict[str, Any]]:
    """One row for each way to probe and each kind of cached prompt."""
    rows = []
    noise = 4 * math.sqrt((2 * count + 1) / (12 * count * count))
    for seed, (name, probe) in enumerate({"match_prefix": match, "request": compute}.items()):
        found = times(probe, count, seed)
        for kind in ("foreign", "own"):
            value = auc(found[kind], found["nobody's"])
            rows.append(
                {
                    "probe": name,
                    "prompt": kind,
                    "median_us": round(float(np.median(found[kind])) / 1000, 2),
                    "nobodys_us": round(float(np.median(found["nobody's"])) / 1000, 2),
                    "auc": round(value, 4),
                    "noise": round(noise, 4),
                    "told apart": abs(value - 0.5) > noise,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=4000, help="probes of each kind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(options.probes)
    print("  ".join(f"{name:>12}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>12}" for value in row.values()))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
