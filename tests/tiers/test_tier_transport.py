"""Blocks on their way from one cache through tiers into another, without a model: every byte is compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from sides import FULL, PROMPT, SECONDS, SIZE, SLIDING, Side, sides

from kvpool import (
    KVCacheHandle,
    LayerSpec,
    Retention,
    ReuseScope,
    Tier,
    TokenRange,
)
from kvpool.errors import TransferError
from kvpool.scheduling import Request
from kvpool.tiers import MemoryTier, Outcome
from kvpool.tiers.contract import Loan, Worth
from kvpool.tiers.transport import tier_transport
from kvpool.tiers.transport.fetching import Fetch


@pytest.mark.parametrize("layers", [(FULL,), (FULL, SLIDING)])
def test_given_a_prefix_in_a_tier_then_another_cache_gets_every_byte_of_it(layers: Any) -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,), layers=layers) as (one, other):
        one.store(one.compute(PROMPT))
        fetch = other.fetch(PROMPT)
        assert (fetch.first, fetch.num_blocks, fetch.is_part) == (0, 7, False)
        assert fetch.media == dict.fromkeys(range(7), tier.medium)
        assert fetch.loading_seconds > 0
        assert fetch.num_bytes == 7 * sum(group.block_bytes for group in one.manager.config.groups) - 5 * (
            one.manager.config.groups[1].block_bytes if len(layers) > 1 else 0
        )
        assert fetch.decision is not None
        assert fetch.decision.reason != "it was asked for"
        assert other.take_in(PROMPT, fetch) == 28
        other.assert_right(PROMPT, 28)
        stats = other.transport.stats()
        assert (stats.imports, stats.prompt_tokens_loaded, stats.imports_without_room) == (1, 28, 0)
        assert (stats.fetches.lookups, stats.fetches.found, stats.fetches.incomplete) == (1, 1, 0)
        assert one.transport.stats().blocks_waiting == 0


def test_given_a_prompt_that_fills_its_blocks_then_the_blocks_that_its_last_token_reads_are_taken_in() -> None:
    """That token is computed again: its window reaches a block further back than that of the one behind it."""
    tier, prompt = MemoryTier(2**20), PROMPT[:28]
    with sides((tier,), (tier,), layers=(FULL, LayerSpec(kv_heads=1, head_dim=8, window=5))) as (one, other):
        one.store(one.compute(prompt[:27]))  # while its window reaches there
        one.store(one.compute(prompt, "b"))
        assert other.take_in(prompt, other.fetch(prompt)) == 27


def test_given_blocks_that_the_cache_has_already_then_only_those_behind_them_are_loaded() -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,)) as (one, other):
        one.store(one.compute(PROMPT))
        other.manager.free(other.compute(PROMPT[:13]))
        before = tier.stats().hits
        fetch = other.fetch(PROMPT, first=3)
        assert fetch.num_blocks == 7
        assert sorted(fetch.media) == [3, 4, 5, 6]
        assert [rows.columns.tolist() for rows in fetch.groups] == [[3, 4, 5, 6], [5, 6]]
        assert tier.stats().hits - before == 6
        assert other.take_in(PROMPT, fetch) == 28
        other.assert_right(PROMPT, 28)
        assert other.transport.stats().prompt_tokens_loaded == 16


def test_given_blocks_before_the_fetched_ones_that_left_meanwhile_then_nothing_is_taken_in() -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,)) as (one, other):
        one.store(one.compute(PROMPT))
        assert other.take_in(PROMPT, other.fetch(PROMPT, first=3)) == 0
        stats = other.transport.stats()
        assert (stats.imports, stats.imports_without_room, stats.prompt_tokens_loaded) == (0, 1, 0)


def test_given_no_room_then_nothing_is_taken_in_and_nothing_is_held() -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,), layers=(FULL,), gpu_blocks=8) as (one, other):
        one.store(one.compute(PROMPT))
        busy = other.compute(list(range(8)), "busy")
        assert other.take_in(PROMPT, other.fetch(PROMPT)) == 0
        assert (other.transport.stats().imports_without_room, other.manager.stats().num_sequences) == (1, 1)
        other.manager.free(busy)
        assert other.take_in(PROMPT, other.fetch(PROMPT)) == 28


def test_given_a_block_that_is_missing_then_the_prefix_ends_before_it() -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,), layers=(FULL,)) as (one, other):
        one.store(one.compute(PROMPT))
        keys = other.transport.keys.of_prompt(np.array(PROMPT, np.int32), Request("r", PROMPT, 1).scope).keys[0]
        tier.remove([keys[4]])
        fetch = other.fetch(PROMPT)
        assert fetch.num_blocks == 4
        assert other.take_in(PROMPT, fetch) == 16
        other.assert_right(PROMPT, 16)
        fetch = other.fetch([7, 8, 9, 10, 11])
        assert (fetch.num_blocks, other.transport.stats().fetches.found) == (0, 1)
        assert other.transport.import_prefix(Request("r", [7, 8, 9, 10, 11], 1), fetch) == (None, [])


class Broken(MemoryTier):
    """Says that it has everything, and brings nothing of what it was told to lose."""

    def __init__(self) -> None:
        super().__init__(2**20)
        self.lost: set[bytes] = set()

    def _load(self, keys: Any, out: Any, deadline: float) -> list[Outcome]:
        found = super()._load(keys, out, deadline)
        return [Outcome.FAILED if key in self.lost else outcome for key, outcome in zip(keys, found, strict=True)]


def test_given_a_value_that_does_not_come_then_the_prefix_ends_before_it_and_that_is_counted() -> None:
    tier = Broken()
    with sides((tier,), (tier,), layers=(FULL,)) as (one, other):
        one.store(one.compute(PROMPT))
        keys = other.transport.keys.of_prompt(np.array(PROMPT, np.int32), Request("r", PROMPT, 1).scope).keys[0]
        tier.lost = {keys[5]}
        fetch = other.fetch(PROMPT)
        assert (fetch.num_blocks, other.transport.stats().fetches.incomplete) == (5, 1)
        assert fetch.num_bytes == 6 * other.manager.config.block_bytes
        assert other.take_in(PROMPT, fetch) == 20
        other.assert_right(PROMPT, 20)


def test_given_a_prefix_in_a_later_tier_then_it_is_loaded_from_there_and_the_first_gets_it() -> None:
    near, far = MemoryTier(2**20, name="near"), MemoryTier(2**20, name="far")
    with sides((far,), (near, far)) as (one, other):
        one.store(one.compute(PROMPT))
        assert other.take_in(PROMPT, other.fetch(PROMPT)) == 28
        other.assert_right(PROMPT, 28)
        assert other.transport.storer.flush(SECONDS)
        assert near.stats().num_values == 7 + 2  # of the window only what a query behind it reads
        other.manager.cache.reset()
        hits = far.stats().hits
        assert other.take_in(PROMPT, other.fetch(PROMPT)) == 28
        assert far.stats().hits == hits


def test_given_blocks_to_be_stored_after_two_uses_then_the_first_request_stores_nothing() -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), layers=(FULL,), min_uses=2) as (side,):
        first = side.compute(PROMPT)
        side.store(first)
        assert tier.stats().stored == 0
        offers = side.transport.offers
        offers.offer(first, first.token_ids[:8], offers.begin(first.scope), is_demanded=True)
        assert side.transport.storer.flush(SECONDS)
        assert tier.stats().stored == 2
        second = side.compute([*PROMPT[:20], 1, 2, 3, 4], "b")
        side.store(second)
        assert tier.stats().stored == 5
        side.store(second)
        assert tier.stats().stored == 6  # what it has already is not stored again


def test_given_staging_memory_for_a_part_then_that_part_comes_and_the_rest_with_the_next_fetch() -> None:
    tier = MemoryTier(2**22)
    wide = LayerSpec(kv_heads=8, head_dim=64)
    with sides((tier,), (tier,), layers=(wide,)) as (one, other):
        handle = one.manager.allocate("a", PROMPT)
        one.manager.slot_mapping([handle], 0, len(PROMPT))
        one.manager.commit(handle)
        one.store(handle)
        other.transport.fetcher._most_bytes = 3 * other.manager.config.block_bytes + 5
        fetch = other.fetch(PROMPT)
        assert (fetch.num_blocks, fetch.is_part) == (3, True)
        assert other.take_in(PROMPT, fetch) == 12
        fetch = other.fetch(PROMPT, first=3)
        assert (fetch.num_blocks, fetch.is_part) == (6, True)
        assert other.take_in(PROMPT, fetch) == 24
        fetch = other.fetch(PROMPT, first=6)
        assert (fetch.num_blocks, fetch.is_part) == (7, False)
        assert other.take_in(PROMPT, fetch) == 28


def test_given_a_prefix_that_was_invalidated_while_it_was_on_its_way_then_it_is_not_taken_in() -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,)) as (one, other):
        one.store(one.compute(PROMPT))
        fetch = other.fetch(PROMPT)
        other.transport.invalidator.everything(other.manager.cache.reset, remove=False)
        assert other.take_in(PROMPT, fetch) == 0
        assert other.transport.stats().imports == 0
        assert other.fetch(PROMPT).num_blocks == 0  # its keys are others from now on


def test_given_other_content_that_was_invalidated_meanwhile_then_a_prefix_is_taken_in_all_the_same() -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,)) as (one, other):
        one.store(one.compute(PROMPT))
        fetch = other.fetch(PROMPT)
        other.transport.invalidator.content(lambda: 0, np.arange(500, 512, dtype=np.int32), None, None)
        assert other.take_in(PROMPT, fetch) == 28


def test_given_a_tenant_or_a_scope_that_is_forgotten_then_a_tier_loses_also_what_another_engine_stored() -> None:
    tier = MemoryTier(2**20)
    scopes = [ReuseScope(tenant="t"), ReuseScope(salt="s"), ReuseScope()]
    with sides((tier,), (tier,), layers=(FULL,)) as (one, other):
        for name, scope in zip("abc", scopes, strict=True):
            handle = one.manager.allocate(name, PROMPT, scope=scope)
            one.manager.slot_mapping([handle], 0, len(PROMPT))
            one.manager.commit(handle)
            one.store(handle)
        assert tier.stats().num_values == 21
        invalidator = other.transport.invalidator
        assert invalidator.of_tenant(lambda: 3, "t") == 3
        assert other.transport.storer.flush(SECONDS)
        assert tier.stats().num_values == 14
        assert invalidator.content(lambda: 4, None, scopes[1], None) == 4
        assert other.transport.storer.flush(SECONDS)
        assert tier.stats().num_values == 7


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ({"prefix": PROMPT[:12]}, 2),  # the block at its end, and all behind it
        ({"prefix": None}, 0),
        ({"session": "s"}, 4),  # what it computed itself
        ({"session": "t"}, 7),
    ],
)
def test_given_content_that_is_invalidated_then_the_tier_loses_it_too(what: dict[str, Any], left: int) -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), layers=(FULL,)) as (side,):
        before = side.compute(PROMPT[:17], "before")
        side.store(before)
        handle = side.manager.allocate("a", PROMPT, session="s")
        side.manager.slot_mapping([handle], handle.num_written, len(PROMPT))
        side.manager.commit(handle)
        offers = side.transport.offers
        offers.offer(handle, handle.token_ids, offers.begin(handle.scope), session="s")
        assert side.transport.storer.flush(SECONDS)
        assert tier.stats().num_values == 7
        prefix = what.get("prefix")
        side.transport.invalidator.content(
            lambda: 5, None if prefix is None else np.array(prefix, np.int32), None, what.get("session")
        )
        assert side.transport.storer.flush(SECONDS)
        assert tier.stats().num_values == left


@pytest.mark.parametrize(("remove", "left"), [(True, 0), (False, 7)])
def test_given_everything_is_forgotten_then_a_tier_keeps_it_only_if_it_should(remove: bool, left: int) -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), layers=(FULL,)) as (side,):
        side.store(side.compute(PROMPT))
        assert side.transport.invalidator.everything(lambda: 7, remove=remove) == 7
        assert side.transport.storer.flush(SECONDS)
        assert tier.stats().num_values == left


def test_given_a_fetch_that_is_asked_for_then_it_is_loaded_though_computing_is_faster() -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,), layers=(FULL,)) as (one, other):
        one.store(one.compute(PROMPT))
        decider = other.transport.decider
        decider.decide = lambda *_: pytest.fail("it was asked for")  # type: ignore[method-assign]
        fetch = other.fetch(PROMPT, is_asked_for=True)
        assert fetch.decision is not None
        assert (fetch.num_blocks, fetch.decision.reason) == (7, "it was asked for")
        fetch.release()


@pytest.mark.parametrize("is_locked", [False, True])
@pytest.mark.parametrize("has", [False, True])
def test_given_a_gpu_then_it_writes_to_slots_in_memory_that_is_locked_for_it(is_locked: bool, has: bool) -> None:
    asked: list[Any] = []

    def look(*place: Any) -> bool:
        asked.append(place)
        return has

    with sides((MemoryTier(1 << 20),)) as [side]:
        linked: Any = SimpleNamespace(is_locked=is_locked, has=look, close=lambda: asked.append("close"))
        slots: Any = SimpleNamespace(memory="memory", part_bytes=7, views=["view"])
        side.transport._linked = linked
        assert side.transport._can_write(None) == is_locked
        assert side.transport._can_write(slots) == side.transport._can_borrow(slots) == has
    assert asked == [("memory", 7, ["view"])] * 2 + ["close"]


def test_given_a_transport_that_is_closed_then_what_was_offered_is_stored_and_its_threads_end() -> None:
    tier = MemoryTier(2**20)
    side = Side(tier, layers=(FULL,))
    handle = side.compute(PROMPT)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("kvpool-")}
    progress = side.transport.offers.begin(handle.scope)
    side.transport.offers.offer(handle, handle.token_ids, progress)
    assert side.transport.stats().tiers[0].stats.name == tier.name
    side.transport.close()
    assert tier.stats().num_values == 7
    left = {thread for thread in threading.enumerate() if thread.name.startswith("kvpool-")} - before
    assert not left
    assert tier.medium in Tier


def test_given_retention_then_tiers_are_told_the_priority_and_the_depth_of_each_block() -> None:
    side = Side(MemoryTier(2**20), layers=(FULL,))
    told: list[Worth] = []
    storer: Any = side.transport.storer
    store = storer.store
    storer.store = lambda *given, worths: (told.extend(worths), store(*given, worths=worths))
    for name, retention in (("a", None), ("b", Retention([TokenRange(0, 8, 80)]))):
        handle = side.manager.allocate(name, [ord(name), *PROMPT[:11]], retention=retention)
        side.manager.slot_mapping([handle], 0, 12)
        side.manager.commit(handle)
        side.store(handle)
    assert told == [*(Worth(depth=depth) for depth in range(3)), Worth(80, 0), Worth(80, 1), Worth(depth=2)]
    side.transport.close()


class Lent(Loan):
    """Memory of a tier that notes when it is asked whether it was kept."""

    def __init__(self, events: list[str], is_kept: bool) -> None:
        super().__init__(memoryview(b""), 1)
        self.events, self.is_kept = events, is_kept

    def is_held(self) -> bool:
        self.events.append("asked")
        return self.is_kept

    def _end(self) -> None:
        self.events.append("given back")


@pytest.mark.parametrize("is_kept", [True, False])
def test_given_memory_that_a_tier_lends_then_it_is_asked_for_after_the_device_has_read_it(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = MemoryTier(2**20)
    with sides((tier,), (tier,), layers=(FULL,)) as [first, second]:
        first.store(first.compute(PROMPT))
        fetch, events, write = second.fetch(PROMPT), list[str](), second.plane.write_blocks
        assert fetch.memory is not None
        fetch.memory.release()
        fetch.memory = Lent(events, is_kept)

        def write_later(*part: Any) -> Callable[[], None]:
            write(*part)()
            return lambda: events.append("read")

        monkeypatch.setattr(second.plane, "write_blocks", write_later)
        assert second.take_in(PROMPT, fetch) == (28 if is_kept else 0)
        assert events == ["read", "asked", "given back"]


class Staged:
    """Staging memory that counts its users."""

    def __init__(self) -> None:
        self.users = 1

    def share(self) -> None:
        self.users += 1

    def release(self) -> None:
        self.users -= 1


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize("copies_at_once", [True, False])
def test_given_a_device_that_reads_later_then_memory_comes_back_when_it_has_read_also_if_no_thread_is_free(
    is_taken: bool, copies_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, staged, waited = Side(MemoryTier(2**20)), Staged(), []
    later: list[Any] = []

    def submit(job: Any, drop: Any) -> bool:
        later.append(job)
        return is_taken

    monkeypatch.setattr(side.transport, "_copies_at_once", copies_at_once)
    monkeypatch.setattr(side.transport.fetch_threads, "submit", submit)
    fetch = Fetch(None, 0, 0.0, 0.0, memory=staged)  # type: ignore[arg-type]
    side.transport.give_back(fetch, [lambda: waited.append(staged.users)])
    is_later = is_taken and not copies_at_once
    assert staged.users == is_later
    if is_later:
        later[0]()
    assert staged.users == 0
    assert bool(waited) == (not copies_at_once)
    side.transport.close()


def test_given_more_blocks_than_are_counted_then_the_uses_of_the_one_used_longest_ago_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.tiers.transport.cache_blocks.KNOWN_KEYS", 2)
    side = Side(MemoryTier(2**20), min_uses=2)
    count = side.transport.offers._count_use
    assert [count(bytes([name])) for name in b"aababcbcab"] == [1, 2, 1, 3, 2, 1, 3, 2, 1, 1]
    side.transport.close()


def test_given_a_prefix_that_was_taken_in_then_the_decider_hears_how_long_its_request_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier, waits = MemoryTier(2**24), []
    one = Side(tier)
    one.store(one.compute(PROMPT))
    other = Side(tier)
    monkeypatch.setattr(other.transport.decider, "observe_wait", lambda *observed: waits.append(observed))
    fetch, before = other.fetch(PROMPT), time.monotonic()
    assert other.take_in(PROMPT, fetch) > 0
    ((decision, num_bytes, waited, loading),) = waits
    assert (decision, num_bytes) == (fetch.decision, fetch.num_bytes)
    assert before - fetch.began <= waited <= time.monotonic() - fetch.began
    assert loading == fetch.loading_seconds > 0
    for side in (one, other):
        side.transport.close()


# --- whatever fails ------------------------------------------------------------------------------------------------------


class Fault:
    """Counts the calls that a transport makes of its cache and its data, and lets one of them fail."""

    MANAGER, PLANE = ("allocate", "narrow", "extend", "commit"), ("write_blocks", "read_blocks")

    def __init__(self, side: Side, number: int | None, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.failed = ""
        self._number = number
        for whose, names in ((side.manager, self.MANAGER), (side.plane, self.PLANE)):
            for name in names:
                patch.setattr(whose, name, self._counted(name, getattr(whose, name)))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*given: Any, **options: Any) -> Any:
            self.count += 1
            if self.count - 1 == self._number:
                self.failed = name
                raise TransferError(f"{name} failed")
            return call(*given, **options)

        return counted


def offered(side: Side, handle: KVCacheHandle) -> None:
    try:
        side.store(handle)
    except TransferError:
        assert side.transport.storer.flush(SECONDS)


def test_given_each_call_of_the_cache_fails_once_then_nothing_is_held_and_the_next_request_gets_its_prefix(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvpool.tiers.transport.cache_blocks.CHUNK_BLOCKS", 2)
    failed = set()
    for number in range(100):
        tier = MemoryTier(2**20)
        with sides((tier,), (tier,)) as (one, other), pytest.MonkeyPatch.context() as patch:
            handle = one.compute(PROMPT)
            storing = Fault(one, number, patch)
            offered(one, handle)
            patch.undo()
            one.store(handle)
            loading = Fault(other, number - storing.count, patch)
            caplog.clear()
            cached = other.take_in(PROMPT, other.fetch(PROMPT))
            assert cached == (0 if loading.failed else 28)
            patch.undo()
            assert other.manager.stats().num_sequences == 0
            assert [f"{loading.failed} failed" in record.getMessage() for record in caplog.records] == [True] * (
                not cached
            )
            assert other.take_in(PROMPT, other.fetch(PROMPT, first=cached // SIZE)) == 28
            other.assert_right(PROMPT, 28)
            if not storing.failed and not loading.failed:
                break
            failed.add(storing.failed or loading.failed)
    assert failed == {*Fault.MANAGER, *Fault.PLANE}


@pytest.mark.parametrize(("chunk", "steps"), [(2, [8, 8, 4]), (3, [12, 4]), (7, []), (64, [])])
def test_given_a_long_prefix_then_its_blocks_are_taken_part_by_part_and_no_more_than_it_needs(
    monkeypatch: pytest.MonkeyPatch, chunk: int, steps: list[int]
) -> None:
    monkeypatch.setattr("kvpool.tiers.transport.cache_blocks.CHUNK_BLOCKS", chunk)
    tier, taken = MemoryTier(2**20), []
    with sides((tier,), (tier,)) as (one, other):
        one.store(one.compute(PROMPT))
        extend = other.manager.extend
        monkeypatch.setattr(other.manager, "extend", lambda handle, num: taken.append(num) or extend(handle, num))
        assert other.take_in(PROMPT, other.fetch(PROMPT)) == 28
    assert taken == steps


def test_given_a_cpu_then_memory_that_was_read_comes_back_at_once_and_none_is_locked() -> None:
    class Lender(MemoryTier):
        has_slots = True
        lent = 0

        def _lend(self, *_: Any) -> None:
            self.lent += 1

    tier, lender = MemoryTier(2**20), Lender(2**20)
    with sides((tier,), (tier,), (lender,)) as (one, other, linked):
        assert linked.transport.fetch_threads.flush(SECONDS)
        one.store(one.compute(PROMPT))
        fetch = other.fetch(PROMPT)
        other.transport.fetch_threads.submit = lambda *_: pytest.fail("no thread waits for a CPU")
        assert other.take_in(PROMPT, fetch) == 28
        del other.transport.fetch_threads.submit
    assert lender.lent == 0


def test_given_a_gpu_then_its_staging_memory_is_pinned_and_other_memory_lies_near_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def empty(num_bytes: int, **options: Any) -> Any:
        asked.append((num_bytes, options))
        return torch.zeros(num_bytes, dtype=torch.uint8)

    near = tier_transport._near(torch.device("meta"), 8)
    assert (near.device.type, near.shape, near.dtype) == ("meta", (8,), torch.uint8)
    device = torch.device("meta")
    cuda = SimpleNamespace(
        device=lambda device: nullcontext(asked.append(device)),
        get_device_properties=lambda device: SimpleNamespace(total_memory=memory),
    )
    monkeypatch.setattr(tier_transport, "torch", SimpleNamespace(cuda=cuda, empty=empty, uint8="bytes"))
    for num_bytes in (0, 1, 5):
        assert tier_transport._pinned("cuda:1", num_bytes).tolist() == [0] * num_bytes  # type: ignore[arg-type]
    memory = 2**30
    assert tier_transport._near_bytes(device) == 2**23
    memory = 2**40
    assert tier_transport._near_bytes(device) == tier_transport.NEAR_BYTES
    options = {"dtype": "bytes", "pin_memory": True}
    assert asked == ["cuda:1", (1, options), "cuda:1", (1, options), "cuda:1", (5, options)]


@pytest.mark.parametrize(("batch_bytes", "sent"), [(1, [1] * 7), (3, [3, 3, 1]), (2**20, [7])])
def test_given_blocks_to_store_then_they_go_to_a_tier_in_parts_of_so_many_bytes(
    monkeypatch: pytest.MonkeyPatch, batch_bytes: int, sent: list[int]
) -> None:
    with sides((MemoryTier(2**20),), layers=(FULL,)) as (side,):
        block_bytes, parts = side.manager.config.groups[0].block_bytes, []
        batch = batch_bytes if batch_bytes == 1 else batch_bytes * block_bytes
        monkeypatch.setattr("kvpool.tiers.transport.cache_blocks.BATCH_BYTES", batch)
        offers = side.transport.offers
        send = offers.send
        monkeypatch.setattr(
            offers, "send", lambda group, keys, *rest: parts.append(len(keys)) or send(group, keys, *rest)
        )
        handle = side.compute(PROMPT)
        offers.offer(handle, handle.token_ids, offers.begin(handle.scope))
        assert parts == sent
        assert side.transport.storer.flush(SECONDS)
