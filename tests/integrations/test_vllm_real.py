"""A real vLLM with a real model behind its OpenAI server, and eight clients at once. `make test-vllm`.

It runs in a process of the Python that `KVPOOL_VLLM_PYTHON` names; without that the tests are skipped. What small random
models can show is in test_vllm_lives.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_vllm_lives import environment

from ports import free_ports

PATIENCE = 600.0
WORDS = ["river", "stone", "lamp", "green", "seven", "quiet", "forest", "paper", "cloud", "winter", "engine", "coffee"]
CLIENTS = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("KVPOOL_VLLM_PYTHON"), reason="needs vLLM: run make test-vllm"),
]


def prompt(number: int) -> str:
    """Some 250 tokens that differ from their first words on."""
    return " ".join(
        WORDS[(i * i + number * 7 + i // 5) % 12] + (f" {i}" if i % 8 == number else "") for i in range(150)
    )


@pytest.fixture(scope="module")
def model() -> str:
    pytest.importorskip("transformers")
    from kvpool.errors import ModelLoadError
    from kvpool.model.loading import default_model_directory

    try:
        return str(default_model_directory())
    except ModelLoadError as error:
        pytest.skip(str(error))


class Server:
    """vLLM's OpenAI server with the connector."""

    def __init__(self, model: str, folder: Path) -> None:
        self.port = free_ports(1)[0]
        transfer = {
            "kv_connector": "KVPoolConnector",
            "kv_connector_module_path": "kvpool.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host_bytes": "256MB", "disk": str(folder / "disk"), "disk_bytes": "256MB"},
        }
        options = ["--model", model, "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port)]
        options += ["--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-model-len", "1024"]
        options += ["--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details"]
        command = [os.environ["KVPOOL_VLLM_PYTHON"], "-m", "vllm.entrypoints.launchers.api_server.entry", *options]
        self.log = (folder / "server.log").open("w+")
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env={**environment(), "VLLM_SERVER_DEV_MODE": "1"}
        )

    def wait(self) -> None:
        """Until it answers."""
        due = time.monotonic() + PATIENCE
        while time.monotonic() < due:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, Path(self.log.name).read_text()[-4000:]
                time.sleep(0.5)
        pytest.fail("the server did not start")

    def get(self, path: str, body: Any = None, *, post: bool = False) -> str:
        """The text behind a path."""
        data = json.dumps(body).encode() if body is not None else b"" if post else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text: str = answer.read().decode()
            return text

    def ask(self, number: int) -> tuple[str, int]:
        """What the model says, and how many tokens of the prompt were cached."""
        body = {"model": "m", "prompt": prompt(number), "max_tokens": 12, "temperature": 0}
        answer = json.loads(self.get("/v1/completions", body))
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def metric(self, name: str) -> float:
        """A counter at `/metrics`."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(model, tmp_path_factory.mktemp("server"))
    server.wait()
    yield server
    server.process.terminate()
    server.process.wait(60)
    server.log.close()


def test_given_eight_clients_at_once_then_each_gets_its_answer_from_the_host(server: Server) -> None:
    cold = [server.ask(number) for number in range(CLIENTS)]
    assert len({text for text, _ in cold}) == CLIENTS
    server.get("/reset_prefix_cache", post=True)
    with ThreadPoolExecutor(CLIENTS) as clients:
        warm = list(clients.map(server.ask, range(CLIENTS)))
    assert [text for text, _ in warm] == [text for text, _ in cold]
    assert all(cached >= 192 for _, cached in warm)
    assert server.metric("vllm:kvpool_hits_total") == CLIENTS
    assert server.metric("vllm:kvpool_from_host_total") > 0
