"""A prompt computed by one engine and decoded by another: the answer is that of one engine, whatever fails in between."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import InvalidArgumentError, NeverFitsError, SequenceStateError  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402
from kvpool.scope import ReuseScope  # noqa: E402
from kvpool.tiers import MemoryTier, Outcome  # noqa: E402
from kvpool.tiers.transport.chain import KnownKeys  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

SECONDS = 60.0
SIZE = 8
CHUNK = 32
PROMPT = random_prompt(125).tolist()  # 15 whole blocks and 5 tokens
CHUNKED = SchedulerConfig(max_tokens_per_step=CHUNK, max_sequences=8)
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)


class Store(MemoryTier):
    """A shared store that a test can watch, hold up, and break."""

    def __init__(self) -> None:
        super().__init__(2**28)
        self.num_loaded = 0
        self.refuses_from: int | None = None  # how many values it takes before it refuses
        self.num_stored = 0
        self.may_store, self.may_load = threading.Event(), threading.Event()
        self.may_store.set()
        self.may_load.set()

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        assert self.may_load.wait(SECONDS)
        self.num_loaded += len(keys)
        return super()._load(keys, out, deadline)

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        assert self.may_store.wait(SECONDS)
        if self.refuses_from is not None and self.num_stored >= self.refuses_from:
            return [Outcome.REFUSED] * len(keys)
        self.num_stored += len(keys)
        return super()._store(keys, data, deadline)


def make(store: Store, family: str = "llama", **options: Any) -> Engine:
    settings: dict[str, Any] = {"kv_blocks": 64, "block_size": SIZE, "tier_timeout": SECONDS, "scheduler": CHUNKED}
    return Engine(tiny_model(family), tiers=[store], **settings | options)


@cache
def alone(family: str = "llama") -> list[int]:
    """What one engine answers to the prompt."""
    with Engine(tiny_model(family), kv_blocks=64, block_size=SIZE) as engine:
        return engine.generate([PROMPT], GREEDY)[0].token_ids


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_a_prompt_computed_elsewhere_when_prefetched_then_only_its_end_is_computed_and_the_answer_is_the_same(
    family: str,
) -> None:
    store = Store()
    with make(store, family) as first, make(store, family) as second:
        done = first.prefill(PROMPT).result(SECONDS)
        assert done.num_stored_tokens == 120
        assert second.prefetch(PROMPT).result(SECONDS) == 120
        (answer,) = second.generate([PROMPT], GREEDY)
        assert answer.num_cached_tokens == 120
        assert answer.token_ids == alone(family)
        stats = second.stats()
        assert stats.tiers is not None
        assert (stats.tiers.handovers.prefetches, stats.tiers.handovers.prefetched_blocks) == (1, 15)
        assert (stats.tiers.staging_bytes, stats.tiers.leases) == (0, ())
        second.manager.check()


def test_given_a_long_prompt_then_others_have_its_chunks_while_the_rest_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, one_came = Store(), threading.Event()
    heard: list[int] = []
    loaded: list[int] = []
    with make(store) as first, make(store) as second:
        run, num_steps = first._loop.runner.run, 0

        def run_slowly(*arguments: Any, **options: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            assert num_steps < 3 or one_came.wait(SECONDS)  # the third chunk, when the other engine has the first
            return run(*arguments, **options)

        def on_progress(num_tokens: int) -> None:
            heard.append(num_tokens)
            loaded.append(second.prefetch(PROMPT[:num_tokens]).result(SECONDS))
            one_came.set()

        monkeypatch.setattr(first._loop.runner, "run", run_slowly)
        first.prefill(PROMPT, on_progress=on_progress).result(SECONDS)
    assert heard == [32, 64, 96, 120]
    assert loaded == [num_tokens - 1 for num_tokens in heard]  # the last token of a prompt is always computed
    assert store.num_loaded == 15  # each block once


def test_given_a_listener_that_takes_its_time_then_the_end_is_the_last_that_it_hears(
    eager_thread_switches: None,
) -> None:
    heard: list[Any] = []
    ended = threading.Semaphore(0)

    def on_progress(num_tokens: int) -> None:
        sum(range(20_000))  # others go on meanwhile
        heard.append(num_tokens)

    def on_end() -> None:
        heard.append("end")
        ended.release()

    with make(Store()) as engine:
        for at in range(10):
            turned = [*PROMPT[at:], *PROMPT[:at]]
            engine.prefill(turned, on_progress=on_progress, on_end=on_end)
            assert ended.acquire(timeout=SECONDS)
    assert heard[4::5] == ["end"] * 10
    assert heard[3::5] == [120] * 10


def test_given_a_store_that_fails_on_the_way_then_the_prefill_ends_with_what_is_there_and_the_rest_is_computed() -> (
    None
):
    store = Store()
    store.refuses_from = 4
    with make(store) as first, make(store) as second:
        done = first.prefill(PROMPT).result(SECONDS)
        assert 0 < done.num_stored_tokens < 120
        assert done.num_stored_tokens % SIZE == 0
        second.prefetch(PROMPT).result(SECONDS)
        (answer,) = second.generate([PROMPT], GREEDY)
        assert answer.num_cached_tokens == done.num_stored_tokens
        assert answer.token_ids == alone()
        stats = first.stats().tiers
        assert stats is not None
        assert (stats.handovers.prefills, stats.handovers.prefills_cut) == (1, 1)
        assert first.stats().num_running == 0


def test_given_a_store_that_takes_nothing_then_nobody_waits_for_the_whole_prompt() -> None:
    store = Store()
    store.refuses_from = 0
    with make(store) as first:
        assert first.prefill(PROMPT).result(SECONDS).num_stored_tokens == 0


def test_given_blocks_that_the_store_lost_but_the_cache_has_then_a_prefill_brings_them_back() -> None:
    store = Store()
    with make(store) as first, make(store) as second:
        first.prefill(PROMPT).result(SECONDS)
        store.remove(list(store._values)[:9])
        done = first.prefill(PROMPT).result(SECONDS)
        assert done.num_stored_tokens == 120
        assert done.num_cached_tokens == 120  # nothing was computed for it but the end
        assert second.prefetch(PROMPT).result(SECONDS) == 120


def test_given_a_prompt_that_the_store_has_then_nothing_is_computed() -> None:
    store = Store()
    with make(store) as first, make(store) as other:
        first.prefill(PROMPT).result(SECONDS)
        assert other.prefill(PROMPT).result(SECONDS) == (125, 120, 125)
        assert other.stats().scheduler.steps == 0


def test_given_more_blocks_than_are_known_of_a_tier_then_all_of_them_are_told_of() -> None:
    store = Store()
    heard: list[int] = []
    for _ in range(2):  # it is computed and stored, then it is there
        with make(store) as engine:
            assert engine._tiers is not None
            engine._tiers.transport.storer.tiers[0].known = KnownKeys(5)  # a chunk has 4
            assert engine.prefill(PROMPT, on_progress=heard.append).result(SECONDS).num_stored_tokens == 120
    assert heard == [32, 64, 96, 120, 120]


def test_given_blocks_that_are_stored_at_their_second_use_then_a_prefill_stores_them_at_the_first() -> None:
    with make(Store(), tier_min_uses=2) as engine:
        assert engine.prefill(PROMPT).result(SECONDS).num_stored_tokens == 120


def test_given_content_that_was_invalidated_here_then_it_is_not_said_to_be_there_for_others() -> None:
    with make(Store()) as engine:
        engine.prefill(PROMPT).result(SECONDS)
        engine.invalidate(PROMPT[:64])
        assert engine.prefill(PROMPT).result(SECONDS).num_stored_tokens == 56


def test_given_a_scope_then_only_requests_of_that_scope_find_what_was_handed_over() -> None:
    store, scope = Store(), ReuseScope(tenant="a")
    with make(store) as first, make(store) as second:
        first.prefill(PROMPT, scope=scope).result(SECONDS)
        assert second.prefetch(PROMPT).result(SECONDS) == 0
        assert second.prefetch(PROMPT, scope=scope).result(SECONDS) == 120
        stats = second.stats().tiers
        assert stats is not None
        assert stats.handovers.prefetches == 1  # one brought something


def test_given_a_prefill_that_is_cancelled_then_it_ends_with_what_is_there() -> None:
    store = Store()
    store.may_store.clear()
    with make(store) as engine:
        prefill = engine.prefill(PROMPT)
        prefill.cancel()
        store.may_store.set()
        assert prefill.result(SECONDS).num_stored_tokens <= 120
        assert engine.generate([PROMPT], GREEDY)[0].token_ids == alone()
        assert engine._tiers is not None
        assert engine._tiers.transport.storer._listeners == []  # what is over listens no more


def test_given_an_engine_that_is_closed_then_whoever_waits_is_told() -> None:
    store = Store()
    store.may_store.clear()
    engine = make(store)
    prefill = engine.prefill(PROMPT)
    store.may_store.set()
    engine.close()
    with suppress(SequenceStateError):  # or it was just over; either way nobody hangs
        prefill.result(SECONDS)
    assert prefill.is_over
    with pytest.raises(SequenceStateError):
        engine.prefetch(PROMPT)


def test_given_a_prefetch_that_somebody_wants_to_cancel_then_the_engine_goes_on_and_so_does_the_load() -> None:
    store = Store()
    with make(store) as first, make(store) as second:
        first.prefill(PROMPT).result(SECONDS)
        store.may_load.clear()
        abandoned, heard = second.prefetch(PROMPT, on_end=lambda num_tokens: None), second.prefetch(PROMPT)
        assert not abandoned.cancel()  # as an event loop tries with what a client waited for that left
        store.may_load.set()
        assert heard.result(SECONDS) == 120
        assert second.generate([PROMPT], GREEDY)[0].token_ids == alone()


def test_given_too_many_that_wait_for_tiers_then_a_prefill_is_refused_and_says_why() -> None:
    with make(Store()) as engine:
        assert engine._tiers is not None
        engine._tiers.transport.fetch_threads.max_waiting = 0
        with pytest.raises(SequenceStateError, match="ask again later"):
            engine.prefill(PROMPT).result(SECONDS)
        assert engine.prefetch(PROMPT).result(SECONDS) == 0
        assert engine.generate([PROMPT], GREEDY)[0].token_ids == alone()


def test_given_a_prompt_that_never_fits_then_the_prefill_says_so() -> None:
    with make(Store(), kv_blocks=8) as engine, pytest.raises(NeverFitsError):
        engine.prefill(PROMPT).result(SECONDS)


def test_given_an_engine_without_tiers_then_it_cannot_hand_over() -> None:
    with Engine(tiny_model("llama"), kv_blocks=16) as engine:
        for call in (engine.prefill, engine.prefetch):
            with pytest.raises(InvalidArgumentError, match="tier"):
                call(PROMPT)  # type: ignore[operator]
