"""What travels to the page: a copy made from a snapshot and the frames behind it is what the manager holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from following import WINDOWED, Mirror, Random, unpacked

from kvpool import KVCacheHandle, LayerSpec, ReuseScope, Tier
from kvpool.manager.inspection import BlockState
from kvpool.view.frames import MAX_RUNS, MAX_SEQUENCES, frame
from kvpool.view.sampling import CACHED, FREE, PINNED, REFERENCED, Look, Sampler, changed_spans, id_spans, pack_words
from managers import FULL, cached, make_manager, running

STATES = {
    BlockState.FREE: FREE,
    BlockState.REFERENCED: REFERENCED,
    BlockState.CACHED: CACHED,
    BlockState.PINNED: PINNED,
}
MODELS = {"full": (FULL,), "windowed": (FULL, WINDOWED), "only windowed": (WINDOWED,)}


def sent(old: Look | None, new: Look) -> dict[str, object]:
    """A frame as it comes out of JSON."""
    result: dict[str, object] = json.loads(json.dumps(frame(old, new)))
    return result


def tables_of(handle: KVCacheHandle, traffic: Random) -> list[list[int]]:
    groups = range(len(traffic.manager.config.groups))
    return [(handle.swapped[group] if handle.swapped else handle.block_ids(group)).tolist() for group in groups]


def check_against_the_manager(mirror: Mirror, traffic: Random) -> None:
    manager = traffic.manager
    holders = {str(handle.request_id): handle.scope.tenant for handle in traffic.live}
    for (pool, tier), words in mirror.words.items():
        assert len(words) == manager.inspect.num_blocks(pool, Tier[tier])
        for block_id, word in enumerate((words >> np.uint64(32)).tolist()):
            block = manager.inspect.block(block_id, pool=pool, tier=Tier[tier])
            assert word & 7 == STATES[block.state], block
            if block.state is not BlockState.FREE:
                assert word >> 3 & 31 == min(block.ref_count, 31), block
            if block.request_ids:
                assert mirror.rest["tenants"][word >> 16] == holders[str(block.request_ids[0])]


@pytest.mark.quick("0-full")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_given_random_operations_when_frames_are_applied_then_every_block_is_as_the_manager_says(
    seed: int, model: str
) -> None:
    traffic, mirror, late, old = Random(seed, *MODELS[model]), Mirror(), Mirror(), None
    sampler = Sampler(traffic.manager, runs_seconds=0.0)
    for number in range(120):
        traffic.step()
        if number % 3 == 0:
            sampler._runs_due = 0.0  # also where the last walk took long
            look = sampler.look()
            mirror.apply(sent(old, look))
            late.apply(sent(None, look))
            assert {key: words.tolist() for key, words in mirror.words.items()} == {
                key: words.tolist() for key, words in late.words.items()
            }
            assert mirror.tables == late.tables
            assert mirror.tables == {handle.serial: tables_of(handle, traffic) for handle in traffic.live}
            check_against_the_manager(mirror, traffic)
            old = look
    traffic.manager.check()


@pytest.mark.parametrize("seed", range(3))
def test_given_a_walk_that_is_not_due_when_looks_go_on_then_states_and_holders_are_right_all_the_same(
    seed: int,
) -> None:
    traffic, mirror, old = Random(seed), Mirror(), None
    sampler = Sampler(traffic.manager, runs_seconds=1e9)
    for _ in range(100):
        traffic.step()
        look = sampler.look()
        mirror.apply(sent(old, look))
        old = look
        for pool in traffic.manager.stats().pools:
            words = mirror.words[pool.pool, pool.tier.name] >> np.uint64(32)
            states = np.bincount((words & np.uint64(7)).astype(np.int64), minlength=4)
            assert states[FREE] == pool.free
            assert states[REFERENCED] == pool.referenced
            assert states[CACHED] + states[PINNED] == pool.cached


def test_given_a_cached_prompt_then_its_blocks_carry_tenant_priority_and_time_of_last_use() -> None:
    manager = make_manager()
    cached(manager, 16, scope=ReuseScope(tenant="acme"))
    (pool,) = [pool for pool in Sampler(manager).look().pools if pool.tier == Tier.GPU]
    words = pool.words[(pool.words >> np.uint64(32)) & np.uint64(7) == CACHED]
    assert len(words) == 4
    assert set((words >> np.uint64(48)).tolist()) == {1}
    assert set((words >> np.uint64(40) & np.uint64(255)).tolist()) == {35}
    assert set((words & np.uint64(2**32 - 1)).tolist()) == {1 << 30}


def test_given_nothing_happened_when_a_frame_is_made_then_it_brings_nothing() -> None:
    manager = make_manager()
    running(manager, "a", 10)
    sampler = Sampler(manager)
    old, new = sampler.look(), sampler.look()
    told = sent(old, new)
    assert set(told) == {"number", "after", "now", "look_us", "pools"}
    assert all("spans" not in pool for pool in told["pools"])  # type: ignore[attr-defined]


def test_given_prompts_when_frames_are_made_then_none_of_their_tokens_is_in_them() -> None:
    manager = make_manager(gpu_blocks=64)
    sampler = Sampler(manager)
    sampler.start()
    cached(manager, 16, first=731_000)
    running(manager, "a", 16, first=733_000)
    look = sampler.look()
    sampler.stop()
    assert [type(event).__name__ for event in look.events].count("Stored") >= 2
    text = json.dumps(frame(None, look))
    assert not any(str(token) in text for first in (731_000, 733_000) for token in range(first, first + 16))
    assert set(sent(None, look)["events"][0]) <= {
        "id",
        "kind",
        "blocks",
        "digest",
        "group",
        "tier",
        "tenant",
        "priority",
    }  # type: ignore[index]


def test_given_nobody_watches_then_the_manager_computes_no_events() -> None:
    manager = make_manager()
    sampler = Sampler(manager)
    assert not manager.events.listening
    sampler.start()
    assert manager.events.listening
    sampler.stop()
    assert not manager.events.listening


def test_given_a_look_then_the_manager_is_as_it_was() -> None:
    traffic = Random(5)
    for _ in range(60):
        traffic.step()
    before, calls = traffic.manager.inspect.snapshot().tick, []
    traffic.manager.on_operation(lambda: calls.append(1))
    Sampler(traffic.manager).look()
    assert traffic.manager.inspect.snapshot().tick == before
    assert calls == []


def test_given_a_tree_when_it_is_told_then_parents_stand_before_children_and_name_their_blocks() -> None:
    manager = make_manager(gpu_blocks=64)
    system = list(range(8))
    for number in range(3):
        handle = manager.allocate(number, [*system, *range(100 * number + 50, 100 * number + 58)])
        manager.commit(handle)
        manager.free(handle)
    tree = sent(None, Sampler(manager).look())["tree"]
    kinds = {"parent": "<i4", "blocks": "<u4", "ids_at": "<u4"}
    parent, blocks, at = (unpacked(tree[name], kind) for name, kind in kinds.items())  # type: ignore[index]
    assert parent.tolist() == [-1, 0, 0, 0]
    assert blocks.tolist() == [2, 2, 2, 2]
    pairs = unpacked(tree["ids"], "<i4").reshape(-1, 2)  # type: ignore[index]
    held = [
        sorted(i for first, many in pairs[at[run] : at[run + 1]] for i in range(first, first + many))
        for run in range(4)
    ]
    assert sorted(map(tuple, held)) == sorted(tuple(run.block_ids[0].tolist()) for run in manager.inspect.runs())


def test_given_more_runs_than_are_told_then_those_nearest_to_the_top_are_and_their_number_is_right() -> None:
    manager = make_manager(LayerSpec(kv_heads=1, head_dim=8), gpu_blocks=2 * MAX_RUNS, block_size=1)
    top = manager.allocate("top", [7, 7])
    manager.commit(top)
    for number in range(MAX_RUNS + 10):
        handle = manager.allocate(number, [7, 7, 100 + number])
        manager.commit(handle, 1)
        manager.free(handle)
    tree = sent(None, Sampler(manager).look())["tree"]
    parent = unpacked(tree["parent"], "<i4")  # type: ignore[index]
    assert tree["num_runs"] == MAX_RUNS + 11  # type: ignore[index]
    assert len(parent) == MAX_RUNS
    assert (parent < np.arange(MAX_RUNS)).all()


def test_given_more_sequences_than_are_told_then_their_number_is_right() -> None:
    manager = make_manager(gpu_blocks=2 * MAX_SEQUENCES)
    for number in range(MAX_SEQUENCES + 3):
        running(manager, number, 3, first=10 * number)
    told = sent(None, Sampler(manager).look())
    assert told["num_sequences"] == MAX_SEQUENCES + 3
    assert len(told["sequences"]) == len(told["tables"]) == MAX_SEQUENCES  # type: ignore[arg-type]


def test_given_equal_neighbours_when_spans_are_made_then_they_are_one_span() -> None:
    old, new = np.zeros(8, np.uint64), np.array([0, 5, 5, 5, 6, 0, 0, 6], np.uint64)
    spans = changed_spans(old, new)
    assert list(zip(*(part.tolist() for part in spans), strict=True)) == [(1, 3, 5), (4, 1, 6), (7, 1, 6)]
    assert [len(part) for part in changed_spans(new, new)] == [0, 0, 0]


def test_given_lists_of_ids_when_spans_are_made_then_no_span_crosses_a_list() -> None:
    ids = np.array([3, 4, 5, 6, -1, -1, 9], np.int32)
    pairs, at = id_spans(ids, np.array([2, 0, 5]))
    assert pairs.tolist() == [3, 2, 5, 2, -1, 2, 9, 1]
    assert at.tolist() == [0, 1, 1, 4]
    assert id_spans(ids[:0], np.array([0])).at.tolist() == [0, 0]


def test_given_a_free_block_then_its_word_is_zero_whatever_is_remembered_of_it() -> None:
    ones = np.ones(1, np.uint32)
    assert pack_words(ones * FREE, ones, ones, ones, ones).tolist() == [0]
    assert pack_words(ones * REFERENCED, ones * 99, ones * 35, ones * 2, ones * 7).tolist() == [
        (REFERENCED | 31 << 3 | 35 << 8 | 2 << 16) << 32
    ]
