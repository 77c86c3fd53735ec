"""Calls of tools, with the clients that agents use: read from every form, forced by a grammar, whole and streamed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from letters import letters_tokenizer
from live import Live, openai_client
from models import tiny_model

from kvpool.engine import Engine
from kvpool.engine.grammar import Grammars, num_words
from kvpool.engine.pictures import PicturedPrompt
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.server import ServedModel, create_app
from kvpool.server.answer_reader import (
    THINKING,
    AnswerReader,
    HarmonyReader,
    MarkedReader,
    Part,
    ReadAnswer,
    read_whole,
)
from kvpool.server.errors import Problem
from kvpool.server.tool_forms import FORMS, HARMONY, Tool, ToolCall, form_in, json_rule
from kvpool.server.tools import AnswerForm, Dialogue, ToolUse, tool_use

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/few"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"few": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TOOLS = {
    "weather": Tool("weather", SCHEMA),
    "stop": Tool("stop", {"type": "object", "properties": {}, "additionalProperties": False}),
}
ROME, OSLO = ToolCall("weather", {"city": "Rome", "days": 3}), ToolCall("weather", {"city": "Oslo", "days": 1})
ROME_JSON, OSLO_JSON = (
    json.dumps({"city": call.arguments["city"], "days": call.arguments["days"]}) for call in (ROME, OSLO)
)
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ROME_JSON}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "weather", "arguments": {OSLO_JSON}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n1\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "llama3": f'{{"name": "weather", "parameters": {ROME_JSON}}}; {{"name": "weather", "parameters": {OSLO_JSON}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {ROME_JSON}}}, '
    f'{{"name": "weather", "arguments": {OSLO_JSON}}}]',
    "mistral_args": f"[TOOL_CALLS]weather[ARGS]{ROME_JSON}[TOOL_CALLS]weather[ARGS]{OSLO_JSON}",
    "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ROME_JSON}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OSLO_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ROME_JSON}\n```"
    f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{OSLO_JSON}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "pythonic": '[weather(city="Rome", days=3), weather(city="Oslo", days=1)]',
    HARMONY: f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME_JSON}<|call|><|start|>assistant"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO_JSON}",
}


def reader_of(form: str) -> AnswerReader:
    return HarmonyReader() if form == HARMONY else MarkedReader(FORMS[form], TOOLS, THINKING[0])


def read_in_pieces(form: str, text: str, seed: int) -> list[Part]:
    """Reads a text that comes in pieces of one to six letters."""
    dice, reader, parts = random.Random(seed), reader_of(form), list[Part]()
    while text:
        length = dice.randint(1, 6)
        parts += reader.push(text[:length])
        text = text[length:]
    return [*parts, *reader.finish()]


def joined(parts: list[Part]) -> ReadAnswer:
    said = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    return ReadAnswer(said["content"], said["reasoning"], [part.call for part in parts if part.call])


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_given_two_calls_in_a_form_then_both_are_read_however_they_arrive(form: str) -> None:
    whole = read_whole(lambda: reader_of(form), WRITTEN[form])
    assert whole == ReadAnswer("", "", [ROME, OSLO])
    assert all(joined(read_in_pieces(form, WRITTEN[form], seed)) == whole for seed in range(20))


@pytest.mark.parametrize("form", [form for form, made in FORMS.items() if not made.only_first and form != HARMONY])
def test_given_thoughts_and_words_before_a_call_then_each_is_told_apart(form: str) -> None:
    text = f"<think>\nWhich city?\n</think>\n\nLet me look.\n{WRITTEN[form]}"
    for seed in range(20):
        assert joined(read_in_pieces(form, text, seed)) == ReadAnswer("Let me look.", "Which city?", [ROME, OSLO])


def test_given_channels_then_thoughts_words_and_calls_are_told_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Which city?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Rome, I think.<|return|>"
    )
    for seed in range(20):
        assert joined(read_in_pieces(HARMONY, text, seed)) == ReadAnswer("Rome, I think.", "Which city?", [])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "text", ["plain", "  plain\n", '{"a": 1}', "[1] is a list", "<tool_call>no call</tool_call> x", "a < b <tool", "{"]
)
def test_given_other_text_then_all_of_it_is_said(form: str, text: str) -> None:
    if form == HARMONY:
        text = f"<|channel|>final<|message|>{text}"
    said = read_whole(lambda: reader_of(form), text)
    assert (said.content, said.calls) == (text.rpartition("<|message|>")[2], [])
    assert joined(read_in_pieces(form, text, 1)) == said


@pytest.mark.parametrize("form", [form for form in FORMS if form not in (HARMONY, "qwen3_coder", "glm")])
def test_given_a_call_that_was_cut_off_then_its_text_is_said(form: str) -> None:
    text = WRITTEN[form][: WRITTEN[form].index("Rome") + 2]
    assert read_whole(lambda: reader_of(form), text) == ReadAnswer(text, "", [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>'),
        ("glm", "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>Infinity</arg_value>\n</tool_call>"),
        ("pythonic", "[weather(days=1j)]"),
        ("pythonic", "[weather(days={[]: 1})]"),
        (HARMONY, "<|channel|>commentary to=functions.weather<|message|>" + '{"days": -Infinity}'),
        (HARMONY, "<|channel|>commentary to=functions.weather<|message|>" + '{"days": ' + "[" * 100_000),
    ],
)
def test_given_a_call_that_no_json_can_say_then_its_text_is_said(form: str, text: str) -> None:
    assert read_whole(lambda: reader_of(form), text) == ReadAnswer(text.rpartition("<|message|>")[2], "", [])


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("qwen3_coder", "glm")])
def test_given_half_a_character_in_a_call_then_the_call_can_be_sent(form: str) -> None:
    told = read_whole(lambda: reader_of(form), WRITTEN[form].replace("Rome", "\\ud800Rome"))
    assert told == ReadAnswer("", "", [ToolCall("weather", {"city": "\ufffdRome", "days": 3}), OSLO])


def test_given_json_that_names_no_tool_then_it_is_no_call() -> None:
    text = '{"name": "Anna", "parameters": {}}'
    assert read_whole(lambda: reader_of("llama3"), text) == ReadAnswer(text, "", [])


@pytest.mark.parametrize("value", ["b'x'", "{1, 2}", "1j", "...", "{[]: 1}", "{(1, 2): 3}"])
def test_given_a_call_in_python_with_a_value_that_json_has_not_then_its_text_is_said(value: str) -> None:
    text = f"[weather(city={value}, days=1)]"
    assert read_whole(lambda: reader_of("pythonic"), text) == ReadAnswer(text, "", [])


def test_given_traces_in_a_template_then_they_name_the_form() -> None:
    assert [
        form_in(text) for text in ("{# <tool_call> #}", "<tool_call>{{x}}<arg_key>", "<|python_tag|>", "plain")
    ] == [*("hermes", "glm", "llama3", "")]


# --- forced by a grammar ----------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }} {{ c['function']['arguments']['city'] }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{# <tool_call> #}"
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
MARKS = {
    "mistral_args": ("[TOOL_CALLS]", "[ARGS]"),
    "deepseek": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    HARMONY: ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>", "<|start|>"),
}
OFFERED: Any = [
    {"type": "function", "function": {"name": name, "parameters": tool.parameters}} for name, tool in TOOLS.items()
]
ASKED: Any = [{"role": "user", "content": "Rain?"}]
FREE: Any = dict(model="tiny", messages=ASKED, tools=OFFERED, temperature=1, max_tokens=250)


def tokenizer_for(form: str) -> Any:
    tokenizer = letters_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS.get(form, ()))})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module", params=[*FORMS])
def agent(request: pytest.FixtureRequest) -> Iterator[Any]:
    """OpenAI's client of a server whose tiny random model writes calls in one of the forms."""
    with Engine(
        tiny_model("llama"), tokenizer=tokenizer_for(request.param), device="cpu", kv_blocks=256, block_size=4
    ) as engine:
        live = Live(create_app([ServedModel("tiny", engine, request.param)]))
        try:
            with openai_client(live) as client:
                yield client
        finally:
            live.stop()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A server whose chat template tells the form."""
    with Engine(
        tiny_model("llama"), tokenizer=tokenizer_for("hermes"), device="cpu", kv_blocks=256, block_size=4
    ) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        try:
            yield live
        finally:
            live.stop()


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    with openai_client(live) as made:
        yield made


@pytest.fixture
def claude(live: Live) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def is_valid(name: str, arguments: str) -> bool:
    given = json.loads(arguments)
    if name == "stop":
        return isinstance(given, dict)
    return set(given) == {"city", "days"} and given["city"] in ("Rome", "Oslo") and 0 <= given["days"] <= 9


@pytest.mark.quick("hermes", "pythonic")
def test_given_a_named_tool_then_every_form_gives_one_valid_call(agent: Any) -> None:
    for seed in range(2):
        answer = agent.chat.completions.create(
            **FREE, tool_choice={"type": "function", "function": {"name": "weather"}}, seed=seed
        )
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "weather")
        assert is_valid("weather", call.function.arguments)


@pytest.mark.slow
def test_given_a_forced_call_when_it_is_streamed_then_the_parts_are_the_whole(client: Any) -> None:
    for seed in range(3):
        wanted = dict(FREE, tool_choice="required", parallel_tool_calls=False, seed=seed)
        (whole,) = client.chat.completions.create(**wanted).choices[0].message.tool_calls
        with client.chat.completions.stream(**wanted) as stream:
            for _ in stream:
                pass
            (choice,) = stream.get_final_completion().choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == (whole.function.name, whole.function.arguments)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "")
        assert is_valid(call.function.name, call.function.arguments)


@pytest.mark.slow
def test_given_several_calls_then_each_has_an_id_and_a_number(client: Any) -> None:
    seen, seed = set[int](), 0
    while len(seen) < 2:
        seed += 1
        numbers, names = [], []
        for chunk in client.chat.completions.create(**FREE, tool_choice="required", seed=seed, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                numbers.append(call.index)
                names.append(call.id)
        assert numbers == list(range(len(numbers)))
        assert len(set(names)) == len(names)
        seen.add(len(numbers))
        assert seed < 50


@pytest.mark.parametrize("choice", ["none", "required", {"type": "function", "function": {"name": "stop"}}])
def test_given_another_choice_of_tools_then_the_prompt_stays_the_same(client: Any, choice: Any) -> None:
    first = client.chat.completions.create(**(FREE | {"max_tokens": 1})).usage
    again = client.chat.completions.create(**(FREE | {"max_tokens": 1}), tool_choice=choice).usage
    assert again.prompt_tokens == first.prompt_tokens
    assert again.prompt_tokens_details.cached_tokens == first.prompt_tokens - 1


def test_given_some_tools_that_must_be_called_then_no_other_is(client: Any) -> None:
    among = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}}]}
    for seed in range(3):
        asked = dict(FREE, seed=seed, parallel_tool_calls=False)
        choice = {"type": "allowed_tools", "allowed_tools": among}
        (called,) = client.chat.completions.create(**asked, tool_choice=choice).choices[0].message.tool_calls
        assert called.function.name == "stop"


def test_given_a_schema_beside_tools_then_the_answer_is_one_or_the_other(client: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    kinds = set()
    for seed in range(8):
        message = client.chat.completions.create(**FREE, response_format=form, seed=seed).choices[0].message
        assert message.tool_calls or message.content in ("true", "false")
        kinds.add(bool(message.tool_calls))
    assert kinds == {True, False}


def test_given_a_pattern_beside_tools_then_it_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="structured_outputs beside tools: only json and json_object"):
        client.chat.completions.create(**FREE, extra_body={"structured_outputs": {"regex": "a"}})


def test_given_an_agent_then_its_turns_are_found_in_the_cache(client: Any) -> None:
    messages, cached = list(ASKED), []
    for turn in range(3):
        answer = client.chat.completions.create(
            **(FREE | {"messages": messages}),
            tool_choice={"type": "function", "function": {"name": "weather"}},
            seed=turn,
        )
        message = answer.choices[0].message
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls]
    last = client.chat.completions.create(**(FREE | {"messages": messages, "max_tokens": 4}), tool_choice="none")
    assert last.choices[0].message.tool_calls is None
    assert cached[0] < cached[1] < cached[2]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            dict(tool_choice={"type": "function", "function": {"name": "snow"}}),
            "'snow', which is none of the tools weather",
        ),
        (dict(tool_choice="must"), "tool_choice is"),
        (dict(tool_choice="required", tools=[]), "tool_choice needs tools"),
        (
            dict(messages=[{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]),
            "tool_calls that are no calls",
        ),
        (
            dict(
                messages=[
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}
                ]
            ),
            "tool_calls that are no calls",
        ),
    ],
)
def test_given_a_wrong_choice_or_call_then_it_is_named(client: Any, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(**(FREE | wrong))


# --- Anthropic's form -------------------------------------------------------------------------------------------------

BOXES: Any = [{"name": name, "input_schema": tool.parameters} for name, tool in TOOLS.items()]
TALK: Any = dict(model="tiny", max_tokens=250, tools=BOXES, messages=ASKED)


@pytest.mark.slow
def test_given_any_tool_then_a_message_holds_a_call_whole_and_streamed(claude: Any) -> None:
    wanted = dict(TALK, tool_choice={"type": "any", "disable_parallel_tool_use": True}, extra_body={"seed": 3})
    whole = claude.messages.create(**wanted)
    with claude.messages.stream(**wanted) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        (block,) = answer.content
        assert (answer.stop_reason, block.type) == ("tool_use", "tool_use")
        assert is_valid(block.name, json.dumps(block.input))
    assert (whole.content[0].name, whole.content[0].input) == (streamed.content[0].name, streamed.content[0].input)


@pytest.mark.slow
def test_given_a_runner_of_tools_then_it_goes_round_by_itself(claude: Any) -> None:
    asked = []

    @anthropic.beta_tool
    def weather(city: str, days: int) -> str:
        """How the weather will be."""
        asked.append((city, days))
        return "sun"

    weather.input_schema = SCHEMA
    runner = claude.beta.messages.tool_runner(
        model="tiny", max_tokens=250, tools=[weather], messages=ASKED, max_iterations=3, tool_choice={"type": "any"}
    )
    answers = list(runner)
    assert len(answers) == 3
    assert len(asked) >= 3
    assert answers[-1].usage.cache_read_input_tokens > answers[0].usage.cache_read_input_tokens


def test_given_results_of_tools_then_the_model_sees_them(claude: Any) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome", "days": 1}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]}
    talk = [
        *ASKED,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    counted = claude.messages.count_tokens(model="tiny", messages=talk).input_tokens
    text = "user: Rain?\nassistant: weather Rome\ntool: sun\nuser: so?\n"
    assert counted == len(letters_tokenizer()(text)["input_ids"])


def test_given_an_assistant_that_spoke_last_then_the_answer_goes_on_with_it(claude: Any, client: Any) -> None:
    talk = [*ASKED, {"role": "assistant", "content": "Ye"}]
    counted = claude.messages.count_tokens(model="tiny", messages=talk).input_tokens
    assert counted == len(letters_tokenizer()("user: Rain?\nassistant: Ye")["input_ids"])
    asked: Any = dict(model="tiny", messages=talk, max_tokens=3, temperature=0)
    goes_on = client.chat.completions.create(**asked, extra_body={"continue_final_message": True})
    assert goes_on.usage.prompt_tokens == counted
    assert client.chat.completions.create(**asked).usage.prompt_tokens > counted


def test_given_marks_then_usage_tells_what_they_put_into_the_cache(claude: Any) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    system: Any = [{"type": "text", "text": "You look into the sky.", "cache_control": mark}]
    asked: Any = dict(model="tiny", max_tokens=2, system=system, messages=ASKED)
    first, second = (claude.messages.create(**asked).usage for _ in range(2))
    assert first.cache_creation_input_tokens > 0 == first.cache_read_input_tokens
    assert second.cache_read_input_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="at most 4 cache_control marks"):
        claude.messages.create(**(asked | {"system": system * 5}))


# --- Responses --------------------------------------------------------------------------------------------------------

FUNCTIONS: Any = [
    {"type": "function", "name": name, "parameters": tool.parameters, "strict": True} for name, tool in TOOLS.items()
]


@pytest.mark.slow
def test_given_a_forced_call_of_a_response_then_it_is_an_item_whole_and_streamed(client: Any) -> None:
    wanted: Any = dict(
        model="tiny", input="Rain?", tools=FUNCTIONS, tool_choice="required", parallel_tool_calls=False, temperature=1
    )
    wanted["extra_body"] = {"seed": 5}
    whole = client.responses.create(**wanted)
    with client.responses.stream(**wanted) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_response()
    for answer in (whole, streamed):
        (item,) = answer.output
        assert (answer.status, item.type) == ("completed", "function_call")
        assert is_valid(item.name, item.arguments)
    assert (whole.output[0].name, whole.output[0].arguments) == (streamed.output[0].name, streamed.output[0].arguments)
    told = [
        *({"role": "user", "content": "Rain?"}, whole.output[0].to_dict()),
        {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "sun"},
    ]
    again = client.responses.create(model="tiny", input=told, tools=FUNCTIONS, max_output_tokens=2)
    assert again.usage.input_tokens > whole.usage.input_tokens


# --- models that cannot, and models that think ------------------------------------------------------------------------


def served(template: str, **options: Any) -> Iterator[Any]:
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = template
    with Engine(tiny_model("llama"), tokenizer=tokenizer, device="cpu", kv_blocks=256, block_size=4) as engine:
        live = Live(create_app([ServedModel("tiny", engine, **options)]))
        try:
            with openai_client(live) as made:
                yield made
        finally:
            live.stop()


def test_given_arguments_with_a_bound_that_would_not_be_kept_then_a_rule_for_them_is_refused() -> None:
    share = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    with pytest.raises(InvalidArgumentError, match="would let 0 through"):
        json_rule({"type": "object", "properties": {"share": share}})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}{# <tool_call> #}", "does not show tools"),
        (TEMPLATE.replace("<tool_call>", ""), "start the server with --tool-parser"),
    ],
)
def test_given_a_template_that_cannot_then_tools_are_refused(template: str, words: str) -> None:
    for client in served(template):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(**FREE)


@pytest.mark.slow
def test_given_a_model_that_thinks_then_its_thoughts_have_their_own_field() -> None:
    template = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    for client in served(template):
        asked: Any = dict(model="tiny", messages=ASKED, max_tokens=4, temperature=0)
        cut = client.chat.completions.create(**asked).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("", "length")
        assert cut.message.reasoning_content
        thought = "".join(
            chunk.choices[0].delta.model_extra.get("reasoning_content") or ""
            for chunk in client.chat.completions.create(**asked, stream=True)
        )
        assert thought == cut.message.reasoning_content
        forced = client.chat.completions.create(**FREE, tool_choice="required", seed=1, logit_bias={"30": 8}).choices[0]
        assert forced.finish_reason == "length" or forced.message.tool_calls


def test_given_an_unknown_parser_then_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no tool parser 'herms': choose one of hermes"):
        next(served(TEMPLATE, tool_parser="herms"))


# --- held where the model may answer otherwise ---------------------------------------------------------------------------


def accepts(form: str, text: str, use: ToolUse) -> bool:
    """Whether an answer that is over keeps to the grammar of a use of tools."""
    tokenizer = tokenizer_for(form)
    dialogue = Dialogue(PicturedPrompt(np.zeros(1, np.int32)), use)
    rules = AnswerForm(tokenizer, form).rules(dialogue, None)
    assert rules is not None
    state = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).from_rules(rules).start()
    words = np.zeros(num_words(len(tokenizer)), np.int32)
    for token in [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]:
        state.fill(words)
        if not words[token // 32] >> token % 32 & 1:
            return False
        state.push([token])
    return True


STRICT = ToolUse([{**each, "function": {**each["function"], "strict": True}} for each in OFFERED])


@pytest.mark.parametrize("form", [form for form in FORMS if form != HARMONY])
def test_given_strict_tools_then_a_free_answer_is_any_text_and_its_calls_are_valid(form: str) -> None:
    written, lead = WRITTEN[form], "" if FORMS[form].only_first else "Let me look [at it]: <b "
    for text in ("", "It rains.", "2 < 3 \n and more {", lead + written):
        assert accepts(form, text, STRICT), text
    if FORMS[form].closes:
        assert accepts(form, f"{lead}{written}\nThat is all.", STRICT)
    for wrong in (written.replace("Oslo", "Paris"), written.replace("Rome", "Paris"), written.replace("weather", "x")):
        assert not accepts(form, lead + wrong, STRICT), wrong
    assert not accepts(form, lead + written, ToolUse(STRICT.offered, several=False))
    for mark in FORMS[form].opens:
        assert not accepts(form, mark, STRICT), mark


def test_given_some_tools_that_may_be_called_then_no_other_is() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    use = tool_use(OFFERED, choice, several=True)
    assert accepts("hermes", "No. " + WRITTEN["hermes"], use)
    assert not accepts("hermes", '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', use)


def test_given_strict_tools_and_answers_in_channels_then_they_are_refused() -> None:
    with pytest.raises(Problem, match='leave "strict" out'):
        accepts(HARMONY, "", STRICT)


def test_given_strict_tools_then_the_server_holds_free_answers_to_them(client: Any, claude: Any) -> None:
    answer = client.chat.completions.create(**(FREE | {"tools": list(STRICT.offered)}), seed=1).choices[0]
    assert all(is_valid(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ())
    tool = {"name": "weather", "input_schema": SCHEMA | {"type": "no type"}, "strict": True}
    with pytest.raises(anthropic.BadRequestError, match="no answer can be held"):
        claude.messages.create(model="tiny", max_tokens=9, messages=ASKED, tools=[tool])
