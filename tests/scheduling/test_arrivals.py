"""Blocks that come back from a lower tier are on their way for some steps: who reads them is held back, nobody else waits."""

from __future__ import annotations

import pytest
from support import SLIDING, add, make_engine, names, request, tokens_of
from toy_engine import ToyEngine

from kvpool import CopyKind, Tier
from kvpool.scheduling.request import RequestGroup
from kvpool.scheduling.running import Arrivals, _HeldBack
from managers import FULL, make_manager


def offloaded(engine: ToyEngine, *requests: object) -> None:
    """Completes requests and moves all that they leave cached to the host."""
    add(engine, *requests)  # type: ignore[arg-type]
    engine.drain()
    for pool in engine.manager.config.pools:
        engine.manager.cache.offload(pool.num_blocks[Tier.GPU], pool=pool.index)
    engine.launch(engine.scheduler.step())
    assert engine.manager.stats().pool().cached == 0


def decoding_engine(**options: object) -> ToyEngine:
    """An engine with the prefix of 16 tokens on the host, on which another request decodes."""
    options = {"link_steps": 3} | options
    engine = make_engine(make_manager(gpu_blocks=24, host_blocks=24), **options)  # type: ignore[arg-type]
    offloaded(engine, request("before", 17, 1))
    add(engine, request("reader", 5, 30, first=40))
    engine.step()
    return engine


def test_given_a_prefix_on_the_host_when_others_decode_then_they_go_on_while_it_is_on_its_way() -> None:
    engine = decoding_engine()
    add(engine, request("new", 20, 3))
    plans = [engine.step() for _ in range(5)]

    assert names(plans[0].admitted) == ["new"]
    assert [tokens_of(plan) for plan in plans[:3]] == [{"reader": 1}] * 3
    assert tokens_of(plans[3]) == {"reader": 1, "new": 4}  # 16 came from the host
    assert tokens_of(plans[4]) == {"reader": 1, "new": 1}
    assert engine.waited == []
    assert engine.scheduler.stats.arrival_waits == 1
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_a_sequence_that_waits_for_its_blocks_then_the_scheduler_counts_it_as_running() -> None:
    engine = decoding_engine()
    add(engine, request("new", 20, 3))
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_arriving, engine.scheduler.num_waiting) == (2, 1, 0)
    engine.drain()
    assert engine.scheduler.num_arriving == 0


def test_given_nobody_else_to_serve_then_the_device_waits_and_the_step_is_planned_at_once() -> None:
    engine = make_engine(make_manager(gpu_blocks=24, host_blocks=24), link_steps=3)
    offloaded(engine, request("before", 17, 1))
    add(engine, request("new", 20, 3))
    plan = engine.step()

    assert tokens_of(plan) == {"new": 4}
    assert engine.waited == [plan.number]
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_an_engine_that_does_not_tell_what_landed_then_nobody_is_held_back() -> None:
    engine = make_engine(make_manager(gpu_blocks=24, host_blocks=24))
    offloaded(engine, request("before", 17, 1))
    add(engine, request("reader", 5, 30, first=40))
    engine.step()
    add(engine, request("new", 20, 3))
    assert tokens_of(engine.step()) == {"reader": 1, "new": 4}
    assert engine.scheduler.stats.arrival_waits == 0


@pytest.mark.parametrize("num_new", [2, 3, 4])
def test_given_a_request_that_waits_for_its_prefix_then_it_holds_no_block_for_the_rest_of_its_prompt(
    num_new: int,
) -> None:
    engine = decoding_engine()
    before = engine.manager.stats().pool().referenced
    add(engine, request("new", 16 + num_new, 3))
    engine.step()
    assert engine.scheduler.num_arriving == 1
    assert engine.manager.stats().pool().referenced == before + 4  # those of the prefix


def test_given_two_requests_with_one_prefix_on_its_way_then_it_comes_once_and_both_wait_for_it() -> None:
    engine = decoding_engine()
    add(engine, request("first", 20, 3), request("second", 18, 3))
    plans = [engine.step() for _ in range(4)]
    assert [tokens_of(plan) for plan in plans[:3]] == [{"reader": 1}] * 3
    assert tokens_of(plans[3]) == {"reader": 1, "first": 4, "second": 2}
    assert engine.manager.stats().onboarded_blocks == 4
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_a_prompt_that_is_all_on_the_host_then_its_last_token_is_computed_behind_the_landing() -> None:
    engine = decoding_engine()
    add(engine, request("same", 16, 3), request("twin", 16, 3))
    plans = [engine.step() for _ in range(4)]
    assert [tokens_of(plan) for plan in plans] == [{"reader": 1}] * 3 + [{"reader": 1, "same": 1, "twin": 1}]
    copies = [(op.kind, op.num_blocks) for plan in plans for op in plan.copies]
    assert copies == [(CopyKind.ONBOARD, 4)]  # both write into the block that both read: the same keys and values
    assert engine.waited == []
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_a_prefetched_prefix_then_its_request_waits_for_the_landing_too() -> None:
    engine = decoding_engine(max_tokens_per_step=8)
    add(engine, request("filler", 7, 2, first=80), request("new", 20, 3))
    first = engine.step()
    assert names(first.admitted) == ["filler"]  # the step is full: the next in line has its prefix brought up
    assert engine.scheduler.stats.prefetched_blocks == 4
    plans = [engine.step() for _ in range(3)]
    assert names(plans[0].admitted) == ["new"]
    assert ["new" in tokens_of(plan) for plan in plans] == [False, False, True]
    assert engine.waited == []
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_a_sequence_that_was_swapped_out_then_it_decodes_again_behind_its_landing() -> None:
    engine = make_engine(
        make_manager(gpu_blocks=8, host_blocks=16), link_steps=2, policy="priority", preemption="swap", max_sequences=4
    )
    add(engine, request("long", 9, 20))
    engine.step()
    engine.step()
    add(engine, request("urgent", 18, 6, first=40, priority=1), request("reader", 2, 20, first=80, priority=2))
    engine.drain()
    assert engine.scheduler.stats.swapped_in >= 1
    assert engine.scheduler.stats.arrival_waits >= 1
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_sequences_that_wait_for_several_plans_then_those_whose_last_one_is_the_earliest_come_first() -> None:
    arrivals, held = Arrivals(), {"a": (1, 2), "b": (2,), "c": (1, 3), "d": (3,)}
    group = RequestGroup(request("r", 4), 0.0)
    sequences = {name: group.new_sequence(group.request.prompt) for name in held}
    for name, plans in held.items():
        arrivals._held[sequences[name]] = _HeldBack(frozenset(plans), decodes=name == "a")
    assert arrivals.take_next() == {sequences["a"]: True, sequences["b"]: False}
    assert arrivals.take_next() == {sequences["c"]: False, sequences["d"]: False}
    assert (len(arrivals), arrivals.take_next()) == (0, {})


def test_given_a_request_that_is_cancelled_on_its_way_then_nothing_is_left_of_it() -> None:
    engine = decoding_engine()
    add(engine, request("new", 20, 3))
    engine.step()
    engine.scheduler.cancel("new")
    assert engine.scheduler.num_arriving == 0
    engine.drain()
    engine.manager.check()
    assert engine.manager.stats().pool().referenced == 0


@pytest.mark.parametrize("layers", [[FULL], [FULL, SLIDING]])
@pytest.mark.parametrize("link_steps", [1, 5])
def test_given_a_small_pool_and_a_slow_link_then_conversations_come_back_right(
    layers: list[object], link_steps: int
) -> None:
    manager = make_manager(*layers, gpu_blocks=12 * len(layers), host_blocks=60 * len(layers))  # type: ignore[arg-type]
    engine = make_engine(manager, link_steps=link_steps, depth=2, max_sequences=4)
    turns = [[request(f"r{i}.{turn}", 9 + 6 * turn, 3, first=30 * i) for i in range(5)] for turn in range(3)]
    for turn in turns:
        add(engine, *turn)
        engine.drain()
    engine.assert_right(*(each for turn in turns for each in turn))
    assert engine.manager.stats().onboarded_blocks > 0
