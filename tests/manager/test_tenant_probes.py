"""A tenant that probes for another's prefix: every line that the manager runs is the same as for a prompt of nobody.

Equal lines in equal order take equal time, so no clock is needed here; `benchmarks/tenants.py` measures the time as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvpool
from kvpool import KVCacheManager, LayerSpec, ReuseScope
from kvpool.eviction import policy_names
from managers import FULL, cached, make_manager

PACKAGE = str(Path(kvpool.__file__).parent)
VICTIM, PROBER = ReuseScope(tenant="victim"), ReuseScope(tenant="prober")
SECRET, UNKNOWN = 1_000, 50_000  # where the prompts of the victim begin, and one that nobody has
LENGTH = 18  # tokens: four blocks and a part of one
Probe = Callable[[KVCacheManager, list[int], ReuseScope], Any]


def lines_of(work: Callable[[], object]) -> tuple[list[tuple[str, int]], object]:
    """Every line of kvpool that runs, in order, and what the work returns."""
    lines: list[tuple[str, int]] = []

    def line(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename.startswith(PACKAGE):
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            return line
        return None

    before = sys.gettrace()
    sys.settrace(line)
    try:
        result = work()
    finally:
        sys.settrace(before)
    return lines, result


def match(manager: KVCacheManager, prompt: list[int], scope: ReuseScope) -> Any:
    return manager.match_prefix(prompt, scope=scope).num_tokens


def ask(manager: KVCacheManager, prompt: list[int], scope: ReuseScope) -> Any:
    return manager.can_allocate(prompt, scope=scope)


def prefetch(manager: KVCacheManager, prompt: list[int], scope: ReuseScope) -> Any:
    return manager.cache.onboard(prompt, scope=scope)


def compute(manager: KVCacheManager, prompt: list[int], scope: ReuseScope) -> Any:
    handle = manager.allocate("probe", prompt, scope=scope)
    found = handle.num_cached_tokens
    manager.commit(handle)
    manager.free(handle)
    return found


def ask_why(manager: KVCacheManager, prompt: list[int], scope: ReuseScope) -> Any:
    handle = manager.allocate("why", prompt, scope=scope)
    found = handle.missed_tokens
    manager.free(handle, keep=False)
    return found, manager.inspect.explain(prompt, scope)


def forget(manager: KVCacheManager, prompt: list[int], scope: ReuseScope) -> Any:
    return manager.cache.invalidate(prompt, scope=scope)


def manager_of_both(*layers: LayerSpec, **options: Any) -> KVCacheManager:
    """The victim's prompt is cached, and others of both; with a small pool much of it was evicted again."""
    manager = make_manager(*layers, remembered_blocks=1000, **options)
    for number in range(3):
        cached(manager, LENGTH, SECRET + 100 * number, scope=VICTIM)
        cached(manager, LENGTH, 100 * number, scope=PROBER)
    cached(manager, LENGTH, SECRET, scope=VICTIM)
    return manager


def probed(probe: Probe, first: int, scope: ReuseScope, make: Callable[[], KVCacheManager]) -> Any:
    manager = make()
    prompt = list(range(first, first + LENGTH))
    return lines_of(lambda: probe(manager, prompt, scope))


PROBES = [match, ask, prefetch, compute, forget, ask_why]


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("gpu_blocks", [12, 64])
@pytest.mark.parametrize("probe", PROBES)
def test_given_a_foreign_prefix_then_a_probe_runs_the_same_lines_as_for_none(
    probe: Probe, gpu_blocks: int, policy: str
) -> None:
    def make() -> KVCacheManager:
        return manager_of_both(policy=policy, gpu_blocks=gpu_blocks, host_blocks=16)

    assert probed(probe, SECRET, PROBER, make) == probed(probe, UNKNOWN, PROBER, make)


@pytest.mark.parametrize("probe", PROBES)
def test_given_windowed_layers_and_quotas_then_a_probe_runs_the_same_lines_as_for_none(probe: Probe) -> None:
    def make() -> KVCacheManager:
        manager = manager_of_both(FULL, LayerSpec(kv_heads=1, head_dim=8, window=8), gpu_blocks=40)
        manager.cache.set_quota("victim", guaranteed=4)
        manager.cache.set_quota("prober", maximum=8)
        return manager

    assert probed(probe, SECRET, PROBER, make) == probed(probe, UNKNOWN, PROBER, make)


@pytest.mark.parametrize("probe", [match, compute, forget, ask_why])
def test_given_ones_own_prefix_then_the_lines_do_differ(probe: Probe) -> None:
    def make() -> KVCacheManager:
        return manager_of_both(gpu_blocks=64)

    assert probed(probe, SECRET, VICTIM, make) != probed(probe, UNKNOWN, VICTIM, make)
