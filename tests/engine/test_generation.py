"""A request as its caller sees it: what each chunk holds, what ends a sample, who is told, and what time it took."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvpool.engine import generation as module
from kvpool.engine.generation import Chunk, Generation
from kvpool.engine.params import SamplingParams
from kvpool.engine.scoring import TokenLogprob
from kvpool.errors import InvalidArgumentError, NeverFitsError, SequenceStateError, StepError
from managers import Clock

PROMPT = np.array([1, 2, 3], np.int32)


class Letters:
    """Token 97 is "a"; tokens below 32 are special ones without text."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids if token >= 32)


class Counting:
    """A grammar that allows token 7 and is whole after `length` tokens."""

    def __init__(self, length: int = 3) -> None:
        self.length = length

    def start(self) -> Any:
        return CountingState(self.length)


class CountingState:
    def __init__(self, length: int) -> None:
        self.left = length

    def fill(self, words: Any) -> None:
        words.fill(0)
        words[0] = 1 << 7

    def push(self, tokens: Sequence[int]) -> None:
        if any(token != 7 for token in tokens):
            raise ValueError("only 7 may follow")
        self.left -= len(tokens)

    @property
    def is_complete(self) -> bool:
        return self.left <= 0


def made(text: bool = True, **fields: Any) -> tuple[Generation, list[Chunk]]:
    chunks: list[Chunk] = []
    return Generation("r", PROMPT, SamplingParams(**fields), Letters() if text else None, chunks.append), chunks


def spell(word: str) -> list[int]:
    return [ord(letter) for letter in word]


def logprobs(tokens: Sequence[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0) for token in tokens]


# --- samples ----------------------------------------------------------------------------------------------------------


def test_given_tokens_then_each_push_is_a_chunk_and_the_result_holds_all() -> None:
    generation, chunks = made()
    assert not generation.push(0, spell("ab"), logprobs(spell("ab")))
    assert not generation.push(1, spell("x"))
    assert not generation.push(0, spell("c"), logprobs(spell("c")))
    generation.end_sample(0, "length")
    generation.end_sample(1, "cancelled")
    generation.end()
    assert [(chunk.sample, chunk.text, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        (0, "ab", (97, 98), None),
        (1, "x", (120,), None),
        (0, "c", (99,), None),
        (0, "", (), "length"),
        (1, "", (), "cancelled"),
    ]
    assert [len(chunk.logprobs) for chunk in chunks] == [2, 0, 1, 0, 0]
    result = generation.result()
    first, second = result.samples
    assert (first.index, first.text, first.token_ids, first.finish_reason) == (0, "abc", [97, 98, 99], "length")
    assert (second.index, second.text, second.finish_reason) == (1, "x", "cancelled")
    assert [each.token for each in first.logprobs] == [97, 98, 99]
    assert (result.text, result.token_ids, result.finish_reason) == ("abc", [97, 98, 99], "length")
    assert generation.token_ids.tolist() == [1, 2, 3, 97, 98, 99]


def test_given_samples_in_any_order_then_the_result_has_them_by_number() -> None:
    generation, _ = made()
    for index in (2, 0, 1):
        generation.push(index, spell("abc"[index]))
        generation.end_sample(index, "stop")
    generation.end()
    assert [sample.text for sample in generation.result().samples] == ["a", "b", "c"]


def test_given_a_stop_string_in_the_middle_then_what_follows_it_is_cut_from_everything() -> None:
    generation, chunks = made(stop="bc")
    assert generation.push(0, spell("abcd"), logprobs(spell("abcd")))
    generation.end_sample(0, "cancelled")
    assert chunks[0] == Chunk(0, "a", tuple(spell("abc")), tuple(logprobs(spell("abc"))))
    assert chunks[1] == Chunk(0, "", (), (), "stop")
    (sample,) = generation.samples.values()
    assert (sample.text, sample.token_ids, len(sample.logprobs)) == ("a", spell("abc"), 3)
    assert (sample.finish_reason, sample.stop_string) == ("stop", "bc")


def test_given_text_that_was_held_back_then_the_end_brings_it() -> None:
    generation, chunks = made(stop="bcd")
    assert not generation.push(0, spell("abc"))
    assert generation.samples[0].text == "a"
    generation.end_sample(0, "length")
    assert chunks[-1] == Chunk(0, "bc", (), (), "length")
    assert (generation.samples[0].text, generation.samples[0].stop_string) == ("abc", None)


def test_given_a_stop_token_then_it_is_a_token_and_no_text() -> None:
    generation, _ = made(stop_token_ids=[99])
    generation.push(0, spell("abc"))
    assert (generation.samples[0].text, generation.samples[0].token_ids) == ("ab", spell("abc"))


def test_given_no_tokenizer_then_there_are_tokens_without_text() -> None:
    generation, chunks = made(text=False)
    assert not generation.push(0, [5, 6])
    generation.end_sample(0, "length")
    assert chunks == [Chunk(0, "", (5, 6)), Chunk(0, "", (), (), "length")]


def test_given_a_sample_that_has_ended_then_late_tokens_and_ends_change_nothing() -> None:
    generation, chunks = made(text=False)
    generation.push(0, [5])
    assert not generation.has_ended(0)
    generation.end_sample(0, "stop")
    assert generation.has_ended(0)
    assert not generation.has_ended(1)
    assert not generation.push(0, [6])
    generation.end_sample(0, "length")
    assert (generation.samples[0].token_ids, generation.samples[0].finish_reason) == ([5], "stop")
    assert len(chunks) == 2


# --- grammars ---------------------------------------------------------------------------------------------------------


def mask(generation: Generation, index: int = 0) -> list[int]:
    words = np.full(2, 5, np.int32)
    generation.fill_mask(index, words)
    return words.tolist()


def test_given_a_grammar_then_it_hears_every_token_and_ends_the_sample_when_it_is_whole() -> None:
    generation, _ = made(text=False, grammar=Counting(3))
    assert mask(generation) == [1 << 7, 0]
    assert not generation.push(0, [7, 7])
    assert generation.push(0, [7])
    generation.end_sample(0, "stop")
    assert mask(generation) == [-1, -1]  # its token is thrown away
    assert mask(generation, 1) == [1 << 7, 0]
    assert generation.failure is None


def test_given_a_grammar_that_fails_then_all_tokens_are_allowed_until_the_request_hears_of_it() -> None:
    class Failing(Counting):
        def start(self) -> Any:
            raise RuntimeError("out of states")

    generation, chunks = made(text=False, grammar=Failing())
    assert mask(generation) == [-1, -1]
    with pytest.raises(StepError, match="RuntimeError: out of states") as caught:
        generation.push(0, [7])
    assert caught.value is generation.failure
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert chunks == []


def test_given_a_grammar_that_allows_nothing_then_the_request_fails_by_name() -> None:
    class Closed(CountingState):
        def fill(self, words: Any) -> None:
            words.fill(0)

    class Nothing(Counting):
        def start(self) -> Any:
            return Closed(3)

    generation, _ = made(text=False, grammar=Nothing())
    assert mask(generation) == [-1, -1]
    with pytest.raises(StepError, match="no token of the vocabulary"):
        generation.push(0, [7])


def test_given_a_token_that_the_grammar_refuses_then_the_push_raises() -> None:
    generation, _ = made(text=False, grammar=Counting())
    with pytest.raises(StepError, match="only 7 may follow"):
        generation.push(0, [8])


def test_given_a_request_that_goes_on_from_another_then_its_grammar_does_too() -> None:
    grammar = Counting(4)
    first, _ = made(text=False, grammar=grammar)
    first.push(0, [7, 7])
    second, _ = made(text=False, grammar=grammar)
    second.goes_on_from(first)
    assert not second.push(0, [7])
    third, _ = made(text=False, grammar=grammar)
    third.goes_on_from(second)
    assert third.push(0, [7])
    unbegun, _ = made(text=False, grammar=grammar)
    unbegun._answered = (7,)
    fourth, _ = made(text=False, grammar=grammar)
    fourth.goes_on_from(unbegun)
    assert [fourth.push(0, [7]) for _ in range(3)] == [False, False, True]


def test_given_another_grammar_or_none_then_it_begins_anew() -> None:
    first, _ = made(text=False, grammar=Counting(2))
    first.push(0, [7])
    second, _ = made(text=False, grammar=Counting(2))
    second.goes_on_from(first)
    assert not second.push(0, [7])
    plain, _ = made(text=False)
    plain.goes_on_from(first)
    assert not plain.push(0, [8])


# --- the end ----------------------------------------------------------------------------------------------------------


def test_given_an_end_then_it_happens_once_and_whoever_waits_is_woken() -> None:
    ends: list[str] = []
    generation = Generation("r", PROMPT, SamplingParams(), None, None, lambda: ends.append("end"))
    assert not generation.is_over
    with pytest.raises(TimeoutError, match="not over after 0 seconds"):
        generation.result(timeout=0)
    waiting = threading.Thread(target=generation.result)
    waiting.start()
    generation.end()
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    generation.end(NeverFitsError("too late"))
    assert generation.is_over
    assert ends == ["end"]
    assert generation.result(timeout=0).samples == ()


def test_given_an_error_then_the_result_raises_it() -> None:
    generation, _ = made()
    generation.end(NeverFitsError("the engine was closed"))
    with pytest.raises(NeverFitsError, match="was closed"):
        generation.result()


@pytest.mark.parametrize("timeout", ["1", True, float("inf"), float("nan"), threading.TIMEOUT_MAX * 2])
def test_given_a_timeout_that_is_no_time_then_it_is_refused(timeout: Any) -> None:
    generation, _ = made()
    generation.end()
    with pytest.raises(InvalidArgumentError, match="timeout"):
        generation.result(timeout=timeout)
    assert generation.result(timeout=threading.TIMEOUT_MAX).samples == ()


def test_given_a_cancel_then_it_is_passed_on_until_the_request_is_over() -> None:
    cancelled: list[Generation] = []
    generation = Generation("r", PROMPT, SamplingParams(), None, cancel=cancelled.append)
    generation.cancel()
    assert cancelled == [generation]
    generation.end()
    generation.cancel()
    assert cancelled == [generation]


def test_given_callbacks_that_wait_for_a_request_then_they_are_refused_and_other_threads_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other, _ = made()
    asked: list[str] = []

    def ask(*_: object) -> None:
        asked.append("asked")
        other.result(timeout=0)

    generation = Generation("r", PROMPT, SamplingParams(), None, ask, ask)
    generation.push(0, [5])
    generation.push(0, [6])  # it raised: it is not called again
    assert asked == ["asked"]
    generation.end()
    assert asked == ["asked"] * 2
    reasons = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [type(reason) for reason in reasons] == [SequenceStateError] * 2
    with pytest.raises(TimeoutError):
        other.result(timeout=0)
    other.end()
    late = Generation("late", PROMPT, SamplingParams(), None, ask)
    late.push(0, [5])
    late.push(0, [5])
    assert len(asked) == 4  # what is over can be asked for anywhere


# --- times ------------------------------------------------------------------------------------------------------------


def test_given_a_clock_then_waiting_the_first_token_and_the_end_are_counted_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Time:
        monotonic = Clock()

    monkeypatch.setattr(module, "time", Time)
    Time.monotonic.now = 100.0
    generation, _ = made(text=False)
    assert (generation.queue_seconds, generation.first_token_seconds) == (None, None)
    Time.monotonic.now = 103.0
    generation.admit(2)
    Time.monotonic.now = 104.0
    generation.admit(1)  # it gave way before its first token
    assert (generation.queue_seconds, generation.num_cached_tokens) == (3.0, 1)
    Time.monotonic.now = 107.0
    generation.push(0, [5])
    Time.monotonic.now = 109.0
    generation.push(0, [6])
    Time.monotonic.now = 112.0
    generation.end()
    result = generation.result()
    assert (generation.first_token_seconds, result.first_token_seconds, result.seconds) == (7.0, 7.0, 12.0)
    assert result.num_cached_tokens == 1


def test_given_a_seed_then_it_is_that_one_and_otherwise_a_fresh_one() -> None:
    assert made(seed=5)[0].seed == 5
    assert made(seed=0)[0].seed == 0
    fresh = {made()[0].seed for _ in range(4)}
    assert len(fresh) == 4
    assert all(0 <= seed < 2**63 for seed in fresh)


def test_given_a_fork_of_the_process_then_it_cannot_wait_for_a_request_that_is_not_over() -> None:
    generation, _ = made()
    generation._process += 1
    with pytest.raises(SequenceStateError, match="of which this one is a fork"):
        generation.result(timeout=0)
    generation.end()
    assert generation.result(timeout=0).samples == ()
