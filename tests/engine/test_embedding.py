"""Engine.embed: the vectors are those of the model's own hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from models import random_prompt, tiny_model

from kvpool.engine import Engine, SamplingParams
from kvpool.engine.embedding import Pooled
from kvpool.errors import InvalidArgumentError
from kvpool.scheduling import SchedulerConfig

LENGTHS = (37, 5, 24)
STEPS = SchedulerConfig(max_tokens_per_step=16, max_sequences=4)


def prompts() -> list[list[int]]:
    return [random_prompt(length, seed=length).tolist() for length in LENGTHS]


def own(model: Any, pooling: str) -> np.ndarray:
    """What transformers gives for one prompt after another."""
    vectors = []
    for prompt in prompts():
        hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
        vector = hidden[-1] if pooling == "last" else hidden.mean(0)
        vectors.append((vector / vector.norm()).numpy())
    return np.stack(vectors)


@pytest.mark.quick("last-llama", "mean-llama")
@pytest.mark.transformers
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_transformers(family: str, pooling: str) -> None:
    model = tiny_model(family)
    with Engine(model, block_size=8, kv_blocks=64, scheduler=STEPS) as engine:
        got = [engine.embed(prompts(), pooling=pooling) for _ in range(2)]
    for each in got:  # the second finds prefixes where it may
        np.testing.assert_allclose(each, own(model, pooling), rtol=1e-3, atol=1e-4)


def test_last_reuses_the_prefix_and_mean_leaves_nothing() -> None:
    with Engine(tiny_model("llama"), block_size=8, kv_blocks=64, scheduler=STEPS) as engine:
        engine.embed(prompts(), pooling="mean")
        assert engine.stats().cache.num_cached_runs == 0
        engine.embed(prompts())
        assert engine.generate([prompts()[0]], SamplingParams(max_new_tokens=1))[0].num_cached_tokens == 32


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_tokens_that_a_preempted_prompt_computes_again_count_once(pooling: str) -> None:
    hidden = torch.arange(12.0).view(6, 2)
    pooled = Pooled(pooling, torch.nn.Identity())
    for first, stop in ((0, 4), (0, 2), (2, 6)):
        pooled.add(hidden[first:stop], first)
    expected = hidden[-1] if pooling == "last" else hidden.mean(0)
    np.testing.assert_allclose(pooled.vector(normalize=False), expected)


def test_without_normalising_the_length_is_the_models() -> None:
    model = tiny_model("llama")
    with Engine(model, block_size=8, kv_blocks=64) as engine:
        (vector,) = engine.embed([[5, 6, 7]], normalize=False)
    hidden = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states[-1]
    np.testing.assert_allclose(vector, hidden[0, -1].numpy(), rtol=1e-3, atol=1e-4)


def test_unknown_pooling_and_prompts_are_refused() -> None:
    with Engine(tiny_model("llama"), block_size=8, kv_blocks=64) as engine:
        with pytest.raises(InvalidArgumentError, match="pooling='first' is unknown; known: last, mean"):
            engine.embed([[5]], pooling="first")
        with pytest.raises(InvalidArgumentError, match="prompt 1: a prompt needs at least one token"):
            engine.embed([[5], []])
        assert engine.embed([]).shape == (0, 0)
