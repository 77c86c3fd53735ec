"""What a scheduler promises: blocks to those that run, a place to those that wait, and nothing of one tenant to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import SLIDING, add, make_engine, make_manager, names, request
from toy_engine import ToyEngine, expected_output

from kvpool import CopyKind, CopyOp, LayerSpec, ReuseScope, Tier
from kvpool.errors import NeverFitsError
from kvpool.scheduling import FinishReason, Request
from kvpool.scheduling.batch_plan import transferred_bytes
from managers import FULL

TENANT = ReuseScope(tenant="acme")


def decoding_parent(engine: ToyEngine, **options: Any) -> Any:
    """A request of ten tokens that decodes."""
    engine.scheduler.add(request("parent", 10, 12, **options))
    for _ in range(4):
        engine.step()
    (parent,) = engine.scheduler.sequences("parent")
    return parent


@pytest.mark.parametrize(("of_parent", "of_child"), [(TENANT, ReuseScope()), (ReuseScope(), TENANT)])
def test_given_a_fork_for_another_tenant_then_nothing_is_shared(of_parent: ReuseScope, of_child: ReuseScope) -> None:
    engine = make_engine()
    parent = decoding_parent(engine, scope=of_parent)
    scheduler = engine.scheduler
    assert not scheduler.fork(parent, Request("child", scheduler.token_ids(parent), 6, scope=of_child))
    engine.step()
    (child,) = scheduler.sequences("child")
    assert child.live_handle().scope == of_child
    assert child.live_handle().num_cached_tokens == 0
    assert not set(child.live_handle().block_ids().tolist()) & set(parent.live_handle().block_ids().tolist())
    engine.manager.check()


def test_given_a_fork_for_the_same_tenant_then_it_shares() -> None:
    engine = make_engine()
    parent = decoding_parent(engine, scope=TENANT)
    assert engine.scheduler.fork(parent, Request("child", engine.scheduler.token_ids(parent), 6, scope=TENANT))


def test_given_a_fork_for_several_sequences_then_it_waits_like_any_other() -> None:
    engine = make_engine()
    parent = decoding_parent(engine)
    child = Request("child", engine.scheduler.token_ids(parent), 6, n=2)
    assert not engine.scheduler.fork(parent, child)
    assert engine.scheduler.num_waiting == 1


# --- promises ---------------------------------------------------------------------------------------------------------


def outstanding(engine: ToyEngine) -> list[int]:
    scheduler = engine.scheduler
    return scheduler._capacity.outstanding(scheduler._queues.running.lanes)


@pytest.mark.parametrize(
    ("num_tokens", "max_new_tokens", "n", "blocks"),
    [
        (8, 8, 1, 2),  # 15 places are 4 blocks, of which the prompt has 2
        (8, 8, 3, 2 + 2 * 2 + 1),  # two more samples with 2 blocks each, and one block to copy into
        (10, 8, 3, 2 + 2 * 3 + 1),  # the prompt's last block is not full: each further sample has its own
        (8, 1, 2, 1),  # a sample that is never stored needs nothing but the copy
    ],
)
def test_given_guaranteed_capacity_then_a_request_is_promised_the_blocks_of_all_its_samples(
    num_tokens: int, max_new_tokens: int, n: int, blocks: int
) -> None:
    engine = make_engine(make_manager(gpu_blocks=32), capacity="guaranteed")
    add(engine, request("a", num_tokens, max_new_tokens, n=n))
    engine.scheduler.step()
    assert outstanding(engine) == [blocks]


def test_given_maximum_capacity_then_a_request_is_promised_one_block_for_its_samples() -> None:
    engine = make_engine(make_manager(gpu_blocks=32))
    add(engine, request("one", 8, 8), request("three", 8, 8, first=20, n=3))
    engine.scheduler.step()
    assert outstanding(engine) == [1]


def test_given_samples_far_beyond_what_they_were_promised_then_each_keeps_its_block_to_copy_into() -> None:
    engine = make_engine(make_manager(gpu_blocks=32))
    add(engine, request("one", 8, 20), request("two", 8, 20, first=50, n=2))
    for _ in range(14):  # the promise was for the prompt: every sequence is three blocks over it
        engine.step()
    assert outstanding(engine) == [2]


@pytest.mark.parametrize("options", [{}, {"n": 2}])
def test_given_requests_that_ended_then_nothing_stays_promised(options: dict[str, Any]) -> None:
    engine = make_engine(make_manager(gpu_blocks=32), capacity="guaranteed")
    add(engine, request("a", 8, 8, **options), request("b", 8, 3, first=20))
    while engine.scheduler.has_work:
        engine.step()
    assert outstanding(engine) == [0]
    lanes = engine.scheduler._queues.running.lanes
    assert [int(numbers.sum()) for numbers in (lanes.promised, lanes.places, lanes.spare_blocks)] == [0, 0, 0]


def test_given_a_request_that_was_cancelled_before_it_took_its_blocks_then_another_gets_them() -> None:
    engine = make_engine(make_manager(gpu_blocks=6), capacity="guaranteed")
    add(engine, request("a", 8, 9), request("b", 8, 9, first=30))
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)
    engine.scheduler.cancel("a")
    engine.step()
    assert names(engine.scheduler.sequences("b")) == ["b"]
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 0)


def test_given_samples_that_have_branched_off_then_each_is_promised_its_own_blocks() -> None:
    engine = make_engine(make_manager(gpu_blocks=32), capacity="guaranteed")
    add(engine, request("a", 8, 8, n=2))
    engine.step()
    assert engine.scheduler.num_running == 2
    assert outstanding(engine) == [2 * (2 + 1)]  # each two more blocks of its four, and one to copy into


def test_given_a_fork_whose_next_token_begins_a_block_then_that_block_is_promised_to_it() -> None:
    engine = make_engine(make_manager(gpu_blocks=32))
    parent = decoding_parent(engine)
    while len(engine.scheduler.token_ids(parent)) % 4 != 1:  # its newest token has no place yet
        engine.step()
    before = outstanding(engine)[0]
    assert engine.scheduler.fork(parent, Request("child", engine.scheduler.token_ids(parent), 6))
    assert outstanding(engine)[0] == before + 1
    engine.drain()


@pytest.mark.parametrize(
    ("num_tokens", "n", "blocks"),
    [
        (8, 1, 2),  # no more columns than the window holds: none is spare
        (12, 1, 3),
        (16, 1, 4),
        (20, 1, 5),
        (24, 1, 5),  # three blocks are in the window of six tokens, two more until a step is committed
        (400, 1, 5),
        (24, 2, 5),  # all blocks of the prompt are shared
        (22, 3, 5 + 2 * 1),  # each further sample has its own last block
    ],
)
def test_given_a_window_then_a_request_needs_its_blocks_and_two_more_where_there_are_so_many(
    num_tokens: int, n: int, blocks: int
) -> None:
    asked = request("a", num_tokens, 1, n=n)
    add(make_engine(make_manager(SLIDING, gpu_blocks=blocks), capacity="guaranteed"), asked)
    with pytest.raises(NeverFitsError, match=f"need {blocks} blocks"):
        add(make_engine(make_manager(SLIDING, gpu_blocks=blocks - 1), capacity="guaranteed"), asked)


def test_given_a_window_then_no_more_blocks_are_promised_than_it_can_hold_at_once() -> None:
    engine = make_engine(make_manager(SLIDING, gpu_blocks=64), capacity="guaranteed")
    add(engine, request("short", 8, 5), request("long", 8, 400, first=50))
    engine.scheduler.step()
    of_step = 64 // 4 + 2  # blocks that are written before the window moves on
    assert outstanding(engine) == [1 + 3 + of_step]


def test_given_one_pool_of_two_without_a_block_then_the_youngest_gives_way_at_once() -> None:
    wide = LayerSpec(kv_heads=2, head_dim=8)
    engine = make_engine(make_manager(FULL, wide, gpu_blocks=(16, 4)))
    requests = [request("old", 8, 4), request("young", 8, 4, first=50)]
    add(engine, *requests)
    engine.step()
    assert names(engine.step().preempted) == ["young"]
    assert engine.scheduler.stats.stalls == 0
    engine.drain()
    engine.assert_right(*requests)


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_given_a_prefix_that_somebody_outside_computes_then_a_request_that_is_alone_does_not_wait_for_it() -> None:
    engine = make_engine()
    engine.manager.allocate("outside", range(8))
    add(engine, request("a", 9))
    plan = engine.scheduler.step()
    assert names(plan.sequences) == ["a"]
    assert engine.scheduler.stats.prefix_waits == 0


@pytest.mark.parametrize(("wait", "running"), [(True, ["first"]), (False, ["first", "second"])])
def test_given_a_prefix_that_another_request_computes_then_it_is_waited_for_as_the_configuration_says(
    wait: bool, running: list[str]
) -> None:
    engine = make_engine(wait_for_prefix=wait)
    add(engine, request("first", 9), request("second", 9))
    plan = engine.scheduler.step()
    assert names(plan.sequences) == running
    assert engine.scheduler.stats.prefix_waits == 2 - len(running)


def test_given_different_prompts_then_none_waits_for_another() -> None:
    engine = make_engine()
    add(engine, request("first", 9), request("second", 9, first=30))
    assert names(engine.scheduler.step().sequences) == ["first", "second"]


def test_given_no_block_for_the_first_in_line_then_nobody_overtakes_it() -> None:
    manager = make_manager(gpu_blocks=2)
    outside = manager.allocate("outside", range(8))
    manager.commit(outside)
    manager.store_last_logits(outside, object(), 5)
    engine = make_engine(manager)
    add(engine, request("first", 4, first=100), Request("second", range(5), 4))  # all of it is cached, logits included
    assert manager.can_allocate(range(4)).blocks_needed == (0,)
    assert names(engine.scheduler.step().sequences) == []
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 2)


# --- results of a sequence that has left ------------------------------------------------------------------------------


def preempted_in_flight(engine: ToyEngine) -> Any:
    """Plans and launches a step, and preempts its only sequence before the results are there."""
    scheduler = engine.scheduler
    plan = scheduler.step()
    engine.launched.append((plan, *engine.launch(plan)))
    (sequence,) = plan.sequences
    scheduler._queues.preempt(sequence, 0)
    return sequence


def test_given_several_samples_of_a_sequence_that_has_left_then_each_begins_a_sequence_of_its_own() -> None:
    engine = make_engine()
    only = request("a", 6, 4, n=3)
    add(engine, only)
    sequence = preempted_in_flight(engine)
    engine.complete()
    assert [len(each.tokens) for each in engine.scheduler.sequences("a")] == [7, 7, 7]
    assert sequence in engine.scheduler.sequences("a")
    engine.drain()
    engine.assert_right(only)


def test_given_right_drafts_of_a_sequence_that_has_left_then_all_of_them_are_kept() -> None:
    engine = make_engine(drafts=(2,), max_draft_tokens=3)
    only = request("a", 6, 8)
    add(engine, only)
    engine.step()
    sequence = preempted_in_flight(engine)
    before = len(sequence.tokens)
    engine.complete()
    assert len(sequence.tokens) == before + 3  # two drafts, and the sample behind them
    engine.drain()
    engine.assert_right(only)


def test_given_a_stop_token_for_a_sequence_that_has_left_then_it_ends_there() -> None:
    engine = make_engine()
    stop = expected_output(request("a", 6, 8))[1]
    add(engine, request("a", 6, 8, stop_token_ids=[stop]))
    engine.step()
    preempted_in_flight(engine)
    (done,) = engine.complete().finished
    assert (done.reason, done.token_ids[-1]) == (FinishReason.STOP, stop)
    assert not engine.scheduler.has_work


def test_given_a_stop_token_in_the_prompt_when_the_last_drafts_come_after_it_has_left_then_it_ends_by_length() -> None:
    engine = make_engine(drafts=(2,), max_draft_tokens=3)
    only = request("a", 6, 4, stop_token_ids=[0], first=0)
    assert 0 not in expected_output(only)
    add(engine, only)
    engine.step()
    preempted_in_flight(engine)
    (done,) = engine.complete().finished
    assert (done.reason, len(done.token_ids)) == (FinishReason.LENGTH, 4)


def test_given_copies_then_only_those_over_the_link_to_the_host_are_transferred_bytes() -> None:
    manager = make_manager(host_blocks=8, disk_blocks=8)
    block_bytes = manager.config.groups[0].block_bytes

    def copy(source: Tier, target: Tier) -> CopyOp:
        kind = CopyKind.OFFLOAD if source < target else CopyKind.ONBOARD if source > target else CopyKind.COPY_ON_WRITE
        return CopyOp(kind, 0, source, target, np.array([0, 1], np.int32), np.array([2, 3], np.int32))

    moved = {
        (Tier.GPU, Tier.GPU): 0,
        (Tier.GPU, Tier.HOST): 2,
        (Tier.HOST, Tier.GPU): 2,
        (Tier.HOST, Tier.DISK): 0,
        (Tier.GPU, Tier.DISK): 2,
    }
    for tiers, num_blocks in moved.items():
        assert transferred_bytes([copy(*tiers)], manager.config) == num_blocks * block_bytes
