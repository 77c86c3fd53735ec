"""What agents send beside the conversation: it is followed, or left out and named, or refused, and never lost in silence."""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from live import Live, call, openai_client, refusal, word_tokenizer
from models import tiny_model

from kvpool.engine import Engine
from kvpool.server import ServedModel, create_app
from kvpool.server.agent_fields import LEFT_OUT_HEADER, OfChats, Reasoning, followed, without_varying_lines

SAID = "w5 w6 w7"
TURNS: Any = [{"role": "user", "content": SAID}]
TOOL = {"name": "w33", "description": "", "input_schema": {"type": "object", "properties": {}}}
# What Claude Code 2.1.197 sends, with shorter texts.
CLAUDE_CODE: Any = {
    "model": "tiny",
    "max_tokens": 32000,
    "stream": False,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.8a5; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "w3", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "w4"},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": SAID, "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "w8"},
    ],
    "tools": [TOOL],
    "metadata": {"user_id": "{}"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
# What Codex 0.169 sends, with shorter texts.
CODEX: Any = {
    "model": "tiny",
    "stream": False,
    "max_output_tokens": 4,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "w3"}]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": SAID}]},
    ],
    "tools": [
        {"type": "function", "name": "w33", "description": "", "strict": False, "parameters": {"type": "object"}},
        {"type": "namespace", "name": "agents", "description": "", "tools": [{"type": "function", "name": "w34"}]},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": ""}},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "client_metadata": {"session_id": "a"},
    "truncation": "auto",
    "max_tool_calls": 9,
    "text": {"verbosity": "low"},
}


def answered(live: Live, path: str, body: Any) -> tuple[Any, str]:
    """The answer, and the header that names what was left out."""
    request = urllib.request.Request(live.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read()), answer.headers.get(LEFT_OUT_HEADER, "")


def test_given_what_claude_code_sends_then_it_is_answered_and_told_what_changes_nothing(live: Live) -> None:
    answer, left_out = answered(live, "/v1/messages?beta=true", CLAUDE_CODE)
    assert answer["usage"]["output_tokens"]
    assert left_out == "context_management, output_config.effort"
    counted = {name: value for name, value in CLAUDE_CODE.items() if name not in ("max_tokens", "stream", "metadata")}
    told = call(live, "/v1/messages/count_tokens?beta=true", counted)
    usage = answer["usage"]
    assert told["input_tokens"] == sum(
        usage[name] for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )


def test_given_what_codex_sends_then_its_functions_are_all_that_the_model_sees(live: Live) -> None:
    answer, left_out = answered(live, "/v1/responses", CODEX)
    assert left_out.split(", ") == [
        *("include", "max_tool_calls", "reasoning.effort", "reasoning.summary", "text.verbosity"),
        *("tools[namespace]", "tools[web_search]", "tools[custom]", "tools[local_shell]"),
    ]
    chat = {
        "messages": [{"role": "system", "content": "w3"}, *TURNS],
        "tools": [{"type": "function", "function": {"name": "w33"}}],
        "max_tokens": 1,
    }
    again = call(live, "/v1/chat/completions", chat)["usage"]
    assert again["prompt_tokens"] == answer["usage"]["input_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1, "developers are the system"


@pytest.mark.parametrize(
    ("path", "more", "left_out"),
    [
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking, thinking.budget_tokens"),
        ("messages", {"thinking": {"type": "disabled"}}, ""),
        ("messages", {"mcp_servers": [], "cache_control": {"type": "ephemeral", "ttl": "1h"}}, ""),
        ("messages", {"cache_control": {"type": "ephemeral", "scope": "global"}}, "cache_control.scope"),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[web_search_20250305]"),
        ("messages", {"tools": [TOOL | {"strict": False, "defer_loading": False}]}, ""),
        ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}, TOOL]}, "tools[bash_20250124]"),
        (
            "messages",
            {"tools": [TOOL | {"defer_loading": True, "eager_input_streaming": True, "input_examples": [{}]}]},
            "tools.defer_loading, tools.eager_input_streaming, tools.input_examples",
        ),
        ("chat/completions", {"reasoning_effort": "low", "verbosity": "high"}, "reasoning_effort, verbosity"),
        ("chat/completions", {"reasoning_effort": "none", "verbosity": "medium", "modalities": ["text"]}, ""),
        ("responses", {"include": [], "truncation": "disabled", "reasoning": {"effort": None}}, ""),
    ],
)
def test_given_a_field_that_changes_nothing_then_only_what_asks_for_something_is_named(
    live: Live, path: str, more: Any, left_out: str
) -> None:
    given = {"input": SAID, "max_output_tokens": 1} if path == "responses" else {"messages": TURNS, "max_tokens": 1}
    assert answered(live, f"/v1/{path}", given | more)[1] == left_out


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("messages", {"mcp_servers": [{"type": "url", "url": "https://example.com"}]}, "mcp_servers"),
        ("messages", {"container": "c"}, "container"),
        ("messages", {"thinking": {"type": "always"}}, "thinking.type"),
        ("messages", {"tools": [{"name": "w33", "strickt": True}]}, "tools.0.strickt"),
        ("messages", {"tools": [{"type": "web search", "name": "w"}]}, "tools.0.type"),
        ("messages", {"tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ("chat/completions", {"modalities": ["text", "audio"]}, "modalities.1"),
        ("chat/completions", {"guided_json": {}}, "guided_json"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include.0"),
        ("responses", {"truncation": "middle"}, "truncation"),
        ("responses", {"background": True}, "background"),
    ],
)
def test_given_a_field_that_would_change_the_answer_then_it_is_refused(
    live: Live, path: str, more: Any, param: str
) -> None:
    given = {"input": SAID} if path == "responses" else {"messages": TURNS, "max_tokens": 1}
    status, error = refusal(live, f"/v1/{path}", given | more)
    assert (status, error["param"]) == (400, param)


def test_given_a_field_that_changes_nothing_then_the_log_says_so_once(
    serve: Callable[..., Live], caplog: pytest.LogCaptureFixture
) -> None:
    live = serve()
    with caplog.at_level(logging.WARNING, "kvpool"):
        for _ in range(2):
            call(live, "/v1/chat/completions", {"messages": TURNS, "max_tokens": 1, "verbosity": "low"})
    assert caplog.text.count("verbosity") == 1


# --- lines that differ for nothing ------------------------------------------------------------------------------------

BILLED = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli;"


def cached_of_second(live: Live, path: str, make: Callable[[str], Any]) -> int:
    """How much of a conversation is cached after one whose line of the bill differs."""
    call(live, path, make(BILLED.format("w20")))
    usage = call(live, path, make(BILLED.format("w21")))["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("/v1/messages", lambda line: {"system": [{"type": "text", "text": line}, {"type": "text", "text": "w3"}]}),
        ("/v1/messages", lambda line: {"system": f"{line}\nw3"}),
        ("/v1/chat/completions", lambda line: {"messages": [{"role": "system", "content": f"{line}\n\nw3"}, *TURNS]}),
        ("/v1/responses", lambda line: {"input": SAID, "instructions": f"{line}\nw3"}),
        ("/v1/responses", lambda line: {"input": [{"role": "developer", "content": f"{line}\nw3"}, *TURNS]}),
    ],
)
def test_given_a_line_that_differs_for_nothing_then_a_second_session_finds_all_of_the_first(
    serve: Callable[..., Live], engine: Any, path: str, make: Callable[[str], Any]
) -> None:
    limit = {"max_output_tokens": 1} if path == "/v1/responses" else {"messages": TURNS, "max_tokens": 1}
    assert cached_of_second(serve(), path, lambda line: {**limit, **make(line)}) == 4, "its one whole block"
    engine.manager.cache.reset()
    kept = Live(create_app([ServedModel("tiny", engine, keeps_varying_lines=True)]))
    assert cached_of_second(kept, path, lambda line: {**limit, **make(line)}) > 4, "the words of the line are tokens"
    kept.stop()


def test_given_a_user_who_quotes_such_a_line_then_it_stays() -> None:
    quoted = f"Look:\n{BILLED}"
    assert without_varying_lines(quoted) == quoted
    assert without_varying_lines([{"type": "text", "text": BILLED}, {"type": "image"}])[0]["text"] == ""  # type: ignore[index]


# --- effort and thinking ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "template", "variables"),
    [
        (dict(reasoning_effort="high"), "{{ reasoning_effort }}", {"reasoning_effort": "high"}),
        (dict(reasoning_effort="xhigh"), "{{ reasoning_effort }}", {"reasoning_effort": "high"}),
        (dict(reasoning_effort="max"), "{% if reasoning_effort == 'max' %}", {"reasoning_effort": "max"}),
        (dict(reasoning_effort="none"), "{% if enable_thinking %}", {"enable_thinking": False}),
        (dict(reasoning_effort="low"), "{{ message.reasoning_effort }}", {}),
        (dict(thinking={"type": "enabled"}), "{%- if not thinking is defined %}", {"thinking": True}),
        (dict(thinking={"type": "disabled"}), "{% if enable_thinking %}", {"enable_thinking": False}),
        (dict(thinking={"type": "adaptive"}), "{% if enable_thinking %}", {}),
        (
            dict(thinking={"type": "enabled", "budget_tokens": 9}),
            "{{ enable_thinking }}{{ thinking_budget }}",
            {"enable_thinking": True, "thinking_budget": 9},
        ),
    ],
)
def test_given_a_template_that_reads_it_then_effort_and_thinking_reach_it(
    asked: Any, template: str, variables: Any
) -> None:
    found = followed(OfChats.model_validate(asked), template, thinks=True)
    assert found.template == variables
    is_left_to_the_model = asked.get("thinking") == {"type": "adaptive"}
    assert bool(found.left_out) == (not variables and not is_left_to_the_model)


def test_given_a_model_that_never_thinks_then_asking_for_no_thoughts_is_followed() -> None:
    assert followed(Reasoning(effort="none"), "", thinks=False).left_out == ()
    assert followed(Reasoning(effort="none"), "", thinks=True).left_out == ("effort",)


@pytest.fixture
def thinker() -> Iterator[Live]:
    """A server whose chat template reads an effort, and whether to begin to speak."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% if reasoning_effort == 'low' %}w40 w40 {% endif %}{% for m in messages %}{{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}w41{% endif %}"
    )
    with Engine(tiny_model("llama"), tokenizer=tokenizer, device="cpu", kv_blocks=64, block_size=4) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        yield live
        live.stop()


def test_given_an_effort_in_any_form_then_the_template_gets_it(thinker: Live) -> None:
    plain = call(thinker, "/v1/messages/count_tokens", {"messages": TURNS})["input_tokens"]
    assert plain == 4
    asked = {"messages": TURNS, "output_config": {"effort": "low"}}
    assert call(thinker, "/v1/messages/count_tokens", asked)["input_tokens"] == plain + 2
    with openai_client(thinker) as client:
        chat = client.chat.completions.create(model="tiny", messages=TURNS, reasoning_effort="low", max_tokens=1)
        overruled = client.chat.completions.create(
            model="tiny",
            messages=TURNS,
            reasoning_effort="low",
            max_tokens=1,
            extra_body={"chat_template_kwargs": {"reasoning_effort": "high"}},
        )
        response = client.responses.create(model="tiny", input=SAID, reasoning={"effort": "low"}, max_output_tokens=1)
    assert chat.usage.prompt_tokens == response.usage.input_tokens == plain + 2
    assert overruled.usage.prompt_tokens == plain


def test_given_no_generation_prompt_then_the_model_goes_on_where_the_messages_end(thinker: Live) -> None:
    asked = {"messages": TURNS, "max_tokens": 1, "add_generation_prompt": False}
    assert call(thinker, "/v1/chat/completions", asked)["usage"]["prompt_tokens"] == 3


# --- what reaches the model -------------------------------------------------------------------------------------------


def tokens_of(live: Live, *content: Any) -> int:
    """How many tokens a message of the user has with this content."""
    asked = {"messages": [{"role": "user", "content": list(content)}]}
    return int(call(live, "/v1/messages/count_tokens", asked)["input_tokens"])


def test_given_a_result_that_is_an_error_then_the_model_is_told(live: Live) -> None:
    def result(content: Any, **more: Any) -> Any:
        return {"type": "tool_result", "tool_use_id": "a", "content": content, **more}

    plain = tokens_of(live, result("w9"))
    assert tokens_of(live, result("w9", is_error=False)) == plain
    assert tokens_of(live, result("w9", is_error=True)) > plain
    assert tokens_of(live, result([{"type": "text", "text": "w9"}], is_error=True)) > plain
    said = result("Error: w9", is_error=True)
    assert tokens_of(live, said) == tokens_of(live, said | {"is_error": False}), "it says so itself"


def test_given_a_document_with_text_then_the_model_reads_it(live: Live) -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "w9 w10"}}
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "w9 w10"}]}}
    short = plain | {"source": {"type": "text", "media_type": "text/plain", "data": "w9"}}
    assert tokens_of(live, plain) == tokens_of(live, parts) == tokens_of(live, short) + 1
    assert tokens_of(live, plain | {"title": "w11", "citations": {"enabled": False}}) == tokens_of(live, plain) + 1
    result = {"type": "tool_result", "tool_use_id": "a", "content": [plain]}
    assert tokens_of(live, result) == tokens_of(live, plain)


@pytest.mark.parametrize(
    "document",
    [
        {"source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}},
        {"source": {"type": "text", "data": "w9"}, "citations": {"enabled": True}},
    ],
)
def test_given_a_document_that_no_text_can_say_then_it_is_refused(live: Live, document: Any) -> None:
    asked = {"messages": [{"role": "user", "content": [{"type": "document", **document}]}]}
    assert "documents as text" in refusal(live, "/v1/messages/count_tokens", asked)[1]["message"]


STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "{% if not loop.first and m['role'] == loop.previtem['role'] %}{{ raise_exception('not in turns') }}{% endif %}"
    "{{ {'system': 'w1', 'user': 'w2', 'assistant': 'w3'}[m['role']] }} {{ m['content'] }} {% endfor %}"
)


def test_given_a_template_that_wants_an_order_then_an_agents_system_speaks_first_and_then_as_the_user() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = STRICT
    with Engine(tiny_model("llama"), tokenizer=tokenizer, device="cpu", kv_blocks=64, block_size=4) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        said = [("developer", "w10"), ("system", "w11"), ("user", "w12"), ("system", "w13"), ("assistant", "w14")]
        messages = [{"role": role, "content": content} for role, content in said]
        told = call(live, "/tokenize", {"messages": messages})
        assert told["tokens"] == [1, 10, 11, 2, 12, 13, 3, 14]
        live.stop()


# --- too long ---------------------------------------------------------------------------------------------------------


def test_given_a_prompt_over_the_context_then_each_api_says_so_in_its_words(live: Live) -> None:
    long = [{"role": "user", "content": "w5 " * 600}]
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as claude:
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 601 tokens > 512 maximum") as told:
                claude.messages.create(model="tiny", max_tokens=1, messages=long, stream=stream)
            assert told.value.type == "invalid_request_error"
    with openai_client(live) as client:
        words = "maximum context length is 512 tokens. However, your messages resulted in 601 tokens"
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                client.chat.completions.create(model="tiny", messages=long, stream=stream)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match=words):
                client.responses.create(model="tiny", input=long, stream=stream, truncation="auto")


def test_given_less_memory_than_the_context_then_an_answer_ends_where_the_memory_does() -> None:
    with Engine(tiny_model("llama"), tokenizer=word_tokenizer(), device="cpu", kv_blocks=16, block_size=4) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        asked = {"messages": TURNS, "max_tokens": 32000, "ignore_eos": True}
        usage = call(live, "/v1/chat/completions", asked)["usage"]
        assert usage["total_tokens"] == 65, "64 places, and a token whose keys nobody needs"
        told = refusal(live, "/v1/messages", {"messages": [{"role": "user", "content": "w5 " * 70}], "max_tokens": 1})
        assert "71 tokens > 64 maximum" in told[1]["message"]
        live.stop()


# --- probes -----------------------------------------------------------------------------------------------------------


def test_given_probes_of_agents_then_they_are_answered(live: Live) -> None:
    assert call(live, "/", method="HEAD") == ""
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as claude:
        assert [model.id for model in claude.models.list()] == ["tiny"]
        assert claude.models.retrieve("tiny").display_name == "tiny"
