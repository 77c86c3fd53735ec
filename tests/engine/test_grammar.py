"""Answers in a given form: JSON by a schema, and grammars of one's own; in batches, under memory pressure, forked."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")
from letters import EOS, letters_tokenizer
from models import tiny_model
from pydantic import BaseModel, ConfigDict, Field

from kvpool.engine import Engine, SamplingParams
from kvpool.engine.grammar import Words
from kvpool.errors import ConfigError, InvalidArgumentError, StepError
from kvpool.scheduling import SchedulerConfig

pytestmark = pytest.mark.usefixtures("one_self_check")

PROMPT = "Who was it?"


class Person(BaseModel):
    """What the tests ask for: every kind of field, each of a bounded length, so that a random model comes to an end."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=5)
    age: int = Field(ge=0, le=99)
    kind: Literal["a", "bb"]
    tags: list[bool] = Field(max_length=2)


SCHEMA = Person.model_json_schema()


def make_engine(**options: Any) -> Engine:
    settings: dict[str, Any] = dict(kv_blocks=128, block_size=4, device="cpu")
    return Engine(tiny_model("llama"), **(settings | {"tokenizer": letters_tokenizer()} | options))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make_engine() as made:
        yield made


def params(engine: Engine, **more: Any) -> SamplingParams:
    settings: dict[str, Any] = dict(max_new_tokens=200, temperature=1.0, seed=3)
    return SamplingParams(grammar=engine.json_grammar(SCHEMA), **(settings | more))


def test_given_no_llguidance_then_the_error_says_what_to_install(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        ConfigError, match=re.escape("need llguidance: pip install '.[server]' in a checkout of kvpool")
    ):
        engine.json_grammar(SCHEMA)


@pytest.mark.quick("0", "1")
@pytest.mark.parametrize("seed", range(8))
def test_given_a_schema_then_every_sample_is_valid_by_it(engine: Engine, seed: int) -> None:
    (answer,) = engine.generate([PROMPT], params(engine, seed=seed, n=3))
    for sample in answer.samples:
        Person.model_validate_json(sample.text)
        assert sample.finish_reason == "stop"
    assert len({sample.text for sample in answer.samples}) == 3


def test_given_a_greedy_choice_then_the_text_is_valid_too(engine: Engine) -> None:
    (answer,) = engine.generate([PROMPT], params(engine, temperature=0.0))
    Person.model_validate_json(answer.text)


@pytest.mark.slow
def test_given_no_schema_then_the_answer_is_an_object() -> None:
    bias = {4: -100.0, ord("}") - 30: 4.0}
    with make_engine(kv_blocks=1024) as engine:  # room for all of them at once
        grammar = engine.json_grammar()
        wanted = [SamplingParams(100, 1.0, seed=seed, grammar=grammar, logit_bias=bias) for seed in range(30)]
        answers = engine.generate([PROMPT] * len(wanted), wanted)
    for answer in answers:
        assert answer.text.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.text), dict)


def test_given_a_text_that_is_whole_then_it_ends_though_ends_are_ignored(engine: Engine) -> None:
    (answer,) = engine.generate([PROMPT], params(engine, ignore_eos=True))
    assert answer.finish_reason == "stop"
    assert EOS not in answer.token_ids
    Person.model_validate_json(answer.text)


def test_given_a_stop_string_then_it_ends_the_text_before_itself(engine: Engine) -> None:
    (answer,) = engine.generate([PROMPT], params(engine, stop='"age'))
    assert answer.finish_reason == "stop"
    assert answer.text.startswith("{")
    assert '"age' not in answer.text


def test_given_a_bias_towards_a_forbidden_token_then_it_stays_forbidden(engine: Engine) -> None:
    (answer,) = engine.generate([PROMPT], params(engine, logit_bias={EOS: 100.0}, temperature=0.0))
    Person.model_validate_json(answer.text)


@pytest.mark.slow
def test_given_requests_without_a_form_in_the_batch_then_their_tokens_are_the_same_as_alone(engine: Engine) -> None:
    plain = SamplingParams(30, temperature=1.0, seed=5, ignore_eos=True)
    (alone,) = engine.generate(["Another one"], plain)
    formed, beside = engine.generate([PROMPT, "Another one"], [params(engine), plain])
    assert beside.token_ids == alone.token_ids
    Person.model_validate_json(formed.text)


@pytest.mark.slow
def test_given_overlapping_steps_then_the_tokens_are_the_same(engine: Engine) -> None:
    plain = SamplingParams(40, temperature=1.0, seed=5, ignore_eos=True)
    prompts = [PROMPT, "Another one", "And a third"]
    expected = engine.generate(prompts, [params(engine), plain, params(engine, n=2)])
    with make_engine(overlap=True) as overlapped:
        found = overlapped.generate(prompts, [params(overlapped), plain, params(overlapped, n=2)])
    assert [[s.token_ids for s in one.samples] for one in found] == [
        [s.token_ids for s in one.samples] for one in expected
    ]


@pytest.mark.quick("swap")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_given_too_little_memory_then_preempted_answers_go_on_in_their_form(engine: Engine, mode: str) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(6)]
    wanted = dict(logit_bias={ord("}") - 30: -3.0})
    expected = engine.generate(prompts, [params(engine, seed=number, **wanted) for number in range(6)])
    limits = SchedulerConfig(max_tokens_per_step=64, max_sequences=8, preemption=mode)
    host = dict(host_bytes=1 << 22) if mode == "swap" else {}
    with make_engine(kv_blocks=60, scheduler=limits, cache={"enable_prefix_caching": False}, **host) as small:
        found = small.generate(prompts, [params(small, seed=number, **wanted) for number in range(6)])
        assert small.stats().scheduler.preemptions > 0
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.slow
def test_given_drafts_then_answers_in_a_form_are_not_guessed_at(engine: Engine) -> None:
    expected = engine.generate([PROMPT], params(engine))
    with make_engine(draft_tokens=3) as drafting:
        found = drafting.generate([PROMPT], params(drafting))
    assert found[0].token_ids == expected[0].token_ids


def test_given_a_fork_then_its_grammar_goes_on_where_the_other_stands(engine: Engine) -> None:
    (whole,) = engine.generate([PROMPT], params(engine))
    wanted = params(engine, max_new_tokens=12)
    first = engine.submit(PROMPT, wanted)
    begun = first.result().text
    forked = engine.fork(first, SamplingParams(200, temperature=1.0, seed=9, grammar=wanted.grammar))
    rest = forked.result()
    assert whole.text.startswith(begun)
    Person.model_validate_json(begun + rest.text)
    again = engine.fork(forked, SamplingParams(200, temperature=1.0, grammar=engine.json_grammar(SCHEMA)))
    Person.model_validate_json(again.result().text)  # a grammar of its own begins anew


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "objekt"}, "Invalid type"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"$ref": "http://127.0.0.1/other.json"}, "not present"),
        ({"items": [{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}]}, "would let 0 through"),
        ({"properties": {"a": {"minimum": -3.5, "exclusiveMaximum": -3.0}}}, "would let -3 through"),
        ({"enum": [object()]}, "not JSON serializable"),
        ([], "is an object"),
    ],
)
def test_given_a_schema_that_nothing_can_be_held_to_then_it_is_refused(engine: Engine, schema: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        engine.json_grammar(schema)


@pytest.mark.parametrize("limits", [{"exclusiveMinimum": 0, "maximum": 1}, {"exclusiveMinimum": 2.5, "maximum": 2.75}])
def test_given_an_exclusive_bound_that_is_kept_then_it_is_taken(engine: Engine, limits: Any) -> None:
    engine.json_grammar({"type": "number", **limits})


class EvenTokens:
    """A grammar of one's own: even tokens only, and five of them."""

    def __init__(self, fails_after: int = 99, raises: bool = True) -> None:
        self.fails_after = fails_after
        self.raises = raises

    def start(self) -> Any:
        return _Even(self)


class _Even:
    def __init__(self, grammar: EvenTokens) -> None:
        self.grammar = grammar
        self.count = 0

    def fill(self, words: Words) -> None:
        fails = self.count >= self.grammar.fails_after
        if fails and self.grammar.raises:
            raise RuntimeError("no more")
        words.fill(0 if fails else 0x55555555)

    def push(self, tokens: Sequence[int]) -> None:
        self.count += len(tokens)

    @property
    def is_complete(self) -> bool:
        return self.count >= 5


def test_given_a_grammar_of_ones_own_then_it_is_followed(engine: Engine) -> None:
    (answer,) = engine.generate([PROMPT], SamplingParams(20, 1.0, seed=1, ignore_eos=True, grammar=EvenTokens(), n=2))
    for sample in answer.samples:
        assert len(sample.token_ids) == 5
        assert not np.array(sample.token_ids).__mod__(2).any()


def test_given_rules_then_the_answer_is_one_of_those_that_they_allow(engine: Engine) -> None:
    grammar = engine.grammar('start: "yes" | "no"')
    answers = {
        engine.generate([PROMPT], SamplingParams(9, 1.0, seed=seed, grammar=grammar))[0].text for seed in range(6)
    }
    assert answers <= {"yes", "no"}
    with pytest.raises(InvalidArgumentError, match="no answer can be held to this grammar"):
        engine.grammar("start: begin")


@pytest.mark.quick("False-True-RuntimeError: no more")
@pytest.mark.parametrize(("raises", "words"), [(True, "RuntimeError: no more"), (False, "no token of the vocabulary")])
@pytest.mark.parametrize("overlap", [False, True])
def test_given_a_grammar_that_fails_then_its_request_ends_and_others_go_on(
    overlap: bool, raises: bool, words: str
) -> None:
    with make_engine(overlap=overlap) as engine:
        broken = engine.submit(PROMPT, SamplingParams(20, ignore_eos=True, grammar=EvenTokens(2, raises)))
        other = engine.submit(PROMPT, SamplingParams(20, ignore_eos=True))
        with pytest.raises(StepError, match=words):
            broken.result()
        assert len(other.result().token_ids) == 20
        assert len(broken.samples[0].token_ids) == 2
        assert engine.stats().num_running == 0
        engine.manager.check()


def test_given_a_vocabulary_that_cannot_write_the_form_then_the_request_says_so() -> None:
    with make_engine(tokenizer=letters_tokenizer(without="{")) as engine:
        grammar = engine.json_grammar(SCHEMA)
        with pytest.raises(StepError, match="could not be kept in the form"):
            engine.generate([PROMPT], SamplingParams(grammar=grammar))


def test_given_a_tokenizer_whose_tokens_are_no_bytes_then_json_is_refused(model_directory: str) -> None:
    refused = pytest.raises(InvalidArgumentError, match="decoder")
    with Engine(model_directory, kv_blocks=64, device="cpu") as words_only, refused:
        words_only.json_grammar(SCHEMA)


def test_given_something_else_for_a_grammar_then_it_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="json_grammar"):
        SamplingParams(grammar=SCHEMA)  # type: ignore[arg-type]
