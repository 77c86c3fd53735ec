"""Turns tokens into text while they arrive. It never shows half a character or the beginning of a stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_UNFINISHED_TOKENS = 8  # a character has at most four bytes; what is still broken after this many tokens is not one


class Decoder(Protocol):
    """The one method of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class Pieces:
    """A tokenizer that remembers the texts of single tokens, because streams ask for them at every step."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, bool], str] = {}  # no more than the vocabulary has

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        if len(token_ids) != 1:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        key = (token_ids[0], skip_special_tokens)
        if (text := self._known.get(key)) is None:
            text = self._known[key] = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


class TextStream:
    """The text of one sequence, grown token by token.

    `push` returns what can be shown now. Held back are bytes of an unfinished character, and text that may turn out to be
    the beginning of a stop string. When a stop string is complete, `stopped` names it and the text ends before it. None is
    looked for in the text of the first `min_tokens` tokens.

    A tokenizer decodes a token differently after others (spaces, joined pieces). So tokens are decoded in a short window
    that begins a few tokens back. The new text is what the window has with the new token and not without it.
    """

    def __init__(
        self, tokenizer: Decoder, stop: Sequence[str] = (), skip_special_tokens: bool = True, min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special = skip_special_tokens
        self._num_free = min_tokens  # so many more tokens end no text
        self._window: list[int] = []  # tokens shown, then tokens held back
        self._num_shown = 0  # tokens of the window whose text was taken
        self._held = ""  # decoded text that may begin a stop string
        self.text = ""  # everything that was returned
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is certain now ("" while nothing is, and after a stop)."""
        if self.stopped is not None:
            return ""
        self._window.append(token)
        shown = self._take(self._new_text())
        self._num_free -= 1
        return shown

    def finish(self) -> str:
        """No token follows: returns what was held back."""
        if self.stopped is not None:
            return ""
        shown = self._take(self._new_text(last=True))
        if self.stopped is None:
            shown += self._show(self._held)
        return shown

    def _new_text(self, last: bool = False) -> str:
        shown = self._decode(self._window[: self._num_shown])
        text = self._decode(self._window)
        waiting = len(self._window) - self._num_shown
        if text.endswith(REPLACEMENT) and not last and waiting < MAX_UNFINISHED_TOKENS:
            return ""
        fresh = text[len(shown) :]
        if fresh:  # the next window begins with the tokens of this step: enough context for spaces between pieces
            self._window = self._window[self._num_shown :]
        elif self._num_shown:  # special tokens leave no text and are no context
            self._window = self._window[: self._num_shown]
        self._num_shown = len(self._window)
        return fresh

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special) if tokens else ""

    def _take(self, fresh: str) -> str:
        """What of the text so far may be shown, given the stop strings."""
        if not self._stop or self._num_free > 0:
            return self._show(fresh)
        pending = self._held + fresh
        found = [(pending.find(stop), stop) for stop in self._stop if stop in pending]
        if found:
            at, self.stopped = min(found)
            self._held = ""
            return self._show(pending[:at])
        keep = max(overlap(pending, stop) for stop in self._stop)
        self._held = pending[len(pending) - keep :]
        return self._show(pending[: len(pending) - keep])

    def _show(self, text: str) -> str:
        self.text += text
        return text


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


# GPT-2's letters for bytes: most stand for themselves, the others are numbered from 256 on.
_OWN = frozenset([*range(33, 127), *range(161, 173), *range(174, 256)])
_free = count(256)
_BYTES = {chr(byte if byte in _OWN else next(_free)): byte for byte in range(256)}
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")  # a byte, as tokenizers of sentencepiece name it


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token adds to a text, also where they are a part of a character."""
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    name = getattr(tokenizer, "convert_ids_to_tokens", lambda _: None)(token)
    if REPLACEMENT in text and isinstance(name, str):
        if (found := _FALLBACK.fullmatch(name)) is not None:
            return bytes([int(found[1], 16)])
        if all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
    return text.encode("utf-8", "replace")
