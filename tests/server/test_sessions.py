"""`/v1/sessions` over real HTTP: who may see what, and what requests say of their sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from live import Live, access, call, openai_client, refusal, until

PROMPT = "w5 w6 w7 w8 w9 w10 w11 w12 w13"


def ask(live: Live, headers: dict[str, str] | None = None, path: str = "completions", **body: Any) -> None:
    sent = body if path != "completions" else {"prompt": PROMPT, "max_tokens": 1} | body
    httpx.post(f"{live.url}/v1/{path}", json=sent, headers=headers, timeout=60).raise_for_status()


@pytest.fixture(autouse=True)
def nothing_cached(engine: Any) -> None:
    """Other tests of this engine ask the same prompt, and what two sessions use is neither's own."""
    engine.reset_prefix_cache()


def given_up(engine: Any) -> int:
    return sum(
        node.num_blocks for root in engine.manager._cache.roots.values() for node in root.subtree() if node.leaves
    )


def test_given_a_session_then_it_is_listed_pauses_goes_on_and_ends(live: Live, engine: Any) -> None:
    ask(live, session_id="chat")
    listed = call(live, "/v1/sessions")["sessions"][0]
    seen = call(live, "/v1/sessions/chat")
    assert {**seen, "idle_seconds": 0} == {**listed, "idle_seconds": 0}
    assert (seen["id"], seen["state"], seen["requests"], seen["parent"]) == ("chat", "idle", 0, None)
    assert seen["tokens_by_tier"] == {"GPU": seen["own_tokens"]}
    assert call(live, "/v1/sessions/chat/pause", {"expected_seconds": 9})["moved_blocks"] == 0
    paused = call(live, "/v1/sessions/chat")
    assert paused["state"] == "paused"
    assert 0 < paused["returns_in_seconds"] <= 9
    assert call(live, "/v1/sessions/chat/resume", {})["moved_blocks"] == 0
    assert call(live, "/v1/sessions/chat/fork", {"child": "a/b"})["parent"] == "chat"
    assert call(live, "/v1/sessions/a/b")["id"] == "a/b"
    assert call(live, "/v1/sessions/chat/end", {})["given_up_blocks"] == given_up(engine) > 0
    assert "chat" not in [each["id"] for each in call(live, "/v1/sessions")["sessions"]]
    assert call(live, "/v1/sessions/chat")["state"] == "ended"


def test_given_sessions_of_two_tenants_then_neither_sees_nor_ends_those_of_the_other(
    serve: Callable[..., Live],
) -> None:
    live = serve(access=access("one", "other"))  # other tests of this engine have tenants of other names
    with openai_client(live, "sk-one") as client:
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"session_id": "chat"})
    assert call(live, "/v1/sessions", key="sk-other")["sessions"] == []
    for path, body in (("", None), ("/end", {}), ("/pause", {}), ("/resume", {})):
        status, error = refusal(live, f"/v1/sessions/chat{path}", body, "sk-other")
        assert (status, error["code"]) == (404, "not_found")
        assert "no such session" in error["message"]
    assert [each["id"] for each in call(live, "/v1/sessions", key="sk-one")["sessions"]] == ["chat"]


def test_given_mistakes_then_they_are_named(live: Live) -> None:
    ask(live, session_id="chat")
    assert refusal(live, "/v1/sessions/chat/pause", {"expected_seconds": -1})[0] == 400
    assert refusal(live, "/v1/sessions/chat/fork", {"child": "chat"})[0] == 400
    call(live, "/v1/sessions/chat/end", {})
    status, error = refusal(live, "/v1/sessions/chat/pause", {})
    assert status == 400
    assert "has ended" in error["message"]


def test_given_headers_of_a_sub_agent_and_its_last_request_then_it_is_forked_and_ends(live: Live, engine: Any) -> None:
    ask(live, {"x-session-id": "main"})
    ask(live, {"x-session-id": "helper", "x-parent-session-id": "main"}, prompt=PROMPT + " w14 w15 w16 w17 w18")
    assert call(live, "/v1/sessions/helper")["parent"] == "main"
    ask(live, {"x-session-id": "helper", "x-session-end": "true"}, prompt=PROMPT + " w14 w15 w16 w17 w18")
    until(lambda: call(live, "/v1/sessions/helper")["state"] == "ended")
    assert call(live, "/v1/sessions/main")["missing_tokens"] < 4
    assert given_up(engine) > 0


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompt_cache_key": "k"}, "k"),
        ({"safety_identifier": "s"}, "s"),
        ({"metadata": {"session_id": "m"}}, "m"),
        ({"nvext": {"agent_context": {"session_id": "n"}, "agent_hints": {"osl": 8}}}, "n"),
    ],
)
def test_given_fields_of_other_clients_then_they_name_the_session(live: Live, body: Any, name: str) -> None:
    ask(live, **body)
    assert call(live, "/v1/sessions")["sessions"][0]["id"] == name


def test_given_a_chat_of_which_nobody_tells_then_its_turns_are_one_session(live: Live) -> None:
    def untold() -> set[str]:
        names = {each["id"] for each in call(live, "/v1/sessions")["sessions"]}
        return {name for name in names if name.startswith("begins-")}

    before = untold()
    first = {"role": "user", "content": "w91 w17 w91 w17 w91"}  # no other test begins so
    more = [{"role": "assistant", "content": "w8"}, {"role": "user", "content": "w9"}]
    for messages in ([first], [first, *more], [{"role": "user", "content": "w17 w91 w17 w91 w17"}]):
        ask(live, path="chat/completions", messages=messages, max_tokens=1)
    assert len(untold() - before) == 2


def test_given_an_expected_continuation_then_its_session_pauses_with_the_end_of_the_request(live: Live) -> None:
    ask(live, session_id="chat", expected_seconds=50)
    until(lambda: call(live, "/v1/sessions/chat")["state"] == "paused")
