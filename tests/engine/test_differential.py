"""Random requests through a crowded engine, step by step, give what each of them gives alone in a roomy one."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import tiny_model  # noqa: E402

from kvpool.engine import Chunk, Completion, Engine, SamplingParams  # noqa: E402
from kvpool.errors import NeverFitsError  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

VOCABULARY = 24  # so few that stop tokens are hit and drafts come true
MAX_STEPS = 5000


class Letters:
    """A tokenizer of four letters: stop strings of several tokens are met by chance."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join("abcd"[token % 4] for token in token_ids)


class Watched(NamedTuple):
    """A request, what it said step by step, and what became of it."""

    prompt: list[int]
    params: SamplingParams
    chunks: list[Chunk]
    generation: Any


def in_this_thread(engine: Engine) -> Engine:
    """An engine whose steps are taken by the test, so that every run is the same."""
    engine._thread.tell = lambda run, fail: run()  # type: ignore[method-assign]
    return engine


def run_to_the_end(engine: Engine) -> None:
    for _ in range(MAX_STEPS):
        if not engine._loop.has_work:
            return
        engine._loop.step()
    raise AssertionError("the engine does not come to an end")


def random_params(rng: random.Random) -> SamplingParams:
    chosen: dict[str, Any] = dict(max_new_tokens=rng.randint(1, 24), ignore_eos=True)
    if rng.random() < 0.5:
        chosen["stop_token_ids"] = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 2))]
    options: list[dict[str, Any]] = [
        dict(temperature=rng.choice([0.7, 1.0, 1.5]), seed=rng.randint(0, 999)),
        dict(top_k=5),
        dict(top_p=0.8),
        dict(repetition_penalty=1.5, frequency_penalty=0.3),
        dict(logprobs=rng.randint(0, 3)),
        dict(n=rng.randint(2, 3)),
        dict(stop="".join(rng.choice("abcd") for _ in range(rng.randint(1, 4)))),
    ]
    for option in options:
        if rng.random() < 0.3:
            chosen |= option
    return SamplingParams(**chosen)


def crowded_engine(model: Any, rng: random.Random) -> Engine:
    drafts = rng.choice([0, 0, 3])
    limits = SchedulerConfig(
        max_tokens_per_step=rng.choice([8, 16, 64]),
        max_sequences=rng.randint(3, 8),
        preemption=rng.choice(["auto", "swap", "recompute"]),
        capacity=rng.choice(["max_utilisation", "max_utilisation", "guaranteed"]),
    )
    return in_this_thread(
        Engine(
            model,
            tokenizer=Letters(),
            kv_blocks=rng.choice([16, 24, 48]),
            block_size=4,
            host_bytes=rng.choice([0, 2**18]),
            overlap=not drafts and rng.random() < 0.6,
            draft_tokens=drafts,
            scheduler=limits,
            cache={"watermark": 0.0},
        )
    )


def run_crowd(engine: Engine, rng: random.Random) -> tuple[list[Watched], list[Any]]:
    """Requests that come, and those of them that were cancelled while others ran."""
    common = [rng.randrange(3, VOCABULARY) for _ in range(12)]
    watched: list[Watched] = []
    arrivals = sorted(rng.randint(0, 12) for _ in range(rng.randint(2, 7)))
    cancels: dict[int, Any] = {}
    for step in range(MAX_STEPS):
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            prompt = common[: rng.randint(0, 12)] + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 12))]
            params, chunks = random_params(rng), list[Chunk]()
            watched.append(Watched(prompt, params, chunks, engine.submit(prompt, params, on_chunk=chunks.append)))
            if rng.random() < 0.15:
                cancels[step + rng.randint(0, 20)] = watched[-1].generation
        if step in cancels:
            engine.cancel(cancels[step])
        if engine._loop.has_work:
            engine._loop.step()
        elif not arrivals:
            return watched, list(cancels.values())
    raise AssertionError("the engine does not come to an end")


def assert_chunks_join(request: Watched, result: Completion) -> None:
    for sample in result.samples:
        mine = [chunk for chunk in request.chunks if chunk.sample == sample.index]
        assert [token for chunk in mine for token in chunk.token_ids] == sample.token_ids
        assert "".join(chunk.text for chunk in mine) == sample.text
        assert [chunk.finish_reason for chunk in mine if chunk.finish_reason] == [sample.finish_reason]
        assert mine[-1].finish_reason is not None
        if request.params.logprobs is not None:
            assert [entry.token for entry in sample.logprobs] == sample.token_ids


def assert_same(result: Completion, alone: Completion, was_cancelled: bool) -> None:
    """A request that was cancelled has a part of what it has alone."""
    if was_cancelled:
        pairs = [(sample, alone.samples[sample.index]) for sample in result.samples]
    else:
        pairs = list(zip(result.samples, alone.samples, strict=True))
    for got, want in pairs:
        if was_cancelled:
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            continue
        assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
        for entry, other in zip(got.logprobs, want.logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_given_random_requests_in_a_crowd_then_each_gets_what_it_gets_alone(family: str) -> None:
    model = tiny_model(family, vocab_size=VOCABULARY, spread=6.0)
    roomy = in_this_thread(Engine(model, tokenizer=Letters(), kv_blocks=400, block_size=4))
    for seed in range(12):
        rng = random.Random(seed)
        with crowded_engine(model, rng) as engine:
            requests, cancelled = run_crowd(engine, rng)
            engine.manager.check()
            stats = engine.stats()
            assert stats.cache.num_sequences == stats.num_running == stats.num_waiting == stats.num_swapped == 0
        for request in requests:
            try:
                result = request.generation.result(0)
            except NeverFitsError:
                continue
            alone = roomy.submit(request.prompt, request.params)
            run_to_the_end(roomy)
            assert_chunks_join(request, result)
            assert_same(result, alone.result(0), request.generation in cancelled)
    roomy.close()
