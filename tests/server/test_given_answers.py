"""The next turn of a conversation is the tokens that the model wrote, so that all of the answer before is in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from agent_model import agent_model, agent_tokenizer
from live import Live, access, call

from kvpool.engine import Engine
from kvpool.server import ServedModel, create_app
from kvpool.server.given_answers import AnswerScope, GivenAnswers

pytest.importorskip("llguidance")

ASKED: Any = [{"role": "user", "content": "Rain?"}]
NEXT: Any = {"role": "user", "content": "And then?"}
LENGTH = 20
OWN = AnswerScope("a", "", None)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with Engine(agent_model(), tokenizer=agent_tokenizer(), device="cpu", kv_blocks=1024, block_size=4) as made:
        yield made


@pytest.fixture
def live(engine: Any) -> Iterator[Live]:
    """A server of two tenants."""
    served = Live(create_app([ServedModel("tiny", engine)], access("a", "b")))
    yield served
    served.stop()
    engine.manager.cache.reset()


@pytest.fixture
def apart(engine: Any) -> dict[str, float]:
    """A bias to the letters t and r, which the model writes one by one and its tokenizer reads as `tr`."""
    return {str(number): 100.0 for number in engine.tokenizer.convert_tokens_to_ids(["t", "r"])}


def chat(live: Live, messages: Any, key: str = "sk-a", **more: Any) -> Any:
    body = {"messages": messages, "temperature": 1, "seed": 1, "max_tokens": LENGTH, **more}
    return call(live, "/v1/chat/completions", body, key)


def cached(usage: Any) -> int:
    """Tokens from the cache, in any form of a usage."""
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])


def in_whole_blocks(num_tokens: int) -> int:
    """Of an answer, the last token is not computed on."""
    return (num_tokens - 1) // 4 * 4


def test_given_a_text_whose_tokens_are_others_then_the_next_turns_find_all_of_it(live: Live, apart: Any) -> None:
    messages = list(ASKED)
    first = chat(live, messages, logit_bias=apart)
    text = first["choices"][0]["message"]["content"]
    assert set(text) == {"t", "r"}
    assert "tr" in text
    messages += [{"role": "assistant", "content": text}, NEXT]
    second = chat(live, messages, logit_bias=apart)
    assert cached(second["usage"]) >= in_whole_blocks(first["usage"]["total_tokens"])
    messages += [{"role": "assistant", "content": second["choices"][0]["message"]["content"]}, NEXT]
    third = chat(live, messages)
    assert cached(third["usage"]) >= in_whole_blocks(second["usage"]["total_tokens"])
    asked = call(live, "/v1/cache/query", {"messages": messages}, "sk-a")
    assert asked["prompt_tokens"] == third["usage"]["prompt_tokens"], "questions are about the prompt as it is computed"


def test_given_messages_in_streams_then_it_is_the_same(live: Live, apart: Any) -> None:
    body = {"messages": ASKED, "max_tokens": LENGTH, "logit_bias": apart, "temperature": 1, "seed": 1}
    events = call(live, "/v1/messages", {**body, "stream": True}, "sk-a")
    assert "message_stop" in events
    said = call(live, "/v1/messages", body, "sk-a")
    text = said["content"][0]["text"]
    again = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": text}]}, NEXT]
    usage = call(live, "/v1/messages", {"messages": again, "max_tokens": 1}, "sk-a")["usage"]
    assert cached(usage) >= in_whole_blocks(said["usage"]["cache_read_input_tokens"] + LENGTH)


def test_given_responses_then_it_is_the_same(live: Live, apart: Any) -> None:
    asked = {"input": ASKED, "max_output_tokens": LENGTH, "logit_bias": apart, "temperature": 1, "seed": 1}
    first = call(live, "/v1/responses", asked, "sk-a")
    again = {"input": [*ASKED, *first["output"], NEXT], "max_output_tokens": 1}
    usage = call(live, "/v1/responses", again, "sk-a")["usage"]
    assert cached(usage) >= in_whole_blocks(first["usage"]["total_tokens"])


def test_given_a_call_that_the_template_writes_with_other_spaces_then_the_next_turn_finds_all_of_it(live: Live) -> None:
    schema = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}
    schema["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    first = chat(live, ASKED, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sun"}
    second = chat(live, [*ASKED, message, result], tools=tools, max_tokens=1)
    written = first["usage"]["total_tokens"] - 1  # without the mark of the end
    assert cached(second["usage"]) >= in_whole_blocks(written)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda live: dict(key="sk-b"), id="another tenant"),
        pytest.param(lambda live: dict(cache_salt="other"), id="another salt"),
        pytest.param(
            lambda live: call(live, "/v1/cache/invalidate", {"everything": True}, "sk-a") and {}, id="forgotten"
        ),
    ],
)
def test_given_an_answer_to_somebody_else_then_its_tokens_are_not_used(
    live: Live, apart: Any, change: Callable[[Live], Any]
) -> None:
    text = chat(live, ASKED, logit_bias=apart)["choices"][0]["message"]["content"]
    again = [*ASKED, {"role": "assistant", "content": text}, NEXT]
    kept = chat(live, again, max_tokens=1)["usage"]["prompt_tokens"]
    assert chat(live, again, max_tokens=1, **change(live))["usage"]["prompt_tokens"] < kept


def test_given_an_answer_that_the_client_changed_then_the_changed_text_is_the_prompt(live: Live, apart: Any) -> None:
    text = chat(live, ASKED, logit_bias=apart)["choices"][0]["message"]["content"]
    again = [*ASKED, {"role": "assistant", "content": text + "r"}, NEXT]
    told = chat(live, again, max_tokens=1)["usage"]["prompt_tokens"]
    assert told == chat(live, again, "sk-b", max_tokens=1)["usage"]["prompt_tokens"]


# --- what is kept -----------------------------------------------------------------------------------------------------


def recalled(given: GivenAnswers, prompt: str, scope: AnswerScope = OWN) -> Any:
    found = given.recall(scope, prompt, ["</s>"], lambda one, other, prompt: one == other)
    return None if found is None else (found[0].tolist(), prompt[found[1] :])


def test_given_several_answers_then_the_longest_beginning_that_is_the_same_counts() -> None:
    given = GivenAnswers()
    given.keep(OWN, "Q:", np.arange(2), "yes", [9])
    given.keep(OWN, "Q:", np.arange(2), "no", [8])
    given.keep(OWN, "Q:no</s>R:", np.arange(4), "why", [7])
    assert recalled(given, "Q:yes</s>R:") == ([0, 1, 9], "</s>R:")
    assert recalled(given, "Q:no</s>R:") == ([0, 1, 8], "</s>R:")
    assert recalled(given, "Q:no</s>R:why</s>") == ([0, 1, 2, 3, 7], "</s>")
    assert recalled(given, "Q:no</s>R:who</s>") == ([0, 1, 8], "</s>R:who</s>")
    assert recalled(given, "Q:maybe</s>") is None
    assert recalled(given, "Q:yes") is None, "nothing says where the answer ends"
    assert recalled(given, "Q:yes</s>", OWN._replace(adapter="x")) is None


def test_given_no_more_room_then_the_answer_that_was_not_used_for_longest_goes() -> None:
    given = GivenAnswers(max_bytes=2 * (4 * 101 + 4 + 512))
    for name in "ab":
        given.keep(OWN, name, np.zeros(100, np.int32), "x", [1])
    assert recalled(given, "ax</s>")
    given.keep(OWN, "c", np.zeros(100, np.int32), "x", [1])
    assert [recalled(given, f"{name}x</s>") is not None for name in "abc"] == [True, False, True]
    given.forget("a")
    assert recalled(given, "ax</s>") is None
    assert given._num_bytes == 0
    assert given._lengths == {}


def test_given_one_answer_again_and_again_then_it_takes_the_room_of_one() -> None:
    given = GivenAnswers(max_bytes=3 * (4 * 101 + 4 + 512))
    tokens = np.zeros(100, np.int32)
    given.keep(OWN, "a", tokens, "b", [1])
    for written in range(9):
        given.keep(OWN, "c", tokens, "d", [written])
    assert recalled(given, "ab</s>") == ([0] * 100 + [1], "</s>")
    assert recalled(given, "cd</s>") == ([0] * 100 + [8], "</s>"), "of one text, the newest tokens"
