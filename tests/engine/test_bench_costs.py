"""`kvpool bench` measures what steps cost: which runs it makes, what it makes of their times. No model is run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvpool import LayerSpec  # noqa: E402
from kvpool.engine import bench_command as bench  # noqa: E402
from kvpool.engine.bench_command import (  # noqa: E402
    BATCHES,
    CONTEXTS,
    DECODE_STEPS,
    PROMPTS,
    SHORTEST_PROMPT,
    MeasuredStep,
    StepLog,
)
from kvpool.scope import ReuseScope  # noqa: E402

CPU = torch.device("cpu")
USUAL = object()


class FakeEngine:
    """As much of an engine as the measurement asks."""

    def __init__(
        self, per_step: int = 10**6, longest: int = 10**6, positions: int | None = None, sequences: int = 10**6
    ) -> None:
        config = SimpleNamespace(max_tokens_per_step=per_step, max_sequences=sequences)
        self._loop = SimpleNamespace(scheduler=SimpleNamespace(config=config, costs=USUAL))
        self.config = SimpleNamespace(longest_sequence=lambda: longest, block_size=16, layers=[LayerSpec(1, 8)])
        self.shape = SimpleNamespace(max_positions=positions, vocab_size=50)
        self.pools = [10**9]
        self.manager = SimpleNamespace(
            stats=lambda: SimpleNamespace(pools=[SimpleNamespace(total=total) for total in self.pools])
        )
        parameters = [torch.zeros(3, 4), torch.zeros(5)]
        self.model = SimpleNamespace(device=CPU, parameters=lambda: parameters)
        self.asked: list[tuple[list[list[int]], Any, ReuseScope]] = []

    def generate(self, prompts: list[list[int]], params: Any, scope: ReuseScope) -> None:
        assert isinstance(self._loop.scheduler.costs, StepLog)
        self.asked.append((prompts, params, scope))

    def runs(self) -> list[tuple[int, int, int]]:
        """Sequences, tokens of a prompt, and new tokens of every second run; each comes twice."""
        found = [(len(prompts), len(prompts[0]), params.max_new_tokens) for prompts, params, _ in self.asked]
        assert found[::2] == found[1::2]
        return found[::2]


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    steps: list[Any] = []

    def fit_costs(found: list[MeasuredStep], speed: float) -> tuple[str, str]:
        steps.extend([found, speed])
        return "costs", "errors"

    monkeypatch.setattr(bench, "fit_costs", fit_costs)
    monkeypatch.setattr(bench, "link_speed", lambda device: 7.0)
    return steps


def test_given_room_for_all_then_every_prompt_and_every_batch_at_every_context_is_measured(fitted: list[Any]) -> None:
    engine: Any = FakeEngine()
    found = bench.measure_costs(engine, "name")
    decoding = [(batch, context, DECODE_STEPS) for context in CONTEXTS for batch in BATCHES]
    assert engine.runs() == [*((1, length, 1) for length in PROMPTS), *decoding]
    assert (found.model, found.parameters, found.costs, found.errors) == ("name", 17, "costs", "errors")
    assert (found.layers, fitted) == ((LayerSpec(1, 8),), [[], 7.0])
    assert engine._loop.scheduler.costs is USUAL
    for prompts, params, scope in engine.asked:
        assert params.ignore_eos
        assert scope.tenant
        assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    assert engine.asked[0][0] != engine.asked[1][0]  # else the second would find the first one cached


def test_given_few_sequences_and_a_small_cache_then_larger_batches_are_left_out(fitted: list[Any]) -> None:
    engine: Any = FakeEngine(sequences=BATCHES[1])
    blocks = BATCHES[1] * -(-(CONTEXTS[0] + DECODE_STEPS) // 16)
    engine.pools = [10**9, 2 * blocks]
    bench.measure_costs(engine, "name")
    decoding = [run for run in engine.runs() if run[2] == DECODE_STEPS]
    assert [run for run in decoding if run[1] == CONTEXTS[0]] == [
        (batch, CONTEXTS[0], DECODE_STEPS) for batch in BATCHES[:2]
    ]
    engine.pools = [2 * blocks - 1]
    assert not bench._fits(engine, BATCHES[1], CONTEXTS[0] + DECODE_STEPS)
    assert bench._fits(engine, 1, CONTEXTS[0] + DECODE_STEPS)


def test_given_an_engine_that_fails_then_its_own_costs_come_back(fitted: list[Any]) -> None:
    engine: Any = FakeEngine()
    engine.shape.vocab_size = 0
    with pytest.raises(ValueError, match="high"):
        bench.measure_costs(engine, "name")
    assert engine._loop.scheduler.costs is USUAL


@pytest.mark.parametrize(
    ("limits", "longest"),
    [
        ((500, 10**6, None), 500),
        ((10**6, 600, None), 600),
        ((10**6, 10**6, 700), 700),
        ((500, 600, 700), 500),
        ((1, 1, 1), SHORTEST_PROMPT + 2 * DECODE_STEPS),
    ],
)
def test_given_limits_then_the_longest_prompt_leaves_room_for_its_answer(
    limits: tuple[int, int, int | None], longest: int
) -> None:
    engine: Any = FakeEngine(*limits)
    assert bench._longest(engine) == longest - DECODE_STEPS


def test_given_a_short_limit_then_prompts_and_contexts_are_cut_and_none_is_measured_twice(fitted: list[Any]) -> None:
    limit = sorted(PROMPTS)[1] + 1 + DECODE_STEPS
    engine: Any = FakeEngine(per_step=limit)
    bench.measure_costs(engine, "name")
    lengths = [length for _, length, new in engine.runs() if new == 1]
    assert lengths == sorted({min(length, limit - DECODE_STEPS) for length in PROMPTS})


def test_given_steps_then_those_of_one_shape_become_their_median() -> None:
    def step(prefills: list[tuple[int, int]], sequences: int, context: int, seconds: float) -> MeasuredStep:
        return MeasuredStep(prefills, sequences, context, seconds)

    found = bench._medians(
        [
            step([], 2, 32, 1.0),
            step([], 2, 63, 5.0),
            step([], 2, 40, 2.0),
            step([], 2, 64, 9.0),
            step([], 1, 32, 7.0),
            step([(8, 0)], 0, 0, 3.0),
            step([(8, 0)], 0, 15, 4.0),
            step([(8, 0)], 0, 16, 6.0),
        ]
    )
    assert found == [
        step([], 2, 45, 2.0),
        step([], 2, 64, 9.0),
        step([], 1, 32, 7.0),
        step([(8, 0)], 0, 8, 3.5),
        step([(8, 0)], 0, 16, 6.0),
    ]


def test_given_steps_then_the_log_keeps_copies_of_them() -> None:
    log, prefills = StepLog(), [(1, 2)]
    log.observe_step(prefills, 3, 4, 5.0)
    prefills.clear()
    assert log.steps == [MeasuredStep([(1, 2)], 3, 4, 5.0)]


def test_given_this_machine_then_its_speed_name_and_memory_are_told() -> None:
    assert bench.link_speed(CPU, 2**16) > 0
    assert bench.machine_name(CPU).endswith(f"processor with {torch.get_num_threads()} threads")
    assert bench.memory_bytes(CPU) > 2**28
