"""Beam search as transformers does it, over requests of one token: every beam finds what it shares in the prefix cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvpool.checks import as_count, as_flag
from kvpool.engine.engine import Engine, Prompt
from kvpool.engine.params import MAX_LOGPROBS, SamplingParams, eos_token_ids
from kvpool.errors import InvalidArgumentError
from kvpool.scope import ReuseScope


class Beam(NamedTuple):
    """A result of a beam search."""

    score: float  # sum of log probabilities / length ** length_penalty
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" or "length"
    text: str = ""


class _Running(NamedTuple):
    """A beam that goes on."""

    score: float  # sum of log probabilities
    tokens: tuple[int, ...]


def beam_search(
    engine: Engine,
    prompt: Prompt,
    width: int,
    *,
    max_new_tokens: int = 128,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    stop_token_ids: Iterable[int] = (),
    ignore_eos: bool = False,
    images: Sequence[Any] = (),
    adapter: str | None = None,
    priority: int = 0,
    scope: ReuseScope | None = None,
) -> list[Beam]:
    """The `width` best answers, best first. `images`, `adapter`, `priority` and `scope` are those of `Engine.submit`.

    Each step is a request of one token for each beam, which computes the part of its last block that is not full again.
    Sampling defaults of the model do not count. With `early_stopping` the search ends when `width` beams are finished,
    although others may become better.
    """
    stops = SamplingParams(stop_token_ids=stop_token_ids, ignore_eos=ignore_eos).stop_ids(eos_token_ids(engine.model))
    width = as_count(width, "width", minimum=1, maximum=MAX_LOGPROBS // (1 + len(stops)))
    read = engine.read_prompt(prompt, images)
    most = as_count(max_new_tokens, "max_new_tokens", minimum=1)
    if engine.config.max_seq_len is not None:
        most = max(1, min(most, engine.config.max_seq_len - len(read) + 1))
    search = BeamSearch(width, stops, most, length_penalty, as_flag(early_stopping, "early_stopping"))
    params = SamplingParams(max_new_tokens=1, temperature=0.0, logprobs=search.num_ranked)
    while search.running:
        prompts = [
            replace(read, token_ids=np.append(read.token_ids, np.array(beam.tokens, np.int32)))
            for beam in search.running
        ]
        answers = engine.generate(prompts, params, adapter=adapter, priority=priority, scope=scope)
        search.advance([answer.samples[0].logprobs[0].top for answer in answers])
    return [beam._replace(text=_text(engine, beam, stops)) for beam in search.results]


class BeamSearch:
    """Decides which beams go on.

    Of the first `width` continuations of all beams, those that stop become results. The best that do not stop become the
    next beams. The search ends when the worst result is better than the best beam would be if it ended now, or at
    `max_new_tokens`; with `early_stopping`, when there are enough results.
    """

    def __init__(
        self, width: int, stops: frozenset[int], max_new_tokens: int, length_penalty: float, early_stopping: bool
    ) -> None:
        if isinstance(length_penalty, bool) or not isinstance(length_penalty, (int, float)):
            raise InvalidArgumentError(f"length_penalty must be a number, got {length_penalty!r}")
        self.num_ranked = (1 + len(stops)) * width  # continuations: so many do not stop that all beams go on
        self.running = [_Running(0.0, ())]
        self.results: list[Beam] = []  # best first
        self._width = width
        self._stops = stops
        self._max_new_tokens = max_new_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping

    def advance(self, best: Sequence[Sequence[tuple[int, float]]]) -> None:
        """One step: `best[i]` are the likeliest tokens behind `running[i]`, with their log probabilities."""
        ranked = [
            _Running(beam.score + logprob, (*beam.tokens, token))
            for beam, likeliest in zip(self.running, best, strict=True)
            for token, logprob in likeliest
        ]
        ranked.sort(key=lambda beam: -beam.score)
        length = len(self.running[0].tokens) + 1
        running: list[_Running] = []
        for rank, beam in enumerate(ranked[: self.num_ranked]):
            stops = beam.tokens[-1] in self._stops
            if stops or length == self._max_new_tokens:
                if rank < self._width:
                    self._keep(Beam(self._penalised(beam), beam.tokens, "stop" if stops else "length"))
            elif len(running) < self._width:
                running.append(beam)
        self.running = [] if not running or self._cannot_improve(running[0]) else running

    def _keep(self, result: Beam) -> None:
        self.results.append(result)
        self.results.sort(key=lambda kept: -kept.score)
        del self.results[self._width :]

    def _cannot_improve(self, best: _Running) -> bool:
        is_full = len(self.results) == self._width
        return is_full and (self._early_stopping or self._penalised(best) <= self.results[-1].score)

    def _penalised(self, beam: _Running) -> float:
        return beam.score / math.pow(len(beam.tokens), self._length_penalty)


def _text(engine: Engine, beam: Beam, stops: frozenset[int]) -> str:
    if engine.tokenizer is None:
        return ""
    tokens = [token for token in beam.token_ids if token not in stops]
    return str(engine.tokenizer.decode(tokens, skip_special_tokens=True))
