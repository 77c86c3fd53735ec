"""A model divided between processes gives the tokens of one process, whatever the scheduler does with its requests."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_files import write_adapter
from models import random_prompt, tiny_config, tiny_model
from transformers import AutoModelForCausalLM
from vision_models import prompt, vision_model

from kvpool.engine import Engine, SamplingParams
from kvpool.engine.ranks import Ranks
from kvpool.engine.speculation import DraftLength
from kvpool.errors import ConfigError, InvalidArgumentError, SequenceStateError, UnsupportedModelError
from kvpool.model.sharding import shard_plan
from kvpool.scheduling import SchedulerConfig
from kvpool.tiers import MemoryTier

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))

from hybrids import VOCABULARY, hybrid_model

FAMILIES = [
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "deepseek_v3",
    "olmo2",
    "cohere2",
]
UNDIVIDED = {"phi3", "olmo2", "deepseek_v3"}  # by transformers' plan every rank attends with all heads
LIMITS = SchedulerConfig(max_tokens_per_step=24, max_sequences=8)
PROMPTS = [random_prompt(length, seed=length).tolist() for length in (40, 7, 61)]
TEN = SamplingParams(max_new_tokens=10)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks, this process and another one, which takes a while to start."""
    with Ranks(2, device="cpu") as started:
        yield started


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model: each rank reads its part of the file."""
    return saved(tmp_path_factory.mktemp("llama"), "llama")


def saved(directory: Path, family: str, **settings: Any) -> str:
    tiny_model(family, **settings).save_pretrained(directory)
    return str(directory)


def engine(model: Any, **settings: Any) -> Engine:
    return Engine(model, **{"device": "cpu", "kv_blocks": 64, "scheduler": LIMITS, **settings})


def tokens(made: Engine, prompts: Any = PROMPTS, params: SamplingParams = TEN, **options: Any) -> list[Any]:
    return [[sample.token_ids for sample in done.samples] for done in made.generate(prompts, params, **options)]


@pytest.mark.parametrize("family", FAMILIES)
def test_given_two_ranks_then_the_tokens_are_those_of_one(family: str, ranks: Ranks, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    with engine(model) as one:
        expected = tokens(one)
        heads = [(layer.q_heads, layer.kv_heads) for layer in one.shape.layers]
    with engine(model, tensor_parallel=ranks) as two:
        assert tokens(two) == expected
        halves = [(layer.q_heads, layer.kv_heads) for layer in two.shape.layers]
    assert halves == [(q // 2, kv // 2) if family not in UNDIVIDED else (q, kv) for q, kv in heads]


def test_given_chunks_hits_and_forks_then_the_tokens_are_those_of_one(ranks: Ranks, llama: str) -> None:
    prompts = [PROMPTS[2] + [5, 6], PROMPTS[2] + [9]]
    sampled = replace(TEN, n=3, temperature=1.0, seed=7)

    def run(made: Engine) -> list[Any]:
        with made:
            first = tokens(made)
            again = tokens(made, prompts, sampled)
            assert made.stats().scheduler.cached_tokens >= 2 * 48
            logprobs = made.generate([PROMPTS[0]], replace(TEN, prompt_logprobs=0))[0].prompt_logprobs
        return [first, again, [each and round(each.logprob, 4) for each in logprobs]]

    assert run(engine(llama, tensor_parallel=ranks)) == run(engine(llama))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_given_too_little_memory_then_preempted_requests_give_the_same_tokens(
    mode: str, ranks: Ranks, llama: str
) -> None:
    prompts = [random_prompt(30, seed=seed).tolist() for seed in range(6)]
    with engine(llama) as roomy:
        expected = tokens(roomy, prompts, replace(TEN, max_new_tokens=40))
    limits = replace(LIMITS, preemption=mode)
    with engine(llama, tensor_parallel=ranks, kv_blocks=14, host_bytes=1 << 20, scheduler=limits) as tight:
        assert tokens(tight, prompts, replace(TEN, max_new_tokens=40)) == expected
        stats = tight.stats().scheduler
        assert stats.preemptions > 0
        assert (stats.swapped_out > 0) == (mode == "swap")


def test_given_prefixes_that_moved_to_host_memory_then_every_rank_brings_its_part_back(
    ranks: Ranks, llama: str
) -> None:
    prompts = [random_prompt(64, seed=seed).tolist() for seed in range(4)]
    with engine(llama) as one:
        expected = [tokens(one, [prompt]) for prompt in prompts]
    with engine(llama, tensor_parallel=ranks, kv_blocks=12, host_bytes=1 << 20) as two:
        for _ in range(2):
            assert [tokens(two, [prompt]) for prompt in prompts] == expected
        assert two.stats().scheduler.cached_tokens >= 3 * 48


def test_given_publish_then_one_stream_announces_each_block_once(ranks: Ranks, llama: str) -> None:
    from published import published_tokens  # needs zmq

    with engine(llama, tensor_parallel=ranks, publish="tcp://127.0.0.1:0") as two:
        answer = two.generate([PROMPTS[0]], TEN)[0].token_ids
        told = published_tokens(two.publishes.replay_endpoint, 48)
    assert told == [*PROMPTS[0], *answer][:48]


def test_given_overlap_and_drafts_then_the_tokens_are_those_of_one(ranks: Ranks, llama: str) -> None:
    repeating = [[5, 6, 7, 8] * 8, *PROMPTS]
    with engine(llama) as one:
        expected = tokens(one, repeating)
    with engine(llama, tensor_parallel=ranks, overlap=True) as two:  # tokens go from rank to rank without the host
        assert tokens(two, repeating) == expected
    with engine(llama, tensor_parallel=ranks, draft_tokens=3) as two:
        assert tokens(two, repeating) == expected
        assert two.stats().scheduler.draft_tokens > 0


def test_given_adapters_then_the_tokens_are_those_of_one(ranks: Ranks, llama: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    paths = {name: write_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate("abc")}
    paths["d"] = write_adapter(tmp_path / "d", model, ("o_proj", "q_proj"), rank=20, seed=9)

    def run(**settings: Any) -> list[Any]:
        with engine(llama, adapters={"a": paths["a"]}, max_adapters=2, **settings) as made:
            found = [tokens(made, PROMPTS, adapter="a"), tokens(made)]
            for name in "bcd":  # which makes others leave, and the last needs more room
                made.load_adapter(name, paths[name])
            mixed = [made.submit(PROMPTS[0], TEN, adapter=name) for name in ("a", "b", None, "c", "d")]
            return [*found, [each.result().token_ids for each in mixed]]

    expected = run()
    assert len({tuple(each) for each in expected[2]}) == 5
    assert run(tensor_parallel=ranks) == expected


def test_given_an_adapter_that_cannot_be_served_then_the_ranks_go_on(ranks: Ranks, tmp_path: Path) -> None:
    config = tiny_config("qwen2", num_key_value_heads=1)  # ranks share the only KV head
    path = write_adapter(tmp_path / "a", AutoModelForCausalLM.from_config(config), ("k_proj", "v_proj"))
    wrong = write_adapter(tmp_path / "wrong", tiny_model("llama"), ("k_proj",))
    found = []
    for settings in ({}, dict(tensor_parallel=ranks)):
        with engine(config, **settings) as made:
            with pytest.raises(InvalidArgumentError, match="64 inputs and 32 outputs; the model has 64 and 16"):
                made.load_adapter("wrong", wrong)
            made.load_adapter("a", path)
            found.append([tokens(made, adapter="a"), tokens(made)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])  # positions of three axes, and tokens that see one another
def test_given_images_then_the_tokens_are_those_of_one(family: str, ranks: Ranks, tmp_path: Path) -> None:
    vision_model(family).save_pretrained(tmp_path)
    prompts = [prompt(family, [5, 6], 1, [7]), prompt(family, [9], 2, [8, 8], 1), {"input_ids": [[3, 4, 5]]}]
    found = []
    for settings in ({}, dict(tensor_parallel=ranks)):
        with engine(str(tmp_path), **settings) as made:
            found.append([tokens(made, prompts), tokens(made, [prompt(family, [5, 6], 1, [7, 9])])])
            assert made.stats().encoder.num_encoded == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{}, dict(draft_tokens=3)])
def test_given_layers_that_keep_a_state_then_the_tokens_are_those_of_one(
    settings: dict[str, Any], ranks: Ranks, hybrid: str
) -> None:
    def run(**more: Any) -> list[Any]:
        prompts = [[5, 6, 7, 8] * 5, *([token % VOCABULARY for token in prompt] for prompt in PROMPTS)]
        with engine(hybrid, **{**settings, **more}) as made:
            return [tokens(made, prompts), tokens(made, [prompts[-1] + [5, 6]])]

    assert run(tensor_parallel=ranks) == run()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that attends and keeps states in turn. By its plan, every rank has all states."""
    hybrid_model("qwen3_next").save_pretrained(directory := tmp_path_factory.mktemp("hybrid"))
    return str(directory)


def test_given_a_plan_that_divides_a_state_then_it_is_refused() -> None:
    config = hybrid_model("qwen3_next").config
    config.base_model_tp_plan = {**config.base_model_tp_plan, "layers.*.linear_attn.out_proj": "rowwise"}
    with pytest.raises(UnsupportedModelError, match=r"keep a state, which .*linear_attn.out_proj would divide"):
        shard_plan(AutoModelForCausalLM, config, 2)


def test_given_prompts_to_embed_then_the_vectors_are_those_of_one(ranks: Ranks, llama: str) -> None:
    with engine(llama) as one, engine(llama, tensor_parallel=ranks) as two:
        for pooling in ("last", "mean", "last"):  # the second time with prefixes from the cache
            expected, found = (each.embed(PROMPTS, pooling=pooling) for each in (one, two))
            np.testing.assert_allclose(found, expected, atol=1e-5)
        assert tokens(two) == tokens(one)


@pytest.fixture(scope="module")
def similar(llama: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft that often guesses what the model says: its weights with some noise."""
    draft = AutoModelForCausalLM.from_pretrained(llama)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.08 * parameter.std() * torch.randn_like(parameter))
    draft.save_pretrained(directory := tmp_path_factory.mktemp("similar"))
    return str(directory)


@pytest.mark.parametrize("is_overlapping", [False, True])
def test_given_a_draft_model_then_ranks_accept_what_one_accepts(
    is_overlapping: bool, ranks: Ranks, llama: str, similar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**settings: Any) -> list[Any]:
        numbers = itertools.cycle([3, 3, 0, 0, 3, 1, 2])
        monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences: next(numbers))
        with engine(llama, draft=similar, overlap=is_overlapping, **settings) as made:
            prompts = [*PROMPTS[1:], PROMPTS[2] + [5, 6]]  # one by one: which share a step would depend on the clock
            found = [tokens(made, [prompt], replace(TEN, max_new_tokens=16)) for prompt in prompts]
            stats = made.stats().scheduler
        assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
        return [*found, stats.accepted_draft_tokens, stats.draft_tokens]

    assert run(tensor_parallel=ranks) == run()


@pytest.mark.parametrize("settings", [{}, dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=48)])
def test_given_a_draft_then_ranks_divide_it_where_its_heads_allow(
    settings: dict[str, Any], ranks: Ranks, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences: 3)
    monkeypatch.setattr("kvpool.engine.engine_parts.check_vocabulary", lambda *given: None)
    with engine(llama) as one:
        expected = tokens(one)
    with engine(llama, tensor_parallel=ranks, draft=tiny_config("llama", **settings)) as two:
        assert tokens(two) == expected
        assert two.stats().scheduler.draft_tokens > 0
        heads = [layer.kv_heads for layer in two.config.layers]
    assert heads == [1, 1, *([3, 3] if "num_attention_heads" in settings else [1, 1])]


def test_given_fewer_kv_heads_than_ranks_and_an_odd_vocabulary_then_the_tokens_are_those_of_one(ranks: Ranks) -> None:
    config = tiny_config("qwen2", num_key_value_heads=1, vocab_size=161, tie_word_embeddings=True)
    with engine(config) as one:
        expected = tokens(one)
        whole = one.config.layers[0].bytes_per_token
    with engine(config, tensor_parallel=ranks) as two:
        assert tokens(two) == expected
        assert two.shape.layers[0].q_heads == 2
        assert two.config.layers[0].bytes_per_token == whole  # each rank has a copy of the only head


def test_given_ranks_in_use_then_a_second_engine_is_refused(ranks: Ranks, llama: str) -> None:
    with engine(llama, tensor_parallel=ranks) as first:
        with pytest.raises(SequenceStateError, match="another engine"):
            engine(llama, tensor_parallel=ranks)
        with pytest.raises(InvalidArgumentError, match="keep their sizes"):
            first.plane.resize(10)
        assert tokens(first, PROMPTS[:1])


def test_given_an_engine_without_references_then_its_ranks_are_free(ranks: Ranks, llama: str) -> None:
    idle, busy = engine(llama, tensor_parallel=ranks), None
    del idle
    gc.collect()
    assert not ranks.in_use
    busy = engine(llama, tensor_parallel=ranks)
    thread = busy._thread
    generation = busy.submit(PROMPTS[0], TEN)
    del busy
    gc.collect()
    assert len(generation.result().token_ids) == 10
    thread._thread.join(60)
    assert not ranks.in_use


@pytest.mark.parametrize("family", ["gpt2", "opt", "nemotron"])
def test_given_a_family_without_a_plan_then_it_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="no tensor-parallel plan"):
        engine(tiny_config(family), tensor_parallel=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tensor_parallel=3), "4 attention heads"),
        (dict(tensor_parallel=0), "tensor_parallel"),
        (dict(tensor_parallel="two"), "number of ranks"),
        (dict(tensor_parallel=2, tiers=[MemoryTier(2**20)]), "give addresses"),
        (dict(tensor_parallel=2, compile=True), "compile with tensor_parallel"),
        (dict(tensor_parallel=2, cuda_graphs=True), "gloo"),
        (dict(tensor_parallel=2, cache={"policy": lambda: None}), "cannot be sent"),
    ],
)
def test_given_settings_that_cannot_work_then_they_are_refused_before_ranks_start(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "__init__", None)  # nothing is started
    with pytest.raises((ConfigError, InvalidArgumentError), match=message):
        engine(tiny_config("llama"), **settings)


def test_given_a_loaded_model_or_draft_then_it_is_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(InvalidArgumentError, match="a loaded model"):
        engine(model, tensor_parallel=2)
    with pytest.raises(InvalidArgumentError, match="a loaded draft"):
        engine(model.config, tensor_parallel=2, draft=model)


@pytest.mark.parametrize(
    ("settings", "size", "message"),
    [
        (dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=96), 2, "3 KV heads"),
        (dict(intermediate_size=97), 2, "97 rows or columns"),
    ],
)
def test_given_sizes_that_do_not_divide_then_the_plan_names_them(
    settings: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_plan(AutoModelForCausalLM, tiny_config("llama", **settings), size)


def test_given_too_few_gpus_then_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(InvalidArgumentError, match="needs 2 GPUs of this machine, but torch finds 1"):
        Engine(tiny_config("llama"), device="cuda", tensor_parallel=2)
