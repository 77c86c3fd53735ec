"""What people ask becomes token ids: texts, ids and conversations, refused with the reason where they are none of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.config.layers import show
from kvpool.errors import InvalidArgumentError
from kvpool.pools.arrays import Int32Array, as_token_array


def prompt_tokens(prompt: Any, tokenizer: Any, vocab_size: int) -> Int32Array:
    """The token ids of a prompt, checked against the vocabulary."""
    if isinstance(prompt, str):
        if not callable(tokenizer):
            raise InvalidArgumentError("this model came without a tokenizer: give token ids, or Engine(tokenizer=...)")
        prompt = tokenizer(_unicode(prompt))["input_ids"]
    elif isinstance(prompt, (bytes, Mapping)) or prompt is None:
        raise InvalidArgumentError(f"a prompt is a text or token ids, got {show(prompt)}")
    try:
        tokens = as_token_array(prompt, "prompt")
    except InvalidArgumentError:
        if isinstance(prompt, (list, tuple)) and any(isinstance(part, (str, Mapping)) for part in prompt):
            raise InvalidArgumentError(
                f"a prompt is a text or token ids, got {show(prompt)}; chat_prompt gives the token ids of a conversation"
            ) from None
        raise
    if not len(tokens):
        raise InvalidArgumentError("a prompt needs at least one token")
    if int(tokens.max()) >= vocab_size:
        raise InvalidArgumentError(
            f"the prompt holds token {int(tokens.max())}; the vocabulary has {vocab_size} tokens"
        )
    return tokens


def chat_tokens(messages: Sequence[Mapping[str, Any]], tokenizer: Any, **template: Any) -> Sequence[int]:
    """The token ids of a conversation, by the model's own template, up to where the assistant speaks.

    `template` holds what else the template reads, such as `tools`.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InvalidArgumentError("this model has no chat template; write the prompt yourself")
    from jinja2 import TemplateError

    spoken = list(messages)
    if not spoken or not all(isinstance(message, Mapping) for message in spoken):
        raise InvalidArgumentError(
            f"a conversation is a list of messages {{'role': ..., 'content': ...}}, at least one, got {show(messages)}"
        )
    for message in spoken:
        _unicode(str(message.get("content", "")))
    try:
        rendered = tokenizer.apply_chat_template(spoken, add_generation_prompt=True, tokenize=True, **template)
    except (
        TemplateError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
    ) as error:  # it runs code
        roles = ", ".join(str(message.get("role")) for message in spoken)
        raise InvalidArgumentError(
            f"the model's chat template refuses a conversation of the roles {roles}: {error}"
        ) from error
    ids: Sequence[int] = rendered["input_ids"] if isinstance(rendered, Mapping) else rendered
    return ids


def _unicode(text: str) -> str:
    """The text, if it is one: bytes that are no UTF-8 come from a terminal or a file as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"the prompt is no Unicode text: character {error.start} is {text[error.start]!r}, half of a pair or a byte "
            "that is no UTF-8"
        ) from None
    return text
