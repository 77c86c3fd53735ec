"""Sampling: filters and penalties as transformers has them, draws that follow the distribution, seeds that mean something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool.engine.params import SamplingParams  # noqa: E402
from kvpool.engine.sampling import (  # noqa: E402
    SamplingRows,
    StepSampler,
    TokenCounts,
    _Rows,
    sample,
    seed_of,
    uniforms_for,
)

CPU = torch.device("cpu")
VOCABULARY = 50


def logits_for(rows: int, seed: int = 0) -> Any:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def draws(logits: Any, params: SamplingParams, number: int = 20_000) -> Any:
    """How often each token comes out for evenly spread uniforms."""
    rows = SamplingRows([params] * number, CPU)
    uniforms = (torch.arange(number) + 0.5) / number
    tokens = sample(logits.expand(number, -1), rows, uniforms).tokens
    return torch.bincount(tokens, minlength=VOCABULARY) / number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_given_greedy_rows_then_the_best_token_wins_and_of_equals_the_first(dtype: Any) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -2.0, -3.0, -0.5]], dtype=dtype)
    assert sample(logits, SamplingRows([SamplingParams()] * 3, CPU)).tokens.tolist() == [1, 0, 3]


def test_given_greedy_rows_then_the_best_token_wins() -> None:
    logits = logits_for(4)
    assert sample(logits, SamplingRows([SamplingParams()] * 4, CPU)).tokens.equal(logits.argmax(-1))


def test_given_no_filter_then_tokens_come_as_often_as_their_probability() -> None:
    logits = logits_for(1)
    frequencies = draws(logits, SamplingParams(temperature=0.7))
    assert (frequencies - (logits[0] / 0.7).softmax(-1)).abs().max() < 2e-4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.6),
        SamplingParams(temperature=0.9, min_p=0.1),
        SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=1.0, top_p=1e-6),
    ],
)
def test_given_filters_then_the_distribution_is_that_of_transformers(params: SamplingParams) -> None:
    logits_process = pytest.importorskip("transformers").generation.logits_process
    logits = logits_for(1, seed=3)
    scores = logits / params.temperature
    if params.top_k:
        scores = logits_process.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p is not None:
        scores = logits_process.TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = logits_process.MinPLogitsWarper(params.min_p)(None, scores)
    assert (draws(logits, params) - scores[0].softmax(-1)).abs().max() < 2e-4


def test_given_a_repetition_penalty_then_scores_are_those_of_transformers() -> None:
    logits_process = pytest.importorskip("transformers").generation.logits_process
    logits = logits_for(1, seed=5)
    prompt, output = np.array([1, 2, 3], np.int32), np.array([7, 7, 9], np.int32)
    counts = TokenCounts(3, VOCABULARY, CPU)
    counts.start(2, prompt, output)
    ids = torch.tensor([np.concatenate([prompt, output]).tolist()])
    expected = logits_process.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    rows = SamplingRows([SamplingParams(repetition_penalty=1.7)], CPU)
    assert sample(logits, rows, None, counts, torch.tensor([2])).tokens.equal(expected.argmax(-1))


def test_given_presence_and_frequency_penalties_then_only_output_counts_each_time_it_appeared() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [4, 5, 6]] = torch.tensor([3.0, 2.9, 2.0])
    counts = TokenCounts(1, VOCABULARY, CPU)
    counts.start(0, np.array([4], np.int32), np.array([4], np.int32))
    rows = SamplingRows([SamplingParams(presence_penalty=0.5, frequency_penalty=0.3)], CPU)
    assert sample(logits, rows, None, counts, torch.tensor([0])).tokens.item() == 5  # 3.0 - 0.5 - 0.3 < 2.9
    counts.add(torch.tensor([0, 0]), torch.tensor([5, 5]))
    assert sample(logits, rows, None, counts, torch.tensor([0])).tokens.item() == 4  # 2.9 - 0.5 - 0.6 < 2.2


def test_given_a_logit_bias_then_it_is_added_to_the_named_rows_only() -> None:
    logits = torch.zeros(2, VOCABULARY)
    rows = SamplingRows([SamplingParams(logit_bias={9: 5.0}), SamplingParams(logit_bias={3: 1.0, 4: 2.0})], CPU)
    assert sample(logits, rows).tokens.tolist() == [9, 4]


def test_given_a_mixed_batch_then_every_row_gets_what_it_gets_alone() -> None:
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=3),
        SamplingParams(temperature=1.2, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.2, logit_bias={2: 4.0}),
    ]
    logits, uniforms = logits_for(len(kinds)), torch.tensor([0.1, 0.9, 0.4, 0.7, 0.2])
    together = sample(logits, SamplingRows(kinds, CPU), uniforms).tokens
    for row, params in enumerate(kinds):
        alone = sample(logits[row : row + 1], SamplingRows([params], CPU), uniforms[row : row + 1]).tokens
        assert alone.item() == together[row].item()


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_given_a_row_without_any_token_to_choose_then_the_others_get_what_they_get_alone(broken: float) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.8)
    logits, uniforms = logits_for(3), torch.tensor([0.3, 0.6, 0.9])
    expected = sample(logits, SamplingRows([params] * 3, CPU), uniforms).tokens
    logits[1] = broken
    tokens = sample(logits, SamplingRows([params] * 3, CPU), uniforms).tokens
    assert tokens[[0, 2]].equal(expected[[0, 2]])
    assert 0 <= tokens[1].item() < VOCABULARY


def test_given_logprobs_then_they_are_of_the_unfiltered_distribution() -> None:
    logits = logits_for(2, seed=8)
    rows = SamplingRows([SamplingParams(logprobs=3, logit_bias={0: 50.0}), SamplingParams()], CPU)
    sampled = sample(logits, rows)
    assert sampled.logprobs is not None
    assert sampled.top_tokens is not None
    assert sampled.top_logprobs is not None
    expected = logits.log_softmax(-1)
    assert sampled.tokens[0].item() == 0
    assert sampled.logprobs[0].item() == pytest.approx(expected[0, 0].item())
    assert sampled.top_tokens.tolist() == expected.topk(3).indices.tolist()


def test_given_the_largest_uniform_then_a_token_with_probability_is_drawn() -> None:
    logits = torch.full((1, VOCABULARY), -1e9)
    logits[0, 3] = 0.0
    rows = SamplingRows([SamplingParams(temperature=1.0)], CPU)
    for uniform in (0.0, 1.0 - 2.0**-24):
        assert sample(logits, rows, torch.tensor([uniform])).tokens.item() == 3


def test_given_a_seed_then_its_numbers_depend_on_nothing_but_seed_sample_and_step() -> None:
    seeds = np.array([seed_of(1, 0), seed_of(2, 0)], np.uint64)
    together = uniforms_for(seeds, np.array([5, 9]))
    assert uniforms_for(seeds[1:], np.array([9]))[0] == together[1]
    assert len({seed_of(1, 0), seed_of(1, 1), seed_of(2, 0), seed_of(2, 1)}) == 4


def test_given_many_steps_then_the_numbers_are_spread_evenly_in_the_unit_interval() -> None:
    numbers = uniforms_for(np.full(40_000, 3, np.uint64), np.arange(40_000))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert np.abs(np.histogram(numbers, bins=20, range=(0, 1))[0] / 40_000 - 0.05).max() < 0.005
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_given_seeds_and_steps_then_the_numbers_are_those_of_splitmix64() -> None:
    """A seed that somebody wrote down gives the same answer in the next version too."""
    assert [seed_of(0, index) for index in range(4)] == [
        0,
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    bits = uniforms_for(np.zeros(3, np.uint64), np.arange(3)) * 2**24
    assert bits.tolist() == [0xE220A8, 0x6E789E, 0x06C45D]
    assert seed_of(0x9E3779B97F4A7C15, 1) == seed_of(0, 2)
    chained = uniforms_for(np.array([0x9E3779B97F4A7C15], np.uint64), np.array([0])) * 2**24
    assert chained.tolist() == [_splitmix(0xE220A8397B1DCDAF) >> 40]


def _splitmix(state: int) -> int:
    """The next number of the generator, as its authors write it."""
    mask = 2**64 - 1
    value = (state + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def test_given_rows_of_a_step_then_each_sample_knows_how_many_came_before_it() -> None:
    """A prompt of five tokens has positions 0 to 4: behind the last of them comes sample 0."""
    plan: Any = SimpleNamespace(positions=np.array([3, 4, 9, 10, 11]), logits_indices=np.array([1, 2, 3, 4]))
    sampler = StepSampler(VOCABULARY, 4, CPU, {}, lambda sequence: sequence.tokens)

    def steps(source: Any, *lengths: int) -> list[int]:
        rows = _Rows(SamplingRows([], CPU), source, np.empty(0, np.uint64), np.array(lengths), torch.empty(0), (), ())
        return sampler._steps(plan, rows).tolist()

    assert steps(None, 5, 5, 10, 5) == [0, 5, 1, 7]
    assert steps(np.array([0, 0, 1, 2]), 5, 5, 5, 5) == [0, 0, 5, 6]  # two samples behind one prompt; drafts in a row


def test_given_logprobs_of_a_step_then_each_sample_gets_its_own_and_as_many_best_ones_as_it_asked_for() -> None:
    logits = logits_for(2, seed=9)
    sampled = sample(logits, SamplingRows([SamplingParams(logprobs=3), SamplingParams(logprobs=1)], CPU))
    expected = logits.log_softmax(-1)
    for row, num_top in ((0, 3), (1, 1), (1, 0)):
        token = int(sampled.tokens[row])
        (found,) = sampled.entries(np.array([row]), [token], num_top)
        assert (found.token, found.logprob) == (token, pytest.approx(expected[row, token].item()))
        assert [each for each, _ in found.top] == expected[row].topk(num_top).indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(expected[row].topk(num_top).values.tolist())
    assert sampled.entries(np.array([0]), [3], None) == []  # nobody asked


def test_given_no_best_ones_or_more_than_there_are_tokens_then_logprobs_are_those_of_what_there_is() -> None:
    logits = logits_for(1)
    none = sample(logits, SamplingRows([SamplingParams(logprobs=0)], CPU))
    assert none.logprobs is not None
    assert (none.top_tokens, none.top_logprobs) == (None, None)
    many = sample(logits, SamplingRows([SamplingParams(logprobs=100)], CPU))
    assert many.top_tokens is not None
    assert many.top_tokens.shape == (1, VOCABULARY)
    assert sample(logits, SamplingRows([SamplingParams()], CPU)).logprobs is None
