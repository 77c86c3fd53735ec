"""A model divided between processes gives the tokens of one process, whatever the scheduler does with its requests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import random_prompt, tiny_config, tiny_model

from kvpool.engine import Engine, SamplingParams
from kvpool.engine.ranks import Ranks
from kvpool.errors import ConfigError, InvalidArgumentError, SequenceStateError, UnsupportedModelError
from kvpool.model.sharding import shard_plan
from kvpool.scheduling import SchedulerConfig
from kvpool.tiers import MemoryTier

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


def tokens(made: Engine, prompts: Any = PROMPTS, params: SamplingParams = TEN) -> list[Any]:
    return [[sample.token_ids for sample in done.samples] for done in made.generate(prompts, params)]


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
        with pytest.raises(ConfigError, match="one device only"):
            first.load_adapter("a", "nowhere")
        with pytest.raises(ConfigError, match="one device only"):
            first.embed(PROMPTS)
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
        (dict(tensor_parallel=2, draft="d"), "draft with tensor_parallel"),
        (dict(tensor_parallel=2, compile=True), "compile with tensor_parallel"),
        (dict(tensor_parallel=2, adapters={"a": "b"}), "adapters with tensor_parallel"),
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


def test_given_a_loaded_model_then_it_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="a loaded model"):
        engine(tiny_model("llama"), tensor_parallel=2)


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
    from transformers import AutoModelForCausalLM

    with pytest.raises(ConfigError, match=message):
        shard_plan(AutoModelForCausalLM, tiny_config("llama", **settings), size)


def test_given_too_few_gpus_then_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(InvalidArgumentError, match="needs 2 GPUs, but torch finds 1"):
        Engine(tiny_config("llama"), device="cuda", tensor_parallel=2)
