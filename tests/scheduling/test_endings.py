from __future__ import annotations

from typing import Any

import pytest
from support import add, make_engine, request
from toy_engine import expected_output

from kvpool import ReuseHint, ReuseScope
from kvpool.errors import InvalidArgumentError, SequenceStateError, UnknownRequestError
from kvpool.pools.arrays import Int32Array
from kvpool.prefix.tree import match_tokens
from kvpool.scheduling import FinishReason
from managers import Clock, make_manager


def nothing_is_held(engine: object) -> bool:
    stats = engine.manager.stats()  # type: ignore[attr-defined]
    return stats.num_sequences == 0 and all(pool.referenced == 0 for pool in stats.pools)


def test_given_max_new_tokens_then_a_request_ends_by_length_and_a_stop_token_counts_before_it() -> None:
    engine = make_engine()
    plain = request("plain", 3, 4)
    last = expected_output(plain)[-1]
    add(engine, plain, request("stopped", 3, 4, stop_token_ids=[last, 999, 998]))
    engine.drain()
    assert engine.finished["plain"].reason is FinishReason.LENGTH
    assert engine.finished["stopped"].reason is FinishReason.STOP
    assert engine.finished["stopped"].token_ids[-1] == last


def test_given_a_hint_of_its_own_then_the_policy_is_told_that_and_a_function_is_asked_with_the_answer() -> None:
    engine = make_engine()
    last = expected_output(request("x", 8, 4))[-1]
    asked: list[list[int]] = []

    def look(answer: Int32Array) -> ReuseHint:
        asked.append(answer.tolist())
        return ReuseHint("tool_calls")

    def fail(answer: Int32Array) -> ReuseHint:
        raise ValueError("no idea")

    said = {"soon": ReuseHint(expected_seconds=3), "calls": look, "fails": fail, "wrong": lambda answer: "tool_calls"}
    told: list[int] = []
    for name, hint in said.items():
        wanted = request(name, 8, 4, stop_token_ids=[last], hint=hint)
        add(engine, wanted)
        engine.drain()
        told.append(match_tokens(engine.manager._cache, wanted.scope, wanted.prompt).path[-1].hint)
        engine.manager.cache.reset()
    assert told == [h.code for h in (said["soon"], ReuseHint("tool_calls"), ReuseHint("stop"), ReuseHint("stop"))]
    assert asked == [expected_output(request("x", 8, 4))]
    with pytest.raises(InvalidArgumentError, match="no hint"):
        request("x", 8, 4, hint="tool_calls")


def test_given_an_answer_that_is_cut_then_a_function_is_not_asked_and_a_hint_still_holds() -> None:
    engine, told, asked = make_engine(), [], []

    def look(answer: Int32Array) -> ReuseHint:
        asked.append(answer)
        return ReuseHint("tool_calls")

    for name, hint in (("asks", look), ("soon", ReuseHint(expected_seconds=3)), ("says nothing", None)):
        wanted = request(name, 8, 4, hint=hint)
        add(engine, wanted)
        engine.drain()
        assert engine.finished[name].reason is FinishReason.LENGTH
        told.append(match_tokens(engine.manager._cache, wanted.scope, wanted.prompt).path[-1].hint)
        engine.manager.cache.reset()
    assert not asked
    assert told == [ReuseHint("length").code, ReuseHint(expected_seconds=3).code, ReuseHint("length").code]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("num_steps", range(7))
def test_given_a_request_at_any_moment_when_it_is_cancelled_then_it_keeps_its_tokens_and_holds_nothing(
    num_steps: int, depth: int
) -> None:
    engine = make_engine(make_manager(gpu_blocks=6, host_blocks=8), depth=depth, preemption="swap", max_chunk_tokens=4)
    kept, cancelled = request("kept", 8, 12), request("cancelled", 8, 12, first=50)
    add(engine, kept, cancelled)
    for _ in range(num_steps):
        engine.step()
    done = engine.scheduler.cancel("cancelled")
    assert done.reason is FinishReason.CANCELLED
    assert done.token_ids.tolist() == expected_output(cancelled)[: len(done.token_ids)]
    engine.manager.check()
    engine.drain()
    engine.assert_right(kept)
    assert nothing_is_held(engine)
    with pytest.raises(UnknownRequestError):
        engine.scheduler.cancel("cancelled")


def test_given_a_deadline_when_it_passes_then_the_next_plan_reports_the_request_with_what_it_has() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    late, patient = request("late", 4, 50, deadline=1.0), request("patient", 4, 6, first=50, deadline=99.0)
    add(engine, late, patient)
    engine.step()
    engine.step()
    clock.now = 1.0
    (done,) = engine.step().finished
    assert (done.request.id, done.reason) == ("late", FinishReason.DEADLINE)
    assert done.token_ids.tolist() == expected_output(late)[:2]
    engine.drain()
    engine.assert_right(patient)
    assert nothing_is_held(engine)


def test_given_a_deadline_when_the_request_still_waits_then_it_ends_without_ever_running() -> None:
    clock = Clock()
    engine = make_engine(max_sequences=1, clock=clock)
    add(engine, request("running", 4, 8), request("waiting", 4, 8, first=50, deadline=0.5))
    engine.step()
    clock.now = 2.0
    (done,) = engine.step().finished
    assert (done.request.id, len(done.token_ids)) == ("waiting", 0)
    engine.drain()


def test_given_one_deadline_of_requests_whose_ids_have_no_order_then_all_of_them_end() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    ids: list[Any] = ["text", 7, ("a", "tuple"), None]
    add(engine, *(request(name, 4, 50, first=10 * at, deadline=1.0) for at, name in enumerate(ids)))
    clock.now = 1.0
    assert {done.request.id for done in engine.step().finished} == set(ids)


def test_given_requests_with_one_deadline_then_they_end_in_the_order_in_which_they_came() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    add(engine, *(request(name, 4, 50, first=10 * at, deadline=1.0) for at, name in enumerate("dbca")))
    clock.now = 2.0
    assert [done.request.id for done in engine.step().finished] == list("dbca")


def test_given_an_id_that_is_used_again_when_the_first_deadline_passes_then_the_second_request_goes_on() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    add(engine, request("r", 4, 1, deadline=1.0))
    engine.drain()
    engine.finished.clear()
    second = request("r", 4, 3)
    add(engine, second)
    clock.now = 5.0
    assert engine.step().finished == []
    engine.drain()
    engine.assert_right(second)


def test_given_a_stop_string_when_the_engine_ends_one_sample_then_the_others_go_on() -> None:
    engine = make_engine()
    add(engine, request("r", 4, 6, n=2))
    engine.step()
    engine.step()
    assert engine.scheduler.finish("r", 1) is None
    with pytest.raises(UnknownRequestError, match="sequence 1"):
        engine.scheduler.finish("r", 1)
    engine.drain()
    first, second = engine.finished["r"].outputs
    assert (first.reason, second.reason) == (FinishReason.LENGTH, FinishReason.STOP)
    assert len(first.token_ids) == 6 > len(second.token_ids)


def test_given_samples_that_the_engine_ends_one_by_one_then_the_last_brings_the_outputs() -> None:
    engine = make_engine()
    add(engine, request("r", 4, 6, n=2))
    engine.step()
    assert [sequence.index for sequence in engine.scheduler.decoding] == [0, 1]
    assert engine.scheduler.finish("r", 1) is None
    done = engine.scheduler.finish("r", 0)
    assert done is not None
    assert [output.reason for output in done.outputs] == [FinishReason.STOP] * 2
    assert nothing_is_held(engine)


def test_given_a_stop_string_when_the_engine_ends_the_request_then_it_gets_the_outputs_at_once() -> None:
    engine = make_engine(depth=2)
    add(engine, request("r", 4, 6))
    engine.step()
    engine.step()
    done = engine.scheduler.finish("r")
    assert done is not None
    assert (done.reason, len(done.token_ids)) == (FinishReason.STOP, 1)
    engine.drain()
    assert nothing_is_held(engine)


def test_given_a_finished_request_when_the_next_has_the_same_beginning_then_it_is_cached() -> None:
    engine = make_engine()
    add(engine, request("a", 9, 4))
    engine.drain()
    again = request("b", 9, 4)
    add(engine, again)
    assert engine.step().num_prefill_tokens == 1
    engine.drain()
    engine.assert_right(again)


def test_given_an_empty_plan_then_completing_or_abandoning_it_ends_nobody() -> None:
    scheduler = make_engine().scheduler
    plan = scheduler.step()
    assert plan.is_empty
    assert scheduler.abandon(plan) == []
    assert scheduler.complete(plan) == ([], [])


def test_given_a_plan_that_cannot_run_then_everybody_in_it_is_reported_as_failed_and_the_others_go_on() -> None:
    engine = make_engine(max_sequences=2)
    waiting = request("waiting", 4, 3, first=200)
    add(engine, request("a", 4, 9), request("b", 4, 9, first=100), waiting)
    failed = engine.scheduler.abandon(engine.scheduler.step())
    assert [(done.request.id, done.reason) for done in failed] == [
        ("a", FinishReason.FAILED),
        ("b", FinishReason.FAILED),
    ]
    engine.drain()
    engine.assert_right(waiting)


def test_given_plans_in_flight_then_only_the_oldest_may_be_abandoned() -> None:
    scheduler = make_engine().scheduler
    scheduler.add(request("a", 3))
    first, second = scheduler.step(), scheduler.step()
    with pytest.raises(SequenceStateError, match="in the order"):
        scheduler.abandon(second)
    assert [done.reason for done in scheduler.abandon(first)] == [FinishReason.FAILED]


def test_given_an_id_that_cannot_be_looked_up_then_it_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be hashable and comparable, got \[1\]"):
        make_engine().scheduler.cancel([1])  # type: ignore[arg-type]


def test_given_an_accepted_draft_before_a_stop_token_then_the_request_ends_by_it() -> None:
    scheduler = make_engine(max_draft_tokens=2).scheduler
    scheduler.add(request("a", 3, 9, stop_token_ids=[9]))
    first = scheduler.step()
    scheduler.complete(first, [7])
    (sequence,) = first.sequences
    scheduler.propose(sequence, [8])
    [done] = scheduler.complete(scheduler.step(), [8, 9], [2]).finished
    assert (done.reason, done.token_ids.tolist()) == (FinishReason.STOP, [7, 8, 9])
    assert sequence.handle is None


def test_given_tenants_that_share_fairly_then_all_that_wait_are_listed() -> None:
    engine = make_engine(policy="fair_share", max_sequences=1)
    add(engine, *(request(f"{n}", 4, 3, first=20 * n, scope=ReuseScope(tenant=f"{n % 2}")) for n in range(4)))
    assert sorted(sequence.request.id for sequence in engine.scheduler.waiting(9)) == ["0", "1", "2", "3"]
    engine.drain()
