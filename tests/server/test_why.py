"""The server says why a prompt missed: with OpenAI's own client, the everyday causes, in usage, metrics and questions."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any, cast

import pytest
from agent_model import agent_model, agent_tokenizer
from live import Live, access, call, openai_client, refusal

from kvpool.cli import main
from kvpool.engine import Engine
from kvpool.server import Caller, ServedModel, create_app
from kvpool.server.answered import MAX_NAMES, MISSED_HEADER, Answered, AnsweredRequests
from kvpool.server.errors import Problem

SYSTEM = "You are a careful engineer. Read the whole file before you change a line, and run the tests. " * 2
TURNS = [
    {"role": "user", "content": "Look into a.py, it prints a wrong number for the second day of the week."},
    {"role": "assistant", "content": "I read it. The loop begins with one, so the days are shifted by one."},
    {"role": "user", "content": "Then begin with zero, and write a test that fails before the change."},
    {"role": "assistant", "content": "Done. The test fails before the change and passes after it."},
    {"role": "user", "content": "Thanks. Is there anything else in the file that looks wrong to you?"},
]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": f"what to {name}"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": f"To {name} a file.", "parameters": parameters},
    }


def chat(turns: list[Any], system: str = SYSTEM, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, *turns], "max_tokens": 1, **more}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    remembering: dict[str, Any] = {"cache": {"remembered_blocks": None}, "kv_blocks": 1024, "block_size": 4}
    with Engine(agent_model(), tokenizer=agent_tokenizer(), device="cpu", **remembering) as made:
        yield made


@pytest.fixture
def live(engine: Engine) -> Iterator[Live]:
    live = Live(create_app([ServedModel("tiny", engine)], access("a", "b", "c", "root")))
    yield live
    live.stop()
    engine.manager.cache.reset()


def missed(live: Live, body: dict[str, Any], key: str = "sk-a") -> tuple[dict[str, int], list[dict[str, Any]]]:
    """What usage and a question before it say, by OpenAI's client."""
    asked = call(live, "/v1/cache/query", body, key).get("missed", [])
    salt = {"extra_body": {"cache_salt": body["cache_salt"]}} if "cache_salt" in body else {}
    plain = {name: value for name, value in body.items() if name != "cache_salt"}
    with openai_client(live, key) as client:
        answer = client.chat.completions.create(model="tiny", **plain, **salt)
    usage = answer.usage
    told = dict(usage.prompt_tokens_details.model_extra["missed_tokens"])
    assert sum(told.values()) == usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    return told, asked


def largest(told: dict[str, int]) -> str:
    return max(told, key=lambda cause: told[cause])


def words(asked: list[dict[str, Any]], cause: str) -> dict[str, Any]:
    return next(span for span in asked if span["cause"] == cause)


def test_given_a_date_in_the_system_prompt_then_what_follows_diverged_there(live: Live) -> None:
    missed(live, chat(TURNS, "Today is 2026-11-18. " + SYSTEM))
    told, asked = missed(live, chat(TURNS, "Today is 2026-11-19. " + SYSTEM))
    assert largest(told) == "diverged"
    span = words(asked, "diverged")
    assert span["parted"]["before"].endswith("26-11-1")
    assert (span["parted"]["here"][0], span["parted"]["there"][0]) == ("9", "8")
    assert "put what changes, as a date, behind what stays" in span["words"]


def test_given_a_beginning_that_differs_in_each_request_then_its_tokens_and_the_text_there_are_named(
    live: Live,
) -> None:
    for number in range(3):
        missed(live, chat(TURNS, f"Request {number}a7. " + SYSTEM))
    _, asked = missed(live, chat(TURNS, "Request 9b4. " + SYSTEM))
    span = words(asked, "diverged")
    assert "differ in each request (3 earlier ones and this one)" in span["words"]
    assert (span["parted"]["before"][-8:], span["parted"]["here"][:5]) == ("Request ", "9b4. ")
    assert span["parted"]["token"] < span["parted"]["again"] < 60


def test_given_tools_in_another_order_then_they_diverged(live: Live) -> None:
    missed(live, chat(TURNS, tools=[tool("read"), tool("write"), tool("delete")]))
    told, asked = missed(live, chat(TURNS, tools=[tool("delete"), tool("write"), tool("read")]))
    assert largest(told) == "diverged"
    assert "keep tools in one order" in words(asked, "diverged")["words"]


def test_given_a_history_that_was_cut_then_it_stands_nearer_to_the_beginning(live: Live) -> None:
    missed(live, chat(TURNS))
    told, asked = missed(live, chat(TURNS[2:]))
    assert largest(told) == "diverged"
    assert "tokens nearer to its beginning" in words(asked, "diverged")["words"]


def test_given_another_salt_then_it_is_named(live: Live) -> None:
    missed(live, chat(TURNS, cache_salt="one"))
    told, asked = missed(live, chat(TURNS, cache_salt="two"))
    assert largest(told) == "other_scope"
    assert "another cache_salt" in words(asked, "other_scope")["words"]


def test_given_a_prompt_below_a_block_then_that_is_the_cause(live: Live) -> None:
    assert call(live, "/v1/cache/query", {"prompt": "abc"}, "sk-a")["missed"][0]["cause"] == "rest_of_block"
    usage = call(live, "/v1/completions", {"prompt": "abc", "max_tokens": 1}, "sk-a")["usage"]
    assert usage["prompt_tokens_details"]["missed_tokens"] == {"rest_of_block": 3}


def test_given_other_forms_of_the_api_then_usage_says_it_too(live: Live) -> None:
    response = call(live, "/v1/responses", {"input": "What is new here?", "max_output_tokens": 1}, "sk-a")["usage"]
    assert sum(response["input_tokens_details"]["missed_tokens"].values()) == response["input_tokens"]
    body = {"messages": [{"role": "user", "content": "And what is that?"}], "max_tokens": 1}
    message = call(live, "/v1/messages", body, "sk-a")["usage"]
    assert sum(message["cache_missed_input_tokens"].values()) == message["input_tokens"]


def test_given_what_another_tenant_asked_then_usage_and_questions_are_as_for_a_prompt_of_nobody(live: Live) -> None:
    secret, nobodys = (f"The code of the {door} door is 1234." for door in ("first", "third"))
    missed(live, chat([{"role": "user", "content": secret}]))
    probe, other = (
        missed(live, chat([{"role": "user", "content": text}]), key)
        for text, key in ((secret, "sk-b"), (nobodys, "sk-c"))
    )
    assert probe == other


def test_given_answers_then_metrics_count_the_causes(live: Live) -> None:
    missed(live, chat(TURNS, cache_salt="m"))
    assert 'kvpool_missed_tokens_total{cause="' in call(live, "/metrics", None, "sk-root")


def test_given_a_prompt_then_the_command_says_why_it_is_not_cached(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    body = chat(TURNS, cache_salt="command")
    missed(live, body)
    changed = json.dumps(chat(TURNS, "Now. " + SYSTEM, cache_salt="command"))
    assert main(["why", changed, "--url", live.url, "--key", "sk-a"]) == 0
    shown = capsys.readouterr().out
    assert "tokens are cached" in shown
    assert "diverged: an earlier prompt" in shown
    assert "goes on with 'Now. " in shown


def test_given_no_server_then_the_command_names_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "hello you", "--url", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9/v1/cache/query does not answer" in capsys.readouterr().err


# --- requests that were answered ------------------------------------------------------------------------------------


def answered(live: Live, path: str, body: dict[str, Any], key: str = "sk-a", **headers: str) -> tuple[str, Any]:
    """The header with the causes, and the answer: its JSON, or the events of its stream."""
    told = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
    request = urllib.request.Request(live.url + path, json.dumps(body).encode(), told)
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
        if not body.get("stream"):
            return answer.headers.get(MISSED_HEADER, ""), json.loads(text)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return answer.headers.get(MISSED_HEADER, ""), events


FORMS = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1},
    "/v1/completions": {"prompt": SYSTEM, "max_tokens": 1},
    "/v1/responses": {"input": SYSTEM, "max_output_tokens": 1},
    "/v1/messages": {"messages": TURNS, "max_tokens": 1},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMS)
def test_given_an_answer_then_a_header_has_its_causes_and_its_id_names_them_later(
    live: Live, path: str, stream: bool
) -> None:
    told, answer = answered(live, path, {**FORMS[path], "stream": stream, "cache_salt": f"{path} {stream}"})
    first = answer[0] if stream else answer
    name = first.get("id") or first.get("message", first.get("response", {}))["id"]
    kept = call(live, f"/v1/cache/requests/{name}", None, "sk-a")
    assert told == ", ".join(f"{cause}={count}" for cause, count in kept["missed_tokens"].items())
    assert sum(kept["missed_tokens"].values()) == kept["prompt_tokens"] - kept["cached_tokens"] > 0
    assert sum(span["end"] - span["start"] for span in kept["missed"]) == sum(kept["missed_tokens"].values())


def test_given_a_later_time_then_a_request_is_explained_as_it_was(live: Live) -> None:
    answered(live, "/v1/chat/completions", chat(TURNS))
    changed = chat(TURNS, "Now. " + SYSTEM)
    answered(live, "/v1/chat/completions", changed, **{"x-request-id": "mine"})
    answered(live, "/v1/chat/completions", changed)  # now all of it is cached
    kept = call(live, "/v1/cache/requests/mine", None, "sk-a")
    assert words(kept["missed"], "diverged")["parted"]["here"].startswith("Now. ")


def test_given_several_prompts_then_each_has_its_spans(live: Live) -> None:
    _, answer = answered(live, "/v1/completions", {"prompt": [SYSTEM, "abc"], "max_tokens": 1})
    kept = call(live, f"/v1/cache/requests/{answer['id']}", None, "sk-a")
    assert [span["prompt"] for span in kept["missed"]] == [0, 1]
    assert kept["missed"][1]["cause"] == "rest_of_block"


def test_given_a_request_of_another_tenant_then_its_id_is_as_unknown_as_any(live: Live) -> None:
    answered(live, "/v1/completions", {"prompt": SYSTEM, "max_tokens": 1}, **{"x-request-id": "hers"})
    refused = [refusal(live, f"/v1/cache/requests/{name}", None, "sk-b") for name in ("hers", "none")]
    assert [(status, error["message"].replace("none", "hers")) for status, error in refused] == [
        (404, refused[0][1]["message"])
    ] * 2
    assert call(live, "/v1/cache/requests/hers", None, "sk-root")["prompt_tokens"] > 0


def test_given_more_requests_than_are_kept_then_the_oldest_of_that_tenant_go() -> None:
    kept, model = AnsweredRequests(), cast(ServedModel, None)
    kept.keep("b", ["b"], Answered(model, (), {}))
    for number in range(MAX_NAMES):
        kept.keep("a", [f"r{number}", f"answer {number}"], Answered(model, (), {"evicted": number}))
    caller = Caller("a", is_admin=False)
    assert kept.find(caller, f"answer {MAX_NAMES - 1}").missed_tokens == {"evicted": MAX_NAMES - 1}
    assert kept.find(caller, f"r{MAX_NAMES // 2}").missed_tokens == {"evicted": MAX_NAMES // 2}
    with pytest.raises(Problem, match="no request of yours with the id 'r0'"):
        kept.find(caller, "r0")
    assert kept.find(Caller("b", is_admin=False), "b").missed_tokens == {}


def test_given_the_id_of_a_request_then_the_command_says_why_it_missed(
    live: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    _, answer = answered(live, "/v1/completions", {"prompt": "abc", "max_tokens": 1})
    assert main(["why", answer["id"], "--url", live.url, "--key", "sk-a"]) == 0
    assert capsys.readouterr().out.startswith("0 of 3 tokens were cached\n0..3 rest_of_block: ")
    assert main(["why", "abc", "--url", live.url, "--key", "sk-a"]) == 0  # one word, which is no id
    assert capsys.readouterr().out.startswith("0 of 3 tokens are cached")
    assert main(["why", f"req-{'0' * 32}", "--url", live.url, "--key", "sk-a"]) == 2
    assert "no request of yours with the id" in capsys.readouterr().err


# --- Anthropic's diagnostics ----------------------------------------------------------------------------------------


def talk(live: Live, previous: str | None, key: str = "sk-a", **changed: Any) -> tuple[str, Any]:
    """The id of an answer, and what differs from an earlier request."""
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "write")]
    body = {"messages": TURNS[:3], "system": SYSTEM, "tools": tools, "max_tokens": 1}
    body |= {"diagnostics": {"previous_message_id": previous}, **changed}
    answer = call(live, "/v1/messages", body, key)
    return answer["id"], answer["diagnostics"] and answer["diagnostics"]["cache_miss_reason"]


MARKED = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({}, None),
        ({"messages": TURNS}, None),  # it goes on
        ({"system": MARKED}, None),  # the same in another form, with a mark
        ({"system": "Today is 2026-11-19. " + SYSTEM}, "system_changed"),
        ({"system": None}, "system_changed"),
        ({"tools": None}, "tools_changed"),
        ({"messages": TURNS[:1]}, "messages_changed"),
        ({"messages": [*TURNS[:2], {"role": "user", "content": "Something else."}]}, "messages_changed"),
        ({"cache_salt": "other"}, "unavailable"),
    ],
)
def test_given_the_id_of_an_earlier_message_then_the_first_difference_is_told(
    live: Live, changed: dict[str, Any], kind: str | None
) -> None:
    first, told = talk(live, None)
    assert told is None
    second, told = talk(live, first, **changed)
    assert (told and told["type"]) == kind
    if kind == "system_changed":
        prompt = call(live, f"/v1/cache/requests/{first}", None, "sk-a")["prompt_tokens"]
        assert 0 < told["cache_missed_input_tokens"] <= prompt
    assert talk(live, second, **changed)[1] is None


def test_given_the_id_of_another_tenants_message_then_it_is_as_unknown_as_any(live: Live) -> None:
    first, _ = talk(live, None)
    assert talk(live, first, "sk-b")[1] == {"type": "previous_message_not_found"} == talk(live, "msg_0", "sk-b")[1]


def test_given_a_stream_then_its_first_event_has_the_difference(live: Live) -> None:
    first, _ = talk(live, None)
    body = {"messages": TURNS[:1], "max_tokens": 1, "stream": True, "diagnostics": {"previous_message_id": first}}
    _, (start, *_) = answered(live, "/v1/messages", body)
    assert start["message"]["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
