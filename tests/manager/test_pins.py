from __future__ import annotations

from typing import Any

import pytest

from kvpool import KVCacheManager, LayerSpec, ReuseScope, Tier
from kvpool.errors import InvalidArgumentError, OutOfBlocksError, PinBudgetError, UnknownRequestError
from managers import FULL, cached, make_manager

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=4)


def pinned(manager: KVCacheManager, tier: Tier = Tier.GPU) -> int:
    manager.check()
    return manager.stats().pool(tier=tier).pinned


def test_a_pinned_prefix_stays_while_everything_else_goes() -> None:
    manager = make_manager()
    tokens = cached(manager, 16)
    pin = manager.cache.pin(tokens[:9])
    assert pin.num_tokens == 8  # whole blocks
    assert pinned(manager) == 2
    assert manager.cache.evict(100) == 2
    assert manager.match_prefix([*tokens, 1]).num_blocks == 2


def test_pinned_blocks_cannot_be_had_by_a_request() -> None:
    manager = make_manager(gpu_blocks=4)
    manager.cache.pin(cached(manager, 8))
    with pytest.raises(OutOfBlocksError, match="2 pinned"):
        manager.allocate("a", num_tokens=12)


def test_a_handle_pins_what_it_has_committed() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(12)), scope=ReuseScope(tenant="t"))
    manager.commit(handle, 10)
    assert manager.cache.pin(handle).num_tokens == 8
    assert pinned(manager) == 0  # the request reads them: nothing of it is idle
    manager.commit(handle, 2)  # and goes on
    manager.free(handle)
    assert pinned(manager) == 2


def test_a_pin_on_the_part_of_a_run_that_is_still_written_cuts_it() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(16)))
    manager.commit(handle, 12)
    manager.cache.pin(list(range(4)))
    manager.commit(handle, 4)
    manager.free(handle)
    manager.cache.evict(100)
    assert manager.match_prefix([*range(16), 1]).num_blocks == 1


def test_pins_of_one_prefix_count_once_and_end_one_by_one() -> None:
    manager = make_manager(max_pinned_tokens=16)
    tokens = cached(manager, 16)
    short, long = manager.cache.pin(tokens[:8]), manager.cache.pin(tokens)
    again = manager.cache.pin(tokens)
    assert pinned(manager) == 4
    manager.cache.unpin(long)
    manager.cache.unpin(short)
    assert pinned(manager) == 4
    manager.cache.unpin(again)
    assert pinned(manager) == 0
    assert manager.cache.evict(100) == 4


def test_the_budget_counts_shared_tokens_once_and_names_itself() -> None:
    manager = make_manager(max_pinned_tokens=12)
    tokens, other = cached(manager, 16), cached(manager, 8, first=50)
    manager.cache.pin(tokens[:8])
    manager.cache.pin(tokens[:12])
    with pytest.raises(PinBudgetError, match="8 more tokens would exceed max_pinned_tokens=12"):
        manager.cache.pin(other)
    assert pinned(manager) == 3


def test_half_of_the_pool_may_be_pinned_by_default() -> None:
    manager = make_manager(gpu_blocks=8)
    tokens = cached(manager, 32)
    with pytest.raises(PinBudgetError):
        manager.cache.pin(tokens)
    manager.cache.pin(tokens[:16])


def test_what_is_not_cached_cannot_be_pinned() -> None:
    manager = make_manager()
    cached(manager, 8)
    for tokens in ([1], [9, 9, 9, 9], []):
        with pytest.raises(InvalidArgumentError, match="cached"):
            manager.cache.pin(tokens)
    with pytest.raises(InvalidArgumentError):
        manager.cache.pin(list(range(8)), ReuseScope(tenant="other"))


def test_a_pin_ends_once() -> None:
    manager, other = make_manager(), make_manager()
    pin = manager.cache.pin(cached(manager, 8))
    with pytest.raises(InvalidArgumentError, match="not active here"):
        other.cache.unpin(pin)
    manager.cache.unpin(pin)
    with pytest.raises(InvalidArgumentError, match=f"pin {pin.pin_id}"):
        manager.cache.unpin(pin)
    with pytest.raises(InvalidArgumentError, match="'x'"):
        manager.cache.unpin("x")
    with pytest.raises(InvalidArgumentError, match="pin\\(\\) returned"):
        manager.cache.is_pinned("x")
    handle = manager.allocate("a", [1])
    manager.free(handle)
    with pytest.raises(UnknownRequestError):
        manager.cache.pin(handle)


def test_a_pin_with_a_time_ends_with_it() -> None:
    now = [0.0]
    manager = make_manager(clock=lambda: now[0])
    tokens = cached(manager, 8)
    brief, lasting = manager.cache.pin(tokens[:4], ttl=5.0), manager.cache.pin(tokens[:4])
    now[0] = 5.0
    assert (manager.cache.is_pinned(brief), manager.cache.is_pinned(lasting)) == (False, True)
    assert pinned(manager) == 1
    with pytest.raises(InvalidArgumentError):
        manager.cache.unpin(brief)
    manager.cache.unpin(lasting)
    assert pinned(manager) == 0


@pytest.mark.parametrize("ttl", [0, -1.0, True, "5", float("nan")])
def test_a_pin_lasts_a_positive_number_of_seconds(ttl: Any) -> None:
    manager = make_manager()
    tokens = cached(manager, 8)
    with pytest.raises(InvalidArgumentError, match="ttl"):
        manager.cache.pin(tokens, ttl=ttl)


def test_an_invalidated_prefix_voids_its_pins() -> None:
    manager = make_manager()
    tokens = cached(manager, 16)
    pin, upper = manager.cache.pin(tokens), manager.cache.pin(tokens[:4])
    assert manager.cache.invalidate(tokens[:8]) == 3
    assert pinned(manager) == 1  # the pin that ends above goes on
    with pytest.raises(InvalidArgumentError):
        manager.cache.unpin(pin)
    manager.cache.unpin(upper)
    assert manager.cache.evict(100) == 1


def test_pins_on_a_run_that_is_read_are_void_after_a_reset_too() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(8)))
    manager.commit(handle, 8)
    manager.cache.pin(handle)
    manager.cache.reset()
    manager.free(handle)
    assert manager.inspect.num_free_blocks() == 16
    assert pinned(manager) == 0


# --- windows ---------------------------------------------------------------------------------------------------------


def test_a_pin_keeps_of_a_windowed_group_what_the_next_token_would_read() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    tokens = cached(manager, 32)
    manager.cache.pin(tokens)
    assert pinned(manager) == 8 + 1 + 2  # the whole prefix, the sink block and the window
    manager.cache.evict(100)
    assert manager.stats().pool().cached == 11
    assert manager.match_prefix([*tokens, 1]).num_blocks == 8


def test_windowed_blocks_that_are_read_become_pinned_when_their_reader_leaves() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = manager.allocate("a", list(range(16)))
    manager.commit(handle, 16)
    pin, twice = manager.cache.pin(handle), manager.cache.pin(handle)
    assert pinned(manager) == 0
    manager.free(handle)
    assert pinned(manager) == 4 + 1 + 2
    reader = manager.allocate("b", [*range(16), 1])
    assert pinned(manager) == 0
    manager.free(reader)
    manager.cache.unpin(pin)
    assert pinned(manager) == 4 + 1 + 2
    manager.cache.unpin(twice)
    assert pinned(manager) == 0
    assert manager.cache.evict(100) == 8


def test_a_void_pin_keeps_nothing_in_the_part_of_its_prefix_that_stays() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    tokens = cached(manager, 16)
    manager.cache.pin(tokens)
    manager.cache.invalidate(tokens)  # the last block only
    assert pinned(manager) == 0
    manager.cache.evict(100)
    assert manager.stats().pool().free == 64


def test_blocks_that_a_window_lost_before_are_not_pinned() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = manager.allocate("a", list(range(32)))
    manager.commit(handle, 32)
    manager.cache.evict(5)  # sliding blocks 1 to 5
    pin = manager.cache.pin(list(range(16)))
    manager.free(handle)
    assert pinned(manager) == 4 + 1
    manager.cache.unpin(pin)
    assert pinned(manager) == 0


# --- tiers -----------------------------------------------------------------------------------------------------------


def test_a_prefix_can_be_pinned_where_it_lies_and_stays_pinned_when_it_moves_up() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=32, host_blocks=32)
    tokens = cached(manager, 8)
    manager.cache.offload(4)
    pin = manager.cache.pin(tokens)
    assert pinned(manager, Tier.HOST) == 4  # of both groups
    assert manager.cache.evict(100, tier=Tier.HOST) == 0
    assert manager.cache.onboard([*tokens, 1]) == 2
    assert (pinned(manager, Tier.HOST), pinned(manager)) == (0, 4)
    manager.cache.unpin(pin)
    assert pinned(manager) == 0


def test_pinned_runs_are_not_offloaded() -> None:
    manager = make_manager(host_blocks=8)
    manager.cache.pin(cached(manager, 8))
    assert manager.cache.offload(2) == 0


def test_a_pin_of_a_request_takes_the_images_of_that_request_and_no_others() -> None:
    manager = make_manager()
    handle = manager.allocate("a", [9] * 8, multimodal=[(0, 8, "cat")])
    manager.commit(handle)
    with pytest.raises(InvalidArgumentError, match="multimodal items of a request are known"):
        manager.cache.pin(handle, multimodal=[(0, 8, "dog")])
    assert pinned(manager) == 0
    assert manager.cache.pin(handle).num_tokens == 8
