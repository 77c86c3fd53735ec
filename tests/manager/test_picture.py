"""The whole cache as arrays says the same as the calls that answer one question at a time."""

from __future__ import annotations

from kvpool import KVCacheManager, LayerSpec, ReuseScope, Tier
from kvpool.manager import RunsSnapshot
from kvpool.manager.snapshots import PIECE
from managers import FULL, Clock, make_manager, running

WINDOWED = LayerSpec(kv_heads=1, head_dim=8, window=8)
FIRST, SECOND = ReuseScope(tenant="first"), ReuseScope(tenant="second")


def finished(manager: KVCacheManager, *tokens: int, scope: ReuseScope = FIRST) -> None:
    handle = manager.allocate("finished", list(tokens), scope=scope)
    manager.commit(handle, len(tokens) - handle.num_cached_tokens)
    manager.free(handle)


def branched_manager() -> KVCacheManager:
    """Two tenants; runs that part after two blocks, one of them read, one pinned, one on the host; time passes."""
    clock = Clock()
    manager = make_manager(FULL, WINDOWED, gpu_blocks=64, host_blocks=16, clock=clock)
    for scope in (FIRST, SECOND):
        for branch in range(3):
            clock.now += 1.0
            finished(manager, *range(8), *range(100 * branch + 100, 100 * branch + 108), scope=scope)
    manager.cache.offload(2)
    manager.cache.pin([*range(8), *range(200, 208)], scope=FIRST)
    running(manager, "reader", 12, first=0, scope=SECOND)
    return manager


def block_ids_of(runs: RunsSnapshot, group: int) -> list[list[int]]:
    """Of each run; in the picture they stand one after the other."""
    ends = runs.num_blocks.cumsum()
    return [runs.block_ids[group][start:end].tolist() for start, end in zip(ends - runs.num_blocks, ends, strict=True)]


def test_given_runs_of_two_tenants_then_the_picture_holds_each_as_it_is() -> None:
    manager = branched_manager()
    runs = manager.inspect.runs_snapshot()
    drawn = zip(
        runs.number.tolist(),
        runs.start.tolist(),
        runs.num_blocks.tolist(),
        runs.tier.tolist(),
        runs.priority.tolist(),
        runs.is_pinned.tolist(),
        runs.is_read.tolist(),
        [runs.scopes[place] for place in runs.scope],
        [str((block_ids_of(runs, 0)[place], block_ids_of(runs, 1)[place])) for place in range(len(runs.number))],
        strict=True,
    )
    expected = [
        (
            *(
                run.number,
                run.start,
                run.num_blocks,
                int(run.tier),
                run.priority,
                run.is_pinned,
                run.is_read,
                run.scope,
            ),
            str(tuple(ids.tolist() for ids in run.block_ids)),
        )
        for run in manager.inspect.runs()
    ]
    assert sorted(drawn, key=str) == sorted(expected, key=str)
    assert len(expected) > 6
    assert {run.tier for run in manager.inspect.runs()} == {Tier.GPU, Tier.HOST}
    assert sum(runs.is_pinned.tolist()) == sum(runs.is_read.tolist()) == 2
    assert sorted(set(runs.last_access_at.tolist())) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert runs.by_block == (False, True)


def test_given_runs_behind_others_then_each_names_the_run_that_it_continues() -> None:
    runs = branched_manager().inspect.runs_snapshot()
    for place, parent in enumerate(runs.parent.tolist()):
        if parent < 0:
            assert runs.start[place] == 0
        else:
            assert parent < place
            assert runs.start[place] == runs.start[parent] + runs.num_blocks[parent]
            assert runs.scope[place] == runs.scope[parent]
    assert (runs.parent >= 0).sum() > 3


def test_given_more_runs_than_are_read_at_once_then_every_one_is_there_with_its_parent() -> None:
    manager = make_manager(gpu_blocks=2 * PIECE + 32)
    for number in range(PIECE + 10):
        finished(manager, *range(4), *range(10 * number + 10, 10 * number + 14))
    runs = manager.inspect.runs_snapshot()
    assert len(runs.number) == PIECE + 11
    assert runs.parent.tolist() == [-1] + [0] * (PIECE + 10)
    assert sorted(runs.block_ids[0].tolist()) == sorted(
        block for run in manager.inspect.runs() for block in run.block_ids[0].tolist()
    )


def test_given_live_and_swapped_sequences_then_every_block_has_as_many_holders_as_hold_it() -> None:
    manager = branched_manager()
    live = manager.get("reader")
    manager.fork(live, "fork")
    swapped = running(manager, "swapped", 6, first=900)
    manager.swap_out(swapped)
    picture = manager.inspect.snapshot()
    assert [sequence.request_id for sequence in picture.sequences] == ["reader", "fork", "swapped"]
    assert [sequence.is_swapped for sequence in picture.sequences] == [False, False, True]
    stats = manager.stats()
    for pool in picture.pools:
        counted = stats.pool(pool.pool, pool.tier)
        assert (pool.num_blocks, pool.num_cached, pool.num_pinned) == (
            manager.inspect.num_blocks(pool.pool, pool.tier),
            counted.cached,
            counted.pinned,
        )
        assert pool.num_referenced == counted.referenced
        assert pool.is_free.sum() == counted.free
        for block_id, (count, holder) in enumerate(zip(pool.num_holders.tolist(), pool.holder.tolist(), strict=True)):
            ids = manager.inspect.block(block_id, pool=pool.pool, tier=pool.tier).request_ids
            assert count == len(ids)
            assert (picture.sequences[holder].request_id in ids) if ids else holder == -1
