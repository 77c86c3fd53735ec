from __future__ import annotations

from typing import Any, ClassVar

import pytest

from kvpool import AllocStatus, CopyKind, LayerSpec, ReuseScope, Tier
from kvpool.errors import InvalidArgumentError, NeverFitsError, OutOfBlocksError
from kvpool.eviction import LRUPolicy, Run
from managers import FULL, cached, make_manager

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)
CROSS = LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)


# --- OK, LATER, NEVER ------------------------------------------------------------------------------------------------


def test_the_answer_is_true_exactly_when_it_is_ok() -> None:
    manager = make_manager(gpu_blocks=4)
    assert manager.can_allocate(num_tokens=4)
    assert not manager.can_allocate(num_tokens=400)
    manager.allocate("a", num_tokens=16)
    assert not manager.can_allocate(num_tokens=4)


def test_never_says_how_many_tokens_would_fit() -> None:
    manager = make_manager(gpu_blocks=10, watermark=0.2)
    answer = manager.can_allocate(num_tokens=40)
    assert answer.status is AllocStatus.NEVER
    assert answer.reason == "needs 10 blocks of pool 0, which has 10 (2 kept as watermark): at most 32 tokens fit"
    assert manager.can_allocate(num_tokens=32)


def test_later_says_what_is_needed_and_what_there_is() -> None:
    manager = make_manager(gpu_blocks=4)
    manager.allocate("a", num_tokens=8)
    answer = manager.can_allocate(num_tokens=12)
    assert (answer.status, answer.blocks_needed, answer.blocks_available) == (AllocStatus.LATER, (3,), (2,))
    assert "needs 3 blocks of pool 0; 2 are free or evictable" in answer.reason


def test_the_watermark_is_kept_at_admission_but_not_taken_from_running_requests() -> None:
    manager = make_manager(gpu_blocks=10, watermark=0.2)
    handle = manager.allocate("a", num_tokens=28)
    assert manager.can_allocate(num_tokens=4)
    assert manager.can_allocate(num_tokens=5).status is AllocStatus.LATER
    manager.extend(handle, 12)
    assert manager.inspect.num_free_blocks() == 0


def test_the_watermark_follows_the_size_of_a_resized_pool() -> None:
    manager = make_manager(gpu_blocks=1000, watermark=0.01)
    manager.cache.resize(8)
    assert manager.can_allocate(num_tokens=28)
    assert manager.can_allocate(num_tokens=32).status is AllocStatus.NEVER


def test_a_prompt_over_max_seq_len_never_fits() -> None:
    manager = make_manager(max_seq_len=8)
    assert manager.can_allocate(num_tokens=8)
    assert manager.can_allocate(num_tokens=9).status is AllocStatus.NEVER
    assert manager.can_allocate(num_tokens=8, lookahead=1).status is AllocStatus.NEVER
    with pytest.raises(InvalidArgumentError, match="max_seq_len=8"):
        manager.allocate("a", num_tokens=9)


def test_a_full_hit_that_needs_no_block_is_admitted_to_a_full_pool() -> None:
    manager = make_manager(gpu_blocks=4, watermark=0.3)
    live = manager.allocate("live", list(range(8)), lookahead=4)
    manager.commit(live, 8)
    manager.store_last_logits(live, "logits")
    manager.extend(live, 8)
    answer = manager.can_allocate(list(range(8)))
    assert (answer.status, answer.blocks_needed) == (AllocStatus.OK, (0,))


def test_lookahead_and_reserve_change_the_need() -> None:
    manager = make_manager()
    assert manager.can_allocate(num_tokens=8, lookahead=1).blocks_needed == (3,)
    assert manager.can_allocate(list(range(40)), reserve=4).blocks_needed == (1,)
    handle = manager.allocate("a", list(range(40)), reserve=4, lookahead=4)
    assert (handle.num_reserved, handle.num_blocks) == (4, 2)


def test_cross_tokens_need_blocks_of_their_group() -> None:
    manager = make_manager(FULL, CROSS, gpu_blocks=8)
    assert manager.can_allocate([1], cross_tokens=9).blocks_needed == (4,)
    assert manager.can_allocate([1], cross_tokens=32).status is AllocStatus.NEVER
    handle = manager.allocate("a", [1], cross_tokens=9)
    assert len(handle.block_ids(1)) == 3
    manager.check()
    manager.free(handle)
    assert manager.inspect.num_free_blocks() == 8


def test_given_two_encoder_inputs_without_keys_then_their_decoders_share_nothing() -> None:
    # The decoder's keys and values depend on what the encoder read, which no token of the prompt tells.
    manager = make_manager(FULL, CROSS, gpu_blocks=32)
    prompt = list(range(12))
    first = manager.allocate("one audio", prompt, cross_tokens=4)
    manager.commit(first)
    assert manager.can_allocate(prompt, cross_tokens=4).num_cached_tokens == 0
    assert manager.can_allocate(prompt, cross_tokens=4, wait_for_prefix=True)
    assert manager.allocate("another audio", prompt, cross_tokens=4).num_cached_tokens == 0
    assert manager.match_prefix(prompt).num_tokens == 0
    assert manager.allocate("no audio", prompt).num_cached_tokens == 0
    assert not manager.store_last_logits(first, "logits")
    manager.check()
    for handle in manager.handles:
        manager.free(handle)
    assert manager.inspect.num_free_blocks() == 32


def test_given_equal_encoder_keys_then_decoders_share_and_others_do_not() -> None:
    manager = make_manager(FULL, CROSS, gpu_blocks=32)
    prompt = list(range(12))
    for name, key, cached_tokens in (("a", "audio 1", 0), ("b", "audio 1", 11), ("c", "audio 2", 0), ("d", "", 0)):
        handle = manager.allocate(name, prompt, cross_tokens=4, scope=ReuseScope(encoder=key))
        assert handle.num_cached_tokens == cached_tokens
        manager.commit(handle)
    assert manager.match_prefix(prompt, ReuseScope(encoder="audio 2")).num_tokens == 11
    manager.check()


def test_given_prompts_without_an_encoder_in_a_model_that_has_one_then_they_share_as_ever() -> None:
    manager = make_manager(FULL, CROSS, gpu_blocks=32)
    prompt = cached(manager, 12)
    assert manager.allocate("again", prompt).num_cached_tokens == 11
    assert manager.allocate("with audio", prompt, cross_tokens=4).num_cached_tokens == 0


def test_given_a_fork_of_a_request_with_an_unnamed_encoder_then_it_publishes_nothing_either() -> None:
    manager = make_manager(FULL, CROSS, gpu_blocks=32)
    parent = manager.allocate("parent", list(range(4)), cross_tokens=4)
    manager.commit(parent)
    [child] = manager.fork(parent, "child")
    manager.extend(child, 4)
    manager.commit(child, [9, 9, 9, 9])
    manager.free(parent)
    manager.free(child)
    assert manager.stats().num_cached_runs == 0


def test_cross_tokens_for_a_model_without_cross_attention_are_refused_by_both() -> None:
    manager = make_manager()
    for ask in (lambda: manager.can_allocate([1], cross_tokens=4), lambda: manager.allocate("a", [1], cross_tokens=4)):
        with pytest.raises(InvalidArgumentError, match="cross_tokens=4"):
            ask()


def test_a_refusal_tells_never_from_later() -> None:
    manager = make_manager(gpu_blocks=4)
    with pytest.raises(NeverFitsError, match="which has 4 in all"):
        manager.allocate("a", num_tokens=17)
    manager.allocate("b", num_tokens=8)
    with pytest.raises(OutOfBlocksError, match="2 of 4 are free or evictable") as caught:
        manager.allocate("c", num_tokens=16)
    assert not isinstance(caught.value, NeverFitsError)


# --- a dry run -------------------------------------------------------------------------------------------------------


def test_asking_changes_nothing_not_even_the_order_of_eviction() -> None:
    manager = make_manager(gpu_blocks=4)
    old, new = cached(manager, 8), cached(manager, 8, first=50)
    before = manager.stats()
    for _ in range(3):
        manager.match_prefix([*old, 1])
        manager.can_allocate([*old, 1])
        manager.can_allocate([*old[:6], 1])
    assert manager.stats() == before
    manager.cache.evict(2)
    assert manager.match_prefix([*new, 1]).num_blocks == 2
    assert manager.match_prefix([*old, 1]).num_blocks == 0


# --- reuse -----------------------------------------------------------------------------------------------------------


def test_a_query_describes_whole_blocks_partial_tokens_and_tiers() -> None:
    manager = make_manager(host_blocks=8)
    tokens = cached(manager, 12)
    manager.cache.offload(1)
    match = manager.match_prefix([*tokens[:10], 77])
    assert (match.num_tokens, match.num_blocks, match.num_partial_tokens) == (10, 2, 2)
    assert match.tokens_by_tier == {Tier.GPU: 8}
    assert manager.match_prefix([*tokens, 1]).tokens_by_tier == {Tier.GPU: 8, Tier.HOST: 4}


def test_an_empty_prompt_matches_nothing() -> None:
    assert make_manager().match_prefix([]).num_tokens == 0


def test_partial_blocks_are_reused_only_when_configured() -> None:
    for partial_match, expected in ((True, 6), (False, 4)):
        manager = make_manager(partial_match=partial_match)
        tokens = cached(manager, 8)
        assert manager.match_prefix([*tokens[:6], 99]).num_tokens == expected
        assert manager.match_prefix(tokens[:6]).num_tokens == (5 if partial_match else 4)


def test_a_prompt_that_ends_with_a_cached_block_holds_it_as_it_is() -> None:
    manager = make_manager()
    source = manager.allocate("source", list(range(8)))
    manager.commit(source, 8)
    handle = manager.allocate("a", list(range(8)))
    assert handle.num_cached_tokens == 7
    assert handle.block_ids().tolist() == source.block_ids().tolist()
    assert manager.take_copies() == []
    manager.commit(handle, 1)  # computed again for its logits only
    manager.extend(handle)
    assert manager.take_copies() == []
    manager.check()


def test_nothing_is_reused_or_published_without_prefix_caching() -> None:
    manager = make_manager(enable_prefix_caching=False)
    tokens = cached(manager, 8)
    assert manager.match_prefix([*tokens, 1]).num_tokens == 0
    assert manager.inspect.num_free_blocks() == 16


def test_num_tokens_alone_reuses_nothing() -> None:
    manager = make_manager()
    cached(manager, 8)
    assert manager.allocate("a", num_tokens=8).num_cached_tokens == 0


def test_a_partial_source_is_done_without_when_the_pool_is_too_full_to_keep_it() -> None:
    manager = make_manager(gpu_blocks=2)
    tokens = cached(manager, 8)
    handle = manager.allocate("a", [*tokens[:6], 99])  # block 0 hits; the source of block 1 must make room for it
    assert handle.num_cached_tokens == 4
    assert handle.num_blocks == 2
    manager.check()


def test_a_hit_must_have_what_every_window_reads() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64)
    handle = manager.allocate("a", list(range(32)))
    manager.commit(handle, 32)
    manager.cache.evict(6)  # blocks of the sliding group that nobody reads
    assert manager.match_prefix([*range(32), 1]).num_blocks == 8  # what the next token reads is there
    assert manager.match_prefix([*range(16), 1]).num_blocks == 0  # what token 16 reads is gone
    manager.check()


def test_idle_windowed_blocks_that_are_matched_are_not_supply() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=12)
    tokens = cached(manager, 16)
    answer = manager.can_allocate([*tokens, 1])
    # four full blocks and the two of the window are matched; two sliding blocks before it may go
    assert (answer.blocks_needed, answer.blocks_available) == ((2,), (4 + 2,))
    handle = manager.allocate("a", [*tokens, 1], lookahead=8)
    assert handle.num_cached_tokens == 16
    manager.check()


def test_pinned_windowed_blocks_are_never_supply() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=12, max_pinned_tokens=16)
    tokens = cached(manager, 16)
    manager.cache.pin(tokens)
    assert manager.can_allocate([90]).blocks_available == (4 + 2,)
    assert manager.can_allocate([*tokens, 1]).blocks_available == (4 + 2,)


@pytest.mark.parametrize("layers", [(FULL,), (FULL, SLIDING)])
def test_without_copies_the_last_block_of_an_idle_run_is_taken_over(layers: tuple[LayerSpec, ...]) -> None:
    manager = make_manager(*layers, gpu_blocks=2 * len(layers), copy_on_partial_reuse=False)
    tokens = cached(manager, 8)
    runs = manager.inspect.runs()
    subscription = manager.subscribe()
    before = manager.can_allocate([*tokens[:6], 99])
    assert (before.blocks_needed, before.num_cached_tokens) == ((0,), 6)  # though the pool is full
    handle = manager.allocate("a", [*tokens[:6], 99])
    assert handle.num_cached_tokens == 6
    assert [handle.block_ids(group).tolist() for group in range(len(layers))] == [
        ids.tolist() for ids in runs[0].block_ids
    ]
    assert manager.take_copies() == []
    assert manager.match_prefix([*tokens, 1]).num_tokens == 4  # the block left the index
    removed = [event for event in subscription.poll().events if type(event).__name__ == "Removed"]
    assert [(event.group, event.reason) for event in removed] == [(group, "continued") for group in range(len(layers))]
    manager.check()
    manager.commit(handle)
    manager.free(handle)
    manager.check()


def test_without_copies_a_block_that_somebody_uses_is_not_reused_in_part() -> None:
    manager = make_manager(copy_on_partial_reuse=False, host_blocks=8, max_pinned_tokens=8)
    tokens = cached(manager, 12)
    asked = [*tokens[:6], 99]
    assert manager.match_prefix(asked).num_tokens == 4  # another block follows it
    manager.cache.invalidate(tokens)
    assert manager.match_prefix(asked).num_tokens == 6
    pin = manager.cache.pin(tokens[:8])
    assert manager.match_prefix(asked).num_tokens == 4
    manager.cache.unpin(pin)
    reader = manager.allocate("reader", [*tokens[:8], 1])
    assert manager.match_prefix(asked).num_tokens == 4
    manager.free(reader)
    assert manager.match_prefix(asked).num_tokens == 6
    manager.cache.offload(1)
    assert manager.match_prefix(asked).num_tokens == 4  # it would have to be copied from the host


def test_without_copies_logits_need_a_block_that_can_be_taken_over() -> None:
    manager = make_manager(copy_on_partial_reuse=False)
    source = manager.allocate("source", list(range(8)))
    manager.commit(source, 8)
    assert not manager.store_last_logits(source, "logits", 6)
    assert not manager.match_prefix(range(6)).has_last_logits
    manager.free(source)
    handle = manager.allocate("a", range(6))
    assert (handle.num_cached_tokens, handle.last_logits) == (6, "logits")
    manager.check()


def test_a_partial_match_keeps_the_windowed_part_of_its_source() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=16)
    tokens = cached(manager, 16)
    manager.take_copies()
    handle = manager.allocate("a", [*tokens[:14], 99])
    assert handle.num_cached_tokens == 14
    copies = manager.take_copies()
    assert sorted(op.group for op in copies) == [0, 1]
    assert {op.num_tokens for op in copies} == {2}
    manager.check()


def test_a_partial_source_may_lie_on_a_lower_tier() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=16, host_blocks=16)
    tokens = cached(manager, 8)
    manager.cache.offload(4)
    manager.take_copies()
    handle = manager.allocate("a", [*tokens[:6], 99])
    assert handle.num_cached_tokens == 6
    partial = [op for op in manager.take_copies() if op.num_tokens == 2]
    assert {(op.src_tier, op.dst_tier) for op in partial} == {(Tier.HOST, Tier.GPU)}
    manager.check()


@pytest.mark.parametrize("layers", [(FULL,), (FULL, SLIDING)])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_partial_source_stays_while_others_make_room_for_its_copy(
    layers: tuple[LayerSpec, ...], offloaded: bool
) -> None:
    per_position = len(layers)
    manager = make_manager(*layers, gpu_blocks=4 * per_position, host_blocks=16)
    tokens = cached(manager, 8)  # the oldest: it would be the first to go
    if offloaded:
        manager.cache.offload(2 * per_position)
        cached(manager, 8, first=100)
    cached(manager, 8, first=50)
    assert manager.inspect.num_free_blocks() == 0
    handle = manager.allocate("a", [*tokens[:6], 99])
    assert handle.num_cached_tokens == 6
    copies = [op for op in manager.take_copies() if op.kind is CopyKind.PARTIAL_REUSE]
    assert len(copies) == per_position
    assert manager.match_prefix([*tokens, 1]).num_blocks == 2
    manager.check()


def test_a_partial_source_keeps_its_place_in_the_order_while_others_make_room() -> None:
    class Counted(LRUPolicy):
        taken_out: ClassVar[list[int]] = []  # the numbers of runs

        def remove(self, run: Run) -> None:
            self.taken_out.append(run.created)
            super().remove(run)

    manager = make_manager(gpu_blocks=4, policy=Counted)
    cached(manager, 8, first=50)
    tokens = cached(manager, 8)
    assert manager.allocate("a", [*tokens[:2], *range(90, 96)]).num_cached_tokens == 2
    assert Counted.taken_out == [1]
    manager.check()


def test_without_partial_blocks_a_hit_is_cut_to_whole_blocks_that_every_window_has() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=64, partial_match=False)
    handle = manager.allocate("a", list(range(32)))
    manager.commit(handle, 32)
    manager.cache.evict(6)
    assert manager.match_prefix(list(range(31))).num_tokens == 0  # at 28 tokens the window reads a block that is gone
    assert manager.match_prefix([*range(32), 1]).num_tokens == 32


def test_a_partial_source_that_a_window_needs_is_done_without_when_the_pool_is_full() -> None:
    manager = make_manager(FULL, SLIDING, gpu_blocks=4)
    tokens = cached(manager, 8)
    handle = manager.allocate("a", [*tokens[:6], 99])
    assert handle.num_cached_tokens == 4
    manager.check()


def test_the_watermark_does_not_keep_a_request_out_for_the_sake_of_a_partial_source() -> None:
    manager = make_manager(gpu_blocks=4, watermark=0.25)
    tokens = cached(manager, 12)
    answer = manager.can_allocate([*tokens[:10], 99])
    assert answer.status is AllocStatus.OK
    assert answer.num_cached_tokens == 8


# --- in flight -------------------------------------------------------------------------------------------------------


def test_a_request_can_wait_for_the_prefix_that_another_one_is_computing() -> None:
    manager = make_manager()
    producer = manager.allocate("producer", list(range(12)))
    wanted = [*range(12), 1]
    answer = manager.can_allocate(wanted, wait_for_prefix=True)
    assert answer.status is AllocStatus.LATER
    assert "'producer' is computing the next block" in answer.reason
    assert manager.match_prefix(wanted).in_flight
    manager.commit(producer, 4)
    assert manager.can_allocate(wanted, wait_for_prefix=True).status is AllocStatus.LATER  # the second block now
    manager.commit(producer, 8)
    assert manager.can_allocate(wanted, wait_for_prefix=True).status is AllocStatus.OK
    assert not manager.match_prefix(wanted).in_flight


def test_nobody_waits_who_did_not_ask_or_wants_something_else() -> None:
    manager = make_manager()
    manager.allocate("producer", list(range(12)))
    assert manager.can_allocate([*range(12), 1])
    assert manager.can_allocate([50, 51, 52, 53, 54], wait_for_prefix=True)
    assert manager.can_allocate([0, 1, 2], wait_for_prefix=True)  # shorter than the block that is computed
    assert manager.can_allocate(num_tokens=8, wait_for_prefix=True)


@pytest.mark.parametrize(
    "end",
    [
        lambda manager, producer: manager.free(producer),
        lambda manager, producer: manager.swap_out(producer),
        lambda manager, producer: manager.cache.invalidate(scope=ReuseScope()),
        lambda manager, producer: manager.cache.reset(),
    ],
)
def test_nobody_waits_for_a_producer_that_is_gone(end: Any) -> None:
    manager = make_manager(host_blocks=8)
    producer = manager.allocate("producer", list(range(12)))
    manager.commit(producer, 4)
    end(manager, producer)
    assert manager.can_allocate([*range(12), 1], wait_for_prefix=True)
    manager.check()


def test_a_prompt_that_leaves_a_run_in_its_middle_waits_for_nobody() -> None:
    manager = make_manager()
    cached(manager, 12)
    manager.allocate("producer", list(range(500, 512)))
    assert manager.can_allocate([*range(4), 90, 91, 92, 93, 94], wait_for_prefix=True)


def test_of_two_producers_of_the_same_block_the_first_is_waited_for() -> None:
    manager = make_manager()
    first = manager.allocate("first", list(range(12)))
    second = manager.allocate("second", list(range(12)))
    assert "'first'" in manager.can_allocate([*range(12), 1], wait_for_prefix=True).reason
    manager.commit(first, 12)
    manager.commit(second, 4)
    assert manager.can_allocate([*range(12), 1], wait_for_prefix=True)
    manager.check()


# --- quotas ----------------------------------------------------------------------------------------------------------


def test_the_guaranteed_cache_of_another_tenant_is_no_supply() -> None:
    manager = make_manager(gpu_blocks=8)
    manager.cache.set_quota("t", guaranteed=3)
    cached(manager, 16, scope=ReuseScope(tenant="t"))
    assert manager.can_allocate([99] * 8).blocks_available == (5,)
    assert manager.can_allocate([99] * 8, scope=ReuseScope(tenant="t")).blocks_available == (8,)
    manager.allocate("a", num_tokens=20)
    assert manager.match_prefix([*range(16), 1], ReuseScope(tenant="t")).num_blocks == 3
    manager.check()


def test_a_fully_cached_prompt_whose_last_block_left_a_window_is_written_again() -> None:
    sliding = LayerSpec(kv_heads=1, head_dim=16, window=3)  # a pool of its own, which forgets by itself
    manager = make_manager(FULL, sliding, block_size=1, gpu_blocks=[16, 4])
    tokens = cached(manager, 1)
    manager.free(manager.allocate("other", [100, 101, 102, 103]))  # needs every block of the second pool
    assert manager.match_prefix(tokens).num_tokens == 0
    handle = manager.allocate("again", tokens)
    assert (manager.slot_mapping([handle], 0, 1) >= 0).all()
    manager.check()


def test_a_block_that_is_only_copied_from_does_not_count_as_used_when_room_had_to_be_made() -> None:
    manager = make_manager(gpu_blocks=6, eviction_policy="lru")
    older, newer = cached(manager, 8, first=0), cached(manager, 8, first=100)
    request = manager.allocate("copies from the older", [*older[:2], *range(500, 510)])  # evicts a block of the newer
    assert request.num_cached_tokens == 2
    manager.free(request, keep=False)
    manager.cache.evict(2)
    assert manager.match_prefix([*newer, 1]).num_blocks == 1
    assert manager.match_prefix([*older, 1]).num_blocks < 2


def test_a_request_without_an_encoders_input_has_no_blocks_of_the_one_before_it() -> None:
    manager = make_manager(FULL, CROSS)
    before = manager.allocate("before", [1, 2], cross_tokens=9)
    assert len(before.block_ids(1)) == 3
    manager.free(before)
    after = manager.allocate("after", [1, 2])
    assert len(after.block_ids(1)) == 0
    manager.check()


def test_a_request_whose_tokens_nobody_told_knows_none_of_the_one_before_it() -> None:
    manager = make_manager()
    before = manager.allocate("before", list(range(8)))
    manager.commit(before)
    manager.free(before)
    after = manager.allocate("after", num_tokens=8)
    assert after.token_ids.tolist() == []
    manager.commit(after, list(range(50, 58)))
    assert after.token_ids.tolist() == list(range(50, 58))
    manager.check()
