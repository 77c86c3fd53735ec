"""A breaker by a clock that stands still until a test moves it."""

from __future__ import annotations

import threading

import pytest

from kvpool.tiers.remote.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(pause=1.0, longest=5.0, clock=clock)


def probe_fails(breaker: Breaker, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    assert breaker.claim_probe()
    breaker.failed("still nothing")


def test_given_a_new_breaker_then_the_node_may_be_asked_and_nobody_probes(breaker: Breaker) -> None:
    assert breaker.allows()
    assert not breaker.claim_probe()
    assert breaker.problem == ""


def test_given_a_node_that_is_not_proven_then_somebody_probes_first_and_at_once(clock: Clock) -> None:
    breaker = Breaker(proven=False, clock=clock)
    assert not breaker.allows()
    assert breaker.claim_probe()
    breaker.succeeded()
    assert breaker.allows()


def test_given_one_failure_then_nobody_asks_until_the_pause_is_over(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("timed out")
    clock.now += 0.9
    assert not breaker.allows()
    assert not breaker.claim_probe()
    assert breaker.problem == "timed out (asked again in 0 s)"


def test_given_the_pause_is_over_then_one_caller_probes_and_the_others_still_may_not_ask(
    breaker: Breaker, clock: Clock
) -> None:
    breaker.failed("timed out")
    clock.now += 1.0
    claimed: list[bool] = []
    threads = [threading.Thread(target=lambda: claimed.append(breaker.claim_probe())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == [False] * 7 + [True]
    assert not breaker.allows()


def test_given_a_probe_that_succeeds_then_the_node_may_be_asked_again(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("timed out")
    clock.now += 1.0
    assert breaker.claim_probe()
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.problem == ""


def test_given_probes_that_fail_then_the_pause_doubles_up_to_the_longest(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("timed out")
    for pause in (1.0, 2.0, 4.0, 5.0):
        clock.now += pause - 0.01
        assert not breaker.claim_probe()
        probe_fails(breaker, clock, 0.01)
    clock.now += 5.0
    assert breaker.claim_probe()


def test_given_a_node_that_came_back_when_it_fails_again_then_the_pause_is_short_again(
    breaker: Breaker, clock: Clock
) -> None:
    breaker.failed("timed out")
    probe_fails(breaker, clock, 1.0)
    clock.now += 2.0
    assert breaker.claim_probe()
    breaker.succeeded()
    breaker.failed("timed out")
    clock.now += 1.0
    assert breaker.claim_probe()


def test_given_an_old_answer_while_open_then_only_a_probe_closes_it(breaker: Breaker) -> None:
    breaker.failed("timed out")
    breaker.succeeded()
    assert not breaker.allows()


def test_given_many_failures_at_once_then_they_are_one_failure(breaker: Breaker, clock: Clock) -> None:
    breaker.failed("timed out")
    clock.now += 0.5
    breaker.failed("timed out")
    clock.now += 0.5
    assert breaker.claim_probe()


def test_given_an_answer_since_the_question_then_the_node_is_busy_and_not_dead(breaker: Breaker, clock: Clock) -> None:
    asked_at = clock.now
    clock.now += 1.0
    breaker.succeeded()
    breaker.failed("timed out", asked_at=asked_at)
    assert breaker.allows()
    clock.now += 1.0
    breaker.failed("timed out", asked_at=clock.now - 1.0)
    assert not breaker.allows()


def test_given_hardly_any_time_to_answer_then_it_takes_many_failures_to_open(breaker: Breaker, clock: Clock) -> None:
    for _ in range(2):
        for _ in range(4):
            clock.now += 0.004
            breaker.failed("no answer in 0.00 s", asked_at=clock.now - 0.004)
            assert breaker.allows()
        breaker.succeeded()
    clock.now += 0.06
    breaker.failed("no answer in 0.06 s", asked_at=clock.now - 0.06)
    assert not breaker.allows()


def test_given_a_node_that_has_never_answered_then_the_first_question_without_an_answer_counts(
    breaker: Breaker, clock: Clock
) -> None:
    clock.now += 1.0
    breaker.failed("no answer in 1.00 s", asked_at=clock.now - 1.0)
    assert not breaker.allows()
