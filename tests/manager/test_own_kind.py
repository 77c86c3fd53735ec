"""A kind of layer group that kvpool does not know: a name, a class and its entry, and everything else works with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.errors import ConfigError, OutOfBlocksError
from kvpool.kinds import KINDS
from kvpool.kinds.by_block import WindowedGroup
from managers import FULL, make_manager, running


@dataclass(frozen=True)
class LastBlockSpec(LayerSpec):
    """Like a state that is kept once per block: the next query reads the block of the token before it, and no other."""

    kind = "last block"

    def max_live_blocks(self, num_tokens: int, block_size: int) -> int:
        return min(-(-num_tokens // block_size), 2)


class LastBlockGroup(WindowedGroup):
    def first_position(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1)


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    KINDS["last block"] = LastBlockGroup
    yield make_manager(FULL, LastBlockSpec(1, 8), gpu_blocks=24, host_blocks=16)
    del KINDS["last block"]


def test_given_a_kind_of_ones_own_then_the_plan_of_memory_knows_and_names_it(manager: KVCacheManager) -> None:
    assert manager.config.blocks_for(100) == (25, 2)
    assert "group 1: last block, 1 layers of 1 heads x 8 bfloat16 (K and V)" in manager.config.explain()


def test_given_a_kind_without_a_class_then_the_registry_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no class for layers of kind 'last block': add one to kvpool\.kinds\.KINDS"):
        KVCacheManager(KVCacheConfig([LastBlockSpec(1, 8)], block_size=4, gpu_blocks=8))


def test_given_a_kind_of_ones_own_when_a_sequence_runs_then_it_keeps_what_the_kind_reads(
    manager: KVCacheManager,
) -> None:
    handle = running(manager, "a", 10)
    assert [block is not None for block in handle.block_table(0)] == [True] * 3
    assert [block is not None for block in handle.block_table(1)] == [False, False, True]
    manager.check()


def test_given_a_kind_of_ones_own_when_a_prompt_comes_again_then_its_end_is_reused(manager: KVCacheManager) -> None:
    manager.free(running(manager, "a", 8))
    again = manager.allocate("b", [*range(8), 99])
    assert again.num_cached_tokens == 8
    manager.check()


def test_given_a_kind_of_ones_own_when_requests_come_fork_swap_and_go_then_the_books_agree(
    manager: KVCacheManager,
) -> None:
    rng = random.Random(7)
    for number in range(200):
        try:
            verb = rng.choice(["new", "new", "step", "fork", "rewind", "swap", "free"])
            live = [handle for handle in manager.handles if handle.swapped is None]
            if verb == "new" or not live:
                running(manager, number, rng.randint(1, 20), first=rng.choice((0, 0, 100)))
            elif verb == "step":
                manager.extend_batch(live)
                manager.commit_batch(live, [rng.randint(0, 9) for _ in live])
            elif verb == "fork":
                manager.fork(rng.choice(live), number)
            elif verb == "rewind":
                handle = rng.choice(live)
                manager.rewind(handle, min(1, handle.num_reserved - handle.num_written))
            elif verb == "swap":
                handle = rng.choice(live)
                manager.swap_out(handle)
                manager.swap_in(handle)
            else:
                manager.free(rng.choice(live))
        except OutOfBlocksError:
            for handle in list(manager.handles)[::2]:
                manager.free(handle)
        manager.check()
    assert manager.stats().requests > 40
