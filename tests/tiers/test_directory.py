"""The directory of a disk tier: its lock, and what it keeps of models."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvpool import KVCacheConfig, LayerSpec
from kvpool.errors import ConfigError
from kvpool.tiers import Fingerprint, KeySpace
from kvpool.tiers.disk.directory import Directory

fcntl = pytest.importorskip("fcntl")
SPACE = KeySpace(
    Fingerprint.of(
        KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=8), model="tiny", weights="v1"
    )
)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path, create=False)


def test_given_a_lock_then_its_file_names_this_process_and_nothing_of_the_last_one(directory: Directory) -> None:
    (directory.path / "lock").write_text("98765432109876543210\nmore\n")
    assert directory.owner() == ""
    assert directory.lock()
    assert (directory.path / "lock").read_text() == f"{os.getpid()}\n"
    assert directory.owner() == str(os.getpid())
    directory.unlock()
    directory.unlock()  # once more does nothing
    assert directory.owner() == ""
    assert directory.lock()
    directory.unlock()


@pytest.mark.parametrize(("written", "shown"), [("", "unknown"), ("123\n", "123"), ("\n", "unknown")])
def test_given_another_process_that_writes_then_it_is_named(directory: Directory, written: str, shown: str) -> None:
    with (directory.path / "lock").open("w") as other:  # as another process has it: this one knows nothing of it
        other.write(written)
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        assert directory.owner() == shown
        with pytest.raises(ConfigError, match=f"^{directory.path} belongs to process {shown}, which writes to it"):
            directory.lock()
    assert directory.owner() == ""


def test_given_several_readers_of_a_lock_then_none_of_them_is_its_owner(directory: Directory) -> None:
    (directory.path / "lock").write_text("123\n")
    with (directory.path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert directory.owner() == ""


def test_given_a_fingerprint_then_people_can_read_its_file_and_it_is_written_once(directory: Directory) -> None:
    directory.describe(SPACE)
    path = directory.path / f"space-{SPACE.prefix.hex()}.json"
    assert path.read_text() == json.dumps(SPACE.fingerprint.describe(), indent=2) + "\n"
    assert directory.descriptions() == {SPACE.prefix: json.loads(path.read_text())}
    path.write_text('{"model": "mine"}')
    directory.describe(SPACE)
    assert directory.descriptions() == {SPACE.prefix: {"model": "mine"}}
    assert [each.name for each in directory.path.iterdir()] == [path.name]


def test_given_files_that_describe_nothing_then_they_are_left_out(directory: Directory) -> None:
    names = ["0" * 14, "0" * 15, "0" * 17, "0" * 18, "z" * 16]
    for name in names:
        (directory.path / f"space-{name}.json").write_text("{}")
    (directory.path / f"space-{'1' * 16}.json").write_text("[]")
    (directory.path / f"space-{'2' * 16}.json").write_text("{")
    (directory.path / f"space-{'3' * 16}.json").mkdir()
    (directory.path / f"space-{'4' * 16}.json").write_text('{"a": 1}')
    assert directory.descriptions() == {bytes([0x44] * 8): {"a": 1}}
    assert directory.strangers() == []
