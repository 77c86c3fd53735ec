"""An engine whose disk or server breaks: every answer is that of computing it, and nobody waits for what does not come."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("xxhash")
sys.path.append(str(Path(__file__).resolve().parents[1] / "tiers"))

from models import random_prompt, tiny_model  # noqa: E402
from servers import RedisServer, running  # noqa: E402

from kvpool.engine import Engine, SamplingParams  # noqa: E402

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
PROMPTS = [random_prompt(100, seed=seed).tolist() for seed in range(4)]
SRC = Path(__file__).resolve().parents[2] / "src"


@cache
def model() -> Any:
    return tiny_model("gemma2")


@cache
def computed() -> tuple[tuple[int, ...], ...]:
    with Engine(model(), kv_blocks=128, block_size=8) as engine:
        return tuple(tuple(result.token_ids) for result in engine.generate(PROMPTS, PARAMS))


def make_engine(**options: Any) -> Engine:
    return Engine(model(), block_size=8, **{"kv_blocks": 128, "tier_timeout": 2.0, **options})


def assert_right(engine: Engine) -> int:
    """Every prompt is answered as if it were computed, one after the other; returns how many tokens were cached."""
    results = [engine.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    assert tuple(tuple(result.token_ids) for result in results) == computed()
    engine.manager.check()
    stats = engine.stats().tiers
    assert stats is not None
    assert (stats.held, stats.leases) == (0, ())
    return sum(result.num_cached_tokens for result in results)


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


PROCESS = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from models import random_prompt, tiny_model
from kvpool.engine import Engine, SamplingParams

engine = Engine(tiny_model("gemma2"), block_size=8, kv_blocks=128, disk=sys.argv[1], disk_bytes=2**24)
number = 0
while True:
    prompts = [random_prompt(100, seed=seed).tolist() for seed in (number % 4, 100 + number)]
    engine.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True))
    number += 1
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3, 9])
def test_given_a_process_that_is_killed_while_it_stores_then_the_next_one_answers_right(rounds: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "blocks"), str(Path(__file__).parent)]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SRC)})
    assert killed.stdout is not None
    for _ in range(rounds):
        assert killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    with make_engine(disk=tmp_path / "blocks", disk_bytes=2**24) as engine:
        assert_right(engine)


# --- a server ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("glide_sync")
    made = RedisServer(tmp_path / "redis")
    with running(made):
        yield made


def filled(server: RedisServer) -> str:
    """The address of a server that holds all prompts."""
    address = f"{server.url}?timeout=2"
    with make_engine(remote=address) as engine:
        assert_right(engine)
        assert engine._tiers.flush(30.0)  # type: ignore[union-attr]
    return address


def test_given_a_server_then_another_engine_finds_what_the_first_one_stored(server: RedisServer) -> None:
    with make_engine(remote=filled(server), tier_timeout=60.0) as engine:
        assert assert_right(engine) >= 4 * 96


def test_given_a_server_that_is_killed_then_requests_are_answered(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = filled(server)
    with make_engine(remote=address) as engine:
        server.kill()
        assert_right(engine)
    with make_engine(remote=address) as engine:
        assert_right(engine)


def test_given_a_server_that_hangs_then_requests_are_answered_and_go_on_when_it_comes_back(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    address = filled(server)
    with make_engine(remote=address, tier_timeout=0.5) as engine:
        server.pause()
        assert_right(engine)
        server.resume()
        engine.manager.reset_prefix_cache()
        assert_right(engine)


def test_given_a_server_that_answers_rubbish_then_requests_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("glide_sync")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def babble() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 418 I am a teapot\r\n\r\n")

        thread = threading.Thread(target=babble, daemon=True)
        thread.start()
        with make_engine(remote=f"redis://127.0.0.1:{listening.getsockname()[1]}?timeout=1", tier_timeout=0.5) as engine:
            assert_right(engine)
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)
