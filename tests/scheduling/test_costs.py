from __future__ import annotations

from typing import Any

import pytest
from support import add, make_engine, request

from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.scheduling import CostModel, LinearCostModel
from kvpool.scheduling.cost_model import COSTS, MeasuredStep, fit_costs

TRUE = LinearCostModel(
    prefill_seconds_per_token=2e-4,
    seconds_per_token_pair=3e-8,
    decode_seconds_per_step=4e-3,
    decode_seconds_per_sequence=5e-4,
    decode_seconds_per_context_token=6e-7,
)


def test_given_more_context_then_the_same_tokens_cost_more() -> None:
    costs = LinearCostModel()
    assert costs.prefill_seconds(100, 1000) > costs.prefill_seconds(100, 0) > 0
    assert costs.decode_seconds(8, 1000) > costs.decode_seconds(8, 0) > 0


def test_given_no_numbers_then_costs_are_those_of_a_model_of_eight_billion_weights_on_one_large_gpu() -> None:
    costs = LinearCostModel()
    assert costs.prefill_seconds(1000, 0) == pytest.approx(0.0405, rel=1e-3)  # 25,000 tokens a second at first
    assert costs.prefill_seconds(1000, 100_000) == pytest.approx(0.1405, rel=1e-3)
    assert costs.decode_seconds(1, 0) == pytest.approx(0.00501)
    assert costs.decode_seconds(100, 100_000) == pytest.approx(0.009)
    assert costs.transfer_seconds(2 * 10**10) == pytest.approx(1.00002)


def test_given_a_prompt_in_two_chunks_then_it_costs_what_it_costs_in_one() -> None:
    costs = LinearCostModel()
    parts = costs.prefill_seconds(60, 0) + costs.prefill_seconds(40, 60)
    assert parts == pytest.approx(costs.prefill_seconds(100, 0))


def test_given_nothing_to_do_then_it_costs_nothing() -> None:
    costs = LinearCostModel()
    assert costs.prefill_seconds(0, 50) == costs.decode_seconds(0, 0) == costs.transfer_seconds(0) == 0.0


def test_given_measured_times_then_predictions_converge_to_them() -> None:
    costs = LinearCostModel()
    for _ in range(100):
        costs.observe_step([], 8, 4000, seconds=0.5)
        costs.observe_step([(100, 20), (50, 0)], 8, 4000, seconds=0.5 + 3.0)
        costs.observe_transfer(10**6, seconds=0.25)
    assert costs.decode_seconds(8, 4000) == pytest.approx(0.5)
    assert costs.prefill_seconds(100, 20) + costs.prefill_seconds(50, 0) == pytest.approx(3.0)
    assert costs.transfer_seconds(10**6) == pytest.approx(0.25)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_given_a_clock_that_did_not_move_or_has_no_time_then_nothing_is_learned(seconds: float) -> None:
    costs = LinearCostModel()
    before = costs.decode_seconds(1, 10)
    costs.observe_step([], 1, 10, seconds=seconds)
    assert costs.decode_seconds(1, 10) == before


def test_given_a_scheduler_when_it_is_told_step_times_then_its_cost_model_learns() -> None:
    costs = LinearCostModel(smoothing=1.0)
    engine = make_engine(costs=costs)
    add(engine, request("a", 8))
    plan = engine.step()
    engine.scheduler.observe(plan, 2.0)
    assert plan.seconds(costs, engine.manager.config) == pytest.approx(2.0)
    plan = engine.step()
    engine.scheduler.observe(plan, 0.5)
    assert plan.seconds(costs, engine.manager.config) == pytest.approx(0.5)
    engine.scheduler.observe(plan, 0)  # a clock that did not move says nothing
    assert plan.seconds(costs, engine.manager.config) == pytest.approx(0.5)


@pytest.mark.parametrize("seconds", [-0.5, float("inf"), float("nan"), True, "1", None])
def test_given_a_step_time_that_is_none_then_it_is_refused_and_nothing_is_learned(seconds: Any) -> None:
    costs = LinearCostModel(smoothing=1.0)
    engine = make_engine(costs=costs)
    add(engine, request("a", 8))
    plan = engine.step()
    before = plan.seconds(costs, engine.manager.config)
    with pytest.raises(InvalidArgumentError, match="seconds must be the time that a step took"):
        engine.scheduler.observe(plan, seconds)
    assert plan.seconds(costs, engine.manager.config) == before


def test_given_a_cost_model_of_ones_own_then_three_methods_are_enough() -> None:
    class Flat:
        def prefill_seconds(self, num_tokens: int, context: int) -> float:
            return 1.0

        def decode_seconds(self, num_sequences: int, context: int) -> float:
            return 0.5 * num_sequences

        def transfer_seconds(self, num_bytes: int) -> float:
            return 0.0

    flat = Flat()
    assert isinstance(flat, CostModel)
    engine = make_engine(costs=flat)
    add(engine, request("a", 8), request("b", 8, first=50))
    plan = engine.step()
    engine.scheduler.observe(plan, 9.0)  # it does not learn
    assert plan.seconds(flat, engine.manager.config) == 2.0


@pytest.mark.parametrize(
    "option",
    [
        {"smoothing": 0.0},
        {"smoothing": 1.5},
        {"transfer_bytes_per_second": 0.0},
        {"transfer_latency": float("nan")},
        {"smoothing": "x"},
    ],
)
def test_given_a_wrong_number_then_it_is_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(option))):
        LinearCostModel(**option)
    with pytest.raises(InvalidArgumentError, match="transfer_latency"):
        LinearCostModel(transfer_latency=-1.0)


# --- fitted to measured steps ----------------------------------------------------------------------------------------


def steps_of(costs: LinearCostModel) -> list[MeasuredStep]:
    prompts = [
        MeasuredStep([(n, before)], 0, 0, costs.prefill_seconds(n, before))
        for n in (16, 100, 900)
        for before in (0, 500)
    ]
    shapes = [(batch, batch * context) for batch in (1, 8, 32) for context in (10, 700)]
    return prompts + [
        MeasuredStep([], batch, context, costs.decode_seconds(batch, context)) for batch, context in shapes
    ]


def test_given_steps_of_a_linear_machine_then_its_costs_are_found_again() -> None:
    costs, errors = fit_costs(steps_of(TRUE), 1e10)
    for name in COSTS[:5]:
        assert getattr(costs, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert max(errors.values()) < 1e-6


def test_given_steps_that_mix_prompts_and_decoding_then_nothing_is_fitted_to_them() -> None:
    mixed = MeasuredStep([(100, 0)], 4, 40, 99.0)
    assert fit_costs([*steps_of(TRUE), mixed], 1e10)[1] == fit_costs(steps_of(TRUE), 1e10)[1]


def test_given_times_that_fall_with_the_context_then_no_cost_is_negative() -> None:
    odd = [MeasuredStep([], 4, context, 0.01 - context * 1e-6) for context in (10, 500, 1000)]
    costs, errors = fit_costs([*steps_of(TRUE)[:6], *odd], 1e10)
    assert costs.decode_seconds_per_context_token == 0
    assert 0 < errors["decode"] < 0.1


@pytest.mark.parametrize(("num_prompts", "num_decodes", "enough"), [(2, 3, True), (1, 3, False), (2, 2, False)])
def test_given_fewer_steps_than_costs_then_nothing_is_fitted(num_prompts: int, num_decodes: int, enough: bool) -> None:
    steps = steps_of(TRUE)
    chosen = [*steps[:num_prompts], *steps[6 : 6 + num_decodes]]
    if enough:
        assert fit_costs(chosen, 3e9)[0].transfer_bytes_per_second == 3e9
    else:
        with pytest.raises(ConfigError, match=f"{num_prompts} prefill and {num_decodes} decode steps are too few"):
            fit_costs(chosen, 1e10)
