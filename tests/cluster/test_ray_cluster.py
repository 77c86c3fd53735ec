"""Three engines on two raylets behind `kvpool serve --ray`, with a Redis cluster for all; everything that can die dies.

`make test-cluster` runs it, where Redis is; it takes some minutes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("KVPOOL_CLUSTER" not in os.environ, reason="make test-cluster runs it"),
]
ray = pytest.importorskip("ray", reason="pip install 'kvpool[ray]'")
httpx = pytest.importorskip("httpx")
sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("cluster", "engine", "server", "tiers")]
from machines import ENVIRONMENT, Machine  # noqa: E402
from servers import RedisCluster, server_program  # noqa: E402

from ports import free_ports  # noqa: E402
from traffic import PATIENCE, Traffic, closed_on_error, post, until  # noqa: E402

HEAD, OTHER = 1, 2  # replicas on each machine


class Application:
    """`kvpool serve --ray` on the cluster, and a client of it."""

    def __init__(self, folder: Path, address: str, more: str = "", remote: str = "") -> None:
        port = free_ports(1)[0]
        config = folder / "kvpool.toml"
        config.write_text(
            f'[server]\nport = {port}\n[ray]\naddress = "{address}"\nproxies = "HeadOnly"\nreplicas = {HEAD + OTHER}\n'
            "[ray.front]\nray_actor_options = {num_cpus = 0, resources = {head = 0.01}}\n"
            f"[ray.engines]\nray_actor_options = {{num_cpus = 1}}\nhealth_check_period_s = 2\n{more}"
            f'[[models]]\nname = "tiny"\nmodel = "{folder}"\nmemory = "16MiB"\ndevice = "cpu"\n{remote}'
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvpool", "serve", "--ray", "--config", str(config)],
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        lines = iter(self.process.stderr.readline, "")
        with closed_on_error(self):
            self.url = next(found[1] for line in lines if (found := re.search(r" at (http://127.0.0.1:\d+)/v1", line)))

    def stats(self) -> Any:
        return httpx.get(f"{self.url}/route/stats", timeout=PATIENCE, trust_env=False).json()

    def nodes(self) -> Any:
        return self.stats()["nodes"]

    def ask(self, name: str) -> Callable[[int, list[int]], Any]:
        return lambda at, talk: post(self.url, talk, session_id=f"{name} {at}")

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=PATIENCE)


class Cluster:
    """Two machines, a Redis cluster, a model, and at most one application."""

    def __init__(self, folder: Path) -> None:
        from live import word_tokenizer
        from models import tiny_model

        word_tokenizer().save_pretrained(folder)
        tiny_model("llama").save_pretrained(folder)
        self.folder = folder
        self.redis = RedisCluster(folder / "redis")
        port = free_ports(1)[0]
        head = ["--head", f"--port={port}", "--include-dashboard=false", '--resources={"head": 1}']
        self.address = f"{ray.util.get_node_ip_address()}:{port}"
        self.machines: list[Machine] = []
        with closed_on_error(self):
            self.redis.start()
            self.machines.append(Machine(*head, num_cpus=HEAD))
            self.add_machine()

    def add_machine(self) -> None:
        self.machines.append(Machine(f"--address={self.address}", num_cpus=OTHER))

    def serve(self, more: str = "", remote: bool = False) -> Application:
        return Application(self.folder, self.address, more, f'remote = "{self.redis.url}"\n' if remote else "")

    def close(self) -> None:
        for machine in reversed(self.machines):
            machine.close()
        self.redis.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    server_program()
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def application(cluster: Cluster) -> Iterator[Application]:
    made = cluster.serve(remote=True)
    with closed_on_error(made):
        until(lambda: len(made.nodes()) == HEAD + OTHER, "all replicas are known")
    yield made
    made.close()


def check_answers(cluster: Cluster, traffic: Traffic) -> None:
    """Greedy answers are those of an engine that nothing ever happened to."""
    from kvpool.engine import Engine, SamplingParams

    with Engine(str(cluster.folder), device="cpu", kv_bytes=16 << 20) as engine:
        params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
        wanted = engine.generate([list(talk) for talk in traffic.said], params)
    assert [each.text for each in wanted] == list(traffic.said.values())
    assert any(traffic.said.values())


def recover(application: Application, traffic: Traffic, name: str) -> float:
    """The share of hits after everybody has found a new place."""
    traffic.turn(application.ask(name))
    traffic.got = traffic.ideal = 0
    for _ in range(3):
        traffic.turn(application.ask(name))
    assert all(node["num_requests"] == 0 for node in application.nodes().values())
    return traffic.share


def test_given_conversations_when_routed_by_prefix_then_hits_are_near_one_infinite_cache_and_above_rays_own_choice(
    cluster: Cluster,
) -> None:
    shares = {}
    for name, more in (("Ray's own", "request_router_config = {}\n"), ("by prefix", "")):
        application = cluster.serve(more)
        try:
            traffic = Traffic(1)
            for _ in range(6):
                traffic.turn(application.ask(name))
            shares[name] = traffic.share
            check_answers(cluster, traffic)
        finally:
            application.close()
    print(json.dumps(shares))
    assert shares["by prefix"] >= 0.95
    assert shares["Ray's own"] < 0.9


def kill_replica(cluster: Cluster, application: Application) -> None:
    os.kill(next(iter(application.nodes().values()))["pid"], signal.SIGKILL)


def kill_machine(cluster: Cluster, application: Application) -> None:
    raylet = cluster.machines[-1].raylet()
    assert raylet is not None
    os.kill(raylet, signal.SIGKILL)


def kill_redis_master(cluster: Cluster, application: Application) -> None:
    until(lambda: int(cluster.redis.nodes[1].ask("DBSIZE")[1:]) > 0, "it holds blocks")
    cluster.redis.nodes[1].kill()


@pytest.mark.parametrize("kill", [kill_redis_master, kill_replica, kill_machine])
def test_given_traffic_when_something_is_killed_then_no_answer_is_wrong_none_hangs_and_hits_recover(
    cluster: Cluster, application: Application, kill: Callable[[Cluster, Application], None]
) -> None:
    name = kill.__name__
    before = set(application.nodes())
    traffic = Traffic(len(name))
    for _ in range(3):
        traffic.turn(application.ask(name))
    with ThreadPoolExecutor(3) as threads:
        long = {"stream": True, "max_tokens": 100}
        streams = [threads.submit(post, application.url, talk, **long) for talk in traffic.talks[:6]]
        turning = threads.submit(traffic.turn, application.ask(name))
        kill(cluster, application)
        turning.result(PATIENCE)
        texts = [stream.result(PATIENCE).text for stream in streams]
    assert all(("[DONE]" in text) != ("node_lost" in text) for text in texts), [text[-200:] for text in texts]
    if kill is kill_machine:
        until(lambda: len(application.nodes()) == HEAD, "its replicas vanish")
        cluster.add_machine()
    if kill is not kill_redis_master:
        until(lambda: set(application.nodes()) != before and len(application.nodes()) == HEAD + OTHER, "new ones come")
    share = recover(application, traffic, name)
    print(json.dumps({name: share, "streams that were told": sum("node_lost" in text for text in texts)}))
    assert share >= 0.95
    check_answers(cluster, traffic)


REDEPLOY = """
import sys, ray
from ray import serve
from kvpool.server.on_ray.ray_application import build
ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
serve.run(build({"config": sys.argv[2]}), name="kvpool")
"""


def test_given_traffic_when_another_configuration_is_deployed_then_replicas_are_replaced_and_no_request_fails(
    cluster: Cluster, application: Application
) -> None:
    before = set(application.nodes())
    config = cluster.folder / "kvpool.toml"
    config.write_text(config.read_text().replace('"16MiB"', '"20MiB"'))
    talks = Traffic(9).talks[:6]
    said = [post(application.url, talk).json()["choices"][0]["text"] for talk in talks]
    command = [sys.executable, "-c", REDEPLOY, cluster.address, str(config)]
    with subprocess.Popen(command, env=ENVIRONMENT) as deploying, ThreadPoolExecutor(3) as threads:
        while deploying.poll() is None:
            answers = list(threads.map(lambda talk: post(application.url, talk), talks))
            assert [answer.status_code for answer in answers] == [200] * len(talks), [answer.text for answer in answers]
            assert [answer.json()["choices"][0]["text"] for answer in answers] == said
        assert deploying.returncode == 0
    until(lambda: len(application.nodes()) == HEAD + OTHER, "all replicas are known")
    assert not before & set(application.nodes())
