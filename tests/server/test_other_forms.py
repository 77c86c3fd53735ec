"""OpenAI's responses and Anthropic's messages, by their own clients, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from live import Live, call, refusal

SAID = "w5 w6 w7 w8 w9 w10 w11"
TURNS = [{"role": "user", "content": SAID}]
GREEDY = {"temperature": 0}  # which this client does not name


@pytest.fixture
def claude(live: Live) -> Iterator[Any]:
    """Anthropic's own client."""
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def chat_text(client: Any, messages: Any = TURNS, **wanted: Any) -> str:
    """What the chat endpoint answers."""
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, **wanted)
    return str(answer.choices[0].message.content)


# --- responses --------------------------------------------------------------------------------------------------------


def test_given_an_input_then_the_response_is_the_chats_answer(client: Any) -> None:
    answer = client.responses.create(model="tiny", input=SAID, max_output_tokens=4, temperature=0)
    assert answer.output_text == chat_text(client, max_completion_tokens=4)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 4


def test_given_tools_of_a_response_then_the_template_sees_them(client: Any) -> None:
    tools = [{"type": "function", "name": "w33", "parameters": {}, "strict": False}]
    plain = client.responses.create(model="tiny", input=SAID, max_output_tokens=1)
    told = client.responses.create(model="tiny", input=SAID, max_output_tokens=1, tools=tools)
    assert told.usage.input_tokens == plain.usage.input_tokens + 1
    assert told.tools[0].name == "w33"


@pytest.mark.slow
def test_given_instructions_then_they_are_the_system_message(client: Any) -> None:
    answer = client.responses.create(model="tiny", input=TURNS, instructions="w3", max_output_tokens=3, temperature=0)
    messages = [{"role": "system", "content": "w3"}, *TURNS]
    assert answer.output_text == chat_text(client, messages, max_completion_tokens=3)


def test_given_a_streamed_response_then_its_events_make_the_whole(client: Any) -> None:
    text, kinds, last = "", [], None
    for event in client.responses.create(model="tiny", input=SAID, max_output_tokens=4, temperature=0, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    assert kinds[:4] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added")
    ]
    assert kinds[-1] == "response.incomplete"
    assert last is not None
    assert last.response.output_text == text == chat_text(client, max_completion_tokens=4)


def test_given_a_previous_response_then_it_is_refused_with_the_remedy(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="send the conversation as input"):
        client.responses.create(model="tiny", input=SAID, previous_response_id="resp_1")


# --- messages ---------------------------------------------------------------------------------------------------------


def test_given_messages_then_the_answer_is_the_chats(client: Any, claude: Any) -> None:
    answer = claude.messages.create(model="tiny", max_tokens=4, system="w3", messages=TURNS, extra_body=GREEDY)
    messages = [{"role": "system", "content": "w3"}, *TURNS]
    assert answer.content[0].text == chat_text(client, messages, max_completion_tokens=4)
    assert (answer.role, answer.stop_reason, answer.usage.output_tokens) == ("assistant", "max_tokens", 4)


def test_given_streamed_messages_then_the_client_builds_the_whole(client: Any, claude: Any) -> None:
    with claude.messages.stream(model="tiny", max_tokens=4, messages=TURNS, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == chat_text(client, max_completion_tokens=4)
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 4)


def test_given_a_stop_sequence_then_the_answer_names_it(claude: Any) -> None:
    answer = claude.messages.create(
        model="tiny", max_tokens=8, messages=TURNS, stop_sequences=["w42"], extra_body={"logit_bias": {"42": 100}}
    )
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text.strip()) == ("stop_sequence", "w42", "")


def test_given_a_repeated_conversation_then_usage_tells_what_was_read_from_the_cache(claude: Any) -> None:
    usages = [claude.messages.create(model="tiny", max_tokens=1, messages=TURNS).usage for _ in range(2)]
    assert [usage.cache_read_input_tokens for usage in usages] == [
        0,
        7,
    ]  # all but the last token, whose logits are wanted
    assert usages[0].input_tokens == usages[1].input_tokens + 7


def test_given_a_mark_then_what_stands_before_it_stays_when_room_is_needed(claude: Any, engine: Any) -> None:
    marked = [{"type": "text", "text": "w5 w6 w7 w8 w9 w10 w11", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    claude.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": marked}])
    claude.messages.create(
        model="tiny", max_tokens=1, messages=[{"role": "user", "content": "w25 w26 w27 w28 w29 w30"}]
    )
    kept = {run.priority for run in engine.manager.inspect.runs() if run.start == 0}
    assert kept == {90, 35}


@pytest.mark.parametrize(
    ("lives", "num_read"),
    [(("5m", "5m", "5m"), 1), (("5m", "5m", None), 2), (("1h", "5m", "5m"), 2), (("5m", "1h", "5m"), 3)],
)
def test_given_several_marks_then_a_conversation_is_made_tokens_again_only_where_their_times_differ(
    live: Live, engine: Any, monkeypatch: pytest.MonkeyPatch, lives: Any, num_read: int
) -> None:
    read: list[int] = []
    make = engine.prompts.chat_text
    monkeypatch.setattr(engine.prompts, "chat_text", lambda *given, **more: [read.append(1), make(*given, **more)][1])
    texts = [{"type": "text", "text": f"w{number} w8 w9 w10 w11"} for number in (31, 32, 33)]
    marks = [{"cache_control": {"type": "ephemeral", "ttl": each}} if each else {} for each in lives]
    system, *turns = ([{**text, **mark}] for text, mark in zip(texts, marks, strict=True))
    messages = [{"role": "user", "content": turn} for turn in turns]
    call(live, "/v1/messages", {"system": system, "messages": messages, "max_tokens": 1})
    assert len(read) == num_read
    kept = {run.priority for run in engine.manager.inspect.runs() if run.start == 0}
    assert kept == {90}


def test_given_stop_in_the_place_of_stop_sequences_then_it_ends_the_answer(live: Live) -> None:
    asked = {"messages": TURNS, "max_tokens": 6}
    words = call(live, "/v1/messages", asked)["content"][0]["text"].split()
    stopped = call(live, "/v1/messages", {**asked, "stop": words[2]})
    assert (stopped["stop_sequence"], stopped["content"][0]["text"].split()) == (words[2], words[:2])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("messages", {"messages": TURNS, "max_tokens": 1, "n": 2}, "n"),
        ("messages", {"messages": TURNS, "max_tokens": 1, "stop": "w1", "stop_sequences": ["w2"]}, "stop"),
        ("responses", {"input": SAID, "n": 2}, "n"),
        (
            "responses",
            {"input": SAID, "response_format": {"type": "json_object"}, "text": {"format": {"type": "text"}}},
            "response_format",
        ),
        ("chat/completions", {"messages": TURNS, "top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": TURNS, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ],
)
def test_given_a_field_that_would_be_ignored_then_it_is_refused(live: Live, path: str, fields: Any, param: str) -> None:
    status, error = refusal(live, f"/v1/{path}", fields)
    assert (status, error["param"]) == (400, param)


def test_given_an_image_then_it_is_refused(claude: Any) -> None:
    image = [{"type": "image", "source": {"type": "url", "url": "data:,"}}]
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        claude.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": image}])


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def fails_later(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step, and those after it, fail."""
    run, steps = engine._loop.runner.run, []

    def broken(*given: Any, **options: Any) -> Any:
        steps.append(given)
        if len(steps) > 2:
            raise RuntimeError("the device is on fire")
        return run(*given, **options)

    monkeypatch.setattr(engine._loop.runner, "run", broken)


@pytest.mark.usefixtures("fails_later")
def test_given_a_step_that_fails_then_a_stream_of_messages_raises(claude: Any) -> None:
    with pytest.raises(anthropic.APIStatusError, match="the device is on fire"):
        for _ in claude.messages.create(model="tiny", max_tokens=50, messages=TURNS, stream=True):
            pass


@pytest.mark.usefixtures("fails_later")
def test_given_a_step_that_fails_then_a_stream_of_a_chat_raises(client: Any) -> None:
    with pytest.raises(openai.APIError, match="the device is on fire"):
        for _ in client.chat.completions.create(model="tiny", messages=TURNS, stream=True):
            pass


@pytest.mark.usefixtures("fails_later")
def test_given_a_step_that_fails_then_a_streamed_response_says_so(client: Any) -> None:
    events = list(client.responses.create(model="tiny", input=SAID, stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert "the device is on fire" in events[-2].message
    assert events[-1].response.status == "failed"
