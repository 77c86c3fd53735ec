"""Installs kvpool where there is nothing else, then asks `kvpool doctor` and runs one request.

    python tools/clean_room.py                                # this Python, the core
    python tools/clean_room.py --found                        # every Python 3.10 to 3.14 on PATH
    python tools/clean_room.py --python python3.11 --extra server

Each room is a new virtual environment and the unpacked sdist, which nobody may write. Commands run there without a compiler,
without git and without HOME; where root starts this, they run as the user `nobody`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OTHER_USER = "nobody"
VERSIONS = tuple(f"python3.{minor}" for minor in range(10, 15))
KEPT = ("PIP_", "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE")  # how pip reaches its index

# A model of two layers with random weights, and a tokenizer whose words are w0, w1, ...
WRITE_MODEL = """
import sys
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = Tokenizer(WordLevel({f"w{number}": number for number in range(160)}, unk_token="w0"))
words.pre_tokenizer = Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(sys.argv[1])
sizes = dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, max_position_embeddings=512, **sizes)).save_pretrained(sys.argv[1])
"""


class RoomError(Exception):
    """A command failed in a clean room."""


class Room:
    """A folder with an environment for one interpreter, read-only sources, and a place to write."""

    def __init__(self, folder: Path, python: str, sdist: Path) -> None:
        self.folder = folder
        self.source = unpacked(sdist, folder)
        self.work = folder / "work"
        self.work.mkdir()
        self.bin = folder / "venv" / "bin"
        self.user = _other_user(folder, python)
        if self.user is not None:
            shutil.chown(self.work, self.user)
            (folder / "venv").mkdir()
            shutil.chown(folder / "venv", self.user)
        self.run(python, "-m", "venv", str(folder / "venv"))
        self._before = self._listing()

    def run(self, *command: str) -> str:
        """What a command prints; raises with all of it where the command fails."""
        done = subprocess.run(
            command,
            cwd=self.source,
            env=environment(self.bin, self.work),
            user=self.user,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RoomError(f"`{' '.join(command)}` ended with status {done.returncode}:\n{done.stdout}")
        return done.stdout

    def install(self, extra: str) -> None:
        """`pip install .`, or with an extra; nothing may have changed in the sources."""
        what = f".[{extra}]" if extra else "."
        self.run(str(self.bin / "pip"), "install", "--quiet", "--no-cache-dir", "-c", "constraints.txt", what)
        if self._listing() != self._before:
            raise RoomError("the installation changed its sources")

    def check_core(self) -> None:
        """The doctor answers, and a request is served from Python."""
        said = self.run(str(self.bin / "kvpool"), "doctor")
        if "(pure Python)" not in said:
            raise RoomError(f"compiled without a compiler?\n{said}")
        self.run(str(self.bin / "python"), "examples/quickstart.py")

    def check_server(self) -> None:
        """A server of a tiny model answers a request over HTTP."""
        said = self.run(str(self.bin / "kvpool"), "doctor")
        if "  yes  server (" not in said:
            raise RoomError(f"the doctor misses something for the server:\n{said}")
        model = str(self.work / "model")
        self.run(str(self.bin / "python"), "-c", WRITE_MODEL, model)
        command = [str(self.bin / "kvpool"), "serve", "--model", model, "--port", "0", "--device", "cpu"]
        log = self.folder / "log"
        with log.open("wb") as lines:
            around = environment(self.bin, self.work)
            server = subprocess.Popen(command, cwd=self.source, env=around, user=self.user, stderr=lines)
            try:
                answer = _ask(_address(server, log))
            finally:
                server.terminate()
                server.wait()
        if answer["usage"]["completion_tokens"] != 4:
            raise RoomError(f"the server answered {answer}")

    def _listing(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in [self.source, *self.source.rglob("*")]}


def environment(programs: Path, temporary: Path) -> dict[str, str]:
    """The variables of a room: its own programs, how pip reaches its index, and nothing else."""
    kept = {name: value for name, value in os.environ.items() if name.upper().startswith(KEPT)}
    return {**kept, "PATH": str(programs), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}


def unpacked(sdist: Path, folder: Path) -> Path:
    """The sources of an sdist below a folder, where nobody may write them."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    for path in [*source.rglob("*"), source]:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222 | (0o555 if path.is_dir() else 0o444))
    return source


def _other_user(folder: Path, python: str) -> str | None:
    """The user for the room, if there is a choice."""
    if os.geteuid() != 0:
        return None
    folder.chmod(0o755)
    probe = [python, "-c", "import venv"]
    try:
        subprocess.run(probe, user=OTHER_USER, cwd="/", env={}, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return OTHER_USER


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server listens, as soon as it says so."""
    while True:
        ended = server.poll() is not None
        said = log.read_text(encoding="utf-8", errors="replace")
        if found := re.search(r" at (http://127\.0\.0\.1:\d+)/v1", said):
            return found[1]
        if ended:
            raise RoomError(f"the server ended with status {server.returncode}:\n{said}")
        try:
            server.wait(0.2)
        except subprocess.TimeoutExpired:
            continue


def _ask(address: str) -> Any:
    body = json.dumps({"model": "model", "prompt": "w5 w6 w7", "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def check(python: str, extra: str, sdist: Path) -> str:
    """Everything for one interpreter; returns a line for people."""
    with tempfile.TemporaryDirectory(prefix="kvpool-room-", ignore_cleanup_errors=True) as folder:
        room = Room(Path(folder), python, sdist)
        version = room.run(str(room.bin / "python"), "-c", "import platform; print(platform.python_version())").strip()
        room.install(extra)
        room.check_core()
        if extra == "server":
            room.check_server()
        packages = len(room.run(str(room.bin / "pip"), "list", "--format=freeze").splitlines())
        user = room.user or "the user who started this"
        for path in [room.source, *room.source.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)  # so that the folder can be removed
        return f"Python {version}, {f'kvpool[{extra}]' if extra else 'kvpool'}, {packages} packages, as {user}: passed"


def built(folder: Path) -> Path:
    """The sdist of this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise RoomError(f"the sdist could not be built:\n{done.stdout}")
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs every interpreter and says what happened; the status is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="an interpreter; may be given several times")
    parser.add_argument("--found", action="store_true", help="every Python 3.10 to 3.14 on PATH")
    parser.add_argument("--extra", default="", choices=("", "server"), help="what to install beside the core")
    options = parser.parse_args(arguments)
    names = [*options.python, *(VERSIONS if options.found else ())]
    pythons = [os.path.abspath(found) for name in names if (found := shutil.which(name))]
    if missing := [name for name in options.python if shutil.which(name) is None]:
        parser.error(f"there is no interpreter {missing[0]!r}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="kvpool-sdist-") as folder:
        sdist = built(Path(folder))
        for python in pythons or [sys.executable]:
            try:
                print(check(python, options.extra, sdist), flush=True)
            except (RoomError, OSError) as error:
                print(f"{python}: FAILED\n{error}", flush=True)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
