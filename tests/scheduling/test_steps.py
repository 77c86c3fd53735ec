from __future__ import annotations

import numpy as np
import pytest
from support import SLIDING, add, make_engine, names, request, tokens_of
from toy_engine import ToyEngine

from kvpool import Tier
from kvpool.errors import InvalidArgumentError, SequenceStateError
from kvpool.scheduling import FinishReason
from managers import FULL, make_manager


def test_given_prompts_over_the_budget_when_steps_run_then_decode_is_served_first_and_prompts_get_the_rest() -> None:
    engine = make_engine(make_manager(gpu_blocks=32), max_tokens_per_step=10)
    add(engine, request("a", 6, 9), request("b", 20, 2, first=50))
    assert tokens_of(engine.step()) == {"a": 6, "b": 4}
    plan = engine.step()
    assert (tokens_of(plan), names(plan.sequences)) == ({"a": 1, "b": 8}, ["a", "b"])  # 9 cut to whole blocks
    assert plan.num_decode == 1
    assert tokens_of(engine.step()) == {"a": 1, "b": 8}
    assert tokens_of(engine.step()) == {"a": 1, "b": 1}
    engine.drain()
    engine.assert_right(*(done.request for done in engine.finished.values()))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, None])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_given_any_chunk_size_and_depth_then_the_output_is_the_same(chunk: int | None, depth: int) -> None:
    engine = make_engine(make_manager(FULL, SLIDING, gpu_blocks=64), max_chunk_tokens=chunk, depth=depth)
    requests = [request("a", 13, 6), request("b", 9, 5), request("c", 5, 7, first=30, stop_token_ids=[3, 4, 5])]
    add(engine, *requests)
    engine.drain()
    engine.assert_right(*requests)


def test_given_a_plan_then_its_arrays_describe_the_same_tokens() -> None:
    engine = make_engine()
    add(engine, request("a", 5), request("b", 3, first=50))
    plan = engine.scheduler.step()
    assert plan.token_ids.tolist() == [0, 1, 2, 3, 4, 50, 51, 52]
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert plan.query_start.tolist() == [0, 5, 8]
    assert plan.kv_lengths.tolist() == [5, 3]
    assert plan.logits_indices.tolist() == [4, 7]
    assert plan.sampling_rows.tolist() == [0, 1]
    assert len(set(plan.lanes.tolist())) == 2
    handles = [sequence.live_handle() for sequence in plan.sequences]
    expected = [
        handle.block_ids()[position // 4] * 4 + position % 4
        for handle, n in zip(handles, (5, 3), strict=True)
        for position in range(n)
    ]
    assert plan.slots.tolist() == [expected]
    assert plan.batch.csr().indptr.tolist() == [0, 2, 3]


def test_given_a_prompt_that_is_not_finished_when_its_chunk_is_planned_then_nothing_is_sampled_for_it() -> None:
    engine = make_engine(max_chunk_tokens=4)
    add(engine, request("a", 6))
    first = engine.step()
    assert (first.num_samples.tolist(), len(first.sampling_rows)) == ([0], 0)
    assert engine.step().num_samples.tolist() == [1]


def test_given_the_same_members_when_they_decode_then_the_batch_is_made_only_once() -> None:
    engine = make_engine()
    add(engine, request("a", 3, 9), request("b", 3, 9, first=20))
    engine.step()
    batches = {id(engine.step().batch) for _ in range(5)}
    assert len(batches) == 1


def test_given_a_step_in_flight_when_the_next_is_planned_then_unknown_tokens_are_placeholders_with_known_places() -> (
    None
):
    engine = make_engine()
    scheduler = engine.scheduler
    add(engine, request("a", 3, 3))
    first, second = scheduler.step(), scheduler.step()
    third = scheduler.step()
    assert [plan.token_ids.tolist() for plan in (first, second, third)] == [[0, 1, 2], [-1], [-1]]
    assert [plan.positions.tolist() for plan in (first, second, third)] == [[0, 1, 2], [3], [4]]
    assert scheduler.step().is_empty  # all its samples are in flight
    assert scheduler.num_in_flight == 3
    for plan, token in ((first, 7), (second, 8)):
        assert scheduler.complete(plan, [token]).finished == []
    assert scheduler.complete(third, [9]).finished[0].token_ids.tolist() == [7, 8, 9]
    assert not scheduler.has_work


def test_given_a_stop_token_in_flight_when_it_comes_back_then_what_was_planned_beyond_it_is_dropped() -> None:
    engine = make_engine()
    scheduler = engine.scheduler
    add(engine, request("a", 3, 9, stop_token_ids=[7]))
    first, second = scheduler.step(), scheduler.step()
    (done,) = scheduler.complete(first, [7]).finished
    assert (done.token_ids.tolist(), done.reason) == ([7], FinishReason.STOP)
    assert scheduler.complete(second, [1]).finished == []
    assert not scheduler.has_work
    assert engine.manager.stats().num_sequences == 0


def test_given_a_sequence_when_it_stops_and_another_takes_its_lane_then_the_late_sample_does_not_reach_that_one() -> (
    None
):
    engine = make_engine(max_sequences=1)
    scheduler = engine.scheduler
    add(engine, request("a", 3, 9, stop_token_ids=[7]), request("b", 3, 2, first=20))
    first, second = scheduler.step(), scheduler.step()
    scheduler.complete(first, [7])
    third = scheduler.step()
    assert names(third.sequences) == ["b"]
    scheduler.complete(second, [30])
    scheduler.complete(third, [31])
    last = scheduler.step()
    assert last.token_ids.tolist() == [31]
    assert scheduler.complete(last, [32]).finished[0].token_ids.tolist() == [31, 32]


def test_given_plans_when_they_are_completed_out_of_order_or_twice_then_it_is_refused() -> None:
    scheduler = make_engine().scheduler
    scheduler.add(request("a", 3))
    first, second = scheduler.step(), scheduler.step()
    with pytest.raises(SequenceStateError, match="in the order"):
        scheduler.complete(second, [1])
    scheduler.complete(first, [1])
    with pytest.raises(SequenceStateError, match="once each"):
        scheduler.complete(first, [1])
    scheduler.complete(second, [2])


@pytest.mark.parametrize(
    ("tokens", "counts", "message"),
    [
        ([], None, "got 0 tokens"),
        ([1, 2], None, "got 2 tokens"),
        ([1], [1, 0], "2 counts"),
        ([1, 2], [2], "got 2 tokens"),
        ([1], 1, "counts must hold"),
        ([-1], None, "negative"),
    ],
)
def test_given_samples_that_do_not_fit_the_plan_then_nothing_changes(
    tokens: list[int], counts: object, message: str
) -> None:
    scheduler = make_engine().scheduler
    scheduler.add(request("a", 3))
    plan = scheduler.step()
    with pytest.raises(InvalidArgumentError, match=message):
        scheduler.complete(plan, tokens, counts)
    scheduler.complete(plan, [5])
    assert scheduler.step().token_ids.tolist() == [5]


def test_given_nothing_to_do_then_the_plan_is_empty_and_need_not_be_completed() -> None:
    scheduler = make_engine().scheduler
    plan = scheduler.step()
    assert plan.is_empty
    assert (plan.num_tokens, plan.num_prefill_tokens, plan.slots.shape) == (0, 0, (1, 0))
    assert scheduler.complete(plan).finished == []
    assert scheduler.num_in_flight == 0


def test_given_a_run_then_its_statistics_are_the_sums_over_its_plans() -> None:
    engine = make_engine(make_manager(gpu_blocks=32), max_tokens_per_step=12, max_chunk_tokens=8)
    add(engine, request("a", 14, 6), request("b", 14, 6, first=100))
    plans = [engine.step() for _ in range(4)]
    add(engine, request("a again", 14, 6))
    while engine.scheduler.has_work:
        plans.append(engine.step())
    stats = engine.scheduler.stats
    assert stats.steps == sum(not plan.is_empty for plan in plans)
    assert stats.decode_tokens == sum(plan.num_tokens - plan.num_prefill_tokens for plan in plans) > 0
    assert stats.prefill_tokens == sum(plan.num_prefill_tokens for plan in plans) > 0
    assert (stats.cached_tokens, stats.finished) == (13, 3)


def store_logits(engine: ToyEngine, tokens: list[int]) -> None:
    """As if a forward pass had written these tokens and their logits had been kept."""
    manager = engine.manager
    handle = manager.allocate("stored", tokens)
    manager.commit(handle)
    assert manager.store_last_logits(handle, "logits")
    engine.memory[0, Tier.GPU][handle.block_ids()] = np.reshape(tokens, (-1, engine.size))
    manager.free(handle)


def test_given_a_prompt_whose_logits_are_stored_then_at_most_its_last_tokens_are_computed() -> None:
    engine = make_engine()
    only = request("a", 8, 3)
    store_logits(engine, list(range(8)))
    add(engine, only)
    engine.drain()
    engine.assert_right(only)
    assert engine.scheduler.stats.prefill_tokens <= 1


def test_given_stored_logits_and_two_samples_then_drafts_wait_until_they_have_branched_off() -> None:
    engine = make_engine(max_draft_tokens=2)
    only = request("a", 8, 3, n=2)
    store_logits(engine, list(range(8)))
    add(engine, only)
    engine.step()
    (sequence,) = engine.scheduler.sequences("a")
    engine.scheduler.propose(sequence, [1])
    assert engine.step().num_drafts.tolist() == [0]
    engine.drain()
    engine.assert_right(only)


def test_given_one_token_with_stored_logits_then_it_is_computed_again() -> None:
    engine = make_engine(make_manager(block_size=1))
    only = request("a", 1, 3, first=5)
    store_logits(engine, [5])
    add(engine, only)
    engine.drain()
    engine.assert_right(only)


def test_given_a_finished_step_then_the_tokens_of_a_sequence_can_be_read() -> None:
    engine = make_engine()
    add(engine, request("a", 3))
    (sequence,) = engine.scheduler.sequences("a")
    assert engine.scheduler.token_ids(sequence).tolist() == [0, 1, 2]
    engine.step()
    engine.step()
    assert len(engine.scheduler.token_ids(sequence)) == 5
