"""Leases hold blocks whose bytes come from elsewhere: they are no requests, and windows need only what will be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool import KVCacheManager, LayerSpec, ReuseScope
from kvpool.errors import InvalidArgumentError, OutOfBlocksError, UnknownRequestError
from kvpool.recording import TraceRecorder, replay_recording
from managers import FULL, make_manager, running

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)
PROMPT = list(range(40))  # ten blocks of four


def imported(manager: KVCacheManager, num_tokens: int, position: int | None = None, chunk: int = 8) -> object:
    """What the engine does with a prefix from a keyed tier."""
    lease = manager.allocate("lease", PROMPT[:num_tokens], reserve=min(chunk, num_tokens), lease=True)
    while lease.num_reserved < num_tokens:
        manager.narrow(lease, num_tokens if position is None else position)
        manager.extend(lease, min(chunk, num_tokens - lease.num_reserved))
    manager.narrow(lease, num_tokens if position is None else position)
    manager.check()
    manager.commit(lease)
    manager.check()
    return lease


def test_given_a_lease_then_it_is_not_counted_as_a_request_and_those_behind_it_hit() -> None:
    manager = make_manager()
    lease = imported(manager, 40)
    before = manager.stats()
    assert (before.requests, before.prompt_tokens) == (0, 0)
    handle = manager.allocate("r", [*PROMPT, 99])
    manager.free(lease)
    assert handle.num_cached_tokens == 40
    assert (manager.stats().requests, manager.stats().prompt_tokens) == (1, 41)
    assert manager.stats().token_hit_rate == 40 / 41
    manager.check()


def test_given_windowed_layers_then_a_lease_holds_only_what_the_next_query_reads() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    lease = imported(manager, 40)
    assert manager.get("lease").block_table(0).count(None) == 0
    assert [block is None for block in manager.get("lease").block_table(1)] == [True] * 8 + [False] * 2
    manager.free(lease)
    manager.check()
    assert manager.match_prefix([*PROMPT, 99]).num_tokens == 40


def test_given_blocks_that_no_window_holds_then_no_shorter_prompt_finds_them() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    manager.free(imported(manager, 40))
    assert manager.match_prefix([*PROMPT[:24], 99, 98]).num_tokens == 0


def test_given_a_prompt_that_ends_with_the_prefix_then_the_window_before_its_last_token_is_held() -> None:
    manager = make_manager(FULL, LayerSpec(kv_heads=1, head_dim=8, window=9), gpu_blocks=64)
    manager.free(imported(manager, 40, position=39))
    assert manager.match_prefix(PROMPT).num_tokens == 39


def test_given_windowed_blocks_short_then_a_long_prefix_still_fits_chunk_by_chunk() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=15)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("whole", PROMPT)
    lease = imported(manager, 40, chunk=4)
    manager.free(lease)
    assert manager.match_prefix([*PROMPT, 99]).num_tokens == 40


def test_given_a_cached_beginning_then_a_lease_goes_on_behind_it() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    manager.free(running(manager, "first", 16))
    lease = imported(manager, 40)
    assert lease.num_cached_blocks == 4
    manager.free(lease)
    assert manager.match_prefix([*PROMPT, 99]).num_tokens == 40


def test_given_a_lease_that_is_given_up_then_everything_is_free_again() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    lease = manager.allocate("lease", PROMPT, lease=True)
    manager.narrow(lease, 40)
    manager.free(lease)
    assert all(pool.free == pool.total for pool in manager.stats().pools)
    manager.check()


def test_given_wrong_arguments_then_they_are_refused_and_nothing_changes() -> None:
    manager = make_manager(FULL, SLIDING)
    with pytest.raises(InvalidArgumentError, match="lease"):
        manager.allocate("lease", PROMPT[:8], lease="yes")
    lease = manager.allocate("lease", PROMPT[:8], lease=True)
    for wrong in (-1, 9, 1.5):
        with pytest.raises(InvalidArgumentError, match="position"):
            manager.narrow(lease, wrong)
    manager.free(lease)
    with pytest.raises(UnknownRequestError):
        manager.narrow(lease, 4)


def test_given_a_recording_with_leases_then_it_plays_back_to_the_same_counters(tmp_path: Path) -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    with TraceRecorder(tmp_path / "leases.kvtrace").attach(manager):
        lease = imported(manager, 40)
        handle = manager.allocate("r", [*PROMPT, 99], scope=ReuseScope())
        manager.free(lease)
        manager.commit(handle)
        manager.free(handle)
    replayed = replay_recording(tmp_path / "leases.kvtrace")
    recorded = manager.stats()
    assert (replayed.requests, replayed.hit_tokens) == (recorded.requests, recorded.hit_tokens)
