"""Adapters over HTTP: clients name them as models, and never find prefixes of another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from adapter_files import write_adapter
from live import Live, call, openai_client, word_tokenizer
from models import tiny_model

from kvpool.engine import Engine, SamplingParams
from kvpool.errors import ConfigError
from kvpool.server import ServedModel, create_app
from kvpool.server.serve_settings import read_serve

PROMPT = " ".join(f"w{number}" for number in range(20, 36))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder, model = tmp_path_factory.mktemp("adapters"), tiny_model("llama")
    paths = {name: write_adapter(folder / name, model, seed=seed) for seed, name in enumerate(("sql", "poems"), 1)}
    with Engine(
        model, tokenizer=word_tokenizer(), device="cpu", kv_blocks=128, block_size=4, adapters=paths, max_adapters=1
    ) as made:
        yield made


@pytest.fixture(scope="module")
def live(engine: Engine) -> Iterator[Live]:
    live = Live(create_app([ServedModel("tiny", engine)]))
    yield live
    live.stop()


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with openai_client(live) as made:
        yield made


@pytest.mark.slow
def test_given_an_adapter_as_the_model_then_the_answer_is_the_engines_with_it(client: Any, engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
    answers = {}
    for name in ("tiny", "sql", "poems"):
        asked = client.completions.create(
            model=name, prompt=PROMPT, max_tokens=6, temperature=0, extra_body={"ignore_eos": True}
        )
        answers[name] = asked.choices[0].text
        (own,) = engine.generate([PROMPT], params, adapter=None if name == "tiny" else name)
        assert (asked.model, answers[name]) == (name, own.text)
    assert len(set(answers.values())) == 3


def test_given_a_cached_prompt_then_only_the_same_adapter_finds_it(live: Live) -> None:
    found = dict.fromkeys(("sql", "poems", "tiny"), 0)
    call(live, "/v1/cache/invalidate", {"model": "tiny", "everything": True})
    call(live, "/v1/cache/warm", {"model": "sql", "prompt": PROMPT})
    for name in found:
        found[name] = call(live, "/v1/cache/query", {"model": name, "prompt": PROMPT})["cached_tokens"]
    assert found == {"sql": 15, "poems": 0, "tiny": 0}  # the last token is computed again
    pin = call(live, "/v1/cache/pin", {"model": "sql", "prompt": PROMPT})
    call(live, f"/v1/cache/pin/{pin['id']}", method="DELETE")
    assert call(live, "/v1/cache/invalidate", {"model": "poems", "prompt": PROMPT})["removed_blocks"] == 0
    assert call(live, "/v1/cache/invalidate", {"model": "sql", "prompt": PROMPT})["removed_blocks"] > 0


def test_given_a_text_then_its_tokens_come_with_the_name_of_the_adapter_in_events(live: Live, engine: Engine) -> None:
    named = {name: call(live, "/tokenize", {"model": name, "prompt": "w1 w2"})["lora_name"] for name in ("tiny", "sql")}
    assert named == {"tiny": None, "sql": engine.scope_of("sql").adapter}


def test_given_the_list_of_models_then_adapters_name_their_model(client: Any) -> None:
    told = {model.id: getattr(model, "parent", None) for model in client.models.list()}
    assert told == {"tiny": None, "sql": "tiny", "poems": "tiny"}
    assert client.models.retrieve("sql").id == "sql"
    with pytest.raises(openai.NotFoundError, match="served: tiny, sql, poems"):
        client.completions.create(model="songs", prompt=PROMPT)


def test_given_an_adapter_with_the_name_of_a_model_then_the_server_does_not_start(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="two models or adapters have the same name"):
        create_app([ServedModel("sql", engine)])


def test_given_adapters_in_a_file_or_as_options_then_the_model_has_them(tmp_path: Path) -> None:
    from kvpool.engine.options import EngineOptions

    path = write_adapter(tmp_path / "sql", tiny_model("llama"), seed=1)
    file = tmp_path / "kvpool.toml"
    file.write_text(
        f'[[models]]\nname = "a"\nmodel = "a"\nmax_adapters = 3\nlanguage_adapters = true\nadapters = {{ sql = "{path}" }}\n'
    )
    (model,) = read_serve(EngineOptions(config=file), None, None, {})[1]
    assert (dict(model.adapters), model.max_adapters, model.language_adapters) == ({"sql": str(path)}, 3, True)
    (model,) = read_serve(EngineOptions(model="a"), None, None, {}, [f"sql={path}"])[1]
    assert dict(model.adapters) == {"sql": str(path)}
    for given, words in ((["sql"], "NAME=PATH"), ([f"a={path}"] * 2, "twice"), (["a=/none"], "adapter_config.json")):
        with pytest.raises(ConfigError, match=words):
            read_serve(EngineOptions(model="a"), None, None, {}, given)
