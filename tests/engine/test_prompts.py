"""Prompts become token ids, and what is no prompt is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from kvpool.engine.prompts import chat_tokens, prompt_tokens  # noqa: E402
from kvpool.errors import InvalidArgumentError  # noqa: E402

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}w1"


@pytest.fixture(scope="module")
def tokenizer(model_directory: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(model_directory)


def test_given_a_text_or_ids_then_they_are_the_same_prompt(tokenizer: Any) -> None:
    for prompt in ("w3 w5", [3, 5], (3, 5)):
        assert prompt_tokens(prompt, tokenizer, 160).tolist() == [3, 5]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a\ud800b", "no Unicode text: character 1"),
        (b"w1", "a text or token ids, got b'w1'"),
        (None, "a text or token ids, got None"),
        ({"input_ids": [1]}, "a text or token ids"),
        ([{"role": "user", "content": "w1"}], "chat_prompt"),
        (["w1", "w2"], "a text or token ids"),
        ([1.5], "must hold integers"),
    ],
)
def test_given_what_is_no_prompt_then_the_error_says_what_is(prompt: Any, message: str, tokenizer: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        prompt_tokens(prompt, tokenizer, 160)


def test_given_a_conversation_then_the_template_renders_it(tokenizer: Any) -> None:
    assert chat_tokens([{"role": "w1", "content": "w2 w3"}], tokenizer) == [1, 2, 3]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("w1", "a list of messages"),
        ([], "at least one"),
        ([{"role": "user", "content": "\udcff"}], "no Unicode text"),
        ([{"role": "system", "content": "w1"}], "roles system: no system role here"),
    ],
)
def test_given_what_the_template_cannot_render_then_the_error_says_why(
    messages: Any, message: str, tokenizer: Any
) -> None:
    class Strict:
        chat_template = NO_SYSTEM

        def apply_chat_template(self, spoken: Any, **options: Any) -> Any:
            return tokenizer.apply_chat_template(spoken, chat_template=NO_SYSTEM, **options)

    with pytest.raises(InvalidArgumentError, match=message):
        chat_tokens(messages, Strict())


def test_given_no_template_then_a_conversation_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        chat_tokens([{"role": "user", "content": "w1"}], None)
