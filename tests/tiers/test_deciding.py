"""Load or compute again: what is chosen before and after measuring, and what a wrong guess costs at most."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.tiers.transport.deciding import MARGIN, PROBE_SECONDS, SMOOTHING, Decider, LoadDecision, TransferSpeed
from kvpool.tiers.transport.prefix_options import Option
from managers import Clock

BLOCK_BYTES = 1_000_000
SIZE = 16


def option(num_blocks: int, *blocks_of_tier: int) -> Option:
    return Option(num_blocks, tuple(count * BLOCK_BYTES for count in blocks_of_tier))


def warmed_up(bytes_per_second: float = 1e9, tokens_per_second: float = 1e3, clock: Clock | None = None) -> Decider:
    decider = Decider(1, clock or Clock())
    for count in (4, 8, 16):
        decider.observe_load(0, count * BLOCK_BYTES, count * BLOCK_BYTES / bytes_per_second)
        decider.observe_prompt(count * SIZE, count * SIZE / tokens_per_second)
    return decider


def test_given_loads_of_several_sizes_then_latency_and_bandwidth_are_told_apart() -> None:
    speed = TransferSpeed()
    for num_bytes in (1e6, 8e6, 3e6, 20e6):
        speed.observe(int(num_bytes), 0.004 + num_bytes / 2e9)
    assert speed.latency == pytest.approx(0.004)
    assert speed.bytes_per_second == pytest.approx(2e9)
    assert speed.predict(40_000_000) == pytest.approx(0.024, rel=0.05)


def test_given_loads_of_one_size_then_others_are_expected_in_proportion() -> None:
    speed = TransferSpeed()
    for _ in range(3):
        speed.observe(1_000_000, 0.01)
    assert speed.expect(2_000_000) == pytest.approx(0.02)


def test_given_a_tier_that_becomes_slow_then_the_prediction_follows() -> None:
    speed = TransferSpeed()
    for _ in range(20):
        speed.observe(1_000_000, 0.001)
    for _ in range(20):
        speed.observe(1_000_000, 0.1)
    assert speed.predict(1_000_000) == pytest.approx(0.1, rel=0.2)


def test_given_loads_that_took_longer_than_expected_then_predictions_are_raised_by_the_recent_error() -> None:
    speed = TransferSpeed()
    speed.observe(1000, 1.0)
    assert speed.predict(1000) == speed.expect(1000) == 1.0  # nothing was expected of the first
    speed.observe(1000, 3.0)  # three times as long
    assert speed.predict(1000) == pytest.approx(speed.expect(1000) * (1 + 0.2 * 2))
    speed.observe(1000, 1e-9)  # shorter than expected is no error: the old one fades
    assert speed.predict(1000) == pytest.approx(speed.expect(1000) * (1 + 0.8 * 0.4))
    before = speed.predict(1000) / speed.expect(1000) - 1
    speed.observe(1000, 1e9)  # one outlier counts as ten times as long
    assert speed.predict(1000) / speed.expect(1000) - 1 == pytest.approx(before + 0.2 * (10 - before))


def test_given_no_loads_then_nothing_is_said_of_a_tiers_speed() -> None:
    speed = TransferSpeed()
    assert (speed.latency, speed.bytes_per_second, speed.predict(10**9)) == (0.0, 0.0, 0.0)


def test_given_loads_that_bring_nothing_then_they_count_as_latency() -> None:
    speed = TransferSpeed()
    for _ in range(4):
        speed.observe(0, 1.0)
    assert speed.predict(1_000_000) == speed.latency == 1.0
    assert speed.bytes_per_second == 0.0


def test_given_nothing_measured_then_the_longest_prefix_is_loaded() -> None:
    decision = Decider(2).decide([option(4, 4, 0), option(8, 4, 4)], 0, SIZE)
    assert decision.option == option(8, 4, 4)
    assert not decision.is_prediction


def test_given_a_tier_that_was_never_used_then_it_is_tried() -> None:
    decider = Decider(2)
    decider.observe_prompt(100, 0.1)
    decider.observe_load(0, BLOCK_BYTES, 0.001)
    assert decider.decide([option(4, 4, 0), option(8, 4, 4)], 0, SIZE).option == option(8, 4, 4)


def test_given_measurements_then_the_faster_way_is_chosen_with_its_prediction() -> None:
    decision = warmed_up().decide([option(8, 8)], 0, SIZE)
    assert decision.option is not None
    assert decision.load_seconds == pytest.approx(0.008, rel=0.1)
    assert decision.compute_seconds == pytest.approx(0.128, rel=0.1)
    assert warmed_up(bytes_per_second=1e7).decide([option(8, 8)], 0, SIZE).option is None


def test_given_blocks_in_the_cache_then_loading_is_weighed_against_computing_the_rest_only() -> None:
    decider = warmed_up(bytes_per_second=4e7)
    decision = decider.decide([option(8, 4)], 4, SIZE)
    assert (decision.option, decision.reason) == (None, "computing is faster")
    assert decision.load_seconds == pytest.approx(0.1, rel=0.1)
    assert decision.compute_seconds == pytest.approx(0.064, rel=0.1)


def test_given_tiers_that_are_too_slow_or_have_nothing_then_only_the_former_count_as_recomputed() -> None:
    decider = warmed_up(bytes_per_second=1e6)
    decider.decide([option(8, 8)], 0, SIZE)
    decider.decide([], 0, SIZE)
    stats = decider.stats()
    assert (stats.recomputes, stats.loads) == (1, 0)


def test_given_a_slow_second_tier_then_only_what_the_first_one_has_is_loaded() -> None:
    decider = Decider(2)
    for count in (4, 8, 16):
        decider.observe_prompt(count * SIZE, count * SIZE / 1e3)
        decider.observe_load(0, count * BLOCK_BYTES, count * BLOCK_BYTES / 1e9)
        decider.observe_load(1, count * BLOCK_BYTES, count * BLOCK_BYTES / 1e7)
    assert decider.decide([option(4, 4, 0), option(8, 4, 4)], 0, SIZE).option == option(4, 4, 0)


def test_given_a_tier_too_slow_to_use_then_it_is_measured_again_once_in_a_while_and_used_when_it_recovers() -> None:
    clock = Clock()
    decider = warmed_up(bytes_per_second=1e6, clock=clock)
    assert not decider.decide([option(8, 8)], 0, SIZE).probe
    clock.now = PROBE_SECONDS
    assert [decider.decide([option(8, 8)], 0, SIZE).probe for _ in range(3)] == [True, False, False]
    for _ in range(30):
        decider.observe_load(0, 4 * BLOCK_BYTES, 0.004)
    assert decider.decide([option(8, 8)], 0, SIZE).option is not None
    assert decider.stats().probes == 1


def test_given_what_happened_then_it_is_compared_with_the_prediction() -> None:
    decider = warmed_up()
    decision = decider.decide([option(8, 8)], 0, SIZE)
    decider.observe_wait(decision, 8 * BLOCK_BYTES, waited=0.02, loading=0.008)
    stats = decider.stats()
    assert (stats.loads, stats.slower_than_computing) == (1, 0)
    assert stats.actual_seconds == 0.02
    assert stats.predicted_seconds == pytest.approx(0.008, rel=0.1)
    assert stats.saved_seconds == pytest.approx(0.108, rel=0.1)
    again = decider.decide([option(8, 8)], 0, SIZE)
    assert again.load_seconds == pytest.approx(0.02, rel=0.1)  # what it waited besides is expected again


def test_given_lookups_that_cost_much_and_bring_nothing_then_they_stop_but_for_one_in_a_while() -> None:
    clock = Clock()
    decider = warmed_up(clock=clock)
    for _ in range(40):
        decider.observe_lookup(0.1, False)
    assert not decider.is_worth_looking(64)
    assert decider.is_worth_looking(100_000)  # 5 % of what computing takes is allowed
    assert [decider.is_time_to_look(), decider.is_time_to_look()] == [True, False]
    clock.now = PROBE_SECONDS
    assert decider.is_time_to_look()
    for _ in range(20):
        decider.observe_lookup(0.1, True)
    assert decider.is_worth_looking(200)


@pytest.mark.parametrize("bandwidth", [1e6, 1e7, 5e7, 1e8, 1e9])
@pytest.mark.parametrize("latency", [0.0, 0.01, 0.5])
def test_given_a_tier_of_any_speed_then_reuse_costs_at_most_a_twentieth_more_than_computing(
    bandwidth: float, latency: float
) -> None:
    random = np.random.default_rng(0)
    decider = Decider(1)
    together = computed = 0.0
    for number in range(300):
        blocks = int(random.integers(1, 64))
        computing = blocks * SIZE / 1e3
        decision = decider.decide([option(blocks, blocks)], 0, SIZE)
        took = computing
        if decision.option is not None:
            loading = (latency + blocks * BLOCK_BYTES / bandwidth) * float(random.uniform(0.8, 1.2))
            decider.observe_load(0, blocks * BLOCK_BYTES, loading)
            decider.observe_wait(decision, blocks * BLOCK_BYTES, loading, loading)
            took = loading
        if decision.option is None or number % 4 == 0:
            decider.observe_prompt(blocks * SIZE, computing)
        if number >= 30:  # warmed up
            together, computed = together + took, computed + computing
    assert together <= 1.05 * computed


def test_nothing_is_known_of_computing_before_a_prompt_was_measured() -> None:
    decider = Decider(1, Clock())
    assert decider.compute_seconds(16) is None
    assert decider.is_worth_looking(1)
    decider.observe_prompt(16, 0.5)
    assert decider.compute_seconds(16) == pytest.approx(0.5)
    assert decider.is_worth_looking(1)  # no look-up was measured


@pytest.mark.parametrize(("helped", "least"), [(True, 1.0), (False, MARGIN - 1.0)])
def test_looking_pays_up_to_what_it_gains(helped: bool, least: float) -> None:
    decider = warmed_up(tokens_per_second=1e3)
    for _ in range(400):
        decider.observe_lookup(0.5, helped)
    worth = 0.5 / least * 1e3  # tokens that take as long
    assert not decider.is_worth_looking(int(worth * 0.99))
    assert decider.is_worth_looking(int(worth * 1.01))


def test_the_first_look_counts_alone_and_later_ones_are_smoothed() -> None:
    decider = Decider(1, Clock())
    decider.observe_lookup(4.0, True)
    assert decider._look_seconds == 4.0
    decider.observe_lookup(0.0, False)
    assert decider._look_seconds == pytest.approx(4.0 * (1 - SMOOTHING))
    assert decider._look_gain == pytest.approx(1 - SMOOTHING)


def test_of_several_options_the_one_that_saves_most_is_chosen_also_where_loading_is_slow() -> None:
    decider = warmed_up(bytes_per_second=100e6, tokens_per_second=1e3)
    options = [option(4, 4), option(8, 8), option(12, 12)]
    assert decider.decide(options, 0, SIZE).option == options[2]


@pytest.mark.parametrize(
    ("load", "compute", "expected"), [(1.0, 2.0, True), (0.0, 2.0, False), (1.0, 0.0, False), (0.0, 0.0, False)]
)
def test_a_prediction_needs_both_sides(load: float, compute: float, expected: bool) -> None:
    assert LoadDecision(option(1, 1), "", load, compute).is_prediction is expected
    assert not LoadDecision(None, "", load, compute).is_prediction


def test_decisions_and_what_became_of_them_are_counted() -> None:
    decider = warmed_up(bytes_per_second=1e9, tokens_per_second=1e3)
    decision = decider.decide([option(8, 8)], 0, SIZE)
    assert decision.is_prediction
    decider.observe_wait(decision, 8 * BLOCK_BYTES, decision.compute_seconds, 0.0)
    decider.observe_wait(decision, 8 * BLOCK_BYTES, decision.compute_seconds + 1.0, 0.0)
    decider.observe_wait(decision._replace(load_seconds=0.0), 8 * BLOCK_BYTES, 99.0, 0.0)
    stats = decider.stats()
    assert (stats.loads, stats.recomputes, stats.unmeasured, stats.slower_than_computing) == (1, 0, 0, 1)
    assert stats.predicted_seconds == pytest.approx(2 * decision.load_seconds)
    assert stats.actual_seconds == pytest.approx(2 * decision.compute_seconds + 1.0)
    assert stats.saved_seconds == pytest.approx(-1.0)
    fresh = Decider(2, Clock())
    fresh.decide([option(8, 8, 0)], 0, SIZE)
    fresh.decide([], 0, SIZE)
    assert (fresh.stats().loads, fresh.stats().unmeasured, fresh.stats().recomputes) == (1, 1, 0)


def test_given_one_of_two_tiers_unmeasured_then_only_options_with_its_bytes_are_tried_blindly() -> None:
    decider = Decider(2, Clock())
    for count in (4, 8, 16):
        decider.observe_load(0, count * BLOCK_BYTES, count * BLOCK_BYTES / 1e9)
        decider.observe_prompt(count * SIZE, count * SIZE / 1e3)
    assert decider.decide([option(4, 4, 0)], 0, SIZE).reason == "loading is faster"
    both = decider.decide([option(4, 4, 0), option(8, 4, 4)], 0, SIZE)
    assert (both.reason, both.load_seconds, both.is_prediction) == ("a tier was not measured yet", 0.0, False)
    assert both.compute_seconds == pytest.approx(8 * SIZE / 1e3, rel=1e-3)


def test_given_loads_that_took_no_time_then_the_first_that_does_is_no_error_of_a_prediction() -> None:
    speed = TransferSpeed()
    speed.observe(100, 0.0)
    speed.observe(100, 1.0)
    assert speed.predict(100) == speed.expect(100) > 0
