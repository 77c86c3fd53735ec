"""What `submit` takes becomes a request: defaults, limits and refusals, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool import ReuseHint, ReuseScope
from kvpool.engine.generation import Generation
from kvpool.engine.params import SamplingParams
from kvpool.engine.pictures import PicturedPrompt
from kvpool.engine.prompts import prompt_tokens
from kvpool.engine.requests import (
    RequestMaker,
    ToolCalls,
    check_callbacks,
    checked_generation,
    list_of_prompts,
    of_prompt,
    results_of,
)
from kvpool.errors import InvalidArgumentError, KVPoolError, NeverFitsError

PROMPT = np.array([1, 2, 3], np.int32)
READ = PicturedPrompt(PROMPT)
TOKENIZER = SimpleNamespace(decode=lambda tokens, skip_special_tokens=True: "".join(map(chr, tokens)))


def maker(**options: Any) -> RequestMaker:
    usual: dict[str, Any] = dict(
        tokenizer=TOKENIZER,
        scope_of=lambda adapter, scope: ReuseScope() if scope is None else scope,
        vocab_size=100,
        longest=10,
        defaults=SamplingParams(),
        eos_ids=frozenset({2}),
        clock=lambda: 50.0,
        cancel=lambda generation: None,
    )
    return RequestMaker(**usual | options)


# --- one request ------------------------------------------------------------------------------------------------------


def test_given_a_prompt_then_requests_are_numbered_and_hold_what_was_asked_for() -> None:
    make = maker().make
    scope = ReuseScope(tenant="a")
    made = make(READ, SamplingParams(4, stop_token_ids=[7]), priority=3, scope=scope, deadline=2.5, session="s")
    generation, request = made
    assert (generation.id, make(READ, SamplingParams(4)).request.id) == (0, 1)
    assert (request.id, request.max_new_tokens, request.n, request.priority) == (0, 4, 1, 3)
    assert (request.scope, request.deadline, request.session) == (scope, 52.5, "s")
    assert request.stop_ids == {2, 7}
    assert (generation.prompt.tolist(), generation.params.max_new_tokens, generation.notes) == ([1, 2, 3], 4, ())


def test_given_nothing_beside_a_prompt_then_the_request_has_no_deadline_scope_or_hint() -> None:
    request = maker().make(READ, SamplingParams()).request
    assert (request.deadline, request.scope, request.hint, request.session) == (None, ReuseScope(), None, None)


def test_given_that_ends_are_ignored_then_only_the_requests_own_stop_tokens_end_it() -> None:
    assert maker().make(READ, SamplingParams(4, stop_token_ids=[7], ignore_eos=True)).request.stop_ids == {7}


def test_given_samples_then_the_request_has_as_many_sequences() -> None:
    assert maker().make(READ, SamplingParams(4, n=3)).request.n == 3


def test_given_defaults_of_the_model_then_what_the_params_leave_open_is_theirs() -> None:
    generation = maker(defaults=SamplingParams(temperature=0.5, top_k=9)).make(READ, SamplingParams(top_k=3)).generation
    assert (generation.params.temperature, generation.params.top_k) == (0.5, 3)


@pytest.mark.parametrize(
    ("limit", "wanted", "granted"),
    [(10, 7, 7), (10, 8, 8), (10, 9, 8), (10, 500, 8), (3, 5, 1), (None, 500, 500), (2, 5, 5), (1, 5, 5)],
)
def test_given_a_context_then_no_more_new_tokens_are_wanted_than_it_has_room_for(
    limit: int | None, wanted: int, granted: int
) -> None:
    """The K and V of the last token are never stored. A prompt that is too long by itself is refused later."""
    generation, request = maker(longest=limit).make(READ, SamplingParams(wanted))
    assert (request.max_new_tokens, generation.params.max_new_tokens) == (granted, granted)
    assert bool(generation.notes) == (granted < wanted)
    if generation.notes:
        assert f"max_new_tokens={wanted} was cut to {granted}" in generation.notes[0]


@pytest.mark.parametrize(
    ("offers_tools", "hint", "tokenizer", "looks"),
    [
        (True, None, TOKENIZER, True),
        (False, None, TOKENIZER, False),
        (True, ReuseHint(stop="length"), TOKENIZER, False),
        (True, None, None, False),
    ],
)
def test_given_tools_then_the_answer_is_looked_at_unless_the_caller_says_what_follows(
    offers_tools: bool, hint: ReuseHint | None, tokenizer: Any, looks: bool
) -> None:
    request = maker(tokenizer=tokenizer).make(READ, SamplingParams(), hint=hint, offers_tools=offers_tools).request
    assert isinstance(request.hint, ToolCalls) == looks
    if not looks:
        assert request.hint is hint


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"temperature": 1.0}, {}, "params must be SamplingParams"),
        (SamplingParams(logit_bias={100: 1.0}), {}, "logit_bias names token 100; the vocabulary has 100"),
        (SamplingParams(), {"deadline": "soon"}, "deadline"),
        (SamplingParams(), {"deadline": True}, "deadline"),
        (SamplingParams(), {"deadline": float("inf")}, "deadline"),
        (SamplingParams(), {"deadline": float("nan")}, "deadline"),
        (SamplingParams(), {"deadline": 10**400}, "deadline"),
        (SamplingParams(), {"on_chunk": 3}, "must be functions"),
        (SamplingParams(), {"on_end": 3}, "must be functions"),
        (SamplingParams(), {"hint": "stop"}, "hint"),
        (SamplingParams(), {"offers_tools": 1}, "offers_tools"),
    ],
)
def test_given_what_a_request_cannot_have_then_it_is_refused_by_name(
    params: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        maker().make(READ, params, **options)


def test_given_the_last_token_of_the_vocabulary_then_it_may_have_a_bias() -> None:
    assert maker().make(READ, SamplingParams(logit_bias={99: 1.0})).generation.params.logit_bias == {99: 1.0}


def test_given_stop_strings_without_a_tokenizer_then_they_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="stop strings need a tokenizer"):
        maker(tokenizer=None).make(READ, SamplingParams(stop="."))
    maker(tokenizer=None).make(READ, SamplingParams())


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_given_token_ids_then_they_lie_in_the_vocabulary() -> None:
    assert prompt_tokens([0, 99], None, 100).tolist() == [0, 99]
    with pytest.raises(InvalidArgumentError, match="holds token 100; the vocabulary has 100"):
        prompt_tokens([0, 100], None, 100)
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        prompt_tokens([], None, 100)


def test_given_a_text_without_a_tokenizer_then_it_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="without a tokenizer"):
        prompt_tokens("w1", None, 100)


def test_given_prompts_then_each_has_its_own_params_or_all_the_same() -> None:
    first, second = SamplingParams(1), SamplingParams(2)
    assert list_of_prompts([[1], "b"], first) == [([1], first), ("b", first)]
    assert list_of_prompts(iter(["a", "b"]), [first, second]) == [("a", first), ("b", second)]
    assert list_of_prompts([], first) == []
    assert list_of_prompts([np.array([1, 2])], None)[0][0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("one", "put a single one in a list"),
        (b"one", "put a single one in a list"),
        ({"a": 1}, "put a single one in a list"),
        ([1, 2], "put a single one in a list"),
        (np.array([1, 2]), "put a single one in a list"),
        (3, "must be a list of texts or token ids, got 3"),
    ],
)
def test_given_a_single_prompt_then_it_is_refused(prompts: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        list_of_prompts(prompts, SamplingParams())


def test_given_another_number_of_params_then_they_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="got 1 SamplingParams for 2 prompts"):
        list_of_prompts(["a", "b"], [SamplingParams()])


# --- results ----------------------------------------------------------------------------------------------------------


def ended(error: KVPoolError | None = None) -> Generation:
    generation = Generation("r", PROMPT, SamplingParams(), None)
    generation.end(error)
    return generation


def test_given_requests_that_ended_well_then_their_results_come_in_order() -> None:
    generations = [ended(), ended()]
    assert [result.prompt_token_ids is PROMPT for result in results_of(generations)] == [True, True]


def test_given_requests_of_which_some_failed_then_the_first_error_names_its_prompt_and_has_all_results() -> None:
    late = NeverFitsError("too long")
    with pytest.raises(NeverFitsError, match=r"^prompt 1: too long$") as caught:
        results_of([ended(), ended(late), ended(), ended(NeverFitsError("last"))])
    assert [isinstance(result, KVPoolError) for result in caught.value.results] == [False, True, False, True]
    assert caught.value.__cause__ is late
    assert str(late) == "too long"


def test_given_one_prompt_then_its_error_needs_no_number() -> None:
    error = NeverFitsError("too long")
    assert str(of_prompt(error, 0, 1)) == "too long"
    assert str(of_prompt(error, 0, 2)) == "prompt 0: too long"


def test_given_what_is_no_request_then_it_is_refused() -> None:
    assert isinstance(checked_generation(generation := ended()), Generation)
    assert checked_generation(generation) is generation
    with pytest.raises(InvalidArgumentError, match="the Generation that submit returned, got 3"):
        checked_generation(3)


def test_given_callbacks_then_none_or_functions_are_allowed() -> None:
    check_callbacks(None, print)
    with pytest.raises(InvalidArgumentError, match="must be functions, got 'print'"):
        check_callbacks(None, "print")
