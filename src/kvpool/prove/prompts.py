"""Prompts with needles, or of random tokens, that nobody has asked before."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvpool.prove.endpoint import Answer, Prompt

CHANGED_TOKENS: Final = 16  # of a prompt of tokens: about a block of most engines
_LINES_PER_NEEDLE: Final = 6
_DIGITS: Final = 8  # of a code: no model says one of a thousand by chance
_TOKENS_PER_LINE: Final = 12  # until the endpoint has counted some
_ORDINARY: Final = tuple(range(10, 110))  # token ids that are in every vocabulary
COLOURS: Final = (
    *("red", "blue", "green", "black", "white", "yellow", "silver"),
    *("golden", "purple", "orange", "brown", "pink"),
)
THINGS: Final = (
    *("falcon", "boat", "tower", "lamp", "garden", "bridge", "wagon"),
    *("violin", "castle", "kettle", "ladder", "mirror", "anchor", "basket"),
)
_VERBS: Final = (
    *("passed", "carried", "watched", "painted", "followed", "repaired", "found"),
    *("measured", "crossed", "sold", "borrowed"),
)
_NAMES: Final = tuple(f"{colour} {thing}" for colour in COLOURS for thing in THINGS)
_MOST_NEEDLES: Final = 100  # of a prompt: fewer than names


@dataclass(frozen=True)
class Probe:
    """A prompt whose answer depends on all of it. `code` is what the asked needle says; empty for random tokens."""

    name: str
    lines: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    asked: int = 0  # the line with the needle
    thing: str = ""
    code: str = ""

    @property
    def prompt(self) -> Prompt:
        """What the endpoint gets."""
        if self.tokens:
            return self.tokens
        return "\n".join((*self.lines, f"What is the code of the {self.thing}? The code of the {self.thing} is"))

    def is_found(self, answer: Answer) -> bool:
        """Whether the answer has the needle."""
        return bool(self.code) and self.code in numbers_in(answer)


def numbers_in(answer: Answer) -> list[str]:
    """The numbers of an answer that may be codes."""
    return re.findall(rf"\d{{{_DIGITS}}}", re.sub(r"(?<=\d)[ ,.](?=\d)", "", answer.text))


class Prompts:
    """Writes probes of about so many tokens. The same seed writes the same ones."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self.num_tokens = num_tokens
        self._rng = random.Random(seed)
        self._written = 0
        self._tokens_per_line: float = _TOKENS_PER_LINE
        self.alphabet: tuple[int, ...] = _ORDINARY
        self.of_tokens = False
        self.codes: set[str] = set()  # of all needles that were asked for

    def learn_alphabet(self, tokens: list[int]) -> None:
        """Takes the ids of an ordinary text, where there are enough, instead of small numbers, which may mean something."""
        if len(set(tokens)) >= 24:
            self.alphabet = tuple(sorted(set(tokens)))

    def learn_length(self, probe: Probe, answer: Answer) -> None:
        """Corrects how many tokens a line has by what the endpoint counted."""
        if answer.num_prompt_tokens and probe.lines:
            self._tokens_per_line = answer.num_prompt_tokens / len(probe.lines)

    def sample_text(self) -> str:
        """Ordinary words."""
        return " ".join(self._line() for _ in range(12))

    def probe(self, depth: float = 0.5) -> Probe:
        """A prompt that nobody asked before; its needle lies so deep in it."""
        self._written += 1
        name = f"prompt {self._written}"
        if self.of_tokens:
            return Probe(name, tokens=self._random(self.num_tokens))
        number = max(4, round(self.num_tokens / self._tokens_per_line))
        places = range(1, number, max(_LINES_PER_NEEDLE, number // _MOST_NEEDLES))
        needles = dict(
            zip(places, ((thing, self._code()) for thing in self._rng.sample(_NAMES, len(places))), strict=True)
        )
        lines = [self._told(*needles[at]) if at in needles else self._line() for at in range(number)]
        lines[0] = f"Notes of day {self._rng.randrange(10**9)}, number {self._written}."
        asked = sorted(needles)[min(len(needles) - 1, int(depth * len(needles)))]
        thing, code = needles[asked]
        self.codes.add(code)
        return Probe(name, tuple(lines), (), asked, thing, code)

    def changed(self, probe: Probe) -> Probe:
        """The same prompt with another needle in its place, or other tokens: what one wrong block would be."""
        if probe.tokens:
            at = len(probe.tokens) // 2
            other = self._random(CHANGED_TOKENS)
            tokens = (*probe.tokens[:at], *other, *probe.tokens[at + CHANGED_TOKENS :])[: len(probe.tokens)]
            return replace(probe, name=f"{probe.name} with one block changed", tokens=tokens)
        code = self._code()
        lines = list(probe.lines)
        lines[probe.asked] = self._told(probe.thing, code)
        return replace(probe, name=f"{probe.name} with one line changed", lines=tuple(lines), code=code)

    def branch(self, probe: Probe) -> Probe:
        """A prompt that begins with about two thirds of another one and goes on by itself."""
        if probe.tokens:
            at = len(probe.tokens) * 2 // 3
            tokens = (*probe.tokens[:at], *self._random(len(probe.tokens) - at))
            return replace(probe, name=f"a branch of {probe.name}", tokens=tokens)
        at = max(probe.asked + 1, len(probe.lines) * 2 // 3)
        lines = (*probe.lines[:at], *(self._line() for _ in probe.lines[at:]))
        return replace(probe, name=f"a branch of {probe.name}", lines=lines)

    def unsaid(self, probe: Probe, others: Sequence[Probe]) -> Probe:
        """The prompt asked for what another one was asked for, and it does not say; or for what nobody says."""
        said = "\n".join(probe.lines)
        strange = [name for name in _NAMES if f"of the {name} is" not in said]
        thing = self._rng.choice([other.thing for other in others if other.thing in strange] or strange)
        return replace(probe, name=f"{probe.name} asked for what it does not say", thing=thing, code="")

    def _random(self, number: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(self.alphabet, k=number))

    def _line(self) -> str:
        """A sentence that says nothing of codes."""
        one, other = self._rng.choice(THINGS), self._rng.choice(THINGS)
        return f"A {self._rng.choice(COLOURS)} {one}s' crew {self._rng.choice(_VERBS)} the {other}s at noon."

    def _code(self) -> str:
        return str(self._rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))

    @staticmethod
    def _told(thing: str, code: str) -> str:
        return f"The code of the {thing} is {code}."
