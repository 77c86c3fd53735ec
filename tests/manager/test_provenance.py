"""Who computed what is cached: a run that takes blocks of a second request goes with the sessions of both."""

from __future__ import annotations

import pytest

from kvpool import KVCacheHandle, KVCacheManager, LayerSpec
from kvpool.core.handle import note_sessions
from managers import FULL, Clock, make_manager

PROMPT = list(range(24))


def computed(manager: KVCacheManager, handle: KVCacheHandle) -> KVCacheHandle:
    """Commits the rest of a prompt."""
    manager.commit(handle)
    manager.check()
    return handle


def adopted_from_below(first: str | None, second: str | None, **options: object) -> KVCacheManager:
    """Two requests computed one block; the first one's lay on the host when the second one's took its place."""
    manager = make_manager(host_blocks=8, **options)
    one = manager.allocate("one", [1, 2, 3, 4, 9], session=first)
    other = manager.allocate("other", [1, 2, 3, 4, 7], session=second)
    manager.free(computed(manager, one))
    manager.cache.offload(4)
    manager.free(computed(manager, other))
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 4
    return manager


@pytest.mark.parametrize("first", [None, "t"])
def test_given_a_run_on_the_host_when_a_session_computes_it_again_then_it_goes_with_the_session(
    first: str | None,
) -> None:
    manager = adopted_from_below(first, "s")
    assert manager.cache.invalidate(session="s") == 1
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 0
    manager.check()


def test_given_a_run_that_another_request_computed_again_when_its_shadow_is_left_then_it_goes_with_its_first_session() -> (
    None
):
    manager = adopted_from_below("t", "s", host_write="through")
    manager.cache.evict(4)  # what is on the host now is the first one's
    assert manager.cache.invalidate(session="t") == 1


def test_given_forks_when_their_blocks_take_the_place_of_a_run_below_then_it_goes_with_their_session() -> None:
    manager = make_manager(host_blocks=8)
    one = manager.allocate("one", [1, 2, 3, 4, 9])
    other = manager.allocate("other", [1, 2, 3, 4, 7], session="s")
    manager.free(computed(manager, one))
    manager.cache.offload(4)
    manager.mark_written(other, 4)
    (fork,) = manager.fork(other, "fork")
    for handle in (other, fork):
        manager.free(computed(manager, handle))
    assert manager.cache.invalidate(session="s") == 1


def test_given_lost_window_blocks_when_a_session_brings_them_back_then_the_run_goes_with_it_from_there_on() -> None:
    windowed = LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=4)
    manager = make_manager(FULL, windowed, gpu_blocks=64)
    one = manager.allocate("one", PROMPT)
    other = manager.allocate("other", PROMPT, session="s")
    computed(manager, one)
    assert manager.cache.evict(3) == 3  # the windowed blocks between the sink and the window
    manager.free(one)
    manager.free(computed(manager, other))
    assert manager.cache.invalidate(session="s") == 5
    assert manager.match_prefix(PROMPT).num_tokens == 4
    manager.check()


@pytest.mark.parametrize("num_lost", [1, 2, 3, 4])
def test_given_lost_window_blocks_inside_a_run_behind_another_when_they_are_back_then_it_is_cut_there(
    num_lost: int,
) -> None:
    windowed = LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=4)
    manager, prompt = make_manager(FULL, windowed, gpu_blocks=80), list(range(32))
    manager.free(computed(manager, manager.allocate("before", prompt[:8])))
    one, other = manager.allocate("one", prompt), manager.allocate("other", prompt, session="s")
    computed(manager, one)
    assert manager.cache.evict(num_lost) == num_lost  # from the window backwards
    manager.free(one)
    manager.free(computed(manager, other))
    assert manager.cache.invalidate(session="s") == 2 + num_lost
    assert manager.match_prefix([*prompt, 1]).num_tokens == 24 - 4 * num_lost
    manager.check()


def test_given_a_run_computed_again_when_the_shorter_time_to_live_ends_then_it_is_gone() -> None:
    for ttls in ((None, 5.0), (5.0, None), (5.0, 60.0)):
        clock = Clock()
        manager = make_manager(host_blocks=8, clock=clock)
        one, other = (manager.allocate(name, [1, 2, 3, 4, 9], ttl=ttl) for name, ttl in enumerate(ttls))
        manager.free(computed(manager, one))
        manager.cache.offload(4)
        manager.free(computed(manager, other))
        clock.now = 4.0
        assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 4
        clock.now = 6.0
        assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 0


@pytest.mark.parametrize("copied", [False, True])
def test_given_logits_behind_a_foreign_run_when_the_session_that_stored_them_is_invalidated_then_they_go(
    copied: bool,
) -> None:
    manager = make_manager()
    manager.free(computed(manager, manager.allocate("one", [1, 2, 3, 4])))
    if copied:  # the one that stores them has the beginning of a block from the session
        manager.free(computed(manager, manager.allocate("s", [1, 2, 3, 4, 5, 6, 7, 8], session="s")))
        other = computed(manager, manager.allocate("other", [1, 2, 3, 4, 5, 0]))
    else:
        other = computed(manager, manager.allocate("other", [1, 2, 3, 4], session="s"))
    prompt = other.token_ids.tolist()
    manager.store_last_logits(other, "made by s")
    manager.cache.invalidate(session="s")
    manager.free(other)
    manager.free(computed(manager, manager.allocate("again", [*prompt, 0, 0])))
    assert manager.match_prefix(prompt).last_logits is None


def test_given_logits_of_another_request_when_a_session_is_invalidated_then_they_stay() -> None:
    manager = make_manager()
    one = computed(manager, manager.allocate("one", [1, 2, 3, 4]))
    manager.store_last_logits(one, "mine")
    manager.free(one)
    manager.free(computed(manager, manager.allocate("other", [1, 2, 3, 4, 5, 6, 7, 8], session="s")))
    manager.cache.invalidate(session="s")
    assert manager.match_prefix([1, 2, 3, 4]).last_logits == "mine"


def test_given_the_same_sessions_again_then_a_request_names_each_of_them_once() -> None:
    handle = make_manager().allocate("a", [1, 2, 3], session="own")
    for _ in range(3):
        note_sessions(handle, ("own", "other", "third"))
    assert (handle.copied_sessions, handle.sessions) == (("other", "third"), ("own", "other", "third"))
