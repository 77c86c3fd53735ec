"""An engine whose disk breaks: every answer is that of computing it. Servers that break: test_tiers_server_faults.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")

from tier_faults import assert_right, make_engine  # noqa: E402

# --- a disk ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory that holds all prompts."""
    with make_engine(disk=tmp_path / "blocks", disk_bytes=2**24) as engine:
        assert_right(engine)
    return tmp_path / "blocks"


def flip_bits(directory: Path) -> None:
    for path in directory.glob("*.kvslab"):
        content = bytearray(path.read_bytes())
        for at in range(4096 + 64, len(content), 9973):
            content[at] ^= 1 << at % 8
        path.write_bytes(content)


def truncate(directory: Path) -> None:
    for path in directory.glob("*.kvslab"):
        os.truncate(path, path.stat().st_size // 2)


def delete_half(directory: Path) -> None:
    for path in sorted(directory.iterdir())[::2]:
        if path.is_file():
            path.unlink()


def overwrite(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_file():
            path.write_bytes(b"something else entirely " * 1000)


@pytest.mark.parametrize("damage", [flip_bits, truncate, delete_half, overwrite])
def test_given_damaged_files_then_a_restarted_engine_answers_right(
    damage: Callable[[Path], None], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(directory)
    for _ in range(2):
        with make_engine(disk=directory, disk_bytes=2**24) as engine:
            assert_right(engine)


def test_given_files_damaged_under_a_running_engine_then_it_answers_right(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(disk=directory, disk_bytes=2**24) as engine:
        flip_bits(directory)
        assert_right(engine)


def test_given_whole_files_then_everything_comes_from_them(directory: Path) -> None:
    with make_engine(disk=directory, disk_bytes=2**24) as engine:
        assert assert_right(engine) >= 4 * 96


def test_given_a_disk_that_is_full_then_requests_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with make_engine(disk=tmp_path / "blocks", disk_bytes=2**24) as engine:
        for name in ("pwrite", "pwritev", "posix_fallocate"):
            monkeypatch.setattr(os, name, full)
        assert_right(engine)
        engine._tiers.flush(30.0)  # type: ignore[union-attr]
        monkeypatch.undo()
