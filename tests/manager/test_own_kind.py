"""A kind of layer group that kvpool does not know: one class, and everything else works with it."""

from __future__ import annotations

import random

import pytest

from kvpool import GroupKind, KVCacheManager, LayerSpec
from kvpool.errors import OutOfBlocksError
from kvpool.kinds import KINDS
from kvpool.kinds.window import WindowedGroup
from managers import FULL, make_manager, running


class LastBlockGroup(WindowedGroup):
    """Like a state that is kept once per block: the next query reads the block of the token before it, and no other."""

    def first_position(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> KVCacheManager:
    monkeypatch.setitem(KINDS, GroupKind.SLIDING, LastBlockGroup)
    return make_manager(FULL, LayerSpec(1, 8, window=64), gpu_blocks=24, host_blocks=16)


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
