"""The guard of eviction policies: made-up traffic is the same again, and what is lost to LRU or ARC is seen."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import guard
from cases.guard_workloads import WORKLOADS, workload


@pytest.mark.quick("chat", "agents", "fashions")
@pytest.mark.parametrize("name", WORKLOADS)
def test_made_up_traffic_is_a_tree_of_prompts_in_the_order_of_time_and_the_same_again(name: str) -> None:
    trace = workload(name, 64, 3, 150)
    assert len(trace) == 150
    assert trace.is_tree
    assert not trace.problems.unsorted
    assert trace.num_unique < trace.num_ids  # something is asked again
    again = workload(name, 64, 3, 150)
    assert (again.ids.tolist(), again.timestamps.tolist()) == (trace.ids.tolist(), trace.timestamps.tolist())
    assert workload(name, 64, 4, 150).ids.tolist() != trace.ids.tolist() or name == "loops"


def test_given_a_trace_then_each_cache_size_is_a_row_and_is_worked_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "KEPT", tmp_path)
    rows = guard.sweep("chat 64 #1", partial(workload, "chat", 64, 1, 40), quick=True, workers=1)
    assert [row.capacity for row in rows] == sorted({row.capacity for row in rows})
    for row in rows:
        assert max(row.lru, row.arc, row.adaptive) <= row.optimum
    monkeypatch.setattr(guard, "ratio", None)  # nothing is left to work out
    assert guard.sweep("chat 64 #1", partial(workload, "chat", 64, 1, 40), quick=True, workers=1) == rows


def test_what_a_policy_loses_is_told_against_the_better_of_the_two() -> None:
    row = guard.Row("chat", 100, lru=20.0, arc=22.0, adaptive=21.5, optimum=30.0)
    assert (row.over_lru, row.over_best) == (1.5, -0.5)
