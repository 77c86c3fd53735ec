"""A prefill server, a decode server and Redis, each a process, behind `kvpool route`; each of them is killed.

`make test-cluster` runs it; it takes a minute or two.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("KVPOOL_CLUSTER" not in os.environ, reason="make test-cluster runs it"),
]
httpx = pytest.importorskip("httpx")
pytest.importorskip("glide_sync")
pytest.importorskip("openai")  # of the helpers beside the server's tests
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("cluster", "engine", "tiers", "server")]

CHUNK = 256  # of a server on a CPU
BLOCK = 16
PATIENCE = 600


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, f"{what}: not in {PATIENCE} seconds"
        time.sleep(0.05)


class RealSplit:
    """The processes, and a client of the proxy. `alone` is a server without tiers: what it says is right."""

    def __init__(self, folder: Path) -> None:
        from live import word_tokenizer
        from models import tiny_model
        from real_cluster import RealCluster
        from servers import RedisServer

        from ports import free_ports
        from traffic import answers, closed_on_error

        tiny_model("llama", max_position_embeddings=4096).save_pretrained(folder / "model")
        word_tokenizer().save_pretrained(folder / "model")
        self.redis = RedisServer(folder / "redis")
        ports = free_ports(4)
        self.prefill_url, self.decode_url, self.alone_url, self.url = (f"http://127.0.0.1:{port}" for port in ports)
        serve = ("serve", "--model", str(folder / "model"), "--name", "tiny", "--memory", "64MiB")
        self.serve = [(*serve, f"--port={ports[0]}", "--remote", self.redis.url)]
        self.start = RealCluster.start
        roles = ("--prefill", self.prefill_url, "--decode", self.decode_url, "--health-seconds", "0.2")
        others = [(*serve, f"--port={ports[1]}", "--remote", self.redis.url), (*serve, f"--port={ports[2]}")]
        self.processes: list[subprocess.Popen[bytes]] = []
        with closed_on_error(self):
            self.redis.start()
            for command in (*self.serve, *others, ("route", *roles, f"--port={ports[3]}")):
                self.processes.append(self.start(*command))
            for url in (self.prefill_url, self.decode_url, self.alone_url):
                until(lambda url=url: answers(f"{url}/ready"), f"{url} answers")
            until(lambda: answers(f"{self.url}/route/stats"), "the proxy answers")
            until(self.all_ready, "all are ready")

    def all_ready(self) -> bool:
        stats = self.stats()
        return all(node["is_ready"] for part in (stats, stats["prefill"]) for node in part["nodes"].values())

    def is_prefilling(self) -> bool:
        return any(node["num_requests"] for node in self.stats()["prefill"]["nodes"].values())

    def stats(self) -> Any:
        return httpx.get(f"{self.url}/route/stats", timeout=30, trust_env=False).json()

    def computed(self) -> int:
        """Tokens of prompts that the decode server computed."""
        text = httpx.get(f"{self.decode_url}/metrics", timeout=30, trust_env=False).text
        (line,) = [line for line in text.splitlines() if line.startswith("kvpool_scheduler_prefill_tokens_total{")]
        return int(float(line.split()[-1]))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.redis.kill()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSplit]:
    made = RealSplit(tmp_path_factory.mktemp("split"))
    yield made
    made.close()


def prompts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 150) for _ in range(length + at)] for at in range(count)]


def post(url: str, prompt: list[int]) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_right(split: RealSplit, asked: list[list[int]], answers: list[Any]) -> None:
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer["choices"][0]["text"] == post(split.alone_url, prompt)["choices"][0]["text"] != ""


def test_given_long_prompts_then_the_decode_server_computes_less_than_a_block_of_each(split: RealSplit) -> None:
    asked = prompts(1, 6, 1500)
    before = split.computed()
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda prompt: post(split.url, prompt), asked))
    computed = split.computed() - before
    print(json.dumps({"computed by the decode server": computed, "of": sum(map(len, asked))}))
    assert computed <= BLOCK * len(asked) < CHUNK
    assert split.stats()["prefill"]["handed_over"] == len(asked)
    assert_right(split, asked, answers)


def test_given_a_prefill_server_that_is_killed_in_the_middle_of_prompts_then_every_answer_is_right(
    split: RealSplit,
) -> None:
    asked = prompts(2, 6, 3000)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(post, split.url, prompt) for prompt in asked]
        before = split.stats()["prefill"]["blocks"]
        until(split.is_prefilling, "prompts are there")
        split.processes[0].send_signal(signal.SIGKILL)
        answers = [each.result(PATIENCE) for each in waiting]
    split.processes[0].wait()
    stats = split.stats()["prefill"]
    print(json.dumps({"blocks that came before": stats["blocks"] - before, "fallbacks": stats["fallbacks"]}))
    assert sum(stats["fallbacks"].values()) >= 1
    assert_right(split, asked, answers)
    split.processes[0] = split.start(*split.serve[0])
    until(split.all_ready, "it is back")
    (again,) = prompts(3, 1, 1500)
    handed = stats["handed_over"]
    assert_right(split, [again], [post(split.url, again)])
    assert split.stats()["prefill"]["handed_over"] == handed + 1


def test_given_a_store_that_is_killed_then_every_answer_is_right_and_none_hangs(split: RealSplit) -> None:
    asked = prompts(4, 6, 1500)
    killed = threading.Event()

    def ask(prompt: list[int]) -> Any:
        if prompt is asked[2]:
            split.redis.kill()
            killed.set()
        return post(split.url, prompt)

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(ask, asked))
    assert killed.is_set()
    print(json.dumps(split.stats()["prefill"]["fallbacks"]))
    assert_right(split, asked, answers)
    for part in (split.stats(), split.stats()["prefill"]):
        assert all(node["num_requests"] == 0 for node in part["nodes"].values())
