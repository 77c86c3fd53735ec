from __future__ import annotations

from typing import Any

import pytest
from support import SLIDING, add, make_engine, names, request, tokens_of
from toy_engine import expected_output

from kvpool import CopyKind, KVCacheManager, LayerSpec, PrefixMatch, ReuseScope, Tier
from kvpool.scheduling import CapacityMode, FinishReason, Request
from kvpool.scheduling.batch_plan import PlanBuilder
from kvpool.scheduling.planning import RETRY_STEPS
from managers import FULL, cached, make_manager


def test_given_a_watermark_when_a_request_would_use_it_then_it_waits_until_the_other_is_done() -> None:
    engine = make_engine(make_manager(gpu_blocks=4, watermark=0.25))
    add(engine, request("a", 8, 2), request("b", 8, 2, first=50))
    assert names(engine.step().admitted) == ["a"]
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


def test_given_a_request_as_large_as_the_pool_when_it_is_alone_then_the_watermark_does_not_keep_it_out() -> None:
    engine = make_engine(make_manager(gpu_blocks=4, watermark=0.25))
    only = request("a", 14, 3)
    add(engine, only)
    engine.drain(max_steps=10)
    engine.assert_right(only)


def test_given_a_prompt_in_chunks_when_another_waits_then_the_blocks_of_its_later_chunks_are_not_given_away() -> None:
    engine = make_engine(make_manager(gpu_blocks=8), max_chunk_tokens=4)
    add(engine, request("long", 24, 2), request("other", 12, 2, first=50))
    for _ in range(6):
        assert names(engine.step().sequences) == ["long"]
    engine.drain()
    assert engine.scheduler.stats.preemptions == 0


def test_given_strict_order_when_a_large_request_does_not_fit_then_small_ones_do_not_overtake_it() -> None:
    engine = make_engine(make_manager(gpu_blocks=6))
    add(engine, request("a", 12, 6), request("large", 16, 2, first=50), request("small", 2, 2, first=90))
    admitted = [name for _ in range(12) for name in names(engine.step().admitted)]
    assert admitted == ["a", "large", "small"]


@pytest.mark.quick("1-layers0")
@pytest.mark.parametrize("layers", [[FULL], [FULL, SLIDING]])
@pytest.mark.parametrize("n", [1, 3])
def test_given_guaranteed_capacity_then_nobody_is_ever_preempted_or_stalled(layers: list[object], n: int) -> None:
    manager = make_manager(*layers, gpu_blocks=20 * len(layers), partial_match=False)  # type: ignore[arg-type]
    engine = make_engine(manager, capacity="guaranteed", depth=2)
    requests = [request(f"r{i}", 7, 14, first=20 * i, n=n) for i in range(6)]
    add(engine, *requests)
    engine.drain()
    engine.assert_right(*requests)
    assert (engine.scheduler.stats.preemptions, engine.scheduler.stats.stalls) == (0, 0)


def test_given_a_full_pool_when_nobody_comes_or_leaves_then_it_is_asked_again_only_now_and_then() -> None:
    asked: list[int] = []

    class Noting(KVCacheManager):
        def match_prefix(self, *arguments: Any, **options: Any) -> PrefixMatch:
            asked.append(step)
            return super().match_prefix(*arguments, **options)

    engine = make_engine(Noting(make_manager(gpu_blocks=8).config))
    add(engine, request("runs", 10, 20), request("waits", 24, 2, first=50))
    for step in range(2 * RETRY_STEPS + 1):  # noqa: B007 - match_prefix notes it
        engine.step()
    assert sorted(set(asked)) == [0, RETRY_STEPS, 2 * RETRY_STEPS]
    step = -1
    add(engine, request("comes", 20, 2, first=80))
    engine.step()
    assert asked[-1] == -1


def test_given_guaranteed_capacity_then_fewer_run_at_once_than_with_the_most_use() -> None:
    at_once = {}
    for mode in CapacityMode:
        engine = make_engine(make_manager(gpu_blocks=10), capacity=mode)
        add(engine, *(request(f"r{i}", 4, 13, first=20 * i) for i in range(4)))
        engine.step()
        at_once[mode] = engine.scheduler.num_running
        engine.drain()
    assert at_once == {CapacityMode.MAX_UTILISATION: 4, CapacityMode.GUARANTEED: 2}


def test_given_two_equal_prompts_when_the_first_is_being_computed_then_the_second_waits_and_computes_only_the_rest() -> (
    None
):
    engine = make_engine(max_chunk_tokens=8)
    requests = [request("producer", 17), request("waiter", 17), request("other", 5, first=60)]
    add(engine, *requests)
    assert names(engine.step().admitted) == ["producer", "other"]
    assert names(engine.step().admitted) == []
    assert engine.scheduler.stats.prefix_waits == 1
    engine.step()
    assert tokens_of(engine.step())["waiter"] == 1
    engine.drain()
    engine.assert_right(*requests)


def test_given_waiting_switched_off_then_equal_prompts_are_computed_side_by_side() -> None:
    engine = make_engine(wait_for_prefix=False)
    add(engine, request("a", 9), request("b", 9))
    assert names(engine.step().admitted) == ["a", "b"]
    engine.drain()


def test_given_a_waiter_when_its_producer_is_cancelled_then_it_computes_the_prefix_itself() -> None:
    engine = make_engine(max_chunk_tokens=4)
    waiter = request("waiter", 12)
    add(engine, request("producer", 12), waiter)
    engine.step()
    engine.scheduler.cancel("producer")
    assert names(engine.step().admitted) == ["waiter"]
    engine.drain()
    engine.assert_right(waiter)


def test_given_other_scopes_then_nobody_waits_for_a_prefix_that_it_may_not_use() -> None:
    engine = make_engine(max_chunk_tokens=4)
    add(engine, request("a", 12, scope=ReuseScope(tenant="a")), request("b", 12, scope=ReuseScope(tenant="b")))
    assert names(engine.step().admitted) == ["a", "b"]
    engine.drain()


def test_given_an_offloaded_prefix_when_its_request_is_next_in_line_then_it_is_brought_up_ahead() -> None:
    manager = make_manager(host_blocks=16)
    engine = make_engine(manager, max_sequences=1)
    add(engine, request("first", 16, 1))
    engine.drain()
    manager.cache.offload(16)
    again = request("again", 18, 2)
    add(engine, request("running", 4, 4, first=80), again)
    plan = engine.step()
    assert [op.kind for op in plan.copies] == [CopyKind.OFFLOAD, CopyKind.ONBOARD]
    assert (names(plan.sequences), engine.scheduler.stats.prefetched_blocks) == (["running"], 4)
    engine.drain()
    engine.assert_right(again)


def test_given_an_offloaded_prefix_when_there_is_no_room_for_its_request_then_it_stays_below() -> None:
    manager = make_manager(gpu_blocks=16, host_blocks=16)
    engine = make_engine(manager, max_sequences=2)
    add(engine, request("first", 16, 1))
    engine.drain()
    manager.cache.offload(16)
    again = request("again", 40, 2)
    # 8 of 16 blocks; the other one needs 10, of which 4 are below
    add(engine, request("running", 32, 4, first=80), again)
    plan = engine.step()
    assert (names(plan.sequences), engine.scheduler.stats.prefetched_blocks) == (["running"], 0)
    engine.drain()
    engine.assert_right(again)


@pytest.mark.parametrize(("num_running", "prefetched"), [(32, 0), (20, 4)])
def test_given_a_prefix_half_of_which_was_offloaded_then_that_half_comes_up_if_there_is_room_for_all_of_its_request(
    num_running: int, prefetched: int
) -> None:
    manager = make_manager(gpu_blocks=16, host_blocks=16)
    engine = make_engine(manager, max_sequences=1)
    add(engine, request("first", 32, 1))
    engine.drain()
    manager.cache.offload(4)
    again = request("again", 38, 2)  # 10 blocks, of which 4 are on the GPU and 4 below
    add(engine, request("running", num_running, 4, first=80), again)  # 8 or 5 of 16 blocks
    plan = engine.step()
    assert (names(plan.sequences), engine.scheduler.stats.prefetched_blocks) == (["running"], prefetched)
    engine.drain()
    engine.assert_right(again)


def swap_out(engine: Any, manager: KVCacheManager, running: Request) -> None:
    """A request runs and is swapped out for a more urgent one; then all that is cached goes to the host."""
    add(engine, running)
    engine.step()
    add(engine, request("urgent", 4, 8, first=80, priority=1))
    while not engine.scheduler.num_swapped:
        engine.step()
    manager.cache.offload(16)


def test_given_a_swapped_request_that_is_next_in_line_then_its_prompt_is_not_brought_up_a_second_time() -> None:
    manager = make_manager(host_blocks=32)
    engine = make_engine(manager, max_sequences=1, preemption="swap", policy="priority")
    swapped = request("swapped", 16, 8)
    swap_out(engine, manager, swapped)
    assert Tier.HOST in manager.match_prefix(list(range(17))).tokens_by_tier
    add(engine, request("last", 4, 1, first=90))  # somebody new: the queue is looked at again
    engine.step()
    assert engine.scheduler.stats.prefetched_blocks == 0
    engine.drain()
    engine.assert_right(swapped)


def test_given_a_swapped_request_that_is_next_in_line_then_the_prefix_of_the_one_behind_it_is_brought_up_ahead() -> (
    None
):
    manager = make_manager(host_blocks=32)
    engine = make_engine(manager, max_sequences=1, preemption="swap", policy="priority", prefetch_requests=2)
    add(engine, request("before", 16, 1))
    engine.drain()
    swapped, again = request("swapped", 8, 8, first=50), request("again", 18, 2)
    swap_out(engine, manager, swapped)
    add(engine, again)
    engine.step()
    assert engine.scheduler.stats.prefetched_blocks == 4
    engine.drain()
    engine.assert_right(swapped, again)


def test_given_a_swapped_request_without_room_to_come_back_then_nobody_overtakes_it() -> None:
    manager = make_manager(gpu_blocks=12, host_blocks=32, max_pinned_tokens=36)
    engine = make_engine(manager, max_sequences=1, preemption="swap", policy="priority")
    kept = cached(manager, 24, first=500)
    swapped = request("swapped", 16, 8)
    add(engine, swapped)
    engine.step()
    add(engine, request("urgent", 4, 2, first=80, priority=1))
    while not engine.scheduler.num_swapped:
        engine.step()
    pins = [manager.cache.pin(kept), manager.cache.pin(cached(manager, 12, first=600))]
    while "urgent" not in engine.finished:
        engine.step()
    small = request("small", 4, 2, first=90)
    add(engine, small)
    plan = engine.step()
    assert (names(plan.admitted), names(plan.resumed), names(plan.sequences)) == ([], [], [])
    for pin in pins:
        manager.cache.unpin(pin)
    engine.drain()
    engine.assert_right(swapped, small)


def test_given_prefetching_switched_off_then_a_prefix_comes_up_with_its_request() -> None:
    manager = make_manager(host_blocks=16)
    engine = make_engine(manager, max_sequences=1, prefetch_requests=0)
    add(engine, request("first", 16, 1))
    engine.drain()
    manager.cache.offload(16)
    again = request("again", 18, 2)
    add(engine, request("running", 4, 4, first=80), again)
    engine.drain()
    engine.assert_right(again)
    assert engine.scheduler.stats.prefetched_blocks == 0


def test_given_a_pool_that_shrinks_when_a_waiting_request_can_no_longer_fit_then_it_is_refused_with_the_reason() -> (
    None
):
    manager = make_manager(gpu_blocks=16)
    engine = make_engine(manager)
    add(engine, request("a", 40, 4))
    manager.cache.resize(8)
    plan = engine.step()
    (done,) = plan.finished
    assert (done.request.id, done.reason, plan.is_empty) == ("a", FinishReason.REFUSED, True)
    assert "11 blocks of pool 0, which has 8" in done.detail
    assert not engine.scheduler.has_work


def test_given_that_less_is_reused_than_was_found_then_the_first_chunk_is_no_longer_than_the_step() -> None:
    engine = make_engine(make_manager(gpu_blocks=16), max_tokens_per_step=8)
    only = request("a", 20, 3)
    add(engine, only)
    scheduler, (sequence,) = engine.scheduler, engine.scheduler.sequences("a")
    builder, admissions = PlanBuilder(scheduler._queues, 1), scheduler._planner.admissions
    handle = engine.manager.allocate(sequence.id, sequence.prompt, reserve=20)  # as if 12 of them had been cached
    admissions._enter(sequence, handle)
    admissions._start_prompt(sequence, handle, builder)
    chunk = builder.chunks[sequence]
    assert (chunk.start, chunk.stop, handle.num_reserved) == (0, 8, 8)
    assert scheduler._queues.running.lanes.places[sequence.lane] == 8
    assert builder.budget == 0


def test_given_one_pool_of_two_that_shrinks_when_a_waiting_request_can_no_longer_fit_then_it_is_refused() -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=2, head_dim=8), gpu_blocks=(16, 16))
    engine = make_engine(manager)
    add(engine, request("a", 40, 4))
    manager.cache.resize(8, pool=1)
    (done,) = engine.step().finished
    assert done.reason is FinishReason.REFUSED
    assert "11 blocks of pool 1, which has 8" in done.detail


def test_given_a_pool_that_shrinks_when_a_running_request_reaches_its_end_then_it_ends_with_what_it_has() -> None:
    manager = make_manager(gpu_blocks=16)
    engine = make_engine(manager)
    running, waiting = request("running", 8, 20), request("waiting", 4, 4, first=50)
    add(engine, running)
    engine.step()
    manager.cache.resize(4)
    add(engine, waiting)
    engine.drain(max_steps=60)
    done = engine.finished["running"]
    assert done.reason is FinishReason.REFUSED
    assert done.token_ids.tolist() == expected_output(running)[: len(done.token_ids)]
    assert len(done.token_ids) == 9  # 16 places, and the sample behind the last of them
    engine.assert_right(waiting)


def test_given_pins_that_leave_no_room_when_they_end_then_the_request_that_waited_runs() -> None:
    manager = make_manager(gpu_blocks=4, max_pinned_tokens=16)
    engine = make_engine(manager)
    add(engine, request("pinned", 12, 1))
    engine.drain()
    pin = manager.cache.pin(range(12))
    waiting = request("waiting", 8, 2, first=50)
    add(engine, waiting)
    engine.step()
    assert engine.step().is_empty or engine.scheduler.num_running  # it has begun with the one block that is left
    manager.cache.unpin(pin)
    engine.drain()
    engine.assert_right(waiting)


def test_given_many_waiting_and_a_full_pool_when_nobody_leaves_then_the_queue_is_not_searched_in_every_step() -> None:
    class Counting(KVCacheManager):
        num_searches = 0

        def match_prefix(self, *args: Any, **options: Any) -> PrefixMatch:
            self.num_searches += 1
            return super().match_prefix(*args, **options)

    manager = Counting(make_manager(gpu_blocks=8).config)
    engine = make_engine(manager)
    add(engine, request("a", 4, 25), *(request(f"r{i}", 24, 2, first=100 * i) for i in range(1, 9)))
    engine.step()
    manager.num_searches = 0
    for _ in range(16):
        assert names(engine.step().sequences) == ["a"]
    assert manager.num_searches < 16


def test_given_a_pool_that_shrinks_when_waiting_samples_can_no_longer_fit_then_their_request_is_refused_once() -> None:
    manager = make_manager(gpu_blocks=8)
    engine = make_engine(manager, depth=2)
    add(engine, request("a", 8, 22, n=4))
    while len(engine.scheduler._queues.resuming) < 2:
        engine.step()
    while engine.launched:
        engine.complete()
    for sequence in engine.scheduler.sequences("a"):
        if sequence.is_running:
            engine.scheduler.finish("a", sequence.index)
    manager.cache.resize(4)
    (done,) = engine.step().finished
    assert FinishReason.REFUSED in [output.reason for output in done.outputs]
    assert not engine.scheduler.has_work
    assert manager.stats().num_sequences == 0
