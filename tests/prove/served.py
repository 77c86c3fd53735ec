"""A real server of kvpool with a tiny model: pages on a small device, on the host below it, and on a disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapter_files import write_adapter
from live import word_tokenizer
from models import tiny_model

from kvpool.engine import Engine
from kvpool.server import ServedModel, create_app
from live_app import Live

CONTEXT = 1024


def model() -> Any:
    """A tiny random Llama whose answers depend on all of the prompt."""
    return tiny_model("llama", max_position_embeddings=CONTEXT)


@contextlib.contextmanager
def served(folder: Path, **settings: Any) -> Iterator[Live]:
    """A server whose device keeps about five prompts of `--quick`, and whose host keeps about twenty more."""
    made = model()
    paths = {name: write_adapter(folder / name, made, seed=seed) for seed, name in enumerate(("sql", "poems"), 1)}
    options: dict[str, Any] = dict(
        kv_blocks=160, block_size=16, cache={"host_blocks": 400}, adapters=paths, max_adapters=2
    )
    with Engine(made, tokenizer=word_tokenizer(), device="cpu", **{**options, **settings}) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        try:
            yield live
        finally:
            live.stop()
