from __future__ import annotations

import pytest
from support import add, make_engine, names, request

from kvpool import CopyKind, DType, KVCacheConfig, KVCacheManager, LayerSpec, StatePart, StateSpec
from kvpool.errors import InvalidArgumentError, NeverFitsError, SequenceStateError
from kvpool.scheduling import FinishReason, Request, Scheduler, SchedulerConfig
from managers import make_manager


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_tokens", [6, 8])
def test_given_several_samples_then_the_prompt_is_computed_once_and_shared(num_tokens: int, depth: int) -> None:
    engine = make_engine(depth=depth)
    only = request("r", num_tokens, 5, n=3)
    add(engine, only)
    engine.drain()
    engine.assert_right(only)
    assert engine.scheduler.stats.prefill_tokens == num_tokens
    assert engine.manager.stats().forks == 2


def test_given_samples_that_share_a_block_when_they_write_into_it_then_all_but_one_copy_it_first() -> None:
    engine = make_engine()
    add(engine, request("r", 6, 5, n=3))
    engine.step()
    kinds = [op.kind for op in engine.step().copies]
    assert kinds == [CopyKind.COPY_ON_WRITE] * 2
    engine.drain()


def test_given_as_many_lanes_as_samples_then_all_of_them_decode_in_the_next_step() -> None:
    engine = make_engine(max_sequences=3)
    add(engine, request("r", 6, 5, n=3))
    engine.step()
    plan = engine.step()
    assert (names(plan.sequences), names(plan.resumed)) == (["r"] * 3, [])
    engine.drain()


def test_given_a_prompt_that_is_not_branched_yet_then_lanes_for_its_samples_are_kept() -> None:
    engine = make_engine(max_sequences=3, max_chunk_tokens=4)
    add(engine, request("r", 8, 3, n=3), request("other", 4, 3, first=50))
    engine.step()
    assert engine.scheduler.num_running == 1
    engine.drain()


def test_given_kept_lanes_when_the_request_is_cancelled_before_it_branches_then_others_get_them() -> None:
    engine = make_engine(max_sequences=3, max_chunk_tokens=4)
    second = request("second", 4, 3, n=3, first=50)
    add(engine, request("first", 8, 3, n=3), second)
    engine.step()
    engine.scheduler.cancel("first")
    engine.drain(max_steps=20)
    engine.assert_right(second)


def test_given_samples_that_have_branched_off_beside_a_new_prompt_then_each_row_takes_one_sample() -> None:
    engine = make_engine()
    requests = [request("r", 6, 5, n=3), request("new", 6, 5, first=50)]
    add(engine, requests[0])
    assert engine.step().num_samples.tolist() == [3]
    add(engine, requests[1])
    assert engine.step().num_samples.tolist() == [1, 1, 1, 1]
    engine.drain()
    engine.assert_right(*requests)


def test_given_samples_that_end_at_once_then_they_are_not_forked() -> None:
    engine = make_engine()
    only = request("r", 6, 1, n=3)
    add(engine, only)
    engine.drain()
    engine.assert_right(only)
    assert engine.manager.stats().forks == 0
    assert [output.reason for output in engine.finished["r"].outputs] == [FinishReason.LENGTH] * 3


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_given_samples_that_do_not_fit_together_then_they_give_way_to_each_other_and_end_right(
    caching: bool, depth: int
) -> None:
    manager = make_manager(gpu_blocks=6, host_blocks=16, enable_prefix_caching=caching)
    engine = make_engine(manager, depth=depth)
    only = request("r", 8, 12, n=4)
    add(engine, only)
    engine.drain(max_steps=200)
    engine.assert_right(only)
    assert engine.scheduler.stats.preemptions > 0


def test_given_lanes_for_just_the_samples_of_a_request_then_all_of_them_run_when_they_branch() -> None:
    engine = make_engine(max_sequences=2)
    add(engine, request("a", 6, 4, n=2))
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 0)


def test_given_guaranteed_samples_that_do_not_fit_together_then_the_request_is_refused_at_once() -> None:
    engine = make_engine(make_manager(gpu_blocks=8), capacity="guaranteed")
    with pytest.raises(NeverFitsError, match=r"of 3 sequences .* pool 0, which has 8"):
        add(engine, request("guaranteed", 6, 12, n=3))
    engine = make_engine(make_manager(gpu_blocks=8))
    add(engine, request("samples", 6, 12, n=3))  # they can wait for each other
    engine.drain()


# --- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [(0,), (1,), (3,), (2, 0, 3, 1)])
def test_given_drafts_right_and_wrong_then_the_output_is_the_same_in_fewer_steps(
    drafts: tuple[int, ...], depth: int
) -> None:
    engine = make_engine(max_draft_tokens=4, drafts=drafts, depth=depth)
    requests = [request("a", 6, 14), request("b", 5, 9, first=50, stop_token_ids=[1, 2, 3, 4, 5, 6])]
    add(engine, *requests)
    steps = engine.drain()
    engine.assert_right(*requests)
    stats = engine.scheduler.stats
    assert stats.draft_tokens >= stats.accepted_draft_tokens
    if min(drafts) > 0 and depth == 1:
        assert steps < 14
        assert stats.accepted_draft_tokens > 0


def test_given_drafts_then_the_plan_has_them_behind_the_newest_token_and_asks_for_logits_of_each() -> None:
    engine = make_engine(max_draft_tokens=2)
    scheduler = engine.scheduler
    add(engine, request("a", 3, 9))
    first = scheduler.step()
    scheduler.complete(first, [7])
    scheduler.propose(first.sequences[0], [8, 9, 10])
    plan = scheduler.step()
    assert plan.token_ids.tolist() == [7, 8, 9]
    assert plan.num_drafts.tolist() == [2]
    assert plan.logits_indices.tolist() == [0, 1, 2]
    scheduler.complete(plan, [8, 30], [2])  # the first draft was right
    last = scheduler.step()
    assert (last.token_ids.tolist(), last.positions.tolist()) == ([30], [5])
    assert engine.manager.get(("a", 0)).token_ids.tolist() == [0, 1, 2, 7, 8]


def test_given_layers_that_keep_a_state_then_accepted_drafts_are_computed_again() -> None:
    """The state goes behind known tokens only, and stops at the end of a block, so that a checkpoint stands there."""
    layers = [LayerSpec(1, 8), StateSpec((StatePart("conv", (9, 4), DType.FLOAT32),))]
    manager = KVCacheManager(KVCacheConfig(layers, block_size=4, gpu_blocks=(16, 8)))
    scheduler = Scheduler(manager, SchedulerConfig(max_draft_tokens=4))
    scheduler.add(Request("a", range(5), max_new_tokens=12))
    while not len((plan := scheduler.step()).sampling_rows):
        scheduler.complete(plan)
    scheduler.complete(plan, [5])
    (sequence,) = plan.sequences
    steps = []
    for drafts, samples in (([6, 7, 0], [6, 7, 8]), ([9, 0], [9, 10]), ([], [11]), ([], [12])):
        scheduler.propose(sequence, drafts)
        plan = scheduler.step()
        steps.append((plan.token_ids.tolist(), plan.num_drafts.item(), plan.num_kept.item()))  # type: ignore[union-attr]
        assert plan.states is not None
        scheduler.complete(plan, samples, [len(samples)])
        assert scheduler.token_ids(sequence).tolist() == list(range(samples[-1] + 1))
        manager.check()
    assert steps == [([5, 6, 7, 0], 3, 1), ([6, 7, 8, 9, 0], 2, 2), ([8, 9, 10], 0, 3), ([11], 0, 1)]
    assert sequence.live_handle().num_committed == 12


def test_given_drafts_of_several_sequences_then_the_plan_asks_for_logits_of_every_row() -> None:
    engine = make_engine(max_draft_tokens=2)
    scheduler = engine.scheduler
    add(engine, request("a", 3, 9), request("b", 3, 9, first=50))
    first = scheduler.step()
    scheduler.complete(first, [7, 57])
    for sequence, drafts in zip(first.sequences, ([8, 9], [58]), strict=True):
        scheduler.propose(sequence, drafts)
    plan = scheduler.step()
    assert plan.token_ids.tolist() == [7, 8, 9, 57, 58]
    assert plan.logits_indices.tolist() == [0, 1, 2, 3, 4]


def test_given_no_room_for_drafts_then_they_are_dropped_and_nobody_gives_way_for_them() -> None:
    engine = make_engine(make_manager(gpu_blocks=4), max_draft_tokens=8)
    scheduler = engine.scheduler
    add(engine, request("a", 6, 5), request("b", 6, 5, first=50))
    first = scheduler.step()
    scheduler.complete(first, [7, 8])
    scheduler.propose(first.sequences[0], [9, 9])
    scheduler.propose(first.sequences[1], [9, 9])
    plan = scheduler.step()
    assert (plan.num_drafts.tolist(), plan.preempted) == ([0, 0], [])


@pytest.mark.parametrize(
    ("step", "drafts"), [(3, [0, 0, 0]), (5, [2, 0, 0]), (8, [3, 2, 0]), (12, [3, 3, 3]), (64, [3, 3, 3])]
)
def test_given_a_step_with_room_for_some_drafts_then_the_first_sequences_get_theirs(
    step: int, drafts: list[int]
) -> None:
    engine = make_engine(max_draft_tokens=3, max_tokens_per_step=step, max_sequences=3)
    add(engine, *(request(f"{i}", 1, 9, first=30 * i) for i in range(3)))
    engine.step()
    for i in range(3):
        (sequence,) = engine.scheduler.sequences(f"{i}")
        engine.scheduler.propose(sequence, [40, 41, 42, 43])
    plan = engine.scheduler.step()
    assert (plan.num_drafts.tolist(), plan.num_tokens) == (drafts, 3 + sum(drafts))


def test_given_one_draft_in_flight_then_its_sequence_waits_for_the_verdict() -> None:
    engine = make_engine(max_draft_tokens=3)
    add(engine, request("r", 4, 9))
    engine.step()
    (sequence,) = engine.scheduler.sequences("r")
    engine.scheduler.propose(sequence, [40])
    assert engine.scheduler.step().num_drafts.tolist() == [1]
    assert engine.scheduler.step().is_empty


def test_given_a_sequence_near_its_last_token_then_it_gets_no_more_drafts_than_may_follow() -> None:
    engine = make_engine(max_draft_tokens=8)
    add(engine, request("r", 4, 4))
    engine.step()
    (sequence,) = engine.scheduler.sequences("r")
    engine.scheduler.propose(sequence, [40, 41, 42, 43])
    assert engine.scheduler.step().num_drafts.tolist() == [2]  # one token came, one comes in any case


def test_given_drafts_when_their_counts_are_missing_or_too_large_then_it_is_refused() -> None:
    scheduler = make_engine(max_draft_tokens=2).scheduler
    scheduler.add(request("a", 3, 9))
    first = scheduler.step()
    scheduler.complete(first, [7])
    scheduler.propose(first.sequences[0], [8])
    plan = scheduler.step()
    with pytest.raises(InvalidArgumentError, match="counts"):
        scheduler.complete(plan, [8])
    with pytest.raises(InvalidArgumentError, match="got 3 tokens"):
        scheduler.complete(plan, [8, 9, 10], [3])
    scheduler.complete(plan, [8, 9], [2])


def test_given_a_sample_in_flight_then_drafts_cannot_be_proposed() -> None:
    scheduler = make_engine(max_draft_tokens=2).scheduler
    scheduler.add(request("a", 3, 9))
    plan = scheduler.step()
    with pytest.raises(SequenceStateError, match="in flight"):
        scheduler.propose(plan.sequences[0], [8])


def test_given_speculation_switched_off_then_proposals_have_no_effect() -> None:
    scheduler = make_engine().scheduler
    scheduler.add(request("a", 3, 9))
    first = scheduler.step()
    scheduler.complete(first, [7])
    scheduler.propose(first.sequences[0], [8])
    assert scheduler.step().num_drafts.tolist() == [0]
