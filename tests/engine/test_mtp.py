"""MTP layers that come with a model change no token; their keys show that they read the right hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fake_graphs import FakeRecorder, ReplanningBackend  # noqa: E402
from models import random_prompt, tiny_model  # noqa: E402
from mtp_models import mtp_config, mtp_keys, save_mtp_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.engine.runner import ModelRunner  # noqa: E402
from kvpool.engine.speculation import DraftLength  # noqa: E402
from kvpool.errors import ConfigError, UnsupportedModelError  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

PROMPTS = [random_prompt(length, seed=length).tolist() for length in (5, 61, 1, 30)]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
DEPTHS = {"deepseek_v3": 1, "glm4_moe": 2, "step3p7": 3}


class Saved(NamedTuple):
    """A model with MTP layers, its files, and its tokens without drafts."""

    directory: Path
    model: Any
    layers: Any
    expected: list[list[int]]


@pytest.fixture(scope="module", params=DEPTHS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_model(request.param, tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """With two MTP layers."""
    return saved_model("glm4_moe", tmp_path_factory.mktemp("mtp"))


def saved_model(family: str, directory: Path) -> Saved:
    model, layers = save_mtp_model(family, DEPTHS[family], directory)
    with Engine(model, kv_blocks=128) as engine:
        expected = [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]
    return Saved(directory, model, layers, expected)


@pytest.fixture(autouse=True)
def three_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps always draft: what is measured would choose otherwise from run to run."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences: 3)


def answers(engine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    found = [result.token_ids for result in engine.generate(PROMPTS, params)]
    engine.manager.check()
    return found


def watch_keys(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[Any, tuple[list[int], list[Any]]]:
    """For each sequence its tokens when all MTP layers last guessed for it, and what they had as their keys then."""
    drafts = engine._loop.drafts
    assert drafts is not None
    run, seen = drafts.run, {}
    first = len(engine.shape.layers)

    def watched(plan: Any, token_ids: Any) -> Any:
        result = run(plan, token_ids)
        for row in plan.num_drafts.nonzero()[0].tolist() if plan.num_drafts.max() >= len(drafts.runners) else ():
            sequence, layers = plan.sequences[row], range(first, first + len(drafts.runners))
            keys = [engine.plane.read(sequence.live_handle(), layer)[0].clone() for layer in layers]
            seen[sequence] = engine._loop.scheduler.token_ids(sequence)[: len(keys[0])].tolist(), keys
        return result

    monkeypatch.setattr(drafts, "run", watched)
    return seen


@pytest.mark.transformers
def test_given_mtp_layers_then_greedy_tokens_stay_and_steps_are_fewer(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(saved.directory, kv_blocks=128, draft="mtp") as engine:
        seen = watch_keys(engine, monkeypatch)
        assert answers(engine) == saved.expected
        stats = engine.stats()
        assert stats.scheduler.steps < 24
        assert 0 < stats.scheduler.accepted_draft_tokens < stats.scheduler.draft_tokens
        assert stats.drafts is not None
        assert 0.1 < stats.drafts.acceptance < 0.98
    assert len(seen) == len(PROMPTS)
    for tokens, keys in seen.values() if saved.model.config.model_type != "deepseek_v3" else ():  # keeps something else
        for got, want in zip(keys, mtp_keys(saved.model, saved.layers, tokens), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_given_chunks_of_prompts_and_steps_without_drafts_then_mtp_layers_miss_nothing(
    overlap: bool, glm: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = cycle([3, 0, 2, *[0] * 40, 1, 0])
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences: next(numbers))
    limits = SchedulerConfig(max_tokens_per_step=24, max_sequences=4)
    long = replace(GREEDY, max_new_tokens=70)
    with Engine(glm.directory, kv_blocks=128, draft="mtp", scheduler=limits, overlap=overlap) as engine:
        seen = watch_keys(engine, monkeypatch)
        assert [tokens[:24] for tokens in answers(engine, long)] == glm.expected
    for tokens, keys in seen.values():
        for got, want in zip(keys, mtp_keys(glm.model, glm.layers, tokens), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.transformers
def test_given_one_sequence_then_as_many_guesses_are_right_as_in_transformers(
    glm: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of transformers' MTP layers leaves the first token out; ours sees it, without a token before it."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences: 2)
    model = AutoModelForCausalLM.from_pretrained(glm.directory, attn_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\."]
    calls: list[None] = []
    model.register_forward_hook(lambda *_: calls.append(None))
    prompt = torch.tensor([PROMPTS[3]])
    model.generate(prompt, max_new_tokens=24, do_sample=False, use_mtp=True, eos_token_id=None)
    with Engine(glm.directory, kv_blocks=128, draft="mtp", draft_tokens=2) as engine:
        engine.generate(PROMPTS[3:], GREEDY)
        assert 24 - engine.stats().scheduler.accepted_draft_tokens == len(calls)


def test_given_prefixes_of_the_cache_then_their_mtp_keys_are_used_again(glm: Saved) -> None:
    with Engine(glm.directory, kv_blocks=128, draft="mtp", block_size=8) as engine:
        first = engine.generate(PROMPTS, GREEDY)
        before = engine.stats().scheduler
        second = engine.generate(PROMPTS, GREEDY)
        after = engine.stats().scheduler
    assert [result.token_ids for result in second] == [result.token_ids for result in first] == glm.expected
    assert second[1].num_cached_tokens >= 48
    assert after.accepted_draft_tokens - before.accepted_draft_tokens > 0.5 * before.accepted_draft_tokens


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_given_too_little_memory_then_preempted_sequences_keep_their_tokens(mode: str, glm: Saved) -> None:
    limits = SchedulerConfig(max_tokens_per_step=512, max_sequences=8, preemption=mode)
    memory = {"kv_blocks": 24, "block_size": 4, "host_bytes": 2**20, "cache": {"watermark": 0.0}}
    prompts = [random_prompt(20, seed=seed).tolist() for seed in range(6)]
    with Engine(glm.model, kv_blocks=128) as engine:
        want = [result.token_ids for result in engine.generate(prompts, GREEDY)]
    with Engine(glm.directory, draft="mtp", scheduler=limits, **memory) as engine:
        assert [result.token_ids for result in engine.generate(prompts, GREEDY)] == want
        assert engine.stats().scheduler.preemptions > 0
        assert engine.stats().scheduler.accepted_draft_tokens > 0


def test_given_samples_forks_and_parameters_that_need_each_token_then_nothing_changes(glm: Saved) -> None:
    wanted = [
        SamplingParams(max_new_tokens=16, n=3, temperature=1.0, seed=5, ignore_eos=True),
        SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.9, seed=3, logprobs=2),
        SamplingParams(max_new_tokens=16, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_new_tokens=16, num_beams=3, ignore_eos=True),
    ]
    with Engine(glm.model, kv_blocks=128) as plain, Engine(glm.directory, kv_blocks=128, draft="mtp") as drafting:
        results = [engine.generate(PROMPTS, wanted) for engine in (plain, drafting)]
        tokens = [[[sample.token_ids for sample in result.samples] for result in each] for each in results]
        assert tokens[0] == tokens[1]
        parent = drafting.submit(PROMPTS[1], GREEDY)
        parent.result()
        forked = drafting.fork(parent, GREEDY).result().token_ids
        assert forked == plain.generate([parent.token_ids], GREEDY)[0].token_ids


def test_given_graphs_then_hidden_states_come_from_them(glm: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = SchedulerConfig(max_tokens_per_step=100, max_sequences=8)
    with Engine(glm.directory, kv_blocks=128, draft="mtp", scheduler=limits) as engine:
        before = answers(engine), engine.stats().scheduler.accepted_draft_tokens
        engine.reset_prefix_cache()
        loop = engine._loop
        assert loop.drafts is not None
        runners = []
        for number, runner in enumerate(loop.runners):
            shape = (
                engine.shape if not number else replace(engine.shape, layers=engine.shape.layers[:1], attending=(0,))
            )
            options: dict[str, Any] = {
                "max_sequences": 16 if number else 8,
                "max_tokens": 100,
                "first_layer": len(engine.shape.layers) + number - 1 if number else 0,
                "max_drafts": 0 if number else 3,
            }
            made = ModelRunner(
                runner.model, shape, engine.plane, ReplanningBackend(), recorder=FakeRecorder(), **options
            )
            made.keep_hidden(runner.hidden, runner.previous if number else None)
            made.warm_up()
            runners.append(made)
            monkeypatch.setattr(made, "_run", None)  # nothing runs as it is
        loop.runner, loop.drafts.runner, loop.drafts.runners = runners[0], runners[1], runners[1:]
        assert (answers(engine), engine.stats().scheduler.accepted_draft_tokens - before[1]) == before


def test_given_random_weights_then_mtp_layers_have_random_ones_too() -> None:
    """Kimi K2.5 is a DeepSeek V3 behind images, and so are its MTP layers; transformers loads none from its files."""
    config = mtp_config("kimi_k25", 1)
    with Engine(config, kv_blocks=64) as plain, Engine(config, kv_blocks=64, draft="mtp") as drafting:
        assert answers(drafting) == answers(plain)
        assert drafting.stats().scheduler.draft_tokens > 0
        drafts = drafting._loop.drafts
        assert drafts is not None
        weights = [weight for weight in drafts.runner.model.layers.parameters() if weight.dim() > 1]
        assert all(0 < weight.std() < 0.1 for weight in weights)  # no memory as it was found


@pytest.fixture
def without_layers(tmp_path: Path) -> Iterator[Path]:
    model = tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    return tmp_path


def test_given_a_model_without_mtp_layers_then_one_error_says_so(without_layers: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="knows no MTP layers of LlamaForCausalLM"):
        Engine(tiny_model("llama"), kv_blocks=64, draft="mtp")
    with pytest.raises(UnsupportedModelError, match=r"the files of DeepseekV3ForCausalLM .* hold no MTP layers"):
        Engine(without_layers, kv_blocks=64, draft="mtp")
    with pytest.raises(UnsupportedModelError, match=r"the files of DeepseekV3ForCausalLM .* hold no MTP layers"):
        Engine(tiny_model("deepseek_v3"), kv_blocks=64, draft="mtp")  # which has no files


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": "EAGLE-3"}, "transformers has no such heads"),
        ({"draft": "nextn"}, "write draft='mtp'"),
    ],
)
def test_given_heads_that_cannot_draft_then_the_error_says_why(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(tiny_model("llama"), kv_blocks=64, **settings)
