from __future__ import annotations

from dataclasses import asdict

import pytest
from support import add, make_engine, names, request, tokens_of
from toy_engine import ToyEngine

from kvpool import CopyKind, LayerSpec
from kvpool.scheduling import BatchPlan, LinearCostModel, PreemptionMode, Request, SchedulerStats, SequenceState
from managers import FULL, make_manager

FAST_LINK = LinearCostModel(transfer_bytes_per_second=1e15, transfer_latency=0.0)
SLOW_LINK = LinearCostModel(transfer_bytes_per_second=1.0)


def until_preempted(engine: ToyEngine) -> BatchPlan:
    while not (plan := engine.step()).preempted:
        assert engine.scheduler.has_work, "nobody was preempted"
    return plan


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("host_blocks", [0, 2, 32])
def test_given_a_pool_for_one_and_a_half_when_two_run_then_one_gives_way_and_both_end_right(
    depth: int, mode: PreemptionMode, host_blocks: int
) -> None:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=host_blocks), depth=depth, preemption=mode)
    requests = [request("old", 8, 12), request("young", 8, 12, first=50)]
    add(engine, *requests)
    plan = until_preempted(engine)
    assert names(plan.preempted) == ["young"]
    engine.drain(max_steps=100)
    engine.assert_right(*requests)


def preempted_state(costs: LinearCostModel, **config: object) -> SequenceState:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=16), costs=costs, **config)
    add(engine, request("old", 8, 12), request("young", 8, 12, first=50))
    (victim,) = until_preempted(engine).preempted
    state = victim.state
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))
    return state


def test_given_the_costs_of_both_ways_then_each_victim_takes_the_cheaper_one() -> None:
    assert preempted_state(FAST_LINK) is SequenceState.SWAPPED
    assert preempted_state(SLOW_LINK) is SequenceState.WAITING


def test_given_an_override_then_costs_do_not_matter() -> None:
    assert preempted_state(SLOW_LINK, preemption="swap") is SequenceState.SWAPPED
    assert preempted_state(FAST_LINK, preemption="recompute") is SequenceState.WAITING


def test_given_swapping_and_a_host_without_room_then_the_victim_is_recomputed_and_nothing_fails() -> None:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=1), preemption="swap")
    requests = [request("old", 8, 12), request("young", 8, 12, first=50)]
    add(engine, *requests)
    (victim,) = until_preempted(engine).preempted
    assert victim.state is SequenceState.WAITING
    engine.drain()
    engine.assert_right(*requests)


def test_given_a_swapped_sequence_when_it_comes_back_then_its_copies_run_in_order_and_it_computes_nothing_twice() -> (
    None
):
    manager = make_manager(gpu_blocks=6, host_blocks=16, enable_prefix_caching=False)
    engine = make_engine(manager, preemption="swap")
    requests = [request("old", 8, 12), request("young", 8, 12, first=50)]
    add(engine, *requests)
    plan = until_preempted(engine)
    assert [op.kind for op in plan.copies] == [CopyKind.SWAP_OUT]
    assert engine.scheduler.num_swapped == 1
    while not (plan := engine.step()).resumed:
        pass
    assert [op.kind for op in plan.copies] == [CopyKind.SWAP_IN]
    engine.drain()
    engine.assert_right(*requests)
    assert engine.scheduler.stats.prefill_tokens == 16


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("swap", dict(steps=20, decode_tokens=22, prefill_tokens=16, swapped_out=1, swapped_in=1)),
        # of the 12 tokens that it gave up, all are still cached when it comes back; the newest is computed as a prompt
        ("recompute", dict(steps=19, decode_tokens=21, prefill_tokens=17, cached_tokens=12, recomputed_tokens=12)),
    ],
)
def test_given_one_preemption_then_the_counters_say_how_it_went(mode: str, expected: dict[str, int]) -> None:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=16), preemption=mode)
    add(engine, request("old", 8, 12), request("young", 8, 12, first=50))
    engine.drain()
    assert engine.scheduler.stats == SchedulerStats(preemptions=1, finished=2, **expected)


def test_given_a_new_scheduler_then_all_counters_are_zero() -> None:
    assert set(asdict(make_engine().scheduler.stats).values()) == {0}


def test_given_a_sequence_then_it_has_a_lane_while_it_runs_and_counts_how_often_it_gave_way() -> None:
    engine = make_engine()
    add(engine, request("a", 6, 4))
    (sequence,) = engine.scheduler.sequences("a")
    seen = [(sequence.lane, sequence.num_preemptions)]
    for _ in range(2):
        engine.step()
        seen.append((sequence.lane, sequence.num_preemptions))
        engine.scheduler._queues.preempt(sequence, 0)
        seen.append((sequence.lane, sequence.num_preemptions))
    engine.drain()
    assert seen == [(-1, 0), (0, 0), (-1, 1), (0, 1), (-1, 2)]
    assert sequence.lane == -1


def test_given_a_block_for_one_of_two_that_need_one_then_the_older_goes_on_and_the_younger_sits_out() -> None:
    engine = make_engine(make_manager(gpu_blocks=5))
    requests = [request("old", 8, 4), request("young", 8, 4, first=50)]
    add(engine, *requests)
    engine.step()
    plan = engine.step()
    assert (names(plan.sequences), names(plan.preempted), engine.scheduler.stats.stalls) == (["old"], [], 1)
    engine.drain()
    engine.assert_right(*requests)


def test_given_a_sequence_that_came_back_from_the_host_then_it_can_be_swapped_again() -> None:
    engine = make_engine(make_manager(host_blocks=16), preemption="swap")
    add(engine, request("a", 6, 9))
    (sequence,) = engine.scheduler.sequences("a")
    for _ in range(2):
        engine.step()
        engine.step()
        engine.scheduler._queues.preempt(sequence, 0)
        assert sequence.state is SequenceState.SWAPPED
    engine.drain()


def test_given_two_that_lose_as_much_then_the_younger_gives_way() -> None:
    engine = make_engine(make_manager(gpu_blocks=6))
    add(engine, request("oldest", 8, 8), *(request(name, 5, 8, first=50 * i) for i, name in enumerate("bc", 1)))
    assert names(until_preempted(engine).preempted) == ["c"]


def test_given_two_samples_of_one_request_that_lose_as_much_then_the_later_one_gives_way() -> None:
    engine = make_engine(make_manager(gpu_blocks=8))
    add(engine, request("oldest", 8, 12), request("samples", 4, 12, first=50, n=2))
    [victim] = until_preempted(engine).preempted
    assert (victim.request.id, victim.index) == ("samples", 1)


class TokensAsSeconds:
    """A token takes a second to compute, and a copy half of `swap`, whatever it copies."""

    def __init__(self, swap: float) -> None:
        self.swap = swap

    def prefill_seconds(self, num_tokens: int, context: int) -> float:
        return num_tokens

    def decode_seconds(self, num_sequences: int, context: int) -> float:
        return num_sequences

    def transfer_seconds(self, num_bytes: int) -> float:
        return self.swap / 2


@pytest.mark.parametrize(
    ("swap", "state"), [(11.5, SequenceState.SWAPPED), (12.0, SequenceState.WAITING), (12.5, SequenceState.WAITING)]
)
def test_given_a_victim_of_twelve_tokens_then_it_is_swapped_if_that_takes_less_than_to_compute_all_of_them_again(
    swap: float, state: SequenceState
) -> None:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=16), costs=TokensAsSeconds(swap))
    add(engine, request("old", 8, 12), request("young", 8, 12, first=50))
    [victim] = until_preempted(engine).preempted
    assert len(victim.tokens) == 13  # the newest one has no keys and values yet
    assert victim.state is state


def test_given_a_sample_with_siblings_then_it_loses_what_it_generated_itself_and_not_the_prompt_that_they_keep() -> (
    None
):
    engine = make_engine(make_manager(gpu_blocks=11), costs=TokensAsSeconds(swap=1e9))
    add(engine, request("oldest", 3, 30), request("samples", 4, 30, first=50, n=2))
    while len(engine.scheduler.token_ids(engine.scheduler.sequences("samples")[0])) < 12:
        engine.step()
    add(engine, request("short", 1, 30, first=100))
    assert names(until_preempted(engine).preempted) == ["short"]  # 8 tokens are more than it has


def test_given_one_as_urgent_that_holds_what_is_missing_then_a_less_urgent_one_does_not_give_way_in_vain() -> None:
    engine = make_engine(make_manager(gpu_blocks=8), policy="priority")
    add(engine, request("equal", 20, 4, priority=1), request("low", 4, 4, first=50))
    engine.step()
    add(engine, request("next", 16, 2, first=100, priority=1))
    plan = engine.step()
    assert (names(plan.preempted), names(plan.admitted)) == ([], [])
    engine.drain()


def test_given_a_sample_whose_siblings_have_left_then_it_would_lose_its_prompt_too() -> None:
    engine = make_engine(make_manager(gpu_blocks=32), costs=TokensAsSeconds(swap=1e9))
    add(engine, request("samples", 8, 30, n=2))
    for _ in range(3):
        engine.step()
    queues = engine.scheduler._queues
    first, second = engine.scheduler.sequences("samples")
    with_sibling = queues.loss(first)
    queues.preempt(second, 0)
    assert queues.loss(first) == with_sibling + 8
    engine.drain()


@pytest.mark.parametrize("num_left", [1, 2, 3])
def test_given_a_prompt_that_is_swapped_between_two_chunks_then_it_goes_on_with_the_second(num_left: int) -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=16, enable_prefix_caching=False)
    engine = make_engine(manager, policy="priority", preemption="swap", max_chunk_tokens=8)
    requests = [request("calm", 8 + num_left, 2), request("urgent", 8, 2, first=50, priority=1)]
    add(engine, requests[0])
    engine.step()
    add(engine, requests[1])
    assert [sequence.state for sequence in engine.step().preempted] == [SequenceState.SWAPPED]
    engine.drain()
    engine.assert_right(*requests)


def test_given_preempted_and_new_requests_then_the_waiting_are_listed_with_the_preempted_first() -> None:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=16), preemption="recompute")
    add(engine, request("old", 8, 12), request("young", 8, 12, first=50))
    until_preempted(engine)
    add(engine, request("new", 12, first=100), request("newer", 12, first=150))
    assert names(engine.scheduler.waiting(3)) == ["young", "new", "newer"]
    assert names(engine.scheduler.waiting(2)) == ["young", "new"]
    assert engine.scheduler.waiting(0) == []


def test_given_a_request_on_the_host_then_it_is_not_listed_as_waiting() -> None:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=16), preemption="swap")
    add(engine, request("old", 8, 12), request("young", 8, 12, first=50))
    until_preempted(engine)
    add(engine, request("new", 12, first=100))
    assert names(engine.scheduler.waiting(9)) == ["new"]


def test_given_an_urgent_request_that_misses_one_block_then_a_less_urgent_one_with_one_block_gives_way() -> None:
    engine = make_engine(make_manager(gpu_blocks=2), policy="priority")
    add(engine, request("low", 2, 2))
    engine.step()
    add(engine, request("high", 5, 2, first=50, priority=1))
    plan = engine.step()
    assert (names(plan.preempted), names(plan.admitted)) == (["low"], ["high"])


def test_given_a_prompt_with_room_for_one_of_its_last_two_tokens_then_that_one_is_computed() -> None:
    engine = make_engine(make_manager(gpu_blocks=4), max_chunk_tokens=3)
    requests = [request("old", 3, 12), request("young", 5, 2, first=50)]
    add(engine, requests[0])
    while len(engine.scheduler.token_ids(engine.scheduler.sequences("old")[0])) < 8:
        engine.step()
    add(engine, requests[1])
    assert [tokens_of(engine.step()) for _ in range(2)] == [{"old": 1, "young": 3}, {"old": 1, "young": 1}]
    engine.drain()
    engine.assert_right(*requests)


def test_given_sequences_at_and_off_a_blocks_end_and_forks_then_the_needy_are_those_without_a_place() -> None:
    engine = make_engine(make_manager(gpu_blocks=32), max_sequences=16)
    add(engine, *(request(f"{n}", n, 9, first=20 * n) for n in range(2, 9)), request("forked", 6, 9, first=300, n=2))
    engine.step()
    planner = engine.scheduler._planner
    sequences, _, batch = planner.running.decoding.rows()
    needy = planner._needy(batch, list(sequences))
    assert sorted(names(needy)) == ["4", "8", "forked", "forked"]
    assert all(any(engine.manager.blocks_needed(sequence.live_handle())) for sequence in needy)


def test_given_several_below_when_one_must_give_way_then_it_is_the_one_that_loses_least() -> None:
    engine = make_engine(make_manager(gpu_blocks=11))
    add(engine, request("oldest", 8), request("long", 18, first=50), request("short", 2, first=100))
    add(engine, request("middle", 10, first=150))  # only the oldest needs a block for its next token
    assert names(until_preempted(engine).preempted) == ["short"]
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_a_prompt_that_gave_way_to_the_first_then_the_last_still_gets_its_chunk_in_the_same_step() -> None:
    manager = make_manager(gpu_blocks=16)
    cached = manager.allocate("cached", range(100, 108))
    manager.commit(cached)
    engine = make_engine(manager, max_chunk_tokens=4, max_tokens_per_step=10)
    requests = [request(name, 20, 3, first=first) for name, first in (("first", 0), ("short", 50), ("long", 100))]
    add(engine, *requests)
    assert tokens_of(engine.step()) == {"first": 4, "short": 4, "long": 2}  # behind 8 cached tokens: it loses more
    outsider = manager.allocate("outsider", num_tokens=4 * manager.can_allocate(num_tokens=1).blocks_available[0])
    plan = engine.step()
    assert (names(plan.preempted), tokens_of(plan)) == (["short"], {"first": 4, "long": 2})
    manager.free(outsider)
    engine.drain()
    engine.assert_right(*requests[:2])  # nobody wrote the keys and values of "cached"


def test_given_no_one_below_when_the_youngest_needs_a_block_then_it_sits_out_and_loses_nothing() -> None:
    engine = make_engine(make_manager(gpu_blocks=4))
    requests = [request("old", 9, 4), request("young", 4, 9, first=50)]
    add(engine, *requests)
    seen = [names(engine.step().sequences) for _ in range(3)]
    assert ["old"] in seen
    engine.drain()
    engine.assert_right(*requests)
    assert engine.scheduler.stats.stalls > 0
    assert engine.scheduler.stats.preemptions == 0


def test_given_an_urgent_request_when_the_pool_is_full_then_a_less_urgent_one_gives_way_at_once() -> None:
    engine = make_engine(make_manager(gpu_blocks=6), policy="priority")
    requests = [request("calm", 16, 8), request("urgent", 16, 4, first=50, priority=1)]
    add(engine, requests[0])
    engine.step()
    add(engine, requests[1])
    plan = engine.step()
    assert (names(plan.preempted), names(plan.admitted), names(plan.sequences)) == (["calm"], ["urgent"], ["urgent"])
    engine.drain()
    engine.assert_right(*requests)
    assert list(engine.finished) == ["urgent", "calm"]


def test_given_an_urgent_request_when_all_lanes_are_taken_then_a_less_urgent_one_leaves_its_lane() -> None:
    engine = make_engine(max_sequences=1, policy="priority")
    add(engine, request("calm", 4, 8))
    engine.step()
    add(engine, request("urgent", 4, 4, first=50, priority=1))
    assert names(engine.step().preempted) == ["calm"]
    engine.drain()


def test_given_an_urgent_request_that_would_not_fit_even_then_nobody_is_preempted_in_vain() -> None:
    engine = make_engine(make_manager(gpu_blocks=8), policy="priority")
    add(engine, request("first", 20, 6, priority=2), request("calm", 4, 4, first=50))
    engine.step()
    add(engine, request("urgent", 20, 2, first=80, priority=1))
    assert names(engine.step().preempted) == []
    engine.drain()


def test_given_an_urgent_request_that_would_fit_into_one_pool_of_two_then_nobody_is_preempted_in_vain() -> None:
    wide = LayerSpec(kv_heads=1, head_dim=32)
    engine = make_engine(make_manager(FULL, wide, gpu_blocks=[16, 8]), policy="priority")
    add(engine, request("first", 20, 6, priority=2), request("calm", 4, 4, first=50))
    engine.step()
    add(engine, request("urgent", 20, 2, first=80, priority=1))
    assert names(engine.step().preempted) == []
    engine.drain()


def test_given_guaranteed_capacity_when_an_urgent_request_comes_then_it_waits() -> None:
    engine = make_engine(make_manager(gpu_blocks=6), policy="priority", capacity="guaranteed")
    add(engine, request("calm", 16, 8))
    engine.step()
    add(engine, request("urgent", 16, 4, first=50, priority=1))
    engine.drain()
    assert list(engine.finished) == ["calm", "urgent"]
    assert engine.scheduler.stats.preemptions == 0


def test_given_a_swapped_request_of_low_priority_when_a_waiting_one_is_more_urgent_then_that_goes_first() -> None:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=16), policy="priority", preemption="swap")
    add(engine, request("low", 12, 8), request("high", 12, 8, first=50, priority=2))
    engine.step()
    add(engine, request("middle", 12, 4, first=100, priority=1))
    engine.drain()
    assert list(engine.finished) == ["high", "middle", "low"]


@pytest.mark.parametrize("mode", list(PreemptionMode))
def test_given_drafts_in_flight_when_their_sequence_gives_way_then_it_is_computed_again(mode: PreemptionMode) -> None:
    engine = make_engine(
        make_manager(host_blocks=16), preemption=mode, costs=FAST_LINK, drafts=(2,), max_draft_tokens=4
    )
    only = request("a", 6, 12)
    add(engine, only)
    engine.step()
    engine.step()
    plan = engine.scheduler.step()
    assert plan.num_drafts.tolist() == [3]
    engine.launched.append((plan, *engine.launch(plan)))
    (sequence,) = plan.sequences
    engine.scheduler._queues.preempt(sequence, 0)
    assert sequence.state is SequenceState.WAITING
    engine.complete()
    engine.drain()
    engine.assert_right(only)


def test_given_drafts_that_are_settled_then_their_sequence_is_swapped_like_any_other() -> None:
    engine = make_engine(make_manager(host_blocks=16), preemption="swap", drafts=(2,), max_draft_tokens=4)
    only = request("a", 6, 12)
    add(engine, only)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.stats.draft_tokens > 0
    (sequence,) = engine.scheduler.sequences("a")
    engine.scheduler._queues.preempt(sequence, 0)
    assert sequence.state is SequenceState.SWAPPED
    engine.drain()
    engine.assert_right(only)


def swapped_urgent(engine: ToyEngine, *others: Request) -> None:
    """An urgent request that is swapped out while its sample is in flight, so that `others` enter before it."""
    add(engine, request("urgent", 14, 6, priority=1))
    (sequence,) = engine.step().sequences
    plan = engine.scheduler.step()
    engine.launched.append((plan, *engine.launch(plan)))
    engine.scheduler._queues.preempt(sequence, 0)
    assert sequence.state is SequenceState.SWAPPED
    add(engine, *others)
    plan = engine.scheduler.step()
    assert names(plan.admitted) == [each.id for each in others]
    engine.launched.append((plan, *engine.launch(plan)))
    while engine.launched:
        engine.complete()


def test_given_an_urgent_request_on_the_host_then_a_less_urgent_one_gives_way_to_it() -> None:
    manager = make_manager(gpu_blocks=6, host_blocks=16, enable_prefix_caching=False)
    engine = make_engine(manager, policy="priority", preemption="swap")
    swapped_urgent(engine, request("calm", 12, 4, first=50))
    plan = engine.step()
    assert (names(plan.preempted), names(plan.resumed)) == (["calm"], ["urgent"])
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_an_urgent_request_on_the_host_that_would_not_fit_even_then_nobody_gives_way_in_vain() -> None:
    manager = make_manager(gpu_blocks=8, host_blocks=16, enable_prefix_caching=False)
    engine = make_engine(manager, policy="priority", preemption="swap")
    swapped_urgent(engine, request("first", 18, 4, first=50, priority=2), request("calm", 3, 2, first=100))
    plan = engine.step()
    assert (names(plan.preempted), names(plan.resumed)) == ([], [])
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_given_a_victim_with_a_sample_in_flight_when_it_comes_back_late_then_it_is_kept(mode: str) -> None:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=16), preemption=mode, depth=3)
    requests = [request("old", 8, 12), request("young", 8, 12, first=50)]
    add(engine, *requests)
    (victim,) = until_preempted(engine).preempted
    assert victim.in_flight > 0
    before = len(victim.tokens)
    while victim.in_flight:
        engine.complete()
    assert len(victim.tokens) > before
    engine.drain()
    engine.assert_right(*requests)


def test_given_a_victim_whose_last_sample_is_in_flight_then_it_is_spared_because_it_leaves_by_itself() -> None:
    engine = make_engine(make_manager(gpu_blocks=4), depth=2)
    add(engine, request("old", 8, 8), request("young", 7, 1, first=50))
    for _ in range(3):
        assert engine.step().preempted == []
    engine.drain()


def test_given_many_in_a_tiny_pool_when_all_want_to_grow_then_the_senior_always_goes_on() -> None:
    engine = make_engine(make_manager(gpu_blocks=8, host_blocks=4), depth=2)
    requests = [request(f"r{i}", 5, 20, first=10 * i) for i in range(8)]
    add(engine, *requests)
    steps = engine.drain(max_steps=400)
    engine.assert_right(*requests)
    assert list(engine.finished) == [each.id for each in requests]
    assert steps < 8 * 30


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_given_a_victim_with_a_sample_in_flight_when_there_is_room_then_it_resumes_only_after_that_sample(
    mode: str,
) -> None:
    engine = make_engine(make_manager(host_blocks=16), preemption=mode)
    scheduler = engine.scheduler
    only = request("a", 6, 4)
    add(engine, only)
    engine.step()
    plan = scheduler.step()
    engine.launched.append((plan, *engine.launch(plan)))
    scheduler._queues.preempt(plan.sequences[0], 0)
    assert scheduler.step().is_empty
    engine.complete()
    assert names(scheduler.step().resumed) == ["a"]


def test_given_a_chunk_in_flight_when_its_sequence_left_and_came_back_then_it_is_not_committed_twice() -> None:
    engine = make_engine(depth=3, max_chunk_tokens=4)
    only = request("a", 12, 3)
    add(engine, only)
    (sequence,) = engine.step().sequences
    engine.scheduler._queues.preempt(sequence, 0)
    engine.drain()
    engine.assert_right(only)


def test_given_a_row_that_was_planned_already_when_it_is_swapped_out_in_the_same_step_then_its_place_is_given_back() -> (
    None
):
    engine = make_engine(
        make_manager(gpu_blocks=6, host_blocks=16), policy="priority", preemption="swap", max_chunk_tokens=4
    )
    requests = [request("calm", 4, 15), request("urgent", 20, 2, first=50, priority=1)]
    add(engine, requests[0])
    engine.step()
    add(engine, requests[1])
    plan = until_preempted(engine)
    assert (names(plan.preempted), names(plan.sequences)) == (["calm"], ["urgent"])
    assert plan.preempted[0].state is SequenceState.SWAPPED
    engine.drain()
    engine.assert_right(*requests)
