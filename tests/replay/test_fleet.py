"""A workload through a simulated cluster."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvpool.cli import main
from kvpool.errors import InvalidArgumentError, TraceError
from kvpool.replay import ReplayConfig, Trace, TraceBuilder, replay, write_trace
from kvpool.replay.fleet import FleetConfig, simulate_fleet
from kvpool.replay.synth import WorkloadModel, synthesise


@pytest.fixture(scope="module")
def talks() -> Trace:
    return synthesise(WorkloadModel(rate=2.0), 160, seed=1)


def test_given_large_caches_when_routed_by_prefix_then_nearly_all_of_the_ideal_is_reached_and_round_robin_is_far_below(
    talks: Trace,
) -> None:
    prefix, robin = (simulate_fleet(talks, FleetConfig(6, 1000, routing)) for routing in ("prefix", "round-robin"))
    assert prefix.share_of_ideal >= 0.85  # each node computes the shared beginnings that it gets once
    assert robin.share_of_ideal <= 0.6
    assert prefix.requests == robin.requests == 160
    assert prefix.ideal_blocks == robin.ideal_blocks
    assert prefix.mean_seconds_to_first_token < robin.mean_seconds_to_first_token
    assert prefix.decisions_per_second is not None
    assert robin.decisions_per_second is None


def test_given_one_node_with_room_for_everything_then_it_is_the_infinite_cache(talks: Trace) -> None:
    for routing in ("prefix", "session"):
        result = simulate_fleet(talks, FleetConfig(1, 5_000, routing))
        assert result.share_of_ideal == 1.0
        assert result.index_blocks == len(set(talks.ids.tolist()))


def test_given_more_nodes_than_a_cell_then_all_of_them_are_simulated_with_what_each_gets(talks: Trace) -> None:
    config = FleetConfig(50, 500, cell=16)
    assert [config.nodes_of(cell) for cell in range(4)] == [13, 13, 12, 12]
    result = simulate_fleet(talks, config)
    assert (result.cells, result.simulated_cells, result.requests) == (4, 4, 160)
    assert result.busiest_cell_over_mean > 1.0
    assert 0.5 < result.share_of_ideal <= 1.0


def test_given_many_cells_then_those_from_the_idlest_to_the_busiest_are_simulated(talks: Trace) -> None:
    few = simulate_fleet(talks, FleetConfig(20, 500, "session", cell=1))
    assert (few.cells, few.simulated_cells) == (20, 8)
    assert few.requests < 160
    crowded = TraceBuilder("one", unit=16)
    for number in range(20):
        crowded.add(number, [1, 2, 3, number + 9], 64, 1)
    result = simulate_fleet(crowded.build(), FleetConfig(20, 500, "session", cell=1))
    assert result.requests == 20, "the busiest cell is among them"
    assert result.busiest_cell_over_mean == 20.0


def test_given_tokens_or_ids_that_recur_elsewhere_then_a_cluster_counts_blocks_with_all_that_precedes_them() -> None:
    tokens = TraceBuilder("tokens")
    for number in range(6):
        tokens.add(number * 1000, [1] * 64 + [2 + number] * 32, 96, 1)
    found = simulate_fleet(tokens.build(), FleetConfig(nodes=1, capacity=100))
    assert (found.requested_blocks, found.ideal_blocks, found.hit_blocks) == (36, 20, 20)
    assert found.index_blocks == 4 + 6 * 2
    contents = TraceBuilder("contents", unit=16).add(0, [1, 2, 1], 48, 0).add(0, [2, 1], 32, 0).build()
    found = simulate_fleet(contents, FleetConfig(nodes=1, capacity=100))
    assert (found.ideal_blocks, found.share_of_ideal, found.event_bytes_per_second) == (0, 1.0, 0.0)


@pytest.mark.parametrize("routing", ["prefix", "session", "round-robin"])
def test_given_prompts_that_end_inside_a_block_then_only_whole_blocks_are_found(routing: str) -> None:
    tokens = TraceBuilder("tokens")
    for number, length in enumerate((20, 20, 7, 7)):
        tokens.add(number * 1000, [1] * length, length, 1)
    trace = tokens.build()
    found = simulate_fleet(trace, FleetConfig(nodes=1, capacity=100, routing=routing))
    alone = replay(trace, ReplayConfig("lru", 100))
    assert (found.requests, found.requested_blocks, found.index_blocks) == (4, 6, 1)
    assert found.hit_blocks == found.ideal_blocks == alone.hit_blocks == 1
    assert found.requested_blocks == alone.requested_blocks


def test_given_prompts_longer_than_a_cache_then_their_beginning_is_served() -> None:
    trace = TraceBuilder("long", unit=16).add(0, list(range(20)), 320, 1).add(1, list(range(20)), 320, 1).build()
    assert simulate_fleet(trace, FleetConfig(1, 8)).hit_blocks == 8


WRONG = [{"nodes": 0}, {"nodes": 2**20 + 1}, {"capacity": 0}, {"capacity": 2**31 + 1}, {"cell": 0}, {"cell": 65}]


WRONG += [{"prefill_tokens_per_second": 0.0}, {"decode_tokens_per_second": -1.5}, {"event_seconds": -0.5}]


@pytest.mark.parametrize("options", [*WRONG, {"event_seconds": math.nan}, {"routing": "luck"}])
def test_given_a_wrong_setting_then_it_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError, match=str(next(iter(options.values())))):
        FleetConfig(**{"nodes": 2, "capacity": 4, **options})


def test_given_a_setting_at_its_limits_then_it_is_taken() -> None:
    assert FleetConfig(2**20, 2**31, cell=64).num_cells == 2**14
    assert FleetConfig(1, 1, cell=1).nodes_of(0) == 1


def test_given_a_trace_of_lengths_then_it_is_refused() -> None:
    with pytest.raises(TraceError, match="lengths only"):
        simulate_fleet(TraceBuilder("lengths", reuse_known=False).add(0, [], 10, 1).build(), FleetConfig(2, 4))


def test_given_the_command_then_it_prints_a_line_for_each_cluster_and_writes_json(
    talks: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, figures = tmp_path / "trace.jsonl", tmp_path / "out.json"
    write_trace(talks.head(30), path)
    options = ["--capacity", "500", "--routing", "prefix", "--json", str(figures)]
    assert main(["fleet", str(path), "--nodes", "2,4", *options]) == 0
    assert [row["nodes"] for row in json.loads(figures.read_text())] == [2, 4]
    printed = capsys.readouterr().out
    head, first, second, *_ = printed.splitlines()
    assert head == head.rstrip()
    assert head.startswith("nodes cells blocks routing ideal ttft  p95 node cell ")
    assert first.startswith("    2     1    500 prefix ")
    assert second.startswith("    4     1    500 prefix ")
    assert "ideal     block hits, of those of one infinite cache" in printed
    assert main(["fleet", str(path), "--nodes", "many"]) == 2
    assert main(["fleet", str(path), "--capacity", "inf"]) == 2
