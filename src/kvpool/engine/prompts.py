"""Reads prompts: texts, token ids, conversations and images become token ids, with the pictures that stand beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpool.checks import show
from kvpool.engine.images import num_pixels, open_images
from kvpool.engine.pictures import PicturedPrompt
from kvpool.errors import InvalidArgumentError
from kvpool.model.vision import ImageEncoder
from kvpool.pools.arrays import Int32Array, as_token_array


class Prompts:
    """Reads the prompts of one model: what a server does with a conversation before it submits it."""

    def __init__(self, tokenizer: Any, processor: Any, vocab_size: int, images: ImageEncoder) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._vocab_size = vocab_size
        self._images = images

    def token_ids(self, prompt: Any) -> Int32Array:
        """The token ids of a prompt, checked against the vocabulary."""
        if isinstance(prompt, PicturedPrompt):
            return prompt.token_ids
        ids = processor_output(prompt)[0] if isinstance(prompt, Mapping) else prompt
        return prompt_tokens(ids, self._tokenizer, self._vocab_size)

    def read(self, prompt: Any, images: Sequence[Any] = ()) -> PicturedPrompt:
        """The token ids of a prompt, and its pictures. Raises if they do not belong together."""
        if len(images):
            self._check_images()
            prompt = _processed(prompt, images, self._processor)
        if isinstance(prompt, PicturedPrompt):
            return prompt
        rest = processor_output(prompt)[1] if isinstance(prompt, Mapping) else {}
        tokens = self.token_ids(prompt)
        return PicturedPrompt(tokens, self._images.pictures(tokens, rest))

    def chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> PicturedPrompt:
        """A conversation as a prompt, up to where the assistant speaks."""
        images = images_of(messages)
        if images:
            self._check_images()
        text = self.chat_text(messages, **template)
        return self.read(text, images) if images else self.read(self.chat_text_tokens(text))

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """A conversation as the chat template writes it."""
        by_processor = self._has_processor_template
        templates, spoken = (self._processor, _in_parts(messages)) if by_processor else (self._tokenizer, messages)
        return str(_rendered(spoken, templates, tokenize=False, **template))

    def chat_text_tokens(self, text: str, *, begins: bool = True) -> Int32Array:
        """The token ids of what a chat template wrote. If it does not begin the prompt, no mark of the beginning is added."""
        marks = (
            _marks(text, self._tokenizer) if begins and self._has_processor_template else {"add_special_tokens": False}
        )
        return self.token_ids(self._tokenizer(text, **marks)["input_ids"])

    @property
    def _has_processor_template(self) -> bool:
        return bool(getattr(self._processor, "chat_template", None))

    def num_pixels(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """How many pixels the images of a conversation count, from the heads of their files."""
        images = images_of(messages)
        if images:
            self._check_images()
        return num_pixels(images)

    def _check_images(self) -> None:
        """Raises InvalidArgumentError if the model takes no images, or came without what reads them."""
        if self._images.refusal is not None:
            raise InvalidArgumentError(self._images.refusal)
        if self._processor is None:
            raise InvalidArgumentError(
                "this model came without a processor: use Engine(processor=...), or give input_ids and pixel_values"
            )


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

    `template` holds further arguments for the template, such as `tools`.
    """
    rendered = _rendered(messages, tokenizer, tokenize=True, **template)
    ids: Sequence[int] = rendered["input_ids"] if isinstance(rendered, Mapping) else rendered
    return ids


def _rendered(messages: Sequence[Mapping[str, Any]], templates: Any, **template: Any) -> Any:
    """A conversation as the chat template of a tokenizer or a processor writes it."""
    if templates is None or not getattr(templates, "chat_template", None):
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
        begins = {"add_generation_prompt": not template.get("continue_final_message")}
        return templates.apply_chat_template(spoken, **{**begins, **template})
    # A template is a program and may fail in many ways.
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        roles = ", ".join(str(message.get("role")) for message in spoken)
        raise InvalidArgumentError(
            f"the model's chat template refuses a conversation of the roles {roles}: {error}"
        ) from error


def _unicode(text: str) -> str:
    """Returns the text; raises if it is not Unicode. Bytes of a file that are no UTF-8 arrive here as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"the prompt is no Unicode text: character {error.start} is {text[error.start]!r}, half of a pair or a byte "
            "that is no UTF-8"
        ) from None
    return text


def images_of(messages: Sequence[Any]) -> list[Any]:
    """The images of a conversation, in order: parts of its messages such as `{"type": "image", "image": ...}`."""
    parts = [part for message in messages if isinstance(message, Mapping) for part in message.get("content") or ()]
    return [part["image"] for part in parts if isinstance(part, Mapping) and "image" in part]


def _in_parts(messages: Sequence[Any]) -> list[Any]:
    """The messages as templates of models that take images read them: lists of parts, without the images themselves."""
    spoken: list[Any] = []
    for message in messages:
        content = message.get("content") or "" if isinstance(message, Mapping) else None
        if content is None:  # refused where the template is used
            spoken.append(message)
            continue
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        shown = [{"type": "image"} if isinstance(part, Mapping) and "image" in part else part for part in parts]
        spoken.append({**message, "content": shown})
    return spoken


def _marks(text: str, tokenizer: Any) -> dict[str, bool]:
    """Keeps a tokenizer from writing the mark of the beginning again, if a chat template wrote it."""
    mark = getattr(tokenizer, "bos_token", None)
    return {"add_special_tokens": not (mark and text.startswith(mark))}


def _processed(prompt: Any, images: Sequence[Any], processor: Any) -> Mapping[str, Any]:
    """What the model's processor makes of a text and its images."""
    if not isinstance(prompt, str):
        raise InvalidArgumentError(
            f"images go with a text, got {show(prompt)}; or give what the processor makes of both"
        )
    opened = open_images(images)
    marks = _marks(prompt, getattr(processor, "tokenizer", None))
    try:
        found: Mapping[str, Any] = processor(text=[prompt], images=opened, return_tensors="pt", **marks)
    except Exception as error:  # each processor checks images in its own way
        raise InvalidArgumentError(
            f"the model's processor refuses this text with {len(opened)} images: {error}"
        ) from error
    return found


def processor_output(given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The `input_ids` of one prompt, and what else a processor gave for it."""
    rest = dict(given)
    tokens = rest.pop("input_ids", None)
    if tokens is None:
        raise InvalidArgumentError(
            f"a prompt that is a mapping is the output of a processor, with input_ids; got {show(sorted(rest))}"
        )
    tokens = np.asarray(tokens)
    mask = rest.get("attention_mask")
    if tokens.ndim == 2 and len(tokens) != 1:
        raise InvalidArgumentError(f"input_ids of shape {tokens.shape} are several prompts; give one mapping for each")
    if mask is not None and not np.asarray(mask).all():
        raise InvalidArgumentError("the attention_mask hides tokens; process each prompt without padding")
    return tokens.reshape(-1), rest
