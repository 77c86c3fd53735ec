"""What clients tell of their sessions, one case for each form."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.told import MAX_NAME, Told, short_name, told_session

CLAUDE = {"x-claude-code-session-id": "c"}


@pytest.mark.parametrize(
    ("body", "headers", "told"),
    [
        ({}, {}, Told()),
        ({"session_id": "a", "user": "u"}, {"x-session-id": "b"}, Told("a")),
        ({"session_id": "a"}, {"x-parent-session-id": "p"}, Told("a", "p")),
        ({"user": "u"}, {"x-session-id": "b"}, Told("b")),
        ({}, {"x-session-id": "b", "x-parent-session-id": "p", "x-session-end": "True"}, Told("b", "p", True)),
        ({}, {"x-session-id": "b", "x-session-end": "0"}, Told("b")),
        (
            {},
            {"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "p", "x-dynamo-session-final": "true"},
            Told("d", "p", True),
        ),
        ({}, CLAUDE, Told("c")),
        ({}, CLAUDE | {"x-claude-code-agent-id": "x"}, Told("c/x", "c")),
        (
            {},
            CLAUDE | {"x-claude-code-agent-id": "x", "x-claude-code-parent-agent-id": "y"},
            Told("c/x", "c/y"),
        ),
        ({}, {"session-id": "codex"}, Told("codex")),
        (
            {"nvext": {"agent_context": {"session_id": "n", "parent_session_id": "p", "session_final": True}}},
            {},
            Told("n", "p", True),
        ),
        ({"prompt_cache_key": "k", "safety_identifier": "s", "user": "u"}, {}, Told("k")),
        ({"metadata": {"session_id": "m", "parent_session_id": "p", "session_end": "true"}}, {}, Told("m", "p", True)),
        ({"client_metadata": {"session_id": "codex"}}, {}, Told("codex")),
        ({"metadata": {"user_id": "user_1f_account_2e_session_s1"}}, {}, Told("s1")),
        ({"metadata": {"user_id": "user_1f_session_"}, "user": "u"}, {}, Told("u")),
        ({"safety_identifier": "s", "user": "u"}, {}, Told("s")),
        ({"user": "u", "metadata": {"parent_session_id": "p"}}, {}, Told("u", "p")),
        ({"metadata": {"parent_session_id": "p"}}, {}, Told()),
        ({"session_id": 5, "prompt_cache_key": ["k"], "metadata": "m", "nvext": 3, "user": ""}, {}, Told()),
    ],
)
def test_given_what_a_client_sends_then_its_session_is_known(body: Any, headers: dict[str, str], told: Told) -> None:
    assert told_session(body, headers) == told


def test_given_a_long_name_then_its_digest_stands_for_it() -> None:
    assert short_name("n" * MAX_NAME) == "n" * MAX_NAME
    assert len(short_name("n" * (MAX_NAME + 1))) == 32
    assert short_name("n" * 300) != short_name("n" * 301)
