"""A session begins, is forked, pauses, goes on and ends. `stateful/test_sessions_machine.py` has all of it, drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvpool import KVCacheManager, ReuseScope, Tier
from kvpool.core import sessions
from kvpool.core.sessions import SessionState
from kvpool.errors import InvalidArgumentError, UnknownSessionError
from managers import Clock, cached, computed, make_manager, running

PROMPT = list(range(8))  # two blocks


def turn(manager: KVCacheManager, tokens: list[int], session: str | None, **options: Any) -> None:
    """A request from its beginning to its end."""
    manager.free(computed(manager, f"turn {tokens} of {session}", tokens, session=session, **options))


def found(manager: KVCacheManager, tokens: list[int], **options: Any) -> int:
    return manager.match_prefix([*tokens, 999], **options).num_tokens


def test_given_an_end_then_what_only_that_session_used_goes_first_and_not_before_room_is_needed() -> None:
    manager = make_manager()
    turn(manager, [*PROMPT, 1, 2, 3, 4], "chat")
    turn(manager, list(range(50, 58)), "other")
    assert manager.sessions.end("chat") == 3
    assert found(manager, [*PROMPT, 1, 2, 3, 4]) == 12
    manager.cache.evict(3)
    assert (found(manager, PROMPT), found(manager, list(range(50, 58)))) == (0, 8)
    assert manager.stats().evictions["ended"] == 3
    manager.check()


def test_given_a_sub_agent_that_computed_the_shared_prompt_first_when_it_ends_then_its_caller_keeps_it() -> None:
    manager = make_manager()
    turn(manager, [*PROMPT, 7, 7, 7, 7], "agent")
    turn(manager, [*PROMPT, 8, 8, 8, 8], "main")
    would = manager.cache.invalidate(session="agent", dry_run=True)
    assert (would.num_tokens, would.tokens_of_others) == (16, 12)
    assert manager.sessions.end("agent") == 1
    manager.cache.evict(1)
    assert found(manager, [*PROMPT, 8, 8, 8, 8]) == 12
    assert manager.cache.invalidate(session="agent") == 3  # for secrets: it takes what follows along
    assert found(manager, PROMPT) == 0


def test_given_a_fork_when_both_ended_then_what_both_used_is_given_up_and_not_before() -> None:
    manager = make_manager()
    turn(manager, PROMPT, "main")
    manager.sessions.fork("main", "agent")
    turn(manager, [*PROMPT, 1, 2, 3, 4], "agent")
    manager.cache.evict(1)  # so that the shared run is a leaf
    assert manager.sessions.end("main") == 0
    manager.check()
    assert manager.sessions.get("main").state is SessionState.ENDED
    manager.sessions.end("agent")
    manager.check()
    turn(manager, list(range(50, 58)), None)
    manager.cache.evict(2)
    assert (found(manager, PROMPT), found(manager, list(range(50, 58)))) == (0, 8)


def test_given_strangers_that_used_the_same_run_then_no_end_gives_it_up() -> None:
    manager = make_manager()
    for name in ("one", "other"):
        turn(manager, [*PROMPT, 9], name)
    manager.sessions.end("one")
    manager.sessions.end("other")
    turn(manager, list(range(50, 58)), "third")
    manager.cache.evict(2)
    assert found(manager, list(range(50, 58))) == 8 or found(manager, PROMPT) == 8
    assert manager.stats().evictions["ended"] == 0


def test_given_a_session_that_comes_back_after_its_end_then_what_is_left_is_its_own_again() -> None:
    manager = make_manager()
    turn(manager, PROMPT, "chat")
    manager.sessions.end("chat")
    turn(manager, [*PROMPT, 1, 2, 3, 4], "chat")
    assert manager.sessions.get("chat").state is SessionState.IDLE
    turn(manager, list(range(50, 58)), None)
    manager.cache.evict(2)
    assert manager.stats().evictions["ended"] == 0
    assert manager.sessions.get("chat").own_tokens == manager.sessions.end("chat") * 4
    manager.check()


def test_given_an_end_while_a_request_runs_then_it_goes_on_and_is_given_up_with_its_end() -> None:
    manager = make_manager()
    handle = running(manager, "r", 8, session="chat")
    manager.sessions.end("chat")
    assert manager.sessions.get("chat").state is SessionState.RUNNING
    turn(manager, list(range(50, 58)), None)
    manager.free(handle)
    manager.cache.evict(2)
    assert (found(manager, PROMPT), found(manager, list(range(50, 58)))) == (0, 8)


def test_given_names_of_two_tenants_then_each_has_a_session_of_its_own() -> None:
    manager = make_manager()
    scope = ReuseScope(tenant="t")
    turn(manager, PROMPT, "chat")
    turn(manager, PROMPT, "chat", scope=scope)
    assert manager.sessions.end("chat", tenant="t") == 2
    manager.cache.evict(2)
    assert (found(manager, PROMPT), found(manager, PROMPT, scope=scope)) == (8, 0)
    assert [info.tenant for info in manager.sessions.list()] == [""]
    assert manager.sessions.list(tenant="t") == []


def test_given_a_full_gpu_when_a_session_pauses_for_longer_than_idle_blocks_last_then_it_moves_to_the_host() -> None:
    clock = Clock()
    manager = make_manager(gpu_blocks=5, host_blocks=8, clock=clock)
    cached(manager, 8, first=50)  # idle since 0 s
    clock.now = 10.0
    turn(manager, [*PROMPT, 1, 2, 3, 4], "agent")
    assert manager.sessions.pause("agent", 5.0) == 0  # it is back before those blocks went
    assert manager.sessions.pause("agent", 20.0) == 3
    info = manager.sessions.get("agent")
    assert info.state is SessionState.PAUSED
    assert info.returns_in == 20.0
    assert info.tokens_by_tier == {Tier.HOST: 12}
    assert (info.missing_tokens, info.num_tokens) == (0, 12)
    assert manager.sessions.resume("agent") == 3
    assert manager.sessions.get("agent").tokens_by_tier == {Tier.GPU: 12}
    manager.check()


def test_given_room_or_no_host_or_no_time_when_a_session_pauses_then_nothing_moves() -> None:
    small: dict[str, Any] = {"host_blocks": 8, "gpu_blocks": 4}
    for options, seconds in (({"host_blocks": 8}, 1e9), ({"gpu_blocks": 4}, 1e9), (small, None)):
        manager = make_manager(**options)
        cached(manager, 4, first=50)
        turn(manager, [*PROMPT, 1, 2, 3, 4], "agent")
        assert manager.sessions.pause("agent", seconds) == 0


def test_given_no_room_when_a_session_resumes_then_it_stays_below() -> None:
    manager = make_manager(gpu_blocks=4, host_blocks=8)
    turn(manager, PROMPT, "agent")
    manager.cache.offload(2)
    handle = running(manager, "busy", 16, first=50)
    assert manager.sessions.resume("agent") == 0
    manager.free(handle)
    assert manager.sessions.resume("agent") == 2


def test_given_many_sessions_of_which_nothing_is_left_then_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager(gpu_blocks=8)
    manager.sessions.fork("kept", "helper")
    manager.sessions.end("helper")
    for number in range(3 * sessions.FEW_SESSIONS):
        turn(manager, [number] * 5, f"chat {number}")
    assert len(manager._cache.known_sessions) <= sessions.FEW_SESSIONS
    manager.check()
    with pytest.raises(UnknownSessionError, match="no session 'chat 0' is known"):
        manager.sessions.get("chat 0")


def test_given_mistakes_then_each_is_named() -> None:
    manager = make_manager()
    turn(manager, PROMPT, "chat")
    manager.sessions.fork("chat", "agent")
    manager.sessions.fork("chat", "agent")  # once more is no mistake
    with pytest.raises(InvalidArgumentError, match="'agent' has begun already; fork before its first request"):
        manager.sessions.fork("other", "agent")
    with pytest.raises(InvalidArgumentError, match="cannot be forked from itself"):
        manager.sessions.fork("chat", "chat")
    last = "agent"
    for number in range(sessions.MAX_DEPTH - 2):
        manager.sessions.fork(last, last := f"agent {number}")
    with pytest.raises(InvalidArgumentError, match="forks deep already"):
        manager.sessions.fork(last, "too deep")
    with pytest.raises(UnknownSessionError, match="no session 'chat' of tenant 't' is known"):
        manager.sessions.end("chat", tenant="t")
    manager.sessions.end("chat")
    for verb in (manager.sessions.pause, manager.sessions.resume):
        with pytest.raises(InvalidArgumentError, match="'chat' has ended"):
            verb("chat")
    for seconds in (-1, math.nan, "3", True):
        with pytest.raises(InvalidArgumentError, match="expected_seconds="):
            manager.sessions.pause("chat", seconds)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="session must be a string"):
        manager.sessions.end(7)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="dry_run says what a session would take"):
        manager.cache.invalidate(PROMPT, dry_run=True)  # type: ignore[call-overload]


def test_given_a_request_that_does_not_fit_then_no_session_begins() -> None:
    manager = make_manager(gpu_blocks=2)
    with pytest.raises(Exception, match="needs"):
        manager.allocate("large", list(range(50)), session="chat")
    assert manager.sessions.list() == []
