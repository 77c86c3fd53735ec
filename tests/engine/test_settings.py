"""A setting of an engine is defined once: keywords, options of commands and keys of files follow from it."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from kvpool.engine import Engine
from kvpool.engine.options import EngineOptions
from kvpool.engine.settings import EngineSettings, as_settings
from kvpool.errors import ConfigError, KVPoolError
from kvpool.server.serve_settings import _MODEL_KINDS


def test_given_the_engine_then_its_signature_shows_every_setting_with_its_default() -> None:
    shown = inspect.signature(Engine).parameters
    assert list(shown) == ["model", *(each.name for each in fields(EngineSettings))]
    assert {name: each.default for name, each in shown.items() if name in ("block_size", "attention", "compile")} == {
        "block_size": 16,
        "attention": "auto",
        "compile": False,
    }


def test_given_a_keyword_that_is_no_setting_then_it_is_named_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="Engine has no setting 'kv_byte'; it has tokenizer, device"):
        Engine("there is no such model", kv_byte=1)


@pytest.mark.parametrize(
    ("name", "low"),
    [
        *(("kv_bytes", 1), ("kv_blocks", 1), ("host_bytes", 0), ("block_size", 1), ("draft_tokens", 0)),
        *(("encoder_bytes", 0), ("max_adapters", 1)),
    ],
)
def test_given_a_number_below_the_least_then_it_is_refused_before_a_model_is_loaded(name: str, low: int) -> None:
    EngineSettings(**{name: low})
    with pytest.raises(ConfigError, match=name):
        EngineSettings(**{name: low - 1})


@pytest.mark.parametrize(("tokenizer", "says"), [("gpt2", "is a name; load it"), (object(), "has no decode")])
def test_given_a_tokenizer_that_is_none_then_it_is_refused_before_a_model_is_loaded(
    tokenizer: object, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Engine("nowhere", tokenizer=tokenizer)


def test_given_a_setting_with_a_help_then_commands_and_files_have_it() -> None:
    shown = [each for each in fields(EngineSettings) if each.metadata]
    options = {each.name for each in fields(EngineOptions)}
    assert {each.metadata["option"] or each.name for each in shown} <= options
    assert {each.metadata["key"] or each.metadata["option"] or each.name for each in shown} <= _MODEL_KINDS.keys()


def test_given_the_options_of_a_command_then_its_model_comes_first() -> None:
    assert fields(EngineOptions)[0].name == "model"


def test_given_the_name_in_the_help_of_an_engine_then_it_leads_to_the_settings() -> None:
    assert f"`{EngineSettings.__module__}.EngineSettings`" in (Engine.__doc__ or "")


@pytest.mark.parametrize("wrong", [{"memory": "lots"}, {"objective": "luck"}])
def test_given_wrong_options_of_a_command_then_they_are_refused_before_a_model_is_loaded(wrong: dict[str, str]) -> None:
    EngineOptions(memory="2GB", objective="seconds").check()
    with pytest.raises(KVPoolError, match=next(iter(wrong.values()))):
        EngineOptions(**wrong).check()


def test_given_host_memory_then_the_cache_gets_it_and_without_none_is_named() -> None:
    assert as_settings({"host_bytes": 2**20}).cache_fields(512) == {"max_seq_len": 512, "host_bytes": 2**20}
    assert as_settings({}).cache_fields(512) == {"max_seq_len": 512}
    assert as_settings({"cache": {"max_seq_len": 512}}).cache_fields(512) == {"max_seq_len": 512}
    for longest in (513, None):
        with pytest.raises(ConfigError, match=f"max_seq_len={longest} is over the 512 positions"):
            as_settings({"cache": {"max_seq_len": longest}}).cache_fields(512)
