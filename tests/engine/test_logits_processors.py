"""Logits processors as functions: the same tokens as with transformers' own generate."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from models import random_prompt, tiny_model
from torch import Tensor
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

from kvpool.engine import Engine, SamplingParams
from kvpool.errors import InvalidArgumentError, StepError
from kvpool.scheduling import SchedulerConfig

pytestmark = pytest.mark.usefixtures("one_self_check")
STEPS = SchedulerConfig(max_tokens_per_step=16, max_sequences=4)


def less_of_the_last(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Bans a token that depends on the last one and on how many there are."""
    scores[:, (input_ids[0, -1] + input_ids.shape[1]) % scores.shape[1]] = -torch.inf
    scores[:, scores.argmax()] -= 2.0
    return scores


def failing(input_ids: Tensor, scores: Tensor) -> Tensor:
    raise ValueError("no")


def test_tokens_are_those_of_generate_beside_others_without_processors() -> None:
    model, prompts = tiny_model("llama"), [random_prompt(n, seed=n).tolist() for n in (37, 5, 24)]
    processors = [NoRepeatNGramLogitsProcessor(2), less_of_the_last]
    params = [
        SamplingParams(max_new_tokens=12, ignore_eos=True, repetition_penalty=1.3, logits_processors=processors),
        SamplingParams(max_new_tokens=12, ignore_eos=True),
        SamplingParams(max_new_tokens=12, ignore_eos=True, logits_processors=less_of_the_last),
    ]
    with Engine(model, block_size=8, kv_blocks=64, scheduler=STEPS, model_defaults=False) as engine:
        got = [each.token_ids for each in engine.generate(prompts, params)]
        drawn = SamplingParams(
            max_new_tokens=6, temperature=0.8, n=2, seed=1, logits_processors=lambda ids, s: s * 0 + s
        )
        plain = SamplingParams(max_new_tokens=6, temperature=0.8, n=2, seed=1)
        same = [[s.token_ids for s in engine.generate([prompts[0]], each)[0].samples] for each in (drawn, plain)]
    assert same[0] == same[1]
    for tokens, prompt, chosen in zip(got, prompts, params, strict=True):
        own = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            min_new_tokens=12,
            eos_token_id=None,
            do_sample=False,
            repetition_penalty=chosen.repetition_penalty or 1.0,
            logits_processor=LogitsProcessorList(chosen.logits_processors),
        )
        assert tokens == own[0, len(prompt) :].tolist()


def test_a_processor_that_fails_ends_its_request_alone_and_drafts_are_left_out() -> None:
    with Engine(tiny_model("llama"), block_size=8, kv_blocks=64, scheduler=STEPS, draft_tokens=3) as engine:
        bad = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=4, logits_processors=failing))
        good = engine.submit([5, 6, 5, 6, 5], SamplingParams(max_new_tokens=8, logits_processors=less_of_the_last))
        with pytest.raises(StepError, match="a logits processor of this request failed: ValueError: no"):
            bad.result()
        assert len(good.result().token_ids) <= 8
        assert engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="logits_processors must be functions"):
        SamplingParams(logits_processors=[3])


def test_given_the_fewest_tokens_then_nothing_ends_the_text_before_and_the_tokens_are_those_of_generate() -> None:
    model, prompt = tiny_model("llama"), random_prompt(9, seed=9).tolist()
    with Engine(model, kv_blocks=64, model_defaults=False) as engine:
        free = engine.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))[0].token_ids
        ends, unknown = free[2], 10**6
        early = {"max_new_tokens": 12, "ignore_eos": True, "stop_token_ids": [ends, unknown]}
        assert engine.generate([prompt], SamplingParams(**early))[0].token_ids == free[:3]
        for fewest in (1, 3, 4, 7, 12):
            got = engine.generate([prompt], SamplingParams(**early, min_new_tokens=fewest))[0].token_ids
            told = {"max_new_tokens": 12, "min_new_tokens": fewest, "eos_token_id": ends, "do_sample": False}
            assert got == model.generate(torch.tensor([prompt]), **told)[0, len(prompt) :].tolist()
            assert len(got) >= fewest
            assert ends not in got[: fewest - 1]


def test_given_a_context_that_cuts_the_answer_then_the_fewest_tokens_are_cut_too() -> None:
    with Engine(tiny_model("llama", max_position_embeddings=32), kv_blocks=64) as engine:
        result = engine.generate([random_prompt(30).tolist()], SamplingParams(max_new_tokens=9, min_new_tokens=9))[0]
    assert len(result.token_ids) == 3
