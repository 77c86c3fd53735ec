"""The engine gives token for token what transformers gives, whatever the batch, the chunks, the blocks and the pressure."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Chunk, Engine, Generation, SamplingParams  # noqa: E402
from kvpool.errors import ConfigError, InvalidArgumentError, NeverFitsError  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss", "qwen3_moe", "mixtral"]
NEW = 12


def prompts_of(lengths: list[int], shared: int = 0) -> list[list[int]]:
    """Random prompts; the first `shared` tokens are the same in all of them."""
    common = random_prompt(shared, seed=99).tolist()
    return [common + random_prompt(length, seed=seed).tolist() for seed, length in enumerate(lengths)]


def expected(model: Any, prompt: list[int], num_new: int = NEW, **options: Any) -> list[int]:
    """What transformers generates greedily, without its stop token rule unless asked."""
    options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **options}
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, **options)
    return out[0, len(prompt) :].tolist()


@functools.cache
def wanted(family: str, prompt: tuple[int, ...], num_new: int) -> list[int]:
    """What transformers generates with a model of this family, once for all the engines that are compared with it."""
    return expected(tiny_model(family), list(prompt), num_new)


def all_wanted(family: str, prompts: list[list[int]], num_new: int = NEW) -> list[list[int]]:
    return [wanted(family, tuple(prompt), num_new) for prompt in prompts]


def make_engine(family: str = "llama", *, kv_blocks: int = 64, **options: Any) -> Engine:
    return Engine(tiny_model(family), kv_blocks=kv_blocks, **options)


def greedy(num_new: int = NEW, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, ignore_eos=True, **options)


@pytest.mark.quick("llama", "gemma3_text", "gpt_oss")
@pytest.mark.transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_given_a_mixed_batch_then_greedy_output_is_that_of_transformers(family: str) -> None:
    prompts = prompts_of([5, 40, 1, 17], shared=9)
    with make_engine(family, scheduler=SchedulerConfig(max_tokens_per_step=32, max_sequences=8)) as engine:
        for _ in range(2):  # the second time from the cache
            outputs = engine.generate(prompts, greedy())
            assert [out.token_ids for out in outputs] == all_wanted(family, prompts)
        assert all(out.num_cached_tokens > 0 for out in outputs[:2])
        engine.manager.check()


@pytest.mark.quick("1-7", "16-64", "256-None")
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_given_any_chunk_and_block_size_then_the_output_is_the_same(chunk: int | None, block_size: int) -> None:
    prompts = prompts_of([40, 20], shared=20)
    limits = SchedulerConfig(max_tokens_per_step=128, max_sequences=4, max_chunk_tokens=chunk)
    with make_engine(
        "gemma3_text", kv_blocks=max(8, 1024 // block_size), block_size=block_size, scheduler=limits
    ) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, greedy())
            assert [out.token_ids for out in outputs] == all_wanted("gemma3_text", prompts)


@pytest.mark.quick("1-None", "16-7", "256-64")
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_given_any_chunk_and_block_size_then_a_model_without_windows_gives_the_same(
    chunk: int | None, block_size: int
) -> None:
    prompts = prompts_of([30, 13], shared=10)
    limits = SchedulerConfig(max_tokens_per_step=128, max_sequences=4, max_chunk_tokens=chunk)
    with make_engine("llama", kv_blocks=max(4, 256 // block_size), block_size=block_size, scheduler=limits) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, greedy(6))
            assert [out.token_ids for out in outputs] == all_wanted("llama", prompts, 6)


@pytest.mark.quick("llama-swap", "gemma3_text-recompute")
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3"])
def test_given_too_little_memory_then_preempted_requests_end_with_the_same_output(family: str, mode: str) -> None:
    prompts = prompts_of([20, 25, 30, 35])
    limits = SchedulerConfig(max_tokens_per_step=64, max_sequences=8, preemption=mode)
    with make_engine(
        family, kv_blocks=28, block_size=4, host_bytes=2**20, scheduler=limits, cache={"watermark": 0.0}
    ) as engine:
        outputs = engine.generate(prompts, greedy(30))
        assert [out.token_ids for out in outputs] == all_wanted(family, prompts, 30)
        stats = engine.stats().scheduler
        assert stats.preemptions > 0
        assert (stats.swapped_out > 0) == (mode == "swap")
        engine.manager.check()


def test_given_a_pool_full_of_cache_then_eviction_changes_no_output() -> None:
    reference = tiny_model("llama")
    with make_engine(kv_blocks=20, block_size=4) as engine:
        for seed in range(6):
            prompt = random_prompt(30, seed=seed).tolist()
            assert engine.generate([prompt], greedy())[0].token_ids == expected(reference, prompt)
        assert engine.manager.stats().evictions["capacity"] > 0


def test_given_a_stop_token_then_the_sample_ends_with_it() -> None:
    reference = tiny_model("llama")
    prompt = random_prompt(8).tolist()
    tokens = expected(reference, prompt, 20)
    stop = tokens[6]
    with make_engine() as engine:
        (out,) = engine.generate([prompt], greedy(20, stop_token_ids=[stop]))
    assert out.token_ids == tokens[: tokens.index(stop) + 1]
    assert out.finish_reason == "stop"


def test_given_eos_in_the_config_then_it_stops_unless_ignored() -> None:
    model = tiny_model("llama")
    prompt = random_prompt(8).tolist()
    tokens = expected(model, prompt, 20)
    model.generation_config.eos_token_id = tokens[3]
    with Engine(model, kv_blocks=64) as engine:
        short, whole = engine.generate([prompt, prompt], [SamplingParams(max_new_tokens=20), greedy(20)])
    assert short.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert whole.token_ids == tokens


def test_given_the_same_seed_then_the_sample_does_not_depend_on_the_batch() -> None:
    prompts = prompts_of([9, 30, 14])
    params = SamplingParams(max_new_tokens=16, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
    others = [SamplingParams(max_new_tokens=9, temperature=1.0, seed=1), greedy(12)]
    with make_engine() as engine:
        alone = engine.generate(prompts[:1], params)[0].token_ids
        engine.manager.cache.reset()
        together = engine.generate(prompts, [params, *others])[0].token_ids
        again = engine.generate(prompts[:1], params)[0].token_ids
    assert alone == together == again


def test_given_n_samples_then_they_share_the_prompt_and_differ() -> None:
    prompt = random_prompt(40).tolist()
    params = SamplingParams(max_new_tokens=10, temperature=1.5, seed=3, n=4, ignore_eos=True)
    with make_engine(block_size=8) as engine:
        (out,) = engine.generate([prompt], params)
        stats = engine.stats()
        engine.manager.check()
        (again,) = engine.generate([prompt], params)
    assert [sample.index for sample in out.samples] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in out.samples}) == 4
    assert all(len(sample.token_ids) == 10 for sample in out.samples)
    assert stats.scheduler.prefill_tokens == 40
    assert [s.token_ids for s in again.samples] == [s.token_ids for s in out.samples]


def test_given_drafts_then_the_output_is_unchanged_and_some_of_them_come_true() -> None:
    prompts = [random_prompt(6).tolist() * 5, random_prompt(20, seed=3).tolist()]
    sampled = SamplingParams(max_new_tokens=30, temperature=0.7, seed=2, ignore_eos=True)
    with make_engine() as plain, make_engine(draft_tokens=4) as drafting:
        for params in (greedy(30), sampled):
            want = [out.token_ids for out in plain.generate(prompts, params)]
            assert [out.token_ids for out in drafting.generate(prompts, params)] == want
        assert drafting.stats().scheduler.accepted_draft_tokens > 0
        drafting.manager.check()


def test_given_a_stop_token_among_accepted_drafts_then_nothing_behind_it_is_kept() -> None:
    model = tiny_model("llama", vocab_size=24, spread=2.0)  # it repeats itself, so that drafts hold what comes
    prompt = random_prompt(6, vocab_size=24).tolist()
    with Engine(model, kv_blocks=64) as plain, Engine(model, kv_blocks=64, draft_tokens=4) as drafting:
        prompt += plain.generate([prompt], greedy(40))[0].token_ids
        (whole,) = drafting.generate([prompt], greedy(20))
        assert drafting.stats().scheduler.accepted_draft_tokens > 0
        for stop in sorted(set(whole.token_ids)):
            (got,) = drafting.generate([prompt], greedy(20, stop_token_ids=[stop]))
            assert got.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
            assert got.finish_reason == "stop"


def test_given_limits_of_a_step_and_drafts_then_there_is_room_for_the_drafts() -> None:
    limits = SchedulerConfig(max_tokens_per_step=64, max_sequences=8)
    with make_engine(draft_tokens=4, scheduler=limits) as engine:
        engine.generate([random_prompt(6).tolist() * 5], greedy(30))
        assert engine.stats().scheduler.accepted_draft_tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": SchedulerConfig(max_draft_tokens=4)}, "draft_tokens"),
        ({"draft_tokens": 4, "overlap": True}, "overlap"),
        ({"kv_bytes": 2**20}, "once"),
        ({"scheduler": {"max_sequences": 4}}, "SchedulerConfig"),
        ({"cache": {"gpu_blocks": 4}}, "kv_blocks"),
        ({"tokenizer": "org/model"}, "AutoTokenizer"),
        ({"tokenizer": 3}, "tokenizer=3"),
        ({"cache": [1]}, "mapping"),
        ({"block_size": "16"}, "block_size='16' must be an integer"),
        ({"draft_tokens": 1.5}, "draft_tokens=1.5"),
        ({"host_bytes": None}, "host_bytes=None"),
        ({"kv_blocks": None, "memory_fraction": "half"}, "memory_fraction='half'"),
        ({"kv_blocks": None, "memory_fraction": 1.5}, "at most 1"),
        ({"overlap": "yes"}, "overlap must be True or False, or None"),
        ({"compile": None}, "compile must be True or False"),
        ({"attention": 3}, "attention"),
        ({"record": 3}, "record"),
    ],
)
def test_given_settings_that_would_have_no_effect_then_they_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(**options)


@pytest.mark.parametrize("longest", [513, None])
def test_given_sequences_past_the_models_positions_then_they_are_refused(longest: int | None) -> None:
    with pytest.raises(ConfigError, match="is over the 512 positions of the model; lower it"):
        make_engine(cache={"max_seq_len": longest})
    make_engine(cache={"max_seq_len": 100}).close()


def test_given_penalties_then_the_output_is_that_of_transformers() -> None:
    reference = tiny_model("llama")
    prompts = prompts_of([12, 25])
    with make_engine() as engine:
        outputs = engine.generate(prompts, greedy(20, repetition_penalty=1.8))
    assert [out.token_ids for out in outputs] == [expected(reference, p, 20, repetition_penalty=1.8) for p in prompts]


def test_given_logprobs_then_every_token_has_them() -> None:
    with make_engine() as engine:
        (out,) = engine.generate([random_prompt(9).tolist()], greedy(5, logprobs=2))
    logprobs = out.samples[0].logprobs
    assert [entry.token for entry in logprobs] == out.token_ids
    assert all(entry.top[0] == (entry.token, pytest.approx(entry.logprob)) for entry in logprobs)  # greedy: the best
    assert all(entry.top[0][1] >= entry.top[1][1] for entry in logprobs)


def test_given_a_reused_prefix_then_its_logits_are_those_of_a_computed_one_up_to_rounding() -> None:
    prompt = random_prompt(40).tolist()
    params = greedy(3, logprobs=100)
    for family in ("llama", "gemma3_text"):
        with make_engine(family, block_size=4) as engine:
            (computed,) = engine.generate([prompt], params)
            (reused,) = engine.generate([prompt], params)
        assert (computed.num_cached_tokens, reused.num_cached_tokens) == (0, 39)
        for one, other in zip(computed.samples[0].logprobs, reused.samples[0].logprobs, strict=True):
            assert dict(other.top) == pytest.approx(dict(one.top), abs=1e-4)


def test_given_more_logprobs_than_tokens_in_the_vocabulary_then_all_of_them_come() -> None:
    with Engine(tiny_model("llama", vocab_size=50), kv_blocks=16) as engine:
        (out,) = engine.generate([[5, 6, 7]], greedy(2, logprobs=100))
    assert [len(entry.top) for entry in out.samples[0].logprobs] == [50, 50]


def test_given_a_stream_then_its_chunks_join_to_the_result_and_leaving_it_cancels() -> None:
    prompt = random_prompt(9).tolist()

    async def run(engine: Engine) -> tuple[list[int], int]:
        tokens: list[int] = []
        async for chunk in engine.stream(prompt, greedy()):
            tokens += chunk.token_ids
        seen = 0
        stream = engine.stream(prompt, greedy(400))
        async for _ in stream:
            seen += 1
            if seen == 3:
                break
        await stream.aclose()
        return tokens, seen

    with make_engine() as engine:
        tokens, seen = asyncio.run(run(engine))
        assert tokens == engine.generate([prompt], greedy())[0].token_ids
        assert seen == 3
        assert engine.stats().num_running == 0


def test_given_a_fork_then_it_goes_on_from_there_and_shares_the_blocks() -> None:
    prompt = random_prompt(40).tolist()
    with make_engine(block_size=4) as engine:
        first = engine.submit(prompt, greedy(8))
        first.result()
        fork = engine.fork(first, greedy(6)).result()
        whole = engine.generate([prompt], greedy(14))[0]
    assert fork.token_ids == whole.token_ids[8:]
    assert fork.num_cached_tokens >= 44


@pytest.mark.parametrize("overlap", [False, True])
def test_given_a_fork_of_a_running_request_then_both_go_on_as_if_alone(overlap: bool) -> None:
    prompt = random_prompt(30).tolist()
    forks: list[Generation] = []
    with make_engine(block_size=4, overlap=overlap) as engine:
        whole = engine.generate([prompt], greedy(20))[0].token_ids
        engine.manager.cache.reset()

        def branch(chunk: Chunk) -> None:
            if chunk.token_ids and len(first.samples[0].token_ids) == 7:
                forks.append(engine.fork(first, greedy(9)))

        before = engine.stats().scheduler.prefill_tokens
        first = engine.submit(prompt, greedy(20), on_chunk=branch)
        assert first.result().token_ids == whole
        fork = forks[0].result()
        prefilled = engine.stats().scheduler.prefill_tokens - before
        engine.manager.check()
    assert fork.token_ids == whole[7:16]
    if not overlap:
        assert (prefilled, fork.num_cached_tokens) == (30, 36)  # all but the newest token, and nothing computed again


def test_given_penalties_before_when_a_running_request_is_forked_then_the_fork_has_penalties_of_its_own() -> None:
    penalised = greedy(6, repetition_penalty=1.5, frequency_penalty=0.5)
    with make_engine() as engine:
        engine.generate([[1, 2, 3]], penalised)
        begun = threading.Event()
        first = engine.submit(random_prompt(30).tolist(), greedy(200), on_chunk=lambda chunk: begun.set())
        assert begun.wait(60)
        fork = engine.fork(first, penalised)  # by another thread than the engine's
        alone = engine.generate([fork.prompt], penalised)[0]
        assert fork.result(60).token_ids == alone.token_ids
        first.cancel()


@pytest.mark.parametrize("overlap", [False, True])
def test_given_a_fork_in_the_callback_of_the_last_chunk_then_it_goes_on_from_there(overlap: bool) -> None:
    prompt = random_prompt(30).tolist()
    forks: list[Generation] = []
    with make_engine(block_size=4, overlap=overlap) as engine:
        whole = engine.generate([prompt], greedy(14))[0].token_ids

        def branch(chunk: Chunk) -> None:
            if chunk.finish_reason is not None:
                forks.append(engine.fork(first, greedy(6)))

        first = engine.submit(prompt, greedy(8), on_chunk=branch)
        first.result()
        assert [fork.result().token_ids for fork in forks] == [whole[8:]]


def test_given_a_recording_of_an_engine_then_its_replay_has_the_same_hit_counters(tmp_path: Path) -> None:
    from kvpool.replay import replay_recording

    file = tmp_path / "live.kvtrace"
    prompts = prompts_of([30, 12, 44, 20], shared=24)
    with make_engine(block_size=4, kv_blocks=26, record=file) as engine:
        for _ in range(3):
            engine.generate(prompts, greedy(6))
        live = engine.stats().cache
    again = replay_recording(file)
    assert (again.hit_tokens, again.hit_blocks, again.prompt_tokens) == (
        live.hit_tokens,
        live.hit_blocks,
        live.prompt_tokens,
    )
    assert again.evictions == live.evictions
    assert live.evictions["capacity"] > 0


def test_given_a_request_that_never_fits_then_it_is_refused_and_others_go_on() -> None:
    with make_engine(kv_blocks=4, block_size=4) as engine:
        with pytest.raises(NeverFitsError):
            engine.generate([random_prompt(30).tolist()], greedy())
        assert len(engine.generate([random_prompt(5).tolist()], greedy(3))[0].token_ids) == 3


def test_given_one_bad_prompt_among_many_then_the_error_says_which() -> None:
    good = random_prompt(5).tolist()
    with make_engine(kv_blocks=4, block_size=4) as engine:
        with pytest.raises(NeverFitsError, match=r"^prompt 2: "):
            engine.generate([good, good, random_prompt(30).tolist()], greedy(3))
        with pytest.raises(InvalidArgumentError, match=r"^prompt 1: .* at least one token"):
            engine.generate([good, []], greedy(3))


def test_given_a_prompt_that_fails_then_the_others_are_completed_and_kept() -> None:
    good = random_prompt(5).tolist()
    with make_engine(kv_blocks=4, block_size=4) as engine:
        alone = engine.generate([good], greedy(3))[0].token_ids
        with pytest.raises(NeverFitsError, match=r"^prompt 1: ") as caught:
            engine.generate([good, random_prompt(30).tolist(), good, random_prompt(31).tolist()], greedy(3))
        first, second, third, fourth = caught.value.results
        assert first.token_ids == third.token_ids == alone
        assert isinstance(second, NeverFitsError)
        assert isinstance(fourth, NeverFitsError)
        assert not str(fourth).startswith("prompt 1")


def test_given_a_wrong_prompt_in_a_list_then_nothing_runs() -> None:
    with make_engine() as engine:
        with pytest.raises(InvalidArgumentError, match=r"^prompt 2: "):
            engine.generate([[5, 6], [7], [-1]], greedy(3))
        assert engine.stats().cache.prompt_tokens == 0


def test_given_more_new_tokens_than_the_context_has_room_for_then_they_are_cut_and_a_note_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = random_prompt(500).tolist()
    with make_engine(kv_blocks=128) as engine, caplog.at_level(logging.INFO, "kvpool"):
        generation = engine.submit(prompt, greedy(1000))
        out = generation.result()
        assert len(out.token_ids) == 13  # up to position 512; the last token is never computed on
        assert out.finish_reason == "length"
        assert generation.params.max_new_tokens == 13
        (note,) = out.notes
        assert note == "max_new_tokens=1000 was cut to 13: the prompt has 500 tokens, there is room for 512"
        assert caplog.messages == [note]
        assert engine.generate([prompt], greedy(13))[0].notes == ()
        with pytest.raises(NeverFitsError):
            engine.generate([random_prompt(513).tolist()], greedy(1))


def test_given_an_end_before_its_samples_branch_off_then_a_request_has_all_of_them() -> None:
    heard: list[Chunk] = []
    with make_engine() as engine:
        late = engine.submit(random_prompt(5).tolist(), greedy(4, n=3), deadline=0.0, on_chunk=heard.append).result()
    assert [(sample.index, sample.token_ids, sample.finish_reason) for sample in late.samples] == [
        (index, [], "deadline") for index in range(3)
    ]
    assert [(chunk.sample, chunk.finish_reason) for chunk in heard] == [(index, "deadline") for index in range(3)]


def test_given_a_deadline_then_the_request_ends_at_it() -> None:
    with make_engine() as engine:
        out = engine.submit(random_prompt(5).tolist(), greedy(400), deadline=0.0).result()
        assert out.finish_reason == "deadline"
        assert engine.stats().num_running == 0


def test_given_a_cancelled_request_then_it_keeps_what_it_has() -> None:
    with make_engine() as engine:
        generation = engine.submit(random_prompt(5).tolist(), greedy(400))
        engine.cancel(generation)
        assert generation.result(timeout=60).samples[0].finish_reason == "cancelled"
        other = engine.submit(random_prompt(5).tolist(), greedy(400))
        other.cancel()
        assert other.result(timeout=60).samples[0].finish_reason == "cancelled"
        other.cancel()  # it is over: nothing happens


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "at least one"), ([999_999], "vocabulary"), ("text", "tokenizer"), ([-1], "negative")]
)
def test_given_a_bad_prompt_then_the_error_says_what_is_wrong(prompt: Any, message: str) -> None:
    with make_engine() as engine, pytest.raises(InvalidArgumentError, match=message):
        engine.submit(prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"max_new_tokens": 4}}, "SamplingParams"),
        ({"params": SamplingParams(stop="end")}, "stop strings need a tokenizer"),
        ({"deadline": "soon"}, "deadline"),
        ({"deadline": 10**400}, "deadline"),
        ({"session": 3}, "session"),
        ({"scope": "tenant"}, "scope"),
        ({"priority": "high"}, "priority"),
        ({"on_chunk": 3}, "on_chunk"),
        ({"on_end": "print"}, "on_end"),
    ],
)
def test_given_a_wrong_option_then_its_caller_is_told_and_the_engine_goes_on(
    options: dict[str, Any], message: str
) -> None:
    prompt = random_prompt(5).tolist()
    with make_engine() as engine:
        parent = engine.submit(prompt, greedy(2))
        for refused in (engine.submit, lambda _, **given: engine.fork(parent, **given)):
            with pytest.raises(InvalidArgumentError, match=message):
                refused(prompt, **options)
        with pytest.raises(InvalidArgumentError, match="no option 'colour'"):
            engine.fork(parent, colour="blue")
        assert len(engine.generate([prompt], greedy(3))[0].token_ids) == 3


def test_given_no_request_where_one_belongs_then_it_is_refused() -> None:
    with make_engine() as engine:
        for refused in (engine.cancel, engine.fork, lambda given: engine.fork(given, greedy())):
            with pytest.raises(InvalidArgumentError, match="the Generation that submit returned, got 3"):
                refused(3)
        with pytest.raises(InvalidArgumentError, match="timeout must be seconds"):
            engine.submit([5], greedy(1)).result("soon")


@pytest.mark.parametrize("prompts", [3, None, np.array(3), object()])
def test_given_no_list_of_prompts_then_it_is_refused(prompts: Any) -> None:
    with make_engine() as engine, pytest.raises(InvalidArgumentError, match="prompts must be a list"):
        engine.generate(prompts)


@pytest.mark.parametrize("prompt", ["text", [5, 6], np.array([5, 6]), torch.tensor([5, 6])])
def test_given_one_prompt_where_a_list_of_them_belongs_then_it_is_refused(prompt: Any) -> None:
    with make_engine() as engine, pytest.raises(InvalidArgumentError, match="in a list"):
        engine.generate(prompt)


def test_given_overlapped_steps_then_the_output_is_the_same() -> None:
    prompts = prompts_of([5, 40, 1, 17], shared=9)
    with make_engine() as plain, make_engine(overlap=True) as overlapped:
        params = [greedy(9), greedy(12), SamplingParams(max_new_tokens=10, temperature=1.0, seed=4), greedy(1)]
        want = [out.token_ids for out in plain.generate(prompts, params)]
        assert [out.token_ids for out in overlapped.generate(prompts, params)] == want
        overlapped.manager.check()


def test_given_overlapped_steps_and_n_samples_then_neither_they_nor_others_change() -> None:
    prompts = prompts_of([5, 40])
    with make_engine() as plain:
        alone = [plain.generate([prompts[0]], greedy(30))[0].token_ids]
        sampled = SamplingParams(max_new_tokens=20, temperature=1.5, seed=3, n=3, ignore_eos=True)
        stop = plain.generate([prompts[1]], sampled)[0].samples[1].token_ids[4]
        stopping = replace(sampled, stop_token_ids=[stop])
        alone += [sample.token_ids for sample in plain.generate([prompts[1]], stopping)[0].samples]
    with make_engine(overlap=True, scheduler=SchedulerConfig(max_tokens_per_step=16, max_sequences=8)) as overlapped:
        first, second = overlapped.generate(prompts, [greedy(30), stopping])
        overlapped.manager.check()
    assert [first.token_ids, *(sample.token_ids for sample in second.samples)] == alone


def test_given_memory_in_use_then_it_is_what_the_configuration_says() -> None:
    with make_engine(kv_blocks=10) as engine:
        assert sum(engine.memory.values()) == sum(engine.config.pool_bytes(tier) for tier in engine.memory)
        assert np.all([pool.block_bytes for pool in engine.config.pools])
