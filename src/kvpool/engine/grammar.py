"""Answers in a given form: a grammar says which tokens may follow, with one bit per token of the vocabulary. No torch.

Requests that want the same form share a `Grammar`. `start` gives the state of one sample, which is told every token of it.
Sampling asks the states of a step for their masks and applies all of them at once. `Grammars` makes grammars from JSON
schemas and from rules with `llguidance`. A class of your own that implements the two protocols works as well.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvpool.checks import show
from kvpool.errors import ConfigError, InvalidArgumentError, StepError

Words = npt.NDArray[np.int32]
"""The mask of one sample: bit t % 32 of word t // 32 says whether token t may follow."""


class GrammarState(Protocol):
    """Where one sample stands."""

    def fill(self, words: Words) -> None:
        """Writes which tokens may follow; at least one may."""

    def push(self, tokens: Sequence[int]) -> None:
        """Tells the state the tokens that followed. The mask before each of them allowed it."""

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete and only its end may follow."""


@runtime_checkable
class Grammar(Protocol):
    """What a text may look like, for one vocabulary."""

    def start(self) -> GrammarState:
        """The state of a text that has not begun."""


def num_words(vocabulary: int) -> int:
    """How many words the mask of a vocabulary has."""
    return -(-vocabulary // 32)


# Between two parts of a JSON text: at most a line break and an indentation. Without a limit, a confused model could write
# spaces until it has used all its tokens.
_WHITESPACE = r"\n? {0,8}"
MOST_CHARACTERS = 1 << 18  # of a schema or of rules; so many take about half a second
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Grammars:
    """Makes grammars for the vocabulary of one model. The first takes about a second, to sort the vocabulary."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_ids = sorted(stop_ids)
        self._lock = threading.Lock()
        self._prepared: Any = None

    def from_schema(self, schema: Mapping[str, Any] | None = None) -> Grammar:
        """A grammar of the texts that are valid by a JSON schema; without one, of every JSON object.

        A schema with rules that it cannot enforce (`uniqueItems`, `not`, ...) is refused.
        """
        if schema is not None and not isinstance(schema, Mapping):
            raise InvalidArgumentError(f"a JSON schema is an object, got {show(schema)}")
        try:
            text = json.dumps(_ANY_OBJECT if schema is None else dict(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"this is no JSON schema: {error}") from None
        refuse_unkept(json.loads(text))
        options = {"whitespace_pattern": _WHITESPACE}
        return self._compiled("JSON schema", text, lambda made: made.grammar_from_json_schema(text, overrides=options))

    def from_rules(self, rules: str) -> Grammar:
        """A grammar from rules as llguidance takes them: Lark's, with `%json` for JSON schemas. It begins with `start`."""
        return self._compiled("grammar", rules, lambda made: made.grammar_from_lark(rules))

    def _compiled(self, what: str, text: str, grammar: Callable[[Any], str]) -> Grammar:
        if len(text) > MOST_CHARACTERS:
            raise InvalidArgumentError(f"this {what} has {len(text)} characters, and the limit is {MOST_CHARACTERS}")
        library, tokenizer = self._library()
        try:
            compiled = _Compiled(library.LLMatcher(tokenizer, grammar(library.LLMatcher), log_level=0))
            compiled.start().fill(np.zeros(num_words(self._vocabulary), np.int32))  # some errors show only here
        except (ValueError, StepError) as error:  # a ValueError is of schemas that are nested too deep
            raise InvalidArgumentError(f"no answer can be held to this {what}: {_reason(error)}") from None
        return compiled

    def _library(self) -> tuple[Any, Any]:
        try:
            library = importlib.import_module("llguidance")
        except ModuleNotFoundError:
            raise ConfigError(
                "answers in a given form need llguidance: pip install '.[server]' in a checkout of kvpool"
            ) from None
        with self._lock:
            if self._prepared is None:
                described = _described(self._tokenizer)
                try:
                    self._prepared = library.LLTokenizer(described, n_vocab=self._vocabulary, eos_token=self._stop_ids)
                except ValueError as error:
                    raise InvalidArgumentError(f"this model's tokenizer cannot be held to a form: {error}") from None
        return library, self._prepared


def refuse_unkept(schema: Any) -> None:
    """Raises for a bound of numbers that llguidance 1.9 does not keep: above 0 and at most 0.5, it takes 0, too."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        for name, sign, others in (
            ("exclusiveMinimum", 1, ("maximum", "exclusiveMaximum")),
            ("exclusiveMaximum", -1, ("minimum", "exclusiveMinimum")),
        ):
            for other in others:
                bound, limit = _number_in(part, name), _number_in(part, other)
                if bound is None or limit is None or bound % 1:
                    continue
                if sign * bound >= 0 and 0 < sign * (limit - bound) < 1:
                    words = f"{name}={bound:g} beside {other}={limit:g} would let {bound:g} through; make it inclusive"
                    raise InvalidArgumentError(f"no answer can be held to this JSON schema: {words}")


def _number_in(part: Mapping[str, Any], name: str) -> float | None:
    value = part.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else None  # type: ignore[arg-type]


def _described(tokenizer: Any) -> str:
    """The JSON of a tokenizer of the package `tokenizers`.

    A converted tokenizer may have several decoders in sequence. If one of them is `ByteLevel`, only that one is kept.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InvalidArgumentError("answers by a JSON schema need a tokenizer of the package tokenizers, a fast one")
    described = json.loads(backend.to_str())
    described.update(padding=None, truncation=None)
    decoder = described.get("decoder") or {}
    for part in decoder.get("decoders", ()):
        if part["type"] == "ByteLevel":
            described["decoder"] = part
    return json.dumps(described)


class _Compiled:
    """A compiled grammar. Each state starts as a copy of its matcher."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> GrammarState:
        """The state of a text that has not begun."""
        return _Matching(self._matcher.deep_copy())


class _Matching:
    """The state of one text."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, words: Words) -> None:
        """Writes which tokens may follow."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def push(self, tokens: Sequence[int]) -> None:
        """Tells the matcher the tokens that followed."""
        if not self.is_complete:  # after the end, only the end-of-text token follows
            self._matcher.consume_tokens(list(tokens))
            self._check()

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete and only its end may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StepError(
                f"the answer could not be kept in the form that was asked for: {_reason(self._matcher.get_error())}"
            )


def _reason(error: object) -> str:
    """An error of llguidance in one line. What follows "<state>" is for its developers."""
    return " ".join(str(error).partition("<state>")[0].split())
