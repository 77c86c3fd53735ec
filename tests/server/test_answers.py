"""Answers in OpenAI's form, as single events."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from kvpool.engine.generation import Chunk
from kvpool.engine.scoring import TokenLogprob
from kvpool.server.answers import TextAnswer
from kvpool.server.schema import Completions


class HalfCharacters:
    """Each token is a part of a character, so that all of them have the same text."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return "\N{REPLACEMENT CHARACTER}"


def test_given_best_tokens_with_equal_texts_then_the_best_of_them_is_told() -> None:
    decoder = HalfCharacters()
    asked = Completions(prompt="a", logprobs=2)
    model: Any = SimpleNamespace(name="tiny", decoder=lambda: decoder, text_of=decoder.decode)
    answer = TextAnswer(model, asked)
    scored = TokenLogprob(7, -0.5, ((7, -0.5), (9, -1.25)))
    event = answer.part(0, Chunk(0, "", (7,), (scored,)), generation=None)  # type: ignore[arg-type]  # without an echo
    told = json.loads(event.decode().removeprefix("data: "))["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [-0.5]
    assert told["top_logprobs"] == [{"\N{REPLACEMENT CHARACTER}": -0.5}]
