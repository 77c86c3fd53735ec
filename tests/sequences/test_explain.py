"""Why tokens missed: each for one cause, and what is said about it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kvpool import EvictionReason, KVCacheManager, LayerSpec, MissCause, Prompt, ReuseScope, StatePart, StateSpec
from kvpool.config import DType
from kvpool.core.departed import Departed
from kvpool.errors import InvalidArgumentError
from kvpool.manager import Departure, Divergence, Elsewhere, MissedSpan
from managers import FULL, Clock, cached, make_manager

LONG = list(range(100, 140))  # ten blocks


def remembering(*layers: Any, **options: Any) -> KVCacheManager:
    return make_manager(*layers, **{"remembered_blocks": 1000} | options)


def ran(manager: KVCacheManager, name: str, tokens: list[int], **options: Any) -> None:
    handle = manager.allocate(name, tokens, **options)
    manager.commit(handle)
    manager.free(handle)


def causes(spans: list[MissedSpan]) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, span.cause.value) for span in spans]


def test_given_a_prompt_of_nobody_then_all_of_it_was_first_seen() -> None:
    manager = remembering()
    assert manager.inspect.explain(LONG) == [MissedSpan(0, 40, MissCause.FIRST_SEEN)]


def test_given_the_same_prompt_again_then_only_its_last_token_is_computed() -> None:
    manager = remembering()
    ran(manager, "a", LONG)
    assert causes(manager.inspect.explain(LONG)) == [(39, 40, "rest_of_block")]


def test_given_a_prompt_below_a_block_then_no_part_of_it_can_be_cached() -> None:
    assert causes(remembering().inspect.explain([1, 2, 3])) == [(0, 3, "rest_of_block")]


def test_given_one_token_that_changed_then_what_follows_diverged_and_from_whom_is_said() -> None:
    manager = remembering()
    ran(manager, "monday", LONG, session="chat")
    first, again = manager.inspect.explain([*LONG[:9], 7, *LONG[10:]])
    assert causes([first, again]) == [(9, 10, "first_seen"), (10, 40, "diverged")]
    assert again.detail == Divergence(
        9, "monday", "chat", tuple(LONG[1:9]), (7, *LONG[10:17]), tuple(LONG[9:17]), moved_by=0, again=10, num_alike=1
    )


def test_given_an_earlier_prompt_that_left_from_where_both_part_then_it_is_still_known_where() -> None:
    manager = remembering(gpu_blocks=20)
    short = manager.allocate("short", LONG[:4])
    manager.commit(short)
    ran(manager, "gone", LONG)
    manager.cache.evict(20)  # all but the block that is read
    spans = manager.inspect.explain([*LONG[:6], 7, *LONG[7:]])
    assert causes(spans) == [(4, 6, "rest_of_block"), (6, 7, "first_seen"), (7, 40, "diverged")]


@pytest.mark.parametrize("gpu_blocks", [100, 10])  # all of them are cached, or remembered
def test_given_an_early_token_that_differs_in_each_request_then_their_number_and_the_place_are_said(
    gpu_blocks: int,
) -> None:
    manager = remembering(gpu_blocks=gpu_blocks, policy="lru")
    for number in range(3):
        ran(manager, f"r{number}", [*LONG[:6], 7000 + number, *LONG[7:]])
        *_, span = manager.inspect.explain([*LONG[:6], 8000, *LONG[7:]])
        assert isinstance(span.detail, Divergence)
        assert (span.detail.at, span.detail.again, span.detail.num_alike) == (6, 7, number + 1)
        assert ("tokens 6 to 7 differ in each request (3 earlier ones" in span.words) == (number == 2)


def test_given_other_ends_behind_one_beginning_then_they_are_not_taken_for_the_same_text() -> None:
    manager = remembering(gpu_blocks=100)
    for number in range(3):
        ran(manager, f"r{number}", [*LONG[:6], *range(1000 * number, 1000 * number + 30)])
    ran(manager, "same", [*LONG[:6], 7, *LONG[7:]])
    *_, span = manager.inspect.explain([*LONG[:6], 8, *LONG[7:]])
    assert isinstance(span.detail, Divergence)
    assert (span.detail.request_id, span.detail.num_alike) == ("same", 1)


def test_given_a_history_that_was_cut_then_what_is_left_of_it_moved_forward() -> None:
    manager = remembering()
    ran(manager, "whole", LONG)
    spans = manager.inspect.explain(LONG[:8] + LONG[20:])
    assert causes(spans) == [(8, 28, "diverged")]
    assert isinstance(spans[0].detail, Divergence)
    assert spans[0].detail.moved_by == -12


def test_given_a_run_that_was_evicted_then_for_whom_and_how_long_ago_is_said() -> None:
    clock = Clock()
    manager = remembering(gpu_blocks=10, clock=clock)
    ran(manager, "first", LONG)
    clock.now = 5.0
    ran(manager, "second", list(range(16)))
    clock.now = 7.0
    (span,) = manager.inspect.explain(LONG)
    assert causes([span]) == [(24, 40, "evicted")]
    assert span.detail == Departure(EvictionReason.CAPACITY, 2.0, "", "second")


def test_given_a_request_of_another_tenant_that_took_the_room_then_only_an_admin_is_told_its_name() -> None:
    manager = remembering(gpu_blocks=10)
    ran(manager, "mine", LONG, scope=ReuseScope(tenant="me"))
    ran(manager, "theirs", list(range(40)), scope=ReuseScope(tenant="them"))
    (told,) = manager.inspect.explain(LONG, ReuseScope(tenant="me"))
    (admin,) = manager.inspect.explain(LONG, ReuseScope(tenant="me"), all_tenants=True)
    assert told.detail == Departure(EvictionReason.CAPACITY, 0.0, "others", None)
    assert admin.detail == Departure(EvictionReason.CAPACITY, 0.0, "them", "theirs")


def test_given_what_another_tenant_holds_then_it_is_first_seen_but_for_an_admin() -> None:
    manager = remembering()
    theirs = ReuseScope(tenant="them", salt="secret")
    ran(manager, "theirs", LONG, scope=theirs)
    assert causes(manager.inspect.explain(LONG, ReuseScope(tenant="me"))) == [(0, 40, "first_seen")]
    (admin,) = manager.inspect.explain(LONG, ReuseScope(tenant="me"), all_tenants=True)
    assert admin == MissedSpan(0, 40, MissCause.OTHER_SCOPE, Elsewhere(theirs, ("tenant", "salt")))


def test_given_another_salt_of_the_same_tenant_then_the_scope_is_named_without_it() -> None:
    manager = remembering()
    ran(manager, "a", LONG, scope=ReuseScope(tenant="me", adapter="sql", salt="one"))
    (span,) = manager.inspect.explain(LONG, ReuseScope(tenant="me", adapter="sql", salt="two"))
    assert span.detail == Elsewhere(ReuseScope(tenant="me", adapter="sql"), ("salt",))


def test_given_a_request_that_computes_the_same_then_it_is_in_flight() -> None:
    manager = remembering(gpu_blocks=64)
    manager.allocate("busy", LONG[:30])
    assert manager.inspect.explain(LONG) == [
        MissedSpan(0, 28, MissCause.IN_FLIGHT, "busy"),
        MissedSpan(28, 30, MissCause.REST_OF_BLOCK),
        MissedSpan(30, 40, MissCause.FIRST_SEEN),
    ]


@pytest.mark.parametrize(("how", "cause"), [("reset", "invalidated"), ("expiry", "expired"), ("evict", "evicted")])
def test_given_how_a_run_left_then_that_is_the_cause(how: str, cause: str) -> None:
    clock = Clock()
    manager = remembering(clock=clock)
    ran(manager, "a", LONG, ttl=1.0)
    if how == "reset":
        manager.cache.reset()
    elif how == "evict":
        manager.cache.evict(16)
    else:
        clock.now = 2.0
        manager.cache.gc()
    assert causes(manager.inspect.explain(LONG)) == [(0, 40, cause)]


def test_given_layers_with_a_state_and_no_checkpoint_there_then_that_is_the_cause() -> None:
    state = StateSpec((StatePart("conv", (3, 4), DType.FLOAT32),))
    manager = remembering(FULL, state, gpu_blocks=64)
    ran(manager, "a", LONG)
    assert causes(manager.inspect.explain([*LONG[:30], 1, 2])) == [
        (0, 28, "no_state"),
        (28, 30, "rest_of_block"),
        (30, 32, "first_seen"),
    ]


def test_given_a_prompt_whose_encoder_input_has_no_name_then_it_shares_nothing() -> None:
    manager = remembering(FULL, LayerSpec(1, 8, cross_attention=True), gpu_blocks=64)
    assert causes(manager.inspect.explain(Prompt(LONG, cross_tokens=4))) == [(0, 40, "other_scope")]


def test_given_any_cause_then_its_words_say_what_helps() -> None:
    for cause in set(MissCause) - {MissCause.DIVERGED}:
        assert MissedSpan(0, 1, cause).words
    manager = remembering(gpu_blocks=10)
    ran(manager, "monday", LONG)
    moved = manager.inspect.explain(LONG[:8] + LONG[20:])[-1].words
    assert "request monday" in moved
    assert "12 tokens nearer to its beginning" in moved
    assert "token 8 on: put what changes, as a date, behind what stays; keep tools in one order" in moved
    assert "another cache_salt" in manager.inspect.explain(LONG, ReuseScope(salt="x"))[0].words
    ran(manager, "tuesday", list(range(40)))
    assert "0 s ago (capacity) to make room for tuesday" in manager.inspect.explain(LONG)[0].words


def test_given_a_live_request_then_its_summary_is_of_the_moment_of_its_admission() -> None:
    manager = remembering(gpu_blocks=10)
    ran(manager, "first", LONG)
    ran(manager, "second", list(range(40)))
    handle = manager.allocate("again", LONG)
    manager.commit(handle)
    assert handle.missed_tokens == {MissCause.EVICTED: 40}
    assert causes(manager.inspect.explain(handle)) == [(0, 40, "evicted")]
    manager.free(handle)
    assert handle.missed_tokens == {MissCause.EVICTED: 40}


def test_given_more_that_left_than_is_remembered_then_the_oldest_is_forgotten_and_nothing_else_is() -> None:
    manager = remembering(gpu_blocks=10, remembered_blocks=20)
    for first in range(0, 500, 100):
        cached(manager, 40, first)
    assert causes(manager.inspect.explain(list(range(40)))) == [(0, 40, "forgotten")]
    assert causes(manager.inspect.explain(list(range(300, 340)))) == [(0, 40, "evicted")]
    assert causes(manager.inspect.explain(list(range(900, 940)))) == [(0, 40, "first_seen")]


def test_given_so_much_forgotten_that_its_beginnings_are_too_then_first_seen_holds_for_some_time_only() -> None:
    clock = Clock()
    manager = remembering(gpu_blocks=10, clock=clock)
    manager._cache.departed = Departed(20, 4, max_lost=2)
    for first in range(0, 1000, 100):
        clock.now += 1.0
        cached(manager, 40, first)
    (span,) = manager.inspect.explain(list(range(40)))
    assert span == MissedSpan(0, 40, MissCause.FIRST_SEEN, 2.0)


def test_given_many_that_left_before_anybody_asked_then_the_younger_are_known_and_the_older_forgotten() -> None:
    clock = Clock()
    manager = remembering(gpu_blocks=10, clock=clock, remembered_blocks=4000)
    for number in range(600):
        clock.now = float(number)
        ran(manager, f"r{number}", list(range(100 * number, 100 * number + 40)))
    asked = {number: manager.inspect.explain(list(range(100 * number, 100 * number + 40)))[0] for number in range(599)}
    causes_of = [asked[number].cause for number in range(599)]
    num_known = causes_of.count(MissCause.EVICTED)
    assert 390 <= num_known <= 400
    assert causes_of == [MissCause.FORGOTTEN] * (599 - num_known) + [MissCause.EVICTED] * num_known
    assert asked[300].detail == Departure(EvictionReason.CAPACITY, 298.0, "", "r301")
    assert manager.inspect.explain([7] * 40) == [MissedSpan(0, 40, MissCause.FIRST_SEEN)]


def test_given_much_that_left_then_the_garbage_collector_has_no_more_to_look_at() -> None:
    manager = remembering(gpu_blocks=10, remembered_blocks=100_000)

    def num_objects() -> int:
        for number in range(next(numbers), next(numbers)):
            cached(manager, 40, 100 * number)
        gc.collect()
        return len(gc.get_objects())

    numbers = iter([0, 300, 300, 900])
    before = num_objects()
    assert num_objects() < before + 100  # a tuple for each of the 600 would be counted


def test_given_the_same_blocks_that_leave_again_and_again_then_they_are_remembered_once() -> None:
    manager = remembering(gpu_blocks=10)
    for _ in range(50):
        cached(manager, 40, 0)
        manager.inspect.explain(LONG)
        cached(manager, 40, 500)
    manager.inspect.explain(LONG)
    departed = manager._cache.departed
    assert departed is not None
    assert departed._num_blocks <= 20


def test_given_nothing_remembered_then_asking_is_refused_and_requests_say_nothing() -> None:
    manager = make_manager()
    assert manager.allocate("a", LONG).missed_tokens == {}
    with pytest.raises(InvalidArgumentError, match="remembered_blocks is 0"):
        manager.inspect.explain(LONG)
