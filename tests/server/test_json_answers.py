"""Answers by a JSON schema, as OpenAI's own client asks for them: whole, streamed, several at once, and refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from letters import letters_tokenizer
from live import Live, access, openai_client, refusal, until
from models import tiny_model
from pydantic import BaseModel, Field

from kvpool.engine import Engine
from kvpool.errors import InvalidArgumentError
from kvpool.server import ServedModel, create_app

TALK: Any = [{"role": "user", "content": "Who was it?"}]
pytest.importorskip("llguidance")


class Person(BaseModel):
    """A form whose parts are bounded, so that a random model comes to the end of it."""

    name: str = Field(max_length=5)
    kind: Literal["a", "bb"]
    tags: list[bool] = Field(max_length=2)


@pytest.fixture(scope="module")
def writer() -> Iterator[Any]:
    """OpenAI's client of a server whose tiny random model can write JSON."""
    tokenizer = letters_tokenizer()
    with Engine(tiny_model("llama"), tokenizer=tokenizer, device="cpu", kv_blocks=256, block_size=4) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        try:
            with openai_client(live) as client:
                yield client
        finally:
            live.stop()


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(4))
def test_given_a_pydantic_model_then_the_client_parses_every_answer(writer: Any, seed: int) -> None:
    answer = writer.chat.completions.parse(
        model="tiny", messages=TALK, response_format=Person, temperature=1, seed=seed, n=2, max_tokens=200
    )
    people = [choice.message.parsed for choice in answer.choices]
    assert [type(person) for person in people] == [Person, Person]
    assert people[0] != people[1]


def test_given_a_stream_then_its_parts_make_a_valid_answer(writer: Any) -> None:
    with writer.chat.completions.stream(
        model="tiny", messages=TALK, response_format=Person, temperature=1, seed=5, max_tokens=200
    ) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_given_a_response_with_a_text_format_then_it_is_parsed(writer: Any) -> None:
    answer = writer.responses.parse(
        model="tiny", input="Who was it?", text_format=Person, temperature=1, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Person)


def test_given_a_completion_with_a_schema_then_its_text_is_valid(writer: Any) -> None:
    form = {"response_format": by_schema(enum=[0, 1])}
    answer = writer.completions.create(model="tiny", prompt="Yes?", extra_body=form)
    assert answer.choices[0].text in ("0", "1")
    assert answer.choices[0].finish_reason == "stop"


def test_given_json_object_then_the_answer_is_one_as_far_as_it_goes(writer: Any) -> None:
    answer = writer.chat.completions.create(
        model="tiny", messages=TALK, response_format={"type": "json_object"}, max_tokens=3, temperature=1
    )
    assert answer.choices[0].message.content.startswith("{")


def test_given_plain_text_as_the_form_then_nothing_is_forbidden(writer: Any) -> None:
    wanted = dict(model="tiny", messages=TALK, max_tokens=8, temperature=0)
    plain = writer.chat.completions.create(**wanted)
    named = writer.chat.completions.create(**wanted, response_format={"type": "text"})
    assert named.choices[0].message.content == plain.choices[0].message.content


def by_schema(**schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("form", "code", "words"),
    [
        (by_schema(type="objekt"), "invalid_json_schema", "objekt"),
        (by_schema(type="array", uniqueItems=True), "invalid_json_schema", "uniqueItems"),
        ({"type": "json_schema"}, "invalid_value", "needs json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "invalid_value", "schema"),
        ({"type": "grammar"}, "invalid_value", "json_object"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_given_a_form_that_cannot_be_kept_then_status_400_says_why(
    writer: Any, form: Any, code: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        writer.chat.completions.create(model="tiny", messages=TALK, response_format=form, stream=stream)
    assert refused.value.code == code
    assert refused.value.param.startswith("response_format")


@pytest.mark.quick("form3-(x|yz)!", "form4-0|1")
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"choice": ["a/b", 'say "no"']}, r'a/b|say "no"'),
        ({"regex": r"[01]/\d{2}\/x|\n"}, r"[01]/\d{2}/x|\n"),
        ({"regex": "[ab]\n[cd]"}, r"[ab]\n[cd]"),
        ({"grammar": 'start: ("x" | "yz") "!"'}, "(x|yz)!"),
        ({"json": {"enum": [0, 1]}}, "0|1"),
        ({"json": '{"enum": [0, 1]}'}, "0|1"),
    ],
)
def test_given_a_form_as_vllms_clients_say_it_then_the_answer_keeps_to_it(writer: Any, form: Any, pattern: str) -> None:
    for seed in range(3):
        asked = dict(model="tiny", messages=TALK, temperature=1, seed=seed, max_tokens=20)
        answer = writer.chat.completions.create(**asked, extra_body={"structured_outputs": form})
        assert re.fullmatch(pattern, answer.choices[0].message.content)


def test_given_json_object_as_vllms_clients_say_it_then_the_answer_is_one_as_far_as_it_goes(writer: Any) -> None:
    asked = dict(model="tiny", messages=TALK, max_tokens=3, temperature=1)
    answer = writer.chat.completions.create(**asked, extra_body={"structured_outputs": {"json_object": True}})
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "give one of json, json_object"),
        ({"regex": "a", "choice": ["a"]}, "give one of json, json_object"),
        ({"regex": "("}, "no answer can be held to this grammar"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[" * 100_000}, "structured_outputs.json"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
    ],
)
def test_given_a_form_of_vllm_that_cannot_be_kept_then_status_400_says_why(writer: Any, form: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        writer.chat.completions.create(model="tiny", messages=TALK, extra_body={"structured_outputs": form})
    assert refused.value.param.startswith("structured_outputs")


def test_given_two_forms_then_they_are_refused(writer: Any) -> None:
    both = {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}
    with pytest.raises(openai.BadRequestError, match="response_format and structured_outputs: give one"):
        writer.chat.completions.create(model="tiny", messages=TALK, extra_body=both)


def test_given_a_tokenizer_that_cannot_write_json_then_the_answer_says_so(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be held to a form"):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "w5"}], response_format={"type": "json_object"}
        )


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("schema", [_nested(300), {"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}])
def test_given_a_schema_without_an_end_then_it_is_refused(writer: Any, schema: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="no answer can be held to this JSON schema"):
        writer.chat.completions.create(model="tiny", messages=TALK, response_format=form)


def test_given_a_key_with_many_forms_then_others_wait_for_none_and_one_of_its_own_is_compiled_at_a_time(
    serve: Callable[..., Live], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve(access=access("a", "b"))
    go, compiled = threading.Event(), []

    def slow(schema: Any) -> Any:
        compiled.append(schema["title"])
        assert schema["title"] != "a" or go.wait(30)
        raise InvalidArgumentError("no form")

    monkeypatch.setattr(engine, "json_grammar", slow)

    def ask(tenant: str) -> int:
        body = {"prompt": "w5", "max_tokens": 1, "response_format": by_schema(title=tenant)}
        return refusal(live, "/v1/completions", body, f"sk-{tenant}")[0]

    with ThreadPoolExecutor(40) as threads:
        of_a = [threads.submit(ask, "a") for _ in range(40)]  # more than the threads that all requests share
        try:
            until(lambda: len(live.app.state.server.gate.grammars._waiting.get("a", ())) == 39)
            long = {"prompt": "w5 " * 1000, "max_tokens": 1}  # is read in a thread
            assert refusal(live, "/v1/completions", long, "sk-b")[1]["code"] == "context_length_exceeded"
            assert ask("b") == 400
            assert compiled == ["a", "b"]
        finally:
            go.set()
        assert {each.result(30) for each in of_a} == {400}


def test_given_a_form_over_the_limit_then_it_is_refused_before_it_is_compiled(writer: Any) -> None:
    form: Any = by_schema(enum=["x" * (1 << 18)])
    with pytest.raises(openai.BadRequestError, match="the limit is 262144"):
        writer.chat.completions.create(model="tiny", messages=TALK, response_format=form)
