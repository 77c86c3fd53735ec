from __future__ import annotations

from typing import Any

import pytest
from support import add, make_engine, names, request
from toy_engine import ToyEngine, expected_output

from kvpool import KVCacheManager, ReuseScope
from kvpool.errors import ConfigError
from kvpool.scheduling import (
    FairShare,
    LongestPrefixMatch,
    RankedPolicy,
    Request,
    ScheduledSequence,
    SchedulerConfig,
    SoonestFirstToken,
)
from kvpool.scheduling.planning import LOOK_UP_EVERY
from kvpool.sequences.admit import PrefixMatch
from managers import Clock, make_manager


def order_of_admission(engine: ToyEngine) -> list[str]:
    """Runs everything, one sequence at a time."""
    admitted: list[str] = []
    while engine.scheduler.has_work:
        admitted += names(engine.step().admitted)
    return admitted


def test_given_fcfs_when_requests_wait_then_the_oldest_arrival_goes_first_whenever_it_was_added() -> None:
    engine = make_engine(max_sequences=1)
    add(engine, request("b", 3, arrival=2.0), request("c", 3, arrival=3.0), request("a", 3, arrival=1.0))
    assert order_of_admission(engine) == ["a", "b", "c"]


def test_given_priority_when_requests_wait_then_larger_numbers_go_first_and_equal_ones_by_arrival() -> None:
    engine = make_engine(max_sequences=1, policy="priority")
    add(engine, request("low", 3), request("high", 3, priority=5), request("too", 3, priority=5))
    assert order_of_admission(engine) == ["high", "too", "low"]


def test_given_shortest_remaining_when_requests_wait_then_the_fewest_tokens_to_completion_go_first() -> None:
    engine = make_engine(max_sequences=1, policy="shortest_remaining")
    add(engine, request("long", 9, 9), request("short", 3, 2, first=20), request("middle", 2, 8, first=40))
    add(engine, request("much read", 20, 3, first=60))
    assert order_of_admission(engine) == ["short", "much read", "middle", "long"]


def test_given_longest_prefix_match_when_one_prompt_is_cached_then_it_overtakes() -> None:
    engine = make_engine(max_sequences=1, policy="longest_prefix_match")
    add(engine, request("first", 8))
    engine.drain()
    add(engine, request("cold", 8, first=100), request("warm", 12))
    assert order_of_admission(engine) == ["warm", "cold"]


def test_given_longest_prefix_match_when_the_queue_is_longer_than_its_window_then_those_behind_keep_their_order() -> (
    None
):
    engine = make_engine(max_sequences=1, policy=lambda: LongestPrefixMatch(window=2))
    add(engine, request("first", 8))
    engine.drain()
    add(engine, request("cold", 8, first=100), request("colder", 8, first=200), request("warm", 12))
    assert order_of_admission(engine) == ["cold", "warm", "colder"]


def with_prefixes_on_both_tiers(**config: object) -> ToyEngine:
    """An engine with tokens 0..8 cached on the GPU and 100..108 on the host."""
    manager = make_manager(gpu_blocks=32, host_blocks=32)
    engine = make_engine(manager, max_sequences=1, **config)  # type: ignore[arg-type]
    add(engine, request("first", 9, 1, first=100))
    engine.drain()
    manager.cache.offload(32)
    add(engine, request("second", 9, 1))
    engine.drain()
    return engine


def test_given_soonest_first_token_then_what_is_on_the_gpu_goes_before_what_is_on_the_host_before_what_is_computed() -> (
    None
):
    engine = with_prefixes_on_both_tiers(policy="soonest_first_token")
    add(engine, request("cold", 12, first=200), request("below", 12, first=100), request("warm", 12))
    assert order_of_admission(engine) == ["warm", "below", "cold"]


def test_given_no_choice_then_the_soonest_first_token_goes_first() -> None:
    engine = make_engine(max_sequences=1, policy=SchedulerConfig().policy)
    add(engine, request("long", 40, 1), request("short", 4, 1, first=100))
    assert order_of_admission(engine) == ["short", "long"]


def overtakers_of_a_long_prompt(num_ahead: int, **options: Any) -> int:
    """How many requests go before a long prompt that finds so many waiting, while short ones keep coming."""
    engine = make_engine(max_sequences=1, policy=lambda: SoonestFirstToken(**options))
    add(engine, *(request(f"ahead {number}", 20, 1, first=100 * number) for number in range(num_ahead)))
    add(engine, request("long", 40, 1, first=10_000))
    before: list[str] = []
    for number in range(100):
        add(engine, request(f"short {number}", 4, 1, first=20_000 + 100 * number))
        before += names(engine.step().admitted)
        if "long" in before:
            return before.index("long")
    raise AssertionError("it starved")


@pytest.mark.parametrize("num_ahead", [0, 3, 10])
@pytest.mark.parametrize(("patience", "grace"), [(0.0, 0), (1.0, 4), (3.0, 8)])
def test_given_short_prompts_without_end_then_a_long_one_waits_for_a_multiple_of_those_before_it(
    num_ahead: int, patience: float, grace: int
) -> None:
    overtakers = overtakers_of_a_long_prompt(num_ahead, patience=patience, grace=grace)
    assert patience * num_ahead + grace <= overtakers <= (patience + 1) * num_ahead + grace


def test_given_prompts_of_one_token_then_each_admission_counts_as_overtaking() -> None:
    engine = make_engine(max_sequences=1, policy=lambda: SoonestFirstToken(patience=0.0, grace=2))
    add(engine, request("long", 40, 1), *(request(name, 1, 1, first=100) for name in "abc"))
    assert order_of_admission(engine) == ["a", "b", "long", "c"]


def test_given_samples_that_have_nothing_left_to_compute_then_they_do_not_count_as_overtaking() -> None:
    engine = make_engine(max_sequences=4, policy=lambda: SoonestFirstToken(patience=0.0, grace=2))
    add(engine, request("long", 40, 1), request("a", 4, 1, first=100, n=4), request("b", 4, 2, first=200, n=4))
    assert order_of_admission(engine) == ["a", "b", "long"]


def test_given_samples_of_one_request_then_they_count_as_one_that_overtakes() -> None:
    engine = make_engine(max_sequences=4, policy=lambda: SoonestFirstToken(patience=0.0, grace=3))
    add(engine, request("long", 40, 1), *(request(name, 4, 3, first=100, n=4) for name in "abc"))
    assert order_of_admission(engine) == ["a", "b", "c", "long"]


def test_given_requests_that_end_early_then_only_admissions_count_as_overtaking() -> None:
    policy = SoonestFirstToken(grace=1)
    engine = make_engine(max_sequences=1, policy=lambda: policy)
    add(engine, request("long", 40, 1))
    for name in ("a", "b", "c"):
        add(engine, request(name, 4, 1, first=100))
        engine.scheduler.cancel(name)
    add(engine, request("short", 4, 1, first=100), request("shorter", 3, 1, first=200))
    assert order_of_admission(engine) == ["shorter", "long", "short"]


def test_given_soonest_first_token_with_a_window_of_one_then_it_is_first_come_first_served() -> None:
    engine = with_prefixes_on_both_tiers(policy=lambda: SoonestFirstToken(window=1))
    add(engine, request("cold", 12, first=200), request("warm", 12))
    assert order_of_admission(engine) == ["cold", "warm"]


class CountingManager(KVCacheManager):
    """Counts how often somebody asks what is cached of a prompt."""

    num_asked = 0

    def match_prefix(self, *arguments: Any) -> PrefixMatch:
        self.num_asked += 1
        return super().match_prefix(*arguments)


@pytest.mark.parametrize("policy", ["soonest_first_token", "longest_prefix_match"])
def test_given_many_that_wait_then_what_is_cached_of_them_is_not_looked_up_in_every_step(policy: str) -> None:
    manager = CountingManager(make_manager(gpu_blocks=64).config)
    engine = make_engine(manager, max_sequences=1, policy=policy)
    add(engine, *(request(f"r{number}", 4, 1, first=100 * number) for number in range(48)))
    assert len(order_of_admission(engine)) == 48
    # The policy asks 48 + 47 + ... + 1 times, the scheduler once or twice for each that it tries
    assert manager.num_asked < 48 * 49 // 2 // LOOK_UP_EVERY + 48 + 2 * 48


def test_given_a_prefix_that_comes_while_a_request_waits_then_it_goes_first_a_few_admissions_later() -> None:
    engine = make_engine(max_sequences=1, policy="soonest_first_token")
    add(engine, request("first", 32, 1))
    engine.step()  # it computes what `warm` begins with
    add(engine, request("warm", 40, 1), *(request(f"cold {n}", 20, 1, first=100 * n) for n in range(1, 9)))
    assert order_of_admission(engine).index("warm") < LOOK_UP_EVERY


@pytest.mark.parametrize("options", [{"patience": -1.0}, {"patience": "long"}, {"grace": -1}, {"window": 0}])
def test_given_a_wrong_option_of_soonest_first_token_then_it_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SoonestFirstToken(**options)  # type: ignore[arg-type]


def of_tenant(tenant: str, name: str, max_new_tokens: int = 2) -> Request:
    return request(name, 3, max_new_tokens, scope=ReuseScope(tenant=tenant))


def test_given_fair_share_when_one_tenant_floods_then_the_others_take_turns_with_it() -> None:
    engine = make_engine(max_sequences=1, policy="fair_share")
    add(engine, *(of_tenant("flood", f"f{i}") for i in range(4)), of_tenant("quiet", "q0"), of_tenant("quiet", "q1"))
    assert order_of_admission(engine) == ["f0", "q0", "f1", "q1", "f2", "f3"]


def test_given_fair_share_when_one_tenant_has_no_more_requests_then_the_others_come_in_the_same_step() -> None:
    engine = make_engine(policy="fair_share")
    add(engine, of_tenant("one", "o"), *(of_tenant("many", f"m{i}") for i in range(3)))
    assert names(engine.step().admitted) == ["m0", "o", "m1", "m2"]


def test_given_fair_share_when_a_request_is_cancelled_before_it_ran_then_its_tenant_gets_no_credit() -> None:
    engine = make_engine(max_sequences=1, policy="fair_share")
    add(engine, of_tenant("a", "a0"), of_tenant("b", "b0"), of_tenant("b", "b1"), of_tenant("a", "a1"))
    add(engine, of_tenant("a", "cancelled", max_new_tokens=40))
    engine.scheduler.cancel("cancelled")
    assert order_of_admission(engine) == ["a0", "b0", "a1", "b1"]


def test_given_fair_share_with_weights_then_the_heavier_tenant_gets_more() -> None:
    engine = make_engine(max_sequences=1, policy=lambda: FairShare({"heavy": 3.0}))
    add(engine, *(of_tenant("heavy", f"h{i}") for i in range(4)), *(of_tenant("light", f"l{i}") for i in range(2)))
    assert order_of_admission(engine) == ["h0", "l0", "h1", "h2", "h3", "l1"]


def test_given_fair_share_when_a_tenant_comes_back_from_a_pause_then_it_has_saved_up_no_credit() -> None:
    engine = make_engine(max_sequences=1, policy="fair_share")
    add(engine, of_tenant("early", "e0"))
    engine.drain()
    add(engine, *(of_tenant("busy", f"b{i}") for i in range(8)))
    for _ in range(6):
        engine.step()
    add(engine, *(of_tenant("early", f"e{i}") for i in range(1, 4)))
    assert order_of_admission(engine)[:6] == ["b3", "e1", "b4", "e2", "b5", "e3"]


def test_given_fair_share_when_a_tenant_joins_then_it_begins_where_the_least_served_waiting_tenant_is() -> None:
    policy = FairShare()
    engine = make_engine(max_sequences=2, policy=lambda: policy)
    for tenant, max_new_tokens in (("more", 20), ("less", 8)):
        add(engine, *(of_tenant(tenant, f"{tenant} {i}", max_new_tokens) for i in range(2)))
    engine.step()
    charged = dict(policy.served)
    assert 0 < charged["less"] < charged["more"]
    add(engine, of_tenant("new", "new"))
    assert policy.served == charged | {"new": charged["less"]}


def test_given_fair_share_when_a_request_stops_early_then_its_tenant_is_charged_only_what_it_used() -> None:
    policy = FairShare()
    engine = make_engine(max_sequences=1, policy=lambda: policy)
    policy_of_engine = engine.scheduler._queues.policy
    assert isinstance(policy_of_engine, FairShare)
    add(engine, of_tenant("a", "long", max_new_tokens=40))
    engine.step()
    engine.scheduler.finish("long")
    assert policy_of_engine.served["a"] == 3  # three tokens of prompt; its one sample was never computed on


@pytest.mark.parametrize(("num_generated", "charged"), [(8, 11), (7, 10), (6, 9), (1, 4)])
def test_given_fair_share_when_a_request_ends_then_what_it_did_not_use_is_given_back_to_the_token(
    num_generated: int, charged: int
) -> None:
    stop = expected_output(request("a", 4, 8))[num_generated - 1]
    engine = make_engine(policy="fair_share")
    add(engine, request("a", 4, 8, stop_token_ids=[stop]))
    engine.drain()
    assert len(engine.finished["a"].token_ids) == num_generated
    policy = engine.scheduler._queues.policy
    assert isinstance(policy, FairShare)
    assert policy.served == {"": charged}  # K and V of the last token are never computed


def test_given_preempted_and_new_requests_when_there_is_room_again_then_the_preempted_go_first() -> None:
    engine = make_engine(make_manager(gpu_blocks=6), policy="shortest_remaining")
    add(engine, request("old", 8, 12), request("young", 8, 12, first=50))
    while not (plan := engine.step()).preempted:
        pass
    assert names(plan.preempted) == ["young"]
    add(engine, request("newest", 2, 1, first=80))
    admitted: list[str] = []
    while engine.scheduler.has_work:
        plan = engine.step()
        admitted += names([*plan.resumed, *plan.admitted])
    assert admitted == ["young", "newest"]


def test_given_an_order_of_ones_own_then_it_is_followed() -> None:
    class LongestPrompt(RankedPolicy):
        def key(self, sequence: ScheduledSequence) -> int:
            return -len(sequence.tokens)

    engine = make_engine(max_sequences=1, policy=LongestPrompt)
    add(engine, request("a", 2), request("b", 4), request("c", 3))
    assert order_of_admission(engine) == ["b", "c", "a"]


@pytest.mark.parametrize("policy", ["lifo", FairShare(), 7, dict])
def test_given_something_that_makes_no_policy_then_it_is_refused_by_name(policy: object) -> None:
    with pytest.raises(ConfigError, match="polic"):
        SchedulerConfig(policy=policy)  # type: ignore[arg-type]


def test_given_a_weight_of_zero_then_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' must be over 0"):
        FairShare({"a": 0.0})


def test_given_a_clock_then_requests_without_arrival_stand_in_the_order_of_adding() -> None:
    clock = Clock()
    engine = make_engine(max_sequences=1, clock=clock)
    for name in ("a", "b"):
        clock.now += 1.0
        add(engine, request(name, 3))
    assert order_of_admission(engine) == ["a", "b"]
