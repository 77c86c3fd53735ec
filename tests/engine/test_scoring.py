"""Log probabilities of a prompt's tokens: those of the model's own logits, whatever is cached or preempted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from models import random_prompt, tiny_model

from kvpool.engine import Engine, SamplingParams
from kvpool.engine.scoring import PIECE, PromptScores
from kvpool.scheduling import SchedulerConfig
from kvpool.tiers import MemoryTier

LENGTHS = (150, 1, 37, 2)
STEPS = SchedulerConfig(max_tokens_per_step=96, max_sequences=4)
SCORED = SamplingParams(max_new_tokens=1, prompt_logprobs=2)


def prompts() -> list[list[int]]:
    return [random_prompt(length, seed=length).tolist() for length in LENGTHS]


def own(model: Any, prompt: list[int]) -> torch.Tensor:
    """What transformers gives: the log probabilities behind each token but the last."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_scores_are_those_of_transformers_also_if_the_prompt_is_cached(family: str) -> None:
    model = tiny_model(family)
    tier = MemoryTier(2**24)
    with Engine(model, block_size=8, kv_blocks=128, scheduler=STEPS, tiers=[tier]) as engine:
        engine.generate(prompts(), SamplingParams(max_new_tokens=1))
        engine._tiers.flush(30.0)  # type: ignore[union-attr]
        before = engine.stats().cache.num_cached_runs, tier.stats().num_values
        found = engine.generate(prompts(), SCORED)
        assert (engine.stats().cache.num_cached_runs, tier.stats().num_values) == before, "nothing of it stays"
        again = engine.generate(prompts(), SamplingParams(max_new_tokens=1))
    assert [one.num_cached_tokens for one in found] == [0] * len(LENGTHS)
    assert again[0].num_cached_tokens == 144
    for prompt, one, plain in zip(prompts(), found, again, strict=True):
        assert one.token_ids == plain.token_ids
        assert [entry and entry.token for entry in one.prompt_logprobs] == [None, *prompt[1:]]
        if len(prompt) > 1:
            wanted, entries = own(model, prompt), one.prompt_logprobs[1:]
            chosen = wanted.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            np.testing.assert_allclose([entry.logprob for entry in entries if entry], chosen, rtol=1e-3, atol=1e-3)
            best = [[value for _, value in entry.top] for entry in entries if entry]
            np.testing.assert_allclose(best, wanted.topk(2).values, rtol=1e-3, atol=1e-3)


def test_tokens_that_a_preempted_prompt_computes_again_count_once() -> None:
    prompt = np.arange(PIECE + 20, dtype=np.int32) % 7
    logits = torch.randn(len(prompt), 7, generator=torch.Generator().manual_seed(0))
    scores = PromptScores(prompt, 1)
    for first, stop in ((0, 9), (0, 5), (5, PIECE + 12), (PIECE + 12, len(prompt))):
        assert not scores.is_complete
        scores.add(logits[first:stop], first)
    assert scores.is_complete
    wanted = logits.log_softmax(-1)[torch.arange(len(prompt) - 1), torch.from_numpy(prompt[1:]).long()]
    np.testing.assert_allclose([entry.logprob for entry in scores.entries() if entry], wanted, rtol=1e-5)
