"""What a load asks: requests of a trace, or a mix with shared beginnings; as texts, since servers differ in their tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvpool.errors import InvalidArgumentError
from kvpool.replay.trace import Trace, TraceRequest

# Short common words: nearly every tokenizer has one token for each of them with its space.
_WORDS = str.split(
    "the of and to in is was for on that with as by at from his it an are were which this also be has had or not but "
    "one first two their its after new who they her she been other when time all no more may some only over such into "
    "year during between state city used can many known where part about would three between under these made out up"
)


class LoadRequest(NamedTuple):
    """One request: when it is due (seconds from the start; 0 where a number of clients sets the pace), and what it asks."""

    due: float
    prompt: str
    max_tokens: int


def synthetic(
    num_requests: int,
    *,
    prompt_tokens: int,
    shared_tokens: int,
    num_prefixes: int,
    max_tokens: int,
    rate: float | None = None,
    seed: int = 0,
) -> list[LoadRequest]:
    """Prompts that begin with one of `num_prefixes` texts and go on differently; at `rate` a second, as a Poisson process."""
    if shared_tokens > prompt_tokens:
        raise InvalidArgumentError(f"{shared_tokens} shared tokens are more than the {prompt_tokens} of a prompt")
    random = np.random.default_rng(seed)
    prefixes = [_text(random, shared_tokens) for _ in range(num_prefixes)]
    gaps = np.zeros(num_requests) if rate is None else random.exponential(1 / rate, num_requests)
    dues = np.cumsum(gaps) - gaps[:1].sum()
    chosen = [prefixes[at] for at in random.integers(num_prefixes, size=num_requests).tolist()]
    prompts = [f"{prefix} {_text(random, prompt_tokens - shared_tokens)}".strip() for prefix in chosen]
    return [LoadRequest(float(due), prompt, max_tokens) for due, prompt in zip(dues, prompts, strict=True)]


def of_trace(
    trace: Trace, *, speed: float = 1.0, max_tokens: int | None = None, paced: bool = True
) -> list[LoadRequest]:
    """The requests of a trace: equal ids become equal words, so that what shares a prefix there shares it here."""
    if not len(trace):
        raise InvalidArgumentError(f"{trace.name} has no requests")
    start = float(trace.timestamps.min())
    found = []
    for number, request in enumerate(trace):
        due = (request.timestamp - start) / 1e3 / speed if paced else 0.0
        wanted = request.output_length if max_tokens is None else min(max_tokens, request.output_length)
        found.append(LoadRequest(due, _prompt(request, trace.unit, number), max(1, wanted)))
    return sorted(found, key=lambda request: request.due)


def _prompt(request: TraceRequest, unit: int, number: int) -> str:
    length = max(1, request.input_length)
    if not len(request.ids):  # a trace of lengths: nothing is shared
        return _text(np.random.default_rng([number]), length)
    words: list[str] = []
    for block in request.ids.tolist():
        words.append(_text(np.random.default_rng([block, 1]), min(unit, length - len(words) * unit)))
        if len(words) * unit >= length:
            break
    return " ".join(words)


def _text(random: np.random.Generator, num_words: int) -> str:
    return " ".join(_WORDS[at] for at in random.integers(len(_WORDS), size=num_words).tolist())
