"""Where lengths end: the last number of tokens that is taken, the first that is refused, and what a refusal leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheHandle, KVCacheManager, ReuseScope
from kvpool.errors import InvalidArgumentError, KVPoolError, OutOfBlocksError
from managers import cached, computed, make_manager

Pair = tuple[KVCacheManager, KVCacheHandle, KVCacheHandle]


def two(**options: Any) -> Pair:
    """Two requests with ten and six places, of which eight and four are committed."""
    manager = make_manager(**options)
    first, second = manager.allocate("a", range(8), lookahead=2), manager.allocate("b", range(50, 54), lookahead=2)
    manager.extend(first, 2)
    manager.extend(second, 2)
    manager.commit(first)
    manager.commit(second)
    return manager, first, second


def lengths(*handles: KVCacheHandle) -> list[tuple[int, int, int, int]]:
    return [(h.num_reserved, h.num_written, h.num_committed, h.num_blocks) for h in handles]


LIMITS: list[tuple[str, Callable[[KVCacheManager, KVCacheHandle, KVCacheHandle, int], Any], int]] = [
    ("commit ids", lambda m, a, b, n: m.commit(b, [7] * n), 2),
    ("commit a count", lambda m, a, b, n: m.commit(b, n), 2),
    ("commit a batch", lambda m, a, b, n: m.commit_batch([a, b], [7] * (1 + n), [1, n]), 2),
    ("write", lambda m, a, b, n: m.mark_written(b, n), 2),
    ("write a batch", lambda m, a, b, n: m.mark_written([a, b], [1, n]), 2),
    ("slots", lambda m, a, b, n: m.slot_mapping([a, b], 0, [4, n]), 8),
    ("rewind", lambda m, a, b, n: m.rewind(b, n), 6),
]


@pytest.mark.parametrize(
    ("most", "call"), [(most, call) for _, call, most in LIMITS], ids=[name for name, _, _ in LIMITS]
)
def test_given_one_token_too_many_for_one_of_two_then_the_call_is_refused_and_changes_nothing(
    most: int, call: Callable[..., Any]
) -> None:
    manager, first, second = two()
    before = lengths(first, second), first.token_ids.tolist(), second.token_ids.tolist()
    with pytest.raises(KVPoolError):
        call(manager, first, second, most + 1)
    assert (lengths(first, second), first.token_ids.tolist(), second.token_ids.tolist()) == before
    call(manager, first, second, most)
    manager.check()


@pytest.mark.parametrize(
    "extend",
    [
        lambda m, a, b, n: m.extend(a, n),
        lambda m, a, b, n: m.extend_batch([a, b], n),
        lambda m, a, b, n: m.extend_batch([b, a], [1, n]),
        lambda m, a, b, n: [m.extend_batch([a, b]) for _ in range(n)],
    ],
)
def test_given_a_longest_sequence_then_it_grows_up_to_that_and_no_further(extend: Callable[..., Any]) -> None:
    manager, first, second = two(max_seq_len=13)
    extend(manager, first, second, 3)
    assert first.num_reserved == 13
    before = lengths(first, second)
    with pytest.raises(InvalidArgumentError, match="over max_seq_len=13"):
        extend(manager, first, second, 1)
    assert lengths(first, second) == before


def test_slots_are_given_for_no_token_too_and_positions_are_checked() -> None:
    manager, first, second = two()
    pair = [first, second]
    assert manager.slot_mapping(pair, 3, 3).shape == (1, 0)
    assert manager.slot_mapping(pair, [1, 3], [1, 4]).tolist() == [[int(second.block_ids()[0]) * 4 + 3]]
    for start, stop in ((3, 2), ([0, 3], [1, 2]), (-1, 2), (0, 2**41), ([0, 0], [1, 2**41]), (0, 1.5), ([0], 1)):
        with pytest.raises(InvalidArgumentError):
            manager.slot_mapping(pair, start, stop)
    for wrong in (np.zeros((1, 3), np.int32), np.zeros((1, 4), np.int64), [[0] * 4]):
        with pytest.raises(InvalidArgumentError, match="out must be a writeable int32 array"):
            manager.slot_mapping(pair, 0, 2, out=wrong)  # type: ignore[arg-type]


def test_hits_are_counted_in_tokens_and_blocks_by_the_tier_that_had_them() -> None:
    manager = make_manager(gpu_blocks=8, host_blocks=8, eviction_policy="lru", partial_match=False)
    tokens_of, num_tokens, num_blocks = {"GPU": 0, "HOST": 0}, 0, 0
    for number, (first, length) in enumerate([(0, 10), (0, 10), (100, 9), (0, 14), (100, 17), (0, 11), (100, 5)]):
        prompt = range(first, first + length)
        for tier, tokens in manager.match_prefix(prompt).tokens_by_tier.items():
            tokens_of[tier.name] += tokens
        num_tokens, num_blocks = num_tokens + length, num_blocks + length // 4
        manager.free(computed(manager, str(number), prompt))
        if number % 2:
            manager.cache.offload(3)
        stats = manager.stats()
        assert (stats.requests, stats.prompt_tokens, stats.prompt_blocks) == (number + 1, num_tokens, num_blocks)
        assert tokens_of.items() <= stats.hit_tokens.items()
        assert {tier: tokens // 4 for tier, tokens in tokens_of.items()}.items() <= stats.hit_blocks.items()
        assert stats.miss_tokens == num_tokens - sum(tokens_of.values())
        assert stats.miss_blocks == num_blocks - sum(tokens_of.values()) // 4
    assert min(tokens_of.values()) > 0


def test_given_requests_of_one_tenant_then_its_own_guarantee_gives_way_and_that_of_others_does_not() -> None:
    for tenant, fits in (("t", True), ("u", False)):
        manager = make_manager(gpu_blocks=8, eviction_policy="lru")
        manager.cache.set_quota("t", guaranteed=4)
        cached(manager, 16, scope=ReuseScope(tenant="t"))
        pair = [manager.allocate(name, [name], scope=ReuseScope(tenant=tenant)) for name in (1, 2)]
        if fits:
            manager.extend_batch(pair, 8)
        else:
            with pytest.raises(OutOfBlocksError):
                manager.extend_batch(pair, 8)
        manager.check()


def test_given_a_rewound_request_then_its_tenant_keeps_no_more_than_its_maximum() -> None:
    manager = make_manager(gpu_blocks=8)
    manager.cache.set_quota("t", maximum=1)
    handle = computed(manager, "a", range(16), scope=ReuseScope(tenant="t"))
    manager.rewind(handle, 15)
    assert manager.stats().pool().cached <= 1
    manager.check()
