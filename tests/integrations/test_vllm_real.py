"""A real vLLM with a real model: with the connector it answers as without it, wherever a prefix comes from. `make test-vllm`.

It runs in processes of the Python that `KVPOOL_VLLM_PYTHON` names; without that the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tiers"))

HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "src"
PATIENCE = 900.0
LOADED = [448, 448]  # whole blocks of 32 tokens of both prompts, which have a few tokens more

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("KVPOOL_VLLM_PYTHON"), reason="needs vLLM: run make test-vllm"),
]


@pytest.fixture(scope="module")
def model() -> str:
    pytest.importorskip("transformers")
    from kvpool.engine.model.default_model import default_model_directory
    from kvpool.errors import ModelLoadError

    try:
        return str(default_model_directory())
    except ModelLoadError as error:
        pytest.skip(str(error))


def life(model: str, extra: dict[str, Any] | None, rounds: list[str], **task: Any) -> Any:
    """What one vLLM process answered, and what it said on stderr."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{SOURCES}{os.pathsep}{HERE}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "0"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    given = json.dumps({"model": model, "extra": extra, "rounds": rounds, **task})
    command = [os.environ["KVPOOL_VLLM_PYTHON"], str(HERE / "vllm_run.py"), given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    return json.loads(lines[-1]), done.stdout + done.stderr


@pytest.fixture(scope="module")
def plain(model: str) -> list[list[int]]:
    """The answers of vLLM alone."""
    results, _ = life(model, None, ["cold"])
    return list(results["cold"]["tokens"])


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from servers import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield f"redis://127.0.0.1:{server.port}"
    server.kill()


@pytest.fixture(scope="module")
def filled(model: str, redis: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A first life of vLLM that fills a disk and a Redis."""
    disk = tmp_path_factory.mktemp("disk")
    extra = {"host_bytes": "512MB", "disk": str(disk), "disk_bytes": "1GB", "remote": redis}
    return life(model, extra, ["cold", "host"], linger=5)[0], disk


def test_given_the_connector_then_vllm_answers_as_without_it_cold_and_from_the_host(plain: Any, filled: Any) -> None:
    results, _ = filled
    assert results["cold"] == {"tokens": plain, "cached": [0, 0]}
    assert results["host"] == {"tokens": plain, "cached": LOADED}


def test_given_a_redis_that_another_process_filled_then_prefixes_come_from_it(
    plain: Any, filled: Any, model: str, redis: str
) -> None:
    results, _ = life(model, {"host_bytes": "512MB", "remote": redis}, ["first"])
    assert results["first"] == {"tokens": plain, "cached": LOADED}


def test_given_a_restart_and_one_flipped_byte_on_the_disk_then_the_answers_are_right(
    plain: Any, filled: Any, model: str
) -> None:
    _, disk = filled
    (slab,) = disk.glob("*.kvslab")
    middle = slab.stat().st_size * 3 // 10
    with slab.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 0x40]))
    extra = {"host_bytes": "512MB", "disk": str(disk), "disk_bytes": "1GB"}
    results, said = life(model, extra, ["first", "again"])
    assert results["first"]["tokens"] == plain
    assert results["again"] == {"tokens": plain, "cached": LOADED}
    assert "could not be loaded; the engine computes them again" in said


def test_given_a_connector_that_brings_zeros_then_the_answers_differ(plain: Any, model: str) -> None:
    task = {"connector": "Poisoned", "module": "poisoned"}
    results, _ = life(model, {"host_bytes": "512MB"}, ["cold", "host"], **task)
    assert results["cold"]["tokens"] == plain
    assert results["host"]["cached"] == LOADED
    assert results["host"]["tokens"] != plain
