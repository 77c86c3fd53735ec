"""What a model's generation_config.json says about sampling holds where the caller says nothing, and can be turned off."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import tiny_model  # noqa: E402
from transformers import AutoConfig, GenerationConfig  # noqa: E402

from kvpool.cli import main  # noqa: E402
from kvpool.engine import Engine, SamplingParams  # noqa: E402
from kvpool.engine.params import described, eos_token_ids, sampling_defaults  # noqa: E402
from kvpool.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")

PROMPT = [5, 6, 7, 8]
LIVELY = dict(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, eos_token_id=[2, 3])


def model_that_says(**said: Any) -> Any:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(**said)
    return model


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (LIVELY, dict(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)),
        (dict(do_sample=True, top_k=64), dict(temperature=1.0, top_k=64)),
        (dict(temperature=0.6, top_p=0.9), {}),  # without do_sample transformers decodes greedily, too
        (dict(repetition_penalty=1.05), dict(repetition_penalty=1.05)),
        ({}, {}),
    ],
)
def test_a_models_wishes_are_read_as_transformers_reads_them(said: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sampling_defaults(model_that_says(**said)) == SamplingParams(**expected)


def test_wishes_that_mean_nothing_are_refused_with_the_way_out() -> None:
    model = tiny_model("llama")
    model.generation_config.do_sample, model.generation_config.top_p = True, 3.0
    with pytest.raises(ConfigError, match=r"top_p must be .* got 3\.0; mend it, or use Engine\(model_defaults=False\)"):
        Engine(model, kv_blocks=8)
    Engine(model, kv_blocks=8, model_defaults=False).close()


def test_a_request_gets_them_where_it_says_nothing_and_shows_what_it_got(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvpool"), Engine(model_that_says(**LIVELY), kv_blocks=32) as engine:
        assert "temperature 0.6, top_k 20, top_p 0.9, repetition_penalty 1.1" in caplog.text
        said = engine.submit(PROMPT, SamplingParams(max_new_tokens=4, top_p=0.5, temperature=0.0)).params
        assert (said.temperature, said.top_p, said.top_k, said.repetition_penalty) == (0.0, 0.5, 20, 1.1)
        seeded = SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True)
        spelled_out = seeded.with_defaults(SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1))
        by_model, by_hand = engine.generate([PROMPT, PROMPT], [seeded, spelled_out])
        assert by_model.token_ids == by_hand.token_ids


def test_turned_off_the_model_decodes_greedily_and_still_ends_at_its_tokens() -> None:
    greedy = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with Engine(tiny_model("llama"), kv_blocks=32) as engine:
        expected = engine.generate([PROMPT], greedy)[0].token_ids
    model = model_that_says(**{**LIVELY, "eos_token_id": [expected[4]]})
    with Engine(model, kv_blocks=32, model_defaults=False) as engine:
        assert engine.sampling_defaults == SamplingParams()
        assert engine.generate([PROMPT], greedy)[0].token_ids == expected
        out = engine.generate([PROMPT], SamplingParams(max_new_tokens=12))[0]
        assert out.token_ids == expected[: expected.index(expected[4]) + 1]
        assert out.finish_reason == "stop"


@pytest.fixture
def lively_directory(model_directory: str, tmp_path: Path) -> str:
    directory = tmp_path / "lively"
    shutil.copytree(model_directory, directory)
    (directory / "generation_config.json").write_text(json.dumps({**LIVELY, "eos_token_id": 2}))
    return str(directory)


def test_commands_sample_as_the_model_says_and_say_so(
    lively_directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "generate",
        "w5 w6",
        "--max-tokens",
        "3",
        "--device",
        "cpu",
        "--memory",
        "4MiB",
        "--model",
        lively_directory,
    ]
    assert main(words) == 0
    assert "sampling: temperature 0.6, top_k 20, top_p 0.9, repetition_penalty 1.1" in capsys.readouterr().err
    assert main([*words, "--temperature", "0", "--top-p", "0.5"]) == 0
    assert "sampling: temperature 0, top_k 20, top_p 0.5" in capsys.readouterr().err
    assert main([*words, "--no-model-defaults"]) == 0
    assert "sampling:" not in capsys.readouterr().err


def test_sampling_in_words_leaves_out_what_nobody_set() -> None:
    assert described(SamplingParams()) == "greedy"
    assert described(SamplingParams(top_k=3)) == "top_k 3"


def test_given_a_configuration_whose_text_part_names_no_last_token_then_there_is_none_or_that_of_the_whole() -> None:
    config = AutoConfig.for_model("qwen3_vl")  # its text part has no such field at all
    assert eos_token_ids(SimpleNamespace(generation_config=None, config=config)) == frozenset()
    config.eos_token_id = 7
    assert eos_token_ids(SimpleNamespace(generation_config=None, config=config)) == {7}


def test_given_words_that_the_model_must_not_write_then_it_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(tiny_model("llama"), kv_blocks=32) as engine:
        (plain,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=5))
    model = model_that_says(
        bad_words_ids=[[plain.token_ids[1]], [7, 8]], eos_token_id=2, no_repeat_ngram_size=3, num_beams=1
    )
    with Engine(model, kv_blocks=32) as engine:
        (result,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=5))
    assert (
        "no_repeat_ngram_size=3, bad_words_ids=words of several tokens, which the engine does not follow" in caplog.text
    )
    model.generation_config.no_repeat_ngram_size = None
    own = model.generate(torch.tensor([PROMPT]), max_new_tokens=5, pad_token_id=0)[0, len(PROMPT) :].tolist()
    assert result.token_ids == own != plain.token_ids


def test_given_a_fork_in_the_middle_of_an_answer_then_tokens_that_begin_no_answer_may_follow() -> None:
    with Engine(tiny_model("llama"), kv_blocks=32) as engine:
        (plain,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=5))
    first, *_, withheld = plain.token_ids
    assert withheld != first
    with Engine(model_that_says(begin_suppress_tokens=[withheld]), kv_blocks=32) as engine:
        begun = engine.submit(PROMPT, SamplingParams(max_new_tokens=4))
        begun.result()
        forked = engine.fork(begun, SamplingParams(max_new_tokens=1))
        again = engine.fork(forked, SamplingParams(max_new_tokens=1))
        assert forked.result().token_ids == [withheld]
        assert again.begins == len(PROMPT)
