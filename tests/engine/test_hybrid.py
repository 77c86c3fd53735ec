"""Models whose layers keep a state, through the engine: tokens equal to transformers' own, whatever happens in between."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.engine import Engine, SamplingParams, beam_search
from kvpool.engine.runner import ModelRunner
from kvpool.scheduling import SchedulerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))

from adapter_files import merged, write_adapter
from fake_graphs import FakeRecorder, ReplanningBackend, graph_runner
from hybrids import HYBRIDS, VOCABULARY, hybrid_model

pytestmark = pytest.mark.usefixtures("one_self_check")

SERVED = sorted(set(HYBRIDS) - {"inkling_text"})  # whose attention adds a bias that no paged cache can see
SOME = ["qwen3_next", "falcon_h1", "mamba2"]  # attention and states in turn, both in each layer, states alone
LENGTHS = (37, 5, 50, 21)
NUM_TOKENS = 12
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SMALL_STEPS = SchedulerConfig(max_tokens_per_step=24, max_chunk_tokens=16, max_sequences=8)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


ANSWERS: dict[tuple[str, tuple[int, ...], int], list[int]] = {}  # of transformers, for all tests of a family


def generated(model: Any, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """What transformers generates by itself. Models of one family are equal, so each prompt is answered once."""
    key = type(model).__name__, tuple(prompt), num_tokens
    if key not in ANSWERS:
        model.generation_config.eos_token_id = None  # it goes on behind any token, as the engine does here
        out = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        ANSWERS[key] = out[0, len(prompt) :].tolist()
    return ANSWERS[key]


def assert_best(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the best one by transformers' own logits, or next to it: its prompts and its steps differ by rounding."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens], device=model.device), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
    behind = logits.max(dim=-1).values - logits[torch.arange(len(tokens)), tokens]
    assert behind.max() < 0.05 * logits.std(), behind


def engine_for(model: Any, **options: Any) -> Engine:
    return Engine(model, **{"block_size": 4, "kv_blocks": 200, "scheduler": SMALL_STEPS} | options)


@pytest.mark.quick("qwen3_next", "falcon_h1", "lfm2", "mamba2")
@pytest.mark.transformers
@pytest.mark.parametrize("family", SERVED)
def test_given_a_family_then_the_engine_gives_transformers_tokens_cold_and_from_the_cache(family: str) -> None:
    model = hybrid_model(family)
    prompts = [prompt_of(length, length) for length in LENGTHS]
    expected = [generated(model, prompt) for prompt in prompts]
    turn = prompts[2] + expected[2] + prompt_of(9, 71)
    with engine_for(model, kv_blocks=None, kv_bytes=2**24) as engine:
        assert engine.config.state_group is not None
        cold = engine.generate(prompts, GREEDY)
        assert [completion.token_ids for completion in cold] == expected
        assert [completion.num_cached_tokens for completion in cold] == [0] * len(prompts)
        again = engine.generate(prompts, GREEDY)
        assert [completion.token_ids for completion in again] == expected
        assert [completion.num_cached_tokens for completion in again] == [36, 4, 48, 20]
        (next_turn,) = engine.generate([turn], GREEDY)
        assert next_turn.num_cached_tokens == (len(prompts[2]) + NUM_TOKENS - 1) // 4 * 4
    assert_best(model, turn, next_turn.token_ids)


@pytest.mark.quick("qwen3_next")
@pytest.mark.parametrize("family", SOME)
def test_samples_and_beams_of_one_prompt_go_on_from_copies_of_its_state(family: str) -> None:
    model = hybrid_model(family)
    prompt = prompt_of(22)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    beams = model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False, pad_token_id=0)[0, 22:].tolist()
    alone = generated(model, prompt, 6)
    with engine_for(model, kv_blocks=None, kv_bytes=2**24) as engine:
        (completion,) = engine.generate(
            [prompt], SamplingParams(max_new_tokens=6, temperature=0.0, n=3, ignore_eos=True)
        )
        assert [sample.token_ids for sample in completion.samples] == [alone] * 3
        assert list(beam_search(engine, prompt, 3, max_new_tokens=6, ignore_eos=True)[0].token_ids) == beams


@pytest.mark.quick("qwen3_next-swapped", "mamba2-computed again")
@pytest.mark.parametrize("host_bytes", [0, 2**24], ids=["computed again", "swapped"])
@pytest.mark.parametrize("family", SOME)
def test_sequences_that_give_way_come_back_with_the_right_tokens(family: str, host_bytes: int) -> None:
    model = hybrid_model(family)
    prompts = [prompt_of(length, length) for length in (30, 26, 33, 21, 40, 18)]
    expected = [generated(model, prompt, 20) for prompt in prompts]
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    with engine_for(model, kv_blocks=7 if family == "mamba2" else 24, host_bytes=host_bytes) as engine:
        completions = engine.generate(prompts, params)
        assert engine.stats().scheduler.preemptions > 0 or family == "mamba2"  # states do not grow
        assert [completion.token_ids for completion in completions] == expected


@pytest.mark.quick("mamba2")
@pytest.mark.parametrize("family", SOME)
def test_what_left_for_the_host_is_found_there_with_its_state(family: str) -> None:
    model = hybrid_model(family)
    prompts = [prompt_of(30, seed) for seed in range(6)]
    expected = [generated(model, prompt) for prompt in prompts]
    with engine_for(model, kv_blocks=5 if family == "mamba2" else 20, host_bytes=2**24) as engine:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert engine.generate([prompt], GREEDY)[0].token_ids == tokens
        turns = [
            engine.generate([prompt + tokens + [5]], GREEDY)[0]
            for prompt, tokens in zip(prompts, expected, strict=True)
        ]
        assert [turn.num_cached_tokens for turn in turns] == [40] * len(prompts)
        if family != "mamba2":  # where states alone are short, those inside a run are dropped first
            again = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
            assert [completion.num_cached_tokens for completion in again] == [28] * len(prompts)
            assert [completion.token_ids for completion in again] == expected
    for prompt, tokens, turn in zip(prompts, expected, turns, strict=True):
        assert_best(model, prompt + tokens + [5], turn.token_ids)


@pytest.mark.quick("falcon_h1")
@pytest.mark.parametrize("family", SOME)
def test_another_engine_finds_prompts_and_their_states_on_disk(family: str, tmp_path: Path) -> None:
    model = hybrid_model(family)
    prompts = [prompt_of(length, length) for length in (30, 41)]
    expected = [generated(model, prompt) for prompt in prompts]
    for cached in (0, 28):
        with engine_for(model, kv_blocks=None, kv_bytes=2**24, disk=tmp_path / "cache", disk_bytes=2**26) as engine:
            completions = engine.generate(prompts, GREEDY)
        assert [completion.token_ids for completion in completions] == expected
        assert completions[0].num_cached_tokens == cached


def without_graphs(runner: ModelRunner) -> list[int]:
    """The tokens of each step that runs without a graph."""
    sizes: list[int] = []
    own = runner._run
    runner._run = lambda ids, *rest: sizes.append(len(ids)) or own(ids, *rest)  # type: ignore[method-assign,func-returns-value]
    return sizes


@pytest.mark.quick("falcon_h1", "jamba")
@pytest.mark.parametrize("family", [*SOME, "jamba"])
def test_given_graphs_and_steps_planned_ahead_then_the_tokens_are_the_same(family: str) -> None:
    model = hybrid_model(family)
    prompts = [prompt_of(length, length) for length in LENGTHS]
    expected = [generated(model, prompt) for prompt in prompts]
    recorder = FakeRecorder()
    with engine_for(model, kv_blocks=None, kv_bytes=2**24, overlap=True) as engine:
        limits = {"max_sequences": SMALL_STEPS.max_sequences, "max_tokens": SMALL_STEPS.max_tokens_per_step}
        runner = graph_runner(engine, recorder=recorder, **limits)
        runner.warm_up()
        eager = without_graphs(runner)
        engine._loop.runner = runner
        for _ in range(2):
            assert [completion.token_ids for completion in engine.generate(prompts, GREEDY)] == expected
        engine.manager.check()
    assert recorder.num_replays > NUM_TOKENS
    assert bool(eager) == (family == "jamba")  # its modules cannot compute several sequences in one row


@pytest.mark.gpu
@pytest.mark.parametrize("family", SERVED)
def test_on_a_gpu_steps_from_graphs_go_on_from_their_states(family: str) -> None:
    model = hybrid_model(family).to("cuda")
    prompts = [prompt_of(length, length) for length in LENGTHS]
    with engine_for(model, kv_blocks=None, kv_bytes=2**26) as engine:
        cold = engine.generate(prompts, GREEDY)
        again = engine.generate(prompts, GREEDY)
    assert [completion.num_cached_tokens for completion in again] == [36, 4, 48, 20]
    for prompt, first, second in zip(prompts, cold, again, strict=True):
        assert_best(model, prompt, first.token_ids)
        assert_best(model, prompt, second.token_ids)


def guess_well(monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Drafts of the engine are the answers to come, of which every fifth token is wrong."""
    told = [np.array(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def propose(tokens: Any, num_draft: int) -> Any:
        (known,) = (text for text in told if np.array_equal(text[: len(tokens)], tokens))
        drafts = known[len(tokens) : len(tokens) + num_draft].copy()
        drafts[(len(tokens) + np.arange(len(drafts))) % 5 == 0] = 1
        return drafts

    monkeypatch.setattr("kvpool.engine.speculation.propose", propose)


@pytest.mark.quick("qwen3_next")
@pytest.mark.parametrize("family", [*SOME, "jamba"])
def test_drafts_change_no_token_whether_they_are_accepted_or_not(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid_model(family)
    prompts = [prompt_of(20, 3), prompt_of(21, 21), prompt_of(18, 4)]
    expected = [generated(model, prompt, 24) for prompt in prompts]
    guess_well(monkeypatch, prompts, expected)
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    recorder = FakeRecorder()
    with engine_for(model, kv_blocks=None, kv_bytes=2**24, draft_tokens=3) as engine:
        served = engine._loop.runner.model
        runner = ModelRunner(served, engine.shape, engine.plane, ReplanningBackend(), recorder=recorder, max_tokens=24)
        runner.warm_up()
        found = [completion.token_ids for completion in engine.generate(prompts, params)]
        stats = engine.stats().scheduler
        assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
        engine._loop.runner = runner
        again = engine.generate(prompts, params)
        assert [completion.token_ids for completion in again] == found == expected
        assert [completion.num_cached_tokens for completion in again] == [16, 20, 16]
        engine._loop.parts.planning.clear()  # no more drafts
        (turn,) = engine.generate([prompts[1] + found[1] + [9]], GREEDY)
        assert turn.num_cached_tokens >= 40  # of 44 without drafts: the last ones have no state yet
        engine.manager.check()
    assert recorder.num_replays
    assert_best(model, prompts[1] + found[1] + [9], turn.token_ids)


@pytest.mark.slow
def test_sequences_with_drafts_give_way_and_come_back_with_the_right_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid_model("qwen3_next")
    prompts = [prompt_of(25, seed) for seed in range(6)]
    expected = [generated(model, prompt, 20) for prompt in prompts]
    guess_well(monkeypatch, prompts, expected)
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    with engine_for(model, kv_blocks=24, host_bytes=2**24, draft_tokens=3) as engine:
        assert [completion.token_ids for completion in engine.generate(prompts, params)] == expected
        stats = engine.stats().scheduler
        assert stats.preemptions > 0 < stats.accepted_draft_tokens


PROJECTIONS = {
    "jamba": ("in_proj", "x_proj", "out_proj"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj"),
    "zaya": ("q_proj", "o_proj"),
}


@pytest.mark.quick("prompts in one row, drafts apart")
@pytest.mark.parametrize(
    ("family", "draft_tokens"),
    [("jamba", 0), ("qwen3_next", 3), ("zaya", 0)],
    ids=["a token at a time", "prompts in one row, drafts apart", "copies of states"],
)
def test_in_a_step_of_prompts_and_answers_each_token_has_its_own_adapter(
    family: str, draft_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules with a state compute the sequences of a step in several calls, in an order of their own."""
    model = hybrid_model(family)
    names: list[str | None] = ["one", None, "two", "one", "two"]
    paths = {
        name: write_adapter(tmp_path / name, model, PROJECTIONS[family], seed=seed, size=0.5)
        for seed, name in enumerate(["one", "two"])
    }
    prompts = [prompt_of(length, length) for length in (9, 21, 14, 33, 5)]
    expected = []
    for name, prompt in zip(names, prompts, strict=True):
        answering = model if name is None else merged(model, paths[name])
        answering.generation_config.eos_token_id = None
        ids = torch.tensor([prompt])
        expected.append(answering.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(prompt) :])
    answers = [answer.tolist() for answer in expected]
    guess_well(monkeypatch, prompts, answers)
    with engine_for(model, adapters=paths, draft_tokens=draft_tokens) as engine:
        for _ in range(2):  # from the cache, too
            running = [engine.submit(each, GREEDY, adapter=name) for each, name in zip(prompts, names, strict=True)]
            assert [generation.result(60).token_ids for generation in running] == answers
