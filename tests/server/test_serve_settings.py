"""`kvpool serve --config FILE`: what the file says, what options override, and what is refused before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.engine.options import EngineOptions
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.server.auth import Access
from kvpool.server.serve_settings import ModelSettings, ServeSettings, read_serve

Read = Callable[..., tuple[ServeSettings, list[ModelSettings]]]
TWO = """
[server]
host = "0.0.0.0"
port = 9000
keys = "keys.txt"
max_requests = 7
samples = 3
max_sequences = 32

[[models]]
name = "a"
model = "models/a"
memory = "1GiB"
max_sequences = 4

[[models]]
name = "b"
model = "models/b"
device = "cpu"
compile = true
tier_timeout = 2
"""


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def run(text: str | None, name: str | None = None, given: Any = None, **options: Any) -> Any:
        if text is not None:
            (tmp_path / "kvpool.toml").write_text(text)
            options["config"] = tmp_path / "kvpool.toml"
        return read_serve(EngineOptions(**options), None, name, given or {})

    return run


def test_given_no_file_then_one_model_has_the_name_of_its_folder(read: Read) -> None:
    settings, (model,) = read(None, model="models/small")
    assert settings == ServeSettings()
    assert (model.name, model.max_sequences) == ("small", 256)
    assert read(None, name="x")[1][0].name == "x"
    assert read(None)[1][0].name == "SmolLM2-135M-Instruct"


def test_given_a_file_then_it_says_where_who_how_much_and_which_models(read: Read) -> None:
    settings, models = read(TWO)
    assert (settings.host, settings.port, settings.keys) == ("0.0.0.0", 9000, Path("keys.txt"))
    assert (settings.limits.requests, settings.limits.requests_per_key, settings.limits.samples) == (7, 7, 3)
    assert [(model.name, model.options.model, model.max_sequences) for model in models] == [
        ("a", "models/a", 4),
        ("b", "models/b", 32),
    ]
    assert [(model.options.memory, model.options.device) for model in models] == [("1GiB", None), (None, "cpu")]
    assert models[1].options.compile_layers
    assert models[1].options.tier_timeout == 2


def test_given_options_then_they_override_the_file(read: Read) -> None:
    settings, models = read(TWO, given={"port": 1, "host": None, "max_requests": 9})
    assert (settings.port, settings.host, settings.limits.requests) == (1, "0.0.0.0", 9)
    assert [model.name for model in models] == ["a", "b"]
    assert [model.name for model in read(TWO, model="other/c")[1]] == ["c"]


def test_given_a_disk_of_all_models_then_each_has_a_directory_in_it(read: Read) -> None:
    models = read(TWO + 'disk = "own"\n[tiers]\ndisk = "all"\n')[1]
    assert [model.options.disk for model in models] == [str(Path("all") / "a"), "own"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1", "no key 'prot'"),
        ("[server]\nport = '1'", "port must be of type int"),
        ("[server]\nport = true", "port must be of type int"),
        ("[server]\nport = 70000", "port"),
        ("[server]\nsamples = 0", "samples"),
        ("[models]\nname = 'x'", r"\[\[models\]\]"),
        ("[[models]]\nname = 'x'", "needs name and model"),
        ("[[models]]\nname = 'x'\nmodel = 'm'\nsize = 1", "no key 'size'"),
        ("[[models]]\nname = 'x'\nmodel = 'm'\n[[models]]\nname = 'x'\nmodel = 'n'", "of one before it"),
        ("[other]\nx = 1", "no section"),
        ("[server]\n[modles]", r"unknown section \[modles\]; did you mean \[models\]"),
        ("server = [", "not TOML"),
        ("server = 1", "must be a section"),
        ("[server]\ntool_parser = 'herms'", "no tool parser 'herms': choose one of hermes"),
        ("[server]\nlog_level = 'loud'", "log_level='loud' is unknown; known: debug"),
        ("[server]\ntls_cert = 'a.pem'", "TLS needs both"),
        ("[server]\ntls_cert = 'a.pem'\ntls_key = 'b.pem'", "no file a.pem"),
        ("[server]\nchat_template = 'none.jinja'", "chat_template none.jinja cannot be read"),
        ("[server]\nmax_model_len = 0", "max_model_len"),
    ],
)
def test_given_a_wrong_file_then_the_error_names_it(read: Read, text: str, words: str) -> None:
    with pytest.raises((ConfigError, InvalidArgumentError), match=words):
        read(text)


def test_given_an_unknown_objective_then_it_is_refused_before_a_model_is_loaded(read: Read) -> None:
    with pytest.raises(ConfigError, match="objective='foo' is unknown"):
        read(None, objective="foo")


def test_given_a_template_for_one_of_two_models_then_the_other_keeps_its_own(read: Read, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    text = f"""
        [server]
        max_model_len = 64
        tool_parser = "hermes"
        [[models]]
        name = "a"
        model = "a"
        chat_template = "{template}"
        [[models]]
        name = "b"
        model = "b"
        tool_parser = "glm"
        max_model_len = 32
    """
    _, (one, other) = read(text)
    assert (one.chat_template, one.max_model_len, one.tool_parser) == (str(template), 64, "hermes")
    assert (other.chat_template, other.max_model_len, other.tool_parser) == (None, 32, "glm")


def test_given_options_that_fit_one_model_only_then_they_are_refused_for_several(read: Read) -> None:
    with pytest.raises(ConfigError, match="--publish"):
        read(TWO, publish="tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="--record"):
        read(TWO, record="x.kvtrace")
    with pytest.raises(ConfigError, match="--name"):
        read(TWO, name="x")


def test_given_a_file_of_keys_that_is_not_there_then_the_error_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"keys in '.*none': No such file or directory; name a file of lines TENANT SHA256"
    ):
        Access.read(tmp_path / "none", {})
