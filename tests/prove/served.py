"""A real server of kvpool with a tiny model: pages on a small device, on the host below it, and on a disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from adapter_files import write_adapter
from live import word_tokenizer
from models import tiny_model
from reader import reader, tokenizer

from kvpool.engine import Engine
from kvpool.server import ServedModel, create_app
from live_app import Live

CONTEXT = 1024


def model() -> Any:
    """A tiny random Llama whose answers depend on all of the prompt."""
    return tiny_model("llama", max_position_embeddings=CONTEXT)


def served(folder: Path, **settings: Any) -> AbstractContextManager[Live]:
    """A server of a random model whose device keeps about five prompts of `--quick`, and whose host keeps twenty more."""
    made = model()
    paths = {name: write_adapter(folder / name, made, seed=seed) for seed, name in enumerate(("sql", "poems"), 1)}
    return _serving(made, word_tokenizer(), {"adapters": paths, "max_adapters": 2, **settings})


def reading(**settings: Any) -> AbstractContextManager[Live]:
    """The same server with the model that finds needles."""
    return _serving(reader(), tokenizer(), settings)


@contextlib.contextmanager
def _serving(made: Any, words: Any, settings: dict[str, Any]) -> Iterator[Live]:
    options: dict[str, Any] = dict(kv_blocks=160, block_size=16, cache={"host_blocks": 400})
    with Engine(made, tokenizer=words, device="cpu", **{**options, **settings}) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        try:
            yield live
        finally:
            live.stop()
