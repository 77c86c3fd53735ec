"""`kvpool serve --ray --tensor-parallel 2` on a cluster of two machines with one CPU each: a rank of the replica on each.

It runs where Ray is installed: `make test-ray` puts it into an environment of its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="pip install 'kvpool[ray]'")
httpx = pytest.importorskip("httpx")
sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("cluster", "engine", "server")]
from machines import ENVIRONMENT, Machine  # noqa: E402

from ports import free_ports  # noqa: E402
from traffic import PATIENCE, closed_on_error, post, until  # noqa: E402

pytestmark = pytest.mark.slow
PROMPT = [7 + at % 90 for at in range(64)]


class Replica:
    """Two machines, and one replica whose ranks do not fit on one of them."""

    def __init__(self, folder: Path) -> None:
        port = free_ports(1)[0]
        self.address = f"{ray.util.get_node_ip_address()}:{port}"
        self.config = folder / "kvpool.toml"
        self.machines: list[Machine] = []
        self.process: Any = None
        with closed_on_error(self):
            head = ["--head", f"--port={port}", "--include-dashboard=false", '--resources={"head": 1}']
            self.machines.append(Machine(*head, num_cpus=1))
            self.add_machine()
            until(self.is_served, "the second machine is known")

    def add_machine(self) -> None:
        self.machines.append(Machine(f"--address={self.address}", num_cpus=1))

    def serve(self, size: int) -> Any:
        """Starts the command with so many ranks."""
        folder = self.config.parent
        self.config.write_text(
            f'[server]\nport = {free_ports(1)[0]}\n[ray]\naddress = "{self.address}"\nproxies = "HeadOnly"\n'
            "[ray.front]\nray_actor_options = {num_cpus = 0, resources = {head = 0.01}}\n"
            "[ray.engines]\nhealth_check_period_s = 1\n"
            f'[[models]]\nname = "tiny"\nmodel = "{folder}"\nmemory = "16MiB"\ndevice = "cpu"\ndisk = "{folder}/disk"\n'
            f"tensor_parallel = {size}\n"
        )
        return subprocess.Popen(
            [sys.executable, "-m", "kvpool", "serve", "--ray", "--config", str(self.config)],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )

    def is_served(self) -> bool:
        """Starts the command; False if it says that it knows one machine yet."""
        self.process = self.serve(2)
        for line in iter(self.process.stderr.readline, ""):
            if found := re.search(r" at (http://127.0.0.1:\d+)/v1", line):
                self.url = found[1]
                return True
            assert "needs 2 CPU in the cluster, which has 1" in line or "starting" in line, line
        return False

    def pid(self) -> int:
        """The process of rank 0; 0 while there is none."""
        nodes = httpx.get(f"{self.url}/route/stats", timeout=PATIENCE, trust_env=False).json()["nodes"]
        return next((node["pid"] for node in nodes.values()), 0)

    def ranks(self) -> list[int]:
        return [pid for machine in self.machines for pid in machine.ranks()]

    def close(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.communicate(timeout=PATIENCE)
        for machine in reversed(self.machines):
            machine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from live import save_model

    made = tmp_path_factory.mktemp("model")
    save_model(made)
    return made


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[Replica]:
    made = Replica(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    from kvpool.engine import Engine, SamplingParams

    with Engine(str(folder), device="cpu", kv_bytes=16 << 20) as engine:
        return engine.generate([PROMPT], SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True))[0].text


def answer(replica: Replica) -> tuple[str, int]:
    """What it says, and how many tokens of the prompt it had."""
    said = post(replica.url, PROMPT)
    assert said.status_code == 200, said.text
    return said.json()["choices"][0]["text"], said.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_given_a_replica_on_two_machines_when_a_rank_or_a_machine_is_lost_then_ray_starts_it_again_and_it_is_warm(
    replica: Replica, expected: str
) -> None:
    assert answer(replica) == (expected, 0)
    (rank,) = replica.ranks()
    first = replica.pid()
    until(lambda: len(list((replica.config.parent / "disk").glob("*/rank-*"))) == 2, "both ranks have a folder")
    until(lambda: answer(replica) == (expected, len(PROMPT) - 1), "the prompt is cached")
    os.kill(rank, signal.SIGKILL)
    until(lambda: replica.pid() not in (0, first), "Ray starts the replica again")
    assert answer(replica) == (expected, len(PROMPT) - 1)  # from disk
    second = replica.pid()
    raylet = replica.machines[1].raylet()
    assert raylet is not None
    os.kill(raylet, signal.SIGKILL)
    replica.machines.pop().close()
    replica.add_machine()
    until(lambda: replica.pid() not in (0, second), "Ray starts the replica again")
    assert answer(replica) == (expected, len(PROMPT) - 1)


def test_given_more_ranks_than_cpus_of_the_cluster_then_it_is_refused_before_a_model_is_read(replica: Replica) -> None:
    said = replica.serve(3).communicate(timeout=PATIENCE)[1]
    assert "tensor_parallel=3 needs 3 CPU in the cluster, which has 2; use fewer ranks" in said
