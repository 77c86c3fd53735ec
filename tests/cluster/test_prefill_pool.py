"""Prompts that one server computes and another one answers, behind the proxy: whatever fails, there is an answer."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.cluster.proxy.backends import Backend
from kvpool.errors import ConfigError

pytest.importorskip("zmq", reason="pip install 'kvpool[cluster]'")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from live_app import Live  # noqa: E402

SIZE = 4
PROMPT = list(range(100, 123))  # five blocks and three tokens
SECONDS = 30.0


class FakeServer:
    """Either end of a hand-over; a test says how it behaves. It notes who asked it for what."""

    def __init__(self) -> None:
        from starlette.applications import Starlette
        from starlette.routing import Route

        self.behaviour = "answers"
        self.calls: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        self.loaded = threading.Event()
        paths = {"/ready": self.ready, "/v1/prefill": self.prefill, "/v1/cache/prefetch": self.prefetch}
        paths["/v1/completions"] = self.complete
        routes = [Route(path, call, methods=["GET", "POST"]) for path, call in paths.items()]
        self.live = Live(Starlette(routes=routes), "critical")

    async def ready(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse({}, status_code=503 if self.behaviour == "drains" else 200)

    async def prefill(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        self.calls.append(("prefill", await request.json()))
        self.keys.append(request.headers.get("authorization"))
        if self.behaviour == "refuses":
            return JSONResponse({"error": {}}, status_code=400)
        return StreamingResponse(self.progress(), media_type="text/event-stream")

    async def progress(self) -> AsyncIterator[bytes]:
        def event(kind: str, stored: int) -> bytes:
            return b"data: " + json.dumps({"object": kind, "stored_tokens": stored}).encode() + b"\n\n"

        yield event("prefill.progress", 0)
        if self.behaviour == "is silent":
            await asyncio.sleep(SECONDS)
        yield event("prefill.progress", 8)
        if self.behaviour == "dies":
            raise ConnectionError
        if self.behaviour == "ends early":
            return
        if self.behaviour == "talks nonsense":
            yield b"data: {\n\n"
        if self.behaviour == "fails":
            yield b'data: {"error": {"message": "no"}}\n\n'
        yield event("prefill", 8 if self.behaviour == "is cut" else 20)
        yield b"data: [DONE]\n\n"

    async def prefetch(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        body = await request.json()
        self.calls.append(("prefetch", len(body["prompt"])))
        found = 0 if self.behaviour == "loads nothing" else len(body["prompt"]) - 1
        return JSONResponse({"cached_tokens": found})

    async def complete(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        self.calls.append(("complete", len((await request.json())["prompt"])))
        return JSONResponse({"choices": []})

    def close(self) -> None:
        self.live.stop(waits=False)


class Split:
    """A prefill server, a decode server, and a proxy."""

    def __init__(self) -> None:
        from kvpool.cluster.proxy.app import Proxy, create_proxy_app

        self.prefill, self.decode = FakeServer(), FakeServer()
        self.proxy = Proxy(
            [Backend.parse(self.decode.live.url)],
            block_size=SIZE,
            health_seconds=0.02,
            prefill=[Backend.parse(self.prefill.live.url)],
            prefill_tokens=16,
            prefill_silence=0.5,
        )
        self.live = Live(create_proxy_app(self.proxy), "critical")
        self.client = httpx.Client(base_url=self.live.url, timeout=60, trust_env=False)
        self.until_ready()

    def until_ready(self) -> None:
        routers = (self.proxy.router, self.proxy.prefill.router)
        until(lambda: all(load.is_ready for router in routers for load in router.nodes.values()))

    @property
    def told(self) -> Any:
        """What the pool counted, which Prometheus is told, too."""
        told = self.client.get("/route/stats").json()["prefill"]
        text = self.client.get("/metrics").text
        for name in ("handed_over", "blocks", "tokens", "direct"):
            assert f"kvpool_route_prefill_{name}_total {told[name]}\n" in text
        for reason, count in told["fallbacks"].items():
            assert f'kvpool_route_prefill_fallbacks_total{{reason="{reason}"}} {count}\n' in text
        assert f'kvpool_route_node_ready{{node="{self.prefill.live.url}",pool="prefill"}} ' in text
        return told

    def ask(self, prompt: list[int], **body: Any) -> Any:
        headers = {"authorization": "Bearer k"}
        return self.client.post("/v1/completions", json={"prompt": prompt, **body}, headers=headers)

    def close(self) -> None:
        self.client.close()
        self.live.stop(waits=False)
        for each in (self.prefill, self.decode):
            each.close()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def shared_split() -> Iterator[Split]:
    made = Split()
    yield made
    made.close()


@pytest.fixture
def split(shared_split: Split) -> Iterator[Split]:
    yield shared_split
    for server in (shared_split.prefill, shared_split.decode):
        server.behaviour = "answers"
        server.calls.clear()
        server.keys.clear()
    shared_split.until_ready()
    nodes = {**shared_split.proxy.router.nodes, **shared_split.proxy.prefill.router.nodes}
    assert all(load.num_requests == load.num_waiting_tokens == 0 for load in nodes.values())


def fresh(number: int) -> list[int]:
    """A prompt that the proxy has not seen."""
    return [number * 1000 + token for token in PROMPT]


def test_given_a_long_prompt_then_it_is_computed_by_one_server_loaded_chunk_by_chunk_and_answered_by_the_other(
    split: Split,
) -> None:
    before = split.told
    answer = split.ask(fresh(1), model="m", cache_salt="s")
    assert answer.headers["x-kvpool-node"] == split.decode.live.url
    ((kind, body),) = split.prefill.calls
    assert kind == "prefill"
    assert body == {"model": "m", "cache_salt": "s", "prompt": fresh(1), "stream": True}
    assert split.prefill.keys == ["Bearer k"]
    assert split.decode.calls[-2:] == [("prefetch", 20), ("complete", 23)]
    after = split.told
    assert (after["handed_over"] - before["handed_over"], after["blocks"] - before["blocks"]) == (1, 5)


def test_given_a_short_prompt_or_one_that_is_cached_then_it_goes_straight_to_the_decode_server(split: Split) -> None:
    split.ask(fresh(2))
    before = split.told["direct"]
    split.prefill.calls.clear()
    split.ask(fresh(3)[:12])
    split.ask(fresh(2))  # which was just sent there
    assert split.prefill.calls == []
    assert split.told["direct"] - before == 2


@pytest.mark.parametrize(
    ("number", "behaviour", "reason"),
    [
        (10, "refuses", "refused"),
        (11, "fails", "refused"),
        (12, "talks nonsense", "refused"),
        (13, "dies", "lost"),
        (14, "ends early", "lost"),
        (15, "is silent", "lost"),
        (16, "is cut", "cut"),
    ],
)
def test_given_a_prefill_server_that_fails_then_the_decode_server_answers_with_what_came(
    split: Split, number: int, behaviour: str, reason: str
) -> None:
    before = split.told["fallbacks"].get(reason, 0)
    split.prefill.behaviour = behaviour
    assert split.ask(fresh(number)).status_code == 200
    assert split.decode.calls[-1] == ("complete", 23)
    came = [] if behaviour in ("refuses", "is silent") else [("prefetch", 8)]
    assert split.decode.calls[:-1] == came
    assert split.told["fallbacks"][reason] == before + 1


def test_given_no_prefill_server_then_the_decode_server_answers(split: Split) -> None:
    split.prefill.behaviour = "drains"
    until(lambda: not any(load.is_ready for load in split.proxy.prefill.router.nodes.values()))
    assert split.ask(fresh(20)).status_code == 200
    assert split.told["fallbacks"]["no_node"] == 1
    assert split.prefill.calls == []


def test_given_a_decode_server_that_cannot_load_then_it_gets_the_request_nevertheless(split: Split) -> None:
    split.decode.behaviour = "loads nothing"
    assert split.ask(fresh(21)).status_code == 200
    assert split.told["fallbacks"]["not_loaded"] == 1


def test_given_one_server_for_both_then_it_is_refused() -> None:
    from kvpool.cluster.proxy.app import Proxy

    both = [Backend.parse("http://127.0.0.1:1")]
    with pytest.raises(ConfigError, match="twice"):
        Proxy(both, prefill=both)


@pytest.mark.slow
def test_given_two_servers_of_a_model_then_the_answer_is_that_of_one_and_the_second_computes_no_chunk_of_the_prompt() -> (
    None
):
    pytest.importorskip("torch")
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")  # of the helpers beside the server's tests
    sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("engine", "server")]
    from live import word_tokenizer
    from models import tiny_model

    from kvpool.cluster.proxy.app import Proxy, create_proxy_app
    from kvpool.engine import Engine
    from kvpool.scheduling import SchedulerConfig
    from kvpool.server import ServedModel, create_app
    from kvpool.tiers import MemoryTier

    model, store, chunk = tiny_model("llama"), MemoryTier(2**26), 32
    limits = SchedulerConfig(max_tokens_per_step=chunk, max_sequences=8)
    settings: dict[str, Any] = {"kv_blocks": 128, "block_size": SIZE, "tiers": [store], "scheduler": limits}
    engines = [Engine(model, tokenizer=word_tokenizer(), device="cpu", **settings) for _ in range(2)]
    servers = [Live(create_app([ServedModel("tiny", engine)]), "critical") for engine in engines]
    prefill, decode = ([Backend.parse(server.url)] for server in servers)
    proxy = Proxy(decode, block_size=SIZE, health_seconds=0.02, prefill=prefill, prefill_tokens=64)
    front = Live(create_proxy_app(proxy), "critical")
    try:
        until(
            lambda: all(
                load.is_ready for router in (proxy.router, proxy.prefill.router) for load in router.nodes.values()
            )
        )
        for seed in range(3):
            prompt = [(number * 7 + seed) % 150 for number in range(110 + seed)]
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            before = engines[1].stats().scheduler.prefill_tokens
            answer = httpx.post(f"{front.url}/v1/completions", json=body, timeout=60, trust_env=False).json()
            assert engines[1].stats().scheduler.prefill_tokens - before < SIZE + 1 < chunk
            one = httpx.post(f"{servers[0].url}/v1/completions", json=body, timeout=60, trust_env=False).json()
            assert answer["choices"][0]["text"] == one["choices"][0]["text"] != ""
        assert proxy.prefill.described()["handed_over"] == 3
    finally:
        for live in (front, *servers):
            live.stop(waits=False)
        for engine in engines:
            engine.close()
