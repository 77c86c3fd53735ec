"""An engine whose disk breaks: every answer is that of computing it. Servers that break: test_tiers_server_faults.py."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")

from tier_faults import (  # noqa: E402
    ALL_CACHED,
    MODULES_WITH_TIME,
    PARAMS,
    PROMPTS,
    Clock,
    SlowestAllowed,
    assert_balanced,
    assert_right,
    computed,
    make_engine,
)

from kvpool.tiers import DiskTier  # noqa: E402
from kvpool.tiers.transport.chain import GRACE_SECONDS  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_self_check")


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


def flip_bits_of_the_index(directory: Path) -> None:
    for path in directory.glob("*.kvindex"):
        content = bytearray(path.read_bytes())
        for at in range(len(content) // 3, len(content), 97):
            content[at] ^= 1 << at % 8
        path.write_bytes(content)


def delete_index(directory: Path) -> None:
    for path in directory.glob("*.kvindex"):
        path.unlink()


DAMAGES = [flip_bits, truncate, delete_half, overwrite, flip_bits_of_the_index, delete_index]


@pytest.mark.quick("flip_bits", "delete_index")
@pytest.mark.parametrize("damage", DAMAGES)
def test_given_damaged_files_then_a_restarted_engine_answers_right(
    damage: Callable[[Path], None], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(directory)
    for _ in range(2):
        with make_engine(disk=directory, disk_bytes=2**24) as engine:
            assert_right(engine)


@pytest.mark.slow
def test_given_files_damaged_under_a_running_engine_then_it_answers_right(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(disk=directory, disk_bytes=2**24) as engine:
        flip_bits(directory)
        assert_right(engine)


@pytest.mark.quick("none")
@pytest.mark.parametrize("damage", [lambda directory: None, delete_index], ids=["none", "no index"])
def test_given_whole_values_then_everything_comes_from_them(
    damage: Callable[[Path], None], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(directory)
    with make_engine(disk=directory, disk_bytes=2**24, tier_timeout=60.0) as engine:
        assert assert_right(engine) >= ALL_CACHED


@pytest.mark.slow
def test_given_a_directory_that_cannot_be_written_to_then_it_is_read_and_stores_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: object, flags: int, *more: object, **named: object) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    with make_engine(disk=directory, disk_bytes=2**24, tier_timeout=60.0) as engine:
        assert assert_right(engine) >= ALL_CACHED
        engine.generate([PROMPTS[0][::-1]], PARAMS)
        assert_balanced(engine)
        stats = engine.stats().tiers
        assert stats is not None
        assert stats.tiers[0].stats.refused > 0


@pytest.mark.slow
def test_given_a_disk_that_takes_all_the_time_it_is_given_then_no_request_waits_past_the_deadline(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for name in MODULES_WITH_TIME:
        monkeypatch.setattr(importlib.import_module(name), "time", clock)
    with (
        DiskTier(directory, 2**24) as disk,
        make_engine(tiers=[SlowestAllowed(disk, clock)], tier_timeout=0.5) as engine,
    ):
        for prompt, expected in zip(PROMPTS, computed(), strict=True):
            began = clock.now
            (result,) = engine.generate([prompt], PARAMS)
            assert tuple(result.token_ids) == expected
            assert clock.now - began <= 0.5 + GRACE_SECONDS
            assert_balanced(engine)


def test_given_a_disk_that_is_full_then_requests_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with make_engine(disk=tmp_path / "blocks", disk_bytes=2**24) as engine:
        for name in ("pwrite", "pwritev", "posix_fallocate"):
            monkeypatch.setattr(os, name, full)
        assert_right(engine)
        monkeypatch.undo()
