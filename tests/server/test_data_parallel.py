"""`kvpool serve --data-parallel 2` as real processes: one address, page and set of metrics; engines that die and restart."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from kvpool.cli import main
from kvpool.engine.options import EngineOptions
from kvpool.errors import ConfigError
from kvpool.server import Access, data_parallel
from kvpool.server.data_parallel import EngineFront, engine_places
from kvpool.server.engine_process import REFUSED, EngineProcess, order_of
from kvpool.server.limits import Limits
from kvpool.server.serve_settings import ModelSettings

SRC = str(Path(__file__).resolve().parents[2] / "src")
PATIENCE = 900  # seconds that a test waits for what must come, on a machine with much else to do
ADMIN, TENANT = "sk-root", "sk-acme"
PROMPT = list(range(20, 68))  # three blocks


def until(is_so: Callable[[], Any]) -> None:
    """Waits for something that must come: processes that load torch and a model on a busy machine."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Whether there is such a process; one that has ended and was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Engines:
    """The process in front, and a client of it."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "kvpool", "serve", str(model), "--port", "0", "--name", "tiny"]
        options = ["--device", "cpu", "--memory", "4MiB", "--data-parallel", "2"]
        keys = {"KVPOOL_API_KEYS": f"root:{ADMIN}:admin,acme:{TENANT}"}
        environment = {**os.environ, "PYTHONPATH": SRC, "OMP_NUM_THREADS": "1", **keys}
        self.process = subprocess.Popen([*command, *options], env=environment, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        try:
            until(lambda: any(" (API)" in line for line in self.said) or self.process.poll() is not None)
            found = re.search(r" at (http://127.0.0.1:\d+)/v1", "".join(self.said))
            assert found is not None, self.said
            self.url = found[1]
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(iter(self.process.stderr.readline, ""))

    def ask(self, path: str, body: Any = None, key: str = ADMIN, method: str = "") -> httpx.Response:
        method = method or ("GET" if body is None else "POST")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=PATIENCE, trust_env=False)

    def complete(self, prompt: list[int], **options: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **options}
        return self.ask("/v1/completions", body, TENANT)

    def nodes(self) -> list[dict[str, Any]]:
        return list(self.ask("/route/stats").json()["nodes"].values())

    def pids(self) -> list[int]:
        return [node["pid"] for node in self.nodes()]

    def all_ready(self) -> bool:
        return all(node["state"] == "ready" for node in self.nodes())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from live import save_model

    directory = tmp_path_factory.mktemp("model")
    save_model(directory)
    return directory


@pytest.mark.slow
def test_given_a_process_in_front_that_is_killed_then_its_engines_end_by_themselves(model: Path) -> None:
    engines = Engines(model)
    try:
        assert engines.ask("/health", key="").json() == {"status": "ok"}  # at once
        refused = engines.ask("/ready", key="")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert "engine 1 is starting" in refused.json()["error"]["message"]
        until(lambda: all(engines.pids()))
        pids = engines.pids()
        assert all(map(lives, pids))
    finally:
        engines.close()
    until(lambda: not any(map(lives, pids)))


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[Engines]:
    made = Engines(model)
    until(made.all_ready)
    yield made
    made.close()


@pytest.mark.slow
def test_given_two_engines_then_prompts_go_where_they_are_cached_and_all_are_asked_where_all_must_answer(
    engines: Engines,
) -> None:
    first, again = engines.complete(PROMPT), engines.complete([*PROMPT, 5])
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert first.headers["x-kvpool-node"] == again.headers["x-kvpool-node"]
    found = engines.ask("/v1/cache/query", {"prompt": PROMPT}, TENANT)
    assert (found.json()["cached_tokens"], found.headers["x-kvpool-node"]) == (47, first.headers["x-kvpool-node"])
    prompts = [[number] * 40 for number in range(3, 15)]
    with ThreadPoolExecutor(6) as threads:
        nodes = {each.headers["x-kvpool-node"] for each in threads.map(engines.complete, prompts)}
    assert len(nodes) == 2
    assert engines.ask("/ready", key="").json()["engines"] == {"engine 0": "ready", "engine 1": "ready"}

    pins = [engines.ask("/v1/cache/pin", {"prompt": prompt}, TENANT).json()["id"] for prompt in prompts]
    assert sorted(pin["id"] for pin in engines.ask("/v1/cache/pin", key=TENANT).json()["pins"]) == sorted(pins)
    for pin in pins:
        assert engines.ask(f"/v1/cache/pin/{pin}", key=TENANT, method="DELETE").json()["pinned_tokens"] == 0
    assert engines.ask(f"/v1/cache/pin/{pins[0]}", key=TENANT, method="DELETE").status_code == 404
    assert list(engines.ask("/v1/cache/stats").json()) == ["engine 0", "engine 1"]

    assert engines.ask("/v1/cache/invalidate", {}, TENANT).status_code == 400
    removed = engines.ask("/v1/cache/invalidate", {"everything": True}, TENANT).json()["removed_blocks"]
    assert removed >= 3 + 12 * 2
    assert all(
        engines.ask("/v1/cache/query", {"prompt": each}, TENANT).json()["cached_tokens"] == 0 for each in prompts
    )


@pytest.mark.slow
def test_given_two_engines_then_there_is_one_set_of_metrics_and_one_page_for_administrators(engines: Engines) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(engines.ask("/metrics").text)}
    for name in ("kvpool_sequences", "kvpool_hit_tokens", "process_resident_memory_bytes", "kvpool_engine_ready"):
        assert {sample.labels["engine"] for sample in families[name].samples} == {"0", "1"}, name
    assert [sample.value for sample in families["kvpool_engine_ready"].samples] == [1, 1]
    assert "kvpool cluster" in engines.ask("/", key="").text
    assert [node["name"] for node in engines.nodes()] == ["engine 0", "engine 1"]
    for path in ("/metrics", "/route/stats", "/view/stream"):
        assert [engines.ask(path, key=key).status_code for key in ("", TENANT)] == [401, 403]
    assert engines.ask("/route/restart", {}, TENANT).status_code == 403
    plain = httpx.post(f"{engines.url}/route/restart", headers={"x-api-key": ADMIN}, trust_env=False)
    assert plain.status_code == 400  # a page of another site can send no JSON


@pytest.mark.slow
def test_given_traffic_when_an_engine_is_killed_and_then_all_restart_one_by_one_then_no_request_fails(
    engines: Engines,
) -> None:
    before = engines.pids()
    told = f"engine 1 (pid {before[1]}) was killed by signal 9: it starts again in 1 s"
    is_over = threading.Event()

    def ask(seed: int) -> list[int]:
        statuses = []
        while not is_over.wait(0.1):  # the engines need the processor to start
            statuses.append(engines.complete([seed, *PROMPT]).status_code)
        return statuses

    def restarted() -> bool:
        nodes = engines.nodes()
        assert any(node["state"] == "ready" for node in nodes)
        return all(node["state"] == "ready" and node["pid"] not in before for node in nodes)

    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask, seed) for seed in (3, 4)]
        try:
            os.kill(before[1], signal.SIGKILL)
            until(lambda: any(told in line for line in engines.said))
            assert engines.ask("/route/restart", {}).status_code == 202  # which waits for the killed one
            assert engines.ask("/route/restart", {}).status_code == 409
            until(restarted)
            until(lambda: any("all engines have been restarted" in line for line in engines.said))
        finally:
            is_over.set()
        statuses = [status for each in asking for status in each.result(PATIENCE)]
    assert set(statuses) == {200}
    assert [node["num_starts"] for node in engines.nodes()] == [2, 3]
    assert not any(map(lives, before))


@pytest.mark.slow
def test_given_a_stream_when_the_server_is_told_to_end_then_it_is_finished_and_no_process_is_left(
    engines: Engines,
) -> None:
    pids = engines.pids()
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {TENANT}"}
    with httpx.stream(
        "POST", f"{engines.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        engines.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert engines.process.wait(PATIENCE) == 0
    assert not any(map(lives, pids))


# --- without a model -------------------------------------------------------------------------------------------------


def dying(status: int) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; sys.exit({status})")


def test_given_an_engine_that_dies_at_every_start_then_it_is_given_up_after_three(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_parallel, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(EngineProcess, "command", dying(3))
    order = order_of(0, 9, "ipc://nowhere", (EngineOptions(), None, None, {}, ()))
    front = EngineFront([EngineProcess(order, "cpu", {})], Access(), Limits())

    async def run() -> None:
        async with front.running():
            while not front.is_given_up:
                await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR, "kvpool"):
        asyncio.run(asyncio.wait_for(run(), PATIENCE))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(") ")[2] for line in lines] == [
        "ended with status 3: it starts again in 0.01 s",
        "ended with status 3: it starts again in 0.02 s",
        "ended with status 3 at each of 3 starts before it was ready: it is given up",
    ]


def test_given_settings_that_every_engine_refuses_then_each_is_started_once_and_the_server_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EngineProcess, "command", dying(REFUSED))
    with caplog.at_level(logging.ERROR, "kvpool"):
        assert main(["serve", "nowhere", "--port", "0", "--device", "cpu", "--data-parallel", "2"]) == 2
    given_up = "ended with status 78 before it was ready: it is given up"
    assert [given_up in record.getMessage() for record in caplog.records] == [True, True]
    assert "none of the 2 engines could be started; the lines above say why" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--record", "trace.jsonl"], "--record is for one engine"),
        (["--publish", "tcp://127.0.0.1:5557"], "--publish is for one engine"),
        (["--ray"], "--data-parallel is for one machine"),
    ],
)
def test_given_what_several_engines_cannot_share_then_it_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "nowhere", "--device", "cpu", "--data-parallel", "2", *options]) == 2
    assert words in capsys.readouterr().err


def test_given_devices_then_each_engine_has_its_own_and_too_few_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def places(count: int, **options: Any) -> Any:
        return engine_places(ModelSettings("m", EngineOptions(**options), None, 8), count)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert (
        places(2, device="cpu", memory="1GiB")
        == [("cpu with 4 threads", {"memory": "1GiB"}, {"OMP_NUM_THREADS": "4"})] * 2
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [place[0] for place in places(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [place[2]["CUDA_VISIBLE_DEVICES"] for place in places(2)] == ["4", "5"]
    with pytest.raises(ConfigError, match="--data-parallel 5 needs 5 GPUs, but torch finds 4"):
        places(5)
    with pytest.raises(ConfigError, match="cuda:1 is for all 2 engines: give --memory"):
        places(2, device="cuda:1")
    assert json.dumps(places(2, device="cuda:1", memory="1GiB")[0]) == '["cuda:1", {}, {}]'
