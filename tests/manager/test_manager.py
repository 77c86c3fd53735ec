"""The facade: what it refuses, and that refusing changes nothing. What it does is tested with the parts that do it."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvpool.manager
import managers
from kvpool import (
    AllocStatus,
    KVCacheConfig,
    KVCacheHandle,
    KVCacheManager,
    KVPoolError,
    LayerSpec,
    ReuseScope,
    Tier,
    eviction,
    register_policy,
)
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    NeverFitsError,
    SequenceStateError,
    UnknownRequestError,
)
from kvpool.eviction import LRUPolicy, Run
from kvpool.replay import LFUPolicy
from managers import FULL

CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)

Call = Callable[[KVCacheManager, KVCacheHandle], Any]


make_manager = partial(managers.make_manager, host_blocks=8)


def with_one_request(manager: KVCacheManager) -> KVCacheHandle:
    handle = manager.allocate("live", list(range(10)))
    manager.commit(handle, 10)
    return handle


def picture(manager: KVCacheManager) -> Any:
    handles = [
        (h.request_id, h.num_reserved, h.num_written, h.num_committed, h.is_swapped, h.block_table(), list(h.token_ids))
        for h in manager.handles
    ]
    stats = manager.stats().to_dict()
    stats.pop("allocation_failures")
    stats.pop("extend_failures")
    return handles, stats, len(manager._cache.copies), manager._cache.rows.live_rows()


def refuse(call: Call, error: type[KVPoolError], match: str | None = None) -> None:
    """The call raises this very error, names the value, and leaves everything as it was."""
    manager = make_manager()
    handle = with_one_request(manager)
    before = picture(manager)
    with pytest.raises(error, match=match):
        call(manager, handle)
    assert picture(manager) == before
    manager.check()


# --- construction ----------------------------------------------------------------------------------------------------


def test_the_example_in_the_documentation_works() -> None:
    assert doctest.testmod(kvpool.manager).failed == 0


def test_a_policy_may_be_a_name_or_a_class_and_overrides_the_configuration() -> None:
    config = KVCacheConfig([FULL], gpu_blocks=8, eviction_policy="fifo")
    for policy, expected in ((None, "fifo"), ("lfu", "lfu"), (LRUPolicy, "lru")):
        assert KVCacheManager(config, policy=policy)._cache.orders.policies[0].name == expected


def test_a_policy_of_ones_own_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_POLICIES", dict(eviction._POLICIES))  # tests that draw policies draw the same ones

    @register_policy("test-manager-own")
    class Own(LFUPolicy):
        pass

    manager = make_manager(eviction_policy="test-manager-own")
    policy: Any = manager._cache.orders.policies[0]
    assert (policy.name, type(policy.policy)) == ("test-manager-own", Own)


@pytest.mark.parametrize("error", [KeyError("scores"), IndexError("out of my list"), LookupError("lost")])
def test_a_policy_that_fails_with_candidates_left_is_heard_and_not_taken_for_a_full_cache(
    error: LookupError, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(LRUPolicy):
        def victim(self) -> Any:
            raise error

    evict_one(Broken)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    assert "'lru' (Broken) failed" in record.message


@pytest.mark.parametrize("chosen", [None, "a run", Run()])
def test_a_policy_that_names_what_is_no_candidate_is_heard_and_the_oldest_run_goes(
    chosen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(LRUPolicy):
        def victim(self) -> Any:
            return chosen

    evict_one(Wrong)
    assert "is no candidate; return a run that was added last" in caplog.text


def evict_one(policy: type[LRUPolicy]) -> None:
    """The older of two cached prompts gives way to a third."""
    manager = KVCacheManager(KVCacheConfig([FULL], gpu_blocks=4, block_size=4, watermark=0.0), policy=policy)
    for start in (0, 50, 100):
        handle = manager.allocate(start, list(range(start, start + 8)))
        manager.commit(handle, 8)
        manager.free(handle)
    manager.check()
    assert [manager.match_prefix([*range(start, start + 9)]).num_tokens for start in (0, 50, 100)] == [0, 8, 8]


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ("no such policy", "'no such policy'"),
        (5, "5"),
        (object(), "object"),
        (LRUPolicy(), "needs an instance of its own"),
        (len, "cannot be called without arguments"),
        (dict, "does not make an EvictionPolicy"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(policy: Any, problem: str) -> None:
    with pytest.raises(KVPoolError, match=problem):
        KVCacheManager(KVCacheConfig([FULL], gpu_blocks=8), policy=policy)


@pytest.mark.parametrize("config", [None, {}, "config", FULL])
def test_a_manager_takes_a_configuration(config: Any) -> None:
    with pytest.raises(ConfigError, match=type(config).__name__):
        KVCacheManager(config)


# --- token ids -------------------------------------------------------------------------------------------------------

BAD_TOKENS = [
    (5, "one-dimensional"),
    ("abc", "one-dimensional"),
    ([[1, 2], [3, 4]], r"\(2, 2\)"),
    ([[1], [2, 3]], "rectangular"),
    ([1.0, 2.0], "float64"),
    ([True, False], "bool"),
    (["a"], "integers"),
    ([None], "object"),
    ([1, -7], "-7"),
    (np.array([-7], np.int32), "-7"),
    (np.array([3, -7], np.int8), "-7"),
    ([2**31], "2147483648"),
    (np.array([2**31], np.uint32), "2147483648"),
    ([2**70], "object"),
    (np.array([1, 2], np.complex64), "complex64"),
]


@pytest.mark.parametrize(("tokens", "named"), BAD_TOKENS)
@pytest.mark.parametrize(
    "call",
    [
        lambda m, h, t: m.allocate("new", t),
        lambda m, h, t: m.can_allocate(t),
        lambda m, h, t: m.match_prefix(t),
        lambda m, h, t: m.commit_batch([h], t, [1]),
        lambda m, h, t: m.cache.pin(t),
        lambda m, h, t: m.cache.onboard(t),
        lambda m, h, t: m.cache.invalidate(t),
    ],
    ids=["allocate", "can_allocate", "match_prefix", "commit_batch", "pin", "onboard", "invalidate"],
)
def test_token_ids_are_one_row_of_integers_below_2_to_31(call: Any, tokens: Any, named: str) -> None:
    refuse(lambda m, h: call(m, h, tokens), InvalidArgumentError, named)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64, ">i4"])
def test_every_kind_of_integer_array_is_welcome(dtype: Any) -> None:
    manager = make_manager()
    handle = manager.allocate("a", np.arange(9, dtype=dtype))
    manager.commit(handle, np.arange(9, dtype=dtype))
    assert manager.match_prefix(list(range(9))).num_tokens == 8


def test_the_array_of_the_caller_is_read_and_not_kept() -> None:
    manager = make_manager()
    tokens = np.arange(16, dtype=np.int32)
    handle = manager.allocate("a", tokens[::2])
    tokens[:] = 0
    manager.commit(handle, 8)
    assert handle.token_ids.tolist() == list(range(0, 16, 2))
    handle.token_ids[:] = 99  # a copy as well
    assert handle.token_ids[0] == 0


@pytest.mark.parametrize("arguments", [{}, {"tokens": [1], "num_tokens": 1}, {"tokens": []}, {"num_tokens": 0}])
def test_a_prompt_is_given_in_one_way(arguments: dict[str, Any]) -> None:
    refuse(lambda m, h: m.allocate("new", **arguments), InvalidArgumentError)
    refuse(lambda m, h: m.can_allocate(**arguments), InvalidArgumentError)


# --- counts ----------------------------------------------------------------------------------------------------------

COUNTS: list[tuple[str, Callable[[KVCacheManager, KVCacheHandle, Any], Any]]] = [
    ("num_tokens", lambda m, h, n: m.allocate("new", num_tokens=n)),
    ("reserve", lambda m, h, n: m.allocate("new", [1, 2], reserve=n)),
    ("lookahead", lambda m, h, n: m.allocate("new", [1, 2], lookahead=n)),
    ("cross_tokens", lambda m, h, n: m.allocate("new", [1, 2], cross_tokens=n)),
    ("num_tokens", lambda m, h, n: m.can_allocate(num_tokens=n)),
    ("lookahead", lambda m, h, n: m.can_allocate([1], lookahead=n)),
    ("cross_tokens", lambda m, h, n: m.can_allocate([1], cross_tokens=n)),
    ("num_tokens", lambda m, h, n: m.extend(h, n)),
    ("lookahead", lambda m, h, n: m.extend(h, 1, n)),
    ("num_tokens", lambda m, h, n: m.extend_batch([h], [n])),
    ("num_tokens", lambda m, h, n: m.mark_written(h, n)),
    ("num_tokens", lambda m, h, n: m.rewind(h, n)),
    ("num_tokens", lambda m, h, n: m.blocks_needed(h, n)),
    ("lookahead", lambda m, h, n: m.blocks_needed(h, 1, n)),
    ("num_blocks", lambda m, h, n: m.cache.evict(n)),
    ("num_blocks", lambda m, h, n: m.cache.offload(n)),
    ("num_blocks", lambda m, h, n: m.cache.resize(n)),
    ("num_tokens", lambda m, h, n: m.commit_batch([h], None, [n])),
    ("pool", lambda m, h, n: m.cache.evict(1, pool=n)),
    ("pool", lambda m, h, n: m.cache.offload(1, pool=n)),
    ("pool", lambda m, h, n: m.cache.resize(4, pool=n)),
    ("pool", lambda m, h, n: m.inspect.num_free_blocks(n)),
    ("group", lambda m, h, n: h.block_ids(n)),
    ("group", lambda m, h, n: h.block_table(n)),
]


@pytest.mark.parametrize("value", [-1, -(2**70), 2**70, True, 1.5, "1", b"1", [[1]], {}, np.float32(1), np.bool_(True)])
@pytest.mark.parametrize(("name", "call"), COUNTS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(COUNTS)])
def test_a_count_is_an_integer_in_its_range(name: str, call: Any, value: Any) -> None:
    refuse(lambda m, h: call(m, h, value), InvalidArgumentError, name)


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2), np.int32(2)])
def test_numpy_integers_are_counts(number: Any) -> None:
    manager = make_manager(FULL, CROSS)
    handle = manager.allocate("a", num_tokens=number, lookahead=number, cross_tokens=number)
    manager.extend(handle, number, number)
    manager.commit(handle, number)
    manager.rewind(handle, number)
    assert manager.blocks_needed(handle, number) == (0,)
    assert manager.cache.evict(number) == 0
    assert handle.num_reserved == 2


@pytest.mark.parametrize("num_tokens", [[1, 2], [], [[1]], [1.0], [-1], [2**50], [[1], [2, 3]], None, "ab"])
def test_counts_per_sequence_fit_the_batch(num_tokens: Any) -> None:
    refuse(lambda m, h: m.extend_batch([h], num_tokens), InvalidArgumentError)
    refuse(lambda m, h: m.mark_written([h], num_tokens), InvalidArgumentError)


def test_a_huge_request_is_refused_without_trying() -> None:
    refuse(lambda m, h: m.allocate("new", num_tokens=2**40), NeverFitsError, str(2**38))
    refuse(lambda m, h: m.extend(h, 2**40), NeverFitsError)
    assert make_manager().can_allocate(num_tokens=2**40).status is AllocStatus.NEVER


# --- handles ---------------------------------------------------------------------------------------------------------

HANDLE_CALLS: dict[str, Callable[[KVCacheManager, Any], Any]] = {
    "extend": lambda m, h: m.extend(h),
    "extend_batch": lambda m, h: m.extend_batch([h]),
    "slot_mapping": lambda m, h: m.slot_mapping([h], 0, 1),
    "mark_written": lambda m, h: m.mark_written([h]),
    "commit": lambda m, h: m.commit(h, [1]),
    "commit a count": lambda m, h: m.commit(h, 1),
    "commit the rest": lambda m, h: m.commit(h, None),
    "commit_batch": lambda m, h: m.commit_batch([h], [1]),
    "rewind": lambda m, h: m.rewind(h, 1),
    "fork": lambda m, h: m.fork(h, "child"),
    "free": lambda m, h: m.free(h),
    "free_batch": lambda m, h: m.free_batch([h]),
    "batch": lambda m, h: m.batch([h]),
    "blocks_needed": lambda m, h: m.blocks_needed(h),
    "store_last_logits": lambda m, h: m.store_last_logits(h, 1),
    "can_swap_out": lambda m, h: m.can_swap_out(h),
    "swap_out": lambda m, h: m.swap_out(h),
    "can_swap_in": lambda m, h: m.can_swap_in(h),
    "swap_in": lambda m, h: m.swap_in(h),
}


@pytest.mark.parametrize("name", HANDLE_CALLS)
def test_a_handle_of_another_manager_is_refused(name: str) -> None:
    stranger = make_manager().allocate("stranger", [1, 2, 3])
    refuse(lambda m, h: HANDLE_CALLS[name](m, stranger), UnknownRequestError, "'stranger' belongs to another manager")


@pytest.mark.parametrize("name", HANDLE_CALLS)
def test_a_handle_that_was_freed_is_refused(name: str) -> None:
    def call(manager: KVCacheManager, handle: KVCacheHandle) -> None:
        HANDLE_CALLS[name](manager, gone[0])

    manager = make_manager()
    handle = with_one_request(manager)
    gone = [manager.allocate("gone", [1])]
    manager.free(gone[0])
    before = picture(manager)
    with pytest.raises(UnknownRequestError, match="'gone' was freed"):
        call(manager, handle)
    assert picture(manager) == before


@pytest.mark.parametrize("name", HANDLE_CALLS)
@pytest.mark.parametrize("value", [None, "live", 0, object()], ids=["None", "an id", "0", "an object"])
def test_what_is_no_handle_is_refused(name: str, value: Any) -> None:
    refuse(lambda m, h: HANDLE_CALLS[name](m, value), UnknownRequestError, "KVCacheHandle")


@pytest.mark.parametrize("batch", [None, 5, object()])
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    for call in ("extend_batch", "batch", "free_batch", "mark_written"):
        refuse(lambda m, h, call=call: getattr(m, call)(batch), InvalidArgumentError, "sequence of handles")


# --- ids, scopes and the rest ----------------------------------------------------------------------------------------


def test_a_request_id_may_be_anything_hashable() -> None:
    manager = make_manager()
    for request_id in (0, None, ("a", 1), "text", frozenset({1})):
        handle = manager.allocate(request_id, [1])
        assert manager.get(request_id) is handle
    assert [handle.request_id for handle in manager.handles] == [0, None, ("a", 1), "text", frozenset({1})]


@pytest.mark.parametrize("request_id", [[1], {}, {1}])
def test_a_request_id_that_cannot_be_hashed_is_refused(request_id: Any) -> None:
    refuse(lambda m, h: m.allocate(request_id, [1]), InvalidArgumentError, "hashable")
    refuse(lambda m, h: m.fork(h, request_id), InvalidArgumentError, "hashable")
    refuse(lambda m, h: m.get(request_id), InvalidArgumentError, "hashable")


def test_a_handle_is_no_request_id() -> None:
    refuse(lambda m, h: m.allocate(h, [1]), InvalidArgumentError, "the handle of request 'live'")
    refuse(lambda m, h: m.fork(h, h), InvalidArgumentError, "the handle of request 'live'")
    refuse(lambda m, h: m.get(h), InvalidArgumentError, "the handle of request 'live'")


def test_a_request_may_begin_without_a_place() -> None:
    manager = make_manager(gpu_blocks=2)
    full = manager.allocate("full", num_tokens=8)
    assert manager.can_allocate(num_tokens=5, reserve=0)
    handle = manager.allocate("empty", num_tokens=5, reserve=0)
    assert (handle.num_reserved, handle.num_blocks, manager.inspect.num_free_blocks()) == (0, 0, 0)
    manager.check()
    manager.free(full)
    manager.extend(handle, 5)
    assert (handle.num_reserved, handle.num_blocks) == (5, 2)
    manager.check()


def test_duplicate_and_unknown_ids_are_named() -> None:
    refuse(lambda m, h: m.allocate("live", [1]), DuplicateRequestError, "'live'")
    refuse(lambda m, h: m.fork(h, "live"), DuplicateRequestError, "'live'")
    refuse(lambda m, h: m.get("other"), UnknownRequestError, "'other'")


@pytest.mark.parametrize("scope", [None, "tenant", 5, ("tenant",), []])
@pytest.mark.parametrize(
    "call",
    [
        lambda m, s: m.allocate("new", [1], scope=s),
        lambda m, s: m.can_allocate([1], scope=s),
        lambda m, s: m.match_prefix([1], s),
        lambda m, s: m.cache.pin([1], s),
        lambda m, s: m.cache.onboard([1], s),
        lambda m, s: m.cache.invalidate([1], scope=s) if s is not None else m.match_prefix([1], s),
    ],
)
def test_a_scope_is_a_reuse_scope(call: Any, scope: Any) -> None:
    refuse(lambda m, h: call(m, scope), InvalidArgumentError, "ReuseScope")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"retention": "high"}, "retention"),
        ({"retention": 5}, "retention"),
        ({"session": 5}, "session"),
        ({"session": ["s"]}, "session"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": -1.0}, "ttl"),
        ({"ttl": True}, "ttl"),
        ({"ttl": "1"}, "ttl"),
        ({"ttl": float("nan")}, "ttl"),
        ({"cross_tokens": 4}, "cross_tokens=4"),
        ({"reserve": 3}, "reserve"),
        ({"lookahead": None}, "lookahead"),
        ({"lookahead": 0.0}, "lookahead"),
    ],
)
def test_every_option_of_allocate_is_checked(options: dict[str, Any], named: str) -> None:
    refuse(lambda m, h: m.allocate("new", [1, 2], **options), InvalidArgumentError, named)


@pytest.mark.parametrize("tier", [Tier.REMOTE, 0, True, "GPU", None])
def test_a_tier_is_one_that_has_pools(tier: Any) -> None:
    for call in (
        lambda m, h: m.cache.evict(1, tier=tier),
        lambda m, h: m.cache.offload(1, tier=tier),
        lambda m, h: m.cache.resize(4, tier=tier),
        lambda m, h: m.cache.defragment(tier),
        lambda m, h: m.inspect.num_free_blocks(tier=tier),
    ):
        refuse(call, InvalidArgumentError, "pools exist on GPU, HOST and DISK")


def test_a_token_that_was_never_reserved_cannot_be_committed() -> None:
    refuse(lambda m, h: m.commit(h, [1]), SequenceStateError, "places for 10 tokens, 11 cannot be committed")
    refuse(lambda m, h: m.commit(h, 1), SequenceStateError, "places for 10 tokens")
    refuse(lambda m, h: m.mark_written(h), SequenceStateError, "places for 10 tokens, 11 cannot be written")


def test_committing_no_token_is_allowed_and_does_nothing() -> None:
    manager = make_manager()
    handle = with_one_request(manager)
    manager.commit(handle, 0)
    manager.commit(handle, [])
    manager.commit_batch([handle], [], [0])
    assert handle.num_committed == 10


def test_the_prompt_over_max_seq_len_is_refused() -> None:
    manager = make_manager(max_seq_len=8)
    with pytest.raises(InvalidArgumentError, match="max_seq_len=8"):
        manager.allocate("a", num_tokens=9)
    with pytest.raises(InvalidArgumentError, match="max_seq_len=8"):
        manager.allocate("a", num_tokens=8, lookahead=1)
    manager.allocate("a", num_tokens=8)


def test_events_that_are_off_cannot_be_subscribed_to() -> None:
    with pytest.raises(InvalidArgumentError, match="event_buffer_size"):
        make_manager(event_buffer_size=0).subscribe()


def test_check_names_what_is_broken() -> None:
    manager = make_manager()
    with_one_request(manager)
    manager._cache.gpu_pools[0].num_cached += 1
    with pytest.raises(KVPoolError, match="cached"):
        manager.check()


def test_scopes_do_not_outlive_their_contents() -> None:
    manager = make_manager()
    for number in range(50):
        handle = manager.allocate("a", [1, 2, 3], scope=ReuseScope(tenant=str(number)))
        manager.free(handle)
    assert manager._cache.roots == {}
