"""Keyed tiers behind the engine: whatever brings a prefix, and whatever tiers do, the answer is that of computing it."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.errors import ConfigError, KVPoolError, NeverFitsError  # noqa: E402
from kvpool.quiet import QuietErrors  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402
from kvpool.scope import ReuseScope  # noqa: E402
from kvpool.tiers import KeyedTier, MemoryTier, Outcome  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

SECONDS = 60.0  # until a test that hangs is a failure
PROMPT = random_prompt(120).tolist()
ENDS_WITH_A_BLOCK = random_prompt(96, seed=1).tolist()
FAMILIES = ["llama", "gemma2", "gpt_oss", "mistral", "deepseek_v3"]


def params(num_new: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_new, ignore_eos=True)


def make_engine(*tiers: KeyedTier, family: str = "llama", **options: Any) -> Engine:
    settings: dict[str, Any] = {"kv_blocks": 128, "block_size": 8, "tier_timeout": SECONDS, **options}
    return Engine(tiny_model(family), tiers=list(tiers), **settings)


def answers(engine: Engine, *prompts: list[int], num_new: int = 8, **options: Any) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(list(prompts), params(num_new), **options)]


def computed(*prompts: list[int], family: str = "llama", num_new: int = 8) -> list[list[int]]:
    """What an engine without tiers and without anything cached answers."""
    return [list(_computed(tuple(prompt), family, num_new)) for prompt in prompts]


@cache
def _computed(prompt: tuple[int, ...], family: str, num_new: int) -> tuple[int, ...]:
    with Engine(tiny_model(family), kv_blocks=128, block_size=8) as engine:
        return tuple(answers(engine, list(prompt), num_new=num_new)[0])


def filled(*prompts: list[int], family: str = "llama", **options: Any) -> MemoryTier:
    """A tier that holds these prompts."""
    tier = MemoryTier(2**28)
    with make_engine(tier, family=family, **options) as engine:
        answers(engine, *prompts)
    return tier


def assert_at_rest(engine: Engine) -> None:
    """Nothing leaked: the cache is sound, nobody holds a lease, no memory is lent, nothing is on its way."""
    tiers = engine.stats().tiers
    assert tiers is not None
    engine._tiers.flush(SECONDS)  # type: ignore[union-attr]
    tiers = engine.stats().tiers
    assert tiers is not None
    assert (tiers.held, tiers.leases, tiers.blocks_waiting, tiers.staging_bytes) == (0, (), 0, 0)
    engine.manager.check()
    assert all(pool.referenced == 0 for pool in engine.stats().cache.pools)


class Wrapped(MemoryTier):
    """A tier that does what a test says before, or instead of, what it should."""

    def __init__(self, tier: MemoryTier, **instead: Callable[..., Any]) -> None:
        super().__init__(2**28)
        self._tier = tier
        self._instead = instead

    def _contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        answer = self._instead.get("contains", lambda *_: None)(keys, deadline)
        return self._tier._contains(keys, deadline) if answer is None else answer

    def _load(self, keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        answer = self._instead.get("load", lambda *_: None)(keys, out, deadline)
        return self._tier._load(keys, out, deadline) if answer is None else answer

    def _store(self, keys: Sequence[bytes], data: Sequence[memoryview], deadline: float) -> list[Outcome]:
        answer = self._instead.get("store", lambda *_: None)(keys, data, deadline)
        return self._tier._store(keys, data, deadline) if answer is None else answer


# --- the same answer ---------------------------------------------------------------------------------------------------


@pytest.mark.quick("llama", "gemma2")
@pytest.mark.parametrize("family", FAMILIES)
def test_given_a_prefix_in_a_tier_then_another_engine_loads_it_and_answers_the_same(family: str) -> None:
    prompts = [PROMPT, ENDS_WITH_A_BLOCK, PROMPT[:60], [*PROMPT[:83], 5, 6, 7]]
    want = computed(*prompts, family=family)
    tier = filled(PROMPT, ENDS_WITH_A_BLOCK, family=family)
    for prompt, expected in zip(prompts, want, strict=True):
        with make_engine(tier, family=family) as engine:
            (result,) = engine.generate([prompt], params())
            assert result.token_ids == expected
            assert result.num_cached_tokens >= len(prompt) // 8 * 8 - 8
            assert_at_rest(engine)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_zeros_in_place_of_blocks_then_the_answer_is_another_one(family: str) -> None:
    """The tests above would not see a difference if what is loaded did not matter."""
    tier = filled(PROMPT, family=family)

    def zeros(keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        for view in out:
            view[:] = bytes(len(view))
        return [Outcome.OK] * len(keys)

    with make_engine(Wrapped(tier, load=zeros), family=family) as engine:
        assert answers(engine, PROMPT) != computed(PROMPT, family=family)


def test_given_what_was_generated_then_the_next_turn_finds_it_in_the_tier_too() -> None:
    tier = MemoryTier(2**28)
    with make_engine(tier) as engine:
        (answer,) = answers(engine, PROMPT, num_new=40)
    turn = [*PROMPT, *answer, 9, 9, 9]
    with make_engine(tier) as engine:
        (result,) = engine.generate([turn], params())
        assert result.num_cached_tokens == (len(PROMPT) + 39) // 8 * 8
        assert [result.token_ids] == computed(turn)


def test_given_another_scope_then_nothing_is_found_and_nothing_of_it_is_in_a_key() -> None:
    tier = filled(PROMPT)
    with make_engine(tier) as engine:
        (result,) = engine.generate([PROMPT], params(), scope=ReuseScope(tenant="somebody else"))
        assert result.num_cached_tokens == 0
    assert not any(b"somebody" in key for key in tier._values)


def test_given_other_weights_or_another_block_size_then_nothing_is_found() -> None:
    tier = filled(PROMPT)
    with Engine(tiny_model("llama", seed=1), kv_blocks=128, block_size=8, tiers=[tier]) as engine:
        assert engine.generate([PROMPT], params())[0].num_cached_tokens == 0
    with make_engine(tier, block_size=16) as engine:
        assert engine.generate([PROMPT], params())[0].num_cached_tokens == 0
    with make_engine(tier, kv_dtype="int8") as engine:
        assert engine.generate([PROMPT], params())[0].num_cached_tokens == 0


@pytest.mark.quick("llama-options0", "gemma2-options2")
@pytest.mark.parametrize(
    "options", [{"kv_dtype": "int8"}, {"draft_tokens": 3}, {"overlap": True}, {"host_bytes": 2**20}]
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_an_engine_with_options_then_its_own_blocks_come_back_right(family: str, options: dict[str, Any]) -> None:
    with Engine(tiny_model(family), kv_blocks=128, block_size=8, **options) as engine:
        want = answers(engine, PROMPT, num_new=24)
    tier = filled(PROMPT, family=family, **options)
    with make_engine(tier, family=family, **options) as engine:
        assert answers(engine, PROMPT, num_new=24) == want
        assert engine.stats().tiers.imports == 1  # type: ignore[union-attr]
        assert_at_rest(engine)


@pytest.mark.slow
def test_given_samples_then_they_start_from_the_tier_and_store_nothing_wrong() -> None:
    tier = filled(PROMPT)
    several = SamplingParams(max_new_tokens=20, ignore_eos=True, n=3, seed=7, temperature=1.0)
    with Engine(tiny_model("llama"), kv_blocks=128, block_size=8) as engine:
        want = [s.token_ids for s in engine.generate([PROMPT], several)[0].samples]
    for _ in range(2):
        with make_engine(tier) as engine:
            assert [s.token_ids for s in engine.generate([PROMPT], several)[0].samples] == want
            (result,) = engine.generate([[*PROMPT, *want[1]]], params())
            assert [result.token_ids] == computed([*PROMPT, *want[1]])
            assert_at_rest(engine)


@pytest.mark.quick("gemma2")
@pytest.mark.usefixtures("patient_tiers")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_a_pool_so_small_that_blocks_are_evicted_then_they_come_back_from_the_tier(family: str) -> None:
    prompts = [random_prompt(80, seed=seed).tolist() for seed in range(6)]
    want = computed(*prompts, family=family)
    tier = MemoryTier(2**28)
    with make_engine(tier, family=family, kv_blocks=40) as engine:
        for _ in range(3):
            for prompt, expected in zip(prompts, want, strict=True):
                assert answers(engine, prompt) == [expected]
        stats = engine.stats()
        assert stats.tiers.prompt_tokens_loaded > 0  # type: ignore[union-attr]
        assert_at_rest(engine)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_a_prefix_larger_than_the_staging_memory_then_it_comes_in_parts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = filled(PROMPT, family=family)
    # Four blocks of each group at once
    monkeypatch.setattr("kvpool.tiers.transport.tier_transport.STAGING_BYTES", 4 * 4 * 2 * 4096)
    with make_engine(tier, family=family) as engine:
        (result,) = engine.generate([PROMPT], params())
        assert (result.num_cached_tokens, [result.token_ids]) == (119, computed(PROMPT, family=family))
        assert engine.stats().tiers.imports >= 2  # type: ignore[union-attr]
        assert_at_rest(engine)


# --- several tiers -----------------------------------------------------------------------------------------------------


def test_given_two_tiers_then_what_comes_from_the_slower_one_goes_to_the_faster_one() -> None:
    slow = filled(PROMPT)
    fast = MemoryTier(2**28, name="fast")
    with make_engine(fast, slow) as engine:
        assert answers(engine, PROMPT) == computed(PROMPT)
    loaded = slow.stats().hits
    assert fast.stats().num_values == slow.stats().num_values
    with make_engine(fast, slow) as engine:
        assert answers(engine, PROMPT) == computed(PROMPT)
        assert engine.generate([PROMPT], params())[0].num_cached_tokens == 119
    assert slow.stats().hits == loaded


def test_given_parts_in_either_tier_then_they_are_put_together() -> None:
    whole = filled(PROMPT)
    fast, slow = MemoryTier(2**28), MemoryTier(2**28)
    for number, (key, value) in enumerate(whole._values.items()):
        (fast, slow)[number % 2].store([key], [value])
    with make_engine(fast, slow) as engine:
        (result,) = engine.generate([PROMPT], params())
        assert (result.num_cached_tokens, [result.token_ids]) == (119, computed(PROMPT))


def test_given_a_prompt_that_is_all_cached_then_no_tier_is_asked() -> None:
    tier = MemoryTier(2**28)
    for prompt in (PROMPT, ENDS_WITH_A_BLOCK):
        with make_engine(tier) as engine:
            answers(engine, prompt, prompt)
            lookups = engine.stats().tiers.fetches.lookups  # type: ignore[union-attr]
            answers(engine, prompt)
            assert engine.stats().tiers.fetches.lookups == lookups  # type: ignore[union-attr]


def test_given_blocks_that_came_from_a_tier_then_they_are_not_stored_there_again() -> None:
    tier = filled(PROMPT)
    stored: list[int] = []
    counting = Wrapped(tier, store=lambda keys, *_: stored.append(len(keys)))
    with make_engine(counting) as engine:
        answers(engine, PROMPT, num_new=1)
    assert stored == []


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_given_blocks_to_be_stored_after_two_uses_then_only_what_came_again_is_stored(family: str) -> None:
    tier = MemoryTier(2**28)
    prompts = [[*PROMPT[:64], *random_prompt(40, seed=seed).tolist()] for seed in (5, 6)]
    with make_engine(tier, family=family, tier_min_uses=2) as engine:
        answers(engine, prompts[0])
        assert_at_rest(engine)
        assert tier.stats().stored == 0
        answers(engine, prompts[1])
    with make_engine(tier, family=family) as engine:
        (result,) = engine.generate([prompts[0]], params())
        assert (result.num_cached_tokens, [result.token_ids]) == (64, computed(prompts[0], family=family))


# --- requests that wait ------------------------------------------------------------------------------------------------


class Gate:
    """Holds calls of a tier until the test opens it."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        self.begun.set()
        self.opened.wait(SECONDS)


def test_given_a_request_whose_prefix_is_on_its_way_then_others_are_answered_meanwhile() -> None:
    gate = Gate()
    with make_engine(Wrapped(filled(PROMPT), load=gate)) as engine:
        waiting = engine.submit(PROMPT, params())
        assert gate.begun.wait(SECONDS)
        other = random_prompt(30, seed=5).tolist()
        assert answers(engine, other) == computed(other)
        assert not waiting.is_over
        assert engine.stats().num_waiting == 1
        gate.opened.set()
        assert [waiting.result(SECONDS).token_ids] == computed(PROMPT)
        assert_at_rest(engine)


@pytest.mark.slow
def test_given_requests_that_miss_the_same_blocks_then_they_are_loaded_once() -> None:
    gate = Gate()
    tier = filled(PROMPT)
    before = tier.stats().hits
    prompts = [[*PROMPT, tail] for tail in range(3, 9)]
    with make_engine(Wrapped(tier, load=gate)) as engine:
        generations = [engine.submit(prompt, params()) for prompt in prompts]
        assert gate.begun.wait(SECONDS)
        while engine.stats().num_waiting < len(prompts):
            pass
        gate.opened.set()
        assert [g.result(SECONDS).token_ids for g in generations] == computed(*prompts)
        stats = engine.stats().tiers
        assert stats is not None
        assert (gate.calls, stats.joined, stats.imports) == (1, 5, 1)
        assert_at_rest(engine)
    assert tier.stats().hits == before  # `Wrapped` calls what is behind the counters


def test_given_a_held_request_when_it_is_cancelled_then_it_ends_and_what_arrives_later_is_dropped() -> None:
    gate = Gate()
    with make_engine(Wrapped(filled(PROMPT), load=gate)) as engine:
        held, follower = engine.submit(PROMPT, params()), engine.submit(PROMPT, params())
        assert gate.begun.wait(SECONDS)
        held.cancel()
        assert held.result(SECONDS).finish_reason == "cancelled"
        gate.opened.set()
        assert [follower.result(SECONDS).token_ids] == computed(PROMPT)
        assert_at_rest(engine)


def test_given_a_request_that_can_never_run_then_it_is_refused_before_its_prefix_is_loaded() -> None:
    with make_engine(filled(PROMPT)) as engine:
        with pytest.raises(NeverFitsError, match="max_sequences"):
            engine.generate(
                [PROMPT], SamplingParams(max_new_tokens=1, n=engine._loop.scheduler.config.max_sequences + 1)
            )
        assert engine.stats().tiers.imports == 0  # type: ignore[union-attr]
        assert_at_rest(engine)


def test_given_held_requests_when_the_engine_is_closed_then_they_end_with_an_error() -> None:
    gate = Gate()
    engine = make_engine(Wrapped(filled(PROMPT), load=gate), tier_timeout=2.0)
    held = engine.submit(PROMPT, params())
    assert gate.begun.wait(SECONDS)
    engine.close()
    gate.opened.set()
    with pytest.raises(KVPoolError, match="closed"):
        held.result(0)


def test_given_an_engine_that_nobody_has_any_more_then_a_held_request_is_answered_and_its_memory_comes_back() -> None:
    gate = Gate()
    engine = make_engine(Wrapped(filled(PROMPT), load=gate))
    held = engine.submit(PROMPT, params())
    model = weakref.ref(engine.model)
    assert gate.begun.wait(SECONDS)
    del engine
    gc.collect()
    gate.opened.set()
    assert [held.result(SECONDS).token_ids] == computed(PROMPT)
    deadline = time.monotonic() + SECONDS
    while model() is not None and time.monotonic() < deadline:
        gc.collect()
    assert model() is None


def test_given_leases_that_fill_the_pool_then_they_give_way_and_every_request_is_answered() -> None:
    prompts = [random_prompt(120, seed=seed).tolist() for seed in range(8)]
    tier = MemoryTier(2**28)
    with make_engine(tier) as engine:
        answers(engine, *prompts)
    limits = SchedulerConfig(max_sequences=2)
    with make_engine(tier, kv_blocks=40, scheduler=limits) as engine:
        assert answers(engine, *prompts) == computed(*prompts)
        assert_at_rest(engine)


# --- faults ------------------------------------------------------------------------------------------------------------


def fails(*_: object) -> Any:
    raise OSError("the disk is on fire")


def short(keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
    for view in out:
        view[:8] = b"too few!"
    return [Outcome.OK] * len(keys)


def every_second(keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
    return [Outcome.MISS if i % 2 else Outcome.FAILED for i in range(len(keys))]


FAULTS: dict[str, dict[str, Callable[..., Any]]] = {
    "contains raises": {"contains": fails},
    "load raises": {"load": fails},
    "store raises": {"store": fails},
    "everything raises": {"contains": fails, "load": fails, "store": fails},
    "values are too short": {"load": short},
    "nothing is there any more": {"load": every_second},
    "too few answers": {"load": lambda keys, *_: [Outcome.OK] * (len(keys) - 1)},
    "no answer": {"load": lambda *_: "yes"},
    "late": {"load": lambda keys, *_: [Outcome.LATE] * len(keys)},
    "says it has everything": {"contains": lambda keys, *_: [True] * len(keys)},
    "refuses to store": {"store": lambda keys, *_: [Outcome.REFUSED] * len(keys)},
}


@pytest.mark.quick(
    "contains raises-llama",
    "load raises-gemma2",
    "store raises-llama",
    "values are too short-gemma2",
    "too few answers-llama",
    "no answer-gemma2",
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_given_a_tier_that_is_broken_then_requests_are_answered_and_nothing_leaks(fault: str, family: str) -> None:
    other = random_prompt(70, seed=3).tolist()
    want = computed(PROMPT, other, family=family)
    with make_engine(Wrapped(filled(PROMPT, family=family), **FAULTS[fault]), family=family) as engine:
        for _ in range(2):
            assert answers(engine, PROMPT, other) == want
            engine.manager.cache.reset()
        assert_at_rest(engine)


def test_given_a_load_that_fails_half_way_then_what_came_whole_is_used_and_the_rest_computed() -> None:
    tier = filled(PROMPT)

    def half(keys: Sequence[bytes], out: Sequence[memoryview], deadline: float) -> list[Outcome]:
        found = tier._load(keys, out, deadline)
        return [*found[: len(found) // 2], *[Outcome.FAILED] * (len(found) - len(found) // 2)]

    with make_engine(Wrapped(tier, load=half)) as engine:
        (result,) = engine.generate([PROMPT], params())
        assert (result.num_cached_tokens, [result.token_ids]) == (7 * 8, computed(PROMPT))
        assert_at_rest(engine)


@pytest.mark.quick("contains")
@pytest.mark.parametrize("call", ["contains", "load"])
def test_given_a_tier_that_hangs_then_requests_go_on_after_the_timeout_and_later_ones_pass_it_by(call: str) -> None:
    gate = Gate()
    prompts = [PROMPT, *(random_prompt(90, seed=seed).tolist() for seed in range(4))]
    want = computed(*prompts)
    with make_engine(Wrapped(filled(*prompts), **{call: gate}), tier_timeout=0.2) as engine:
        assert [answers(engine, prompt)[0] for prompt in prompts] == want
        stats = engine.stats().tiers
        assert stats is not None
        assert 1 <= stats.timed_out <= 2  # as many as there are threads to hang; nobody waited for the tier after that
        gate.opened.set()
    engine.manager.check()


def test_given_a_store_that_hangs_then_closing_the_engine_waits_for_so_long_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.tiers.transport.tier_transport.FLUSH_SECONDS", 0.5)
    gate = Gate()
    engine = make_engine(Wrapped(MemoryTier(2**28), store=gate))
    assert answers(engine, PROMPT) == computed(PROMPT)
    began = time.monotonic()
    engine._tiers.transport.storer.close(0.01)  # type: ignore[union-attr]
    engine.close()
    gate.opened.set()
    assert time.monotonic() - began < SECONDS


@pytest.mark.quick("at once")
@pytest.mark.parametrize("chunk", [64, 4], ids=["at once", "in parts"])
def test_given_no_room_for_a_prefix_when_it_arrives_then_it_is_computed_later(
    chunk: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.tiers.transport.cache_blocks.CHUNK_BLOCKS", chunk)
    gate = Gate()
    with make_engine(Wrapped(filled(PROMPT), load=gate), kv_blocks=20) as engine:
        waiting = engine.submit(PROMPT, params())
        assert gate.begun.wait(SECONDS)
        other = random_prompt(72, seed=9).tolist()
        running = engine.submit(other, params(40), on_chunk=lambda chunk: gate.opened.set())
        assert [running.result(SECONDS).token_ids] == computed(other, num_new=40)
        assert [waiting.result(SECONDS).token_ids] == computed(PROMPT)
        assert engine.stats().tiers.imports_without_room == 1  # type: ignore[union-attr]
        assert_at_rest(engine)
    assert caplog.text == ""  # a lack of room is nothing that somebody has to mend


def test_given_blocks_that_cannot_be_copied_then_answers_are_right_and_one_traceback_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no copy on purpose")

    monkeypatch.setattr("kvpool.engine.tier_link._quiet", QuietErrors(logging.getLogger("kvpool")))
    monkeypatch.setattr("kvpool.storage.DataPlane.read_blocks", broken)
    prompts = [PROMPT, ENDS_WITH_A_BLOCK]
    with make_engine(MemoryTier(2**28)) as engine:
        for prompt in prompts:
            assert answers(engine, prompt) == computed(prompt)
        assert engine.stats().tiers.stores.stored == 0  # type: ignore[union-attr]
        assert_at_rest(engine)
    assert caplog.text.count("blocks could not be copied for tiers; they are not stored") == 1
    assert caplog.text.count("RuntimeError: no copy on purpose") == 1


# --- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["disk", 3, MemoryTier(1), [MemoryTier], [None], {"a": 1}])
def test_given_something_else_than_tiers_then_the_engine_refuses_it(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="tiers"):
        Engine(tiny_model("llama"), tiers=wrong)


@pytest.mark.parametrize("wrong", [0, -1, "1", None, float("nan"), 1e9])
def test_given_a_wrong_timeout_then_the_engine_refuses_it(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="tier_timeout"):
        Engine(tiny_model("llama"), tiers=[], tier_timeout=wrong)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"disk": 3}, "disk must be the path"),
        ({"disk": ""}, "disk must be the path"),
        ({"disk_bytes": 2**30}, "disk_bytes=1073741824 needs disk"),
        ({"disk": "x", "disk_bytes": 0}, "disk_bytes"),
        ({"remote": 5}, "remote must be the address"),
        ({"tier_min_uses": 0}, "tier_min_uses"),
        ({"tier_min_uses": True}, "tier_min_uses"),
    ],
)
def test_given_a_wrong_disk_or_remote_store_then_the_engine_refuses_it_before_it_loads_a_model(
    options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        Engine("no/such/model", **options)


def test_given_a_disk_then_the_next_engine_finds_what_this_one_computed(tmp_path: Path) -> None:
    for found in (0, 119):
        with make_engine(disk=tmp_path / "blocks", disk_bytes=2**24) as engine:
            (result,) = engine.generate([PROMPT], params())
            assert (result.num_cached_tokens, [result.token_ids]) == (found, computed(PROMPT))
            assert_at_rest(engine)
        assert engine.stats().tiers.tiers[0].stats.problem == "closed"  # type: ignore[union-attr]


def test_given_a_directory_in_use_then_the_second_engine_says_so(tmp_path: Path) -> None:
    with make_engine(disk=tmp_path, disk_bytes=2**24), pytest.raises(ConfigError, match="this process writes to"):
        make_engine(disk=tmp_path, disk_bytes=2**24)


def test_given_tiers_without_a_prefix_cache_then_the_engine_refuses_it() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        make_engine(MemoryTier(1), cache={"enable_prefix_caching": False})


def test_given_tiers_of_the_caller_then_closing_the_engine_leaves_them_open() -> None:
    tier = filled(PROMPT)
    assert tier.stats().problem == ""


@pytest.mark.slow
@pytest.mark.usefixtures("patient_tiers")  # a load that comes too late is not used, and counts for nothing else
def test_given_traffic_then_statistics_add_up() -> None:
    tier = MemoryTier(2**28)
    random = np.random.default_rng(0)
    shared = [random_prompt(64, seed=seed).tolist() for seed in range(4)]
    with make_engine(tier, kv_blocks=48) as engine:
        for _ in range(12):
            batch = [[*shared[i], *random.integers(3, 160, 12).tolist()] for i in random.integers(0, 4, 3)]
            assert answers(engine, *batch) == computed(*batch)
        assert_at_rest(engine)
        stats = engine.stats().tiers
        assert stats is not None
        found = stats.tiers[0].stats
        assert stats.stores.stored == found.stored
        assert stats.stores.dropped == stats.stores.failed == 0
        assert stats.decisions.loads == stats.imports + stats.imports_without_room + stats.fetches.no_memory
        assert found.hits == found.bytes_loaded // engine.config.groups[0].block_bytes
