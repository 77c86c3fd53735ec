"""A setting of an engine is defined once: keywords, options of commands and keys of files follow from it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvpool.engine import Engine
from kvpool.engine.options import EngineOptions
from kvpool.engine.settings import EngineKeywords, EngineSettings, as_settings
from kvpool.errors import ConfigError, KVPoolError
from kvpool.scheduling import SchedulerConfig
from kvpool.server.serve_settings import _MODEL_KINDS


def test_given_the_engine_then_its_signature_shows_every_setting_with_its_default() -> None:
    shown = inspect.signature(Engine).parameters
    assert list(shown) == ["model", *(each.name for each in fields(EngineSettings))]
    assert {name: each.default for name, each in shown.items() if name in ("block_size", "attention", "compile")} == {
        "block_size": 16,
        "attention": "auto",
        "compile": False,
    }


def test_given_the_keywords_for_type_checkers_then_they_are_the_settings_with_their_types() -> None:
    keywords = {name: each.__forward_arg__ for name, each in EngineKeywords.__annotations__.items()}
    assert keywords == {each.name: each.type for each in fields(EngineSettings)}


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


ALLOWED: tuple[dict[str, Any], ...] = (
    *({"memory_fraction": 1}, {"memory_fraction": 0.01}, {"kv_blocks": 5}, {"kv_bytes": 2**62}),
    *({name: value} for name in ("cuda_graphs", "overlap") for value in (True, False, None)),
    *({name: value} for name in ("compile", "model_defaults", "language_adapters") for value in (True, False)),
    *({"draft_tokens": 0}, {"overlap": True, "draft_tokens": 0}),
    *({"overlap": False, "draft_tokens": 2}, {"record": "trace"}, {"record": Path("trace")}, {"max_adapters": 2**16}),
    *({"adapters": {}, "compile": True}, {"adapters": {"a": "b"}}, {"cache": {"watermark": 0.1}}, {"cache": {}}),
)
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"kv_bytes": 1, "kv_blocks": 1}, "give the memory of the cache once"),
    ({"kv_bytes": 1, "memory_fraction": 0.5}, "give the memory of the cache once"),
    ({"kv_bytes": 2**62 + 1}, "kv_bytes"),
    *(({name: None}, name) for name in ("host_bytes", "block_size", "draft_tokens", "encoder_bytes")),
    *(({"memory_fraction": value}, "over 0, at most 1") for value in (0, 1.01, -0.5)),
    *(({name: 1}, f"{name} must be True or False, or None to choose, got 1") for name in ("cuda_graphs", "overlap")),
    *(
        ({name: None}, f"{name} must be True or False, got None")
        for name in ("compile", "model_defaults", "language_adapters")
    ),
    ({"overlap": True, "draft_tokens": 1}, "overlap=True with draft_tokens"),
    ({"attention": None}, "attention must be the name of a backend, got None"),
    ({"record": 7}, "record must be the path of a file, got 7"),
    ({"max_adapters": 2**16 + 1}, "max_adapters"),
    ({"adapters": ["a"]}, "adapters must be a mapping"),
    ({"adapters": {"a": "b"}, "compile": True}, "compile=True with adapters"),
    ({"cache": [("watermark", 0.1)]}, "cache must be a mapping"),
    ({"cache": {1: 0.1}}, "cache must be a mapping"),
    *(({"cache": {name: 1}}, f"'{name}'") for name in ("layers", "block_size", "gpu_blocks", "gpu_bytes")),
)


@pytest.mark.parametrize("settings", ALLOWED)
def test_given_settings_that_go_together_then_they_are_taken(settings: dict[str, Any]) -> None:
    EngineSettings(**settings)


@pytest.mark.parametrize(("settings", "says"), REFUSED)
def test_given_settings_that_are_wrong_or_contradict_each_other_then_they_are_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        EngineSettings(**settings)


def test_given_draft_tokens_then_a_step_has_room_for_as_many_tokens_as_it_guesses() -> None:
    for settings, number in (({}, 0), ({"draft_tokens": 2}, 2)):
        for scheduler in (None, SchedulerConfig(max_sequences=9)):
            limits = as_settings({**settings, "scheduler": scheduler}).limits()
            assert (limits.max_draft_tokens, limits.max_sequences == 9) == (number, scheduler is not None)
    with pytest.raises(ConfigError, match="max_draft_tokens=1 needs"):
        as_settings({"scheduler": SchedulerConfig(max_draft_tokens=1)}).limits()
    with pytest.raises(ConfigError, match="scheduler must be a SchedulerConfig, got 7"):
        as_settings({"scheduler": 7}).limits()


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
