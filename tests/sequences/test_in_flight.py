"""Requests that compute the same at the same time: who publishes, and what others may take."""

from __future__ import annotations

import pytest

from kvpool import KVCacheManager
from managers import HOW, commit_all, forget, make_manager, manager_with


def run_through(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    manager.free(commit_all(manager, manager.allocate(name, tokens)))


def test_nothing_is_matchable_when_it_is_only_scheduled() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(16)), reserve=8)
    manager.commit(handle, 4)
    assert manager.match_prefix([*range(16), 1]).num_tokens == 4


@pytest.mark.parametrize("num_tokens", [8, 11])
def test_the_next_whole_block_of_a_prompt_is_in_flight_until_it_is_computed(num_tokens: int) -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(num_tokens)))
    for num_committed, in_flight in ((0, True), (4, True), (8, False)):
        manager.commit(handle, num_committed - handle.num_committed)
        match = manager.match_prefix([*range(num_tokens), 1])
        assert (match.num_tokens, match.in_flight) == (num_committed, in_flight)


def test_last_logits_hit_only_at_their_exact_length() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(6)))
    manager.commit(handle, 6)
    manager.store_last_logits(handle, "logits")
    manager.extend(handle, 2)
    manager.commit(handle, [6, 7])
    assert manager.match_prefix(list(range(6))).last_logits == "logits"
    for length in (4, 5, 7, 8):
        assert not manager.match_prefix(list(range(length))).has_last_logits


def test_a_request_freed_before_it_wrote_anything_leaves_nothing_to_match() -> None:
    manager = make_manager()
    manager.free(manager.allocate("a", list(range(8))))
    assert manager.match_prefix([*range(8), 1]).num_tokens == 0
    assert manager.inspect.num_free_blocks() == 16


def test_a_count_past_the_known_ids_publishes_what_is_known() -> None:
    manager = manager_with(block_size=1)
    handle = manager.allocate("a", [0])
    manager.commit(handle, 1)
    manager.extend(handle)
    manager.commit(handle, 1)  # its id is not known
    manager.check()
    assert manager.match_prefix([0, 0, 0]).num_tokens == 1


def test_dropping_a_request_does_not_drop_what_another_published() -> None:
    manager = manager_with()
    first = manager.allocate("a", [1, 2, 3, 4])
    second = commit_all(manager, manager.allocate("b", [1, 2, 3, 4]))
    commit_all(manager, first)  # merged with what b published
    manager.free(second)
    manager.free(first, keep=False)
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 4


def test_the_next_producer_of_a_prefix_is_known_when_the_first_one_ends() -> None:
    manager = manager_with(gpu_blocks=40)
    first = manager.allocate("a", [1] * 8)
    manager.allocate("b", [1] * 8)
    manager.free(first)
    assert "'b'" in manager.can_allocate([1] * 8, wait_for_prefix=True).reason
    manager.check()


def test_requests_freed_together_while_in_flight_leave_nothing_tracked() -> None:
    manager = manager_with(gpu_blocks=40)
    handles = [manager.allocate(name, [1] * 8) for name in ("a", "b", "c")]
    manager.free_batch([handles[1], handles[0]])
    manager.check()
    assert "'c'" in manager.can_allocate([1] * 8, wait_for_prefix=True).reason
    manager.free(handles[2])
    assert manager.can_allocate([1] * 8, wait_for_prefix=True)
    manager.check()


def test_a_request_that_falls_silent_hands_over_what_it_was_computing() -> None:
    manager = manager_with(gpu_blocks=40)
    manager.allocate("a", [1] * 8, session="s")
    manager.allocate("b", [1] * 8)
    assert "'a'" in manager.can_allocate([1] * 8, wait_for_prefix=True).reason
    manager.cache.invalidate(session="s")
    manager.check()
    assert "'b'" in manager.can_allocate([1] * 8, wait_for_prefix=True).reason


def test_a_silent_request_goes_on_without_ids() -> None:
    manager = manager_with(gpu_blocks=40)
    handle = commit_all(manager, manager.allocate("a", [1] * 9))
    manager.cache.reset()
    manager.extend(handle, 8)
    manager.commit(handle, 8)
    manager.check()
    manager.free(handle)
    manager.check()


@HOW
def test_logits_are_forgotten_with_the_block_that_their_prompt_ends_in(how: str) -> None:
    manager = manager_with(gpu_blocks=40)
    manager.allocate("other", [7] * 5)  # so that the scope stays in use
    handle = manager.allocate("a", [1, 2], session="s")
    manager.commit(handle)
    manager.store_last_logits(handle, "old")
    manager.extend(handle, 2)
    manager.commit(handle, [3, 4])
    assert manager.match_prefix([1, 2]).last_logits == "old"
    forget(manager, how, [1, 2, 3, 4])
    manager.free(handle)
    run_through(manager, "b", [1, 2, 3, 4])
    assert manager.match_prefix([1, 2]).last_logits is None


def test_given_two_that_compute_the_same_when_the_first_is_silenced_then_others_wait_for_the_second() -> None:
    manager = make_manager()
    prompt = list(range(12))
    silenced = manager.allocate("a", prompt, session="s")
    other = manager.allocate("b", prompt)
    assert manager.match_prefix([*prompt, 1]).in_flight
    manager.cache.invalidate(session="s")
    assert manager.match_prefix([*prompt, 1]).in_flight
    commit_all(manager, silenced)
    assert manager.match_prefix([*prompt, 1]).num_tokens == 0
    commit_all(manager, other)
    match = manager.match_prefix([*prompt, 1])
    assert (match.num_tokens, bool(match.in_flight)) == (12, False)
    manager.check()


def test_a_request_that_was_rewound_and_no_longer_computes_its_prompt_keeps_nobody_waiting() -> None:
    manager = make_manager()
    handle = manager.allocate("a", list(range(12)))
    manager.commit(handle, 4)
    assert manager.match_prefix([*range(12), 1]).in_flight
    manager.rewind(handle, 12)
    assert not manager.match_prefix([*range(12), 1]).in_flight
    manager.check()
