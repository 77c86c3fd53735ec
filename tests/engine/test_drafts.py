"""A draft model changes no token; what it guesses shows whether its own keys and values are right."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fake_graphs import FakeRecorder, ReplanningBackend  # noqa: E402
from models import random_prompt, tiny_model  # noqa: E402
from mtp_models import save_mtp_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.engine.graphs import CaptureReport  # noqa: E402
from kvpool.engine.runner import ModelRunner  # noqa: E402
from kvpool.engine.speculation import DraftLength  # noqa: E402
from kvpool.errors import ConfigError, UnsupportedModelError  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402
from kvpool.tiers import MemoryTier  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

PROMPTS = [random_prompt(length, seed=length).tolist() for length in (5, 61, 1, 30)]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def similar(model: Any) -> Any:
    """A draft that often guesses what the model says: its weights with some noise."""
    draft = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.08 * parameter.std() * torch.randn_like(parameter))
    return draft


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return answers(Engine(model, kv_blocks=128))


@pytest.fixture(autouse=True)
def three_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps always draft: what is measured would choose otherwise from run to run."""
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences: 3)


def answers(engine: Engine, params: SamplingParams = GREEDY) -> list[list[int]]:
    with engine:
        found = [result.token_ids for result in engine.generate(PROMPTS, params)]
        engine.manager.check()
    return found


def all_right(engine: Engine) -> bool:
    """Whether every draft was accepted: the draft is the model, so a wrong one was guessed from wrong keys and values."""
    stats = engine.stats().scheduler
    return 0 < stats.draft_tokens == stats.accepted_draft_tokens


@pytest.mark.transformers
def test_given_any_draft_then_greedy_tokens_are_those_without(
    model: Any, similar: Any, expected: list[list[int]]
) -> None:
    engine = Engine(model, kv_blocks=128, draft=similar)
    assert answers(engine) == expected
    stats = engine.stats()
    assert 0 < stats.scheduler.accepted_draft_tokens < stats.scheduler.draft_tokens
    assert stats.drafts is not None
    assert 0.2 < stats.drafts.acceptance < 0.98

    for family, settings in (("mistral", {}), ("llama", {"num_hidden_layers": 1, "num_key_value_heads": 1})):
        assert answers(Engine(model, kv_blocks=128, draft=tiny_model(family, **settings), draft_tokens=2)) == expected


def test_given_layers_of_another_shape_then_the_draft_has_a_group_of_its_own(model: Any) -> None:
    with Engine(model, kv_blocks=128, draft=tiny_model("mistral")) as engine:
        assert [group.layers for group in engine.config.groups] == [(0, 1), (2, 3)]
        assert engine.config.groups[1].window is None  # attention has the draft's window, the cache keeps all


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_given_chunked_prompts_and_prefixes_of_the_cache_then_the_draft_has_them_too(family: str) -> None:
    model = tiny_model(family)
    limits = SchedulerConfig(max_tokens_per_step=24, max_sequences=4)
    with Engine(model, kv_blocks=128, draft=model, scheduler=limits, block_size=8) as engine:
        first = engine.generate(PROMPTS, GREEDY)
        turns = [prompt + result.token_ids + [7, 9] for prompt, result in zip(PROMPTS, first, strict=True)]
        second = engine.generate(turns, GREEDY)
        assert all(result.num_cached_tokens >= 24 for result in second)
        assert all_right(engine)


def test_given_steps_without_drafts_between_then_the_draft_catches_up(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter([0, 3, 0, 0, 0, 0, 0, 3, 1, 0, 2] * 20)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences: next(numbers))
    for overlap in (False, True):
        with Engine(model, kv_blocks=128, draft=model, overlap=overlap) as engine:
            engine.generate(PROMPTS, GREEDY)
            assert all_right(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_given_more_missing_tokens_than_a_step_has_room_for_then_the_draft_computes_all_of_them(
    overlap: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is the model, so its keys must be those of the model, in layers of its own."""
    numbers = iter([0] * 50 + [3] * 100)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences: next(numbers))
    differences: list[float] = []
    limits = SchedulerConfig(max_tokens_per_step=12, max_sequences=4)
    with Engine(model, kv_blocks=128, draft=model, scheduler=limits, overlap=overlap) as engine:
        drafts = engine._loop.drafts
        assert drafts is not None
        run = drafts.run

        def compared(plan: Any, *others: Any) -> Any:
            result = run(plan, *others)
            for row in plan.num_drafts.nonzero()[0].tolist():
                keys = [engine.plane.read(plan.sequences[row].live_handle(), layer)[0] for layer in (1, 3)]
                differences.append(float((keys[0] - keys[1]).abs().max()))
            return result

        monkeypatch.setattr(drafts, "run", compared)
        engine.generate(PROMPTS, replace(GREEDY, max_new_tokens=60))
    assert len(differences) >= 4
    assert max(differences) < 1e-5


def test_given_a_step_with_drafts_then_what_the_host_does_before_it_counts_too(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device waits meanwhile, which it does not in steps without drafts."""
    seen: list[float] = []
    monkeypatch.setattr(DraftLength, "observe", lambda self, num, drafts, seconds: seen.append(seconds))
    monkeypatch.setattr("kvpool.engine.loop.time.perf_counter", itertools.count().__next__)
    with Engine(model, kv_blocks=128, draft=model) as engine:
        engine.generate(PROMPTS[:1], GREEDY)
    assert set(seen) == {2}  # the clock is read when a step is launched and when it is over


def test_given_a_step_that_captures_a_graph_then_its_time_does_not_count(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(DraftLength, "observe", lambda self, num, drafts, seconds: seen.append(seconds))
    numbers = itertools.count()
    captured = property(lambda self: CaptureReport(next(numbers), 0.0, 0))
    monkeypatch.setattr(ModelRunner, "captured", captured)
    with Engine(model, kv_blocks=128, draft=model) as engine:
        engine.generate(PROMPTS[:1], GREEDY)
    assert next(numbers) > 8
    assert not seen


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_given_too_little_memory_then_preempted_sequences_go_on_with_right_drafts(mode: str, model: Any) -> None:
    # A step has room for all that the draft may have to catch up with: which step a copy ends in depends on the clock.
    limits = SchedulerConfig(max_tokens_per_step=512, max_sequences=8, preemption=mode)
    memory = {"kv_blocks": 24, "block_size": 4, "host_bytes": 2**20, "cache": {"watermark": 0.0}}
    prompts = [random_prompt(20, seed=seed).tolist() for seed in range(6)]
    with Engine(model, kv_blocks=128) as engine:
        want = [result.token_ids for result in engine.generate(prompts, GREEDY)]
    with Engine(model, draft=model, scheduler=limits, **memory) as engine:
        assert [result.token_ids for result in engine.generate(prompts, GREEDY)] == want
        assert engine.stats().scheduler.preemptions > 0
        assert all_right(engine)


def test_given_samples_forks_stops_and_parameters_that_need_each_token_then_nothing_changes(
    model: Any, similar: Any
) -> None:
    wanted = [
        SamplingParams(max_new_tokens=16, n=3, temperature=1.0, seed=5, ignore_eos=True),
        SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.9, seed=3, logprobs=2),
        SamplingParams(max_new_tokens=16, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_new_tokens=16, num_beams=3, ignore_eos=True),
    ]
    with Engine(model, kv_blocks=128) as plain, Engine(model, kv_blocks=128, draft=similar) as drafting:
        results = [engine.generate(PROMPTS, wanted) for engine in (plain, drafting)]
        assert [[s.token_ids for s in r.samples] for r in results[0]] == [
            [s.token_ids for s in r.samples] for r in results[1]
        ]
        stop = results[0][2].token_ids[5]
        ends = SamplingParams(max_new_tokens=16, stop_token_ids=[stop], ignore_eos=True)
        assert plain.generate(PROMPTS, ends)[0].token_ids == drafting.generate(PROMPTS, ends)[0].token_ids
        parent = drafting.submit(PROMPTS[1], GREEDY)
        parent.result()
        forked = drafting.fork(parent, GREEDY).result().token_ids
        assert forked == plain.generate([parent.token_ids], GREEDY)[0].token_ids


@pytest.mark.parametrize("kind", ["model", "mtp"])
def test_given_sampling_then_tokens_follow_the_distribution_of_the_model(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts of pairs of tokens against their probabilities, by chi-square, with seeds of requests and without."""
    if kind == "model":
        model, draft = request.getfixturevalue("model"), request.getfixturevalue("similar")
        source = model
    else:
        model, source, draft = save_mtp_model("glm4_moe", 1, tmp_path)[0], tmp_path, "mtp"
    monkeypatch.setattr("kvpool.engine.generation.secrets.randbits", random.Random(5).getrandbits)
    prompt, count = PROMPTS[0], 900
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(2):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, before in probabilities.items():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].topk(3)
            for token, share in zip(logits.indices.tolist(), logits.values.softmax(-1).tolist(), strict=True):
                longer[(*tokens, token)] = before * share
        probabilities = longer
    accepted = []
    for seeds in (range(count), [None] * count):
        wanted = SamplingParams(max_new_tokens=3, temperature=1.0, top_k=3, ignore_eos=True)
        params = [replace(wanted, seed=seed) for seed in seeds]
        with Engine(source, kv_blocks=2048, draft=draft, scheduler=SchedulerConfig(max_sequences=256)) as engine:
            found = [tuple(result.token_ids) for result in engine.generate([prompt] * count, params)]
            accepted.append(engine.stats().scheduler.accepted_draft_tokens)
        seen = {tokens: sum(each[:2] == tokens for each in found) for tokens in probabilities}
        assert sum(seen.values()) == count
        distance = sum((seen[t] - count * p) ** 2 / (count * p) for t, p in probabilities.items() if count * p >= 1)
        assert distance < 30  # 9 cells: exceeded by chance in 1 of 5,000 seeds
    assert 100 < accepted[0] < accepted[1]  # without a seed, what the draft drew is kept wherever it can be


def test_given_graphs_then_drafts_and_their_verification_run_from_them(
    model: Any, similar: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SchedulerConfig(max_tokens_per_step=100, max_sequences=8)
    engine = Engine(model, kv_blocks=128, draft=similar, scheduler=limits)
    loop = engine._loop
    assert loop.drafts is not None
    runners = []
    for runner, first in ((loop.runner, 0), (loop.drafts.runner, len(engine.shape.layers))):
        options: dict[str, Any] = {
            "max_sequences": 16 if first else 8,
            "max_tokens": 100,
            "first_layer": first,
            "max_drafts": 0 if first else 5,
        }
        backend = ReplanningBackend()
        runners.append(
            ModelRunner(runner.model, engine.shape, engine.plane, backend, recorder=FakeRecorder(), **options)
        )
        runners[-1].warm_up()
        monkeypatch.setattr(runners[-1], "_run", None)  # nothing runs as it is
    loop.runner, loop.drafts.runner = runners

    assert answers(engine) == expected


def test_given_layers_that_keep_a_state_then_a_draft_without_them_changes_no_token(model: Any) -> None:
    hybrid = tiny_model("qwen3_next")
    with pytest.raises(UnsupportedModelError, match="cannot draft"):
        Engine(model, kv_blocks=64, draft=hybrid)
    want = answers(Engine(hybrid, kv_bytes=2**24))
    assert answers(Engine(hybrid, kv_bytes=2**24, draft=model)) == want


@pytest.mark.parametrize("size", [150, 170])
def test_given_the_same_vocabulary_padded_to_another_size_then_it_drafts(
    size: int, model_directory: str, expected: list[list[int]], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    draft = tiny_model("llama", vocab_size=size)
    with pytest.raises(ConfigError, match=f"has {size} tokens, the model 160"):
        Engine(model_directory, kv_blocks=64, draft=draft)
    draft.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    tokenizer.save_pretrained(tmp_path)
    assert answers(Engine(model_directory, kv_blocks=64, draft=tmp_path)) == expected

    tokenizer.add_tokens(["other"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="another vocabulary"):
        Engine(model_directory, kv_blocks=64, draft=tmp_path)


def test_given_the_files_of_a_head_then_they_are_refused_by_name(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "LlamaForCausalLMEagle3"))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLMEagle3 is the head of another model"):
        Engine(model, kv_blocks=64, draft=tmp_path)


def test_given_a_draft_in_tiers_then_blocks_of_another_draft_are_not_loaded(model: Any, similar: Any) -> None:
    tier = MemoryTier(2**24)
    for draft, cached in ((model, 0), (similar, 0), (model, 48)):
        with Engine(model, kv_blocks=64, draft=draft, tiers=[tier]) as engine:
            (result,) = engine.generate([PROMPTS[1]], GREEDY)
            assert result.num_cached_tokens == cached


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_tokens": 0}, "guesses nothing"),
        ({"draft": ("llama", {"vocab_size": 128})}, "has 128 tokens, the model 160"),
        ({"draft": ("llama", {"max_position_embeddings": 64})}, "'max_seq_len': 64"),
    ],
)
def test_given_a_draft_that_cannot_be_used_then_the_error_says_why(
    settings: dict[str, Any], message: str, model: Any
) -> None:
    chosen = {"draft": model, **settings}
    if isinstance(chosen["draft"], tuple):
        chosen["draft"] = tiny_model(chosen["draft"][0], **chosen["draft"][1])
    with pytest.raises(ConfigError, match=message):
        Engine(model, kv_blocks=64, **chosen)
