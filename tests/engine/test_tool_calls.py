"""The engine tells the eviction policy what it knows about continuations; a call of a tool it notices by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from letters import letters_tokenizer
from models import tiny_model

from kvpool import ReuseHint
from kvpool.engine import Engine, SamplingParams, requests
from kvpool.engine.requests import ToolCalls
from kvpool.errors import InvalidArgumentError

TOOL = ReuseHint(stop="tool_calls")
STOP = ReuseHint(stop="stop")
EVERYTHING_STOPS = SamplingParams(max_new_tokens=4, stop_token_ids=tuple(range(160)))
PROMPT = list(range(1, 18))


class Saying:
    """A tokenizer for which every token list is the same text."""

    def __init__(self, text: str, special: str = "") -> None:
        self.text, self.special = text, special

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.text if skip_special_tokens else self.text + self.special


@pytest.mark.parametrize(
    ("text", "special", "calls"),
    [
        ('<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>', "<|im_end|>", True),
        ('I look it up. <function=search>{"q": 1}</function>', "", True),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}]', "</s>", True),
        ('{"name": "get_weather", "parameters": {"city": "Oslo"}}', "<|eot_id|>", True),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', "<|eot_id|>", True),
        ("It is cold.", "<|call|>", True),
        ("It is cold in Oslo.", "<|eot_id|>", False),
        ('{"city": "Oslo", "name": "capital"}', "", False),
        ('{"name": "f", "arguments"', "", False),
        ("[]", "", False),
        ("", "", False),
    ],
)
def test_calls_are_told_from_other_answers_in_the_forms_of_many_models(text: str, special: str, calls: bool) -> None:
    said = ToolCalls(Saying(text, special))(np.array([1, 2], np.int32))
    assert said == (TOOL if calls else None)


def hints_in(engine: Engine) -> set[int]:
    tree = engine.manager._cache
    return {
        node.hint
        for root in tree.roots.values()
        for child in (root.children or {}).values()
        for node in child.subtree()
    }


@pytest.mark.quick("options0-marks0-expected0", "options2-marks2-expected2")
@pytest.mark.parametrize(
    ("options", "marks", "expected"),
    [
        ({}, ("",), STOP),  # it offers no tools: nobody looks
        ({"offers_tools": True}, ("",), TOOL),
        ({"offers_tools": True}, (), STOP),
        ({"offers_tools": True, "hint": ReuseHint(expected_seconds=3)}, ("",), ReuseHint(expected_seconds=3)),
        ({"hint": ReuseHint(expected_seconds=3)}, (), ReuseHint(expected_seconds=3)),
    ],
)
def test_the_policy_is_told_what_is_known_about_the_continuation(
    options: dict[str, Any], marks: tuple[str, ...], expected: ReuseHint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "TOOL_CALL_MARKS", marks)
    with Engine(tiny_model("llama"), tokenizer=letters_tokenizer(), block_size=4, kv_blocks=32) as engine:
        engine.submit(PROMPT, EVERYTHING_STOPS, **options).result(60)
        assert hints_in(engine) == {expected.code}


def test_given_a_wrong_hint_then_the_request_is_refused() -> None:
    with Engine(tiny_model("llama"), block_size=4, kv_blocks=32) as engine:
        for options in ({"hint": "tool_calls"}, {"offers_tools": "yes"}):
            with pytest.raises(InvalidArgumentError):
                engine.submit(PROMPT, EVERYTHING_STOPS, **options)  # type: ignore[arg-type]
