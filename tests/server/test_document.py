"""The OpenAPI document says what the server does. `make test-api` lets schemathesis compare the two."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Live, access, call, word_tokenizer
from models import tiny_model

HERE = Path(__file__).parent
EXAMPLES = os.environ.get("KVPOOL_API_EXAMPLES")


@pytest.fixture(params=[False, True], ids=["open", "keys"])
def document(request: pytest.FixtureRequest, serve: Callable[..., Live]) -> Any:
    keys = {"access": access("a", "root")} if request.param else {}
    return call(serve(**keys), "/openapi.json")


def test_given_the_document_then_every_path_says_how_it_refuses_and_nothing_says_422(document: Any) -> None:
    for path in document["paths"].values():
        for operation in path.values():
            assert {"200", "4XX", "5XX"} == set(operation["responses"])
    refusal = document["components"]["schemas"]["RefusalDetails"]["properties"]
    assert set(refusal) == {"message", "type", "param", "code", "details"}


def test_given_keys_then_the_document_asks_for_them_and_else_does_not(document: Any) -> None:
    asking = {
        name for name, path in document["paths"].items() for operation in path.values() if "security" in operation
    }
    if "securitySchemes" in document["components"]:
        assert set(document["paths"]) - asking == {"/health", "/ready", "/version"}
    else:
        assert asking == set()
    named = [name for path in document["paths"].values() for one in path.values() for name in one.get("parameters", ())]
    assert {parameter["in"] for parameter in named} == {"path", "query"}  # nothing of a caller is a parameter
    assert {parameter["name"] for parameter in named if parameter["in"] == "query"} == {"model"}


def test_given_the_page_on_the_server_then_it_names_every_path(document: Any) -> None:
    page = (HERE.parents[1] / "docs" / "server.md").read_text(encoding="utf-8")
    for path in document["paths"]:
        words = re.split(r"/\{", path)[0]
        assert words in page or words.rsplit("/", 1)[-1] in page, f"{path} is not in docs/server.md"


@pytest.fixture
def short() -> Iterator[Live]:
    """A server whose model has a context of 48 tokens, so that no answer is long."""
    from kvpool.engine import Engine
    from kvpool.server import ServedModel, create_app

    model = tiny_model("llama", max_position_embeddings=48)
    with Engine(model, tokenizer=word_tokenizer(), device="cpu", kv_blocks=256, block_size=4) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        yield live
        live.stop()


@pytest.mark.skipif(EXAMPLES is None, reason="takes minutes: `make test-api` runs it")
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="no schemathesis: `make test-api` installs it"
)
def test_given_schemathesis_then_the_server_keeps_to_its_document(short: Live, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"), "run"]
    checks = ["--checks", "all", "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", str(EXAMPLES)]
    checks += ["--request-timeout", "60"]  # for a busy machine
    found = subprocess.run(
        [*command, f"{short.url}/openapi.json", *checks, "--continue-on-failure", "--no-color"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert found.returncode == 0, found.stdout[-20000:]
    assert json.dumps(call(short, "/health"))
