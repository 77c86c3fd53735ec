"""The Python of docs/engine.md runs, on a tiny model in place of the reader's."""

from __future__ import annotations

import asyncio
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import random_prompt, tiny_model  # noqa: E402

from kvpool.engine import Engine  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
DISK, DROP_IN = (next(block for block in BLOCKS if words in block) for words in ("disk=", "PagedCache"))


def test_given_the_page_then_generate_runs(model_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[0].replace("path/to/model", model_directory), {})
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_given_the_page_then_its_stream_runs(model_directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvpool.engine import SamplingParams

    names: dict[str, Any] = {"engine": Engine(model_directory, kv_blocks=64), "SamplingParams": SamplingParams}
    block = BLOCKS[1].replace("200", "4").replace("Once upon a time", "w5 w6 w7")
    exec("async def run():\n" + textwrap.indent(block, "    "), names)
    asyncio.run(names["run"]())
    names["engine"].close()
    assert len(capsys.readouterr().out.split()) == 4


def test_given_the_page_then_its_drafts_run() -> None:
    names: dict[str, Any] = {"Engine": partial(Engine, kv_blocks=64), "model": tiny_model("llama")}
    exec(BLOCKS[2], names)
    names["engine"].close()
    assert names["engine"]._loop.parts.planning


def test_given_the_page_then_its_disk_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"Engine": partial(Engine, kv_blocks=64), "model": tiny_model("llama")}
    exec(DISK, names)
    names["engine"].close()
    assert (tmp_path / "cache").is_dir()


def test_given_the_page_then_its_drop_in_cache_runs() -> None:
    ids = random_prompt(20).unsqueeze(0)
    longer = torch.cat([ids, random_prompt(5, seed=1).unsqueeze(0)], dim=1)
    exec(DROP_IN, {"model": tiny_model("llama"), "ids": ids, "longer_ids": longer})
