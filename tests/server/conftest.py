"""A real server on loopback with a tiny model, and the clients that people use."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from live import Live

for package in ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client", "openai", "anthropic"):
    if importlib.util.find_spec(package) is None:
        collect_ignore_glob = ["test_*.py"]

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "engine")]


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """A tiny random Llama whose words are w0, w1, ..."""
    from live import word_tokenizer
    from models import tiny_model

    from kvpool.engine import Engine

    with Engine(tiny_model("llama"), tokenizer=word_tokenizer(), device="cpu", kv_blocks=128, block_size=4) as made:
        yield made


@pytest.fixture
def serve(engine: Any) -> Iterator[Callable[..., Live]]:
    """Starts servers over the engine; they end with the test, and the engine's cache is as it should be."""
    from live import Live

    from kvpool.server import ServedModel, create_app

    started: list[Live] = []

    def start(**options: Any) -> Live:
        live = Live(create_app([ServedModel("tiny", engine)], **options))
        started.append(live)
        return live

    yield start
    for live in started:
        live.stop()
    assert engine.stats().num_running == 0
    engine.manager.check()
    engine.manager.cache.reset()


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    """A server without keys."""
    return serve()


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    """OpenAI's own client."""
    from live import openai_client

    with openai_client(live) as made:
        yield made
