"""A goal for the length of steps: prompts get what is left beside those that decode, by the cost model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import add, make_engine, request, tokens_of
from toy_engine import ToyEngine

from kvpool.errors import ConfigError
from kvpool.scheduling import LinearCostModel, SchedulerConfig
from kvpool.scheduling.batch_plan import PlanBuilder, PromptChunk
from managers import make_manager


class Costs:
    """A second for every token of a prompt and every 100 tokens that it sees before; ten for every sequence that decodes."""

    def prefill_seconds(self, num_tokens: int, context: int) -> float:
        return num_tokens * (1.0 + context / 100)

    def decode_seconds(self, num_sequences: int, context: int) -> float:
        return 10.0 * num_sequences

    def transfer_seconds(self, num_bytes: int) -> float:
        return 0.0


def engine_that_decodes(goal: float, num_decoding: int = 1, **config: Any) -> ToyEngine:
    engine = make_engine(
        make_manager(gpu_blocks=256),
        costs=config.pop("costs", Costs()),
        max_step_seconds=goal,
        **{"max_tokens_per_step": 100, **config},
    )
    add(engine, *(request(f"reader {n}", 3, 80, first=1000 + 10 * n) for n in range(num_decoding)))
    engine.step()
    return engine


def test_given_somebody_decodes_then_a_prompt_gets_the_tokens_that_the_goal_leaves() -> None:
    engine = engine_that_decodes(34.0)
    add(engine, request("a", 60))
    assert tokens_of(engine.step()) == {"reader 0": 1, "a": 24}
    assert tokens_of(engine.step()) == {"reader 0": 1, "a": 16}  # 1.24 s each: 19, cut to whole blocks
    assert tokens_of(engine.step()) == {"reader 0": 1, "a": 16}
    assert tokens_of(engine.step()) == {"reader 0": 1, "a": 4}


def test_given_nobody_decodes_then_nobody_waits_and_the_step_is_as_large_as_may_be() -> None:
    engine = make_engine(make_manager(gpu_blocks=64), costs=Costs(), max_step_seconds=5.0, max_tokens_per_step=64)
    add(engine, request("a", 100, 1))
    assert tokens_of(engine.step()) == {"a": 64}


def test_given_several_prompts_then_they_share_the_time_in_their_order() -> None:
    engine = engine_that_decodes(40.0)
    add(engine, *(request(name, 16, 9, first=100 * n) for n, name in enumerate("abc", 1)))
    assert tokens_of(engine.step()) == {
        "reader 0": 1,
        "a": 16,
        "b": 12,
        "c": 4,
    }  # 14 cut to whole blocks; at least a block
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_the_rest_of_a_prompt_then_the_next_one_gets_the_time_that_this_rest_leaves() -> None:
    engine = engine_that_decodes(50.0)
    add(engine, request("a", 52))
    assert tokens_of(engine.step()) == {"reader 0": 1, "a": 40}
    add(engine, request("b", 40, first=300))
    assert tokens_of(engine.step()) == {"reader 0": 1, "a": 12, "b": 20}  # 12 at 1.4 s each leave 23.2 s


@pytest.mark.parametrize("depth", [1, 2])
def test_given_decoding_alone_takes_longer_than_the_goal_then_prompts_go_on_by_a_block_a_step(depth: int) -> None:
    engine = make_engine(
        make_manager(gpu_blocks=256), costs=Costs(), max_step_seconds=15.0, max_tokens_per_step=100, depth=depth
    )
    readers = [request(f"reader {n}", 3, 40, first=1000 + 10 * n) for n in range(3)]
    add(engine, *readers)
    for _ in range(2):
        engine.step()
    prompts = [request("a", 10, 2), request("b", 9, 2, first=300)]
    add(engine, *prompts)
    plan = engine.step()
    assert {name: count for name, count in tokens_of(plan).items() if name in "ab"} == {"a": 4}
    engine.drain()
    engine.assert_right(*readers, *prompts)


def test_given_much_time_then_the_other_limits_of_a_step_hold() -> None:
    engine = engine_that_decodes(1e6, max_chunk_tokens=8)
    add(engine, request("a", 300))
    assert tokens_of(engine.step()) == {"reader 0": 1, "a": 8}


def test_given_steps_that_took_longer_than_thought_then_the_next_prompt_part_is_smaller() -> None:
    costs = LinearCostModel(
        prefill_seconds_per_token=1.0,
        seconds_per_token_pair=0.0,
        decode_seconds_per_step=10.0,
        decode_seconds_per_sequence=0.0,
        decode_seconds_per_context_token=0.0,
        smoothing=1.0,
    )
    engine = engine_that_decodes(50.0, costs=costs)
    add(engine, request("a", 200))
    plan = engine.step()
    assert tokens_of(plan)["a"] == 40
    engine.scheduler.observe(plan, 10.0 + 80.0)  # twice as long
    assert tokens_of(engine.step())["a"] == 20


def test_given_a_chunk_that_gives_way_then_its_time_is_free_again() -> None:
    engine = engine_that_decodes(50.0)
    add(engine, request("a", 20))
    planner = engine.scheduler._planner
    seen = []
    limit = planner.admissions.run

    def run(round: Any) -> None:
        limit(round)
        seen.append(round.seconds)
        for sequence in list(round.chunks):
            round.preempt(sequence)
        seen.append(round.seconds)

    planner.admissions.run = run  # type: ignore[method-assign]
    engine.scheduler.step()
    assert seen == [20.0, 40.0]


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), True, "0.1"])
def test_given_no_time_then_the_goal_is_refused_by_name(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="max_step_seconds must be a number of seconds over 0"):
        SchedulerConfig(max_step_seconds=seconds)


@pytest.mark.parametrize(("seconds", "is_full"), [(None, False), (1e-9, False), (0.0, True), (-1.0, True)])
def test_given_no_time_left_then_a_step_is_full_behind_its_first_chunk(seconds: float | None, is_full: bool) -> None:
    engine = make_engine()
    add(engine, request("a", 6))
    (sequence,) = engine.scheduler.sequences("a")
    builder = PlanBuilder(engine.scheduler._queues, 1)
    builder.seconds = seconds
    assert not builder.is_full  # prompts go on however long the others take to decode
    builder.chunks[sequence] = PromptChunk(0, 4, np.empty((1, 4), np.int32))
    assert builder.is_full == is_full
    builder.seconds, builder.budget = None, 1
    assert not builder.is_full
    builder.budget = 0
    assert builder.is_full
