"""Files that are opened by path: plain ones and links to them; whatever else lies there is refused without waiting for it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.files import NotPlainError, open_plain, read_json, read_plain, write_plain
from kvpool.tiers.settings import read_tiers

pytestmark = pytest.mark.usefixtures("no_waiting")
KINDS = {"fifo": "a FIFO", "socket": "a socket", "device": "a device", "directory": "a directory", "link": "a FIFO"}


def put(kind: str, path: Path) -> None:
    """Something that is no plain file."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        put("fifo", path.with_suffix(".target"))
        path.symlink_to(path.with_suffix(".target"))


@pytest.mark.parametrize("kind", KINDS)
def test_given_no_plain_file_then_it_is_neither_read_nor_written_and_the_error_says_what_it_is(
    tmp_path: Path, kind: str
) -> None:
    put(kind, tmp_path / "here")
    num_open = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for attempt in (
        lambda: read_plain(tmp_path / "here"),
        lambda: write_plain(tmp_path / "here", b"x"),
        lambda: open_plain(tmp_path / "here", os.O_RDWR | os.O_CREAT),
    ):
        with pytest.raises(NotPlainError) as caught:
            attempt()
        assert caught.value.strerror == f"not a plain file but {KINDS[kind]}"
    assert num_open in (0, len(os.listdir("/proc/self/fd")))


def test_given_a_fifo_that_somebody_reads_then_nothing_is_written_into_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "here")
    reader = os.open(tmp_path / "here", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(NotPlainError):
            write_plain(tmp_path / "here", b"x")
        assert os.read(reader, 10) == b""
    finally:
        os.close(reader)


def test_given_a_plain_file_or_a_link_to_one_then_it_is_read_and_replaced(tmp_path: Path) -> None:
    write_plain(tmp_path / "file", b"a longer text")
    (tmp_path / "link").symlink_to("file")
    assert (read_plain(tmp_path / "link"), read_plain(tmp_path / "link", 8)) == (b"a longer text", b"a longer")
    write_plain(tmp_path / "link", b"text")
    assert (tmp_path / "file").read_bytes() == b"text"
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "nothing")


def test_given_a_fifo_as_json_or_as_settings_then_the_error_names_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "here")
    with pytest.raises(ConfigError, match="here: not a plain file but a FIFO; give another"):
        read_json(tmp_path / "here", ConfigError, "give another")
    with pytest.raises(ConfigError, match="here: not a plain file but a FIFO"):
        read_tiers(tmp_path / "here", environ={})
