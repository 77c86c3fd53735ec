"""`kvpool serve --ray` as a process: two engines on a Ray of their own, one of which is killed.

It runs where Ray is installed: `make test-ray` puts it into an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="pip install 'kvpool[ray]'")
httpx = pytest.importorskip("httpx")
sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("cluster", "engine", "server")]
from kvpool.errors import ConfigError  # noqa: E402
from traffic import PATIENCE, closed_on_error, post, until  # noqa: E402

pytestmark = pytest.mark.slow


class OnRay:
    """The process and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.app = f"kvpool-{os.getpid()}"
        config = folder / "kvpool.toml"
        config.write_text(
            f'[server]\nport = 0\n[ray]\naddress = "local"\nname = "{self.app}"\nreplicas = 2\n'
            "[ray.engines]\nray_actor_options = {num_cpus = 0.1}\nhealth_check_period_s = 1\n"
            f'[[models]]\nname = "tiny"\nmodel = "{folder}"\nmemory = "16MiB"\ndevice = "cpu"\n'
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvpool", "serve", "--ray", "--config", str(config)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        lines = iter(self.process.stderr.readline, "")
        with closed_on_error(self):
            self.url = next(found[1] for line in lines if (found := re.search(r" at (http://127.0.0.1:\d+)/v1", line)))
            until(lambda: len(self.nodes()) == 2, "both replicas are known")

    def stats(self) -> Any:
        return httpx.get(f"{self.url}/route/stats", timeout=PATIENCE, trust_env=False).json()

    def nodes(self) -> Any:
        return self.stats()["nodes"]

    def chat(self, text: str, **options: Any) -> Any:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        return httpx.post(
            f"{self.url}/v1/chat/completions", json={**body, **options}, timeout=PATIENCE, trust_env=False
        )

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(PATIENCE) == 0
        finally:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    from live import word_tokenizer
    from models import tiny_model

    folder = tmp_path_factory.mktemp("model")
    word_tokenizer().save_pretrained(folder)
    tiny_model("llama").save_pretrained(folder)
    made = OnRay(folder)
    yield made
    made.close()


def words(start: int, count: int = 60) -> str:
    return " ".join(f"w{start + at % 40}" for at in range(count))


def test_given_two_replicas_when_a_conversation_goes_on_then_its_streams_come_from_where_it_is_cached(
    on_ray: OnRay,
) -> None:
    nodes = set()
    for start in (1, 41, 81):
        first = on_ray.chat(words(start))
        assert first.status_code == 200, first.text
        node = first.headers["x-kvpool-node"]
        nodes.add(node)
        until(lambda node=node: on_ray.nodes()[node]["events"]["num_applied"] > 0, "events come")
        again = on_ray.chat(f"{words(start)} w1 w2", stream=True, stream_options={"include_usage": True})
        assert again.headers["x-kvpool-node"] == node
        events = [line.removeprefix("data: ") for line in again.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        usage = json.loads(events[-2])["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 48
    assert len(nodes) == 2  # new prompts spread


def test_given_other_paths_then_they_are_answered_as_on_one_machine(on_ray: OnRay) -> None:
    client = httpx.Client(base_url=on_ray.url, timeout=PATIENCE, trust_env=False)
    with client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
        assert client.get("/nowhere").status_code == 404
        refused = client.post("/v1/completions", json={"model": "other", "prompt": [1]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert len(refused.headers.get_list("x-request-id")) == 1
        assert client.post("/v1/completions", content=b"{").status_code == 400


def test_given_engines_with_keys_then_the_front_tells_its_numbers_to_those_who_have_one() -> None:
    from starlette.requests import Request

    from kvpool.server.on_ray.engine_replica import Head, scope_for
    from kvpool.server.on_ray.ray_front import Front

    class Answer:
        def __init__(self, scope: dict[str, Any], content: bytes, ticket: Any) -> None:
            self.status = 200 if (b"authorization", b"Bearer right") in scope["headers"] else 401
            ticket.describe = lambda: {"nodes": {}}

        async def __anext__(self) -> Head:
            return Head(self.status, [], b"{}")

    engines = SimpleNamespace(answer=SimpleNamespace(remote=Answer))
    front = Front(SimpleNamespace(options=lambda stream: engines), 5.0, 1000)
    for key, status in ((b"Bearer right", 200), (b"Bearer wrong", 401)):
        request = Request(scope_for("GET", "/route/stats", b"", [(b"authorization", key)]))
        assert asyncio.run(front(request)).status_code == status


def test_given_a_client_that_hangs_up_then_its_request_ends_on_the_replica(on_ray: OnRay) -> None:
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{on_ray.url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False) as stream:
        next(stream.iter_lines())
        node = stream.headers["x-kvpool-node"]

    def is_idle() -> bool:
        answer = httpx.get(f"{on_ray.url}/ready", timeout=PATIENCE, trust_env=False)
        return bool(answer.headers["x-kvpool-node"] == node and answer.json()["under_way"] == 0)

    until(is_idle, "the replica is idle")
    until(lambda: all(each["num_requests"] == 0 for each in on_ray.nodes().values()), "nothing stays open")


def test_given_a_configuration_then_rays_own_tools_get_the_application_with_rays_own_options(tmp_path: Path) -> None:
    from kvpool.server.on_ray.ray_application import build

    config = tmp_path / "kvpool.toml"
    config.write_text(
        "[ray.engines]\nautoscaling_config = {min_replicas = 2, max_replicas = 5}\nmax_surge_percent = 25\n"
        '[ray.routing]\nhot_requests = 7\n[[models]]\nname = "m"\nmodel = "somewhere"\n'
    )
    front = build({"config": str(config)})._bound_deployment
    engines = front.init_args[0]._bound_deployment
    described = engines._deployment_config
    assert (described.autoscaling_config.min_replicas, described.autoscaling_config.max_replicas) == (2, 5)
    assert described.max_surge_percent == 25
    assert described.request_router_config.request_router_kwargs["hot_requests"] == 7
    for wrong in ("num_replica = 2", "max_surge_percent = 200"):
        config.write_text(f'[ray.engines]\n{wrong}\n[[models]]\nname = "m"\nmodel = "somewhere"\n')
        with pytest.raises(ConfigError, match=r"\[ray.engines\] has options that Ray Serve refuses"):
            build({"config": str(config)})
    with pytest.raises(ConfigError, match="no argument 'configuration'"):
        build({"configuration": str(config)})


def test_given_a_replica_that_dies_then_requests_go_elsewhere_streams_say_so_and_a_new_one_comes(on_ray: OnRay) -> None:
    prompt = [7 + at % 90 for at in range(64)]
    said = post(on_ray.url, prompt, session_id="s")  # a session stays where it is, although others are idle
    node = said.headers["x-kvpool-node"]
    until(lambda: on_ray.stats()["index"]["num_blocks"] >= 4, "events come")
    pid = on_ray.nodes()[node]["pid"]
    with ThreadPoolExecutor(4) as threads:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
            "session_id": "s",
        }
        with httpx.stream(
            "POST", f"{on_ray.url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGSTOP)
            assert stream.headers["x-kvpool-node"] == node
            asked = [threads.submit(post, on_ray.url, prompt, session_id="s") for _ in range(3)]
            until(lambda: sum(node["num_requests"] for node in on_ray.nodes().values()) >= 4, "all have a replica")
            os.kill(pid, signal.SIGKILL)
            rest = "\n".join(lines)
        assert "node_lost" in rest
        assert "[DONE]" not in rest
        for answer in (each.result(PATIENCE) for each in asked):
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-kvpool-node"] != node
            assert answer.json()["choices"][0]["text"] == said.json()["choices"][0]["text"]
    assert node not in on_ray.nodes()
    until(lambda: len(on_ray.nodes()) == 2, "Ray starts another one")
    until(lambda: all(each["num_requests"] == 0 for each in on_ray.nodes().values()), "nothing stays open")
