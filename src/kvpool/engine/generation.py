"""A request as its caller sees it: what was generated so far, what each step added, and how it ended."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvpool.checks import show
from kvpool.engine.embedding import Pooled
from kvpool.engine.grammar import GrammarState, Words
from kvpool.engine.params import SamplingParams
from kvpool.engine.scoring import PromptScores, TokenLogprob
from kvpool.engine.text import Decoder, TextStream
from kvpool.errors import InvalidArgumentError, KVPoolError, SequenceStateError, StepError
from kvpool.model.vision import Pictures
from kvpool.pools.arrays import Int32Array
from kvpool.sequences.missed import MissedSpan, tokens_by_cause
from kvpool.stats import MissCause

log = logging.getLogger("kvpool")


class Chunk(NamedTuple):
    """What one step added to one sample of a request. The last chunk of a sample has a `finish_reason`."""

    sample: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass
class Sample:
    """One continuation of the prompt."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None  # that ended it


class Completion(NamedTuple):
    """A finished request. Times are seconds: `first_token_seconds` since it was submitted, `seconds` until its end."""

    prompt_token_ids: Int32Array
    samples: tuple[Sample, ...]
    num_cached_tokens: int
    first_token_seconds: float | None
    seconds: float
    notes: tuple[str, ...] = ()  # what the engine changed in the request, such as fewer new tokens, and why
    prompt_logprobs: Sequence[TokenLogprob | None] = ()  # one for each token of the prompt; None for the first

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first sample."""
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.samples[0].finish_reason


class _Calls(threading.local):
    """Whether this thread runs a callback of a request. A callback must not wait for a request."""

    under_way = False

    def __enter__(self) -> None:
        self.under_way = True

    def __exit__(self, *exc_info: object) -> None:
        self.under_way = False


_calls = _Calls()


class Generation:
    """A request in the engine: wait for it (`result`), watch it (`on_chunk`), or look at it while it grows.

    The engine's thread calls `on_chunk`, so the callback must be quick and cannot wait for results. If it raises, it is not
    called again.
    """

    def __init__(
        self,
        request_id: Hashable,
        prompt: Int32Array,
        params: SamplingParams,
        tokenizer: Decoder | None,
        on_chunk: Callable[[Chunk], None] | None = None,
        on_end: Callable[[], None] | None = None,
        *,
        eos_ids: frozenset[int] = frozenset(),
        cancel: Callable[[Generation], None] | None = None,
        notes: tuple[str, ...] = (),
        pictures: Pictures | None = None,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.pictures = pictures  # behind placeholders of the prompt
        self.begins = len(
            prompt
        )  # the position of the first token of the answer, of which a fork has a part in its prompt
        self.params = params
        # tokens that end a sample and are not part of its text
        self.stop_ids = params.stop_ids(eos_ids)
        self.adapter: str | None = None  # the name of its LoRA adapter
        self.pooled: Pooled | None = None  # the hidden states of its prompt, for an embedding
        self.scores: PromptScores | None = None  # how likely the tokens of its prompt are
        self.is_private = False  # it is in a scope of its own: it reuses nothing cached, and nothing of it stays
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.samples: dict[int, Sample] = {}
        self.num_cached_tokens = 0
        self.missed: Sequence[MissedSpan] = ()  # the others, by cause: docs/why.md; empty where that is not remembered
        self.notes = notes  # what the engine changed in the request, in words
        self._tokenizer = tokenizer
        self._streams: dict[int, TextStream] = {}
        self._states: dict[int, GrammarState] = {}  # of samples whose params have a grammar
        self._answered: tuple[int, ...] = ()  # tokens that the grammar saw in the request that this one forks
        self.failure: StepError | None = None  # of its grammar or a logits processor
        self._on_chunk = on_chunk
        self._on_end = on_end
        self._cancel = cancel
        self._process = os.getpid()
        self._submitted = time.monotonic()
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._finished: float | None = None
        self._error: KVPoolError | None = None
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from when it was submitted to when it first got blocks; None while it waits."""
        return None if self._admitted is None else self._admitted - self._submitted

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from when it was submitted to its first token; None before that."""
        return None if self._first_token is None else self._first_token - self._submitted

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of the prompt."""
        return len(self.prompt)

    @property
    def missed_tokens(self) -> dict[MissCause, int]:
        """How many tokens of the prompt were not cached, by cause."""
        return tokens_by_cause(self.missed)

    @property
    def token_ids(self) -> Int32Array:
        """The prompt and what its first sample has so far."""
        first = self.samples.get(0)
        return np.concatenate([self.prompt, np.array([] if first is None else first.token_ids, np.int32)])

    def cancel(self) -> None:
        """Ends the request if it is not over; what it has so far is its result."""
        cancel = self._cancel  # read once: the engine's thread may set it to None meanwhile
        if cancel is not None:
            cancel(self)

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end. Raises what ended it, if that was an error, and TimeoutError after `timeout` seconds."""
        number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout <= threading.TIMEOUT_MAX):
            raise InvalidArgumentError(f"timeout must be seconds, or None for as long as it takes, got {show(timeout)}")
        if self._process != os.getpid() and not self.is_over:
            raise SequenceStateError(
                f"request {self.id!r} runs in process {self._process}, of which this one is a fork, and will not end here"
            )
        if _calls.under_way and not self.is_over:
            raise SequenceStateError(
                f"a callback cannot wait for request {self.id!r}, which waits for the callback: ask in another thread"
            )
        if not self._over.wait(timeout):
            raise TimeoutError(f"request {self.id!r} is not over after {timeout} seconds; it goes on")
        if self._error is not None:
            raise self._error
        assert self._finished is not None
        samples = tuple(self.samples[index] for index in sorted(self.samples))
        seconds = self._finished - self._submitted
        told = self.num_cached_tokens, self.first_token_seconds, seconds, self.notes, self.prompt_logprobs
        return Completion(self.prompt, samples, *told)

    # --- told by the engine ------------------------------------------------------------------------------------------

    def admit(self, num_cached_tokens: int) -> None:
        """Records that the request has blocks, and how many tokens came from the cache.

        The loop calls it again if the request is preempted before its first token.
        """
        self.num_cached_tokens = num_cached_tokens
        if self._admitted is None:
            self._admitted = time.monotonic()

    def goes_on_from(self, other: Generation) -> None:
        """If both requests have the same grammar, lets it go on where the first sample of the other one stands."""
        if self.params.grammar is not None and self.params.grammar is other.params.grammar:
            self._answered = (*other._answered, *other.samples[0].token_ids) if other.samples else other._answered

    def fill_mask(self, index: int, words: Words) -> None:
        """Writes which tokens may follow a sample. If its grammar fails, `push` raises what it failed with."""
        if self.has_ended(index):
            words.fill(-1)  # the token is thrown away
            return
        try:
            self._state(index).fill(words)
            if not words.any():
                raise StepError("no token of the vocabulary continues the answer in the form that was asked for")
        except Exception as error:
            words.fill(-1)
            self.failure = _as_step_error(error)

    def push(self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> bool:
        """Adds new tokens to a sample. Returns whether a stop string or its grammar ends the text here.

        Raises StepError if its grammar or a logits processor failed.
        """
        sample = self.samples.setdefault(index, Sample(index))
        if sample.finish_reason is not None:
            return False
        if self.failure is not None:
            raise self.failure
        if self._first_token is None:
            self._first_token = time.monotonic()
            if self.scores is not None:
                self.prompt_logprobs, self.scores = self.scores.entries(), None
        stream = self._stream(index)
        text, taken = "", 0
        for token in tokens:
            taken += 1
            if stream is not None and token not in self.stop_ids:
                text += stream.push(token)
                if stream.stopped is not None:
                    break
        is_whole = self.params.grammar is not None and self._follows(index, tokens[:taken])
        sample.token_ids.extend(tokens[:taken])
        sample.logprobs.extend(logprobs[:taken])
        sample.text += text
        self._deliver(Chunk(index, text, tuple(tokens[:taken]), tuple(logprobs[:taken])))
        return is_whole or (stream is not None and stream.stopped is not None)

    def _follows(self, index: int, tokens: Sequence[int]) -> bool:
        """Tells the grammar of a sample its new tokens; returns whether the text is complete."""
        if self.failure is None:
            try:
                state = self._state(index)
                state.push(tokens)
                return state.is_complete
            except Exception as error:
                self.failure = _as_step_error(error)
        raise self.failure

    def _state(self, index: int) -> GrammarState:
        state = self._states.get(index)
        if state is None:
            assert self.params.grammar is not None
            state = self._states[index] = self.params.grammar.start()
            state.push(self._answered)
        return state

    def has_ended(self, index: int) -> bool:
        """Whether a sample is over. Steps that were already launched may still bring tokens for it; they are dropped."""
        sample = self.samples.get(index)
        return sample is not None and sample.finish_reason is not None

    def end_sample(self, index: int, reason: str) -> None:
        """A sample is over."""
        sample = self.samples.setdefault(index, Sample(index))
        if sample.finish_reason is None:
            stream = self._streams.pop(index, None)
            rest = "" if stream is None else stream.finish()
            sample.text += rest
            # A stop string may be in the text that was held back because its last character was not complete.
            sample.finish_reason = reason if stream is None or stream.stopped is None else "stop"
            sample.stop_string = None if stream is None else stream.stopped
            self._deliver(Chunk(index, rest, (), (), sample.finish_reason))

    def end(self, error: KVPoolError | None = None) -> None:
        """The request is over: wakes all who wait for it."""
        if not self._over.is_set():
            self._finished = time.monotonic()
            self._error = error
            self._cancel = None  # it refers to the loop and so would keep the model alive
            self._over.set()
            if self._on_end is not None:
                try:
                    with _calls:
                        self._on_end()
                except BaseException:  # not even sys.exit() in a callback may end the engine
                    log.exception("the listener to the end of request %r raised", self.id)

    def _stream(self, index: int) -> TextStream | None:
        if self._tokenizer is None:
            return None
        stream = self._streams.get(index)
        if stream is None:
            params = self.params
            form = tuple(params.stop), params.skip_special_tokens, params.min_new_tokens
            stream = self._streams[index] = TextStream(self._tokenizer, *form)
        return stream

    def _deliver(self, chunk: Chunk) -> None:
        if self._on_chunk is not None:
            try:
                with _calls:
                    self._on_chunk(chunk)
            except BaseException:
                self._on_chunk = None
                log.exception("the callback of request %r raised; it is not called again", self.id)


def _as_step_error(error: Exception) -> StepError:
    if isinstance(error, StepError):
        return error
    failure = StepError(f"the grammar of this request failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
