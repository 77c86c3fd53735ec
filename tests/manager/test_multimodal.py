"""Images behind placeholder tokens: what is before one is shared, it and what follows only with the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheHandle, KVCacheManager, MultimodalItem, ReuseScope, Tier
from kvpool.errors import InvalidArgumentError, InvariantError, OutOfBlocksError
from kvpool.events import Stored
from kvpool.events.mirror import CacheMirror
from kvpool.manager.aio import AsyncKVCacheManager
from kvpool.pools.symbols import Placeholder, Symbols, hashed
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.prefix.tree import all_nodes, numbers_in_use
from managers import make_manager

IMAGE = 99
TEXT = list(range(1, 7))
PROMPT = [*TEXT, *[IMAGE] * 6, 7, 8, 9, 10]  # blocks of 4: text, text and image, image, text
CAT, DOG = [(6, 6, "cat")], [(6, 6, "dog")]


def run(manager: KVCacheManager, tokens: list[int], items: Any = None, **options: Any) -> int:
    """Runs a request to its end and returns how many of its tokens came from the cache."""
    handle = manager.allocate("run", tokens, multimodal=items, **options)
    hit = handle.num_cached_tokens
    manager.commit(handle)
    manager.free(handle)
    manager.check()
    return hit


# --- who shares what --------------------------------------------------------------------------------------------------


def test_given_another_image_then_only_the_text_before_it_is_shared() -> None:
    manager = make_manager()
    assert run(manager, PROMPT, CAT) == 0
    assert run(manager, PROMPT, DOG) == len(TEXT)
    assert make_manager(partial_match=False).match_prefix(PROMPT, multimodal=DOG).num_tokens == 0


def test_given_another_image_and_whole_blocks_only_then_the_blocks_before_it_are_shared() -> None:
    manager = make_manager(partial_match=False)
    run(manager, PROMPT, CAT)
    assert manager.match_prefix(PROMPT, multimodal=DOG).num_tokens == 4


def test_given_the_same_image_then_it_and_what_follows_are_shared() -> None:
    manager = make_manager()
    run(manager, PROMPT, CAT)
    assert run(manager, [*PROMPT, 11], CAT) == len(PROMPT)


def test_given_no_image_then_placeholders_are_text() -> None:
    manager = make_manager()
    run(manager, PROMPT, CAT)
    assert run(manager, PROMPT) == len(TEXT)
    assert run(manager, [*PROMPT, 11]) == len(PROMPT)
    assert run(manager, [*PROMPT, 11], []) == len(PROMPT)


@pytest.mark.parametrize("other", [[(5, 6, "cat")], [(7, 6, "cat")], [(6, 5, "cat")], [(6, 7, "cat")]])
def test_given_the_same_image_elsewhere_or_of_another_length_then_it_is_not_shared(other: Any) -> None:
    manager = make_manager()
    run(manager, PROMPT, CAT)
    assert run(manager, PROMPT, other) <= len(TEXT)


def test_given_two_copies_of_an_image_then_they_are_not_one_that_is_longer() -> None:
    manager = make_manager()
    run(manager, PROMPT, [(6, 6, "cat")])
    assert manager.match_prefix(PROMPT, multimodal=[(6, 3, "cat"), (9, 3, "cat")]).num_tokens == len(TEXT)
    run(manager, PROMPT, [(6, 3, "cat"), (9, 3, "cat")])
    assert manager.match_prefix(PROMPT, multimodal=[(6, 3, "cat")]).num_tokens == len(TEXT) + 3


def test_given_the_same_first_image_then_sharing_ends_where_the_second_begins() -> None:
    manager = make_manager()
    run(manager, PROMPT, [(0, 2, "cat"), (8, 2, "cat")])
    assert run(manager, PROMPT, [(0, 2, "cat"), (8, 2, "dog")]) == 8


def test_given_a_scope_then_it_isolates_the_same_image_too() -> None:
    manager = make_manager()
    run(manager, PROMPT, CAT, scope=ReuseScope(tenant="a"))
    assert run(manager, PROMPT, CAT, scope=ReuseScope(tenant="b")) == 0


def test_given_an_image_of_which_the_end_was_evicted_then_its_beginning_is_shared() -> None:
    manager = make_manager()
    run(manager, PROMPT, CAT)
    manager.cache.evict(2)
    assert run(manager, PROMPT, DOG) == len(TEXT)
    assert run(manager, PROMPT, CAT) == 8


def test_given_an_unfilled_block_that_ends_inside_an_image_then_it_is_found() -> None:
    manager = make_manager(cache_unfilled_blocks=True)
    run(manager, [*TEXT, *[IMAGE] * 3], [(6, 3, "cat")])
    assert run(manager, PROMPT, [(6, 3, "cat"), (9, 3, "cat")]) == 9


# --- what callers see -------------------------------------------------------------------------------------------------


def test_token_ids_are_those_that_were_given() -> None:
    manager = make_manager()
    handle = manager.allocate("a", PROMPT, multimodal=CAT)
    assert handle.token_ids.tolist() == PROMPT
    manager.commit(handle)
    (child,) = manager.fork(handle, "b")
    assert child.token_ids.tolist() == PROMPT
    assert manager.allocate("c", [*PROMPT, 11], multimodal=CAT).token_ids.tolist() == [*PROMPT, 11]


def test_questions_change_nothing_and_know_images_that_nobody_has() -> None:
    manager = make_manager()
    run(manager, PROMPT, CAT)
    known = dict(manager._cache.rows.symbols.placeholders)
    assert manager.match_prefix(PROMPT, multimodal=DOG).num_tokens == len(TEXT)
    assert manager.can_allocate(PROMPT, multimodal=CAT).num_cached_tokens == len(PROMPT) - 1
    assert manager.can_allocate(PROMPT, multimodal=DOG).num_cached_tokens == len(TEXT)
    assert manager._cache.rows.symbols.placeholders == known


def test_given_no_room_then_nothing_of_an_image_is_noted() -> None:
    manager = make_manager(gpu_blocks=3)
    with pytest.raises(OutOfBlocksError):
        manager.allocate("a", PROMPT, multimodal=CAT)
    assert not manager._cache.rows.symbols.placeholders


def test_given_another_image_in_flight_then_nobody_waits_for_it() -> None:
    manager = make_manager(gpu_blocks=64)
    manager.allocate("a", PROMPT, multimodal=CAT)
    manager.commit(manager.get("a"), 4)
    assert not manager.can_allocate(PROMPT, multimodal=CAT, wait_for_prefix=True)
    assert manager.can_allocate(PROMPT, multimodal=DOG, wait_for_prefix=True)
    assert manager.can_allocate(PROMPT, wait_for_prefix=True)


def test_stored_logits_belong_to_one_image() -> None:
    manager = make_manager()
    handle = manager.allocate("a", PROMPT, multimodal=CAT)
    manager.commit(handle)
    manager.store_last_logits(handle, "logits of the cat")
    manager.free(handle)
    run(manager, PROMPT, DOG)
    assert manager.match_prefix(PROMPT, multimodal=DOG).last_logits is None
    assert manager.allocate("b", PROMPT, multimodal=CAT).last_logits == "logits of the cat"


def test_a_batch_of_requests_may_have_images() -> None:
    manager = make_manager(gpu_blocks=64)
    prompt = {"tokens": PROMPT, "multimodal": CAT}
    first, second, wrong = manager.allocate_batch(
        [{"request_id": "a", **prompt}, {"request_id": "b", **prompt}, {"request_id": "c", **prompt, "multimodal": 5}]
    )
    assert isinstance(wrong, InvalidArgumentError)
    assert isinstance(first, KVCacheHandle)
    assert isinstance(second, KVCacheHandle)
    manager.commit(first)
    assert manager.match_prefix(PROMPT, multimodal=CAT).num_tokens == len(PROMPT) - 1


def test_given_a_waiter_whose_images_come_from_a_generator_then_they_are_not_used_up() -> None:
    async def go() -> int:
        manager = make_manager()
        run(manager, PROMPT, CAT)
        facade = AsyncKVCacheManager(manager)
        handle = await facade.allocate("a", PROMPT, multimodal=iter(DOG))
        manager.commit(handle)
        return manager.match_prefix([*PROMPT, 1], multimodal=DOG).num_tokens

    assert asyncio.run(go()) == len(PROMPT)


def test_given_a_lease_that_ends_inside_an_image_then_whoever_has_the_whole_image_hits() -> None:
    manager = make_manager()
    with pytest.raises(InvalidArgumentError, match="only 8"):
        manager.allocate("a", PROMPT[:8], multimodal=CAT)
    with pytest.raises(InvalidArgumentError, match="only 4"):
        manager.allocate("a", PROMPT[:4], multimodal=CAT, lease=True)
    lease = manager.allocate("a", PROMPT[:8], multimodal=CAT, lease=True)
    manager.commit(lease)
    assert manager.allocate("b", PROMPT, multimodal=CAT).num_cached_tokens == 8
    assert manager.allocate("c", PROMPT, multimodal=DOG).num_cached_tokens == len(TEXT)
    manager.check()


# --- upkeep -----------------------------------------------------------------------------------------------------------


def test_pins_tiers_and_invalidation_know_images() -> None:
    manager = make_manager(host_blocks=16)
    for items in (CAT, DOG):
        run(manager, PROMPT, items)
    with pytest.raises(InvalidArgumentError, match="no full block"):
        manager.cache.pin([IMAGE] * 4, multimodal=[(0, 4, "cat")])
    manager.cache.pin(PROMPT, multimodal=CAT)
    manager.cache.evict(99)
    assert manager.match_prefix([*PROMPT, 1], multimodal=CAT).tokens_by_tier == {Tier.GPU: 16}
    assert manager.match_prefix([*PROMPT, 1], multimodal=DOG).tokens_by_tier == {Tier.GPU: 4, Tier.HOST: 12}
    assert manager.cache.onboard(PROMPT, multimodal=DOG) == 3
    assert manager.cache.invalidate(PROMPT[:8], multimodal=[(6, 2, "cat")]) == 0
    assert manager.cache.invalidate(PROMPT, multimodal=CAT) == 1
    assert manager.match_prefix([*PROMPT, 1], multimodal=CAT).num_tokens == 12
    assert manager.match_prefix([*PROMPT, 1], multimodal=DOG).num_tokens == 16
    manager.check()


def test_given_a_live_request_with_another_image_then_invalidation_does_not_silence_it() -> None:
    manager = make_manager(gpu_blocks=64)
    cat, dog = (manager.allocate(name, PROMPT, multimodal=items) for name, items in (("a", CAT), ("b", DOG)))
    manager.cache.invalidate(PROMPT[:12], multimodal=CAT)
    assert (cat.publishes, dog.publishes) == (False, True)


def test_given_many_images_then_those_that_nobody_holds_are_forgotten() -> None:
    manager = make_manager(gpu_blocks=8)
    manager._cache.rows.symbols = Symbols(min_limit=16)
    live = manager.allocate("live", PROMPT, multimodal=[(6, 6, "live")])
    for number in range(200):
        run(manager, [IMAGE] * 8, [(0, 8, number)])
        assert len(manager._cache.rows.symbols.placeholders) <= 17
    manager.commit(live)
    manager.check()
    assert live.token_ids.tolist() == PROMPT
    assert manager.match_prefix([*PROMPT, 1], multimodal=[(6, 6, "live")]).num_tokens == len(PROMPT)


def test_given_logits_of_a_prompt_that_left_the_cache_then_its_image_is_not_taken_for_another() -> None:
    """The end of a prompt inside a block names its logits; the symbols in that name are in use."""
    manager = make_manager()
    manager._cache.rows.symbols = Symbols(num_numbers=2, min_limit=0)
    cat, other = [key for key in range(9) if hashed(Placeholder(key, 2, IMAGE)) % 2 == 0][:2]  # they want one number
    manager.allocate("keeps the root", [1, 2, 3, 4])
    manager.commit(manager.get("keeps the root"))
    for key in (cat, other):
        manager._cache.rows.symbols.forget_all_but(numbers_in_use(manager._cache))
        handle = manager.allocate(key, [5, IMAGE, IMAGE], multimodal=[(1, 2, key)])
        manager.commit(handle)
        manager.extend(handle)
        manager.commit(handle, [6])
        if key == cat:
            assert manager.store_last_logits(handle, "logits of the cat", 3)
            manager.free(handle)
            manager.cache.evict(99)
    assert manager.match_prefix([5, IMAGE, IMAGE], multimodal=[(1, 2, other)]).last_logits is None


def test_given_images_that_want_one_number_then_each_is_found_by_a_prompt_as_it_was_committed() -> None:
    manager = make_manager(gpu_blocks=64)
    manager._cache.rows.symbols = Symbols(num_numbers=2)
    for key in [key for key in range(9) if hashed(Placeholder(key, 6, IMAGE)) % 2 == 0][:2]:
        handle = manager.allocate(key, num_tokens=len(PROMPT))
        manager.commit(handle, PROMPT, multimodal=[(6, 6, key)])
        assert manager.match_prefix([*PROMPT, 1], multimodal=[(6, 6, key)]).num_tokens == len(PROMPT)
        manager.check()


def test_given_a_forgotten_symbol_in_the_tree_then_check_says_so() -> None:
    manager = make_manager()
    run(manager, PROMPT, CAT)
    manager._cache.rows.symbols.forget_all_but(set())
    with pytest.raises(InvariantError, match="forgotten"):
        manager.check()


def fingerprint_of_last_block(lengths: tuple[int, ...], items: Any) -> int:
    """That of the fifth block, behind runs that end at these lengths."""
    manager = make_manager(gpu_blocks=64)
    for length in (*lengths, 20):
        run(manager, [*PROMPT, 5, 6, 7, 8][:length], items)
        manager._cache.rows.symbols.forget_all_but(numbers_in_use(manager._cache))
    return next(node.fingerprint for node in all_nodes(manager._cache) if node.start == 4)


def test_given_the_same_text_behind_other_images_then_policies_can_tell_the_runs_apart() -> None:
    assert fingerprint_of_last_block((16,), CAT) == fingerprint_of_last_block((12, 16), CAT)
    assert len({fingerprint_of_last_block((16,), items) for items in (CAT, DOG, None)}) == 3


# --- commits and rewinds ----------------------------------------------------------------------------------------------


def test_a_prompt_is_committed_by_its_own_ids_in_any_pieces() -> None:
    manager = make_manager()
    handle = manager.allocate("a", PROMPT, multimodal=CAT)
    for start, stop in ((0, 6), (6, 9), (9, 16)):
        manager.commit(handle, PROMPT[start:stop])
    assert manager.match_prefix([*PROMPT, 1], multimodal=CAT).num_tokens == len(PROMPT)
    manager.check()


def test_given_other_ids_or_another_image_than_announced_then_the_commit_is_refused() -> None:
    manager = make_manager()
    handle = manager.allocate("a", PROMPT, multimodal=CAT)
    with pytest.raises(InvalidArgumentError, match="token 6 was announced as 99 and is committed as 98"):
        manager.commit(handle, [*TEXT, 98])
    with pytest.raises(InvalidArgumentError, match="token 6 was announced for another multimodal item"):
        manager.commit(handle, PROMPT, multimodal=DOG)
    with pytest.raises(InvalidArgumentError, match="token 0 was announced for another multimodal item, or for none"):
        manager.commit(handle, PROMPT, multimodal=[(0, 2, "cat")])
    manager.commit(handle, PROMPT, multimodal=CAT)
    assert manager.match_prefix([*PROMPT, 1], multimodal=CAT).num_tokens == len(PROMPT)
    assert len(manager._cache.rows.symbols.placeholders) == 1


def test_an_image_may_come_after_the_prompt() -> None:
    manager = make_manager()
    handle = manager.allocate("a", TEXT)
    manager.commit(handle)
    manager.extend(handle, 10)
    manager.commit(handle, PROMPT[6:], multimodal=[(0, 6, "cat")])
    assert handle.token_ids.tolist() == PROMPT
    assert manager.match_prefix([*PROMPT, 1], multimodal=CAT).num_tokens == len(PROMPT)
    assert manager.match_prefix([*PROMPT, 1]).num_tokens == len(TEXT)
    manager.check()


def test_images_of_a_batch_lie_in_the_tokens_of_one_sequence_each() -> None:
    manager = make_manager(gpu_blocks=64)
    a, b = (manager.allocate(name, [number]) for number, name in enumerate("ab"))
    manager.commit(a)
    manager.commit(b)
    manager.extend_batch([a, b], [3, 4])
    tokens = [IMAGE] * 7
    with pytest.raises(InvalidArgumentError, match="over the end of its sequence's tokens, at 3"):
        manager.commit_batch([a, b], tokens, [3, 4], multimodal=[(2, 2, "cat")])
    manager.commit_batch([a, b], tokens, [3, 4], multimodal=[(0, 3, "cat"), (3, 2, "dog")])
    assert manager.match_prefix([0, IMAGE, IMAGE, IMAGE, 5], multimodal=[(1, 3, "cat")]).num_tokens == 4
    assert manager.match_prefix([1, IMAGE, IMAGE, IMAGE, 5], multimodal=[(1, 2, "dog")]).num_tokens == 4
    manager.extend_batch([a, b])
    manager.commit_batch([a, b], [IMAGE, 3], multimodal=[(0, 1, "one token")])
    with pytest.raises(InvalidArgumentError, match="need the ids"):
        manager.commit(a, 1, multimodal=[(0, 1, "cat")])
    with pytest.raises(InvalidArgumentError, match="need the ids"):
        manager.commit(a, multimodal=[(0, 1, "cat")])
    with pytest.raises(InvalidArgumentError, match="need the ids"):
        manager.commit_batch([a], None, [1], multimodal=[(0, 1, "cat")])
    manager.check()


def one_by_one(manager: KVCacheManager, handle: KVCacheHandle, tokens: list[int]) -> None:
    batch = manager.batch([handle])
    for token in tokens:
        manager.extend_batch(batch)
        manager.commit_batch(batch, [token])


def at_once(manager: KVCacheManager, handle: KVCacheHandle, tokens: list[int]) -> None:
    manager.extend(handle, len(tokens))
    manager.commit(handle, tokens)


@pytest.mark.parametrize("go_on", [one_by_one, at_once])
@pytest.mark.parametrize("length", [7, 8, 11])
def test_given_a_request_rewound_into_an_image_then_what_it_commits_there_belongs_to_the_image(
    length: int, go_on: Callable[[KVCacheManager, KVCacheHandle, list[int]], None]
) -> None:
    manager = make_manager(gpu_blocks=64)
    handle = manager.allocate("a", PROMPT, multimodal=CAT)
    manager.commit(handle)
    manager.rewind(handle, len(PROMPT) - length)
    go_on(manager, handle, PROMPT[length:])
    assert handle.token_ids.tolist() == PROMPT
    manager.free(handle)
    manager.check()
    assert manager.stats().pool().cached == 4, "what was computed again is what was there"


def test_given_an_image_that_is_not_complete_then_another_cannot_begin_in_it() -> None:
    manager = make_manager()
    handle = manager.allocate("a", PROMPT, multimodal=CAT)
    manager.commit(handle)
    manager.rewind(handle, len(PROMPT) - 9)
    manager.extend(handle, 7)
    with pytest.raises(InvalidArgumentError, match="'cat' goes on for 3 tokens"):
        manager.commit(handle, PROMPT[9:], multimodal=[(2, 2, "dog")])
    manager.commit(handle, PROMPT[9:], multimodal=[(3, 1, "dog")])
    assert manager.match_prefix([*PROMPT, 1], multimodal=[*CAT, (12, 1, "dog")]).num_tokens == 16
    manager.check()


def test_given_a_request_rewound_to_before_an_image_then_its_places_are_text_again() -> None:
    manager = make_manager()
    handle = manager.allocate("a", PROMPT, multimodal=CAT)
    manager.commit(handle)
    manager.rewind(handle, len(PROMPT) - len(TEXT))
    at_once(manager, handle, PROMPT[6:])
    assert manager.match_prefix([*PROMPT, 1]).num_tokens == len(PROMPT)
    assert manager.match_prefix([*PROMPT, 1], multimodal=CAT).num_tokens == len(PROMPT)
    manager.check()


def test_given_a_swapped_request_with_an_image_then_it_comes_back_to_its_own_blocks() -> None:
    manager = make_manager(host_blocks=16)
    handle = manager.allocate("a", PROMPT, multimodal=CAT)
    manager.commit(handle)
    manager.swap_out(handle)
    run(manager, PROMPT, DOG)
    assert handle.token_ids.tolist() == PROMPT
    manager.swap_in(handle)
    manager.check()
    assert handle.token_ids.tolist() == PROMPT


# --- events -----------------------------------------------------------------------------------------------------------


def stored(manager: KVCacheManager) -> list[Stored]:
    with manager.subscribe() as subscription:
        return [event for event in subscription.poll().events if isinstance(event, Stored)]


def test_events_show_the_callers_tokens_and_the_images_behind_them() -> None:
    manager = make_manager()
    with manager.subscribe() as subscription:
        handle = manager.allocate("a", PROMPT, multimodal=[(6, 6, "cat"), (13, 2, 5)])
        manager.commit(handle, 8)
        manager.commit(handle)
        first, second = (event for event in subscription.poll().events if isinstance(event, Stored))
    assert (first.tokens.tolist(), first.multimodal) == (PROMPT[:8], (MultimodalItem(6, 6, "cat"),))
    assert (second.tokens.tolist(), second.multimodal) == (PROMPT[8:], ((-2, 6, "cat"), (5, 2, 5)))
    (snapshot,) = stored(manager)
    assert (snapshot.tokens.tolist(), snapshot.multimodal) == (PROMPT, ((6, 6, "cat"), (13, 2, 5)))


def test_given_a_long_image_over_several_runs_then_each_says_where_it_began() -> None:
    manager = make_manager(gpu_blocks=64)
    tokens, items = [3, *[IMAGE] * 14, 3], [(1, 14, "cat")]
    handle = manager.allocate("a", tokens, multimodal=items)
    for reader in "bcd":  # who comes to read what is there ends a run
        manager.commit(handle, 4)
        manager.allocate(reader, tokens, multimodal=items)
    manager.commit(handle)
    assert manager.stats().num_cached_runs == 4
    events = stored(manager)
    assert [event.multimodal for event in events] == [((1 - 4 * run, 14, "cat"),) for run in range(4)]
    assert [event.tokens.tolist() for event in events] == [tokens[4 * run : 4 * run + 4] for run in range(4)]


def test_digests_follow_from_the_events_and_are_the_same_in_another_process() -> None:
    here, there = make_manager(gpu_blocks=64), make_manager(gpu_blocks=64)
    there._cache.rows.symbols = Symbols(num_numbers=4)  # other symbols for the same images
    orders = ((here, (CAT, DOG, None)), (there, (None, DOG, CAT)))
    for manager, order in orders:
        for items in order:
            run(manager, PROMPT, items)
    found = []
    for manager, _ in orders:
        events = stored(manager)
        for event in events:
            parent = root_digest(event.scope) if event.parent is None else event.parent
            assert tuple(chain_digests(parent, event.tokens, 4, event.multimodal)) == event.digests
        found.append({digest for event in events for digest in event.digests})
    assert found[0] == found[1]
    assert len(found[0]) == 1 + 3 * 3


def test_a_router_finds_a_prompt_by_its_tokens_and_images() -> None:
    manager, mirror = make_manager(), CacheMirror()
    with manager.subscribe() as subscription:
        run(manager, PROMPT, CAT)
        mirror.apply(subscription.poll().events)
    tokens = np.array(PROMPT, np.int32)
    for items, blocks in ((CAT, 4), (DOG, 1), ([], 1)):
        named = [MultimodalItem(*item) for item in items]
        assert mirror.longest_prefix(chain_digests(root_digest(ReuseScope()), tokens, 4, named)) == blocks


def test_a_block_with_an_image_has_another_digest_than_any_block_of_text() -> None:
    parent, block = bytes(32), np.array([1, 2, 3, 4], np.int32)
    items = [[], [(0, 4, "cat")], [(0, 4, b"cat")], [(0, 3, "cat")], [(1, 3, "cat")], [(-1, 4, "cat")], [(0, 4, 7)]]
    named = [[MultimodalItem(*item) for item in some] for some in items]
    digests = {tuple(chain_digests(parent, block, 4, some)) for some in named}
    assert len(digests) == len(items)
    assert chain_digests(parent, block, 4, [MultimodalItem(4, 2, "cat")]) == chain_digests(parent, block, 4)
