"""Questions about the cache take the body of any request, and ask about the prompt that its endpoint computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from agent_model import agent_model, agent_tokenizer
from live import Live, call, refusal

from kvpool.engine import Engine
from kvpool.server import ServedModel, create_app
from kvpool.server.prompts import endpoint_of

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
CALLED = {"name": "read", "arguments": '{"path": "a.py"}'}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "You write code."},
            {"role": "user", "content": [{"type": "text", "text": "Look into a.py."}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": CALLED}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "print(1)"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": 1,
        "stream": False,
    },
    "/v1/responses": {
        "instructions": "You write code.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Look into a.py."}]},
            {"type": "function_call", "call_id": "c1", **CALLED},
            {"type": "function_call_output", "call_id": "c1", "output": "print(1)"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 1,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Look into a.py."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a.py"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "print(1)"}]},
        ],
        "tools": [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}],
        "max_tokens": 1,
    },
    "/v1/completions": {"prompt": "Once upon a time there was a cache.", "max_tokens": 1},
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A server whose chat template shows tools."""
    with Engine(agent_model(), tokenizer=agent_tokenizer(), device="cpu", kv_blocks=512, block_size=4) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        yield live
        live.stop()


def usage(answer: dict[str, Any]) -> tuple[int, int]:
    """All and cached tokens of a prompt, as any endpoint says them."""
    told = answer["usage"]
    if "cache_read_input_tokens" in told:
        cached, created = told["cache_read_input_tokens"], told["cache_creation_input_tokens"]
        return told["input_tokens"] + cached + created, cached
    details = told.get("prompt_tokens_details") or told.get("input_tokens_details")
    return told.get("prompt_tokens") or told["input_tokens"], details["cached_tokens"]


@pytest.mark.parametrize("path", BODIES)
def test_given_the_body_of_a_request_then_questions_are_about_the_prompt_of_its_answer(live: Live, path: str) -> None:
    body = BODIES[path]
    call(live, "/v1/cache/invalidate", {"everything": True})
    assert call(live, "/v1/cache/query", body)["cached_tokens"] == 0
    num_tokens, cached = usage(call(live, path, body))
    whole = (num_tokens - 1) // 4 * 4
    assert (call(live, "/tokenize", body)["count"], cached) == (num_tokens, 0)
    asked = call(live, "/v1/cache/query", body)
    assert (asked["prompt_tokens"], asked["cached_tokens"]) == (num_tokens, whole)
    pin = call(live, "/v1/cache/pin", {**body, "ttl_seconds": 9})
    assert pin["pinned_tokens"] == num_tokens // 4 * 4
    call(live, f"/v1/cache/pin/{pin['id']}", method="DELETE")
    assert call(live, "/v1/cache/invalidate", body)["removed_blocks"] > 0
    call(live, "/v1/cache/invalidate", {"everything": True})
    assert call(live, "/v1/cache/warm", body)["prompt_tokens"] == num_tokens
    assert usage(call(live, path, body)) == (num_tokens, whole)


@pytest.mark.parametrize("path", BODIES)
def test_given_a_body_then_its_form_follows_from_what_it_holds(path: str) -> None:
    assert endpoint_of(BODIES[path]) == path


def test_given_a_conversation_that_fits_two_forms_then_the_endpoint_says_which(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Ye"}]}
    chat, message = (call(live, "/tokenize", {**body, **more}) for more in ({}, {"endpoint": "/v1/messages"}))
    counted = call(live, "/v1/messages/count_tokens", body)["input_tokens"]
    assert message["count"] == counted < chat["count"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"prompt": "one", "mesages": []}, "mesages"),
        ({"messages": [{"content": "no role"}]}, "messages.0.role"),
        ({"system": "s", "messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"input": [], "tools": [{"type": "function"}]}, "tools.0.name"),
        ({"prompt": "one", "endpoint": "/v1/other"}, "endpoint"),
    ],
)
def test_given_a_body_that_no_endpoint_takes_then_the_question_is_refused_by_field(
    live: Live, body: Any, param: str
) -> None:
    for path in ("/v1/cache/query", "/tokenize"):
        status, error = refusal(live, path, body)
        assert (status, error["param"]) == (400, param)
