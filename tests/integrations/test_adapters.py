"""Which adapter is this? Its files decide, as they were when the engine began to use them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.integrations.connector.requests import Adapters


def adapter(path: Path | str, number: int = 1, **more: Any) -> Any:
    return SimpleNamespace(**{"lora_name": "ada", "lora_int_id": number, "lora_path": str(path), **more})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(100))
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    return tmp_path


def test_given_the_same_files_then_every_process_names_an_adapter_alike(files: Path) -> None:
    assert Adapters().identity(adapter(files)) == Adapters().identity(adapter(files, number=7))
    assert str(Adapters().identity(adapter(files))).startswith("ada\0")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "new_embeddings.safetensors"])
def test_given_any_other_file_then_the_next_process_names_it_otherwise(files: Path, name: str) -> None:
    known = Adapters().identity(adapter(files))
    (files / name).write_bytes(b"something else")
    assert Adapters().identity(adapter(files)) not in (known, None)


@pytest.mark.parametrize("more", [dict(lora_name="bob"), dict(is_3d_lora_weight=True), dict(new_setting=1)])
def test_given_another_name_or_way_to_read_them_then_it_is_another_adapter(files: Path, more: dict[str, Any]) -> None:
    assert Adapters().identity(adapter(files, **more)) != Adapters().identity(adapter(files))


def test_given_files_that_change_while_the_engine_uses_them_then_nobody_knows_until_they_have_another_number(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = Adapters()
    known = adapters.identity(adapter(files))
    assert adapters.identity(adapter(files)) == known
    config = files / "adapter_config.json"
    config.write_text('{"lora_alpha": 64}')
    os.utime(config, ns=(1, 1))
    assert adapters.identity(adapter(files)) is None
    assert "have changed while the engine uses them" in caplog.text
    assert adapters.identity(adapter(files, number=2)) not in (known, None)


@pytest.mark.parametrize("path", ["", "somebody/their-adapter", "/nowhere"])
def test_given_no_files_here_then_no_other_process_has_the_same_identity(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    adapters = Adapters()
    assert adapters.identity(adapter(path)) == adapters.identity(adapter(path))
    assert adapters.identity(adapter(path)) != Adapters().identity(adapter(path))


def test_given_a_directory_without_weights_then_no_other_process_has_the_same_identity(tmp_path: Path) -> None:
    assert Adapters().identity(adapter(tmp_path)) != Adapters().identity(adapter(tmp_path))
