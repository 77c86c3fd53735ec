"""Log probabilities of a prompt's own tokens, taken from the logits of its steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvpool.pools.arrays import Int32Array
from kvpool.storage.moving import upload

PIECE = 64  # rows of logits that are turned into probabilities at once: 64 times 150,000 numbers are 38 MB


class TokenLogprob(NamedTuple):
    """How likely a token was, and which others were likely in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptScores:
    """How likely each token of a prompt is after those before it. Chunks of its logits come in, and only this stays."""

    def __init__(self, prompt: Int32Array, num_top: int) -> None:
        self._prompt = prompt
        self._num_top = num_top
        self._num_scored = 1  # tokens; nothing comes before the first
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def is_complete(self) -> bool:
        return self._num_scored == len(self._prompt)

    def add(self, logits: Tensor, position: int) -> None:
        """Takes logits [token, vocabulary] from a position on. A preempted prompt computes some tokens again."""
        logits = logits[max(0, self._num_scored - 1 - position) :]
        count = min(len(logits), len(self._prompt) - self._num_scored)
        for first in range(0, count, PIECE):
            part = logits[first : min(first + PIECE, count)].float().log_softmax(-1)
            start = self._num_scored
            tokens = upload(self._prompt[start : start + len(part)].astype(np.int64), part.device)
            top = part.topk(min(self._num_top, part.shape[1]), dim=-1)
            self._parts.append((part.gather(1, tokens.unsqueeze(1)).squeeze(1), top.values, top.indices))
            self._num_scored += len(part)

    def entries(self) -> list[TokenLogprob | None]:
        """One for each token of the prompt; None for the first. Waits for the device."""
        found: list[TokenLogprob | None] = [None]
        for values, top_values, top_tokens in self._parts:
            rows = zip(values.tolist(), top_tokens.tolist(), top_values.tolist(), strict=True)
            for value, ids, best in rows:
                token = int(self._prompt[len(found)])
                found.append(TokenLogprob(token, value, tuple(zip(ids, best, strict=True))))
        return found
