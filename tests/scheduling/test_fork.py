"""A request that goes on from another one shares its blocks where it can, and gives the same tokens where it cannot."""

from __future__ import annotations

import pytest
from toy_engine import ToyEngine, expected_output

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.errors import InvalidArgumentError
from kvpool.scheduling import Request, Scheduler, SchedulerConfig


def make(num_blocks: int = 32, depth: int = 1, **config: object) -> ToyEngine:
    manager = KVCacheManager(KVCacheConfig([LayerSpec(1, 8)], block_size=4, gpu_blocks=num_blocks))
    return ToyEngine(Scheduler(manager, SchedulerConfig(**config)), depth)  # type: ignore[arg-type]


def run_until_forked(engine: ToyEngine, steps: int = 4) -> tuple[Request, bool]:
    """A request of ten tokens, forked after some steps."""
    scheduler = engine.scheduler
    scheduler.add(Request("parent", list(range(10)), 12))
    for _ in range(steps):
        engine.step()
    (parent,) = scheduler.sequences("parent")
    request = Request("child", scheduler.token_ids(parent), 6)
    return request, scheduler.fork(parent, request)


def finish(engine: ToyEngine) -> dict[object, list[int]]:
    while engine.scheduler.has_work:
        engine.step()
        engine.manager.check()
    return {name: done.token_ids.tolist() for name, done in engine.finished.items()}


def test_given_a_decoding_parent_then_the_fork_shares_every_block_and_computes_nothing_again() -> None:
    engine = make()
    request, shared = run_until_forked(engine)
    assert shared
    prefilled = engine.scheduler.stats.prefill_tokens
    results = finish(engine)
    assert results["child"] == expected_output(request)
    assert results["parent"] == expected_output(Request("parent", list(range(10)), 12))
    assert engine.scheduler.stats.prefill_tokens == prefilled


@pytest.mark.parametrize("options", [{"depth": 2}, {"capacity": "guaranteed"}, {"max_sequences": 1}])
def test_given_no_way_to_share_then_the_fork_waits_and_gives_the_same_tokens(options: dict[str, object]) -> None:
    engine = make(**options)  # type: ignore[arg-type]
    request, shared = run_until_forked(engine)
    assert not shared
    assert finish(engine)["child"] == expected_output(request)


def test_given_too_little_memory_then_forks_preempted_and_resumed_give_the_same_tokens() -> None:
    engine = make(num_blocks=7)
    request, _ = run_until_forked(engine)
    results = finish(engine)
    assert results["child"] == expected_output(request)
    assert results["parent"] == expected_output(Request("parent", list(range(10)), 12))


def test_given_another_prompt_then_the_fork_is_refused() -> None:
    engine = make()
    engine.scheduler.add(Request("parent", list(range(10)), 12))
    engine.step()
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        engine.scheduler.fork(engine.scheduler.sequences("parent")[0], Request("child", [1, 2, 3], 4))


def test_given_one_free_lane_then_the_fork_gets_it_and_shares() -> None:
    engine = make(max_sequences=2)
    request, shared = run_until_forked(engine)
    assert shared
    assert finish(engine)["child"] == expected_output(request)


def test_given_drafts_that_are_none_then_the_fork_shares_all_the_same() -> None:
    engine = make(max_draft_tokens=2)
    scheduler = engine.scheduler
    scheduler.add(Request("parent", list(range(10)), 12))
    engine.step()
    (parent,) = scheduler.sequences("parent")
    scheduler.propose(parent, [])
    assert scheduler.fork(parent, Request("child", scheduler.token_ids(parent), 6))
    finish(engine)
