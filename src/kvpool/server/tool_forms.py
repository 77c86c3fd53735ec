"""How models write calls of tools: to read calls from a text, and to hold an answer to them by a grammar."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvpool.engine.grammar import refuse_unkept
from kvpool.errors import ConfigError


class Tool(NamedTuple):
    """A function that the model may call, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


class ToolCall(NamedTuple):
    """A call that the model wrote."""

    name: str
    arguments: dict[str, Any]


_HALVES = re.compile("[\ud800-\udfff]")  # of characters; a text with one cannot be sent


def sendable(call: ToolCall) -> ToolCall:
    """The call as JSON can say it; raises if it cannot. What is half a character becomes a replacement character.

    >>> sendable(ToolCall("f", {"x": "\\ud800"}))
    ToolCall(name='f', arguments={'x': '�'})
    """
    whole = json.dumps(call, ensure_ascii=False, allow_nan=False)
    return ToolCall(*json.loads(_HALVES.sub("\ufffd", whole)))


Tools = Mapping[str, Tool]
"""Tools by their name."""
Literal = Callable[[str], str]
"""Writes a text for a grammar. Special tokens in it become tokens."""


@dataclass(frozen=True)
class ToolForm:
    """One way in which models write calls.

    A call begins with one of `opens` and ends with `closes`, or with the answer if that is empty. `read` gets the text
    between and raises ValueError if it holds no calls. If `only_first`, an answer with calls has no other text before.
    `write` gives the rule of a grammar for the inside of one call; `frame` has the texts before all calls, before each, after
    each, between two, and after all.
    """

    opens: tuple[str, ...]
    closes: str
    read: Callable[[str, Tools], list[ToolCall]]
    write: Callable[[Tool, Literal], str]
    frame: tuple[str, str, str, str, str]
    only_first: bool = False

    def rules(self, tools: Sequence[Tool], several: bool, literal: Literal) -> str:
        """Rules of a grammar in which `calls` is one call of these tools, or several."""
        first, before, after, between, last = (literal(text) for text in self.frame)
        more = f"({between} call)*" if several else ""
        inner = "\n    | ".join(self.write(tool, literal) for tool in tools)
        return f"calls: {first} call {more} {last}\ncall: {before} inner {after}\ninner: {inner}\n"

    def free_rules(self, several: bool, literal: Literal) -> str:
        """Rules, beside those of `rules`, in which `free` is any text, and a call where the text begins one."""
        if self.only_first:
            begins = re.escape("".join(sorted({mark[0] for mark in self.opens})))
            return f"free: calls | OTHER\nOTHER: /\\s*([^\\s{begins}](?s:.*))?/\n"
        first, before, after, between, last = self.frame
        mark = next(mark for mark in self.opens if (first + before).startswith(mark))
        rest, opens = literal((first + before).removeprefix(mark)), literal(mark)
        texts = [re.escape(each).replace("/", r"\/") for each in self.opens if not _is_token(literal(each))]
        other = "/(?s:.*)/" + (f" & ~/(?s:.*)({'|'.join(texts)})(?s:.*)/" if texts else "")
        lead = f"lead: OTHER {opens}" if _is_token(opens) else f"lead[suffix={opens}]: /(?s:.*)/"
        # Text behind a call could be the beginning of another one, except inside a frame of all calls.
        more = f"({literal(between)} call)*" if several and (first or not self.closes) else ""
        one = f"lead {rest} inner {literal(after)} {more} {literal(last)}"
        free = f"({one}){'*' if several else '?'} OTHER" if self.closes else f"OTHER | {one}"
        return f"free: {free}\n{lead}\nOTHER: {other}\n"


def _is_token(rule: str) -> bool:
    """Whether a text for a grammar is one token."""
    return rule.startswith("<[") and " " not in rule


# --- reading ---------------------------------------------------------------------------------------------------------


def _call(found: Any) -> ToolCall:
    """A call from its JSON form."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError("no call")
    return ToolCall(found["name"], arguments_in(found.get("arguments", found.get("parameters", {}))))


def arguments_in(found: Any) -> dict[str, Any]:
    """The arguments of a call: an object, or its JSON text."""
    if isinstance(found, str):
        found = json.loads(found)
    if not isinstance(found, dict):
        raise ValueError("arguments are no object")
    return found


def _json_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Calls as JSON objects, in a list or one after the other.

    >>> _json_calls('{"name": "f", "arguments": {"x": 1}}; {"name": "g", "parameters": {}}', {})
    [ToolCall(name='f', arguments={'x': 1}), ToolCall(name='g', arguments={})]
    """
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    text = text.strip()
    while text:
        found, end = decoder.raw_decode(text)
        calls += [_call(each) for each in (found if isinstance(found, list) else [found])]
        text = text[end:].lstrip(" \t\r\n;,")
    if not calls:
        raise ValueError("no call")
    return calls


def _known_json_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Calls as JSON that nothing marks as calls: they are only if they name tools that were offered."""
    calls = _json_calls(text, tools)
    if any(call.name not in tools for call in calls):
        raise ValueError("other JSON")
    return calls


def _mistral_calls(text: str, tools: Tools) -> list[ToolCall]:
    """A JSON list, or the name before the arguments.

    >>> _mistral_calls('f[ARGS]{"x": 1}[TOOL_CALLS]g{}', {})
    [ToolCall(name='f', arguments={'x': 1}), ToolCall(name='g', arguments={})]
    """
    if text.lstrip().startswith(("[", "{")):
        return _json_calls(text, tools)
    calls = []
    for each in text.split("[TOOL_CALLS]"):
        name, brace, rest = each.partition("{")
        name = re.sub(r"\[CALL_ID\].*", "", name.strip().removesuffix("[ARGS]"))
        if not brace or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError("no call")
        calls.append(ToolCall(name, arguments_in(json.loads(brace + rest))))
    return calls


_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.-]+)(?:<｜tool▁sep｜>|\n)(.*?)<｜tool▁call▁end｜>", re.S
)


def _deepseek_calls(text: str, tools: Tools) -> list[ToolCall]:
    """The name, then the arguments as JSON, in older models within a Markdown fence."""
    found = _DEEPSEEK_CALL.findall(text)
    if not found:
        raise ValueError("no call")
    fence = re.compile(r"^\s*```(?:json)?\s*|\s*```\s*$")
    return [ToolCall(name, arguments_in(json.loads(fence.sub("", given)))) for name, given in found]


def _value(text: str, schema: Any) -> Any:
    """A value that was written without quotes: a text if the schema wants one, else JSON if it is."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _named_values(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> list[ToolCall]:
    properties = tools[name].parameters.get("properties", {}) if name in tools else {}
    return [ToolCall(name, {key: _value(text, properties.get(key)) for key, text in pairs})]


def _glm_calls(text: str, tools: Tools) -> list[ToolCall]:
    """The name, then pairs of keys and values.

    >>> _glm_calls("f\\n<arg_key>x</arg_key>\\n<arg_value>1</arg_value>\\n", {})
    [ToolCall(name='f', arguments={'x': 1})]
    """
    name = text.partition("<arg_key>")[0].strip()
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError("no call")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", text, re.S)
    return _named_values(name, [(key.strip(), value) for key, value in pairs], tools)


def _qwen_coder_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Tags for the function and for each parameter.

    >>> _qwen_coder_calls("<function=f>\\n<parameter=x>\\n1\\n</parameter>\\n</function>", {})
    [ToolCall(name='f', arguments={'x': 1})]
    """
    found = re.search(r"<function=([\w.-]+)>(.*)", text, re.S)
    if found is None:
        raise ValueError("no call")
    pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", found[2], re.S)
    return _named_values(found[1], pairs, tools)


def _pythonic_calls(text: str, tools: Tools) -> list[ToolCall]:
    """A list of calls with keyword arguments, as Python writes them.

    >>> _pythonic_calls('f(x=1, y=["a", null])]', {"f": Tool("f", {})})
    [ToolCall(name='f', arguments={'x': 1, 'y': ['a', None]})]
    """
    try:
        parsed = ast.parse("[" + text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("no calls") from None
    calls = []
    for each in parsed.elts if isinstance(parsed, ast.List) else ():
        if not isinstance(each, ast.Call) or each.args or (name := ast.unparse(each.func)) not in tools:
            raise ValueError("other text")
        calls.append(ToolCall(name, {keyword.arg or "": _python_value(keyword.value) for keyword in each.keywords}))
    if not calls:
        raise ValueError("no calls")
    return calls


_CONSTANTS = {"true": True, "false": False, "null": None}


def _python_value(node: ast.expr) -> Any:
    """A literal of Python or of JSON."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key): _python_value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key
        }
    return ast.literal_eval(node)


# --- writing ---------------------------------------------------------------------------------------------------------


def json_rule(schema: Mapping[str, Any]) -> str:
    """Text that is valid by a JSON schema, for a grammar."""
    refuse_unkept(schema)
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": " ?"}, **schema})


def _json_arguments(before: str, after: str) -> Callable[[Tool, Literal], str]:
    """Writes a call whose arguments are JSON; `before` has a place for the name."""

    def write(tool: Tool, literal: Literal) -> str:
        return f"{literal(before.format(tool.name))} ({json_rule(tool.parameters)}) {literal(after)}"

    return write


def _values(tool: Tool, literal: Literal, before: str, after: str) -> tuple[list[str], list[str]]:
    """Rules for the required arguments of a tool and for the others, each by its own schema."""
    needed, others = list[str](), list[str]()
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    for key, schema in tool.parameters.get("properties", {}).items():
        value, end = json_rule({**(schema if isinstance(schema, Mapping) else {}), **shared}), after
        if after and isinstance(schema, Mapping) and schema.get("type") == "string":  # between tags, without quotes
            options = [literal(str(each)) for each in schema.get("enum", ())]
            value, end = (" | ".join(options), after) if options else ("/[^<]*/", after.lstrip())
        rule = f"{literal(before.format(key))} ({value}) {literal(end)}"
        (needed if key in tool.parameters.get("required", ()) else others).append(rule)
    return needed, others


def _tagged_values(tool: Tool, literal: Literal, before: str, after: str) -> str:
    needed, others = _values(tool, literal, before, after)
    return " ".join([*needed, *(f"({rule})?" for rule in others)])


def _write_glm(tool: Tool, literal: Literal) -> str:
    values = _tagged_values(tool, literal, "\n<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>")
    return f"{literal(tool.name)} {values} {literal(chr(10))}"


def _write_qwen_coder(tool: Tool, literal: Literal) -> str:
    values = _tagged_values(tool, literal, "<parameter={}>\n", "\n</parameter>\n")
    return f"{literal(f'<function={tool.name}>' + chr(10))} {values} {literal('</function>')}"


def _write_pythonic(tool: Tool, literal: Literal) -> str:
    needed, others = _values(tool, literal, "{}=", "")
    comma = f" {literal(', ')} "
    if not needed and others:
        needed, others = others[:1], others[1:]  # an argument too many is better than a comma too many
    listed = comma.join(needed) + "".join(f" ({comma} {rule})?" for rule in others)
    return f"{literal(tool.name + '(')} {listed} {literal(')')}"


HARMONY = "harmony"
_HERMES = '{{"name": "{}", "arguments": '
FORMS: Mapping[str, ToolForm] = {
    "hermes": ToolForm(
        ("<tool_call>",),
        "</tool_call>",
        _json_calls,
        _json_arguments(_HERMES, "}"),
        ("", "<tool_call>\n", "\n</tool_call>", "\n", ""),
    ),
    "qwen3_coder": ToolForm(
        ("<tool_call>", "<function="),
        "</tool_call>",
        lambda text, tools: _qwen_coder_calls(text if "<function=" in text else "<function=" + text, tools),
        _write_qwen_coder,
        ("", "<tool_call>\n", "\n</tool_call>", "\n", ""),
    ),
    "glm": ToolForm(
        ("<tool_call>",), "</tool_call>", _glm_calls, _write_glm, ("", "<tool_call>", "</tool_call>", "\n", "")
    ),
    "llama3": ToolForm(
        ("<|python_tag|>", "{"),
        "",
        lambda text, tools: _known_json_calls(text if text.lstrip().startswith(("{", "[")) else "{" + text, tools),
        _json_arguments('{{"name": "{}", "parameters": ', "}"),
        ("", "", "", "; ", ""),
        only_first=True,
    ),
    "mistral": ToolForm(
        ("[TOOL_CALLS]",), "", _mistral_calls, _json_arguments(_HERMES, "}"), ("[TOOL_CALLS][", "", "", ", ", "]")
    ),
    "mistral_args": ToolForm(
        ("[TOOL_CALLS]",), "", _mistral_calls, _json_arguments("{}[ARGS]", ""), ("", "[TOOL_CALLS]", "", "", "")
    ),
    "deepseek_v3": ToolForm(
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁end｜>",
        _deepseek_calls,
        _json_arguments("function<｜tool▁sep｜>{}\n```json\n", "\n```"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek": ToolForm(
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁end｜>",
        _deepseek_calls,
        _json_arguments("{}<｜tool▁sep｜>", ""),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "", "<｜tool▁calls▁end｜>"),
    ),
    "pythonic": ToolForm(
        ("<|python_start|>[", "["), "", _pythonic_calls, _write_pythonic, ("[", "", "", ", ", "]"), only_first=True
    ),
    # What this form writes is read by `HarmonyReader`, because all of an answer is in channels.
    HARMONY: ToolForm(
        ("<|channel|>",),
        "",
        _json_calls,
        _json_arguments("{} <|constrain|>json<|message|>", ""),
        ("", "<|channel|>commentary to=functions.", "", "", ""),
    ),
}
"""The forms by the names that `--tool-parser` takes."""

# What only templates of that form contain; the first that is found counts.
_TRACES = (
    ("<|channel|>", HARMONY),
    ("<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
)


def check_tool_parser(name: str) -> None:
    """Refuses a name that is none of the forms; an empty one leaves the choice to the chat template."""
    if name and name not in FORMS:
        raise ConfigError(f"there is no tool parser {name!r}: choose one of {', '.join(FORMS)}")


def form_in(template: str) -> str:
    """The name of the form that a chat template asks for; empty if it is none of these."""
    return next((name for trace, name in _TRACES if trace in template), "")
