"""The clean room is clean: what surrounds a command there, and that it cannot write the sources."""

from __future__ import annotations

import io
import re
import sys
import tarfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import clean_room


def test_given_a_room_then_its_commands_know_pips_index_and_nothing_else_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example")
    monkeypatch.setenv("CC", "/usr/bin/cc")
    monkeypatch.setenv("PYTHONPATH", "src")
    around = clean_room.environment(Path("/room/bin"), Path("/room/tmp"))
    assert around["PATH"] == "/room/bin"
    assert around["PIP_INDEX_URL"] == "https://index.example"
    assert not {"HOME", "CC", "PYTHONPATH"} & set(around)


def test_given_an_sdist_then_nobody_may_write_what_is_unpacked(tmp_path: Path) -> None:
    sdist = tmp_path / "made-1.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        member = tarfile.TarInfo("made-1.0/src/module.py")
        member.mode, member.size = 0o666, 5
        archive.addfile(member, io.BytesIO(b"pass\n"))
    room = tmp_path / "room"
    room.mkdir()
    source = clean_room.unpacked(sdist, room)
    modes = {path.stat().st_mode & 0o777 for path in [source, *source.rglob("*")]}
    assert modes == {0o555, 0o444}
    assert (source / "src" / "module.py").read_text() == "pass\n"
    source.chmod(0o755)
    (source / "src").chmod(0o755)


def test_given_an_interpreter_that_is_not_there_then_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        clean_room.main(["--python", "python9"])
    assert "there is no interpreter 'python9'" in capsys.readouterr().err


def test_given_the_pythons_that_are_claimed_then_the_workflow_and_the_room_have_each() -> None:
    root = Path(__file__).resolve().parent.parent
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (root / "pyproject.toml").read_text("utf-8"))
    assert [f"python{version}" for version in claimed] == list(clean_room.VERSIONS)
    workflow = (root / ".github" / "workflows" / "pull-requests.yml").read_text("utf-8")
    matrix = re.search(r"python: \[(.*)\]", workflow)
    assert matrix is not None
    assert re.findall(r'"(.*?)"', matrix[1]) == claimed
